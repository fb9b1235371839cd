"""The ranks of a run: joining, meeting, and exchanging small facts.

Owns the process groups and their timeouts. There are two groups: the *gradient group* (NCCL on GPUs, gloo
on CPUs), on which nothing but the model's own collectives runs, and a gloo *control group* for everything
else: meetings that name who is missing, and small JSON facts. Invariant: no unbounded work happens inside a
collective; a rank prepares first (data, model, checkpoint), then meets the others at :meth:`Ranks.meet`,
whose deadline names the missing ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardflow.errors import ConfigError, ShardflowError, WaitTimeoutError
from shardflow.training.devices import backend_of, choose_device
from shardflow.training.nccl_variables import refuse_unknown_names
from shardflow.training.watch import Unwatched, Watch

__all__ = ["Ranks", "Timeouts", "join_ranks"]

_LOGGER = logging.getLogger(__name__)
_MISSING_RANKS = re.compile(r"Ranks? ((?:\d+)(?:, \d+)*) failed to pass")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long ranks wait for one another; of type ``timedelta``, as a bare number is a known mistake."""

    startup: timedelta
    """Until every rank has joined, prepared and taken part in the first exchange."""
    steady: timedelta
    """For one gradient exchange once steps are running."""
    control: timedelta
    """For a meeting on the control group: a checkpoint being written, an evaluation ending."""
    hang: timedelta | None = None
    """For what a rank does alone within a step; None for ever. Kept by the watch, not by a group."""

    def __post_init__(self) -> None:
        for name in ("startup", "steady", "control"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or value <= timedelta(0):
                raise ConfigError(
                    f"timeout {name} must be a positive timedelta, got {value!r}; use timedelta(seconds=...)."
                )

    @property
    def startup_s(self) -> float:
        """``startup`` in seconds."""
        return self.startup.total_seconds()

    @property
    def control_s(self) -> float:
        """``control`` in seconds."""
        return self.control.total_seconds()

    @property
    def hang_s(self) -> float | None:
        """``hang`` in seconds."""
        return None if self.hang is None else self.hang.total_seconds()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among the data-parallel ranks of the run."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    """Gradient group."""
    control: dist.ProcessGroup
    """Gloo group for meetings and small facts, on CPUs in any case."""
    timeouts: Timeouts
    watch: Watch = field(default_factory=Unwatched)
    """Hears what this rank is at."""

    def meet(self, phase: str, timeout: timedelta) -> None:
        """Wait until every rank has reached ``phase``.

        Raises:
            WaitTimeoutError: ranks are missing after ``timeout``; rank 0 names them.
        """
        try:
            with self.watch.together(f"waiting for all ranks: {phase}"):
                dist.monitored_barrier(group=self.control, timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise WaitTimeoutError(self._describe_missing(phase, timeout, str(error))) from None

    def _describe_missing(self, phase: str, timeout: timedelta, text: str) -> str:
        match = _MISSING_RANKS.search(text)
        if match is None:
            found = f"at least one missing (seen by rank {self.rank})"
            remedy = "rank 0 names the missing ranks in its log"
        else:
            names = f"ranks {match[1]}" if "," in match[1] else f"rank {match[1]}"
            found, remedy = f"no sign of {names}", "look at the last lines that were logged there"
        return (
            f"all {self.world_size} ranks must reach the phase '{phase}' within "
            f"{timeout.total_seconds():g} s, got {found}; {remedy}."
        )

    def gather_json(self, value: Any) -> list[Any]:
        """Give every rank the JSON value of every rank, in rank order.

        Raises:
            WaitTimeoutError: a rank did not give its value within ``timeouts.control``, or is gone.
        """
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([payload.numel()]), self.timeouts.control)
        # Gloo gathers equal sizes only; the padding is cut off again.
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(self._gather(padded, self.timeouts.control), sizes, strict=True)
        ]

    def from_first(self, value: Any) -> Any:
        """Give every rank the JSON value of rank 0; the others' ``value`` is ignored."""
        return self.gather_json(value if self.rank == 0 else None)[0]

    def gather_numbers(self, values: Sequence[float], timeout: timedelta) -> torch.Tensor:
        """Give every rank the numbers of every rank.

        A gather and not a sum: every rank then adds in the same order, and sees the largest as well as the
        total.

        Returns:
            ``(world_size, len(values))`` float64 on the CPU, in rank order.

        Raises:
            WaitTimeoutError: a rank did not give its numbers within ``timeout``, or is gone.
        """
        return torch.stack(self._gather(torch.tensor(values, dtype=torch.float64), timeout))

    def _gather(self, own: torch.Tensor, timeout: timedelta) -> list[torch.Tensor]:
        """Exchange tensors of one shape on the control group; every exchange on it comes through here."""
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        try:
            with self.watch.together("exchanging facts with all ranks"):
                work = dist.all_gather(gathered, own, group=self.control, async_op=True)
                if work is not None:
                    work.wait(timeout)
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"every rank must take part in an exchange within {timeout.total_seconds():g} s, got "
                f"{type(error).__name__} on rank {self.rank}; look for a rank that ended or hangs."
            ) from None
        return gathered

    def enter_steady_state(self) -> None:
        """Shorten the gradient group's timeout; the first exchange, which builds the connections, is done."""
        dist.distributed_c10d._set_pg_timeout(self.timeouts.steady, self.group)


@contextlib.contextmanager
def join_ranks(wanted_device: str, timeouts: Timeouts, *, traces: Path | None = None) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or be the only rank where it did not.

    ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are read here, once.

    Args:
        wanted_device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"npu"``.
        timeouts: Joining is bounded by ``timeouts.startup``.
        traces: Folder for NCCL's flight recorder: what each rank's collectives were at when one of them
            timed out. Settings of it in the environment win.

    Yields:
        The ranks; the groups are taken down at the end of the block unless it fails.

    Raises:
        ConfigError: no such device, or a variable of NCCL or torch is set that neither knows.
        WaitTimeoutError: not all ranks joined in time.
    """
    device = choose_device(wanted_device, int(os.environ.get("LOCAL_RANK", "0")))
    backend = backend_of(device)
    if backend == "nccl":
        refuse_unknown_names(os.environ)
        _set_flight_recorder(traces)
    _init_default_group(backend, timeouts.startup)
    group = dist.group.WORLD
    if group is None:  # never after a successful init; tells the type checker so
        raise ShardflowError("the default process group must exist after joining, got none; this is a bug.")
    ranks = Ranks(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        group=group,
        control=dist.new_group(backend="gloo", timeout=timeouts.control),
        timeouts=timeouts,
    )
    _LOGGER.info("joined as rank %d of %d on %s with %s", ranks.rank, ranks.world_size, device, backend)
    yield ranks
    # Not reached after a failure, on purpose: the other ranks may be stuck in a collective that an orderly
    # goodbye would wait for. The process ends, its connections close, and the others notice at once.
    dist.destroy_process_group()


def _set_flight_recorder(traces: Path | None) -> None:
    """Turn the flight recorder on; torch reads the variables when the group is made (ProcessGroupNCCL.hpp).

    It has an older and a newer name for its size and for its file, and takes the first that is set.
    """
    wanted = {("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000"}
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        wanted[names] = str(traces / "nccl-trace-rank-")
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):
            os.environ.update(dict.fromkeys(names, value))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _init_default_group(backend: str, timeout: timedelta) -> None:
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
        return
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistStoreError as error:
        raise WaitTimeoutError(
            f"all ranks must join within {timeout.total_seconds():g} s, got {type(error).__name__}; start "
            "every rank, check that it reaches the rendezvous address, or raise timeouts.startup_s."
        ) from None
