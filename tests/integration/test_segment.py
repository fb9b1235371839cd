"""Segmentation: Dice improves, is exact over ranks and windows, and a killed run resumes to equal weights."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import shardflow as sf
from shardflow.cli.main import main
from shardflow.config import load_config
from shardflow.errors import ConfigError, StateError
from shardflow.format import Dataset
from shardflow.training.config import ModelConfig, TrainConfig
from shardflow.training.metrics import read_metrics
from shardflow.training.model_fields import TaskConfig, VolumeAugmentConfig
from shardflow.training.run import TrainSummary, train
from shardflow.training.tasks.segment import SegmentTask
from tests.distributed.launcher import job
from tests.integration.loader_support import flip_bit, locate
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

_SETTINGS = """
[data]
dataset = "dataset"
eval_split = "val"
[task]
type = "segment"
[fields.image]
type = "volume"
roi_size = [8, 16, 16]
center = "foreground"
labels = ["lesion", "vessel"]
windows = [[0, 400]]
[fields.mask]
type = "mask"
like = "image"
labels = ["lesion", "vessel"]
merge = "stack"
[batch]
micro_batch_size = 2
micro_batches_per_step = 2
[optimizer]
learning_rate = 2e-2
warmup_steps = 0
[loader]
num_threads = 1
wait_timeout_s = 50
[run]
output = "run"
seed = 3
device = "cpu"
tensorboard = false
checkpoint_every_steps = 2
"""
_MONAI = "model.arguments={spatial_dims=3, in_channels=1, out_channels=3, channels=[8, 16], strides=[2]}"
SHAPE = (10, 24, 20)
UNANNOTATED = "ct08"
WITHOUT = 3
"""Number of a study that lacks the second series, where there is one."""


def truth_of(number: int) -> tuple[NDArray[np.int16], dict[str, NDArray[np.uint8]]]:
    """Return a volume with a bright ball and a darker rod, and their masks."""
    random = np.random.default_rng(number)
    places = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), -1)
    middle = random.uniform((3, 6, 6), (6, 17, 13))
    ball = np.linalg.norm((places - middle) * (1.5, 1, 1), axis=-1) < 4.5
    rod = (np.abs(places[..., 1] - random.integers(2, 20)) < 2) & ~ball
    voxels = random.normal(-100, 20, SHAPE) + 200 * ball + 100 * rod
    return voxels.astype("int16"), {"lesion": ball.astype("uint8"), "vessel": rod.astype("uint8")}


def write(folder: Path, *, num_studies: int = 15, has_second: bool = False) -> Path:
    affine = [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.5, 0], [0, 0, 0, 1]]
    series = {"kind": "volume", "modality": "CT", "unit": "HU", "affine_lps": affine, "slice_spacing_mm": 1.5}
    with sf.ShardWriter(folder / "dataset", splits={"train": 2, "val": 1}) as writer:
        for number in range(num_studies):
            voxels, masks = truth_of(number)
            rois: list[dict[str, Any]] = []
            members: dict[str, Any] = {}
            for roi, (label, mask) in enumerate(masks.items()):
                shown = [index for index in range(len(mask)) if mask[index].any()]
                members |= {f"s000.m{roi:03d}.i{index:04d}.b2nd": mask[index] for index in shown}
                slices = [{"slice": index, "box_px": [0, 0, 20, 24], "fraction": 0.1} for index in shown]
                rois.append(
                    {
                        "roi": roi,
                        "series": 0,
                        "label": label,
                        "code": None,
                        "kind": "segmentation",
                        "source": "nifti",
                        "slices": slices,
                        "mask": f"s000.m{roi:03d}",
                        "polygons": None,
                        "flags": [],
                    }
                )
            annotations = {"annotations.json": {"format_version": 1, "rois": rois, "dangling": []}, **members}
            key = f"ct{number:02d}"
            more: dict[str, Any] = {}
            if has_second and number != WITHOUT:
                coarse = [[2.0, 0, 0, 0.5], [0, 2.0, 0, 0.5], [0, 0, 1.5, 0], [0, 0, 0, 1]]
                more["s001.b2nd"] = voxels[:, ::2, ::2]
                members = {"affine_lps": coarse, "modality": "MR", "unit": "raw"}
                more["study.json"] = {"series": [series, {**series, **members}]}
            writer.write(
                {
                    "__key__": key,
                    "s000.b2nd": voxels,
                    "study.json": {"series": [series]},
                    **({} if key == UNANNOTATED else annotations),
                    **more,
                }
            )
    for option in ("--facts", "--voxels"):
        assert main(["attach", str(folder / "dataset"), option]) == 0
    (folder / "train.toml").write_text(_SETTINGS)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("segment"))


def run(folder: Path, output: Path, *overrides: str) -> TrainSummary:
    return train(load_config(TrainConfig, folder / "train.toml", [f"run.output={output}", *overrides]))


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of 12 steps in this process, with evaluations after the second and at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a process that torchrun started, whose sums are compared
    try:
        run(folder, folder / "whole", "run.max_steps=12", "run.evaluate_every_steps=2")
    finally:
        torch.set_num_threads(before)
    return folder / "whole"


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    newest = max((output / "checkpoints").glob("step-*"))
    found: dict[str, torch.Tensor] = {}
    for file in newest.glob("model*.safetensors"):
        found |= load_file(file)
    return found


def test_dice_improves_and_equals_that_of_whole_volumes_by_monai(folder: Path, whole: Path) -> None:
    from monai.inferers import sliding_window_inference

    from shardflow.training.models.unet import UNet3d

    lines = read_metrics(whole, "evaluation")
    assert lines[-1]["dice"] > lines[0]["dice"] + 0.3
    model = UNet3d(1, 3)
    model.load_state_dict(weights_of(whole))
    model.eval()
    dataset = Dataset.open(folder / "dataset")
    dice: dict[str, list[float]] = {"lesion": [], "vessel": []}
    for row in dataset.splits["val"]:
        key = dataset.samples.sample_key(row)
        if key == UNANNOTATED:
            continue
        voxels, masks = truth_of(int(key[2:]))
        image = torch.from_numpy(np.clip((voxels + 200.0) / 400, 0, 1) * 2 - 1).float()[None, None]
        with torch.no_grad():
            scores = sliding_window_inference(image, (8, 16, 16), 1, model, overlap=0.5, mode="gaussian")
        predicted = scores[0].argmax(dim=0).numpy()
        for number, (name, mask) in enumerate(masks.items(), start=1):
            both, each = ((predicted == number) & (mask > 0)).sum(), (predicted == number).sum() + mask.sum()
            dice[name].append(2 * both / each)
    assert lines[-1]["num_volumes"] == 3
    assert lines[-1]["num_unannotated_volumes"] == 1
    assert lines[-1]["num_incomplete_volumes"] == 0
    for name, values in dice.items():
        assert lines[-1][f"dice/{name}"] == pytest.approx(np.mean(values), abs=1e-3)
    assert lines[-1]["dice"] == pytest.approx(np.mean([np.mean(one) for one in dice.values()]), abs=1e-3)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_to_equal_weights_on_another_number_of_processes(
    folder: Path, whole: Path, tmp_path: Path
) -> None:
    """The sum of a step's two micro-batches has one order of additions, on one process and on two."""
    output = tmp_path / "killed"
    arguments = [f"--config={folder / 'train.toml'}"]
    for one in (f"run.output={output}", "run.max_steps=12", "run.evaluate_every_steps=2"):
        arguments += ["--set", one]
    with job(tmp_path, "shardflow.training", arguments, num_ranks=2, is_forked=True) as running:
        deadline = time.monotonic() + 300
        while not (
            list((output / "checkpoints").glob("step-*/state.json")) and read_metrics(output, "evaluation")
        ):
            assert running.process.poll() is None, running.wait(1).text
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.kill()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        summary = run(folder, output, "run.max_steps=12", "run.evaluate_every_steps=2")
    finally:
        torch.set_num_threads(before)
    assert (summary.outcome, summary.global_step) == ("finished", 12)
    assert summary.resumed_from is not None
    resumed, uninterrupted = weights_of(output), weights_of(whole)
    assert resumed.keys() == uninterrupted.keys()
    assert all(torch.equal(one, uninterrupted[name]) for name, one in resumed.items())
    expected = {line["global_step"]: line for line in read_metrics(whole, "evaluation")}
    lines = read_metrics(output, "evaluation")  # of two ranks until it was killed, then of one
    assert {line["global_step"] for line in lines} == set(expected)
    for line in lines:
        names = {name for name in line if name.startswith(("dice", "num_"))}
        assert {name: line[name] for name in names} == {
            name: expected[line["global_step"]][name] for name in names
        }


def test_augmented_runs_resume_to_equal_weights(folder: Path, tmp_path: Path) -> None:
    """Regions in stored voxels are brought to millimeters, turned and bent on the device, once."""
    settings = (
        "run.max_steps=6",
        "run.evaluate_every_steps=3",
        "fields.image.spacing_mm=[1.5, 1.2, 1.2]",
        "augment_volumes.preset=strong",
        "augment_volumes.settings={rotate_prob=1.0, elastic_prob=1.0, noise_prob=1.0}",
    )
    plain = run(folder, tmp_path / "plain", *settings[:3])
    whole = run(folder, tmp_path / "whole", *settings)
    assert (whole.outcome, whole.global_step) == ("finished", 6)
    assert whole.evaluation_loss != plain.evaluation_loss
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    newest = max((tmp_path / "again" / "checkpoints").glob("step-*"))
    shutil.rmtree(newest)
    again = run(folder, tmp_path / "again", *settings)
    assert again.resumed_from is not None
    first, second = weights_of(tmp_path / "whole"), weights_of(tmp_path / "again")
    assert all(torch.equal(one, second[name]) for name, one in first.items())
    other = weights_of(tmp_path / "plain")
    assert not all(torch.equal(one, other[name]) for name, one in first.items())
    with pytest.raises(StateError, match=r"augment_volumes\.preset is 'nnunet', but checkpoint"):
        run(folder, tmp_path / "again", *settings, "augment_volumes.preset=nnunet")


def test_series_of_a_study_are_channels(tmp_path: Path) -> None:
    write(tmp_path, num_studies=6, has_second=True)
    settings = (
        "fields.image.series=modality == 'CT'",
        "fields.mr={type='volume', like='image', series=\"modality == 'MR'\", missing='pad'}",
        "run.max_steps=4",
        "augment_volumes.preset=geometry",
    )
    summary = run(tmp_path, tmp_path / "run", *settings)
    assert summary.outcome == "finished"
    assert summary.evaluation_scores["num_volumes"]
    whole = weights_of(tmp_path / "run")
    assert {one.shape[1] for one in whole.values() if one.ndim == 5} >= {2}
    shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(max((tmp_path / "half" / "checkpoints").glob("step-*")))
    again = run(tmp_path, tmp_path / "half", *settings)
    assert (again.resumed_from, again.evaluation_scores) == ("step-00000002", summary.evaluation_scores)
    resumed = weights_of(tmp_path / "half")
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items())
    with pytest.raises(StateError, match="content_id"):
        run(tmp_path, tmp_path / "half", settings[0], *settings[2:], "run.max_steps=6")


def test_a_channel_that_a_study_lacks_is_the_least_value() -> None:
    image = sf.Volume(roi_size=(1, 1, 2), windows=[(0, 400)])
    mask = sf.Mask(like="image", labels=["a"])
    volumes = {"image": image, "mr": sf.Volume(like="image", missing="pad")}
    task = SegmentTask(TaskConfig(type="segment"), ModelConfig(), volumes, mask, VolumeAugmentConfig())
    tensors = {
        "image": torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 1, 2).repeat(2, 1, 1, 1, 1),
        "mr": torch.tensor([[50.0, 100.0], [0.0, 0.0]]).reshape(2, 1, 1, 1, 2),
        "image_range": torch.zeros(2, 2),
        "mr_range": torch.tensor([[50.0, 100.0], [0.0, 0.0]]),
        "image_mask": torch.ones(2, dtype=torch.uint8),
        "mr_mask": torch.tensor([1, 0], dtype=torch.uint8),
        "mask": torch.zeros(2, 1, 1, 1, 2, dtype=torch.uint8),
        "is_known": torch.ones(2, dtype=torch.bool),
    }
    found = task.prepare(tensors)["image"].flatten(2)
    assert found.tolist() == [[[-1, 1], [-1, 1]], [[-1, 1], [-1, -1]]]


def test_a_volume_with_a_bad_window_is_counted_and_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = Dataset.open(write(tmp_path) / "dataset")
    row = next(row for row in dataset.splits["val"] if dataset.samples.sample_key(row) != UNANNOTATED)
    path, offset, _ = locate(dataset, row, "s000.i0009")
    flip_bit(path, offset + 30)
    summary = run(
        tmp_path, tmp_path / "run", "run.max_steps=1", "loader.max_bad_samples=99", "loader.max_bad_share=1.0"
    )
    scores = summary.evaluation_scores
    assert (scores["num_volumes"], scores["num_incomplete_volumes"]) == (2, 1)
    assert scores["num_unannotated_volumes"] == 1
    (named,) = (one.getMessage() for one in caplog.records if "could not be read and" in one.getMessage())
    assert named.endswith(dataset.samples.sample_key(row))


@pytest.mark.parametrize(
    "settings",
    [
        ("task.labels=multi_label",),
        (
            "model.target=monai.networks.nets:UNet",
            _MONAI,
        ),
        ("fields.image.windows=[]", "fields.image.num_samples=2", "fields.image.spacing_mm=[2, 1.5, 1.5]"),
        ("fields.image.center=random", "fields.image.within=foreground", "augment_volumes.preset=geometry"),
    ],
    ids=["multi_label", "monai", "range", "within"],
)
def test_other_models_labels_and_grids(folder: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    summary = run(folder, tmp_path, "run.max_steps=1", *settings)
    assert summary.outcome == "finished"
    assert summary.evaluation_scores["num_volumes"] == 3
    assert summary.evaluation_loss is not None
    assert 0 < summary.evaluation_loss < 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("fields.index={type='volume', like='image'}",), "fields.index cannot be a channel"),
        (("fields.image={type='volume', like='ct'}",), "the region that the other channels follow"),
        (("fields.mask.like=ct",), 'write like = "image"'),
        (
            ("fields.image={type='volume', roi_size=[8, 8, 8], center='grid'}",),
            "evaluations cut windows of the same roi_size by themselves",
        ),
        (("fields.image.margin=4",), "regions without a margin"),
        (
            ("fields.image={type='volume', roi_size=[8, 8, 8], center='whole'}",),
            "cut windows that .*center = 'whole'",
        ),
        (("fields.image.irregular=resample",), "cut windows that .*irregular = 'resample'"),
        ((f"fields.mask.labels={[f'l{n}' for n in range(256)]}",), "256 labels that exclude each other"),
        (("data.unit=series",), "takes volumes of studies"),
        (("augment_volumes.preset=nnUnet",), "did you mean 'nnunet'"),
        (
            ("augment_volumes.preset=nnunet", "augment_volumes.settings.flip=0.5"),
            "no setting 'flip'; did you mean 'flip_prob'",
        ),
        (("augment_volumes.settings={roi_size=[1, 1, 1]}",), "settings.roi_size follows fields.image"),
        (
            ("augment_volumes.preset=geometry", "fields.image.interpolation=nearest"),
            "interpolation = 'nearest' is resampled by the loader",
        ),
        (
            ("augment_volumes.preset=geometry", "task={target='a:b'}"),
            "has an effect with task.type 'segment' only",
        ),
        (
            ("augment_volumes.preset=geometry", "data.transform=['tests.sample_transforms:same']"),
            "data.transform makes entries of its own",
        ),
        (("task.ignore=[1]",), "task.ignore needs task.type = 'classify'"),
        (("task.labels=binary",), "is 'multi_class' or 'multi_label'"),
        (("augment.zoom=0.1",), "augment has no effect with task.type 'segment'"),
        (
            (
                "model.target=monai.networks.nets:UNet",
                _MONAI.replace("out_channels=3", "out_channels=2"),
            ),
            r"must return logits \(2, 3, 8, 16, 16\) \(the background and each label\), got \(2, 2, 8, 16",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_step(
    folder: Path, tmp_path: Path, settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(folder, tmp_path, *settings)
    assert read_metrics(tmp_path) == []


def test_real_files_of_two_projects_are_learned_from(tmp_path: Path, shared_data: Path) -> None:
    """CT of three and of two slices, with a SEG of dcmqi and an RTSTRUCT of rt-utils that has no label."""
    case = PackCase(tmp_path)
    case.prepare()
    dcmqi, rt = shared_data / "dcmqi_ct_seg_sr" / "segmentations", shared_data / "rt_utils" / "mock_data"
    real = [*(dcmqi / "ct-3slice").iterdir(), dcmqi / "liver.dcm"]
    real += [rt / name for name in ("ct_1.dcm", "ct_2.dcm", "rt.dcm")]
    for number, path in enumerate(real):
        shutil.copy(path, case.dicom / f"{number:03d}")
    assert case.pack("splits={train=1}", "deid.face_risk=flag").status == "packed"
    assert main(["attach", str(case.output), "--voxels"]) == 0
    text = _SETTINGS
    for one, other in {
        '"dataset"': f'"{case.output}"',
        'eval_split = "val"': 'eval_split = "train"',
        "roi_size = [8, 16, 16]": "series = \"modality == 'CT'\"\nroi_size = [4, 48, 48]",
        'labels = ["lesion", "vessel"]\n': "",
        'merge = "stack"\n': "",
    }.items():
        assert one in text
        text = text.replace(one, other)
    (tmp_path / "train.toml").write_text(text)
    few = ("run.max_steps=2", "run.evaluate_every_steps=2", "batch.micro_batch_size=1", "task.overlap=0.0")
    small = (
        "model.target=shardflow.training.models.unet:UNet3d",
        "model.arguments={num_channels=1, num_outputs=2, widths=[4, 8]}",
    )
    summary = run(tmp_path, tmp_path / "run", *few, *small)
    assert summary.evaluation_scores["num_volumes"] == 2
    assert summary.evaluation_scores.keys() >= {"dice", "dice/foreground"}
