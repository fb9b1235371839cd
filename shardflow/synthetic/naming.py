"""Where files lie: four ways that archives name them, none in the order of the slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.options import SynthOptions
from shardflow.synthetic.study import SeriesPlan

__all__ = ["IMAGE_FOLDER", "Placement", "place_files"]

IMAGE_FOLDER = "dicom"
"""Folder below the output that holds the images and nothing about them."""

_STYLES = ("numbered", "uid", "hex", "modality")
_STRAY_NAMES = ("SYNTHETIC-readme.txt", "SYNTHETIC-Thumbs.db", "SYNTHETIC-series.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Paths below the output folder."""

    files: dict[str, str]
    """SOP Instance UID to path."""
    copies: tuple[tuple[str, str], ...]
    """(SOP Instance UID, path) of second files."""
    stray_files: tuple[str, ...]


def place_files(
    options: SynthOptions, draws: Draws, *, patient: int, study: int, series: Sequence[SeriesPlan]
) -> Placement:
    """Name the files of one study."""
    style = draws.choice(_STYLES)
    folder = f"{IMAGE_FOLDER}/SYN{patient:07d}/ST{study:07d}"
    files: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for plan in series:
        own = draws.at("series", plan.index)
        below = folder if style in {"uid", "hex"} else f"{folder}/SE{plan.index + 1:04d}"
        # Files are numbered in the order in which an archive happened to receive them.
        for count, item in enumerate(own.shuffled(plan.slices)):
            files[item.sop_instance_uid] = _name(style, below, plan, count, item.sop_instance_uid, own)
        if own.at("duplicates").chance(options.chance_of("duplicates")):
            for item in own.at("copied").some([item for item in plan.slices if not item.is_truncated], 2):
                path = files[item.sop_instance_uid]
                stem, dot, suffix = path.rpartition(".")
                copy = f"{stem}_1.{suffix}" if dot and "/" not in suffix else f"{path}_1"
                copies.append((item.sop_instance_uid, copy))
    stray: tuple[str, ...] = ()
    if draws.at("stray-files").chance(options.chance_of("stray-files")):
        stray = tuple(f"{folder}/{name}" for name in draws.some(_STRAY_NAMES, draws.integer(1, 3)))
    return Placement(files=files, copies=tuple(copies), stray_files=stray)


def _name(style: str, folder: str, plan: SeriesPlan, count: int, uid: str, draws: Draws) -> str:
    if style == "numbered":
        return f"{folder}/IM{count + 1:06d}"
    if style == "uid":
        return f"{folder}/{uid}.dcm"
    if style == "hex":
        return f"{folder}/{plan.index:01X}{count:03X}{draws.key() % 16**6:06X}"
    return f"{folder}/{plan.modality}.{draws.key() % 10**8:08d}.{count + 1}.dcm"
