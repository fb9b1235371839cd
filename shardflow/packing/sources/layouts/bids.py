"""Layout of the Brain Imaging Data Structure: ``bids``.

A subject is a patient, a session a study, and an image file a series whose technical facts are those of its
JSON sidecars, also of those above it (the inheritance principle). ``participants.tsv`` and the tables of
sessions become an attached table. Masks and discrete segmentations, in the dataset or in its
``derivatives``, become regions where they lie on the voxels of an image of their session.

Source: The Brain Imaging Data Structure specification 1.10, chapters "Common principles", "Magnetic
resonance imaging", "Positron emission tomography" and "Imaging data types" of the derivatives.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Final

from shardflow.errors import ConfigError, os_reason
from shardflow.format.reasons import Reason
from shardflow.packing.sources.layouts.base import (
    LabelTable,
    LayoutInputs,
    PlacedLayout,
    form_of_path,
    patient_attributes,
    read_reports,
)
from shardflow.packing.sources.layouts.volumes import NAME, class_of
from shardflow.packing.sources.placement import Attributes, ClassNames, DiscoveredFile, ImageForm, Placement
from shardflow.packing.sources.reports import BrokenReport, ReportRecord
from shardflow.reports.lexicon import word_set

_DESCRIPTION: Final = "dataset_description.json"
_MODALITIES: Final = {**dict.fromkeys(("anat", "dwi", "fmap", "func", "perf", "swi"), "MR"), "pet": "PT"}
"""Data types (folders) that hold volumes, and their modality."""
_VOLUMES: Final = word_set(
    "CT FLAIR FLASH PD PDw PDT2 SWI T1rho T1w T2star T2starw T2w UNIT1 angio inplaneT1 inplaneT2 "
    "Chimap M0map MTRmap MTsat PDmap R1map R2map R2starmap T1map T2map T2starmap"
)
"""Suffixes of files of one volume, which name the channel."""
_LABELS: Final = frozenset({"mask", "dseg", "roi"})
"""Suffixes of files whose voxels are labels."""
_SPACES: Final = frozenset({"", "orig", "T1w", "T2w", "FLAIR", "individual"})
"""Spaces of labels that may be those of an image; no template's."""
_ABBREVIATIONS: Final = {
    "BG": "background",
    "BS": "brainstem",
    "CGM": "cortical gray matter",
    "CSF": "cerebrospinal fluid",
    "GM": "gray matter",
    "L": "lesion",
    "SCGM": "subcortical gray matter",
    "WM": "white matter",
}
"""Common labels of the specification ("Common image-derived labels"), and `L` of ATLAS."""
_WORDS: Final = word_set(
    "abnormal brain cerebellum cortex core edema enhancing gray grey head hippocampus infarct lesion lesions "
    "matter necrosis stroke thalamus tissue tumor tumour white whole"
)
_ENTITY: Final = re.compile(r"([a-zA-Z0-9]+)-([a-zA-Z0-9+]+)")
_PATH: Final = re.compile(
    r"(?P<derivative>(?:derivatives/(?:[^/]+/)?)?)(?P<subject>sub-[a-zA-Z0-9+]+)/(?:(?P<session>ses-[a-zA-Z0-9+]+)/)?"
    r"(?P<datatype>[a-z]+)/(?P<name>[^/]+?)\.nii(?:\.gz)?"
)
_DERIVATIVES: Final = "derivatives/"
_OTHER_FOLDERS: Final = ("code/", "phenotype/", "sourcedata/", "stimuli/")
_MAX_B_VALUE: Final = 1e6
_MAX_NUMBER: Final = 1e9
_MAX_BYTES: Final = 4 << 20
_TEXTS: Final = {
    "BodyPart": "BodyPartExamined",
    "BodyPartExamined": "BodyPartExamined",
    "ConvolutionKernel": "ConvolutionKernel",
    "ImageType": "ImageType",
    "Manufacturer": "Manufacturer",
    "MRAcquisitionType": "MRAcquisitionType",
    "ScanningSequence": "ScanningSequence",
    "SequenceVariant": "SequenceVariant",
    "ScanOptions": "ScanOptions",
}
_NUMBERS: Final = {
    "EchoTime": ("EchoTime", 1000.0),
    "FlipAngle": ("FlipAngle", 1.0),
    "InversionTime": ("InversionTime", 1000.0),
    "MagneticFieldStrength": ("MagneticFieldStrength", 1.0),
    "RepetitionTime": ("RepetitionTime", 1000.0),
    "SliceThickness": ("SliceThickness", 1.0),
    "XRayTubeCurrent": ("XRayTubeCurrent", 1.0),
}
"""Fields of sidecars: the DICOM keyword, and its unit in that of the sidecar (seconds, where it has ms)."""
_LAYOUT_ENDINGS: Final = (".json", ".tsv", ".tsv.gz", ".bval", ".bvec")
_LAYOUT_NAMES: Final = frozenset({"CHANGES", "CITATION.cff", "LICENSE", "README", "README.md", "README.rst"})
_UNKNOWN: Final = frozenset({"", "n/a"})
_STUDY: Final = "bids_study"


class Bids(PlacedLayout):
    """Layout of the Brain Imaging Data Structure: ``sub-01/ses-01/anat/sub-01_ses-01_T1w.nii.gz``.

    Each input folder is a dataset, with its ``dataset_description.json``.

    Raises:
        ConfigError: An input folder is none, or a table of participants cannot be read.
    """

    def __init__(self, inputs: LayoutInputs, splits: Sequence[str]) -> None:
        super().__init__(inputs, splits)
        for root in self._roots:
            if not (root / _DESCRIPTION).is_file():
                raise ConfigError(
                    f"layout 'bids' needs a {_DESCRIPTION} in every input folder, and one has none; name the "
                    "folder that holds it in inputs.dicom."
                )
        if len({root.name for root in self._roots}) < len(self._roots):
            raise ConfigError(
                "layout 'bids' needs input folders of different names, because they tell their subjects "
                "apart, and two are named alike; rename one, or name a link to it in inputs.dicom."
            )
        # Tables are found that leave out the prefix.
        self._participants = [
            {
                self.patient_name(subject): row
                for subject, row in _read_table(root / "participants.tsv", "participant_id").items()
            }
            for root in self._roots
        ]

    def patient_name(self, text: str) -> str:
        """Spell a subject of the split table as its folder does."""
        return text if text.startswith("sub-") else f"sub-{text}"

    def discover(self) -> list[DiscoveredFile]:
        """List the files below the input folders."""
        return self._files

    @cached_property
    def _files(self) -> list[DiscoveredFile]:
        return super().discover()

    def place_image(self, path: str, form: ImageForm) -> Placement | Reason:
        """Place nothing by a path alone; see `place`."""
        raise NotImplementedError

    def place(self, file: DiscoveredFile) -> Placement | Reason | None:
        """Place an image, or a file of labels."""
        path = file.relative_path
        name = path.rsplit("/", 1)[-1]
        if name.startswith("."):
            return Reason.NOT_IMAGE
        if name in _LAYOUT_NAMES or name.endswith(_LAYOUT_ENDINGS):
            return Reason.LAYOUT_FILE
        if path.startswith(_OTHER_FOLDERS):
            return Reason.LAYOUT_FILE
        match = _PATH.fullmatch(path)
        entities, suffix = _entities("" if match is None else match["name"])
        is_label = suffix in _LABELS
        if path.startswith(_DERIVATIVES) and (match is None or not is_label):
            return Reason.LAYOUT_FILE
        if match is None or match["datatype"] not in _MODALITIES:
            other = self.reason_of_other(self._roots[file.root_index] / path)
            return Reason.NOT_IN_LAYOUT if form_of_path(path) else other
        named = entities.get("sub", ""), entities.get("ses", "")
        if named != (match["subject"][4:], (match["session"] or "")[4:]):
            return Reason.NOT_IN_LAYOUT
        if suffix == "defacemask" or (is_label and entities.get("space", "") not in _SPACES):
            return Reason.LAYOUT_FILE
        return self._place(file, match, entities, suffix)

    def _place(
        self, file: DiscoveredFile, match: re.Match[str], entities: Mapping[str, str], suffix: str
    ) -> Placement | Reason:
        subject, root = match["subject"], file.root_index
        split = self.split_of(subject)
        if isinstance(split, Reason):
            return split
        study = self._study(root, subject, match["session"] or "")
        classes: ClassNames | None = None
        attributes: Attributes = {}
        if suffix in _LABELS:
            classes = self._classes(file, entities, suffix)
        else:
            found = self._facts(root, file.relative_path, suffix)
            if found is None:
                return Reason.INVALID_IMAGE_DESCRIPTION
            attributes = {**found, **self._person(root, subject)}
        b_values = self._b_values(root, file.relative_path) if suffix == "dwi" else ()
        if b_values is None:
            return Reason.INVALID_IMAGE_DESCRIPTION
        modality = "CT" if suffix == "CT" else _MODALITIES[match["datatype"]]
        is_image = classes is None
        series = f"{study}/{match['name']}" if is_image else ""
        return Placement(
            form="nifti",
            patient=self._patient(root, subject),
            study=study,
            series=series,
            instance=series,
            split=split,
            modality=self.settings.modality.upper() or modality,
            attributes=attributes,
            channels=(suffix,) if is_image and suffix in _VOLUMES else (),
            b_values=b_values,
            classes=classes,
        )

    def _patient(self, root: int, subject: str) -> str:
        # Datasets count their subjects alike. Those of the first one have the names that they have alone, so
        # that a dataset grows by naming a second folder.
        return subject if root == 0 else f"{self._roots[root].name}/{subject}"

    def _study(self, root: int, subject: str, session: str) -> str:
        patient = self._patient(root, subject)
        return f"{patient}/{session}" if session else patient

    def _person(self, root: int, subject: str) -> Attributes:
        row = self._participants[root].get(subject, {})
        return patient_attributes(sex=row.get("sex") or row.get("gender") or "", age=row.get("age") or "")

    # ---- sidecars --------------------------------------------------------------------------------

    @cached_property
    def _sidecars(self) -> dict[tuple[int, str, str], list[tuple[Mapping[str, str], Path]]]:
        """Sidecars by input folder, folder and ending, such as ``T1w.json``; general ones first."""
        found: defaultdict[tuple[int, str, str], list[tuple[Mapping[str, str], Path]]] = defaultdict(list)
        for file in self._files:
            folder, _, name = file.relative_path.rpartition("/")
            stem, dot, ending = name.partition(".")
            if ending in ("bval", "json", "tsv") and file.problem is None:
                entities, suffix = _entities(stem)
                key = file.root_index, folder, f"{suffix}{dot}{ending}"
                found[key].append((entities, self._roots[file.root_index] / file.relative_path))
        for each in found.values():
            each.sort(key=lambda one: (len(one[0]), one[1].name))
        return found

    def _applicable(self, root: int, path: str, ending: str) -> list[Path]:
        """Return the sidecars that apply to a file, the most general first."""
        folder, _, name = path.rpartition("/")
        entities, _ = _entities(name.partition(".")[0])
        places = [*map(str, reversed(PurePosixPath(folder).parents)), folder]
        return [
            sidecar
            for place in places
            for said, sidecar in self._sidecars.get((root, "" if place == "." else place, ending), ())
            if said.items() <= entities.items()
        ]

    def _facts(self, root: int, path: str, suffix: str) -> dict[str, tuple[Any, ...]] | None:
        """Return technical attributes of the sidecars of an image; None where one is damaged."""
        said: dict[str, Any] = {}
        for sidecar in self._applicable(root, path, f"{suffix}.json"):
            content = _read_json(sidecar)
            if content is None:
                return None
            said.update(content)
        found: dict[str, tuple[Any, ...]] = {}
        for field, keyword in _TEXTS.items():
            texts = said.get(field)
            texts = texts.split("\\") if isinstance(texts, str) else texts
            if isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts):
                found.setdefault(keyword, tuple(texts))
        for field, (keyword, factor) in _NUMBERS.items():
            number = said.get(field)
            # Larger integers than a float holds are numbers in JSON, and so is NaN to Python.
            if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < _MAX_NUMBER:
                found[keyword] = (round(float(number) * factor, 6),)
        if suffix == "dwi":
            found["ImageType"] = (*found.get("ImageType", ("ORIGINAL", "PRIMARY")), "DIFFUSION")
        return found

    def _b_values(self, root: int, path: str) -> tuple[float, ...] | None:
        """Return the b-values of a diffusion series; None where their file is damaged."""
        for sidecar in self._applicable(root, path, "dwi.bval")[-1:]:
            try:
                found = tuple(map(float, sidecar.read_text(encoding="ascii").split()))
            except (OSError, ValueError):
                return None
            return found if found and all(0 <= value < _MAX_B_VALUE for value in found) else None
        return ()

    def _classes(self, file: DiscoveredFile, entities: Mapping[str, str], suffix: str) -> ClassNames:
        """Return the classes of a file of labels; empty where only their numbers are known."""
        if suffix != "dseg":
            name = entities.get("label") or entities.get("desc", "")
            return {_class_name(name): (1,)}
        found: ClassNames = {}
        for sidecar in self._applicable(file.root_index, file.relative_path, "dseg.tsv"):
            for index, row in _read_table(sidecar, "index").items():
                name = _ABBREVIATIONS.get(row.get("abbreviation") or "", row.get("name") or "")
                if not index.isdecimal() or not NAME.fullmatch(name):
                    return {}
                if int(index):
                    found[name] = (*found.get(name, ()), int(index))
        return found

    # ---- tables ----------------------------------------------------------------------------------

    def labels(self) -> Sequence[LabelTable]:
        """Return what the tables say of subjects and sessions: a row per study."""
        rows: dict[str, dict[str, Any]] = {}
        for file in self._files:
            match = _PATH.fullmatch(file.relative_path)
            if match is None or match["derivative"]:
                continue
            root, subject, session = file.root_index, match["subject"], match["session"] or ""
            study = self._study(root, subject, session)
            if study not in rows:
                table = self._roots[root] / subject / f"{subject}_sessions.tsv"
                own = self._sessions(table).get(session, {})
                rows[study] = {**self._participants[root].get(subject, {}), **own}
        names = sorted({name for row in rows.values() for name in row})
        found = [{_STUDY: study, **{name: row.get(name) for name in names}} for study, row in rows.items()]
        if not names:
            return ()
        return [LabelTable(name="participants", rows=found, keys=(_STUDY,), study=lambda values: values[0])]

    def _sessions(self, path: Path) -> Mapping[str, Mapping[str, str]]:
        if path not in self._tables:
            found = _read_table(path, "session_id")
            self._tables[path] = {f"ses-{name.removeprefix('ses-')}": row for name, row in found.items()}
        return self._tables[path]

    @cached_property
    def _tables(self) -> dict[Path, Mapping[str, Mapping[str, str]]]:
        return {}

    def reports(self) -> Iterator[ReportRecord | BrokenReport]:
        """Read the reports in ``inputs.reports_format``.

        They name studies as ``sub-01/ses-01``, those of a further input folder as ``FOLDER/sub-01/ses-01``.
        """
        return read_reports(self.inputs)


def _entities(stem: str) -> tuple[dict[str, str], str]:
    """Split a file name into its entities and its suffix.

    Example:
        >>> _entities("sub-01_ses-2_run-1_T1w")
        ({'sub': '01', 'ses': '2', 'run': '1'}, 'T1w')
    """
    *parts, suffix = stem.split("_")
    pairs = [(match[1], match[2]) for part in parts if (match := _ENTITY.fullmatch(part))]
    return dict(pairs) if len(pairs) == len(parts) else {}, suffix


def _class_name(label: str) -> str:
    """Return the name of a mask by its entity, empty where that is not made of the words of classes.

    Example:
        >>> _class_name("GM"), _class_name("T1lesion"), _class_name("wholeTumor"), _class_name("DrMiller")
        ('gray matter', '', 'whole_tumor', '')
    """
    if label in _ABBREVIATIONS:
        return _ABBREVIATIONS[label]
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", label)]
    return "_".join(words) if words and all(word in _WORDS or class_of(word) for word in words) else ""


def _read_json(path: Path) -> Mapping[str, Any] | None:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return None
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, Mapping) else None


def _read_table(path: Path, key: str) -> dict[str, dict[str, str]]:
    """Read a table of BIDS by a key column; empty where there is none.

    Raises:
        ConfigError: It is no such table.
    """
    if not path.is_file():
        return {}
    what = path.name if path.name == "participants.tsv" else f"a table of {key}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            if key not in (rows.fieldnames or ()):
                raise ConfigError(
                    f"{what} must have a column {key}, with tabs between columns; correct it, or move it out "
                    "of the input folder."
                )
            return {
                str(row[key]): {
                    name: text.strip()
                    for name, text in row.items()
                    if name and name != key and isinstance(text, str) and text.strip() not in _UNKNOWN
                }
                for row in rows
            }
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{what} must be a readable table, got {os_reason(error)}; repair it.") from None
