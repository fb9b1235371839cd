"""Planes of volumes and their regions over HTTP: from slices and from bricks, read once."""

from __future__ import annotations

import http.client
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading.crops import StepCrops
from shardflow.viewing import Viewer
from tests.integration.loader_support import hooked, open_loader, slots_of
from tests.integration.test_loader_volume_regions import SHAPE, series_of
from tests.integration.test_mask_bricks import BOX_ONLY, UNSEEN, extra_of, masks_of
from tests.volume_cases import VolumeSeries, make_volumes

NUM_SAMPLES = 4
STORAGES = ("slices", "bricks")
SMALL_BRICKS = (3, 5, 4)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    folder = tmp_path_factory.mktemp("planes")
    made = make_volumes(folder / "slices", series_of, num_samples=NUM_SAMPLES, extra_of=extra_of)
    assert cli.main(["copy", str(folder / "slices"), str(folder / "bricks"), "--volumes", "bricks"]) == 0
    return {"slices": made, "bricks": Dataset.open(folder / "bricks")}


@pytest.fixture(scope="module")
def viewers(datasets: dict[str, Dataset]) -> Iterator[dict[str, Viewer]]:
    with Viewer(datasets["slices"]) as slices, Viewer(datasets["bricks"]) as bricks:
        yield {"slices": slices, "bricks": bricks}


def get(viewer: Viewer, path: str) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(viewer.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=300)
    try:
        joint = "&" if "?" in path else "?"
        connection.request("GET", f"{path}{joint}{address.query}")
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def picture(viewer: Viewer, path: str) -> NDArray[Any]:
    status, headers, body = get(viewer, path)
    assert status == 200, body
    dtype = np.dtype(headers["X-Dtype"]).newbyteorder("<")
    return np.frombuffer(body, dtype).reshape(int(headers["X-Rows"]), int(headers["X-Columns"]))


@pytest.mark.parametrize("storage", STORAGES)
def test_every_plane_is_that_of_the_stored_volume(storage: str, viewers: dict[str, Viewer]) -> None:
    check_planes(viewers[storage], row=1)


def test_planes_come_from_layers_of_bricks(tmp_path: Path) -> None:
    def small(number: int) -> list[VolumeSeries]:
        return [replace(series_of(number)[0], brick_shape=SMALL_BRICKS)]

    with Viewer(make_volumes(tmp_path / "data", small, num_samples=2)) as viewer:
        check_planes(viewer, row=1)


def check_planes(viewer: Viewer, row: int) -> None:
    expected = series_of(row)[0].voxels
    for axis, length in enumerate(SHAPE):
        for index in range(length):
            found = picture(viewer, f"/api/samples/{row}/planes/0/{axis}/{index}")
            assert np.array_equal(found, expected.take(index, axis=axis))
    assert np.array_equal(picture(viewer, f"/api/samples/{row}/slices/0/3"), expected[3])


@pytest.mark.parametrize("storage", STORAGES)
def test_regions_are_drawn_on_every_plane(
    storage: str, viewers: dict[str, Viewer], datasets: dict[str, Dataset]
) -> None:
    if storage == "bricks":  # masks are in bricks too
        _, fields = datasets[storage].sample_fields(0)
        assert any(".m" in one.name and ".volume." in one.name for one in fields)
    for number, covered in enumerate(masks_of(0)):
        for axis, length in enumerate(SHAPE):
            for index in range(length):
                found = picture(viewers[storage], f"/api/samples/0/regions/0/{number}/{axis}/{index}")
                assert np.array_equal(found > 0, shown(covered, number).take(index, axis=axis))


def shown(covered: NDArray[np.uint8], number: int) -> NDArray[np.bool_]:
    """Return the voxels of a region that are tinted."""
    if number == BOX_ONLY:  # filled to its box
        is_covered = np.zeros(SHAPE, bool)
        for index in np.flatnonzero(covered.any(axis=(1, 2))).tolist():
            rows, columns = np.nonzero(covered[index])
            is_covered[index, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1] = True
        return is_covered
    return covered > 0


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("planes/0/1/14", b"there is no plane 14 of axis 1"),
        ("planes/0/3/0", b"there is no plane 0 of axis 3"),
        ("planes/7/1/0", b"0 slices"),
        ("slices/0/11", b"11"),
        ("regions/0/9/0/0", b"no such region"),
        ("regions/0/0/2/13", b"there is no plane 13 of axis 2"),
    ],
)
def test_what_is_not_there_is_a_sentence(
    storage: str, path: str, sentence: bytes, viewers: dict[str, Viewer]
) -> None:
    status, _, body = get(viewers[storage], f"/api/samples/0/{path}")
    assert (status, sentence in body) == (400, True), body


def test_a_study_without_regions_has_none(tmp_path: Path) -> None:
    made = make_volumes(tmp_path / "data", series_of, num_samples=UNSEEN + 1, extra_of=extra_of)
    with Viewer(made) as viewer:
        status, _, body = get(viewer, f"/api/samples/{UNSEEN}/regions/0/0/1/0")
    assert (status, b"no regions" in body) == (400, True)


@pytest.mark.parametrize("storage", STORAGES)
def test_scrolling_reads_once(storage: str, datasets: dict[str, Dataset]) -> None:
    read: list[str] = []
    opened, _ = hooked(datasets[storage].store.url, lambda path, _: read.append(path))
    with Viewer(opened) as viewer:
        picture(viewer, "/api/samples/2/planes/0/2/4")
        read.clear()
        for index in range(SHAPE[2]):
            picture(viewer, f"/api/samples/2/planes/0/2/{index}")
        if storage == "slices":
            picture(viewer, "/api/samples/2/planes/0/1/4")
    assert not [path for path in read if path.endswith(".tar")]


def test_a_volume_that_is_too_large_is_not_read(
    datasets: dict[str, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.viewing.server.MAX_BYTES", 500)
    with Viewer(datasets["slices"]) as viewer:
        status, _, body = get(viewer, "/api/samples/0/planes/0/1/0")
        assert (status, b"at most" in body) == (400, True)
        assert get(viewer, "/api/samples/0/slices/0/0")[0] == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"num_samples": 2, "margin": (1, 0, 2)},
        {"orientation": "RAS", "spacing_mm": (1.3, 0.9, 1.7)},
        {"center": "whole"},
    ],
)
def test_crops_of_a_step_are_those_of_the_loader(
    settings: dict[str, Any], datasets: dict[str, Dataset]
) -> None:
    roi, batch = (5, 6, 4), sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
    volume = sf.Volume(roi_size=roi, **settings)
    fields = {"ct": volume, "nodule": sf.Mask(like="ct")}
    margin = settings.get("margin", (0, 0, 0))
    ends = [(more - 0.5, side + more - 0.5) for more, side in zip(margin, roi, strict=True)]
    corners = np.array([*itertools.product(*ends)])
    read: list[str] = []
    opened, _ = hooked(datasets["bricks"].store.url, lambda path, _: read.append(path))
    with (
        open_loader(datasets["bricks"], batch, fields) as loader,
        Viewer(opened, steps=StepCrops(opened, fields)) as viewer,
    ):
        steps = {}
        for step in range(loader.num_steps):
            _, _, body = get(viewer, f"/api/steps?split=train&seed=5&epoch=0&step={step}&size=2&count=2")
            steps[step] = json.loads(body)["micro_batches"]
        assert not [path for path in read if path.endswith(".tar")]
        num_seen = 0
        for received in loader:
            for slot, number in slots_of(received):
                found = steps[received.step][received.micro][slot]
                assert found["key"] == received.sample_keys[slot]
                (crop,) = found["crops"]
                assert (crop["field"], crop["series"]) == ("ct", 0)
                shown = np.array(crop["corners"]) @ series_of(number)[0].affine[:3, :3].T
                affine = received["ct_affine"][slot]
                expected = corners @ affine[:3, :3].T + affine[:3, 3] - series_of(number)[0].affine[:3, 3]
                np.testing.assert_allclose(shown, expected, atol=0.02)
                num_seen += 1
    assert num_seen == NUM_SAMPLES * settings.get("num_samples", 1)


def test_crops_need_a_volume(datasets: dict[str, Dataset]) -> None:
    with pytest.raises(ConfigError, match="hold no volume"):
        StepCrops(datasets["slices"], {"text": sf.Text(missing="pad")})
