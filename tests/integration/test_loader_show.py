"""batch.show: a PNG of a slot whose pixels are those of the batch, with what lies over them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardflow as sf
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader
from shardflow.sampling import BatchSpec
from shardflow.viewing.sheet import render_slot, show_entries
from tests.factories import make_dataset
from tests.field_cases import make_case_dataset
from tests.integration.test_loader_regions import FIELDS as REGIONS
from tests.integration.test_loader_regions import make_annotated

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=5, micro_batches_per_step=1, tail="mask")
FIELDS = {
    "views": sf.Image(series="modality in ('CR', 'DX')", num_images="all", missing="pad"),
    "ct": sf.Slices(series="kind == 'volume'", num_slices=4, size=(68, 68), missing="pad"),
    "report": sf.Text(missing="pad"),
}
RED, GREEN = (255, 90, 95), (63, 185, 80)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_case_dataset(tmp_path_factory.mktemp("show") / "a", num_samples=7)


def _batches(dataset: Dataset, **settings: Any) -> list[Batch]:
    settings = {"fields": FIELDS, **settings}
    with Loader(dataset, split="train", batch=SPEC, seed=5, **settings) as loader:
        return list(loader)


def _pixels(png: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


def test_every_slot_is_a_png_that_names_it_and_shows_its_pictures_in_their_range(
    dataset: Dataset, tmp_path: Path
) -> None:
    for batch in _batches(dataset):
        for slot, key in enumerate(batch.info.sample_keys):
            sheet = batch.show(slot)
            assert sheet._repr_png_().startswith(b"\x89PNG")
            sheet.save(tmp_path / "slot.png")
            assert (tmp_path / "slot.png").read_bytes() == sheet.png
            assert _pixels(sheet.png).shape[1] == 1168
            assert ("padding" if key is None else key) in sheet.title
            shown = {
                one.name: one
                for one in show_entries(
                    batch.descriptor["entries"], dict(batch), slot, num_slots=batch.num_slots
                )
            }
            assert list(shown) == list(FIELDS)
            assert len(shown["views"].pictures) == batch["views_mask"][slot].sum()
            assert shown["report"].text == batch["report"][slot]
            for place, one in enumerate(shown["ct"].pictures):
                assert np.array_equal(one.pixels, batch["ct"][slot, place])
                assert one.window == tuple(batch["ct_range"][slot].tolist())


def test_pixels_are_the_images_stretched_to_the_tile() -> None:
    pixels = np.zeros((1, 68, 68), np.int16)
    pixels[0, :34] = 100
    batch = {"ct": pixels[None, None], "ct_range": np.array([[0.0, 200.0]]), "ct_mask": np.ones((1, 1))}
    entries = [{"name": "ct", "type": "slices"}]
    found = _pixels(render_slot("a", show_entries(entries, batch, 0, num_slots=1)).png)
    gray = (found == 128).all(axis=2)
    assert gray[:, 24 : 24 + 272].all(axis=1).sum() == pytest.approx(136, abs=3)  # half of a tile
    black = (found[:, 24 : 24 + 272] == 0).all(axis=(1, 2)).sum()
    assert black == pytest.approx(136, abs=3)


def test_masks_and_boxes_lie_over_the_picture_that_they_are_of() -> None:
    gray = np.full((1, 2, 1, 68, 68), 1000, np.uint16)
    mask = np.zeros((1, 2, 2, 68, 68), np.uint8)
    mask[0, 0, 1, 20:40, 20:40] = 1  # the second label, in the first picture
    batch = {
        "image": gray,
        "image_range": np.array([[[0.0, 2000.0]] * 2]),
        "image_mask": np.ones((1, 2)),
        "lesions": mask,
        "lesions_mask": np.ones((1, 2)),
        "boxes": np.array([[[10.0, 10.0, 50.0, 60.0], [0.0, 0.0, 1.0, 1.0]]]),
        "boxes_mask": np.array([[1, 0]]),
        "boxes_index": np.array([[1, -1]]),
        "boxes_label": np.array([[0, -1]]),
    }
    entries = [
        {"name": "image", "type": "image"},
        {"name": "lesions", "type": "mask", "like": "image"},
        {"name": "boxes", "type": "boxes", "like": "image"},
    ]
    (field,) = show_entries(entries, batch, 0, num_slots=1)
    assert [len(one.boxes) for one in field.pictures] == [0, 1]
    found = _pixels(render_slot("a", [field]).png)
    first, second = found[:, 24 : 24 + 272].astype(int), found[:, 302 : 302 + 272].astype(int)
    green = (first[..., 1] > first[..., 0] + 20) & (first[..., 1] > 100)
    assert green.sum() == pytest.approx(80 * 80, rel=0.03)  # 20 pixels, four times as large
    assert not (np.abs(second[..., 0] - second[..., 1]) > 20)[: len(second) // 2, 250:].any()
    assert (found == RED).all(axis=2).sum() == pytest.approx(2 * 2 * (160 + 200), rel=0.03)
    assert not (first == RED).all(axis=2).any()


def test_stored_regions_lie_over_the_pictures_of_the_field_that_they_follow(tmp_path: Path) -> None:
    dataset = Dataset.open(make_dataset(tmp_path / "a", num_samples=6, make=make_annotated, facts=True))
    num_planes = num_boxes = 0
    for batch in _batches(dataset, fields=REGIONS):
        for slot in range(batch.num_slots):
            shown = {
                one.name: one
                for one in show_entries(
                    batch.descriptor["entries"], dict(batch), slot, num_slots=batch.num_slots
                )
            }
            assert shown.keys() == {"ct", "views", "frontal", "volume", "tiles"}
            for place, one in enumerate(shown["ct"].pictures):
                wanted = [*batch["lesions"][slot, place], *batch["anything"][slot, place]]
                assert len(one.masks) == len(wanted) == 4
                for plane, other in zip(one.masks, wanted, strict=True):
                    assert np.array_equal(plane, other)
                    num_planes += bool(np.any(plane))
            for name, boxes in (("ct", "spots"), ("views", "marks"), ("tiles", "cut_boxes")):
                found = sum(len(one.boxes) for one in shown[name].pictures)
                assert found == batch[f"{boxes}_mask"][slot].sum()
                num_boxes += found
            assert batch.show(slot).png
    assert num_planes
    assert num_boxes


def test_normalized_pixels_are_shown_by_their_own_extremes() -> None:
    pixels = np.linspace(0, 1, 68 * 68, dtype=np.float32).reshape(1, 1, 68, 68)
    batch = {"image": pixels, "image_range": np.array([[0.0, 4095.0]]), "image_mask": np.ones(1)}
    found = _pixels(
        render_slot("a", show_entries([{"name": "image", "type": "image"}], batch, 0, num_slots=1)).png
    )
    assert len(np.unique(found[60:320, 24:296])) > 100


def test_values_of_every_kind_are_shown() -> None:
    batch = {
        "tokens": [np.arange(100, dtype=np.uint32)],
        "facts": [{"age": 50, "finding": "größer"}],
        "raw": [b"ab"],
        "label": np.array([3]),
        "nothing": [None],
        "total": np.array(7),
        "joined": np.arange(5),
        "color": [np.zeros((3, 20, 10), np.uint8)],
        "color_range": np.array([[0.0, 255.0]]),
    }
    shown = {one.name: one for one in show_entries([], batch, 0, num_slots=1)}
    assert shown["tokens"].text.startswith("0 1 2")
    assert "größer" in shown["facts"].text
    assert shown["raw"].text == "61 62"
    assert shown["total"].text == "7"
    assert shown["joined"].text == "0 1 2 3 4"  # not one per slot
    assert shown["nothing"].note == "none"
    assert len(shown["color"].pictures) == 1
    assert render_slot("a", list(shown.values())).png


def test_a_slot_that_is_not_there_is_refused(dataset: Dataset) -> None:
    batch = _batches(dataset)[0]
    assert batch.show(-1).title == batch.show(4).title
    with pytest.raises(IndexError, match="slot 5 is none of the 5 slots"):
        batch.show(5)
