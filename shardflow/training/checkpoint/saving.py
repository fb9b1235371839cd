"""Asynchronous checkpoints: copied to host memory between two steps, written while the next ones run.

The host buffers are allocated once and reused, because allocating costs as much as copying. One snapshot
exists at a time, so the cost in host memory is one model and optimizer, or this rank's part of them.

Owns the order in which ranks agree on a checkpoint. All begin it together; each that holds tensors of its own
copies and writes them in a thread; its progress travels as one number in the exchange of every step, so all
ranks learn of an end, or of a failure, at the same step. If rank 0 holds everything, its thread also
publishes the checkpoint; if every rank holds a part, rank 0 publishes once all parts are written
(docs/adr/0052).

Invariant: one checkpoint is in progress at a time, and `CheckpointSaver.finish` is called before a run ends,
so nothing that a run counts as saved is only in memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardflow.errors import CheckpointError, WaitTimeoutError
from shardflow.training.checkpoint.files import CheckpointFolder
from shardflow.training.checkpoint.tensors import named_optimizer_tensors, named_tensors
from shardflow.training.distributed import Ranks, is_share
from shardflow.training.metrics import CheckpointMetrics


class HostSnapshot:
    """Host buffers for the tensors that this rank writes.

    Args:
        model: The model; its parameters may be shards (``DTensor``).
        optimizer: Its optimizer.
        is_first: Whether this is rank 0, which alone keeps what all ranks hold the same of.

    Attributes:
        model: Tensors of the newest :meth:`take`, on the CPU.
        optimizer: The same of the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, is_first: bool) -> None:
        self.model: dict[str, torch.Tensor] = {}
        self.optimizer: dict[str, torch.Tensor] = {}
        self._sources = model, optimizer
        self._is_first = is_first

    @property
    def num_bytes(self) -> int:
        """Size of the newest copy."""
        return sum(t.nbytes for part in (self.model, self.optimizer) for t in part.values())

    def take(self) -> None:
        """Copy everything as it is now; returns when the copy is whole."""
        model, optimizer = self._sources
        self.model = self._copy(named_tensors(model), self.model)
        self.optimizer = self._copy(named_optimizer_tensors(model, optimizer), self.optimizer)
        if torch.accelerator.is_available():  # the copies were only queued
            torch.accelerator.synchronize()

    def _copy(
        self, tensors: Iterable[tuple[str, torch.Tensor]], former: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if is_share(tensor):
                source = tensor.to_local().detach()
                if source.numel() == 0 and not self._is_first:
                    continue
            elif self._is_first:
                source = tensor.detach()
            else:
                continue
            target = former.get(name)
            if target is None or target.shape != source.shape or target.dtype != source.dtype:
                pinned = source.device.type != "cpu"
                target = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
            target.copy_(source, non_blocking=True)
            copies[name] = target
        return copies


class SavingStage(IntEnum):
    """How far this rank is with the checkpoint under way; a number that ranks exchange."""

    IDLE = 0
    """None is under way."""
    BUSY = 1
    PART_WRITTEN = 2
    """This rank's part is written; those of others may not be."""
    DONE = 3
    FAILED = 4


@dataclass(slots=True)
class _Work:
    """The checkpoint under way, on this rank."""

    global_step: int
    unfinished: Path
    state: Mapping[str, Any]
    stage: SavingStage
    files: dict[str, Any]
    error: str = ""
    stall_s: float = 0.0
    write_s: float = 0.0


class CheckpointSaver:
    """Writes the checkpoints of one run.

    Args:
        folder: Where they go; shared by all ranks.
        ranks: The ranks of the run.
        model: The model, whole on every rank or sharded.
        optimizer: Its optimizer.
        is_sharded: Whether each rank holds rows of its own.
        lock: Content of ``loader.lock.json``, which is written beside each.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        ranks: Ranks,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        is_sharded: bool,
        lock: bytes | None = None,
    ) -> None:
        self._folder, self._lock = folder, lock
        self._ranks = ranks
        self._is_sharded = is_sharded
        self._snapshot = HostSnapshot(model, optimizer, is_first=ranks.rank == 0)
        self._work: _Work | None = None
        self._thread: threading.Thread | None = None

    @property
    def stage(self) -> SavingStage:
        """What to tell the others at the next exchange."""
        return self._work.stage if self._work else SavingStage.IDLE

    def begin(
        self, global_step: int, *, facts: Any, state: Callable[[list[Any]], Mapping[str, Any]]
    ) -> CheckpointMetrics | None:
        """Copy model and optimizer as they are, and let a thread write them; every rank calls this.

        A checkpoint that is still being written is waited for first.

        Args:
            global_step: Steps that are done.
            facts: JSON value of this rank.
            state: Makes the checkpoint's state from the facts of all ranks, in rank order.

        Returns:
            What the one before cost, where it ended only now.

        Raises:
            CheckpointError: this one cannot be begun, or the one before could not be written; on every
                rank.
        """
        started = time.perf_counter()
        former = self.finish()
        own: dict[str, Any] = {"facts": facts}
        if self._ranks.rank == 0:
            try:
                own["folder"] = self._folder.begin(global_step).name
            except CheckpointError as error:
                own["error"] = error.message
        by_rank = self._ranks.all_gather_json(own)
        if "error" in by_rank[0]:
            raise CheckpointError(by_rank[0]["error"])
        work = self._work = _Work(
            global_step=global_step,
            unfinished=self._folder.path / by_rank[0]["folder"],
            state=state([one["facts"] for one in by_rank]),
            stage=SavingStage.DONE,
            files={},
        )
        if self._is_sharded or self._ranks.rank == 0:
            self._snapshot.take()
            self._start(self._write)
        work.stall_s = time.perf_counter() - started
        return former

    def advance(self, stages: Sequence[float]) -> CheckpointMetrics | None:
        """Take note of how far all ranks are; every rank calls this with the same numbers.

        Args:
            stages: The :attr:`stage` of every rank, from one exchange.

        Returns:
            What the checkpoint cost, once it is saved.

        Raises:
            CheckpointError: a rank could not write its part, or rank 0 could not publish; on every rank,
                naming the first cause. The checkpoints before are untouched.
        """
        work = self._work
        if work is None:
            return None
        if SavingStage.FAILED in stages:
            errors = self._ranks.all_gather_json(work.error)
            self._work = None
            raise CheckpointError(next(error for error in errors if error))
        if all(stage == SavingStage.DONE for stage in stages):
            self._work = None
            return CheckpointMetrics(
                global_step=work.global_step,
                stall_s=work.stall_s,
                write_s=work.write_s,
                num_bytes=self._snapshot.num_bytes,
            )
        if all(stage == SavingStage.PART_WRITTEN for stage in stages):
            for files in self._ranks.all_gather_json(work.files):
                work.files |= files
            if self._ranks.rank == 0:
                self._start(self._publish)
            else:
                work.stage = SavingStage.DONE
        return None

    def finish(self) -> CheckpointMetrics | None:
        """Wait until the checkpoint in progress is saved; every rank calls this.

        Returns:
            What it cost; None where none was under way.

        Raises:
            CheckpointError: as :meth:`advance`.
            WaitTimeoutError: a rank did not write its part within ``timeouts.control_s``.
        """
        metrics, limit_s = None, self._ranks.timeouts.control_s
        while self._work is not None:
            self.close()
            if self._work.stage is SavingStage.BUSY:
                raise WaitTimeoutError(
                    f"checkpoint step-{self._work.global_step:08d} was not written within {limit_s:g} s on "
                    f"rank {self._ranks.rank}; check the storage of run.output, or raise timeouts.control_s."
                )
            self._ranks.barrier("checkpoint written", limit_s)
            stages = self._ranks.all_gather_numbers([self.stage], limit_s)[:, 0]
            metrics = self.advance(stages.tolist())
        return metrics

    def close(self) -> None:
        """Let this rank's thread end, in at most ``timeouts.control_s``; exchanges nothing."""
        if self._thread is not None:
            self._thread.join(self._ranks.timeouts.control_s)

    def _start(self, work: Callable[[_Work], None]) -> None:
        if self._work is None:
            return
        self._work.stage = SavingStage.BUSY
        # A daemon: a disk that never answers must not keep a process alive that has failed.
        self._thread = threading.Thread(
            target=self._run, args=(work, self._work), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, step: Callable[[_Work], None], work: _Work) -> None:
        started = time.perf_counter()
        try:
            step(work)
        except CheckpointError as error:
            work.error, work.stage = error.message, SavingStage.FAILED
        except Exception as error:  # noqa: BLE001 - raised on every rank at the next exchange
            work.error = (
                f"checkpoint step-{work.global_step:08d} could not be written: {type(error).__name__}; this "
                "is a bug."
            )
            work.stage = SavingStage.FAILED
        work.write_s += time.perf_counter() - started

    def _write(self, work: _Work) -> None:
        work.files = self._folder.write_part(
            work.unfinished,
            work.global_step,
            model=self._snapshot.model,
            optimizer=self._snapshot.optimizer,
            part=self._ranks.rank if self._is_sharded else None,
        )
        if self._is_sharded:
            work.stage = SavingStage.PART_WRITTEN
        else:
            self._publish(work)

    def _publish(self, work: _Work) -> None:
        self._folder.publish(
            work.unfinished, work.global_step, state=work.state, files=work.files, lock=self._lock
        )
        work.stage = SavingStage.DONE
