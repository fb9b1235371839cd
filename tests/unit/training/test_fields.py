"""Training on fields of every kind: settings reach the model, and a stop in the middle changes nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError, StateError
from shardflow.fields.types.pictures import Image, Slices
from shardflow.fields.types.pixel_field import PixelField
from shardflow.fields.types.text import Text
from shardflow.format import Dataset
from shardflow.format.entities import EntityRules
from shardflow.format.facts.making import attach_facts
from shardflow.loading import open_view, select
from shardflow.reports.entity_views import build_view
from shardflow.sampling import ImageBucket, TileRule
from shardflow.training.checkpoint.files import Checkpoint, read_checkpoint
from shardflow.training.checkpoint.tensors import PiecewiseTensors
from shardflow.training.config import BatchConfig, TrainConfig
from shardflow.training.data import batch_spec, run_fields
from shardflow.training.distributed import StopRequest
from shardflow.training.metrics import StepMetrics, read_metrics
from shardflow.training.model_fields import num_places
from shardflow.training.run import TrainSummary, check_bindings, open_task, train
from tests.entity_datasets import make_entity_dataset
from tests.factories import make_dataset
from tests.sweeps import sampled
from tests.tiny_runs import TinyInput, tiny_config

SIZED = "fields.image={type='slices',sizes=[[4,8,8,1],[2,24,16,3]],sampling='random',missing='pad'}"
WAYS = {
    "sizes": (SIZED,),
    "tiles": (
        "fields.image.tiles=4", "image.rows=8", "image.columns=8", "fields.image.size=[8,8]",
        "fields.image.num_slices=2", "fields.image.padding=longest", "batch.packed=true",
    ),
    "frames": (
        "fields.image.padding=longest", "fields.image.fit=letterbox", "image.rows=24",
        "fields.image.size=[24,16]", 'fields.image.windows=["lung","bone"]',
    ),
    "turned": (
        "augment.rotate_deg=10", "augment.zoom=0.2", "augment.shift=0.1", "fields.image.size=[24,20]",
        'image.standardize=["CT"]', "fields.image.dtype=int16",
    ),
    "native": ("fields.image={type='slices',num_slices=2,sampling='slab',missing='pad'}",),
    "images": (
        "fields.image={type='image',num_images=2,size=[16,16],missing='pad'}", "batch.packed=true",
        "fields.study={type='json',member='study.json'}",
        "data.transform=tests.unit.training.test_fields:brighter",
    ),
}  # fmt: skip


def brighter(sample: dict[str, Any]) -> dict[str, Any]:
    """Be a transform that makes a new array."""
    return {**sample, "image": sample["image"] + 20}


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


@pytest.fixture(scope="module")
def plain_loss(tiny: TinyInput, tmp_path_factory: pytest.TempPathFactory) -> float | None:
    """What a run on the fields as they are without settings comes to."""
    return run(tiny, tmp_path_factory.mktemp("plain")).loss


@pytest.mark.parametrize("way", sampled(sorted(WAYS), {"images", "native", "tiles", "turned"}))
def test_a_run_on_fields_of_every_kind_goes_on_in_every_bit(
    tiny: TinyInput, plain_loss: float | None, tmp_path: Path, way: str
) -> None:
    whole = run(tiny, tmp_path / "whole", *WAYS[way])
    stopped = run(tiny, tmp_path / "parts", *WAYS[way], stop_after=2)
    resumed = run(tiny, tmp_path / "parts", *WAYS[way])
    assert (whole.global_step, stopped.global_step, resumed.global_step) == (4, 2, 4)
    assert resumed.evaluation_loss == whole.evaluation_loss
    mine, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert plain_loss != whole.loss  # the setting reached the model
    assert all(line["data_wait_s"] >= 0 for line in read_metrics(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("augment.zoom=0.1", "augment.zoom"),
        ("fields.image.fit=letterbox", "fields.image.fit"),
        (SIZED, "fields.image.series"),  # the first setting that differs
        ("fields.image.tiles=2", "fields.image.tiles"),
        ("fields.image.augment_pool=0.5", "fields.image.augment_pool"),
        ("batch.packed=true", "batch.packed"),
    ],
)
def test_other_images_are_another_run(tiny: TinyInput, tmp_path: Path, setting: str, name: str) -> None:
    usual, other = (
        open_task(tiny_config(tiny, tmp_path, *settings)).bindings() for settings in ((), (setting,))
    )
    nothing = PiecewiseTensors([])
    bindings = json.loads(json.dumps(usual))
    checkpoint = Checkpoint(name="old", state={"bindings": bindings}, model=nothing, optimizer=nothing)
    check_bindings(checkpoint, usual)
    with pytest.raises(StateError, match=re.escape(name)):
        check_bindings(checkpoint, other)


def test_another_field_beside_is_other_content(tiny: TinyInput, tmp_path: Path) -> None:
    run(tiny, tmp_path, "run.max_steps=1")
    with pytest.raises(StateError, match="content_id"):
        run(tiny, tmp_path, "fields.study={type='json',member='study.json'}")


def test_other_content_may_be_accepted_if_there_are_as_many_images(tiny: TinyInput, tmp_path: Path) -> None:
    run(tiny, tmp_path, "run.max_steps=1")
    changed = ("run.accept_content_change=true", "fields.image.sampling=random")
    assert run(tiny, tmp_path, *changed, "run.max_steps=2").resumed_from == "step-00000001"
    with pytest.raises(StateError, match=r"places of fields\.image is 2"):
        run(tiny, tmp_path, *changed, "fields.image.num_slices=2")


def bare(tiny: TinyInput, tmp_path: Path, *overrides: str) -> TrainConfig:
    """Settings without [fields]."""
    text = (tiny.folder / "train.toml").read_text(encoding="utf-8")
    first, last = text.index("[fields.image]"), text.index("[image]")
    path = tiny.folder / "bare.toml"
    path.write_text(text[:first] + text[last:], encoding="utf-8")
    return load_config(TrainConfig, path, [f"run.output={tmp_path / 'bare'}", *overrides])


def test_without_fields_a_run_takes_the_primary_series_and_the_report(
    tiny: TinyInput, tmp_path: Path
) -> None:
    """Whatever was trained on before there were fields is trained on as it was."""
    settings = ("run.max_steps=2", "batch.micro_batch_size=2", 'data.eval_split="val"')
    train(bare(tiny, tmp_path, *settings))
    train(tiny_config(tiny, tmp_path / "named", *settings, "fields.image.num_slices=8"))
    mine, other = weights(tmp_path / "bare"), weights(tmp_path / "named")
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_default_fields_follow_from_the_samples(tiny: TinyInput, tmp_path: Path) -> None:
    config = bare(tiny, tmp_path)
    make_dataset(tmp_path / "texts", num_samples=4, slices=0)
    studies = make_entity_dataset(tmp_path / "studies")
    attach_facts(studies)
    build_view(studies, EntityRules())
    found = {}
    for name, dataset in (
        ("texts", Dataset.open(tmp_path / "texts")),
        ("studies", Dataset.open(tmp_path / "studies")),
        ("findings", open_view(studies, "entity")),
    ):
        selection = select(dataset, "train")
        found[name] = run_fields(config.fields, config.image, tiny.tokenizer, selection)
    assert found["texts"] == {"report": Text(missing="pad")}
    assert found["studies"] == {"image": config.image_field, "report": Text(missing="pad")}
    assert found["findings"]["image"] == dataclasses.replace(config.image_field, series=None)


def test_a_corpus_of_texts_is_trained_on(tiny: TinyInput, tmp_path: Path) -> None:
    make_dataset(tmp_path / "texts", num_samples=37, slices=0, splits={"train": 26, "val": 11})
    summary = train(
        bare(tiny, tmp_path, f"data.dataset={tmp_path / 'texts'}", "run.max_steps=2", "data.eval_split=val")
    )
    assert summary.outcome == "finished"
    assert summary.evaluation_loss is not None


def test_an_evaluation_draws_nothing(tiny: TinyInput, tmp_path: Path) -> None:
    config = tiny_config(
        tiny, tmp_path, "fields.image.sampling=random", 'fields.image.windows=["lung","bone"]',
        "fields.image.augment_pool=0.5",
    )  # fmt: skip
    selection = select(Dataset.open(tiny.dataset), "val")
    for is_evaluation, expected in (
        (True, ("even", ("lung",), 0.0)),
        (False, ("random", ("lung", "bone"), 0.5)),
    ):
        fields = run_fields(
            config.fields, config.image, tiny.tokenizer, selection, is_evaluation=is_evaluation
        )
        image = fields["image"]
        assert isinstance(image, Slices)
        assert (image.sampling, image.windows, image.augment_pool) == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (Slices(num_slices=5), 5),
        (Slices(num_slices=5, tiles=4, size=(8, 8)), 25),
        (Slices(num_slices=5, tiles=1, size=(8, 8)), 5),
        (Slices(sizes=((9, 8, 8, 1), (2, 16, 16, 1))), 9),
        (Image(num_images=2, size=(8, 8)), 2),
    ],
)
def test_the_model_has_positions_for_every_place(field: PixelField, expected: int) -> None:
    assert num_places(field) == expected


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "image.num_slices=8",
            r"image\.num_slices has moved .* num_slices in \[fields\.image\], with type = \"slices\"",
        ),
        ("image.slice_choice=random", r"sampling in \[fields\.image\]"),
        ("image.transfer_rows=9", r"size = \[ROWS, COLUMNS\] in \[fields\.image\]"),
        ("image.standardise=[]", r"write image\.standardize"),
        ("image.transform=a:b", r"write data\.transform"),
        ("text.tokens=stored", r"\[fields\.report\] with type = \"tokens\""),
        ("fields={image={type='slices',num_slices=2}}", r"no field 'report'.*add \[fields\.report\]"),
        (
            "fields.image={type='text'}",
            r"fields\.image must be of type \"slices\" or \"image\".*got \"text\"",
        ),
        (
            "fields.report={type='json',member='study.json'}",
            r"fields\.report must be of type \"text\" or \"tokens\"",
        ),
        ("fields.image={type='slices',size=[8,8]}", r"fields\.image\.num_slices must be a number"),
        (
            "fields.image={type='image',num_images='all',size=[8,8]}",
            r"fields\.image\.num_images must be a number",
        ),
        ("fields.image={type='image'}", r"fields\.image\.size must be set"),
        ("fields.image.channels=3", r"fields\.image\.channels must be 1"),
        ("fields.info={type='text'}", "reserved"),
        ("fields.image.num_slice=3", "nearest known key is 'num_slices'"),
    ],
)
def test_fields_that_the_job_cannot_take_are_refused(
    tiny: TinyInput, tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tiny, tmp_path, override)


def test_settings_with_fields_are_written_and_read_again(tiny: TinyInput, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(dump_config(config := tiny_config(tiny, tmp_path / "run", SIZED)))
    assert load_config(TrainConfig, tmp_path / "run.toml") == config


def test_sides_are_exchanged_only_where_words_are_known(tiny: TinyInput, tmp_path: Path) -> None:
    tokens = f"fields.report={{type='tokens',tokenizer='{'0' * 64}',missing='pad'}}"
    with pytest.raises(ConfigError, match=r"augment\.mirror .* add \[fields\.words\]"):
        tiny_config(tiny, tmp_path, tokens, "augment.mirror=0.5")
    config = tiny_config(tiny, tmp_path, tokens, "augment.mirror=0.5", "fields.words={type='text'}")
    with pytest.raises(ConfigError, match=r"digest of text\.tokenizer"):
        train(config)


def test_stored_variants_are_not_turned_once_more(tiny: TinyInput, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="augmented twice"):
        tiny_config(tiny, tmp_path, "fields.image.augment_pool=0.5", "augment.zoom=0.1")


def test_what_images_cost_is_part_of_the_budget(tiny: TinyInput, tmp_path: Path) -> None:
    selection = select(Dataset.open(tiny.dataset), "train")
    batch = BatchConfig(max_tokens=60, image_tokens_per_slice=3, micro_batches_per_step=2, packed=True)

    def cost(*image: str) -> object:
        config = tiny_config(tiny, tmp_path, *image)
        budget = batch_spec(batch, config.image_field, config.text, selection, config.fields).budget
        assert budget is not None
        assert not budget.padded
        assert budget.cost.tokens_per_sample == 3
        return budget.cost.buckets or budget.cost.tiles or budget.cost.max_slices

    assert cost() == 3
    assert cost("fields.image.tiles=4") == TileRule(rows=16, columns=16, max_tiles=4)
    assert cost("fields.image={type='image',num_images=2,size=[16,16]}") == 2
    assert cost(SIZED) == (
        ImageBucket(max_slices=4, tokens_per_slice=3),
        ImageBucket(weight=3, max_slices=2, tokens_per_slice=3),
    )
