"""Real studies, and generated reports for them.

The images are the test studies that pydicom's wheel carries, and those of the data folder beside the
repository where there is one. They come without reports, so this module writes short ones from technical
facts alone (modality, body part, number and size of the slices). Every report says that it is generated.

The two configuration files of the demo; they lie in its output, to be read and changed.
"""

from __future__ import annotations

import csv
import hashlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from pydicom import Dataset, dcmread

GENERATED = "Generated text, not a medical report."
"""Opens every report of the demo."""

_SHARED_FOLDERS = (
    "ct_philips_phantom",
    "dcmqi_ct_seg_sr",
    "dicom2nifti_small",
    "highdicom",
    "mr_ge_fruit",
    "mr_oblique_20",
    "rt_utils",
)
_NAMES = {"CR": "computed radiography", "CT": "computed tomography", "DX": "digital radiography"}
_NAMES |= {"MR": "magnetic resonance imaging"}
_KEYWORDS = ["BodyPartExamined", "Columns", "Modality", "NumberOfFrames", "PixelData", "Rows"]
_KEYWORDS += ["SOPInstanceUID", "SeriesInstanceUID", "SliceThickness", "StudyInstanceUID"]
# Below this many pixels a side an image counts as a thumbnail; the bundled files hold many.
_SMALL_PIXELS = 100
_MANY_SLICES = 16


@dataclass(slots=True)
class DemoStudy:
    """What the generated report of one study may tell."""

    modality: str
    body_part: str
    slices_of_series: Counter[str] = field(default_factory=Counter)
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)
    thickness_mm: float | None = None

    @property
    def num_slices(self) -> int:
        """Slices of all series together."""
        return self.slices_of_series.total()


def input_folders(repository: Path) -> list[Path]:
    """Return the folders with DICOM files that are there: pydicom's own, and the shared data."""
    bundled = Path(str(files("pydicom"))) / "data"
    shared = repository.parent / "shared" / "data"
    return [
        bundled / "charset_files",
        bundled / "test_files",
        *(shared / name for name in _SHARED_FOLDERS if (shared / name).is_dir()),
    ]


def find_studies(folders: list[Path]) -> dict[str, DemoStudy]:
    """Read headers and collect the studies that get a report, by Study Instance UID."""
    studies: dict[str, DemoStudy] = {}
    seen: set[str] = set()
    for header in _headers(folders):
        instance = str(header.get("SOPInstanceUID", ""))
        if instance in seen:  # one image in several encodings
            continue
        seen.add(instance)
        uid, modality = str(header.get("StudyInstanceUID", "")), str(header.get("Modality", ""))
        if not uid or modality not in _NAMES or "PixelData" not in header:
            continue
        body_part = str(header.get("BodyPartExamined") or "").strip().lower()
        study = studies.setdefault(uid, DemoStudy(modality, body_part))
        study.body_part = study.body_part or body_part
        study.slices_of_series[str(header.get("SeriesInstanceUID", ""))] += int(
            header.get("NumberOfFrames") or 1
        )
        study.shapes[int(header.Rows), int(header.Columns)] += 1
        if header.get("SliceThickness"):
            study.thickness_mm = float(header.SliceThickness)
    return studies


def _headers(folders: list[Path]) -> Iterator[Dataset]:
    # Many bundled files are broken on purpose: packing says what became of each, here they get no report.
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
            try:
                header = dcmread(path, specific_tags=_KEYWORDS, defer_size=4096)
                header.decode()
            except Exception:  # noqa: BLE001, S112 - a parser of broken files raises anything
                continue
            yield header


def _report(study: DemoStudy) -> str:
    """Write a report from technical facts: same facts, same text, so that a small model can learn it."""
    (rows, columns), _ = study.shapes.most_common(1)[0]
    num_slices, num_series = study.num_slices, len(study.slices_of_series)
    part = f" of the {study.body_part}" if study.body_part else ""
    slices = "1 slice" if num_slices == 1 else f"{num_slices} slices"
    thickness = f", {study.thickness_mm:g} mm thick" if study.thickness_mm else ""
    amount = "a long stack of slices" if num_slices >= _MANY_SLICES else "a few slices"
    amount = "a single image" if num_slices == 1 else amount
    size = "thumbnail" if max(rows, columns) < _SMALL_PIXELS else "full"
    return "\n".join(
        [
            GENERATED,
            f"Examination: {_NAMES[study.modality]}{part}.",
            f"Technique: {slices} in {num_series} series, {rows} x {columns} pixels{thickness}.",
            f"Findings: {amount} of {size} size.",
            f"Impression: {study.modality}{part}, {amount}.",
        ]
    )


def write_reports(studies: dict[str, DemoStudy], path: Path) -> None:
    """Write the reports as a CSV table of study and text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["study_instance_uid", "text"])
        for uid, study in sorted(studies.items()):
            table.writerow([uid, _report(study)])


SEED = 7
MICRO_BATCH_SIZE = 1
MICRO_BATCHES_PER_STEP = 4
TAIL = "mask"

_PACK = """\
# Written by the demo. Pack again with: shardflow pack --config {name}
output = "dataset"
private_dir = "private"

[inputs]
dicom = [
{folders}]
reports = "reports.csv"
reports_format = "csv"

[splits]
train = 80
val = 20

[shards]
target_bytes = "16MiB"

[policy]
require_report = true
# The bundled files are test files: many are broken on purpose.
on_bad_instance = "drop_instance"
max_quarantined_share = 0.5

[execution]
num_processes = 2
memory_bytes = "4GiB"
"""

_TRAIN = """\
# Written by the demo. Train with: shardflow train --config {name} --nproc-per-node 2
[data]
dataset = "dataset"
train_split = "train"
eval_split = "val"

[batch]
micro_batch_size = {micro_batch_size}
micro_batches_per_step = {micro_batches_per_step}
tail = "{tail}"

[fields.image]
type = "slices"
series = "series == 0"
num_slices = 4
size = [64, 64]
dtype = "float32"
missing = "pad"

[fields.report]
type = "text"
missing = "pad"

[image]
rows = 64
columns = 64

[text]
tokenizer = "tokenizer"
max_tokens = 128

[model]
patch_size = 16
vision_width = 96
vision_layers = 2
vision_heads = 4
language_width = 96
language_layers = 2
language_heads = 4

[optimizer]
learning_rate = 2e-3
warmup_steps = 8

[run]
output = "run"
seed = {seed}
num_epochs = {epochs}
checkpoint_every_steps = {checkpoint_every_steps}
device = "cpu"

[timeouts]
startup_s = 120.0
steady_s = 30.0
hang_s = 25.0
control_s = 120.0

[loader]
wait_timeout_s = 20.0
"""


def write_key(path: Path) -> None:
    """Write the key that the surrogates are made with.

    A real key is random and secret (packing makes one). The demo's data are public, and with a fixed key
    everybody gets the same dataset from the same files.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(hashlib.sha256(b"shardflow demo: public data, nothing to hide").digest())


def write_pack_config(path: Path, folders: list[Path]) -> None:
    """Write the recipe of the packing job."""
    lines = "".join(f'    "{folder}",\n' for folder in folders)
    path.write_text(_PACK.format(name=path.name, folders=lines), encoding="utf-8")


def write_train_config(path: Path, *, num_epochs: int, checkpoint_every_steps: int) -> None:
    """Write the settings of the training job."""
    text = _TRAIN.format(
        name=path.name,
        micro_batch_size=MICRO_BATCH_SIZE,
        micro_batches_per_step=MICRO_BATCHES_PER_STEP,
        tail=TAIL,
        seed=SEED,
        epochs=num_epochs,
        checkpoint_every_steps=checkpoint_every_steps,
    )
    path.write_text(text, encoding="utf-8")
