"""The loader of one rank: iterate, know the length before the first step, stop and go on anywhere.

Owns the position (contract S4): it counts micro-batches that the consumer has received, never those that are
only prefetched. What is in a micro-batch is the plan's business, how it gets there the stream's.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from shardflow.errors import StateError
from shardflow.fields.quarantine import Quarantine, QuarantineRow
from shardflow.fields.registry import check_view
from shardflow.format import Dataset
from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig, check_node
from shardflow.loading.engine import Pool
from shardflow.loading.process import ProcessStream
from shardflow.loading.runtime import BatchStream, LoaderRuntime, LoaderTunables
from shardflow.loading.selection import Selection, select
from shardflow.loading.world import World
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, PlanSummary, Position, RankSchedule
from shardflow.telemetry import StageCounters

# Where one epoch ends and the next begins both are asked for, in turn.
_NUM_PLANS = 2


class Stream(Protocol):
    """Micro-batches in order, made by threads or processes that `close` ends."""

    def __next__(self) -> Batch:
        """Return the next micro-batch."""

    def describe_activity(self) -> str:
        """Say which shard, tier and stage they wait for, from any thread; nothing where there is no wait."""

    def start(self) -> None:
        """Begin before the first one is asked for."""

    def close(self) -> None:
        """End what makes them."""


class EpochIterator(Iterator[Batch]):
    """An iteration. The loader knows it weakly: when its user drops it, its threads end.

    Args:
        stream: The micro-batches.
        numbers: Their numbers among the rank's micro-batches of the epoch.
        check_alive: Raises if the iteration is no longer the loader's newest.
        count: Counts a micro-batch as consumed: its epoch, its masked slots, its number.
    """

    def __init__(
        self,
        stream: Stream,
        numbers: range,
        check_alive: Callable[[EpochIterator], None],
        count: Callable[[int, list[QuarantineRow], int], None],
    ) -> None:
        self._stream = stream
        self._numbers = numbers
        self._check_alive = check_alive
        self._count = count
        self._num_fetched = 0
        self._has_failed = False
        # Of the micro-batches that were fetched and not counted: what counting needs, not their memory.
        self._uncounted: deque[tuple[int, list[QuarantineRow], int]] = deque()

    def __next__(self) -> Batch:
        """Return the next micro-batch and count it; raises what `fetch` and `count_fetched` raise."""
        batch = self.fetch()
        if batch is None:
            raise StopIteration
        self.count_fetched()
        return batch

    def fetch(self) -> Batch | None:
        """Return the next micro-batch without counting it as consumed, or None after the last one.

        For those who work ahead of their own steps, such as a copy to a device: the loader's position is
        where the steps are, so each micro-batch is counted, with `count_fetched`, when its step takes it.
        """
        if self._num_fetched == len(self._numbers):
            if not self._uncounted:
                self.close()
            return None
        self._check_alive(self)
        try:
            batch = next(self._stream)
        except BaseException:
            self._has_failed = True
            raise
        self._uncounted.append((batch.epoch, batch.quarantined, self._numbers[self._num_fetched]))
        self._num_fetched += 1
        return batch

    def count_fetched(self) -> None:
        """Count the oldest micro-batch that was fetched and not counted as consumed.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` allows.
            StateError: The iteration was retired.
        """
        self._check_alive(self)
        try:
            self._count(*self._uncounted.popleft())
        except BaseException:
            self.close()
            raise

    def hand_over(self, open_stream: Callable[[range], Stream]) -> bool:
        """Go on with another stream from the next micro-batch to fetch; call it between two of them.

        What the present one has made ahead is dropped. If the other cannot start, this one goes on.

        Args:
            open_stream: Makes a stream of the numbers that are left.

        Returns:
            Whether it does; there may be nothing left.
        """
        left = self._numbers[self._num_fetched :]
        if not left or self._has_failed:
            return False
        following = open_stream(left)
        following.start()
        present, self._stream = self._stream, following
        present.close()
        return True

    def describe_activity(self) -> str:
        """Say what its micro-batches wait for, from any thread."""
        return self._stream.describe_activity()

    def close(self) -> None:
        """End the iteration."""
        self._stream.close()


def _given_batch(batch: BatchSpec | None, spec: BatchSpec | None) -> BatchSpec:
    """Return the batch spec of a loader, which may still come by the former name of the argument."""
    if spec is not None:
        if batch is not None:
            raise TypeError("Loader() got both 'batch' and 'spec', which is its former name; pass batch=.")
        warnings.warn("Loader(spec=) is now Loader(batch=).", DeprecationWarning, stacklevel=3)
        return spec
    if batch is None:
        raise TypeError(
            "Loader() needs batch=, a BatchSpec that says how micro-batches and steps are formed."
        )
    return batch


class Loader:
    """Yields this rank's micro-batches of an epoch, in the plan's order.

    Every rank yields exactly ``len(loader)`` micro-batches an epoch; where the world size does not divide
    ``micro_batches_per_step`` some of them are fillers of weight 0.

    ``iter()`` goes on at the position: the start of the first step that is not consumed yet. So an iteration
    that was broken off inside a step begins with that step again, and after an epoch was exhausted ``iter()``
    begins the next one. One iteration is alive at a time: a second ``iter()``, `load_state_dict` and a
    `set_epoch` that changes the epoch retire it, and its next step raises `StateError`.

    Threads start with the first micro-batch of an iteration and end with it; nothing runs before or between,
    so a process may fork there. Processes, where the config asks for them, start with the first one as well
    and end with `close` or with the loader.

    Args:
        dataset: The dataset, or a blend of several, see `open_blend`.
        split: Which of its splits; several are joined by ``+``. Left out for a blend.
        batch: How micro-batches and steps are formed.
        seed: Run-level seed.
        subset: Terms that all samples must meet, such as ``"modality=CT"``, see `select`.
        world: This rank; one of one by default.
        config: How to run; never changes what a micro-batch holds.
        spec: The former name of ``batch``, accepted for one release.

    Raises:
        TypeError: Neither ``batch`` nor ``spec`` is given, or both are.
        ConfigError: The dataset has no such split, a term cannot be read, no sample is left, or the loaders
            of the node could take more memory than they may.
        PlanError: There are more ranks than micro-batches in a step, or no step can be formed; under a token
            budget the latter is said when the first plan is asked for.

    Example::

        loader = Loader(Dataset.open("data"), split="train", batch=spec, seed=7, world=world)
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                train(batch.arrays["image"], batch.arrays["weight"])
    """

    def __init__(
        self,
        dataset: Dataset | Selection,
        *,
        split: str = "",
        batch: BatchSpec | None = None,
        seed: int,
        subset: Sequence[str] = (),
        world: World | None = None,
        config: LoaderConfig | None = None,
        spec: BatchSpec | None = None,
    ) -> None:
        batch = _given_batch(batch, spec)
        self.world = world or World()
        config = config or LoaderConfig()
        selection = select(dataset, split, subset)
        check_view(selection, config.view)
        check_node(config, selection.datasets, self.world)
        self._schedule = RankSchedule(
            batch.micro_batches_per_step,
            self.world.world_size,
            lanes=batch.lanes,
            ranks_per_node=self.world.ranks_per_node,
        )
        self._state = selection.state(batch, seed=seed)
        self._plans: list[EpochPlan] = []
        self._parts = LoaderRuntime(selection, self._schedule, self.world, self._state, config)
        weakref.finalize(self, self._parts.close)
        if batch.budget is None:
            self._plan_of(0)  # costs nothing, and says at once if no step can be formed
        self._position = self._state.position
        self._quarantine = Quarantine(self.config.max_bad_samples)
        self._active: weakref.ref[EpochIterator] | None = None

    # ---- what is known before the first step -----------------------------------------------------

    @property
    def dataset(self) -> Dataset:
        """The dataset; of a blend, that of its first component."""
        return self._parts.selection.datasets[0]

    @property
    def selection(self) -> Selection:
        """The samples that are run over."""
        return self._parts.selection

    @property
    def config(self) -> LoaderConfig:
        """How it runs: as it was made, and what was changed since."""
        return self._parts.config

    @property
    def plan_id(self) -> str:
        """Identity of the plan: equal for runs that make the same steps, whatever their world size."""
        return self._state.plan_id

    @property
    def plan(self) -> EpochPlan:
        """The plan of the present epoch."""
        return self._plan_of(self.epoch)

    @property
    def num_steps(self) -> int:
        """Steps of the present epoch; under a token budget epochs may differ by a few."""
        return self.plan.num_steps

    def num_steps_in(self, epoch: int) -> int:
        """Return the steps of any epoch."""
        return self._plan_of(epoch).num_steps

    def summary(self) -> PlanSummary:
        """Return the numbers of the present epoch: steps, and what its tail leaves out, repeats or pads."""
        return self.plan.summary(self._schedule)

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches of a step that this rank runs, fillers included."""
        return self._schedule.num_micro_batches_per_rank

    def __len__(self) -> int:
        """Micro-batches that this rank yields in the whole present epoch, wherever the position is."""
        return self.num_steps * self.num_micro_batches_per_rank

    def num_micro_batches_in(self, epoch: int) -> int:
        """Return the micro-batches that this rank yields in a whole epoch, any one."""
        return self.num_steps_in(epoch) * self.num_micro_batches_per_rank

    # ---- iteration -------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator:
        """Go on at the position, to the end of its epoch."""
        self._retire()
        start = self._position.step * self.num_micro_batches_per_rank
        numbers = range(start, len(self))
        stream = self._open(self.epoch, numbers)
        self._parts.close_retired()
        iterator = EpochIterator(stream, numbers, self._check_alive, self._count)
        self._active = weakref.ref(iterator)
        return iterator

    def stream(self, epoch: int, numbers: range, *, pool: Pool | None = None) -> BatchStream:
        """Yield some of the rank's micro-batches of any epoch, without moving the position.

        For those who deal micro-batches among processes and count for themselves: threads of this process
        make them, whatever the config's execution.

        Args:
            epoch: The epoch.
            numbers: Which, counted over the epoch's steps, 0 to ``len(loader) - 1``.
            pool: Where their memory comes from; the loader's own if not given.
        """
        return self._here().stream(self._plan_of(epoch), numbers, self._quarantine, pool)

    def count(self, batch: Batch, number: int) -> None:
        """Count a micro-batch as consumed and keep its masks.

        The loader's own iteration does it; it is public for those who iterate a `stream` themselves.

        Args:
            batch: The micro-batch.
            number: Its number among the rank's micro-batches of the epoch.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` allows.
        """
        self._count(batch.epoch, batch.quarantined, number)

    def close(self) -> None:
        """End the running iteration, if any, and processes; the loader can be iterated again."""
        self._retire()
        self._parts.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- settings that may change ----------------------------------------------------------------

    @property
    def tunables(self) -> LoaderTunables:
        """The settings that may change while it runs, those of its caches and stores among them."""
        return LoaderTunables(self._here())

    def apply_pending(self) -> bool:
        """Let changes act that wait for a boundary: ``loader.execution``, and how many processes there are.

        Call it between two micro-batches, in the thread that iterates. The running iteration goes on with the
        next one that was not fetched. What was made ahead is dropped and made again, at most
        ``prefetch_bytes``, and a process takes a second or two to start. Without a running iteration the
        next ``iter()`` does the same by itself.

        Returns:
            Whether anything changed hands.

        Raises:
            Exception: The processes could not start; the iteration goes on as before, and so do the settings.
        """
        current, parts = self._current(), self._parts
        if current is None or parts.pid != os.getpid() or not parts.has_pending:
            return False
        side = parts.side
        try:
            has_changed = current.hand_over(partial(self._open, self.epoch))
        except BaseException:
            parts.take_back_pending(side)
            raise
        parts.close_retired()
        if has_changed and parts.side is not None:
            parts.planner.rest()  # the processes report for themselves
        return has_changed

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name without a look at their limits; `tunables` is for everybody else."""
        self._here().change(changes)

    # ---- position --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return self._position.epoch

    @property
    def position(self) -> Position:
        """The first step that is not consumed yet."""
        return self._position

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing happens if the position lies in it already.

        Raises:
            StateError: ``epoch`` is no number from 0.
        """
        if epoch != self.epoch:
            self._retire()
            self._position = Position(epoch, 0)

    def state_dict(self) -> dict[str, object]:
        """Return the position and the run it belongs to: under 1 KB of JSON, equal on all ranks.

        Taken after the last micro-batch of step k was received it says k + 1; inside a step it says that
        step; after an epoch's last step it says step 0 of the next epoch.
        """
        return self._state.at(self._position).to_json()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a saved position; takes effect at the next ``iter()`` and retires a running iteration.

        The state may have been saved with another world size.

        Raises:
            StateError: The state is malformed or of another seed, dataset, split or batch spec; the message
                names the field, and the loader stays where it is.
        """
        loaded = LoaderState.from_json(state)
        loaded.check_matches(self._state)
        loaded.check_within(self.num_steps_in(loaded.epoch))
        self._retire()
        self._position = loaded.position

    # ---- what happened ---------------------------------------------------------------------------

    @property
    def counters(self) -> StageCounters:
        """Time, bytes and items per stage since the loader was made."""
        return self._parts.counters

    @property
    def process_ids(self) -> list[int]:
        """Processes that load for this one; none where threads do it."""
        return self._parts.process_ids if self._parts.pid == os.getpid() else []

    @property
    def num_buffers_allocated(self) -> int:
        """Batch buffers asked from the system so far; stands still once iteration is in its stride."""
        return self._parts.pool.num_allocated

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """The slots masked because their sample is bad, in the order of the run; loaded ones included."""
        return self._quarantine.rows

    def masks(self) -> list[dict[str, int | str]]:
        """Return `quarantined` as JSON objects, for a checkpoint."""
        return [row.to_json() for row in self.quarantined]

    def load_masks(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mask the slots of a checkpoint again, without reading their samples.

        Pass the rows of all ranks: on another world size a slot may have moved to this one. They do not count
        towards ``max_bad_samples``.

        Raises:
            StateError: A row is malformed.
        """
        self._quarantine.load(rows)

    def describe_activity(self) -> str:
        """Say which shard, tier and stage the running iteration's threads are at; from any thread."""
        current = self._current()
        return current.describe_activity() if current is not None else ""

    # ---- inside ----------------------------------------------------------------------------------

    def _check_alive(self, iterator: EpochIterator) -> None:
        if iterator is not self._current():
            raise StateError(
                "an iteration must be the loader's newest, got one that iter(), load_state_dict(), "
                "set_epoch() or close() retired; call iter() again."
            )

    def _count(self, epoch: int, quarantined: list[QuarantineRow], number: int) -> None:
        self._quarantine.record(quarantined)
        self._position = Position.after(
            epoch=epoch,
            num_consumed=number + 1,
            num_micro_batches_per_rank=self.num_micro_batches_per_rank,
            num_steps=self.num_steps_in(epoch),
        )

    def _plan_of(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch.

        Only plans that are asked for are made: under a token budget one takes a second at 200 million
        samples, so a run that resumes in epoch 7 never plans epoch 0.
        """
        for plan in self._plans:
            if plan.epoch == epoch:
                return plan
        if self._plans:
            plan = self._plans[0].for_epoch(epoch)
        else:
            plan = self._parts.selection.plan(self._state.spec, seed=self._state.seed, epoch=epoch)
        self._plans = [plan, *self._plans[: _NUM_PLANS - 1]]
        return plan

    def _here(self) -> LoaderRuntime:
        """Return the parts of this process: a forked child cannot use its parent's."""
        parts = self._parts
        if parts.pid != os.getpid():
            selection = parts.selection.reopened()
            self._parts = LoaderRuntime(selection, self._schedule, self.world, self._state, parts.config)
            weakref.finalize(self, self._parts.close)
        return self._parts

    def _open(self, epoch: int, numbers: range) -> BatchStream | ProcessStream:
        """Open a stream as the settings say now."""
        parts = self._here()
        if parts.config.execution != "threads":
            self._plan_of(epoch)
            return parts.process_stream(epoch, numbers, self.masks())
        parts.retire_processes()
        return self.stream(epoch, numbers)

    def _current(self) -> EpochIterator | None:
        return self._active() if self._active is not None else None

    def _retire(self) -> None:
        current = self._current()
        self._active = None
        if current is not None:
            current.close()
