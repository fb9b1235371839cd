"""Small pictures of images that were held back or blanked, for the privacy officer; private folder only.

They are made at the end of packing by the packing processes, because the inputs may be gone when the officer
looks, and a picture of a patient that shows a name never belongs in a dataset.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import cv2
import numpy as np

from shardflow.errors import ShardflowError, SourceError
from shardflow.format.reasons import HELD_BACK
from shardflow.packing.engines.base import Engine, Task, decode, run_each
from shardflow.packing.header_rows import RowPlace, read_rows
from shardflow.packing.inventory import CARRIED, UNDECIDED, FileTable, reason_name
from shardflow.packing.sources.dicom.pixels import iter_slices
from shardflow.packing.sources.images import iter_stored_image
from shardflow.storage import write_atomic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardflow.packing.sources.dicom.elements import HeaderLimits
    from shardflow.packing.workspace import Workspace

MOST_OF_A_KIND: Final = 12
"""Pictures for each rule that holds images back, and of blanked images."""
_MOST_OF_A_STUDY: Final = 2
_SIDE_PX: Final = 200
_DISPLAY: Final = (0.5, 99.5)
_BOX_COLOR: Final = (40, 40, 220)
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureTask:
    """Make a picture of the first frame of an image."""

    row: RowPlace
    boxes: tuple[tuple[int, int, int, int], ...]
    """To be outlined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureDone:
    """A picture."""

    png: str | None
    """In base64; None for an image that cannot be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureMaker:
    """Makes pictures in a packing process."""

    workspace: Workspace
    roots: tuple[Path, ...]
    limits: HeaderLimits

    def make(self, task: PictureTask) -> PictureDone:
        """Make one picture."""
        with suppress(SourceError):
            (row,) = read_rows(self.workspace.headers, [task.row])
            if row.header is not None:
                path = self.roots[row.root_index] / row.relative_path
                first = next(
                    iter_slices(path, row.header, frames=[0], limits=self.limits, read=iter_stored_image)
                )
                return PictureDone(png=_draw(first.pixels, task.boxes))
        return PictureDone(png=None)


def _draw(pixels: NDArray[Any], boxes: Iterable[Sequence[int]]) -> str:
    plane = pixels.astype(np.float32)
    low, high = (float(one) for one in np.percentile(plane, _DISPLAY))
    gray = np.clip((plane - low) * (255 / max(high - low, 1e-6)), 0, 255).astype(np.uint8)
    scale = min(1.0, _SIDE_PX / max(gray.shape[:2]))
    size = [max(1, round(edge * scale)) for edge in gray.shape[1::-1]]
    small = cv2.resize(gray, size, interpolation=cv2.INTER_AREA)
    color = cv2.cvtColor(small, cv2.COLOR_GRAY2BGR if small.ndim == 2 else cv2.COLOR_RGB2BGR)
    for top, left, bottom, right in boxes:
        corner, opposite = ((round(x * scale), round(y * scale)) for x, y in ((left, top), (right, bottom)))
        cv2.rectangle(color, corner, opposite, _BOX_COLOR, 1)
    return base64.b64encode(cv2.imencode(".png", color)[1].tobytes()).decode("ascii")


def write_pictures(
    engine: Engine,
    workspace: Workspace,
    plan_digest: str,
    former_digest: str | None,
    files: FileTable,
    notes: Mapping[int, Mapping[str, Any]],
) -> None:
    """Write pictures of some of the images that were held back or blanked, and those of the previous version.

    One JSON line each: surrogate of the ``input``, ``sample_key``, ``reason`` (null if it was packed),
    ``rules``, and ``png`` in base64. The same for any number of processes. An image that cannot be read, or
    whose process fails, is left out.

    Args:
        engine: Runs `PictureMaker`.
        workspace: Where to write.
        plan_digest: Of the version's plan.
        former_digest: Of the previous version's; None for a first one.
        files: With their outcomes.
        notes: What de-identification did to images, by row of ``files``, see
            `shardflow.packing.publish.Settled`.

    Raises:
        ShardflowError: The previous version's file is damaged.
        StorageError: It cannot be written.
    """
    former = read_pictures(workspace.pictures(former_digest)) if former_digest else iter(())
    entries = itertools.chain(former, _make(engine, files, notes))
    lines = (json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n" for entry in entries)
    write_atomic(workspace.pictures(plan_digest), lines, replace=True, mode=0o600)


def _make(
    engine: Engine, files: FileTable, notes: Mapping[int, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    order = list(_choose(files, notes))
    made: dict[int, str] = {}

    def task(file: int) -> Task:
        boxes = tuple((a, b, c, d) for a, b, c, d in notes[file].get("blanked", ()))
        payload = PictureTask(row=RowPlace.of(files, file), boxes=boxes)
        return Task(kind="picture", payload=payload, timeout_s=_TIMEOUT_S, handle=file)

    for done in run_each(engine, map(task, order)):
        if done.result is not None and (png := decode(PictureDone, done.result).png) is not None:
            made[done.task.handle] = png
    for file in order:
        if file in made:
            yield {
                "input": files.surrogate[file].decode("ascii"),
                "sample_key": files.studies.keys[int(files.study[file])],
                "reason": reason_name(int(files.reason[file])),
                "rules": list(notes[file]["rules"]),
                "png": made[file],
            }


def _choose(files: FileTable, notes: Mapping[int, Mapping[str, Any]]) -> Iterator[int]:
    """Yield the first images of each kind, few of a study."""
    seen: Counter[str] = Counter()
    of_study: Counter[tuple[str, int]] = Counter()
    for file in sorted(notes):
        code = int(files.reason[file])
        if code in (CARRIED, UNDECIDED):
            continue
        is_held = reason_name(code) in HELD_BACK
        if not is_held and "blanked" not in notes[file]:
            continue
        kind = notes[file]["rules"][0] if is_held else "blanked"
        study = kind, int(files.study[file])
        if seen[kind] < MOST_OF_A_KIND and of_study[study] < _MOST_OF_A_STUDY:
            seen[kind] += 1
            of_study[study] += 1
            yield file


def read_pictures(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the pictures of a version, as `write_pictures` wrote them; none if it has no file of them.

    Raises:
        ShardflowError: The file is damaged.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            try:
                entry: dict[str, Any] = json.loads(line)
                yield {name: entry[name] for name in ("input", "png", "reason", "rules", "sample_key")}
            except (ValueError, KeyError, TypeError):
                raise ShardflowError(
                    "a file of pictures in the private folder (pictures-*.jsonl) is damaged; remove it."
                ) from None
