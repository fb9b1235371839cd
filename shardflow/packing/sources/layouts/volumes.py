"""Layouts of volumes with their labels: ``nnunet``, ``msd``, ``pairs`` and ``totalsegmentator``.

A case is a study, each channel of it a series, and its file of labels an attachment whose classes become
regions under the names that ``dataset.json`` (or the file's own name) gives them. Labels must lie on the
voxels of an image of their case and hold no other numbers; what does not is quarantined, never guessed.

Source: nnU-Net v2, documentation/dataset_format.md; Antonelli et al., The Medical Segmentation Decathlon,
Nature Communications 13 (2022); Wasserthal et al., TotalSegmentator, Radiology: AI 5 (2023).
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from shardflow.errors import ConfigError, os_reason
from shardflow.format.reasons import Reason
from shardflow.packing.sources.layouts.base import (
    LayoutInputs,
    PlacedLayout,
    find_files,
    patient_attributes,
    read_reports,
    read_table,
)
from shardflow.packing.sources.placement import ClassNames, DiscoveredFile, ImageForm, Placement
from shardflow.packing.sources.reports import BrokenReport, ReportRecord
from shardflow.reports.lexicon import word_set

_DATASET: Final = "dataset.json"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _+().,:/-]{0,63}")
"""Names of classes and channels: published as they are, so nothing longer than a name passes."""
_MAX_LABEL: Final = 0xFFFF
_MODALITIES: Final = {
    **dict.fromkeys(("ct", "cta", "cbct"), "CT"),
    **dict.fromkeys(("pet", "pt", "suv"), "PT"),
    **dict.fromkeys(("us", "ultrasound"), "US"),
}
_MR: Final = re.compile(r"(?:mri?\b|mr[_-]|t1|t2|flair|adc|dwi|dce|pd\b|swi|cine|bold)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Described:
    """Content of a ``dataset.json``."""

    channels: tuple[str, ...]
    classes: ClassNames
    """Without the background."""


class Decathlon(PlacedLayout):
    """Layout of the Medical Segmentation Decathlon: ``imagesTr/NAME.nii.gz``, ``labelsTr/NAME.nii.gz``.

    Images of four axes hold the channels along the last one. Input folders are tasks, or hold tasks. Images
    of ``imagesTs`` are of the split ``test``. Cases are patients only if ``is_patient_study`` says so; else
    ``layout.table`` names the patient of each case.
    """

    image: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<task>(?:.*/)?)images(?P<part>Tr|Ts)/(?P<case>[^/]+?)(?P<channel>)(?P<end>\.nii(?:\.gz)?)"
    )
    label: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<task>(?:.*/)?)labels(?P<part>Tr|Ts)/(?P<case>[^/]+?)(?P<end>\.nii(?:\.gz)?)"
    )

    is_described: ClassVar[bool] = True
    """Whether there must be a ``dataset.json`` that names channels and classes."""

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        self._described: dict[Path, _Described] = {}
        for root in self._roots:
            for path in (root / _DATASET, *sorted(root.glob(f"*/{_DATASET}"))):
                if path.is_file():
                    self._described[path.parent] = _read_description(path, has_channels=self.is_described)
        if self.is_described and not self._described:
            raise ConfigError(
                f"layout {self.settings.kind!r} needs a {_DATASET} in an input folder or in a folder "
                "directly below one, got none; name the folder that holds imagesTr in inputs.dicom."
            )
        self._patients = self._read_patients()

    def _read_patients(self) -> dict[str, str]:
        table = self.settings.table
        if table is None:
            if not self.settings.is_patient_study:
                raise ConfigError(
                    f"layout {self.settings.kind!r} names cases and no patients; set "
                    "layout.is_patient_study = true if no patient has two cases, else name a table with the "
                    "columns case and patient in layout.table."
                )
            return {}
        columns = {"case": "case", "patient": "patient", **self.settings.columns}
        found: dict[str, str] = {}
        for row in read_table(table, "layout.table", columns, ("case", "patient")):
            if row.values is None or not row.values["case"] or not row.values["patient"]:
                raise ConfigError(
                    f"layout.table must name a case and its patient in every row, but line {row.place} does "
                    "not; correct it."
                )
            case, patient = row.values["case"], row.values["patient"]
            if found.setdefault(case, patient) != patient:
                raise ConfigError(
                    f"layout.table must name one patient of each case, but the case on line {row.place} has "
                    "two; correct it."
                )
        return found

    def discover(self) -> list[DiscoveredFile]:
        """List the files, and the labels and channels that a case of ``imagesTr`` lacks."""
        found = super().discover()
        if self.settings.missing_files == "ignore":
            return found
        images: defaultdict[tuple[int, str, str, str], dict[str, str]] = defaultdict(dict)
        labeled = set()
        for file in found:
            label = self.label.fullmatch(file.relative_path)
            if label is not None and not _is_hidden(label["case"]):
                groups = label.groupdict(default="")
                labeled.add((file.root_index, groups["task"], groups.get("part", ""), groups["case"]))
            match = self.image.fullmatch(file.relative_path)
            if match is not None and not _is_hidden(match["case"]) and file.problem is None:
                groups = match.groupdict(default="")
                key = (file.root_index, groups["task"], groups.get("part", ""), groups["case"])
                images[key][groups.get("channel", "")] = groups["end"]
        missing = []
        for (root, task, part, case), channels in images.items():
            described = self._described.get(self._roots[root] / task)
            end = next(iter(channels.values()))
            labels = f"{task}labels{part}/{case}{end}"
            if part != "Ts" and (root, task, part, case) not in labeled:
                missing.append((root, labels))
            names = () if described is None else self._channel_names(described)
            missing += [
                (root, f"{task}images{part}/{case}{one}{end}") for one in names if one not in channels
            ]
        return found + [
            DiscoveredFile(root_index=root, relative_path=path, num_bytes=0, problem=Reason.MISSING_FILE)
            for root, path in sorted(missing)
        ]

    def _channel_names(self, described: _Described) -> Sequence[str]:  # noqa: ARG002 - all channels in one file
        """Return how the names of a case's files end."""
        return ("",)

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Place an image or a file of labels."""
        name = file.relative_path.rsplit("/", 1)[-1]
        if name == _DATASET:
            return Reason.LAYOUT_FILE
        if _is_hidden(name):
            return Reason.NOT_IMAGE
        match = self.image.fullmatch(file.relative_path) or self.label.fullmatch(file.relative_path)
        if match is None:
            return super().place(file)
        folder = self._roots[file.root_index] / match["task"]
        described = self._described.get(folder)
        if described is None and self.is_described:
            return Reason.NOT_IN_LAYOUT
        described = described or _Described(channels=(), classes={})
        return self._place(match, folder.name, described)

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:  # noqa: ARG002 - as every layout
        """Refuse images in other folders."""
        return Reason.NOT_IN_LAYOUT

    def _place(self, match: re.Match[str], task: str, described: _Described) -> Placement | Reason:
        case = match["case"]
        # Tasks count their cases alike.
        study = f"{task}/{case}"
        patient = self._patients.get(case, "")
        split = self.split_of(patient or case, "test" if match.groupdict().get("part") == "Ts" else "")
        if isinstance(split, Reason):
            return split
        if not patient and not self.settings.is_patient_study:
            return Reason.MISSING_IDENTIFIER
        groups = match.groupdict()
        is_image = match.re is self.image
        channels = self._channels_of(groups["channel"], described) if is_image else ()
        if isinstance(channels, Reason):
            return channels
        return Placement(
            form="nifti",
            patient=patient,
            study=study,
            series=f"{study}/{groups['channel']}" if is_image else "",
            instance=f"{study}/{groups['channel']}" if is_image else "",
            split=split,
            modality=self._modality(channels),
            attributes={},
            is_patient_study=self.settings.is_patient_study,
            channels=channels,
            classes=None if is_image else described.classes,
        )

    def _channels_of(self, channel: str, described: _Described) -> tuple[str, ...] | Reason:  # noqa: ARG002
        """Return the names of the channels that a file holds."""
        return described.channels

    def _modality(self, channels: Sequence[str]) -> str:
        """Return the modality of the settings, else that which all names of channels mean."""
        if self.settings.modality:
            return self.settings.modality.upper()
        found = {_MODALITIES.get(name.casefold()) or ("MR" if _MR.match(name) else "") for name in channels}
        return found.pop() if len(found) == 1 else ""

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``; they name studies as ``TASK/CASE``."""
        return read_reports(self.inputs)


class NnUnet(Decathlon):
    """Layout of nnU-Net's raw data: ``imagesTr/CASE_0000.nii.gz``, a file a channel; else as `Decathlon`."""

    image: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<task>(?:.*/)?)images(?P<part>Tr|Ts)/(?P<case>[^/]+)(?P<channel>_\d{4})(?P<end>\.nii(?:\.gz)?)"
    )

    def _channel_names(self, described: _Described) -> Sequence[str]:
        return [f"_{number:04d}" for number in range(len(described.channels))]

    def _channels_of(self, channel: str, described: _Described) -> tuple[str, ...] | Reason:
        number = int(channel[1:])
        names = described.channels[number : number + 1]
        return names or Reason.NOT_IN_LAYOUT


class Pairs(Decathlon):
    """Layout of plain pairs: ``images/NAME.nii.gz`` and ``labels/NAME.nii.gz`` (or ``masks``).

    Labels may be called ``NAME_seg``, ``NAME_label`` or ``NAME_mask``. A ``dataset.json`` beside the two
    folders may name the classes; without one regions have their numbers alone.
    """

    is_described: ClassVar[bool] = False
    image: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<task>(?:.*/)?)images?/(?P<case>[^/]+?)(?P<channel>)(?P<end>\.nii(?:\.gz)?)"
    )
    label: ClassVar[re.Pattern[str]] = re.compile(
        r"(?P<task>(?:.*/)?)(?:labels?|masks?|segmentations?)/"
        r"(?P<case>[^/]+?)(?:[-_.](?:labels?|masks?|seg|segmentation))?(?P<end>\.nii(?:\.gz)?)"
    )


_PARTS: Final = word_set(
    "adrenal and aorta appendage artery atrial atrium autochthon bladder bones bowel brachiocephalic "
    "brain cardiac carotid cartilages cava cavity clavicle clavicula colon common cord costal cyst disc "
    "discs duodenum esophagus eye face femur fibula gallbladder gland gluteus hands heart hip humerus "
    "iliac iliopsoas inferior intervertebral kidney left liver lobe lower lung maximus medius middle "
    "minimus muscle myocardium pancreas patella portal prostate psoas pulmonary quadriceps radius rib "
    "right sacrum scapula skull small spinal spleen splenic sternum stomach subclavian superior thigh "
    "thyroid tibia trachea trunk ulna upper urinary vein vena ventricle vertebra vertebrae vessels"
)
"""Words of the class names of TotalSegmentator: what file names of masks may publish."""
_LEVEL: Final = re.compile(r"[CLST]?\d{1,2}")


class TotalSegmentator(PlacedLayout):
    """Layout of TotalSegmentator: ``SUBJECT/ct.nii.gz`` (or ``mri``), ``SUBJECT/segmentations/CLASS.nii.gz``.

    A subject is a patient, and a mask a region under its file's name, as far as that is made of the words of
    the published classes. ``meta.csv`` in the input folder, if it is there, has the official splits, sexes
    and ages.
    """

    image: ClassVar[re.Pattern[str]] = re.compile(r"(?:.*/)?(?P<case>[^/]+)/(?P<what>ct|mri)\.nii(?:\.gz)?")
    label: ClassVar[re.Pattern[str]] = re.compile(
        r"(?:.*/)?(?P<case>[^/]+)/segmentations/(?P<what>[^/]+)\.nii(?:\.gz)?"
    )

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        self._subjects: dict[str, Mapping[str, str]] = {}
        for path in find_files(self._roots, "meta.csv"):
            self._subjects.update(_read_subjects(path))

    def discover(self) -> list[DiscoveredFile]:
        """List the files, and the images of subjects that have none."""
        found = super().discover()
        if self.settings.missing_files == "ignore":
            return found
        subjects, masks = set(), {}
        for file in found:
            folder = (file.root_index, file.relative_path.rsplit("/", 1)[0])
            if self.image.fullmatch(file.relative_path):
                subjects.add(folder)
            elif (match := self.label.fullmatch(file.relative_path)) and not _is_hidden(match["what"]):
                masks[folder[0], folder[1].rpartition("/segmentations")[0]] = file
        return (
            found
            + [
                DiscoveredFile(
                    root_index=root,
                    relative_path=f"{folder}/ct.nii.gz",
                    num_bytes=0,
                    problem=Reason.MISSING_FILE,
                )
                for root, folder in sorted(masks.keys() - subjects)
            ]
            + [
                DiscoveredFile(
                    root_index=root,
                    relative_path=f"{folder}/segmentations/missing.nii.gz",
                    num_bytes=0,
                    problem=Reason.MISSING_FILE,
                )
                for root, folder in sorted(subjects - masks.keys())
            ]
        )

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:  # noqa: ARG002 - volumes only
        """Place an image or a mask by its path."""
        match = self.image.fullmatch(path) or self.label.fullmatch(path)
        if _is_hidden(path.rsplit("/", 1)[-1]):
            return Reason.NOT_IMAGE
        if match is None:
            return Reason.NOT_IN_LAYOUT
        case, what = match["case"], match["what"]
        said = self._subjects.get(case, {})
        split = self.split_of(case, said.get("split", ""))
        if isinstance(split, Reason):
            return split
        is_image = match.re is self.image
        return Placement(
            form="nifti",
            patient=case,
            study=case,
            series=f"{case}/{what}" if is_image else "",
            instance=f"{case}/{what}" if is_image else "",
            split=split,
            modality={"ct": "CT", "mri": "MR"}.get(what, ""),
            attributes=patient_attributes(sex=said.get("gender", ""), age=said.get("age", "")),
            classes=None if is_image else {class_of(what): (1,)},
        )

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``; they name studies as subjects."""
        return read_reports(self.inputs)


def _read_subjects(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Read ``meta.csv``, whose columns are separated by semicolons.

    Raises:
        ConfigError: It is no such table.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, delimiter=";")
            if not {"image_id", "split"} <= {*(rows.fieldnames or ())}:
                raise ConfigError(
                    "meta.csv must have the columns image_id and split, separated by semicolons, as "
                    "TotalSegmentator distributes it; correct the table, or move it out of the input folder."
                )
            for row in rows:
                yield row["image_id"] or "", {key: row.get(key) or "" for key in ("age", "gender", "split")}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"meta.csv must be a readable table, got {os_reason(error)}; repair it.") from None


def class_of(name: str) -> str:
    """Return the name of a mask, empty where it is not made of the words of classes."""
    is_known = all(word in _PARTS or _LEVEL.fullmatch(word) for word in name.split("_"))
    return name if is_known and not _LEVEL.fullmatch(name) else ""


def _is_hidden(name: str) -> bool:
    """Whether a file is another system's own, such as the ``._NAME`` in archives made on a Mac."""
    return name.startswith(".")


def _read_description(path: Path, *, has_channels: bool) -> _Described:
    """Read channels and classes of nnU-Net (both versions) or of the Decathlon.

    Raises:
        ConfigError: They are missing, or not as described there.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{_DATASET} must be a readable JSON file, got {os_reason(error)}; repair it."
        ) from None
    if not isinstance(content, Mapping):
        raise ConfigError(f"{_DATASET} must be a JSON object, got {type(content).__name__}; repair it.")
    channels = _channels(content) if has_channels else ()
    return _Described(channels=channels, classes=read_classes(content.get("labels")))


def _channels(content: Mapping[str, Any]) -> tuple[str, ...]:
    named = content.get("channel_names", content.get("modality"))
    if (
        not isinstance(named, Mapping)
        or {*named} != {str(number) for number in range(len(named))}
        or not named
    ):
        raise ConfigError(
            f"{_DATASET} must name its channels as channel_names (or modality), numbered from 0, such as "
            '{"0": "T1w", "1": "FLAIR"}; correct it.'
        )
    return tuple(_name(named[str(number)]) for number in range(len(named)))


def read_classes(labels: object) -> ClassNames:
    """Read the ``labels`` of a ``dataset.json``: name to number (or numbers), or number to name.

    Returns:
        The numbers of each class, without the background.

    Raises:
        ConfigError: They are neither.

    Example:
        >>> read_classes({"background": 0, "whole tumor": [1, 2], "core": 2})
        {'whole tumor': (1, 2), 'core': (2,)}
        >>> read_classes({"0": "background", "1": "liver"})
        {'liver': (1,)}
    """
    wrong = ConfigError(
        f'{_DATASET} must have labels such as {{"background": 0, "liver": 1}} or {{"0": "background", '
        f'"1": "liver"}}, with whole numbers up to {_MAX_LABEL}; correct it.'
    )
    if not isinstance(labels, Mapping) or not labels:
        raise wrong
    found: ClassNames = {}
    for key, value in labels.items():
        name, numbers = (value, key) if isinstance(value, str) and not value.isdecimal() else (key, value)
        listed = numbers if isinstance(numbers, list) else [numbers]
        if not all(type(one) is int or (isinstance(one, str) and one.isdecimal()) for one in listed):
            raise wrong
        values = tuple(sorted({*map(int, listed)}))
        if not values or not 0 <= values[0] <= values[-1] <= _MAX_LABEL or _name(name) in found:
            raise wrong
        if values != (0,):
            found[name] = values
    return found


def _name(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{_DATASET} must have names of 1 to 64 letters, digits, blanks and _+().,:/- for channels and "
            "classes, because they are published; rename one."
        )
    return name
