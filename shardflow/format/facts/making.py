"""Facts of a dataset's series from their ``study.json``, and the job that writes the tables of facts.

A role is what an image is for: the view of a radiograph, the side and view of a mammogram, the weighting of
an MR series, the contrast of a CT, the correction of a PET. The rules (docs/fields.md lists them) read
technical attributes alone, never a description, and `unknown` is an answer. A series has the role that all
its images share, otherwise `mixed`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.format.codecs import array_header, codec_rank
from shardflow.format.dataset import Dataset
from shardflow.format.facts.series import (
    COUNTS,
    REVISION,
    ROLE_MIXED,
    ROLE_UNKNOWN,
    SERIES_NAME,
    SeriesFacts,
    SeriesManifest,
    SeriesTable,
    encode_series,
    merge_series,
)
from shardflow.format.facts.studies import (
    STUDIES_NAME,
    StudiesManifest,
    StudyFacts,
    StudyTable,
    encode_study_facts,
    facts_of_study,
    merge_study_facts,
)
from shardflow.format.foreign.places import local_folder
from shardflow.format.index import FieldLocation
from shardflow.format.keys import STUDY_FIELD, parse_slice_field, sha256_hex
from shardflow.format.manifest import ShardEntry, load, versions
from shardflow.format.sidecars import SidecarManifest
from shardflow.format.table import Table
from shardflow.storage import LocalStore, write_atomic

_PROJECTIONS: Final = frozenset({"CR", "DX", "RG", "RF", "XA"})
# DICOM PS3.3 C.8.1.1 and C.8.11.5 (View Position), with words that public collections use beside them.
_VIEW_ROLES: Final = {
    **dict.fromkeys(("AP", "PA"), "frontal"),
    **dict.fromkeys(("LL", "RL", "LATERAL", "LAT"), "lateral"),
    **dict.fromkeys(("OBLIQUE", "RLO", "LLO"), "oblique"),
    **dict.fromkeys(("RLD", "LLD", "DECUBITUS"), "decubitus"),
    **dict.fromkeys(("AXIAL", "SUNRISE", "TANGENTIAL"), "axial"),
    "LORDOTIC": "lordotic",
    "SWIMMERS": "lateral",
}
_MAMMOGRAPHY_SIDES: Final = {"L": "left", "R": "right"}
_SIDED_VIEWS: Final = {"RCC": ("R", "CC"), "LCC": ("L", "CC"), "RMLO": ("R", "MLO"), "LMLO": ("L", "MLO")}
_MEASURES: Final = {
    "slice_thickness_mm": ("slice_thickness", 1.0),
    "kvp": ("kvp", 1.0),
    "field_strength_t": ("magnetic_field_strength", 1.0),
    "echo_time_ms": ("echo_time", 1.0),
    "repetition_time_ms": ("repetition_time", 1.0),
    "inversion_time_ms": ("inversion_time", 1.0),
    "flip_angle_deg": ("flip_angle", 1.0),
    "exposure_mas": ("exposure", 1.0),
    "exposure_time_ms": ("exposure_time", 1.0),
    "tube_current_ma": ("x_ray_tube_current", 1.0),
    "primary_angle_deg": ("positioner_primary_angle", 1.0),
    "secondary_angle_deg": ("positioner_secondary_angle", 1.0),
    "compression_force_n": ("compression_force", 1.0),
    "compressed_thickness_mm": ("body_part_thickness", 1.0),
}
_PET: Final = ("half_life_s", "injected_dose_bq", "injection_to_scan_s", "patient_weight_kg", "suvbw_factor")
_OF_IMAGES: Final = frozenset({"view_position", "image_laterality", "patient_orientation"})
_STORED_FACTS: Final = frozenset({"num_slices", "rows", "columns", "dtype", "codec"})
_ADC: Final = frozenset({"DCM:113041", "DCM:113290"})
"""Codes of the apparent diffusion coefficient (PS3.16, CID 7180)."""
_LAST: Final = 1 << 40
"""Order of a series whose number is unknown: behind all others."""


def role_of(kind: str, technical: Mapping[str, Any]) -> str:
    """Return the role of an image.

    Args:
        kind: Kind of its series, such as ``volume``.
        technical: Its technical attributes, by snake_case DICOM keyword.
    """
    if kind in ("localizer", "secondary"):
        return kind
    modality = technical.get("modality")
    if modality in _PROJECTIONS:
        return _radiograph_role(technical)
    rule = _ROLES.get(str(modality))
    return ROLE_UNKNOWN if rule is None else rule(technical)


def _radiograph_role(technical: Mapping[str, Any]) -> str:
    """View of a radiograph: View Position, else what Patient Orientation (PS3.3 C.7.6.1.1.1) implies."""
    role = _VIEW_ROLES.get(technical.get("view_position", ""))
    if role is not None:
        return role
    orientation = technical.get("patient_orientation")
    if not isinstance(orientation, list) or len(orientation) != 2:
        return ROLE_UNKNOWN
    across, down = orientation
    if down[:1] not in ("F", "H"):
        return ROLE_UNKNOWN
    return {"L": "frontal", "R": "frontal", "A": "lateral", "P": "lateral"}.get(across[:1], ROLE_UNKNOWN)


def _view(technical: Mapping[str, Any]) -> str:
    """View of a mammogram, such as ``MLO``."""
    stated = str(technical.get("view_position") or "")
    return _SIDED_VIEWS.get(stated, ("", stated))[1]


def _mammogram_role(technical: Mapping[str, Any]) -> str:
    """Side and view of a mammogram, such as ``left_mlo``."""
    view, side = _view(technical), _laterality(technical)
    side = _SIDED_VIEWS.get(technical.get("view_position", ""), (side, ""))[0]
    if view in ("", "AP", "PA") or side not in _MAMMOGRAPHY_SIDES:
        return ROLE_UNKNOWN
    return f"{_MAMMOGRAPHY_SIDES[side]}_{view.lower()}"


def _ct_role(technical: Mapping[str, Any]) -> str:
    """Contrast of a CT; the phase stands in descriptions alone, see `description_class`."""
    has_contrast = technical.get("has_contrast")
    return ROLE_UNKNOWN if has_contrast is None else "contrast" if has_contrast else "non_contrast"


def _pet_role(technical: Mapping[str, Any]) -> str:
    """Whether a PET is corrected for attenuation: Corrected Image (PS3.3 C.8.9.1)."""
    corrections = technical.get("corrected_image")
    if not corrections:
        return ROLE_UNKNOWN
    return "attenuation_corrected" if "ATTN" in corrections else "not_attenuation_corrected"


def _mr_role(technical: Mapping[str, Any]) -> str:
    """Weighting of an MR series, from its image type, else from the usual ranges of TR, TE and TI.

    Ranges for conventional spin echo at 1.5 to 3 T: T1 below 1,000 ms TR and 30 ms TE, T2 from 2,000 and 70,
    proton density from 2,000 below 50; inversion recovery nulls fat at 100 to 300 ms and fluid from 1,500.
    """
    words = {*technical.get("image_type", ())}
    for word, role in (("ADC", "adc"), ("TRACEW", "dwi"), ("DIFFUSION", "dwi"), ("FLAIR", "flair")):
        if word in words:
            return role
    repetition, echo = _number(technical, "repetition_time"), _number(technical, "echo_time")
    if repetition is None or echo is None:
        return ROLE_UNKNOWN
    sequence = {*technical.get("scanning_sequence", ())}
    inversion = _number(technical, "inversion_time")
    if "IR" in sequence and inversion is not None:
        if inversion >= 1500 and echo >= 70:
            return "flair"
        if 100 <= inversion <= 300:
            return "stir"
    is_short = echo < 30
    if is_short and (repetition < 1000 or "IR" in sequence):
        return "t1_contrast" if technical.get("has_contrast") else "t1"
    if "SE" in sequence and repetition >= 2000:
        return "t2" if echo >= 70 else "pd" if echo < 50 else ROLE_UNKNOWN
    return ROLE_UNKNOWN


_ROLES: Final[dict[str, Callable[[Mapping[str, Any]], str]]] = {
    "MG": _mammogram_role,
    "CT": _ct_role,
    "MR": _mr_role,
    "PT": _pet_role,
    "RTDOSE": lambda _: "dose",
}


def _number(technical: Mapping[str, Any], name: str) -> float | None:
    value = technical.get(name)
    return float(value) if isinstance(value, int | float) else None


def _laterality(technical: Mapping[str, Any]) -> str:
    return str(technical.get("image_laterality") or technical.get("laterality") or "")


def series_of_study(study: Mapping[str, Any]) -> list[SeriesFacts]:
    """Return the facts of a sample's series.

    Args:
        study: Its ``study.json``.

    Raises:
        KeyError, TypeError, ValueError: It is no study of format 1.
    """
    series = study["series"]
    ranked = sorted(range(len(series)), key=lambda number: _acquired(series[number]))
    order = {number: place for place, number in enumerate(ranked)}
    return [_facts(one, number, order[number]) for number, one in enumerate(series)]


def _acquired(series: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return the sort key of acquisition: numbers of the source; a secret key orders surrogates."""
    number, numbers = series.get("series_number"), series.get("instance_numbers") or [None]
    return (
        _LAST if number is None else int(number),
        int(series.get("stack_index") or 0),
        _LAST if numbers[0] is None else int(numbers[0]),
        -int(series["num_slices"]),
    )


def _facts(series: Mapping[str, Any], number: int, order: int) -> SeriesFacts:
    technical = {**series.get("technical", {}), "modality": series.get("modality")}
    kind = str(series.get("kind") or "")
    # An image that lacks a value has none: that of the series is its first image's.
    shared = {name: value for name, value in technical.items() if name not in _OF_IMAGES}
    roles = [role_of(kind, {**shared, **image}) for image in series.get("images", ())]
    if (parametric := series.get("parametric_map")) is not None:
        is_adc = parametric.get("quantity") in _ADC or "ADC" in technical.get("image_type", ())
        roles = ["adc" if is_adc else "parametric_map"]
    role = role_of(kind, technical) if not roles else roles[0] if len({*roles}) == 1 else ROLE_MIXED
    strings = {
        "kind": kind,
        "modality": series.get("modality"),
        "body_part": series.get("body_part"),
        "role": role,
        "laterality": _laterality(technical),
        "unit": series.get("unit"),
        "dtype": series["dtype"],
        "codec": series["codec"],
        "kernel": technical.get("convolution_kernel"),
        "manufacturer": technical.get("manufacturer"),
    }
    counts = {
        "series": number,
        "acquisition_order": order,
        "channels": int(series.get("samples_per_pixel") or 1),
        **{name: int(series[name]) for name in ("num_slices", "rows", "columns")},
    }
    axis, pet, diffusion = (series.get(name) or {} for name in ("axis", "pet", "diffusion"))
    strings |= {
        "axis": axis.get("name"),
        "view": _view(technical) if technical["modality"] == "MG" else technical.get("view_position"),
        "decay_correction": pet.get("decay_correction"),
        "channel": series.get("channel"),
        "description_class": technical.get("description_class"),
    }
    regions = series.get("ultrasound_regions") or []
    optional = {
        "group": axis.get("group"),
        "axis_index": axis.get("index"),
        "axis_num": axis.get("num"),
        "num_regions": len(regions) or None,
    }
    measures = {
        name: value * factor
        for name, (keyword, factor) in _MEASURES.items()
        if (value := _number(technical, keyword)) is not None
    }
    spacing = series.get("pixel_spacing_mm")
    if spacing is not None:
        measures["row_spacing_mm"], measures["column_spacing_mm"] = float(spacing[0]), float(spacing[1])
    if series.get("slice_spacing_mm") is not None:
        measures["slice_spacing_mm"] = float(series["slice_spacing_mm"])
    measures.update(_stated(axis, {"axis_value": "value"}))
    measures.update(_stated(series.get("timing") or {}, ("acquired_after_s", "content_after_s")))
    measures.update(_stated(series, ("frame_time_ms",)))
    measures.update(_stated(pet, _PET))
    measures.update(_stated(diffusion, ("b_value_s_mm2",)))
    measures.update(_stated(series.get("slide") or {}, ("objective_power",)))
    measures.update(
        zip(("gradient_x", "gradient_y", "gradient_z"), diffusion.get("direction_lps", ()), strict=False)
    )
    if "exposure_mas" not in measures and (exposure := _number(technical, "exposure_inu_as")) is not None:
        measures["exposure_mas"] = exposure / 1000
    largest: Mapping[str, Any] = max(regions, key=_area, default={})
    if (region := largest.get("pixel_spacing_mm")) is not None:
        measures["region_row_spacing_mm"], measures["region_column_spacing_mm"] = map(float, region)
    answers = {"has_contrast": technical.get("has_contrast")}
    if technical.get("breast_implant_present") is not None:
        answers["has_implant"] = technical["breast_implant_present"] == "YES"
    return SeriesFacts(
        strings={name: str(value) for name, value in strings.items() if value},
        counts={
            **{name: counts[name] for name in COUNTS},
            **{name: int(number) for name, number in optional.items() if number is not None},
        },
        measures=measures,
        answers={name: bool(answer) for name, answer in answers.items() if answer is not None},
        affine_lps=series.get("affine_lps"),
        flags=tuple(series.get("flags", ())),
        image_roles=roles if role == ROLE_MIXED else (),
    )


def _stated(found: Mapping[str, Any], names: Mapping[str, str] | Sequence[str]) -> dict[str, float]:
    """Return the numbers that an object of ``study.json`` states; of a mapping by the names of columns."""
    keys = names if isinstance(names, Mapping) else {name: name for name in names}
    return {name: float(found[key]) for name, key in keys.items() if found.get(key) is not None}


def _area(region: Mapping[str, Any]) -> tuple[bool, int]:
    """Return the order of regions of an ultrasound image: those of tissue with a spacing first, by size."""
    x0, y0, x1, y1 = region["box_px"]
    is_tissue = region.get("spatial_format") == "2d" and region.get("pixel_spacing_mm") is not None
    return is_tissue, (x1 - x0) * (y1 - y0)


def write_shard_facts(parts: Path, sha256: str, studies: Iterable[bytes]) -> None:
    """Write the facts of a shard's series and studies as parts of tables.

    Args:
        parts: Folder of parts, see `part_paths`.
        sha256: Digest of the shard.
        studies: ``study.json`` of each sample, in the order of the shard.

    Raises:
        KeyError, TypeError, ValueError: One is no study of format 1.
        StorageError: A file cannot be written.
    """
    found = [json.loads(study) for study in studies]
    tables = _encoded([(series_of_study(one), facts_of_study(one)) for one in found])
    _write_parts(part_paths(parts, sha256), tables)


def _encoded(facts: Sequence[tuple[list[SeriesFacts], StudyFacts]]) -> tuple[bytes, bytes]:
    """Encode the series and the studies of some samples."""
    return encode_series(series for series, _ in facts), encode_study_facts(study for _, study in facts)


def _write_parts(paths: Iterable[Path], tables: Iterable[bytes]) -> None:
    for path, table in zip(paths, tables, strict=True):
        write_atomic(path, [table], replace=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttachedFacts:
    """Result of a job that attached facts."""

    num_samples: int
    num_series: int
    num_shards: int
    num_shards_kept: int
    """Shards whose series were known already, from an earlier job or an earlier version of the dataset."""
    roles: Mapping[str, int]
    """Number of series of each role."""


_Span: TypeAlias = tuple[int, range]
"""A shard by its position in the manifest, and the rows of its samples."""
# Encoding, storing and merging the facts of a shard of one sample takes as long as those of hundreds.
_GROUP_SAMPLES: Final = 256
Complete: TypeAlias = Callable[[int, dict[str, Any]], dict[str, Any]]
"""Function that adds to a ``study.json`` what it lacks; it gets the row of the samples table beside it."""


def attach_facts(
    dataset: Dataset,
    *,
    num_threads: int = 2,
    on_shard: Callable[[int, int], None] | None = None,
    complete: Complete | None = None,
) -> AttachedFacts:
    """Write the tables of facts of a dataset from its ``study.json``; resumable, no shard is touched.

    Args:
        dataset: A dataset in a folder.
        num_threads: Shards read at once.
        on_shard: Called with the number of shards done, and of all shards.
        complete: Adds facts that ``study.json`` lacks; what earlier jobs found is then made again.

    Raises:
        ConfigError: The dataset is not in a local folder, or others wrote its shards.
        ShardflowError: A field cannot be read or trusted.
    """
    if dataset.is_foreign:
        raise ConfigError("Shards that others wrote have no study.json, so there are no facts of series.")
    store = local_folder(dataset.store)
    if store is None:
        raise ConfigError(
            "Facts are attached to a dataset in a local folder, this one is remote; run the command where "
            "it was packed, or copy it first."
        )
    root = store.root
    folder = root / SeriesManifest.folder(dataset.manifest.dataset_id)
    attached = write_facts(
        dataset,
        root,
        parts=folder,
        keeps_parts=True,
        num_threads=num_threads,
        on_shard=on_shard,
        complete=complete,
    )
    for path in folder.iterdir():
        if path.name not in (SERIES_NAME, SeriesManifest.file_name):
            path.unlink()  # parts of this job, or of one that was killed
    return attached


def write_facts(
    dataset: Dataset,
    root: Path,
    *,
    parts: Path,
    keeps_parts: bool = False,
    num_threads: int = 2,
    on_shard: Callable[[int, int], None] | None = None,
    complete: Complete | None = None,
) -> AttachedFacts:
    """Write series table and study facts table of a version, which need not be published yet.

    The facts of shards that stored versions share come from their tables, the rest from ``parts``, and what
    is in neither from the ``study.json`` fields of the shards; the bytes are the same either way.

    Args:
        dataset: The version; its store reads the shards.
        root: Folder of the dataset.
        parts: Folder of tables of single shards, see `part_paths`.
        keeps_parts: Whether to store parts that were read, so that a killed job need not read them again.
        num_threads: Shards read at once.
        on_shard: Called with the number of shards done, and of all shards.
        complete: Adds to each ``study.json``, which is then read again of every shard.

    Raises:
        ShardflowError: A field cannot be read or trusted.
        StorageError: A file cannot be written.
    """
    dataset_id, shards = dataset.manifest.dataset_id, dataset.manifest.shards
    spans = list(_shard_spans(dataset))
    known = {} if complete is not None else _known_facts(root, dataset)
    num_kept, num_done, found = 0, 0, []

    def has_facts(entry: ShardEntry) -> bool:
        if complete is not None:
            return False
        return entry.sha256 in known or all(path.exists() for path in part_paths(parts, entry.sha256))

    def facts_of(group: Sequence[_Span]) -> tuple[_Facts, NDArray[np.int64], bool]:
        rows = range(group[0][1].start, group[-1][1].stop)
        former = known.get(shards[group[0][0]].sha256) if len(group) == 1 else None
        if former is not None:
            row_in_shard = dataset.studies.column("row_in_shard")[rows.start : rows.stop]
            samples = former.find(row_in_shard)
            if samples is not None:
                return former.facts, samples, True
        if complete is not None:
            tables = _encoded([_facts_of_row(dataset, row, complete) for row in rows])
            return _Facts.of(tables), np.arange(len(rows)), False
        facts, is_kept = _part(dataset, group, rows, parts, keeps_parts=keeps_parts)
        return facts, np.arange(len(rows)), is_kept

    groups = _grouped(dataset, spans, has_facts)
    with ThreadPoolExecutor(num_threads) as pool:
        jobs = [pool.submit(facts_of, group) for group in groups]
        try:
            for group, job in zip(groups, jobs, strict=True):
                facts, samples, is_kept = job.result()
                found.append((facts, samples))
                num_kept += is_kept * len(group)
                for _ in group:
                    num_done += 1
                    if on_shard is not None:
                        on_shard(num_done, len(spans))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    data = merge_series((facts.series, samples) for facts, samples in found)
    studies = merge_study_facts([(facts.studies, samples) for facts, samples in found], dataset)
    tables: tuple[tuple[str, str, bytes, SidecarManifest], ...] = (
        (StudiesManifest.folder(dataset_id), STUDIES_NAME, studies, StudiesManifest.of(dataset_id, studies)),
        (SeriesManifest.folder(dataset_id), SERIES_NAME, data, SeriesManifest.of(dataset_id, data)),
    )
    for folder, name, table, manifest in tables:
        write_atomic(root / folder / name, [table], replace=True)
        write_atomic(root / folder / manifest.file_name, [manifest.encode()], replace=True)
    merged = SeriesTable(Table(memoryview(data), name=SERIES_NAME))
    return AttachedFacts(
        num_samples=merged.num_samples,
        num_series=merged.num_series,
        num_shards=len(spans),
        num_shards_kept=num_kept,
        roles=merged.count_roles(),
    )


def part_paths(parts: Path, sha256: str) -> tuple[Path, Path]:
    """Return the paths of the facts of whole shards, of series and of studies, in a folder of parts.

    Args:
        parts: The folder.
        sha256: Digest of the shard; of several, that of their digests one after another.
    """
    return parts / f"{sha256}.tbl", parts / f"{sha256}.studies.tbl"


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of the samples of a shard or of a version."""

    series: SeriesTable
    studies: StudyTable

    @classmethod
    def of(cls, tables: Iterable[bytes]) -> _Facts:
        series, studies = tables
        return cls(
            SeriesTable(Table(memoryview(series), name=SERIES_NAME)),
            StudyTable(Table(memoryview(studies), name=STUDIES_NAME)),
        )

    def has(self, num_samples: int) -> bool:
        return self.series.num_samples == self.studies.num_samples == num_samples

    def verify(self) -> None:
        self.series.verify()
        self.studies.verify()


@dataclass(frozen=True, slots=True)
class _FormerShard:
    """Facts of a shard in the tables of a stored version."""

    facts: _Facts
    row_in_shard: NDArray[np.int64]
    """Samples of the shard that the version has, ascending."""
    first_row: int
    """Row of the first one in the version."""

    def find(self, row_in_shard: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the rows of some samples in the version; None if it lacks one."""
        places = np.searchsorted(self.row_in_shard, row_in_shard)
        places = np.minimum(places, len(self.row_in_shard) - 1)
        is_found = np.array_equal(self.row_in_shard[places], row_in_shard)
        return self.first_row + places if is_found else None


def _known_facts(root: Path, dataset: Dataset) -> dict[str, _FormerShard]:
    """Return the facts that the stored versions have of a version's shards, by digest; newer ones first."""
    store, wanted = LocalStore(root), {shard.sha256 for shard in dataset.manifest.shards}
    known: dict[str, _FormerShard] = {}
    for number in reversed(versions(store)):
        if wanted <= known.keys():
            break
        try:
            manifest = load(store, number)
            dataset_id = manifest.dataset_id
            facts = _Facts(SeriesManifest.read(store, dataset_id), StudiesManifest.read(store, dataset_id))
            facts.verify()
        except (NotFoundError, FormatError):
            continue  # a version without both tables, or a damaged one, which is made again
        if facts.series.revision < REVISION:
            continue  # it lacks facts that studies may state
        former = Dataset(store, manifest)
        for place, rows in _shard_spans(former):
            row_in_shard = former.studies.column("row_in_shard")[rows.start : rows.stop].astype(np.int64)
            if facts.has(former.studies.num_samples):
                known.setdefault(manifest.shards[place].sha256, _FormerShard(facts, row_in_shard, rows.start))
    return known


def _shard_spans(dataset: Dataset) -> Iterator[_Span]:
    """Yield the shards in the order of the samples table, and the rows of each."""
    shard = dataset.studies.column("shard").astype(np.int64)
    firsts = np.flatnonzero(np.diff(shard, prepend=-1)).tolist()
    for first, stop in pairwise([*firsts, len(shard)]):
        yield int(shard[first]), range(first, stop)


def _grouped(
    dataset: Dataset, spans: Iterable[_Span], has_facts: Callable[[ShardEntry], bool]
) -> list[list[_Span]]:
    """Group neighboring shards to read together.

    A shard with stored facts, or with removed samples, is a group of its own.
    """
    groups: list[list[_Span]] = []
    num_samples = _GROUP_SAMPLES
    for number, rows in spans:
        entry = dataset.manifest.shards[number]
        is_alone = len(rows) != entry.num_samples or has_facts(entry)
        if is_alone or num_samples + len(rows) > _GROUP_SAMPLES:
            groups.append([])
            num_samples = 0
        groups[-1].append((number, rows))
        num_samples = _GROUP_SAMPLES if is_alone else num_samples + len(rows)
    return groups


def _part(
    dataset: Dataset, group: Sequence[_Span], rows: range, parts: Path, *, keeps_parts: bool
) -> tuple[_Facts, bool]:
    """Return the facts of some shards, and whether parts with them were stored."""
    entries = [dataset.manifest.shards[number] for number, _ in group]
    digests = "".join(entry.sha256 for entry in entries)
    paths = part_paths(parts, digests if len(group) == 1 else sha256_hex(digests.encode()))
    # A part is of whole shards, so that its name says what is in it, whatever was removed meanwhile.
    is_whole = len(rows) == sum(entry.num_samples for entry in entries)
    if is_whole and all(path.exists() for path in paths):
        try:
            facts = _Facts.of(path.read_bytes() for path in paths)
            facts.verify()
            if facts.has(len(rows)) and facts.series.revision == REVISION:
                return facts, True
        except FormatError:
            pass  # damaged: it is made again
    tables = _encoded([_facts_of_row(dataset, row) for row in rows])
    if is_whole and keeps_parts:
        _write_parts(paths, tables)
    return _Facts.of(tables), False


def _facts_of_row(
    dataset: Dataset, row: int, complete: Complete | None = None
) -> tuple[list[SeriesFacts], StudyFacts]:
    _, fields = dataset.sample_fields(row)
    try:
        study = None
        if any(field.name == STUDY_FIELD for field in fields):
            study = json.loads(dataset.read_fields(row, [STUDY_FIELD])[STUDY_FIELD])
            study = study if complete is None else complete(row, study)
            if all(one.keys() >= _STORED_FACTS for one in study["series"]):
                return series_of_study(study), facts_of_study(study)
        whole = completed_study(study, fields, partial(dataset.read_fields, row))
        return series_of_study(whole), facts_of_study(whole)
    except (KeyError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"study.json of sample {dataset.studies.sample_key(row)} cannot be read as a study "
            f"({type(error).__name__}); run `shardflow verify`."
        ) from None


def completed_study(
    study: Mapping[str, Any] | None,
    fields: Iterable[FieldLocation],
    read: Callable[[Sequence[str]], Mapping[str, bytes]],
) -> dict[str, Any]:
    """Return ``study.json`` with what slices say by themselves, which that of `ShardWriter` need not state.

    Args:
        study: As stored; None where there is none.
        fields: Members of the sample, none of which is a volume in bricks.
        read: Returns members by name.

    Raises:
        LookupError: It describes fewer series than are stored.
        FormatError: A slice is damaged.
    """
    stored = _stored_series(fields)
    payloads = read([names[0] for names in stored])
    headers = [_header_facts(names, payloads[names[0]]) for names in stored]
    described = study["series"] if study is not None else [{}] * len(stored)
    series = [{**header, **described[number]} for number, header in enumerate(headers)]
    return {**(study or {}), "series": series}


def _stored_series(fields: Iterable[FieldLocation]) -> list[list[str]]:
    """Return the slices of each series by their index; of several codecs the one that a loader takes."""
    found: dict[int, dict[int, tuple[int, str]]] = {}
    for field in fields:
        part = parse_slice_field(field.name)
        rank = None if part is None else codec_rank(part.codec)
        if part is not None and rank is not None:
            slices = found.setdefault(part.series, {})
            slices[part.index] = min((rank, field.name), slices.get(part.index, (rank, field.name)))
    return [[found[series][index][1] for index in sorted(found[series])] for series in sorted(found)]


def _header_facts(names: Sequence[str], payload: bytes) -> dict[str, Any]:
    """Return what the slices of a series say by themselves, as ``study.json`` would."""
    codec = names[0].rpartition(".")[2]
    shape, dtype = array_header(codec, payload)
    return {
        "num_slices": len(names),
        "rows": shape[0],
        "columns": shape[1],
        "samples_per_pixel": shape[2] if len(shape) > 2 else 1,
        "dtype": dtype.name,
        "codec": codec,
    }
