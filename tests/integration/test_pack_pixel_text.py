"""A job finds text in pixels, blanks it and says where; the same with any number of processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom.dataset import FileDataset

from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.format.checks.verification import verify
from shardflow.format.codecs import decode_array
from shardflow.packing import PackSummary
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from tests.dicom_factory import MadeStudy, make_study
from tests.pack_case import PackCase, tree_digests

pytest.importorskip("onnxruntime", reason="the extra pixels is not installed")

pytestmark = pytest.mark.usefixtures("packs_inline")

_SIZE = (240, 320)
_NAME = "ADEYEMI TUNDE"
_MEMORY = "execution.memory_bytes=4GiB"
_NEGATIVE: dict[str, Any] = {"Modality": "XA", "PhotometricInterpretation": "MONOCHROME1"}
Change = Callable[[FileDataset, int], None]


def picture(*, text: str, value: int = 3000, seed: int = 0) -> NDArray[np.uint16]:
    """A disk with noise, and a text in the corner."""
    y, x = np.mgrid[: _SIZE[0], : _SIZE[1]]
    disk = np.hypot((y - 130) / 80, (x - 160) / 110) < 1
    pixels = (60 + 900 * disk + np.random.default_rng(seed).normal(0, 20, _SIZE)).clip(0, 4095)
    layer = np.zeros(_SIZE, np.uint8)
    cv2.putText(layer, text, (8, 24), cv2.FONT_HERSHEY_SIMPLEX, 0.6, 255, 1, cv2.LINE_AA)
    pixels[layer > 100] = value
    return np.asarray(pixels, np.uint16)


def shows(text: str, at: int = -1, **attributes: Any) -> Change:
    """Let images of a study show a text (only image ``at``, if given), and change attributes."""

    def change(dataset: FileDataset, index: int) -> None:
        dataset.PixelData = picture(text=text if at in (-1, index) else "", seed=index).tobytes()
        for keyword, value in attributes.items():
            setattr(dataset, keyword, value)

    return change


def page(dataset: FileDataset, _: int) -> None:
    """A page of text in white on black, declared as nothing."""
    layer = np.zeros(_SIZE, np.uint8)
    for line in range(12):
        place = (6, 16 + 18 * line)
        cv2.putText(layer, f"CTDIvol {line}.51 mGy  DLP 410", place, cv2.FONT_HERSHEY_SIMPLEX, 0.4, 255, 1)
    dataset.PixelData = (layer.astype(np.uint16) * 16).tobytes()
    dataset.Modality = "OT"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackCase, PackSummary, dict[str, MadeStudy]]:
    case = PackCase(tmp_path_factory.mktemp("text"))
    case.prepare()

    def study(name: str, number: int, change: Change, **given: Any) -> MadeStudy:
        return make_study(case.dicom / name, patient=f"P{number}", size=_SIZE, change=change, **given)

    studies = {
        "us": study("us", 1, shows(_NAME, Modality="US"), modality="CR", num_slices=2),
        "negative": study("negative", 2, shows(_NAME, **_NEGATIVE), modality="CR", num_slices=1),
        "ct": study("ct", 3, shows(_NAME, at=2), num_slices=3),
        "declared": study("declared", 4, shows("", BurnedInAnnotation="YES"), modality="CR", num_slices=1),
        "page": study("page", 5, page, modality="CR", num_slices=1),
    }  # fmt: skip
    with case.config_path.open("a", encoding="utf-8") as file:
        file.write(
            '[deid]\npixel_text = "blank"\npixel_text_share = 1.0\n[policy]\nmax_quarantined_share = 0\n'
        )
    return case, case.pack(_MEMORY), studies


def sample(case: PackCase, study: MadeStudy) -> tuple[dict[str, Any], dict[str, bytes]]:
    dataset = case.open()
    row = dataset.samples.find(case.sample_key(study.study_instance_uid))
    fields = dataset.read_fields(row)
    return json.loads(fields["study.json"]), fields


def test_text_is_blank_in_what_is_stored_and_the_rest_is_as_it_was(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]],
) -> None:
    case, summary, studies = packed
    assert summary.reasons == {"BURNED_IN_ANNOTATION": 2}, (
        "the page, and the text that was declared and not found"
    )
    for name, slices in (("us", 2), ("negative", 1)):
        meta, fields = sample(case, studies[name])
        (series,) = meta["series"]
        done = series["deidentification"]
        assert done["text"]["searched_slices"] == slices
        assert done["accepted_rules"] == []
        for index in range(slices):
            pixels = decode_array("b2nd", fields[f"s000.i{index:04d}.b2nd"]).astype(np.int64)
            original = picture(text=_NAME, seed=index).astype(np.int64)
            original = original if name == "us" else 4095 - original
            clean = picture(text="", seed=index)
            ink = clean != picture(text=_NAME, seed=index)
            hidden = np.zeros(_SIZE, bool)
            (run,) = [one for one in done["text"]["blanked"] if one["slices"][0] <= index < one["slices"][1]]
            for top, left, bottom, right in run["boxes"]:
                hidden[top:bottom, left:right] = True
                assert len(np.unique(pixels[top:bottom, left:right])) == 1
            assert (hidden & ink).sum() > 0.98 * ink.sum()
            np.testing.assert_array_equal(pixels[~hidden], original[~hidden])
            # What is blanked has the value of what surrounds it: dark there, in a negative too.
            ground = 60 if name == "us" else 4095 - 60
            assert np.abs(pixels[hidden] - ground).max() < 60
            assert hidden.mean() < 0.1


def test_text_in_one_drawn_image_of_a_ct_is_found(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]],
) -> None:
    case, _, studies = packed
    meta, fields = sample(case, studies["ct"])
    text = meta["series"][0]["deidentification"]["text"]
    assert text["searched_slices"] == 3
    assert [one["slices"] for one in text["blanked"]] == [[2, 3]]
    assert decode_array("b2nd", fields["s000.i0002.b2nd"]).max() < 1500 - 1024
    assert "113101" in meta["deidentification"]["profile_codes"]


def test_manifest_ledger_and_pages_say_what_was_done(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, _, _ = packed
    manifest = case.open().manifest
    extra: Any = manifest.extra
    assert extra["deidentification"]["counts"] == {"text_blanked_slices": 4, "text_searched_slices": 6}
    assert "113101" in extra["deidentification"]["profile_codes"]
    assert extra["config"]["deid"]["pixel_text"] == "blank"
    assert manifest.created_with["onnxruntime"]
    assert "text was found in 4 of 6" in (case.output / "report.html").read_text(encoding="utf-8")
    assert not verify(str(case.output)).damages
    (ledger,) = case.private.glob("inputs-*.jsonl")
    entries = [json.loads(line) for line in ledger.read_text(encoding="ascii").splitlines()]
    notes = {tuple(one["rules"]): one for one in entries if "rules" in one}
    assert set(notes) == {
        ("text", "ultrasound"),
        ("text", "fluoroscopy"),
        ("text",),
        ("declared",),
        ("page",),
    }
    assert all(("blanked" in one) == (names[0] == "text") for names, one in notes.items())
    for path in case.output.rglob("*"):
        assert not path.is_file() or b"ADEYEMI" not in path.read_bytes()
    monkeypatch.setattr("shardflow.cli.report._NUM_PLANTED_IMAGES", 2)
    # The inputs may be gone when the officer looks.
    moved = case.dicom.rename(case.folder / "gone")
    assert main(["report", str(case.output), "--privacy", str(case.private)]) == 0
    moved.rename(case.dicom)
    said = (case.private / "privacy-000001.html").read_text(encoding="utf-8")
    assert "slices with text that was found and blanked</td><td class=number>4<" in said
    assert "of 6 slices" in said
    assert "Of 8 images among the inputs 2 (25.00 %) were held back, and 4 (50.00 %) were packed" in said
    assert "6 lines of text in 2 generated" in said
    # Four blanked, one page, one that declares text.
    assert said.count("data:image/png;base64,") == 6
    assert said.count("packed, boxes blanked") == 4
    assert not list(case.output.rglob("pictures*"))


def test_the_bytes_are_the_same_for_any_number_of_processes_and_a_share_is_drawn_by_the_key(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]], tmp_path: Path
) -> None:
    case, _, studies = packed
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    (private / "secret.key").touch(mode=0o600)
    (private / "secret.key").write_bytes((case.private / "secret.key").read_bytes())
    given = [f"private_dir={private}", _MEMORY]
    case.pack(f"output={tmp_path / 'again'}", "execution.num_processes=2", *given)
    assert tree_digests(tmp_path / "again") == tree_digests(case.output)
    # Nothing is drawn, so that the CT keeps its text; suspects are searched all the same.
    case.pack(f"output={tmp_path / 'none'}", "deid.pixel_text_share=0", *given)
    other = PackCase(tmp_path)
    (tmp_path / "none").rename(other.output)
    meta, _ = sample(other, studies["ct"])
    assert meta["series"][0]["deidentification"]["text"] == {"blanked": [], "searched_slices": 0}
    meta, _ = sample(other, studies["us"])
    assert meta["series"][0]["deidentification"]["text"]["searched_slices"] == 2


def test_an_accepted_device_keeps_its_text(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]], tmp_path: Path
) -> None:
    case, _, _ = packed
    summary = case.pack(
        f"output={tmp_path / 'out'}",
        f"private_dir={tmp_path / 'private'}",
        'deid.accept=["text", "ultrasound"]',
        "deid.pixel_text_share=0",
        _MEMORY,
    )
    assert summary.reasons == {"BURNED_IN_ANNOTATION": 3}, "the negative's rule, a declared text and the page"


def test_a_removed_person_leaves_no_picture_and_no_count(
    packed: tuple[PackCase, PackSummary, dict[str, MadeStudy]], tmp_path: Path
) -> None:
    case, _, studies = packed
    copy = PackCase(Path(shutil.copytree(case.folder, tmp_path / "copy")))
    gone = case.sample_key(studies["us"].study_instance_uid)
    (before,) = copy.private.glob("pictures-*.jsonl")
    assert before.read_text(encoding="ascii").count(gone) == 2
    remove(copy.output, copy.private, Withdrawn(studies=[studies["us"].study_instance_uid]))
    compact(copy.output, copy.private, deletes_old=True)
    (after,) = copy.private.glob("pictures-*.jsonl")
    assert len(after.read_text(encoding="ascii").splitlines()) == 4
    assert gone not in after.read_text(encoding="ascii")
    extra: Any = copy.open().manifest.extra
    assert extra["deidentification"]["counts"] == {"text_blanked_slices": 2, "text_searched_slices": 4}


def test_settings_say_what_to_write(packed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case, _, _ = packed
    with pytest.raises(ConfigError, match="capitals and digits alone, got 'r mlo'; write 'RMLO'"):
        case.config('deid.pixel_text_keep=["r mlo"]')
    off = case.config("deid.pixel_text=off", "deid.pixel_text_share=0.05").deid
    assert "pixel_text" not in off.content()
    for silent in ({"pixel_text_share": 1.0}, {"pixel_text_keep": ("L",)}):
        with pytest.raises(ConfigError, match=f"deid.{next(iter(silent))} has no effect"):
            replace(off, **silent)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"install shardflow\[pixels\]"):
        case.pack(f"output={tmp_path / 'out'}", f"private_dir={tmp_path / 'private'}", _MEMORY)
