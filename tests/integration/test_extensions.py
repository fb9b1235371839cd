"""Field types and codecs of an installed package, by entry points: the examples of docs/extending.md."""

from __future__ import annotations

import importlib
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.registry import field_type, read_fields
from shardflow.format import codecs
from shardflow.format.facts.columns import open_columns
from shardflow.format.facts.making import attach_facts
from shardflow.packing.tables.joining import TableSettings, attach_table
from tests.dicom_factory import make_study
from tests.docs.blocks import find_blocks
from tests.pack_case import PackCase

NUM_SAMPLES = 8
SPEC = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
BAD = 3
"""Sample whose members are damaged, with checksums that match."""
ENTRY_POINTS = """\
[shardflow.fields]
spirometry = ward_tools:Spirometry

[shardflow.codecs]
zraw = ward_tools:codec
broken = ward_tools:absent
other = ward_tools:Spirometry

[shardflow.recognizers]
absent = ward_tools:absent
none = ward_tools:WARD
outside = ward_tools:outside
unnamed = ward_tools:unnamed
wards = ward_tools:find_wards

[shardflow.tables]
npz = ward_tools:read_npz
csv = ward_tools:absent
"""
BAD_RECOGNIZERS = """
def outside(text):
    return [(0, len(text) + 1, "NAME")]

def unnamed(text):
    return [(0, 1, "SOMEBODY")]
"""


def _forget() -> None:
    field_type.cache_clear()
    codecs._offered_codec.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the page's blocks, as an installer leaves it."""
    blocks = [block.text for block in find_blocks("python") if block.page == Path("docs/extending.md")]
    wanted = ("class Spirometry(Field)", "codec = Codec(", "def read_npz(", "def find_wards(")
    chosen = [one for one in blocks if any(sign in one for sign in wanted)]
    assert len(chosen) == 4
    monkeypatch.chdir(tmp_path)  # a block of the page writes a file when it is imported
    folder = tmp_path / "site"
    info = folder / "ward_tools-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "ward_tools.py").write_text("\n".join([*chosen, BAD_RECOGNIZERS]), encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ward-tools\nVersion: 1.0\n", "utf-8")
    (info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # of loader processes
    _forget()
    yield folder
    monkeypatch.undo()
    _forget()


def _pixels(number: int) -> np.ndarray[Any, Any]:
    return np.arange(20, dtype="<i2").reshape(4, 5) + 100 * number


@pytest.fixture
def dataset(tmp_path: Path) -> sf.Dataset:
    with sf.ShardWriter(tmp_path / "data") as writer:
        for number in range(NUM_SAMPLES):
            payload = struct.pack("<II", 4, 5) + zlib.compress(_pixels(number).tobytes(), 1)
            series = {
                "kind": "images",
                "modality": "DX",
                "num_slices": 1,
                "rows": 4,
                "columns": 5,
                "dtype": "int16",
                "codec": "zraw",
                "unit": "raw",
            }
            writer.write(
                {
                    "__key__": f"study{number}",
                    "s000.i0000.zraw": payload[: len(payload) - 4 * (number == BAD)],
                    "spirometry.json": {"records": [{"fvc_l": 3 + number / 8}] * (number != BAD)},
                    "study.json": {"format_version": 1, "series": [series]},
                }
            )
    found = sf.open(str(tmp_path / "data"))
    attach_facts(found)
    return found


def _run(dataset: sf.Dataset, fields: Any, **settings: Any) -> dict[str, tuple[Any, ...]]:
    config = sf.LoaderConfig(**settings)
    found = {}
    with sf.Loader(dataset, split="train", seed=3, batch=SPEC, fields=fields, config=config) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is not None:
                    one = [np.array(batch[name][slot]).tolist() for name in fields]
                    found[key] = (float(batch.info.weight[slot]), *one)
    return found


@pytest.mark.usefixtures("package")
def test_a_field_type_and_a_codec_of_a_package_deliver_in_threads_and_in_a_process(
    dataset: sf.Dataset,
) -> None:
    fields = {"fvc": field_type("spirometry")(), "image": sf.Image()}
    found = _run(dataset, fields)
    assert found == {
        f"study{number}": (1.0, 3 + number / 8, [_pixels(number).tolist()])
        if number != BAD
        else (0.0, 0.0, np.zeros((1, 4, 5)).tolist())
        for number in range(NUM_SAMPLES)
    }
    assert _run(dataset, fields, execution="process") == found


@pytest.mark.usefixtures("package")
def test_a_field_type_of_a_package_has_a_name_and_settings_in_toml(tmp_path: Path) -> None:
    page = '[fields.fvc]\ntype = "spirometry"\nmember = "lungs.json"\nmissing = "pad"\n'
    (tmp_path / "fields.toml").write_text(page, encoding="utf-8")
    expected = field_type("spirometry")(member="lungs.json", missing="pad")  # type: ignore[call-arg]
    assert read_fields(tmp_path / "fields.toml") == {"fvc": expected}


@pytest.mark.usefixtures("package")
def test_a_bad_member_of_each_masks_its_slot_alone(dataset: sf.Dataset) -> None:
    for fields in ({"fvc": field_type("spirometry")()}, {"image": sf.Image()}):
        masked = {key for key, values in _run(dataset, fields).items() if not values[0]}
        assert masked == {f"study{BAD}"}


@pytest.mark.usefixtures("package")
def test_a_codec_of_a_package_is_read_and_never_written(dataset: sf.Dataset) -> None:
    payload = dataset.read_fields(0, ["s000.i0000.zraw"])["s000.i0000.zraw"]
    assert codecs.decode_field("s000.i0000.zraw", payload).shape == (4, 5)
    with pytest.raises(sf.FormatError, match="a codec must be one of"):
        codecs.encode_array("zraw", _pixels(0))
    with pytest.raises(ConfigError, match=r"'broken'.*cannot be imported \(AttributeError\)"):
        codecs.codec_rank("broken")
    with pytest.raises(ConfigError, match="must name a shardflow"):
        codecs.codec_rank("other")


def test_without_the_package_both_are_refused_before_step_0(dataset: sf.Dataset) -> None:
    with pytest.raises(ConfigError, match="stored as 'zraw', which no installed codec reads"):
        _run(dataset, {"image": sf.Image()})
    with pytest.raises(ConfigError, match=r"no field type 'spirometry'; there are .*image"):
        field_type("spirometry")


@pytest.mark.usefixtures("package")
def test_a_table_reader_of_a_package_reads_its_files(dataset: sf.Dataset, tmp_path: Path) -> None:
    vectors = np.arange(2.0 * NUM_SAMPLES, dtype="f4").reshape(-1, 2)
    keys = [f"study{number}" for number in range(NUM_SAMPLES)]
    np.savez(tmp_path / "made.npz", sample_key=keys, vector=vectors)
    done = attach_table(dataset, tmp_path / "made.npz", TableSettings(name="clip", on="sample_key"))
    assert dict(done.columns) == {"vector": "floats"}
    found = open_columns(sf.open(dataset.store.url)).column("clip.vector").values
    np.testing.assert_array_equal(found, vectors)
    (tmp_path / "made.xlsx").touch()
    with pytest.raises(ConfigError, match=r"read from \.csv, .*\.npz.*, got \.xlsx"):
        attach_table(dataset, tmp_path / "made.xlsx", TableSettings(name="clip", on="sample_key"))


@pytest.mark.usefixtures("package")
def test_a_recognizer_of_a_package_searches_reports_beside_the_rules(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    study = make_study(case.dicom / "a", num_slices=1)
    case.write_reports({study.study_instance_uid: "Small effusion. Called to Ward B12 on 03/14/2019."})
    summary = case.pack('deid.report_text="scrub"', 'deid.recognizers=["wards"]')
    dataset = case.open()
    report = dataset.read_fields(0, ["report.txt"])["report.txt"].decode()
    assert report.rstrip() == "Small effusion. Called to [PLACE] on [DATE]."
    assert summary.status == "packed"
    assert case.config('deid.recognizers=["wards"]').deid.content()["recognizers"] == [["wards", "1.0"]]
    assert "recognizers" not in case.config().deid.content()


@pytest.mark.usefixtures("package")
def test_a_recognizer_that_cannot_be_asked_is_refused_and_never_publishes_a_text(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare(has_reports=True)
    study = make_study(case.dicom / "a", num_slices=1)
    case.write_reports({study.study_instance_uid: "Small effusion."})
    for name, message in (
        ("other", "must name installed recognizers, got 'other'; install its package"),
        ("absent", "'absent' must be importable, got AttributeError"),
        ("none", "'none' must be callable, got Pattern"),
    ):
        with pytest.raises(ConfigError, match=message):
            case.pack(f'deid.recognizers=["{name}"]')
    for name in ("outside", "unnamed"):
        summary = case.pack(f'deid.recognizers=["{name}"]', "policy.max_quarantined_share=1.0")
        assert summary.status == "quarantine_limit"
        assert summary.reasons["WORKER_FAILED"] >= 1
        assert not list(case.output.rglob("*.tar"))
