"""Loader of one rank: iterates its micro-batches, knows their number in advance, stops and resumes anywhere.

The loader owns the position (contract S4): it counts micro-batches that the consumer has received, never
those that are only prefetched. The plan decides what is in a micro-batch; a stream makes it.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal

import shardflow.loading.sample  # noqa: F401 - whoever has a loader may read single samples, too
from shardflow.errors import ConfigError, StateError
from shardflow.fields.field import Field, check_names
from shardflow.fields.outputs import OutputContract
from shardflow.fields.quarantine import Quarantine, QuarantineRow
from shardflow.format import Dataset
from shardflow.loading.assembly import BatchSource
from shardflow.loading.batch import Batch, BatchStream, EpochIterator
from shardflow.loading.binding import (
    batch_of_samples,
    bind_fields,
    bind_transform,
    charge_for_delivered,
    field_meanings,
)
from shardflow.loading.config import LoaderConfig, World, check_node, resolve_world
from shardflow.loading.counting import check_template_counts
from shardflow.loading.engine import Pool
from shardflow.loading.rows.lock import (
    LOCK_NAME,
    check_lock,
    lock_digest,
    make_lock,
    open_locked,
    run_id,
    signed,
)
from shardflow.loading.rows.selection import Selection
from shardflow.loading.rows.weighting import sampled
from shardflow.loading.rows.windows import check_windows, select_samples
from shardflow.loading.runtime import LoaderRuntime, ThreadStream
from shardflow.sampling import BatchSpec, EpochPlan, LoaderState, PlanSummary, Position, RankSchedule
from shardflow.sampling.permutation import MAX_COUNTER, checked_int
from shardflow.sampling.spec import Sampling
from shardflow.telemetry import StageCounters, Tunables

_LOGGER = logging.getLogger(__name__)
# Around the end of an epoch both its plan and the next one are needed in turn.
_NUM_PLANS = 2
# Digits of a digest in a state, which stays below 1 KB.
_DIGITS = 32


def _given_batch(batch: BatchSpec | None, spec: BatchSpec | None) -> BatchSpec:
    """Return the batch spec of a loader, which may still be passed by its former name."""
    if spec is not None:
        if batch is not None:
            raise TypeError("Loader() got both 'batch' and 'spec', its former name; pass batch=.")
        warnings.warn("Loader(spec=) is now Loader(batch=).", DeprecationWarning, stacklevel=3)
        return spec
    if not isinstance(batch, BatchSpec):
        raise TypeError(
            "Loader() needs batch=, a BatchSpec that defines how micro-batches and steps are formed, such as "
            f"sf.BatchSpec.simple(global_batch_size=64, micro_batch_size=4), got {type(batch).__name__}."
        )
    return batch


class Loader:
    """Iterable over this rank's micro-batches of an epoch, in the plan's order.

    Every rank yields exactly ``len(loader)`` micro-batches per epoch. If the world size does not divide
    ``micro_batches_per_step``, some of them are padding micro-batches of weight 0.

    ``iter()`` resumes at the position: the start of the first step that is not consumed yet. An iteration
    that was interrupted inside a step repeats that step, and after the end of an epoch ``iter()`` begins the
    next one. Only one iteration is alive at a time: a second ``iter()``, `load_state_dict` and a `set_epoch`
    that changes the epoch retire it, and its next step raises `StateError`.

    Threads start with the first micro-batch of an iteration and end with it; nothing runs before or in
    between, so the process may fork there. Loader processes start likewise; `close` ends them.

    Args:
        dataset: The dataset, or a blend of several, see `open_blend`.
        split: One of its splits, or several joined by ``+``. Left out for a blend.
        batch: How micro-batches and steps are formed.
        seed: Run-level seed.
        fields: What a batch holds, by name, such as ``{"image": sf.Image(size=(512, 512))}``. By default all
            pictures (``image``), the first volume (``slices``) and the report, each where there is any.
            ``{}``: rows, keys and weights alone, for which nothing is read.
        unit: What a sample is: a ``study``; a ``series`` or an ``image`` that ``where`` selects, of which
            fields of pixels deliver that one alone, beside the texts of its study; a ``window`` of the volume
            that the field with ``center="grid"`` cuts, in the order of volumes and windows, each once; or an
            ``entity``, a finding of the entity view. `BatchInfo.units` has the places of the samples.
        where: Expression that selects samples, such as ``"facts.modality == 'CT' and any(series.rows >=
            512)"``; of series and images ``"modality == 'CT'"``, where None selects all but localizers and
            secondary captures. What it leaves out because a value is missing is logged. See docs/fields.md.
        keys: File with the key of a sample, or ``sha256:`` and its SHA-256, a line: only these are samples.
        sampling: How often each sample is drawn, see `Sampling`; a blend's components have their own.
        transform: What is done to each sample: a callable that gets a dict of the field values and
            ``__key__``, ``__facts__`` and ``__rng__``, and whose result is used; its name
            ``"package.module:name"``; or a list of them. See docs/fields.md.
        outputs: What the transform returns, by name: ``(dtype, shape)``, ``{"dtype": ...,
            "max_shape": ...}``, ``str``, ``bytes`` or ``dict``. By default it is called once with a
            synthetic sample.
        collate: Gets the list of the transformed samples of a micro-batch, one per slot, and returns what the
            batch holds.
        accept_content_change: Whether a state of other fields, such as larger images, may be loaded.
        world: This rank: a `World`, ``"single"``, a torch ``DeviceMesh`` of one dimension, or
            ``(mesh, "dp")``. By default the rank of torch.distributed if it is initialized, else the one that
            torchrun's variables state, else a single process; resolved now, and logged.
        config: How to run; never changes what is in a micro-batch.
        lock: What `lock` returned in the run to resume: the version of the dataset that it lists is opened,
            even where a newer one exists, and everything else must be as it says.
        signed_by: File of public keys, as of `sf.open`: refuse a dataset that none of them signed. A blend
            is opened with it.
        spec: The former name of ``batch``, accepted for one release.

    Raises:
        TypeError: Neither ``batch`` nor ``spec`` is given, or both are.
        ConfigError: The dataset has no such split, a term cannot be read, no sample is left, the world is
            none, or the loaders of the node could take more memory than they may.
        StateError: The data is not what ``lock`` lists; the message names the first entry that differs.
        SignatureError: The dataset, or a table beside it, is not signed by one of ``signed_by``.
        PlanError: There are more ranks than micro-batches in a step, or no step can be formed; with a token
            budget the latter is raised by the first use of a plan.

    Example::

        loader = Loader(Dataset.open("data"), split="train", batch=spec, seed=7, world=world)
        for epoch in range(loader.epoch, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                train(batch["image"], batch.info.weight)
    """

    def __init__(
        self,
        dataset: Dataset | Selection,
        *,
        split: str = "",
        batch: BatchSpec | None = None,
        seed: int,
        fields: Mapping[str, Field] | None = None,
        unit: str = "study",
        where: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        sampling: Sampling | None = None,
        transform: Any = None,
        outputs: Mapping[str, Any] | OutputContract | None = None,
        collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | str | None = None,
        accept_content_change: bool = False,
        world: World | Literal["single"] | Any = None,
        config: LoaderConfig | None = None,
        lock: Mapping[str, Any] | None = None,
        signed_by: str | os.PathLike[str] | None = None,
        spec: BatchSpec | None = None,
    ) -> None:
        batch = _given_batch(batch, spec)
        if fields is not None:
            check_names(fields)
        if lock is not None:
            dataset = open_locked(dataset, lock)
        if signed_by is not None:
            dataset = signed(dataset, signed_by)
        seed = checked_int("seed", seed, low=0, high=MAX_COUNTER, where="Loader", error=ConfigError)
        self._resolved = resolve_world(world)
        if self._resolved.source:
            _LOGGER.info("%s", self._resolved)
        config = LoaderConfig() if config is None else config
        if not isinstance(config, LoaderConfig):
            raise ConfigError(
                f"config must be a LoaderConfig, such as sf.LoaderConfig(num_threads=2), got a "
                f"{type(config).__name__}."
            )
        selection = select_samples(dataset, split, unit=unit, where=where, keys=keys, fields=fields)
        check_windows(selection, batch, sampling)
        counters = StageCounters()
        selection, self._fields = bind_fields(selection, fields, counters)
        selection, charged = charge_for_delivered(selection, self._fields, batch)
        check_template_counts(selection, self._fields, batch)
        batch = batch_of_samples(charged, self._fields.num_crops)
        for line in self._fields.summary():
            _LOGGER.info("%s", line)
        for line in self._fields.warnings():
            _LOGGER.warning("%s", line)
        selection = sampled(selection, sampling)
        if any(one is not None for one in (transform, outputs, collate)):
            self._set_transform(selection, config, transform, outputs, collate)
        self._accept_content_change = accept_content_change
        check_node(config, selection.datasets, self.world)
        self._schedule = RankSchedule(
            batch.micro_batches_per_step,
            self.world.world_size,
            lanes=batch.lanes,
            ranks_per_node=self.world.ranks_per_node,
        )
        self._state = selection.state(batch, seed=seed)
        self._plans: list[EpochPlan] = []
        self._runtime = LoaderRuntime(
            selection, self._schedule, self.world, self._state, config, counters, self._fields
        )
        weakref.finalize(self, self._runtime.close)
        if batch.budget is None:
            self._plan_of(0)  # costs nothing, and raises at once if no step can be formed
        self._reached: Position | tuple[int, int] = self._state.position
        self._quarantine = Quarantine(self.config.max_bad_samples, self.config.max_bad_share)
        self._active: weakref.ref[EpochIterator] | None = None
        self._lock: dict[str, Any] | None = None
        if lock is not None:
            check_lock(lock, self.lock(), accepts_content=accept_content_change)
        if config.execution == "service":
            self._runtime.servers = self._runtime.open_servers()  # what no server can make is refused now

    def _set_transform(
        self, selection: Selection, config: LoaderConfig, transform: Any, outputs: Any, collate: Any
    ) -> None:
        bound = bind_transform(selection, self._fields, transform, collate, outputs)
        if not isinstance(outputs, OutputContract):  # otherwise this is a loader process, and it was checked
            bound.check_execution(config.execution)
        self._fields.transform = bound

    # ---- plan ------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The rank that the loader is for, and the number of ranks."""
        return self._resolved.world

    def check_world(self) -> None:
        """Refuse to go on as another rank; ``iter()`` calls it.

        Raises:
            ConfigError: The rank was resolved by default, and is another one by now.
        """
        self._resolved.check_unchanged()

    @property
    def dataset(self) -> Dataset:
        """The dataset; for a blend, the one of its first component."""
        return self._runtime.selection.datasets[0]

    @property
    def selection(self) -> Selection:
        """The samples to iterate over."""
        return self._runtime.selection

    @property
    def fields(self) -> Mapping[str, Field]:
        """What a batch holds, by name: the specs of the fields."""
        return self._fields.specs

    @property
    def config(self) -> LoaderConfig:
        """How the loader runs: as created, with later changes."""
        return self._runtime.config

    @property
    def plan_id(self) -> str:
        """Identity of the plan: equal for runs with the same steps, whatever their world size."""
        return self._state.plan_id

    @property
    def run_id(self) -> str:
        """Identity of the run: SHA-256 of plan_id, seed and content_id; the same on all ranks.

        A batch is named by it together with its epoch, step and micro-batch.
        """
        return run_id(self.plan_id, self._state.seed, self._fields.content_id)

    def lock(self) -> dict[str, Any]:
        """Return what the run reads, as a JSON object: versions of datasets, tables, and how it samples.

        Write it as ``loader.lock.json`` beside a checkpoint, and pass it as ``Loader(lock=)`` to resume. It
        is the same on all ranks, of any size, and names no path; the state holds its digest.
        """
        if self._lock is None:
            self._lock = make_lock(self.selection, self._state, self._fields)
        return copy.deepcopy(self._lock)

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        return self._plan_of(self.epoch)

    @property
    def num_steps(self) -> int:
        """Steps of the current epoch; with a token budget epochs may differ by a few."""
        return self.plan.num_steps

    def num_steps_in(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self._plan_of(epoch).num_steps

    def summary(self) -> PlanSummary:
        """Summarize the current epoch: its steps, and what its tail drops, repeats or pads."""
        return self.plan.summary(self._schedule)

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches of a step that this rank runs, including padding micro-batches."""
        return self._schedule.num_micro_batches_per_rank

    def __len__(self) -> int:
        """Micro-batches that this rank yields in the whole current epoch, whatever the position."""
        return self.num_steps * self.num_micro_batches_per_rank

    def num_micro_batches_in(self, epoch: int) -> int:
        """Return the number of micro-batches that this rank yields in a whole epoch."""
        return self.num_steps_in(epoch) * self.num_micro_batches_per_rank

    # ---- iteration -------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator:
        """Iterate from the position to the end of its epoch.

        Raises:
            ConfigError: The rank was resolved by default, and is another one by now.
        """
        self.check_world()
        self._retire()
        start = self.position.step * self.num_micro_batches_per_rank
        numbers = range(start, len(self))
        stream = self._open(self.epoch, numbers)
        self._runtime.close_retired()
        iterator = EpochIterator(stream, numbers, self._check_alive, self._count)
        self._active = weakref.ref(iterator)
        return iterator

    def stream(self, epoch: int, numbers: range, *, pool: Pool | None = None) -> ThreadStream:
        """Open a stream of some of the rank's micro-batches of any epoch, without moving the position.

        For adapters that distribute micro-batches among processes and count them on their own. Threads of
        this process make them, whatever the configured execution.

        Args:
            epoch: The epoch.
            numbers: Micro-batches to make, counted over the epoch's steps, 0 to ``len(loader) - 1``.
            pool: Where their memory comes from; the loader's own pool by default.
        """
        return self._own_runtime().stream(self._plan_of(epoch), numbers, self._quarantine, pool)

    def source(self, epoch: int, pool: Pool) -> BatchSource:
        """Return what makes the micro-batches of an epoch one by one, for a data server.

        Args:
            epoch: The epoch.
            pool: Where their memory comes from.
        """
        return self._own_runtime().source(self._plan_of(epoch), pool)

    def count(self, batch: Batch, number: int) -> None:
        """Count a micro-batch as consumed and record its masks.

        The loader's own iteration calls it; only a user of `stream` has to.

        Args:
            batch: The micro-batch.
            number: Its number among the rank's micro-batches of the epoch.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` or ``max_bad_share`` allow.
        """
        self._count(batch.epoch, batch.quarantined, number)

    def close(self) -> None:
        """End the current iteration and the loader processes, if any; the loader can be iterated again."""
        self._retire()
        self._runtime.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- tunables --------------------------------------------------------------------------------

    @property
    def tunables(self) -> Tunables:
        """Settings that may change while the loader runs, including those of its caches and stores."""
        return self._own_runtime()

    def apply_pending(self) -> bool:
        """Apply changes that wait for a boundary: ``loader.execution``, and the number of loader processes.

        Call it between two micro-batches, in the thread that iterates. The iteration continues with the next
        micro-batch that was not fetched. At most ``prefetch_bytes`` made ahead are dropped and made again,
        and a process takes a second or two to start. Without a current iteration the next ``iter()`` does the
        same.

        Returns:
            Whether anything changed.

        Raises:
            Exception: The processes could not start; iteration and settings stay as they were.
        """
        current, runtime = self._current(), self._runtime
        if current is None or runtime.pid != os.getpid() or not runtime.has_pending:
            return False
        processes = runtime.processes
        try:
            has_changed = current.hand_over(partial(self._open, self.epoch))
        except BaseException:
            runtime.take_back_pending(processes)
            raise
        runtime.close_retired()
        if has_changed and runtime.processes is not None:
            runtime.planner.rest()  # the loader processes report their own reads
        return has_changed

    def change(self, changes: Mapping[str, int | str]) -> None:
        """Change settings by name without checking their limits; prefer `tunables`."""
        self._own_runtime().change(changes)

    # ---- position --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return self.position.epoch

    @property
    def position(self) -> Position:
        """The first step that is not consumed yet."""
        reached = self._reached
        if isinstance(reached, Position):
            return reached
        epoch, num_consumed = reached
        return Position.after(
            epoch=epoch,
            num_consumed=num_consumed,
            num_micro_batches_per_rank=self.num_micro_batches_per_rank,
            num_steps=self.num_steps_in(epoch),
        )

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; does nothing if the position is in it already.

        Raises:
            StateError: ``epoch`` is not a number from 0.
        """
        if epoch != self.epoch:
            self._retire()
            self._reached = Position(epoch, 0)

    def state_dict(self) -> dict[str, object]:
        """Return the position and the run it belongs to: under 1 KB of JSON, equal on all ranks.

        After the last micro-batch of step k the position is k + 1; inside a step it is that step; after the
        last step of an epoch it is step 0 of the next one.
        """
        state = self._state.at(self.position).to_json()
        content_id = self._fields.content_id[:_DIGITS]
        return {**state, "content_id": content_id, "lock": lock_digest(self.lock())[:_DIGITS]}

    def load_state_dict(self, state: Mapping[str, object], *, lock: Mapping[str, Any] | None = None) -> None:
        """Move to a saved position; takes effect at the next ``iter()`` and retires the current iteration.

        The state may have been saved with another world size.

        Args:
            state: What `state_dict` returned.
            lock: What `lock` returned there; where something differs, the message names the first entry.

        Raises:
            StateError: The state is malformed or belongs to another seed, dataset, split or batch spec; the
                message names the field, and the position does not change.
        """
        state = dict(state)
        content_id, digest = state.pop("content_id", None), state.pop("lock", None)
        loaded = LoaderState.from_json(state)
        loaded.check_matches(self._state)
        loaded.check_within(self.num_steps_in(loaded.epoch))
        if lock is not None:
            check_lock(lock, self.lock(), accepts_content=self._accept_content_change)
        self._check_content(content_id)
        is_same = digest in (None, lock_digest(self.lock())[:_DIGITS])
        if not is_same and not self._accept_content_change:
            raise StateError(
                f"The state was saved by a run that read other tables (its lock differs); pass the "
                f"{LOCK_NAME} beside the checkpoint as lock=, and the first that differs is named."
            )
        self._retire()
        self._reached = loaded.position

    def meanings(self) -> dict[str, str]:
        """Return a digest of what each entry of a batch means, by its name: columns, classes and dtypes."""
        return field_meanings(self.selection, self._fields)

    def adopt_position(self, state: Mapping[str, object]) -> None:
        """Move to a saved position at the start of an epoch, though another version of the dataset was read.

        Args:
            state: What `state_dict` returned then.

        Raises:
            StateError: The state is malformed, is within an epoch, or belongs to another seed, split or batch
                spec; the message names the field, and the position does not change.
        """
        known = {name: value for name, value in state.items() if name not in ("content_id", "lock")}
        loaded = LoaderState.from_json(known)
        loaded.check_adopted_by(self._state)
        self._retire()
        self._reached = loaded.position

    def _check_content(self, content_id: object) -> None:
        """Refuse a state whose batches held something else."""
        # Only the first digits are stored; states from before that have all of them.
        if isinstance(content_id, str) and content_id[:_DIGITS] == self._fields.content_id[:_DIGITS]:
            return
        if not self._accept_content_change:
            raise StateError(
                "The state belongs to batches of other fields (content_id differs): their specs, a series "
                "table or a transform changed. Restore them, or pass accept_content_change=True to go on in "
                "the same order with the new ones."
            )
        _LOGGER.warning("resuming with other fields than those of the state (accept_content_change)")

    # ---- counters and masks ----------------------------------------------------------------------

    @property
    def counters(self) -> StageCounters:
        """Time, bytes and items per stage since the loader was created."""
        return self._runtime.counters

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the loader processes; empty if threads do the work."""
        return self._runtime.process_ids if self._runtime.pid == os.getpid() else []

    @property
    def num_buffers_allocated(self) -> int:
        """Batch buffers allocated so far; constant once iteration has reached its steady state."""
        return self._runtime.num_buffers_allocated

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """Slots masked because their sample is bad, in the order of the run, including loaded ones."""
        return self._quarantine.rows

    def masks(self) -> list[dict[str, int | str]]:
        """Return `quarantined` as JSON objects, for a checkpoint."""
        return [row.to_json() for row in self.quarantined]

    def load_masks(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mask the slots of a checkpoint again, without reading their samples.

        Pass the rows of all ranks: with another world size a slot may belong to this rank now. They do not
        count towards ``max_bad_samples``, but towards ``max_bad_share`` of their epoch.

        Raises:
            StateError: A row is malformed.
        """
        self._quarantine.load(rows)

    def describe_activity(self) -> str:
        """Describe which shard, tier and stage the current iteration is at; may be called from any thread."""
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
        if quarantined:
            num_slots = self._plan_of(epoch).num_samples * self._fields.num_crops
            num_samples = -(-num_slots // self.world.world_size)
            self._quarantine.record(quarantined, num_samples, self.world.world_size)
        # The position that follows is asked for once a step at most.
        self._reached = epoch, number + 1

    def _plan_of(self, epoch: int) -> EpochPlan:
        """Return the plan of an epoch.

        Plans are made on demand: with a token budget one takes a second for 200 million samples, so a run
        that resumes in epoch 7 must not plan epoch 0.
        """
        for plan in self._plans:
            if plan.epoch == epoch:
                return plan
        if self._plans:
            plan = self._plans[0].for_epoch(epoch)
        else:
            plan = self._runtime.selection.plan(self._state.spec, seed=self._state.seed, epoch=epoch)
        self._plans = [plan, *self._plans[: _NUM_PLANS - 1]]
        return plan

    def _own_runtime(self) -> LoaderRuntime:
        """Return the runtime of this process, since a forked child cannot use its parent's."""
        runtime = self._runtime
        if runtime.pid != os.getpid():
            selection, counters = runtime.selection.reopened(), StageCounters()
            self._fields = self._fields.reopened(selection, counters)
            self._runtime = LoaderRuntime(
                selection, self._schedule, self.world, self._state, runtime.config, counters, self._fields
            )
            weakref.finalize(self, self._runtime.close)
        return self._runtime

    def _open(self, epoch: int, numbers: range) -> BatchStream:
        """Open a stream with the settings as they are now."""
        runtime = self._own_runtime()
        if runtime.config.execution in ("process", "workers"):
            self._plan_of(epoch)
            return runtime.process_stream(epoch, numbers, self.masks())
        runtime.retire_processes()
        if runtime.config.execution == "service":
            return runtime.served_stream(self._plan_of(epoch), numbers, self._quarantine)
        return self.stream(epoch, numbers)

    def _current(self) -> EpochIterator | None:
        return self._active() if self._active is not None else None

    def _retire(self) -> None:
        current = self._current()
        self._active = None
        if current is not None:
            current.close()
