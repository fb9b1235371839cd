"""Training on every view: settings reach the model, and a stop in the middle changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardflow.errors import ConfigError, StateError
from shardflow.format import Dataset
from shardflow.loading import ImageView, SizedView, TileView, select
from shardflow.sampling import ImageBucket, TileRule
from shardflow.training.checkpoint.files import Checkpoint, read_checkpoint
from shardflow.training.checkpoint.tensors import PiecewiseTensors
from shardflow.training.config import BatchConfig, ImageConfig
from shardflow.training.data import batch_spec, image_view
from shardflow.training.distributed import StopRequest
from shardflow.training.metrics import StepMetrics, read_metrics
from shardflow.training.run import TrainSummary, check_bindings, model_bindings, train
from shardflow.training.text import ReportTokenizer
from tests.tiny_runs import TinyInput, tiny_config

WAYS = {
    "sizes": ('image.sizes=["4x8x8", "2x24x16*3"]', "image.slice_choice=random"),
    "tiles": (
        "image.max_tiles=4", "image.rows=8", "image.columns=8", "image.num_slices=2", "batch.packed=true",
    ),
    "frames": (
        "image.padding=longest", "image.fit=letterbox", "image.rows=24", 'image.windows=["lung","bone"]',
    ),
    "turned": (
        "augment.rotate_deg=10", "augment.zoom=0.2", "augment.shift=0.1", "image.transfer_rows=24",
        "image.transfer_columns=20", 'image.standardise=["CT"]', "image.dtype=int16",
    ),
}  # fmt: skip


def run(tiny: TinyInput, output: Path, *overrides: str, stop_after: int | None = None) -> TrainSummary:
    stop = StopRequest()

    def ask(metrics: StepMetrics, num_steps: int) -> None:
        if metrics.global_step + 2 == stop_after:
            stop.signal_name = "SIGTERM"

    settings = ("run.max_steps=4", "batch.micro_batch_size=2", 'data.eval_split="val"', *overrides)
    return train(tiny_config(tiny, output, *settings), on_step=ask, stop=stop)


def weights(output: Path) -> dict[str, torch.Tensor]:
    name = (output / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
    return {key: value.clone() for key, value in read_checkpoint(output / "checkpoints" / name).model.items()}


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_run_on_every_view_goes_on_in_every_bit(tiny: TinyInput, tmp_path: Path, way: str) -> None:
    whole = run(tiny, tmp_path / "whole", *WAYS[way])
    stopped = run(tiny, tmp_path / "parts", *WAYS[way], stop_after=2)
    resumed = run(tiny, tmp_path / "parts", *WAYS[way])
    assert (whole.global_step, stopped.global_step, resumed.global_step) == (4, 2, 4)
    assert resumed.evaluation_loss == whole.evaluation_loss
    mine, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    plain = run(tiny, tmp_path / "plain")
    assert plain.loss != whole.loss  # the setting reached the model
    assert all(line["data_wait_s"] >= 0 for line in read_metrics(tmp_path / "whole"))


@pytest.mark.parametrize(
    "setting",
    [
        "augment.zoom=0.1",
        "image.fit=letterbox",
        'image.sizes=["3x16x16"]',
        "image.max_tiles=2",
        "image.augment_pool=0.5",
        "batch.packed=true",
    ],
)
def test_another_view_is_another_run(tiny: TinyInput, tmp_path: Path, setting: str) -> None:
    """Also for a checkpoint that was written before there was such a setting."""
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    usual, other = (
        model_bindings(tiny_config(tiny, tmp_path, *settings), tokenizer) for settings in ((), (setting,))
    )
    name = setting.partition("=")[0]
    for state in (usual, {key: value for key, value in usual.items() if key != name}):
        nothing = PiecewiseTensors([])
        bindings = json.loads(json.dumps(state))
        checkpoint = Checkpoint(name="old", state={"bindings": bindings}, model=nothing, optimizer=nothing)
        check_bindings(checkpoint, usual)
        with pytest.raises(StateError, match=name):
            check_bindings(checkpoint, other)


def test_settings_become_views() -> None:
    sized = image_view(ImageConfig(sizes=("8x32x48", "2x64x64*3"), windows=("lung",), dtype="int16"))
    assert isinstance(sized, SizedView)
    assert (sized.windows, sized.dtype) == (("lung",), "int16")
    assert [(s.num_slices, s.rows, s.columns, s.weight) for s in sized.sizes] == [
        (8, 32, 48, 1),
        (2, 64, 64, 3),
    ]
    tiled = image_view(ImageConfig(rows=32, columns=40, max_tiles=6, num_slices=2), is_evaluation=True)
    assert tiled == TileView(rows=32, columns=40, max_tiles=6, num_slices=2, dtype="float32")
    framed = image_view(ImageConfig(fit="letterbox", padding="longest", transfer_rows=99))
    assert isinstance(framed, ImageView)
    assert (framed.rows, framed.columns, framed.fit, framed.padding) == (99, 64, "letterbox", "longest")
    evaluated = image_view(ImageConfig(windows=("lung", "bone"), slice_choice="random"), is_evaluation=True)
    assert isinstance(evaluated, ImageView)
    assert (evaluated.windows, evaluated.slice_choice) == (("lung",), "even")
    for is_evaluation, share in ((False, 0.5), (True, 0.0)):
        pooled = image_view(ImageConfig(augment_pool=0.5), is_evaluation=is_evaluation)
        assert isinstance(pooled, ImageView)
        assert pooled.augment_pool == share


@pytest.mark.parametrize(
    ("image", "num_places"),
    [
        (ImageConfig(num_slices=5), 5),
        (ImageConfig(num_slices=5, max_tiles=4), 25),
        (ImageConfig(num_slices=5, max_tiles=1), 5),
        (ImageConfig(num_slices=5, sizes=("9x8x8", "2x16x16")), 9),
    ],
)
def test_the_model_has_positions_for_every_place(image: ImageConfig, num_places: int) -> None:
    assert image.num_places == num_places


@pytest.mark.parametrize("size", ["", "8x8", "0x8x8", "8x8x8*0", "8x8x8 ", "axbxc", "8x8x8*"])
def test_a_size_of_another_form_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="sizes"):
        ImageConfig(sizes=(size,))


def test_settings_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="both"):
        ImageConfig(sizes=("1x8x8",), max_tiles=2)
    with pytest.raises(ConfigError, match="leave it out"):
        ImageConfig(max_tiles=2, fit="letterbox")
    for other in ({"max_tiles": 2}, {"sizes": ("1x8x8",)}, {"resolution": "small"}):
        with pytest.raises(ConfigError, match="augment_pool"):
            ImageConfig(augment_pool=0.5, **other)


def test_stored_variants_are_not_turned_once_more(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="augmented twice"):
        tiny_config(tiny, tmp_path, "image.augment_pool=0.5", "augment.zoom=0.1")


def test_what_images_cost_is_part_of_the_budget(tiny: TinyInput, tmp_path: Path) -> None:
    selection = select(Dataset.open(tiny.dataset), "train")
    batch = BatchConfig(max_tokens=60, image_tokens_per_slice=3, micro_batches_per_step=2, packed=True)

    def cost(*image: str) -> object:
        config = tiny_config(tiny, tmp_path, *image)
        budget = batch_spec(batch, config.image, config.text, selection).budget
        assert budget is not None
        assert not budget.padded
        assert budget.cost.tokens_per_sample == 3
        return budget.cost.buckets or budget.cost.tiles or budget.cost.max_slices

    assert cost() == 3
    assert cost("image.max_tiles=4") == TileRule(rows=16, columns=16, max_tiles=4)
    assert cost('image.sizes=["4x8x8","2x16x16*3"]') == (
        ImageBucket(max_slices=4, tokens_per_slice=3),
        ImageBucket(weight=3, max_slices=2, tokens_per_slice=3),
    )
