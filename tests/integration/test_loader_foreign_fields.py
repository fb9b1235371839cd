"""Fields of tars of other writers: bits and channels as Pillow reads them; damage masks a slot."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image as Picture

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.types.members import read_nifti
from shardflow.format import Dataset
from shardflow.format.foreign import ForeignSource, index_tars
from shardflow.format.foreign.places import expand_places, image_facts
from shardflow.loading import Batch, Loader
from shardflow.sampling import BatchSpec
from tests.foreign_tars import python_tar
from tests.integration.loader_support import batches_of, check_everywhere, flip_bit, open_loader

pytestmark = pytest.mark.fast

NUM_SAMPLES = 12
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=3, tail="mask")


def _shape(number: int) -> tuple[int, int]:
    return 8 + number % 3, 10 + number % 2


def _deep(number: int) -> NDArray[np.uint16]:
    """Return a gray image of 16 bits, of which every third sample has one of 8 bits instead."""
    return np.random.default_rng(number).integers(0, 60_000, _shape(number)).astype(np.uint16)


def _color(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (*_shape(number), 3)).astype(np.uint8)


def _encoded(picture: Picture.Image, kind: str, **settings: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **settings)
    return stream.getvalue()


def _npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _members(number: int) -> dict[str, bytes]:
    deep = (
        Picture.fromarray(_deep(number)) if number % 3 else Picture.fromarray(_deep(number).astype(np.uint8))
    )
    gray = Picture.fromarray(_color(number)[:, :, 0])
    return {
        "png": _encoded(deep, "png"),
        "color.png": _encoded(Picture.fromarray(_color(number)), "png"),
        "seg.png": _encoded(Picture.fromarray(_color(0)[:8, :10, 0] > 99), "png"),
        "jpg": _encoded(gray if number % 2 else Picture.fromarray(_color(number)), "jpeg", quality=95),
        "txt": f"caption {number} ä".encode(),
        "json": json.dumps({"number": number}).encode(),
        "npy": _npy(np.arange(number % 4)),
    }


def _made(folder: Path, change: Mapping[tuple[int, str], bytes | None] | None = None) -> Dataset:
    folder.mkdir()
    places = []
    for shard in range(3):
        members = []
        for number in range(4 * shard, 4 * shard + 4):
            stored: dict[str, bytes | None] = {**_members(number)}
            stored |= {name: data for (at, name), data in (change or {}).items() if at == number}
            members += [
                (f"case{number:03d}.{name}", data) for name, data in stored.items() if data is not None
            ]
        places.append(str(python_tar(folder / f"a-{shard}.tar", members)))
    index_tars([ForeignSource(place=place) for place in places], str(folder / "index"))
    return Dataset.open(folder / "index")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return _made(tmp_path_factory.mktemp("foreign") / "a")


FIELDS: Mapping[str, sf.Field] = {
    "deep": sf.Image(member="png"),
    "color": sf.Image(member="color.png", size=(6, 6), fit="letterbox"),
    "seg": sf.Image(member="seg.png"),
    "photo": sf.Image(member="jpg", missing="pad"),
    "caption": sf.Text(member="txt"),
    "facts": sf.Json(member="json"),
    "points": sf.Array(member="npy", max_shape=(3,), dtype="int64"),
}


def _loader(dataset: Dataset, fields: Mapping[str, sf.Field] = FIELDS, **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def _slots(batch: Batch) -> list[tuple[int, int]]:
    return [(slot, batch["facts"][slot]["number"]) for slot in np.flatnonzero(batch.info.weight).tolist()]


def _as_pillow_reads(number: int, name: str) -> NDArray[Any]:
    """Return an image as Pillow decodes it, ``(C, H, W)``."""
    pixels = np.asarray(Picture.open(io.BytesIO(_members(number)[name])))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def test_bits_and_channels_stay_those_of_the_file(dataset: Dataset) -> None:
    seen = 0
    with _loader(dataset) as loader:
        for batch in loader:
            assert batch["seg"].shape == (2, 1, 8, 10)  # one size for all, so one array
            assert batch["color"].shape == (2, 3, 6, 6)
            for slot, number in _slots(batch):
                seen += 1
                deep = batch["deep"][slot]
                assert deep.dtype == np.uint16
                assert np.array_equal(deep, _as_pillow_reads(number, "png"))
                assert deep.max() > 255 or number % 3 == 0
                assert batch["deep_range"][slot].tolist() == [deep.min(), deep.max()]
                assert np.array_equal(batch["seg"][slot], _as_pillow_reads(number, "seg.png") * np.uint8(255))
                photo = batch["photo"][slot]
                assert photo.shape == (3, *_shape(number))
                assert (
                    np.abs(photo.astype(int) - _as_pillow_reads(number, "jpg")).max() <= 4
                )  # two JPEG decoders
                assert batch["caption"][slot] == f"caption {number} ä"
                assert batch["points"][slot].tolist() == [*range(number % 4), *[0] * (3 - number % 4)]
    assert seen == NUM_SAMPLES


def test_a_letterboxed_image_is_the_resized_one_in_its_box(dataset: Dataset) -> None:
    native = {"facts": FIELDS["facts"], "color": sf.Image(member="color.png")}
    with _loader(dataset) as fitted, _loader(dataset, native) as whole:
        for one, other in zip(fitted, whole, strict=True):
            for slot, number in _slots(one):
                assert np.array_equal(other["color"][slot], _color(number).transpose(2, 0, 1))
                top, left, rows, columns = one["color_box"][slot].tolist()
                assert max(rows, columns) == 6
                picture = one["color"][slot]
                outside = np.ones((6, 6), bool)
                outside[top : top + rows, left : left + columns] = False
                assert not picture[:, outside].any()
                mean = other["color"][slot].mean(axis=(1, 2))
                assert np.abs(picture[:, ~outside].mean(axis=1) - mean).max() < 12


def test_content_is_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset,
) -> None:
    check_everywhere(lambda **settings: _loader(dataset, **settings), world_sizes=(2, 3))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("png", b"no picture", id="no picture"),
        pytest.param("png", _members(5)["png"][:60], id="cut picture"),
        pytest.param("png", None, id="no member"),
        pytest.param("json", b"{", id="cut JSON"),
        pytest.param("txt", b"\xff", id="no UTF-8"),
        pytest.param("npy", b"\x93NUMPY", id="cut array"),
    ],
)
def test_a_bad_member_masks_its_slot_and_nothing_else(
    tmp_path: Path, dataset: Dataset, name: str, content: bytes | None
) -> None:
    found = batches_of(_loader(_made(tmp_path / "b", {(5, name): content})))
    whole = batches_of(_loader(dataset))
    masked = 0
    for place, batch in found.items():
        assert batch["keys"] == whole[place]["keys"]
        if batch["weight"] == whole[place]["weight"]:
            assert batch == whole[place]
        else:
            masked += int(sum(whole[place]["weight"]) - sum(batch["weight"]))
    assert masked == 1


def test_a_flipped_bit_masks_its_slot_and_a_replay_masks_the_same(tmp_path: Path) -> None:
    damaged = _made(tmp_path / "b")
    row = next(row for row in range(NUM_SAMPLES) if damaged.original_key(row) == "case007")
    _, fields = damaged.sample_fields(row)
    place = next(field for field in fields if field.name == "png")
    flip_bit(tmp_path / "b" / "a-1.tar", place.offset + place.num_bytes // 2)
    first = _loader(damaged)
    found = batches_of(first)
    assert sum(sum(batch["weight"]) for batch in found.values()) == NUM_SAMPLES - 1
    replayed = _loader(damaged)
    replayed.load_masks(first.masks())
    assert batches_of(replayed) == found


def test_padded_images_are_masked_and_keep_the_weight(tmp_path: Path) -> None:
    dataset = _made(tmp_path / "b", {(5, "jpg"): None})
    sized = {"facts": FIELDS["facts"], "photo": sf.Image(member="jpg", size=(4, 4), missing="pad", fill=7)}
    for fields in (sized, {**sized, "photo": FIELDS["photo"]}):
        with _loader(dataset, fields) as loader:
            for batch in loader:
                for slot, number in _slots(batch):
                    assert batch["photo_mask"][slot] == (number != 5)
                    if number == 5:
                        photo = batch["photo"][slot]
                        assert photo is None or (photo == 7).all()
    with pytest.raises(ConfigError, match="cannot drop"):
        _loader(dataset, {"photo": sf.Image(member="jpg", missing="drop")})


def test_a_narrow_dtype_and_one_channel_are_used_when_asked(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {
        "deep": sf.Image(member="png", dtype="uint8", channels=3, size=(8, 10)),
        "gray": sf.Image(member="color.png", channels=1),
    }
    with _loader(dataset, fields) as loader:
        for batch in loader:
            assert batch["deep"].dtype == np.uint8
            assert np.array_equal(batch["deep"][:, 0], batch["deep"][:, 2])
            for slot in np.flatnonzero(batch.info.weight).tolist():
                assert len(batch["gray"][slot]) == 1
        assert loader.counters.snapshot()["saturated"]["num_items"] > 0
    assert "leave out its dtype" in caplog.text


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"series": "role == 'frontal'"}, "so series cannot apply"),
        ({"num_images": 2, "windows": ("lung",)}, "so num_images and windows cannot apply"),
        ({"tiles": 4, "size": (8, 8)}, "so tiles cannot apply"),
        ({"member": "npy"}, "ends with jpg, jpeg or png"),
    ],
)
def test_what_does_not_go_with_a_member_is_refused_in_one_sentence(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        sf.Image(**{"member": "png", **settings})


def test_an_unknown_member_and_an_image_without_one_are_refused_before_step_0(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"No sample has the member 'jpeg'.*there are .*jpg"):
        _loader(dataset, {"x": sf.Image(member="jpeg")})
    with pytest.raises(ConfigError, match=r"No sample has the member 'meta\.json'"):
        _loader(dataset, {"x": sf.Json(member="meta.json")})
    with pytest.raises(ConfigError, match="name the member of an image"):
        _loader(dataset, {"x": sf.Image(size=(8, 8))})


def test_an_index_without_facts_needs_dtype_and_channels(tmp_path: Path) -> None:
    """Folders indexed by earlier versions stay readable; what they do not say, the spec states."""
    dataset = _made(tmp_path / "b")
    known: Any = dataset.manifest.extra["foreign"]
    foreign = {name: known[name] for name in ("version", "locations")}
    older = Dataset(dataset.store, replace(dataset.manifest, extra={"foreign": foreign}))
    assert image_facts(older.manifest, "png") is None
    with pytest.raises(ConfigError, match=r"needs dtype='uint16' \(or 'uint8'\), channels=1 \(or 3\)"):
        _loader(older, {"x": sf.Image(member="png")})
    stated = {"facts": FIELDS["facts"], "deep": sf.Image(member="png", dtype="uint16", channels=1)}
    with _loader(older, stated) as loader:
        for batch in loader:
            for slot, number in _slots(batch):
                assert np.array_equal(batch["deep"][slot], _as_pillow_reads(number, "png"))


def test_default_fields_of_foreign_tars_are_their_images_and_the_text(dataset: Dataset) -> None:
    members = ("png", "color.png", "seg.png", "jpg")
    named = {f"image_{member.replace('.', '_')}": member for member in members}
    fields = {name: sf.Image(member=member, missing="pad") for name, member in named.items()}
    defaults = Loader(dataset, split="train", batch=SPEC, seed=5, fields=None)
    with defaults, _loader(dataset, {**fields, "report": sf.Text(missing="pad")}) as stated:
        for found, wanted in zip(defaults, stated, strict=True):
            assert {*found} == {*wanted} > {*named, "report"}
            for name in (*named, "report"):
                for one, other in zip(found[name], wanted[name], strict=True):
                    assert np.array_equal(one, other)


def test_the_only_image_of_foreign_tars_is_the_default_image(tmp_path: Path) -> None:
    names = ("png", "color.png", "seg.png")
    others = {(number, name): None for number in range(NUM_SAMPLES) for name in names}
    dataset = _made(tmp_path / "a", others)
    with Loader(dataset, split="train", batch=SPEC, seed=5, fields=None) as loader:
        assert {"image", "report"} <= {*next(iter(loader))}


def _volume(number: int, kind: str) -> NDArray[Any]:
    return np.random.default_rng(number).integers(0, 100, (3, 4, 2)).astype(kind)


def _nifti(folder: Path, number: int, kind: str, name: str, *, scale: float | None = None) -> bytes:
    """Return a file that nibabel wrote."""
    version: Any = nibabel.Nifti2Image if number % 2 else nibabel.Nifti1Image
    header = version.header_class(endianness=">" if number == 3 else "<")
    header.set_data_dtype(kind)
    image = version(_volume(number, kind), np.eye(4), header)
    if scale is not None:
        image.header.set_slope_inter(scale, 5)
    image.to_filename(folder / name)
    return (folder / name).read_bytes()


def test_nifti_npz_json_and_classes_are_typed(tmp_path: Path) -> None:
    for shard in range(2):
        members = []
        for number in range(4 * shard, 4 * shard + 4):
            points = io.BytesIO()
            np.savez(points, points=np.full(3, number), other=np.zeros(2))
            stored = {
                "ct.nii.gz": _nifti(tmp_path, number, "int16", "a.nii.gz"),
                "dose.nii": _nifti(tmp_path, number, "uint8", "b.nii", scale=0.5),
                "npz": points.getvalue(),
                "json": json.dumps({"number": number}).encode(),
                "cls": b"%d\n" % number,
                "view.cls": b"PA",
            }
            if number == 2:
                del stored["cls"]
            members += [(f"Case_{number}.{name}", data) for name, data in stored.items()]
        python_tar(tmp_path / f"t-{shard}.tar", members)
    places = expand_places(f"{tmp_path}/t-*.tar")
    report = index_tars([ForeignSource(place=place) for place in places], tmp_path / "out")
    assert (report.num_samples, report.columns) == (8, ("members.cls",))
    fields = {
        "ct": sf.Array(member="ct.nii.gz", shape=(3, 4, 2), dtype="int16"),
        "dose": sf.Array(member="dose.nii", max_shape=(4, 4, 2), dtype="float32"),
        "points": sf.Array(member="npz", array="points", shape=(3,), dtype="int64"),
        "meta": sf.Json(member="json"),
        "label": sf.Column("members.cls", missing="pad"),
        "value": sf.Json(member="cls", missing="pad"),
    }
    dataset = Dataset.open(tmp_path / "out")
    seen = 0
    with _loader(dataset, fields) as loader:
        for batch in loader:
            for slot in np.flatnonzero(batch.info.weight).tolist():
                number = batch["meta"][slot]["number"]
                seen += 1
                assert np.array_equal(batch["ct"][slot], _volume(number, "int16"))
                assert np.array_equal(batch["dose"][slot, :3], _volume(number, "uint8") * 0.5 + 5)
                assert batch["points"][slot].tolist() == [number] * 3
                assert batch["label_mask"][slot] == (number != 2)
                assert batch["value"][slot] == (None if number == 2 else number)
                assert batch["label"][slot] == (0 if number == 2 else number)
    assert seen == 8
    with _loader(dataset, {"x": sf.Column("members.cls", missing="drop")}) as loader:
        assert sum(int(batch.info.weight.sum()) for batch in loader) == 7


BAD_VOLUMES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda data: gzip.compress(data)[:-20],
    "short": lambda data: data[:-1],
    "no volume": lambda data: b"x" * len(data),
    "colors": lambda data: data[:70] + b"\x80\0" + data[72:],
    "offset": lambda data: data[:108] + struct.pack("<f", float("inf")) + data[112:],
    "axes": lambda data: data[:40] + struct.pack("<h", 9) + data[42:],
    "bomb": lambda data: gzip.compress(data + bytes(1 << 20)),
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("case", BAD_VOLUMES)
def test_a_damaged_volume_is_one_that_cannot_be_read(tmp_path: Path, case: str) -> None:
    whole = _nifti(tmp_path, 0, "int16", "a.nii")
    assert read_nifti(np.frombuffer(gzip.compress(whole), np.uint8), 1 << 16).shape == (3, 4, 2)
    with pytest.raises((ValueError, zlib.error)):
        read_nifti(np.frombuffer(BAD_VOLUMES[case](whole), np.uint8), 1 << 16)


def test_patterns_match_files_as_a_shell_does(tmp_path: Path) -> None:
    for name in ("b-1.tar", "a-0.tar", "a-1.tar", "a[0].tar", "note.txt"):
        (tmp_path / name).touch()
    (tmp_path / "c.tar").mkdir()

    def names(pattern: str) -> list[str]:
        return [Path(place).name for place in expand_places(f"{tmp_path}/{pattern}")]

    assert names("*.tar") == ["a-0.tar", "a-1.tar", "a[0].tar", "b-1.tar"]
    assert names("{b,a}-?.tar") == ["b-1.tar", "a-0.tar", "a-1.tar"]
    assert names("a-[1-9].tar") == ["a-1.tar"]
    assert names("a[0].tar") == ["a[0].tar"]
    assert names("not-there.tar") == ["not-there.tar"]
    with pytest.raises(ConfigError, match="must match at least one tar, got none"):
        names("d-*.tar")
    address = f"file://{tmp_path}"
    assert expand_places(f"{address}/a-*.tar") == [f"{address}/a-0.tar", f"{address}/a-1.tar"]
    with pytest.raises(ConfigError, match="after its last /"):
        expand_places("s3://bucket/*/a.tar")


def test_an_earlier_study_is_refused_where_no_table_knows_the_person(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match="which tars of other writers do not say"):
        open_loader(dataset, SPEC, {"prior": sf.Text(member="txt", study="previous", missing="pad")})
