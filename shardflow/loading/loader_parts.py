"""What a loader holds in one process: memory, locks, counters, processes beside it, and the streams it makes.

A forked child makes its own: its parent's may be held by threads that are not there. Settings may change
while streams run; what a stream has opened it finishes as it was begun.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from shardflow.epochs import EpochPlan, LoaderState, RankSchedule
from shardflow.fields.findings import EntitySlots
from shardflow.fields.quarantine import Quarantine
from shardflow.fields.reader import FieldReader
from shardflow.fields.slots import make_filler
from shardflow.fields.text import TextFiller
from shardflow.fields.tokens import TokenFiller
from shardflow.fields.transforms import Transform, load_transform
from shardflow.loading.assemble import BatchSource
from shardflow.loading.buffers import BufferPool, Pool
from shardflow.loading.config import LoaderConfig
from shardflow.loading.foresight import Foresight
from shardflow.loading.parts import PartSize
from shardflow.loading.selection import Selection
from shardflow.loading.side_stream import SideProcesses, SideStream
from shardflow.loading.stream import BatchStream
from shardflow.loading.tiers import Tiers
from shardflow.loading.world import World
from shardflow.telemetry import StageCounters

__all__ = ["LoaderParts"]

_LOGGER = logging.getLogger(__name__)

_JOIN_TIMEOUT_S: Final = 5.0
_SETTINGS: Final = ("execution", "num_threads", "prefetch_bytes", "read_bytes")


class LoaderParts:
    """What a loader holds in this process.

    Args:
        selection: The samples.
        schedule: Who runs what.
        world: This rank.
        state: The run that the loader belongs to.
        config: How to run.

    Attributes:
        pid: The process that this belongs to.
        config: How to run now: as given, and what was changed since.
        side: The processes that load for this one; None until they are needed.
        tiers: What it reads through.
        changing: Held while settings change.
        streams: Those whose micro-batches threads of this process make.
    """

    def __init__(
        self,
        selection: Selection,
        schedule: RankSchedule,
        world: World,
        state: LoaderState,
        config: LoaderConfig,
    ) -> None:
        self.pid = os.getpid()
        self.selection, self.world, self.config = selection, world, config
        self.tiers = Tiers(selection.datasets)
        self.counters = StageCounters()
        self.pool = BufferPool(config.prefetch_bytes)
        self.foresight = Foresight(
            selection,
            schedule,
            world,
            config,
            run_id=f"{state.plan_id} {state.seed}",
            counters=self.counters,
        )
        self.side: SideProcesses | None = None
        self._retired: list[SideProcesses] = []
        self._schedule, self._state = schedule, state
        self._part_size = PartSize(selection, config)
        self._tokens = None if config.tokens is None else TokenFiller(selection, config.tokens)
        self._transform: Transform | None = None
        self.changing = threading.RLock()
        self.streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()

    # ---- streams ---------------------------------------------------------------------------------

    def stream(
        self, plan: EpochPlan, numbers: range, known_masks: Quarantine, pool: Pool | None = None
    ) -> BatchStream:
        """Make a stream whose micro-batches threads of this process make."""
        if self._transform is None and self.config.transform:
            self._transform = load_transform(self.config.transform)
        with self.changing:
            config = self.config
            reader = FieldReader(self.selection, read_bytes=config.read_bytes, counters=self.counters)
            source = BatchSource(
                selection=self.selection,
                plan=plan,
                schedule=self._schedule,
                rank=self.world.rank,
                config=config,
                pool=pool or self.pool,
                filler=make_filler(
                    reader,
                    config.view,
                    text=config.text,
                    seed=plan.seed,
                    epoch=plan.epoch,
                    counters=self.counters,
                ),
                texts=TextFiller(reader, self.counters) if config.view is None and config.text else None,
                tokens=self._tokens,
                transform=self._transform,
                entities=EntitySlots.of(self.selection),
                part_size=self._part_size,
                counters=self.counters,
                known_masks=known_masks,
                watch=self.foresight.watch(plan, numbers) if self.foresight.is_on else None,
            )
            stream = BatchStream(source, numbers, reader)
            self.streams.add(stream)
        return stream

    def side_stream(self, epoch: int, numbers: range, known_masks: Sequence[Mapping[str, Any]]) -> SideStream:
        """Make a stream whose micro-batches other processes make; they start with the first one."""
        if self.side is not None and not self.side.fits(self.config):
            self.retire_side()
        if self.side is None:
            arguments = {
                "dataset": self.selection,
                "spec": self._state.spec,
                "seed": self._state.seed,
                "world": self.world,
            }
            self.side = SideProcesses(arguments, self.config, self.counters)
        return self.side.stream(epoch, numbers, known_masks)

    def retire_side(self) -> None:
        """Do without the processes from now on; `close_retired` ends them, once no stream needs them."""
        if self.side is not None:
            self._retired.append(self.side)
            self.side = None

    @property
    def process_ids(self) -> list[int]:
        """Processes of this loader that run."""
        sides = [self.side, *self._retired]
        return [pid for side in sides if side is not None for pid in side.pids]

    def close_retired(self) -> None:
        """End the processes that are not needed any more."""
        retired, self._retired = self._retired, []
        for side in retired:
            side.close()

    def close(self) -> None:
        """End all processes, and wait a while for what was read ahead of streams that ended.

        Nothing happens in a forked child.
        """
        self.retire_side()
        self.close_retired()
        if self.pid == os.getpid() and not self.foresight.join(_JOIN_TIMEOUT_S):
            _LOGGER.debug("reading ahead goes on after close, until its requests end")

    # ---- changes ---------------------------------------------------------------------------------

    def settings(self) -> dict[str, int | str]:
        """Return what `change` changes, by name."""
        ours = {f"loader.{name}": getattr(self.config, name) for name in _SETTINGS}
        return {**ours, **self.tiers.settings()}

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name, unchecked, see `Knobs.set`; what runs takes part where it can."""
        with self.changing:
            ours = {name: changes[f"loader.{name}"] for name in _SETTINGS if f"loader.{name}" in changes}
            others = {name: value for name, value in changes.items() if not name.startswith("loader.")}
            self.config = replace(self.config, **ours)  # type: ignore[arg-type]
            self.tiers.change(others)
            self.pool.bound(self.config.prefetch_bytes)
            self._part_size.divide_among(self.config.num_threads)
            for stream in list(self.streams):
                stream.change(self.config)
            if self.side is not None:
                self.side.change(self.config, others)

    @property
    def has_pending(self) -> bool:
        """Whether the newest stream was opened for an execution that is no longer asked for."""
        if self.config.execution == "threads":
            return self.side is not None
        return self.side is None or not self.side.fits(self.config)

    def take_back_pending(self, side: SideProcesses | None) -> None:
        """Go back to the execution of a stream that goes on, since another could not start.

        Args:
            side: The processes that make it; None for threads.
        """
        with self.changing:
            if self.side is not None and self.side is not side:
                self.side.close()
            self.side = side
            self._retired = [other for other in self._retired if other is not side]
            kept: dict[str, Any] = {"execution": "threads"} if side is None else side.structure
            self.config = replace(self.config, **kept)
