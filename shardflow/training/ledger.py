"""The run ledger: which samples made which committed step, over kills and restarts.

Every attempt (one start of the job) has a folder, every rank in it a file: a header line, then a line for
each step it has finished. Work after the last checkpoint of a killed attempt is done again by the next one,
so a later attempt supersedes all steps from its own start on; what remains is the committed lineage, in
which every step stands once. Needs no torch: tools read it.

A step line is written after its optimizer update and synced before the checkpoint that commits it, so a
step that a checkpoint counts is always here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.errors import CheckpointError
from shardflow.logs import EventLog, read_events
from shardflow.storage import fsync_directory
from shardflow.storage.atomic import make_directories

__all__ = ["LedgerMicroBatch", "LedgerStep", "LedgerWriter", "next_attempt", "read_ledger"]

_ATTEMPT = re.compile(r"attempt-(\d{4,})")
_RANK = re.compile(r"rank-(\d{5,})\.jsonl")
_FOLDER = "ledger"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerMicroBatch:
    """The samples of one micro-batch."""

    micro: int
    """Number within the step."""
    keys: tuple[str | None, ...]
    """Sample key of each slot; None in a padding slot."""
    weights: tuple[float, ...]
    """0 for a padding slot and for a sample that was masked because it could not be read."""
    components: tuple[int, ...] = ()
    """Component of a blend of each slot, from 0, -1 in a padding slot; empty without a blend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerStep:
    """One step of the committed lineage."""

    global_step: int
    epoch: int
    step: int
    attempt: int
    """The attempt whose work this is."""
    micro_batches: tuple[LedgerMicroBatch, ...]
    """In the order of their number; fillers are left out, so every world size writes the same."""


class LedgerWriter:
    """This rank's file of this attempt.

    Args:
        run: The run folder.
        attempt: Number of the attempt, from 1; the same on all ranks.
        rank: This rank.
        world_size: Number of ranks of the attempt.
        start: Global step at which the attempt starts: all later ones of earlier attempts are superseded.

    Raises:
        StorageError: The file cannot be written; of `write` and `sync` as well.
    """

    def __init__(self, run: Path, *, attempt: int, rank: int, world_size: int, start: int) -> None:
        folder = _attempt_folder(run, attempt)
        make_directories(folder)
        self._log = EventLog(folder / f"rank-{rank:05d}.jsonl", clock=None)
        self._log.write("attempt", attempt=attempt, rank=rank, world_size=world_size, start=start)
        self._log.sync()
        # Later syncs are of the file alone; its name must be durable as well.
        fsync_directory(folder)

    def write(
        self, global_step: int, *, epoch: int, step: int, micro_batches: Sequence[LedgerMicroBatch]
    ) -> None:
        """Append a step that this rank has finished; ``micro_batches`` without fillers."""
        self._log.write(
            "step",
            global_step=global_step,
            epoch=epoch,
            step=step,
            micros=[
                [m.micro, list(m.keys), list(m.weights), *([list(m.components)] if m.components else [])]
                for m in micro_batches
            ],
        )

    def sync(self) -> None:
        """Make all lines durable; before the checkpoint that counts them."""
        self._log.sync()

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def next_attempt(run: Path) -> int:
    """Number of the attempt that a start in this run folder is; 1 for the first."""
    return max(_attempts(run), default=0) + 1


def read_ledger(run: Path, *, committed_only: bool = True) -> list[LedgerStep]:
    """Merge all attempts of a run into its committed lineage.

    Args:
        run: The run folder.
        committed_only: Leave out the steps behind the newest checkpoint, which a restart would do again.

    Returns:
        The steps from the run's first on, in order, each once, without a gap.

    Raises:
        CheckpointError: a rank's file, or a step that a checkpoint counts, is missing.
    """
    lineage: dict[int, LedgerStep] = {}
    first: int | None = None  # not 0 for a run that went on from another run's checkpoint
    for attempt in _attempts(run):
        start, steps = _read_attempt(_attempt_folder(run, attempt), attempt)
        if start is None:
            continue
        first = start if first is None else min(first, start)
        lineage = {number: step for number, step in lineage.items() if number < start}
        lineage.update(steps)
    if committed_only:
        num_committed = _num_committed(run)
        lineage = {number: step for number, step in lineage.items() if number < num_committed}
        missing = sorted(set(range(first or 0, num_committed)) - lineage.keys())
        if missing:
            raise CheckpointError(
                f"the run ledger must hold every committed step, got none of global step {missing[0]} "
                f"({len(missing)} missing); the ledger folder was changed."
            )
    return [lineage[number] for number in sorted(lineage)]


def _num_committed(run: Path) -> int:
    """Steps that the newest checkpoint counts, by its name alone."""
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in (run / "checkpoints").glob("step-*"))
    return max((int(match[1]) for match in names if match), default=0)


def _attempts(run: Path) -> list[int]:
    folder = run / _FOLDER
    matches = (_ATTEMPT.fullmatch(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match)


def _attempt_folder(run: Path, attempt: int) -> Path:
    return run / _FOLDER / f"attempt-{attempt:04d}"


def _read_attempt(folder: Path, attempt: int) -> tuple[int | None, dict[int, LedgerStep]]:
    """Read the steps that all ranks of an attempt finished, and where the attempt started."""
    files = sorted(path for path in folder.iterdir() if _RANK.fullmatch(path.name))
    ranks = [list(read_events(path)) for path in files]
    headers = [events[0] for events in ranks if events and events[0]["event"] == "attempt"]
    if not headers:  # killed before any rank had written: nothing was done, nothing is superseded
        return None, {}
    start, world_size = int(headers[0]["start"]), int(headers[0]["world_size"])
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for events in ranks:
        for event in events:
            if event["event"] == "step":
                by_step.setdefault(int(event["global_step"]), []).append(event)
    # A kill may leave the last step on some ranks only; it was not committed then.
    steps = {
        number: _merge(number, attempt, lines)
        for number, lines in by_step.items()
        if len(lines) == world_size
    }
    return start, steps


def _merge(global_step: int, attempt: int, lines: Iterable[Mapping[str, Any]]) -> LedgerStep:
    lines = list(lines)
    micro_batches = [
        LedgerMicroBatch(micro=micro, keys=tuple(keys), weights=tuple(weights), components=tuple(*components))
        for line in lines
        for micro, keys, weights, *components in line["micros"]
    ]
    return LedgerStep(
        global_step=global_step,
        epoch=int(lines[0]["epoch"]),
        step=int(lines[0]["step"]),
        attempt=attempt,
        micro_batches=tuple(sorted(micro_batches, key=lambda m: m.micro)),
    )
