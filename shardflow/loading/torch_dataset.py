"""Adapter for torch's DataLoader: the same micro-batches in the same order, the same length, exact resume.

The DataLoader asks its workers in turn, so worker ``w`` of ``n`` makes every n-th micro-batch, and their
order is the plan's. A batch crosses the process boundary as one tensor in shared memory and a JSON text. Each
worker reads and decodes with threads of its own, which start in the worker.

Workers run ahead, so only the main process knows what was consumed. There a batch is counted at the moment
the DataLoader hands it out: the DataLoader calls ``reraise()`` of what a worker sent if that is an
``ExceptionWrapper``, and a `_HandedOut` batch is one. A batch that is looked at without having been counted
is refused, so that nothing is ever off by what workers hold.

The `Loader` is faster (no copies between processes); this is for pipelines that need the DataLoader.
"""

from __future__ import annotations

import json
import os
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final, Literal, NoReturn, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from shardflow.errors import StateError, WaitTimeoutError
from shardflow.fields.field import Field
from shardflow.fields.quarantine import QuarantineRow
from shardflow.format import Dataset
from shardflow.loading.batch import Batch, BatchStream
from shardflow.loading.config import LoaderConfig, World
from shardflow.loading.loader import Loader
from shardflow.loading.rows.selection import Selection
from shardflow.sampling import BatchSpec, Position, Sampling

_Token = tuple[int, int]
"""Identity of an iteration: the seed of the DataLoader's workers, and how many they began before it."""

# Places in the shared memory of a dataset: the position; how many loads by workers the main process knows of,
# and how many there were; the position that a worker loaded; then the starts of iterations, four places each.
_POSITION: Final = slice(0, 2)
_SEEN, _LOADS = 2, 3
_LOADED: Final = slice(4, 6)
_STARTS: Final = 6
_NUM_STARTS: Final = 16
_POLL_S: Final = 0.001

# The datasets of this process, by their identity: where batches from workers are counted.
_DATASETS: weakref.WeakValueDictionary[str, ShardIterableDataset] = weakref.WeakValueDictionary()


class ShardIterableDataset(IterableDataset[Batch]):
    """Iterable dataset of whole micro-batches; pass it to a ``DataLoader`` with ``batch_size=None``.

    An iteration of the DataLoader runs from the position to the end of its epoch, and the next one begins the
    next epoch. The position counts what the DataLoader has handed out, not what its workers have prepared:
    with any number of workers, however they start, whether they persist, and if the loop is left early.

    torchdata's ``StatefulDataLoader`` resumes at the very micro-batch.

    Args:
        dataset: The dataset, or a blend of several; workers open it anew.
        split: As in `Loader`, like the arguments below.
        batch: How micro-batches and steps are formed.
        seed: Run-level seed.
        fields: What a batch holds, by name.
        unit: What a sample is.
        where: Which samples.
        keys: File of the keys of the samples.
        sampling: How often each sample is drawn.
        transform: What is done to each sample.
        outputs: What the transform returns.
        collate: What is made of the samples of a micro-batch.
        accept_content_change: Whether a state of other fields may be loaded.
        world: This rank, as in `Loader`; workers get the one that is found here.
        config: How to run, per worker.

    Raises:
        ConfigError: The dataset has no such split.
        PlanError: No step can be formed, or there are more ranks than micro-batches in a step.

    Example::

        dataset = ShardIterableDataset(Dataset.open("data"), split="train", batch=spec, seed=7)
        loader = DataLoader(dataset, batch_size=None, num_workers=2)
        for epoch in range(dataset.epoch, 3):
            for batch in loader:
                train(batch.torch("cuda"))
                save(dataset.state_dict())
    """

    def __init__(
        self,
        dataset: Dataset | Selection,
        *,
        split: str = "",
        batch: BatchSpec,
        seed: int,
        fields: Mapping[str, Field] | None = None,
        unit: str = "study",
        where: str | None = None,
        keys: str | os.PathLike[str] | None = None,
        sampling: Sampling | None = None,
        transform: Any = None,
        outputs: Mapping[str, Any] | None = None,
        collate: Callable[[list[dict[str, Any]]], Mapping[str, Any]] | str | None = None,
        accept_content_change: bool = False,
        world: World | Literal["single"] | Any = None,
        config: LoaderConfig | None = None,
    ) -> None:
        super().__init__()
        self._arguments: dict[str, Any] = {
            "split": split,
            "batch": batch,
            "seed": seed,
            "fields": fields,
            "unit": unit,
            "where": where,
            "keys": keys,
            "sampling": sampling,
            "transform": transform,
            "outputs": outputs,
            "collate": collate,
            "accept_content_change": accept_content_change,
            "config": config or LoaderConfig(),
        }
        self._dataset = dataset
        # Counts, and records masks, in the main process; makes batches in a worker.
        self._loader = Loader(dataset, world=world, **self._arguments)
        self._arguments["world"] = self._loader.world  # workers are told, and resolve nothing
        # In shared memory, because persistent workers keep their first copy of self.
        shared = torch.zeros(_STARTS + 4 * _NUM_STARTS, dtype=torch.int64)
        shared.share_memory_()  # type: ignore[no-untyped-call]
        self._begin_in(shared, uuid.uuid4().hex)

    def _begin_in(self, shared: torch.Tensor, identity: str) -> None:
        self._shared, self._identity = shared, identity
        self._places = shared.numpy()
        self._pid, self._num_iterations = os.getpid(), 0
        self._seen = int(self._places[_LOADS])
        # The iteration whose batches are handed out now, the number of its next one, and the position there.
        self._running: tuple[_Token, int, Position] | None = None
        self._resumed: _Token | None = None
        _DATASETS[identity] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return what crosses to a worker: the arguments, the position and the masks."""
        return {
            "arguments": self._arguments,
            "dataset": self._dataset,
            "state": self._loader.state_dict(),
            "masks": self._loader.masks(),
            "shared": self._shared,
            "identity": self._identity,
            "seen": self._seen,
            "pid": os.getpid(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._arguments, self._dataset = state["arguments"], state["dataset"]
        self._loader = Loader(self._dataset, **self._arguments)
        self._loader.load_state_dict(state["state"])
        self._loader.load_masks(state["masks"])
        is_worker = get_worker_info() is not None or state["pid"] != os.getpid()
        shared, identity = state["shared"], state["identity"]
        if not is_worker:  # a copy within one process counts for itself
            shared = shared.clone().share_memory_()
            identity = uuid.uuid4().hex
        self._begin_in(shared, identity)
        self._pid = -1  # no iteration has begun here
        self._seen = state["seen"]

    def __len__(self) -> int:
        """Micro-batches that this rank yields in the whole current epoch."""
        return len(self._loader)

    @property
    def num_steps(self) -> int:
        """Steps of the current epoch."""
        return self._loader.num_steps

    @property
    def plan_id(self) -> str:
        """Identity of the plan, as in `Loader`."""
        return self._loader.plan_id

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches of this worker; called by the DataLoader in each of its workers."""
        if self._pid != os.getpid():
            self._pid, self._num_iterations = os.getpid(), 0
        number, self._num_iterations = self._num_iterations, self._num_iterations + 1
        worker = get_worker_info()
        if worker is None:
            self._loader.check_world()
            return _Iteration(self, self._loader.position, (0, number))
        token = (int(worker.seed) - int(worker.id), number)
        if number == 0:
            # The workers of a DataLoader start at one moment, with what the main process held then.
            has_loaded = int(self._places[_LOADS]) != self._seen
            begin = self._position_at(_LOADED) if has_loaded else self._loader.position
        else:
            begin = self._agreed_begin(token, worker.id)
        self._loader.load_state_dict(
            {**self._loader.state_dict(), "epoch": begin.epoch, "step": begin.step}
        )  # so that a state of this worker is one of this iteration
        return _Iteration(self, begin, token, worker.id, worker.num_workers)

    def _agreed_begin(self, token: _Token, number: int) -> Position:
        """Return where workers begin another iteration: where the main process is as the first one begins.

        No batch of the iteration can have been handed out by then, and the others take its answer: they may
        begin after some have been.
        """
        place = _STARTS + 4 * (token[0] % _NUM_STARTS)
        answer = slice(place + 1, place + 3)
        key = hash(token) & 0x7FFFFFFFFFFFFFFF
        if number == 0:
            has_loaded = self._places[_LOADS] != self._places[_SEEN]
            self._places[place] = 0
            self._places[answer] = self._places[_LOADED if has_loaded else _POSITION]
            self._places[place + 3] = key
            self._places[place] = key
            return self._position_at(answer)
        deadline = time.monotonic() + self._loader.config.wait_timeout_s
        while not self._places[place] == self._places[place + 3] == key:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    "worker 0 of the DataLoader must begin an iteration with the others, got nothing; look "
                    "at its processes, or raise wait_timeout_s."
                )
            time.sleep(_POLL_S)
        return self._position_at(answer)

    def _position_at(self, place: slice) -> Position:
        epoch, step = self._places[place].tolist()
        return Position(epoch, step)

    # ---- counting, in the main process -----------------------------------------------------------

    def _count(self, batch: Batch, token: _Token, *, is_resumed: bool) -> None:
        """Count a micro-batch that is handed out now.

        Raises:
            SampleError: There are more bad samples than the bounds of the configuration allow.
            StateError: It is not the next one.
        """
        loader = self._loader
        per_rank = loader.num_micro_batches_per_rank
        found = batch.epoch, batch.step * per_rank + batch.slot
        if is_resumed and token != self._resumed and (self._running is None or self._running[0] != token):
            self._resumed = token  # a StatefulDataLoader may begin anywhere; its workers checked its state
        elif not self._is_next(found, token):
            epoch, step = loader.position.epoch, loader.position.step
            raise StateError(
                f"micro-batch {found[1]} of epoch {found[0]} was handed out, but the position is step {step} "
                f"of epoch {epoch}, which begins with micro-batch {step * per_rank}: set_epoch(), "
                "load_state_dict() or another iteration came in between, or the DataLoader changes the "
                "order. Begin a new iteration, leave in_order=True, and use no sampler."
            )
        loader.count(batch, found[1])
        self._running = token, found[1] + 1, loader.position
        self._moved()

    def _is_next(self, found: tuple[int, int], token: _Token) -> bool:
        """Return whether a micro-batch goes on with the iteration, or begins one at the position."""
        per_rank, position = self._loader.num_micro_batches_per_rank, self._loader.position
        if self._running is not None and self._running[0] == token:
            _, number, after = self._running
            if found[1] == number and position == after and found[0] in (position.epoch, position.epoch - 1):
                return True
        begins = [position]
        if self._places[_LOADS] != self._seen:
            begins.append(self._position_at(_LOADED))
        return found in [(begin.epoch, begin.step * per_rank) for begin in begins]

    def _moved(self) -> None:
        """Tell persistent workers the position."""
        position = self._loader.position
        self._places[_POSITION] = position.epoch, position.step
        self._places[_SEEN] = self._seen = int(self._places[_LOADS])

    def track(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate ``batches``: the former way to count, which a plain loop does now."""
        warnings.warn(
            "ShardIterableDataset counts in a plain loop; write `for batch in loader` without track().",
            DeprecationWarning,
            stacklevel=2,
        )
        return iter(batches)

    # ---- state, as in Loader ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the position."""
        return self._loader.epoch

    @property
    def position(self) -> Position:
        """The first step that is not consumed yet."""
        return self._loader.position

    def set_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch; does nothing if the position is in it already."""
        if epoch != self.epoch:
            self._loader.set_epoch(epoch)
            self._running = None
            self._moved()

    def state_dict(self) -> dict[str, object]:
        """Return the position after what the DataLoader has handed out, see `Loader.state_dict`."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Move to a saved position, also one of a `Loader`; takes effect at the next iteration.

        Raises:
            StateError: See `Loader.load_state_dict`.
        """
        self._loader.load_state_dict(state)
        self._running = None
        if get_worker_info() is None:
            self._moved()
        else:
            # A StatefulDataLoader restores its workers; the main process and the next ones follow.
            position = self._loader.position
            self._seen = int(self._places[_LOADS]) + 1
            self._places[_LOADED] = position.epoch, position.step
            self._places[_LOADS] = self._seen

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """Masked slots among what the DataLoader has handed out."""
        return self._loader.quarantined

    def masks(self) -> list[dict[str, int | str]]:
        """Return `quarantined` as JSON objects, for a checkpoint."""
        return self._loader.masks()

    def load_masks(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Mask the slots of a checkpoint again; before the DataLoader starts its workers."""
        self._loader.load_masks(rows)


class _Iteration(Iterator[Batch]):
    """Every n-th micro-batch of the rest of an epoch; a StatefulDataLoader saves and restores where it is."""

    def __init__(
        self,
        owner: ShardIterableDataset,
        begin: Position,
        token: _Token,
        worker: int = 0,
        num_workers: int = 0,
    ) -> None:
        self._owner, self._token, self._num_workers = owner, token, num_workers
        self._epoch = begin.epoch
        self._number = begin.step * owner._loader.num_micro_batches_per_rank + worker
        self._stream: BatchStream | None = None
        self._is_resumed = False

    def __next__(self) -> Batch:
        loader = self._owner._loader
        stride, last = max(1, self._num_workers), loader.num_micro_batches_in(self._epoch)
        if self._number >= last:
            if self._num_workers and loader.epoch == self._epoch:
                loader.set_epoch(
                    self._epoch + 1
                )  # this worker's part is done: what its state says from now on
            raise StopIteration
        if self._stream is None:
            self._stream = loader.stream(self._epoch, range(self._number, last, stride))
        batch = next(self._stream)
        self._number += stride
        if self._num_workers:
            return cast("Batch", _Parcel(batch, self._owner._identity, self._token, self._is_resumed))
        self._owner._count(batch, self._token, is_resumed=self._is_resumed)
        return _WholeBatch.of(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the next micro-batch, and among how many workers they are divided."""
        return {"epoch": self._epoch, "micro_batch": self._number, "num_workers": self._num_workers}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to where `state_dict` was called.

        Raises:
            StateError: The micro-batches were divided among another number of workers.
        """
        if state["num_workers"] != self._num_workers:
            raise StateError(
                f"The state of the StatefulDataLoader is one of {state['num_workers']} workers, and there "
                f"are {self._num_workers}; restore the number, or load the state of the dataset itself."
            )
        self._epoch, self._number = state["epoch"], state["micro_batch"]
        self._stream, self._is_resumed = None, True
        if self._num_workers and self._number >= self._owner._loader.num_micro_batches_in(self._epoch):
            # Where all workers are done nothing is handed out, and the next epoch follows.
            ended = {"epoch": self._epoch + 1, "step": 0}
            self._owner.load_state_dict({**self._owner.state_dict(), **ended})


class _WholeBatch(Batch):
    """Batch that a DataLoader without workers leaves as it is.

    Its default conversion would turn a mapping into a new one; of a mutable mapping it converts and updates a
    copy, which here is the batch itself, unchanged.
    """

    __slots__ = ()

    @classmethod
    def of(cls, batch: Batch) -> _WholeBatch:
        """Return the same micro-batch."""
        whole = cls.__new__(cls)
        for name in Batch.__slots__:
            setattr(whole, name, getattr(batch, name))
        return whole

    def __copy__(self) -> _WholeBatch:
        return self

    def update(self, converted: Mapping[str, Any]) -> None:
        """Keep the arrays."""


MutableMapping.register(_WholeBatch)


class _Parcel:
    """Batch on its way to the main process, where it is unpickled as a `_HandedOut` batch.

    The DataLoader's queue passes a tensor as shared memory, and copies everything else.
    """

    __slots__ = ("_content",)

    def __init__(self, batch: Batch, identity: str, token: _Token, is_resumed: bool) -> None:
        self._content = batch, identity, token, is_resumed

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        batch, identity, token, is_resumed = self._content
        buffer, descriptor = torch.from_numpy(batch.buffer), json.dumps(batch.descriptor)
        return _HandedOut, (buffer, descriptor, identity, token, is_resumed)

    def __getattr__(self, name: object = "") -> NoReturn:
        raise StateError(
            "In a worker a batch only passes through: what collate_fn or a dataset around this one made of "
            "it could not be counted where it is handed out. Leave out collate_fn, and convert in the loop."
        )

    __getitem__ = __iter__ = __getattr__


class _HandedOut(Batch, ExceptionWrapper):
    """Batch of a worker, which counts itself as the DataLoader hands it out, and holds nothing before."""

    def __init__(
        self, buffer: torch.Tensor, descriptor: str, identity: str, token: _Token, is_resumed: bool
    ) -> None:
        self._parcel = buffer, descriptor, identity, token, is_resumed

    def reraise(self) -> None:
        """Count the batch; called by the DataLoader for what may be an error of a worker."""
        buffer, descriptor, identity, token, is_resumed = self._parcel
        Batch.__init__(self, buffer.numpy(), json.loads(descriptor))
        del self._parcel
        owner = _DATASETS.get(identity)
        if owner is None:
            raise StateError("A batch came from the workers of a dataset that this process no longer has.")
        owner._count(self, token, is_resumed=is_resumed)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or "_parcel" not in vars(self):
            raise AttributeError(name)
        raise StateError(
            "This batch was not handed out by the DataLoader itself, so it could not be counted; leave out "
            "collate_fn, and iterate the DataLoader directly."
        )


def _refuse_to_collate(_batch: Any, **_: Any) -> NoReturn:
    raise StateError(
        "A ShardIterableDataset yields whole micro-batches; write DataLoader(dataset, batch_size=None), and "
        "give their size in the BatchSpec."
    )


for _kind in (_WholeBatch, _Parcel):
    default_collate_fn_map[_kind] = _refuse_to_collate
