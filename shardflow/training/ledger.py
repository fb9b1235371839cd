"""Run ledger: which samples made which committed step, over kills and restarts; and its comparison.

Every attempt (one start of the job) has a folder, every rank in it a file: a header line, then a line for
each finished step. Work after the last checkpoint of a killed attempt is repeated by the next one, so a later
attempt supersedes all steps from its own start on; what remains is the committed lineage, in which every step
exists once. A step line is written after its optimizer update and synced before the checkpoint that commits
it, so every step that a checkpoint counts is here.

Two runs are compared by their ledgers, or by the lines of ``shardflow ledger show --json``. Lines without
their samples (``--compact``) hold a digest of each step, some 150 bytes whatever the step's size: enough to
tell whether two runs on separate machines trained on the same samples, and at which step they diverged. Needs
no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from shardflow.errors import CheckpointError, os_reason
from shardflow.logs import EventLog, read_events
from shardflow.storage import fsync_directory
from shardflow.storage.local import make_directories

_ATTEMPT = re.compile(r"attempt-(\d{4,})")
_RANK = re.compile(r"rank-(\d{5,})\.jsonl")
LEDGER_FOLDER = "ledger"
"""Of a run folder."""


@dataclass(frozen=True, slots=True)
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
    num_samples: int
    """Weighted samples; masked ones and padding slots count nothing."""
    digest: str
    """Of epoch, step and samples in order: 32 hexadecimal digits."""
    attempt: int = 0
    """The attempt whose work this is; 0 where it was read from a line of JSON."""
    micro_batches: tuple[LedgerMicroBatch, ...] = ()
    """In the order of their number; padding ones are left out, so every world size writes the same. Empty
    where only the digest is known."""

    @classmethod
    def of(
        cls, micros: Iterable[LedgerMicroBatch], *, global_step: int, epoch: int, step: int, attempt: int
    ) -> Self:
        """Make a step of the micro-batches of all ranks."""
        ordered = tuple(sorted(micros, key=lambda m: m.micro))
        rows = [astuple(m) for m in ordered]
        content = json.dumps([epoch, step, rows], separators=(",", ":")).encode()
        return cls(
            global_step=global_step,
            epoch=epoch,
            step=step,
            num_samples=sum(weight > 0 for m in ordered for weight in m.weights),
            digest=hashlib.sha256(content).hexdigest()[:32],
            attempt=attempt,
            micro_batches=ordered,
        )

    def to_json(self, *, compact: bool) -> dict[str, Any]:
        """Return the step as a JSON object, with or without its samples."""
        names = ("global_step", "epoch", "step", "num_samples", "digest")
        value: dict[str, Any] = {name: getattr(self, name) for name in names}
        if not compact and self.micro_batches:
            value["micros"] = [astuple(m) for m in self.micro_batches]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote."""
        known = {name: found for name, found in value.items() if name != "micros"}
        return cls(**known, micro_batches=tuple(map(_micro_batch, value.get("micros", ()))))

    @property
    def keys(self) -> tuple[str, ...]:
        """Sample keys in order, padding left out."""
        return tuple(key for m in self.micro_batches for key in m.keys if key is not None)


def _micro_batch(row: Sequence[Any]) -> LedgerMicroBatch:
    """Read number, keys, weights and, of a blend, components."""
    micro, *columns = row
    return LedgerMicroBatch(micro, *map(tuple, columns))


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
        """Append a step that this rank has finished; ``micro_batches`` without padding ones."""
        self._log.write(
            "step",
            global_step=global_step,
            epoch=epoch,
            step=step,
            micros=[
                [m.micro, m.keys, m.weights, *([m.components] if m.components else [])] for m in micro_batches
            ],
        )

    def sync(self) -> None:
        """Make all lines durable; before the checkpoint that counts them."""
        self._log.sync()

    def close(self) -> None:
        """Close the file."""
        self._log.close()


def next_attempt(run: Path) -> int:
    """Return the number of the next attempt in this run folder; 1 for the first."""
    return max(_attempts(run), default=0) + 1


def read_ledger(run: Path) -> list[LedgerStep]:
    """Merge all attempts of a run into its committed lineage: the steps that the newest checkpoint counts.

    Args:
        run: The run folder.

    Returns:
        The steps from the run's first on, in order, each once, without a gap.

    Raises:
        CheckpointError: a rank's file, or a step that a checkpoint counts, is missing.
    """
    lineage: dict[int, LedgerStep] = {}
    first: int | None = None  # not 0 for a run that resumed from another run's checkpoint
    for attempt in _attempts(run):
        start, steps = _read_attempt(_attempt_folder(run, attempt), attempt)
        if start is None:
            continue
        first = start if first is None else min(first, start)
        lineage = {number: step for number, step in lineage.items() if number < start}
        lineage.update(steps)
    num_committed = num_committed_steps(run)
    lineage = {number: step for number, step in lineage.items() if number < num_committed}
    missing = sorted(set(range(first or 0, num_committed)) - lineage.keys())
    if missing:
        raise CheckpointError(
            f"the run ledger lacks {len(missing)} committed steps, the first of them global step "
            f"{missing[0]}; the ledger folder was changed."
        )
    return [lineage[number] for number in sorted(lineage)]


def num_committed_steps(run: Path) -> int:
    """Return how many steps the newest checkpoint counts, by its name alone."""
    names = (re.fullmatch(r"step-(\d{8,})", entry.name) for entry in (run / "checkpoints").glob("step-*"))
    return max((int(match[1]) for match in names if match), default=0)


def ledger_files(run: Path) -> dict[str, int]:
    """Return the ranks' files below the ledger folder of a run, by name, with their sizes in bytes."""
    found = {}
    for attempt in _attempts(run):
        folder = _attempt_folder(run, attempt)
        for path in sorted(folder.iterdir()):
            if _RANK.fullmatch(path.name):
                found[f"{folder.name}/{path.name}"] = path.stat().st_size
    return found


def attempt_starts(run: Path) -> list[tuple[int, int]]:
    """Return number and first global step of the attempts that did anything, ascending."""
    found = {}
    for name in ledger_files(run):
        attempt = int(name.partition("/")[0].removeprefix("attempt-"))
        header = next(read_events(run / LEDGER_FOLDER / name), {}) if attempt not in found else {}
        if header.get("event") == "attempt":
            found[attempt] = int(header["start"])
    return sorted(found.items())


def _attempts(run: Path) -> list[int]:
    folder = run / LEDGER_FOLDER
    matches = (_ATTEMPT.fullmatch(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match)


def _attempt_folder(run: Path, attempt: int) -> Path:
    return run / LEDGER_FOLDER / f"attempt-{attempt:04d}"


def _read_attempt(folder: Path, attempt: int) -> tuple[int | None, dict[int, LedgerStep]]:
    """Read the steps that all ranks of an attempt finished, and where the attempt started.

    Raises:
        CheckpointError: A line is none that a rank writes.
    """
    files = sorted(path for path in folder.iterdir() if _RANK.fullmatch(path.name))
    ranks = [list(read_events(path)) for path in files]
    try:
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
            number: merge_lines(number, attempt, lines)
            for number, lines in by_step.items()
            if len(lines) == world_size
        }
    except (LookupError, TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{folder.name} of the run ledger must hold the lines that its ranks wrote, got another one; "
            "restore the ledger folder."
        ) from None
    return start, steps


def merge_lines(global_step: int, attempt: int, lines: Iterable[Mapping[str, Any]]) -> LedgerStep:
    """Make a step of the lines that all ranks of an attempt wrote about it."""
    lines = list(lines)
    return LedgerStep.of(
        (_micro_batch(row) for line in lines for row in line["micros"]),
        global_step=global_step,
        epoch=int(lines[0]["epoch"]),
        step=int(lines[0]["step"]),
        attempt=attempt,
    )


DifferenceKind = Literal["missing", "place", "order", "samples", "doubled", "weights"]
"""``missing``: only one run has the step. ``place``: another epoch or step of the epoch. ``order``: the same
samples in another order or dealt to other micro-batches. ``samples``: other samples. ``doubled``: other
samples, of which one came earlier in the same epoch. ``weights``: the same samples, masked or weighted in
another way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerDifference:
    """How one step differs."""

    kind: DifferenceKind
    global_step: int
    text: str
    """What A has and what B has."""


def read_records(path: Path) -> list[LedgerStep]:
    """Read the committed steps of a run folder, or of a file of records.

    Raises:
        CheckpointError: the folder's ledger has gaps, the file holds no records, or there is neither.
    """
    if path.is_dir():
        return read_ledger(path)
    try:
        return [LedgerStep.from_json(line) for line in read_events(path)]
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} is neither a run folder nor a file that `shardflow ledger show --json` wrote "
            f"({os_reason(error)}); correct the path."
        ) from None


def compare_ledgers(first: Sequence[LedgerStep], second: Sequence[LedgerStep]) -> Iterator[LedgerDifference]:
    """Compare two lineages step by step.

    Yields:
        The differences in the order of the steps; none where both runs trained on the same.
    """
    mine = {record.global_step: record for record in first}
    other = {record.global_step: record for record in second}
    seen = _Seen(first), _Seen(second)
    for number in sorted(mine.keys() | other.keys()):
        a, b = mine.get(number), other.get(number)
        if a is None or b is None:
            holder = "A" if b is None else "B"
            yield LedgerDifference(kind="missing", global_step=number, text=f"only {holder} has it")
        elif a.digest != b.digest:
            yield _compare(a, b, seen)


class _Seen:
    """Number of times that samples occur in each epoch."""

    def __init__(self, records: Iterable[LedgerStep]) -> None:
        self._records = records
        self._counts: dict[int, Counter[str]] | None = None

    def is_doubled(self, epoch: int, key: str) -> bool:
        """Whether the sample comes more than once in the epoch."""
        if self._counts is None:  # only runs that differ pay for this
            self._counts = {}
            for record in self._records:
                self._counts.setdefault(record.epoch, Counter()).update(record.keys)
        return self._counts[epoch][key] > 1


def _compare(a: LedgerStep, b: LedgerStep, seen: tuple[_Seen, _Seen]) -> LedgerDifference:
    def differs(kind: DifferenceKind, text: str) -> LedgerDifference:
        return LedgerDifference(kind=kind, global_step=a.global_step, text=text)

    if (a.epoch, a.step) != (b.epoch, b.step):
        return differs(
            "place", f"A runs it as epoch {a.epoch}, step {a.step}, B as epoch {b.epoch}, step {b.step}"
        )
    if not a.micro_batches or not b.micro_batches:
        return differs("samples", f"A has digest {a.digest}, B {b.digest}")
    only_a, only_b = Counter(a.keys) - Counter(b.keys), Counter(b.keys) - Counter(a.keys)
    if only_a or only_b:
        doubled = [k for k in only_a if seen[0].is_doubled(a.epoch, k)]
        doubled += [k for k in only_b if seen[1].is_doubled(b.epoch, k)]
        text = f"only A has {_some(only_a)}, only B {_some(only_b)}"
        if doubled:
            return differs("doubled", f"{text}; more than once in the epoch: {_some(doubled)}")
        return differs("samples", text)
    places = [i for i, (x, y) in enumerate(zip(a.keys, b.keys, strict=True)) if x != y]
    if places:
        i = places[0]
        return differs("order", f"the same samples, from place {i} on A has {a.keys[i]}, B {b.keys[i]}")
    if [(m.micro, m.keys) for m in a.micro_batches] != [(m.micro, m.keys) for m in b.micro_batches]:
        return differs("order", "the same samples in order, dealt to other micro-batches")
    return differs("weights", "the same samples in order, with other weights or components")


def _some(keys: Iterable[str]) -> str:
    listed = sorted(keys)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "") or "nothing"
