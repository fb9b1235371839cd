"""What makes a run slow, in the real places: byte store, decoder, transform, step, exchange of gradients.

One `Slowness` at a time: a run is one process' whole business while it lasts. What is slow takes so many
times as long as computing: times are those beside a step that computes for as long as it should, and grow
with what it really takes, so that a busy machine makes a run longer and not lighter.
"""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

import torch

from shardflow.fields.types import pixels
from shardflow.format import Dataset
from shardflow.storage import ByteRange, ByteStore
from shardflow.training import run as prepare
from shardflow.training import run as run_module
from shardflow.training.loop import RunParts

__all__ = ["TRANSFORM", "Slowness", "slowed", "transform"]

TRANSFORM: Final = "benchmarks.verdict.slowness:transform"
_PIECE: Final = bytes(1 << 16)
_COMPUTING: Final = ("forward", "backward", "optimizer", "agree")
_UNSTEADY: Final = 4
"""Micro-batches before computing takes what it takes."""
_MOST_PACE: Final = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowness:
    """What each piece of work takes more, in seconds; nothing by default."""

    read_s: float = 0.0
    """Each ranged read of a shard."""
    link_bytes_per_s: float = 0.0
    """Of all ranged reads together; 0 is no bound."""
    slice_s: float = 0.0
    """Decoding of each slice."""
    slice_works: bool = False
    """It takes a processor for that, without the interpreter; else it waits, as for a device that decodes."""
    sample_s: float = 0.0
    """The user's transform of a sample."""
    every: int = 1
    """Samples of which one is transformed so long, the others not at all."""
    compute_s: float = 0.0
    """Forward of a micro-batch."""
    compute_works: bool = False
    """It multiplies matrices for that; else it waits, as for a device that computes."""
    python_s: float = 0.0
    """Forward of a micro-batch, in pure Python: processor time."""
    late_s: float = 0.0
    """Forward of a micro-batch besides, on a rank that is slow."""
    exchange_s: float = 0.0
    """Each exchange of gradients, on all ranks."""
    num_burners: int = 0
    """Processes beside the run that use a processor each."""


class _Present:
    """What a transform, which is found by its name, does now."""

    slowness = Slowness()
    turns: Iterator[int] = itertools.count()
    pace = 1.0
    """How many times as long computing takes as it should."""


def transform(sample: dict[str, Any]) -> dict[str, Any]:
    """Take the time that the present run's transform takes; the sample stays as it is."""
    if next(_Present.turns) % _Present.slowness.every == 0:
        time.sleep(_Present.slowness.sample_s * _Present.pace)
    return sample


@contextmanager
def slowed(slowness: Slowness) -> Iterator[None]:
    """Make what runs in this process slow while the block lasts."""
    _Present.slowness, _Present.turns, _Present.pace = slowness, itertools.count(1), 1.0
    with ExitStack() as stack:
        if slowness.read_s or slowness.link_bytes_per_s:
            stack.enter_context(_patched(prepare, "open_data", _with_slow_store(slowness)))
        if slowness.slice_s:
            stack.enter_context(_patched(pixels, "decode_slice", _with_slow_codec(slowness)))
        stack.enter_context(_patched(run_module, "prepare_run", _with_slow_step(slowness)))
        for _ in range(slowness.num_burners):
            stack.enter_context(_burner())
        yield


def _patched(module: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """Put something around a function, which is still called."""
    return mock.patch.object(module, name, change(getattr(module, name)))


# ---- the store -----------------------------------------------------------------------------------


class _SlowStore:
    """A store behind a link that takes its time for each read and each byte."""

    def __init__(self, store: ByteStore, slowness: Slowness) -> None:
        self._store = store
        self._slowness = slowness
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        return self._store.url

    def size(self, path: str) -> int:
        return self._store.size(path)

    def read(self, path: str) -> bytes:
        return self._store.read(path)

    def read_ranges(self, path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        wait_s = self._slowness.read_s * _Present.pace
        if rate := self._slowness.link_bytes_per_s:
            with self._lock:
                now = time.monotonic()
                self._free_at = (
                    max(self._free_at, now) + _Present.pace * sum(one.nbytes for one in buffers) / rate
                )
                wait_s += self._free_at - now
        time.sleep(wait_s)
        self._store.read_ranges(path, ranges, buffers)

    def map(self, path: str) -> memoryview:
        return self._store.map(path)

    def put_new(self, path: str, data: bytes) -> None:
        self._store.put_new(path, data)

    def put_stream(self, path: str, chunks: Iterable[bytes | memoryview], num_bytes: int) -> None:
        self._store.put_stream(path, chunks, num_bytes)

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)


def _with_slow_store(slowness: Slowness) -> Callable[[Any], Any]:
    def change(open_data: Any) -> Any:
        def opened(*arguments: Any, **named: Any) -> Any:
            data = open_data(*arguments, **named)
            datasets = tuple(
                Dataset(_SlowStore(one.store, slowness), one.manifest) for one in data.training.datasets
            )
            return replace(data, training=replace(data.training, datasets=datasets))

        return opened

    return change


# ---- the loader's threads ------------------------------------------------------------------------


def _with_slow_codec(slowness: Slowness) -> Callable[[Any], Any]:
    def change(decode_slice: Any) -> Any:
        def decoded(*arguments: Any, **named: Any) -> Any:
            if slowness.slice_works:
                _work(slowness.slice_s)
            else:
                time.sleep(slowness.slice_s * _Present.pace)
            return decode_slice(*arguments, **named)

        return decoded

    return change


def _work(seconds: float) -> None:
    """Use a processor for so long, without the interpreter: digests of more than 2 KiB let go of it."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        hashlib.sha256(_PIECE)


# ---- the step ------------------------------------------------------------------------------------


def _with_slow_step(slowness: Slowness) -> Callable[[Any], Any]:
    def change(prepare_run: Any) -> Any:
        def prepared(*arguments: Any, **named: Any) -> RunParts:
            parts: RunParts = prepare_run(*arguments, **named)
            pace = _Pace(parts, slowness.compute_s)
            parts.model.register_forward_pre_hook(lambda *_: _compute(slowness, pace))
            if slowness.exchange_s:
                wrapped: Any = parts.wrapped
                wrapped.register_comm_hook(_Exchange(parts.ranks.group, slowness.exchange_s), _exchanged)
            return parts

        return prepared

    return change


class _Pace:
    """Learns how long computing a micro-batch takes, all that is not added by us besides."""

    def __init__(self, parts: RunParts, wanted_s: float) -> None:
        self._counters = parts.loader.counters
        self._wanted_s = wanted_s
        self._num_computed = 0
        self._added_s = 0.0
        self._began_s = 0.0

    def next(self, added_s: float) -> None:
        """A micro-batch is about to be computed, with so much added."""
        passed_s = sum(self._counters.totals(name).seconds for name in _COMPUTING)
        if self._num_computed == _UNSTEADY:
            self._began_s, self._added_s = passed_s, 0.0
        elif self._num_computed > _UNSTEADY:
            mean_s = (passed_s - self._began_s - self._added_s) / (self._num_computed - _UNSTEADY)
            _Present.pace = min(_MOST_PACE, max(1.0, mean_s / self._wanted_s))
        self._num_computed += 1
        self._added_s += added_s


def _compute(slowness: Slowness, pace: _Pace) -> None:
    began = time.perf_counter()
    if slowness.python_s:
        end_s = time.thread_time() + slowness.python_s
        while time.thread_time() < end_s:
            pass
    time.sleep(slowness.late_s * _Present.pace)
    pace.next(time.perf_counter() - began)
    if not slowness.compute_works:
        time.sleep(slowness.compute_s)
        return
    matrix = torch.ones(384, 384)
    end_s = time.thread_time() + slowness.compute_s
    while time.thread_time() < end_s:
        torch.mm(matrix, matrix)


class _Exchange:
    """Of one run: its group, and the delay of what is exchanged once a step."""

    def __init__(self, group: Any, delay_s: float) -> None:
        self.group = group
        self.delay_s = delay_s


def _exchanged(state: _Exchange, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, as without a hook; the last one of a step arrives late."""
    buffer = bucket.buffer().div_(torch.distributed.get_world_size(state.group))
    work = torch.distributed.all_reduce(buffer, group=state.group, async_op=True)

    def arrived(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if bucket.is_last():
            time.sleep(state.delay_s * _Present.pace)
        return future.value()[0]

    found: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
    return found


# Here they are texts, which torch takes for wrong types.
_exchanged.__annotations__.clear()


# ---- beside the run ------------------------------------------------------------------------------


@contextmanager
def _burner() -> Iterator[None]:
    """Use a processor in another process, at most for some minutes should this one die."""
    code = (
        "import os, time\nend = time.monotonic() + 120\nparent = os.getppid()\n"
        "while time.monotonic() < end and os.getppid() == parent:\n    sum(range(100000))"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    try:
        yield
    finally:
        process.kill()
        process.wait()
