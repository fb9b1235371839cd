"""Generated studies, packed as any others, with their truth told in the slices of the dataset."""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.alignment.settings import Marks, Setting
from shardflow.config import load_config
from shardflow.format import Dataset
from shardflow.packing import PackConfig, pack
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.seeds import derive
from shardflow.synthetic import generate

__all__ = ["PackedStudy", "Shown", "packed_studies"]

_TOML = """
output = "packed"
private_dir = "private"
[inputs]
dicom = ["generated/dicom"]
reports = "generated/reports.csv"
[splits]
all = 100
[page]
enabled = false
"""
_PLACEHOLDER = re.compile(r"\[[A-Z]+(?:-\d+)?\]")

Shown = Mapping[int, Mapping[int, int]]
"""Series of the sample to slice to pixels that show something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStudy:
    """A study of the dataset, and what is true of it."""

    study: dict[str, Any]
    text: str
    annotations: dict[str, Any] | None
    entities: tuple[dict[str, Any], ...]
    """Of the truth; ``span`` is one of the stored text, ``shown`` what images show of it."""
    stored: dict[str, Any] | None
    """The ``alignment.json`` that packing wrote, if it did."""


def packed_studies(setting: Setting, num_studies: int, folder: Path) -> Iterator[PackedStudy]:
    """Generate, pack, and read what was packed."""
    options = setting.synth(num_studies)
    generate(options, folder / "generated")
    (folder / "pack.toml").write_text(_TOML, encoding="utf-8")
    pack(load_config(PackConfig, folder / "pack.toml"))
    key = SecretKey.load(folder / "private" / "secret.key")
    with (folder / "generated" / "reports.csv").open(encoding="utf-8", newline="") as file:
        texts = {row["study_instance_uid"]: row["text"] for row in csv.DictReader(file)}
    truths: dict[str, dict[str, Any]] = {}
    with (folder / "generated" / "truth.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            truth = json.loads(line)
            if truth["kind"] == "study":
                for one in truth["series"]:
                    truths[key.surrogate("series", one["series_instance_uid"])] = truth
    dataset = Dataset.open(folder / "packed")
    for row in dataset.splits["all"]:
        names = {one.name for one in dataset.sample_fields(row)[1]}
        fields = dataset.read_fields(row, names & {"study.json", "report.txt", "alignment.json"})
        study = json.loads(fields["study.json"])
        truth = truths[study["series"][0]["series_key"]]
        places = _places(study)
        stored = fields["report.txt"].decode()
        yield PackedStudy(
            study=study,
            text=stored,
            annotations=None
            if setting.marks is None
            else _marks(setting.marks, options.seed, truth, key, places, study),
            entities=tuple(_entities(truth, texts[truth["study_instance_uid"]], stored, key, places)),
            stored=json.loads(fields["alignment.json"]) if "alignment.json" in fields else None,
        )


def _places(study: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Where in the sample each instance lies, by its surrogate."""
    return {
        name: (number, place)
        for number, one in enumerate(study["series"])
        for place, name in enumerate(one["instance_keys"])
    }


def _entities(
    truth: Mapping[str, Any], source: str, stored: str, key: SecretKey, places: Mapping[str, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    to_stored = _Shift(source, stored)
    lesions = {one["lesion_id"]: one for one in truth["lesions"]}
    for entity in truth["report"]["entities"]:
        lesion = lesions.get(entity["lesion_id"])
        if lesion is not None:
            shown = _shown(lesion, key, places)
        elif entity["assertion"] == "present":
            shown = _named(truth, entity, source, key, places)
        else:
            shown = {}
        yield {**entity, "span": to_stored.span(entity["span"]), "shown": shown}


def _shown(lesion: Mapping[str, Any], key: SecretKey, places: Mapping[str, tuple[int, int]]) -> Shown:
    shown: dict[int, dict[int, int]] = defaultdict(dict)
    for appearance in lesion["appearances"]:
        for one in appearance["instances"]:
            place = places.get(key.surrogate("instance", one["sop_instance_uid"]))
            if place is not None:
                shown[place[0]][place[1]] = one["num_pixels"]
    return shown


def _named(
    truth: Mapping[str, Any],
    entity: Mapping[str, Any],
    source: str,
    key: SecretKey,
    places: Mapping[str, tuple[int, int]],
) -> Shown:
    """What is no lesion (an artifact) is where its sentence says."""
    shown: dict[int, dict[int, int]] = defaultdict(dict)
    for one in truth["report"]["mentions"]:
        between = source[entity["span"][1] : one["span"][0]]
        if (
            one["lesion_id"] is None
            and entity["span"][1] <= one["span"][0]
            and len(between) < 30
            and "." not in between
        ):
            for uid in one["target"]["sop_instance_uids"]:
                place = places.get(key.surrogate("instance", uid))
                if place is not None:
                    shown[place[0]][place[1]] = 1
    return shown


class _Shift:
    """Places of a text in what de-identification made of it: what it left alone lies in the same order."""

    def __init__(self, source: str, stored: str) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        at = here = 0
        for literal in [*_PLACEHOLDER.split(stored)]:
            at = source.index(literal, at)
            here = stored.index(literal, here)
            self._pieces.append((at, at + len(literal), here))
            at, here = at + len(literal), here + len(literal)

    def span(self, span: Sequence[int]) -> tuple[int, int]:
        """Return a span of the stored text; an empty one where it is gone."""
        for first, last, here in self._pieces:
            if first <= span[0] and span[1] <= last:
                return here + span[0] - first, here + span[1] - first
        return 0, 0


def _marks(
    marks: Marks,
    seed: int,
    truth: Mapping[str, Any],
    key: SecretKey,
    places: Mapping[str, tuple[int, int]],
    study: Mapping[str, Any],
) -> dict[str, Any]:
    """Mark lesions as a person might: some, in one series each, at times wrongly."""
    rois: list[dict[str, Any]] = []
    for number, lesion in enumerate(truth["lesions"]):

        def chance(what: str, percent: int, lesion_number: int = number) -> bool:
            return derive(seed, f"benchmark/marks/{what}", truth["number"], lesion_number) % 100 < percent

        shown = _shown(lesion, key, places)
        candidates = [one for one in sorted(shown) if study["series"][one]["kind"] != "localizer"]
        if not candidates or not chance("marked", marks.marked):
            continue
        series = candidates[derive(seed, "benchmark/marks/series", truth["number"], number) % len(candidates)]
        slices = sorted(shown[series])
        facts = study["series"][series]
        if chance("elsewhere", marks.elsewhere):
            free = [one for one in range(facts["num_slices"]) if one not in shown[series]]
            slices = free[: len(slices)] or slices
        area = (facts["pixel_spacing_mm"] or [1.0, 1.0])[0] * (facts["pixel_spacing_mm"] or [1.0, 1.0])[1]
        most = 40 if chance("size_error", marks.size_error) else 10
        off = derive(seed, "benchmark/marks/size", truth["number"], number) % (2 * most + 1) - most
        side = {"left": "L", "right": "R"}.get(lesion["laterality"] or "")
        rois.append(
            {
                "roi": len(rois),
                "kind": "segmentation",
                "source": "dicom-seg",
                "label": None if chance("unlabelled", marks.unlabelled) else lesion["label"],
                "anatomy": lesion["organ"],
                "laterality": side,
                "tracking_key": None,
                "series": series,
                "slices": [{"slice": one, "area_mm2": area * shown[series].get(one, 1)} for one in slices],
                "diameter_mm": round(lesion["diameter_mm"] * (1 + off / 100), 1),
            }
        )
    return {"format_version": 1, "rois": rois, "dangling": []}
