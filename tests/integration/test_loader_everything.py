"""Fields of every type in one batch: equal on every way there, and a bad member masks its slot alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.format.keys import STUDY_FIELD
from shardflow.format.token_manifest import tokens_folder
from shardflow.loading import Loader
from shardflow.sampling import BatchSpec
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.factories import MadeSample, make_dataset
from tests.field_cases import pixels_of
from tests.integration.loader_support import check_everywhere, flip_bit, frozen, locate, open_loader, slots_of
from tests.integration.test_loader_members import make as make_members
from tests.integration.test_loader_regions import is_annotated, make_annotated

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
PAIR, CT = 12, 5
"""A study of two annotated radiographs with a report and labels, and one of CT."""


def make(number: int, **_: Any) -> MadeSample:
    """Generate study ``number`` of one of two persons, with regions and members of all kinds."""
    members, regions = make_members(number).fields, make_annotated(number)
    study = json.loads(regions.fields[STUDY_FIELD])
    study["patient"], study["dates"] = {"patient_key": "ab"[number // 7] * 8}, {"study_day": number}
    fields = {**members, **regions.fields, STUDY_FIELD: json.dumps(study).encode()}
    return replace(regions, fields=dict(sorted(fields.items())))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_dataset(folder / "data", num_samples=20)
    train_tokenizer(Dataset.open(folder / "data"), "train", 300, folder / "bpe")
    return TextTokenizer(folder / "bpe")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer) -> Dataset:
    folder = tmp_path_factory.mktemp("everything") / "a"
    dataset = Dataset.open(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make))
    attach_facts(dataset)
    tokenize_dataset(dataset, tokenizer)
    return dataset


@pytest.fixture(scope="module")
def fields(tokenizer: TextTokenizer) -> Mapping[str, sf.Field]:
    digest = tokenizer.digest
    return {
        "frontal": sf.Image(series="role == 'frontal'", size=(20, 18), missing="pad"),
        "lateral": sf.Image(series="role == 'lateral'", missing="pad"),
        "ct": sf.Slices(
            series="kind == 'volume'", num_slices=4, size=(9, 12), sampling="random", missing="pad"
        ),
        "views": sf.Image(num_images="all", size=(8, 8), tiles=2, padding="longest", missing="pad"),
        "mask": sf.Mask(like="frontal", labels=["nodule", "mass"], merge="stack"),
        "ct_mask_of_all": sf.Mask(like="ct"),
        "boxes": sf.Boxes(like="lateral", max_boxes=16),
        "report": sf.Text(missing="pad"),
        "tokens": sf.Tokens(tokenizer=digest, max_tokens=12, missing="pad"),
        "flat": sf.Tokens(tokenizer=digest, flat=True, missing="pad"),
        "labels": sf.Json(member="labels.json", missing="pad"),
        "blob": sf.Bytes(member="blob.bin", max_bytes=64),
        "vector": sf.Array(member="vector.npy", shape=(3,), dtype="float32"),
        "count": sf.Column("facts.num_slices"),
        "prior": sf.Image(study="previous", size=(8, 8), missing="pad"),
        "prior_report": sf.Text(study="previous", missing="pad"),
    }


def _loader(dataset: Dataset, fields: Mapping[str, sf.Field], **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def test_a_batch_of_every_type_is_equal_on_every_way_there(
    dataset: Dataset, fields: Mapping[str, sf.Field]
) -> None:
    found = check_everywhere(partial(_loader, dataset, fields), has_workers=True)
    names = {name for batch in found.values() for name in batch}
    assert {*fields} <= names
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                if number % 4 == 0:
                    assert np.array_equal(batch["lateral"][slot], pixels_of(number, 0))
                    assert batch["mask_mask"][slot] == is_annotated(number)
                assert batch["report"][slot] == make(number).fields.get("report.txt", b"").decode()
                assert batch["blob"][slot] == bytes(range(number))


@pytest.mark.parametrize(
    ("number", "member"),
    [
        (PAIR, "s001.i0000"),  # frontal
        (PAIR, "s000.i0000"),  # lateral
        (CT, "s001.i"),
        (PAIR, "annotations.json"),
        (PAIR, "s001.m"),  # a stored mask
        (PAIR, "report.txt"),
        (PAIR, "labels.json"),
        (PAIR, "blob.bin"),
        (PAIR, "vector.npy"),
        (PAIR, STUDY_FIELD),
        (PAIR, "tokens"),
    ],
)
def test_a_bad_member_of_each_type_masks_its_slot_and_nothing_else(
    dataset: Dataset,
    fields: Mapping[str, sf.Field],
    tokenizer: TextTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    member: str,
) -> None:
    # Without the earlier study, which a damaged one is of another sample.
    wanted = {name: one for name, one in fields.items() if one.study == "own"}
    with _loader(dataset, wanted) as loader:
        whole = {one: entry for batch in loader for one, entry in _slots(batch).items()}
    shutil.copytree(Path(dataset.store.url), tmp_path / "a")
    damaged = Dataset.open(tmp_path / "a")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a node without a sound copy of the tokens
    if member == "tokens":
        folder = tmp_path / "a" / tokens_folder(tokenizer.digest, damaged.dataset_id)
        ids = sorted(folder.glob("*.tbl"))
        path = next(one for one in ids if "3" in one.stem)
        flip_bit(path, path.stat().st_size - 1)
    else:
        path, offset, num_bytes = locate(damaged, number, member)
        flip_bit(path, offset + num_bytes // 2)
    with _loader(damaged, wanted) as loader:
        found = {one: entry for batch in loader for one, entry in _slots(batch).items()}
        masks = loader.masks()
    bad = {one for one, entry in found.items() if not entry["weight"]}
    assert number in bad
    assert len(masks) == len(bad)
    assert member == "tokens" or bad == {number}
    assert all(found[one]["all"] == whole[one]["all"] for one in found.keys() - bad)
    for name, value in found[number]["values"].items():
        if name.endswith("_mask"):
            assert not np.any(value), name
    assert found[number]["values"]["report"] == ""
    assert found[number]["values"]["labels"] is None
    # Of a resume, the slot is masked without reading.
    with _loader(damaged, wanted) as resumed:
        resumed.load_masks(masks)
        again = {one: entry for batch in resumed for one, entry in _slots(batch).items()}
    assert all(again[one]["all"] == entry["all"] for one, entry in found.items())


def _slots(batch: sf.Batch) -> dict[int, dict[str, Any]]:
    """Return what each sample of a batch has, by number."""
    flat = {name for name in batch if f"{name}_offsets" in batch}
    found = {}
    for slot, number in slots_of(batch):
        values = {
            name: value[slice(*batch[f"{name}_offsets"][slot : slot + 2])] if name in flat else value[slot]
            for name, value in batch.items()
            if not name.endswith("_offsets")
        }
        # How many places there are depends on the other sample of the micro-batch.
        values = {name: value for name, value in values.items() if not name.startswith("views")}
        weight = float(batch.info.weight[slot])
        found[number] = {"values": values, "weight": weight, "all": repr(_frozen(values))}
    return found


def _frozen(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: frozen(value) for name, value in values.items()}
