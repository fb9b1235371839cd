"""One job over all real files: each ends in one outcome, and tests/golden/outcomes.md lists them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pydicom
import pytest
from pydicom.uid import UID

from shardflow.format.reasons import REASONS, Outcome, Reason
from tests.pack_case import REPOSITORY, PackCase
from tests.unit.packing.sources.dicom.corpus import BUNDLED, MORE

pytestmark = pytest.mark.usefixtures("packs_inline")

PAGE = REPOSITORY / "tests" / "golden" / "outcomes.md"
MAX_NAMES = 2
HEAD = """\
# Outcomes of real files

What `shardflow pack` does with the public sample files that the tests use: those of other projects, those in
pydicom's wheel, and those of the package pydicom-data. Settings are the default ones, but for the largest
share of quarantined files. `tests/integration/test_pack_outcomes.py` packs them, writes this page and
checks it. Licenses, readme files and gradient tables are omitted: all are skipped as `NOT_DICOM`.
[What each reason means](../../docs/dicom.md#reasons), and [what to do](../../docs/howto/quarantine.md).
A folder stands for three and more of its files.

| what it is | packed, or why not | files |
|---|---|---|
"""
# Younger than the dictionary of the installed pydicom.
NAMES = {"1.2.840.10008.5.1.4.1.1.66.7": "Label Map Segmentation"}
CODECS = (
    # Words of the transfer syntaxes' names, and what stands for them.
    (", Non-Hierarchical, First-Order Prediction (Process 14 [Selection Value 1])", ""),
    ("JPEG 2000 Image Compression (Lossless Only)", "JPEG 2000 Lossless"),
    (" (Near-Lossless)", ""),
    (" Image Compression", ""),
)
KINDS = {
    ".bdf": "BDF biosignals",
    ".bval": "text",
    ".bvec": "text",
    ".edf": "EDF biosignals",
    ".hl7": "HL7 v2 message",
    ".jpeg": "picture",
    ".jpg": "picture",
    ".json": "JSON",
    ".md": "text",
    ".nrrd": "NRRD volume",
    ".png": "picture",
    ".txt": "text",
    ".xml": "C-CDA document",
}


@pytest.mark.usefixtures("golden")  # so that `make golden` runs it
def test_every_real_file_ends_as_the_page_says(
    tmp_path: Path, shared_data: Path, request: pytest.FixtureRequest
) -> None:
    files: dict[tuple[str, str], dict[str, list[str]]] = {}
    collections = (
        ("shared", shared_data, ""),
        ("bundled", BUNDLED, "pydicom"),
        ("more", MORE, "pydicom-data"),
    )
    for name, root, label in collections:
        (tmp_path / name).mkdir()
        case = PackCase(tmp_path / name)
        case.prepare()
        text = f'output = "out"\nprivate_dir = "private"\n[inputs]\ndicom = ["{root}"]\n'
        case.config_path.write_text(text + "[execution]\nnum_processes = 2\n", encoding="utf-8")
        summary = case.pack("policy.max_quarantined_share=1.0")
        # Files of several records are inputs of their own for every study beside.
        entries = _entries(case, root)
        assert summary.inputs["total"] == len(entries)
        found = {(folder, file) for folder, file, _ in entries}
        assert len(found) == sum(path.is_file() for path in root.rglob("*"))
        _add(files, entries, root, label)
    page = HEAD + "\n".join(_rows(files)) + "\n"
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


def _entries(case: PackCase, root: Path) -> list[tuple[str, str, str | None]]:
    """Folder, name and reason of each file."""
    (ledger,) = case.private.glob("inputs-*.jsonl")
    found = []
    for line in ledger.read_text(encoding="ascii").splitlines():
        entry = json.loads(line)
        path = Path(entry["path"]).relative_to(root)
        found.append((path.parent.as_posix(), path.name, entry["reason"]))
    return sorted(found, key=lambda entry: (entry[0], str(entry[2] or ""), entry[1]))


def _add(
    files: dict[tuple[str, str], dict[str, list[str]]],
    entries: list[tuple[str, str, str | None]],
    root: Path,
    label: str,
) -> None:
    """Add the files of a collection by what they are and become; by its folders, unless it has a label."""
    for folder, name, reason in entries:
        kind = _kind(root / folder / name)
        if kind == "text" and reason == Reason.NOT_DICOM:
            continue
        path = "/".join(part for part in (label, folder, name) if part not in ("", "."))
        of_folders = files.setdefault((kind, "" if reason is None else reason), {})
        of_folders.setdefault(path.partition("/")[0], []).append(path)


def _rows(files: dict[tuple[str, str], dict[str, list[str]]]) -> Iterator[str]:
    for (kind, reason), of_folders in sorted(files.items()):
        shown = [
            f"{folder} ({len(paths)})" if len(paths) > MAX_NAMES else ", ".join(f"`{path}`" for path in paths)
            for folder, paths in of_folders.items()
        ]
        result = f"{REASONS[Reason(reason)].outcome}: `{reason}`" if reason else Outcome.PACKED
        yield f"| {kind} | {result} | {', '.join(shown)} |"


def _kind(path: Path) -> str:
    """Say what a file is, in the words of the standard where it is DICOM."""
    with path.open("rb") as file:
        is_dicom = file.read(132)[128:] == b"DICM"
    if not is_dicom:
        # Without a preamble pydicom has to be asked, and it takes anything.
        return KINDS.get(
            path.suffix.lower(), "text" if path.stem.startswith(("LICENSE", "README")) else "data"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are wrong on purpose
        header = pydicom.dcmread(path, stop_before_pixels=True)
    uid = str(header.get("SOPClassUID", "") or header.file_meta.get("MediaStorageSOPClassUID", ""))
    name = NAMES.get(uid) or (UID(uid).name if uid else "DICOM without a SOP class")
    syntax = header.file_meta.get("TransferSyntaxUID")
    codec = f", {UID(syntax).name}" if syntax is not None and UID(syntax).is_compressed else ""
    for words, short in CODECS:
        codec = codec.replace(words, short)
    return f"{name.removesuffix(' Storage')}{codec}"
