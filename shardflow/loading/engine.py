"""Ordered, byte-bounded work on a thread pool, and the recycled buffers that its results are made in.

The engine runs *tasks* (here: one micro-batch each) that consist of independent parts (here: some samples
each). All threads work on the parts of the oldest open task first, so that the first result is ready soon;
results are returned strictly in order. A task is opened only if its bytes fit beside those of the tasks that
are already open; a task that exceeds the bound runs alone.

Invariants: threads start with the first `take` and none outlives `close`; an error in a thread is raised by
the `take` that would have returned its result; every wait of the consumer has a deadline. The number of
threads and the bound may change at any time: a surplus thread finishes its part first, and no open task is
dropped.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ShardflowError, WaitTimeoutError
from shardflow.fields.decode import ThreadState
from shardflow.processes import wait_for_at_exit
from shardflow.telemetry import StageCounters

_MIN_BYTES = 1 << 16
_STEPS_PER_DOUBLING = 8
# NumPy asks for huge pages from this size on as well.
_MIN_HUGE_BYTES = 4 << 20
# What decoders allocate for one picture is smaller; glibc then keeps up to twice as much a thread.
_FREED_BYTES = 16 << 20
_logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)
_JOIN_TIMEOUT_S = 5.0
_FINISH_ONLY = -1
_STARVED_S = 1e-3
"""A longer wait means that no result was ready; a shorter one is the cost of the call."""
_NAP_S = 0.9 * _STARVED_S
"""How long a consumer waits before it asks to be woken. To wake it for each small result, such as stored
tokens, costs the thread that makes them a good part of its time; what is ready then is taken in one go. It is
woken at once where no thread can go on before it takes a result."""
_SOON_S = 4 * _STARVED_S
"""It waits so if its last wait was shorter; a result that takes longer is worth a wake-up."""
# Windows knows anonymous memory alone, by its number of -1.
_PRIVATE: Final[dict[str, int]] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)


class Pool(Protocol):
    """Source of the memory of batches."""

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes."""

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a writable buffer, ``(num_bytes,)`` uint8; it returns to the pool with its last view."""

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory may be idle; the rest returns to the system."""


class Memory(mmap.mmap):
    """Memory of a buffer."""

    address = 0
    """Where it begins; kept, because asking NumPy takes longer than lending a buffer."""


class BufferPool:
    """Pool of batch buffers, returned when the last view of one is garbage-collected.

    Sizes are rounded up by at most an eighth, so that batches whose texts differ a little share buffers.

    Args:
        max_free_bytes: How much memory may be idle in the pool, plus two buffers, which are those that a
            consumer held; beyond that, the least recently requested sizes return to the system.
    """

    # Of the class, because at the end of the interpreter a lease may be freed after the module's names.
    _num_spare: Final = 2

    def __init__(self, max_free_bytes: int) -> None:
        self._max_free_bytes = max_free_bytes
        self._lock = threading.Lock()
        self._free: dict[int, list[Memory]] = {}  # in the order of last use
        self._free_bytes = 0
        # A lease may be freed anywhere, even while this thread is inside the pool, so it only appends here,
        # which needs no lock.
        self._returned: deque[Memory] = deque()
        self._num_allocated = 0

    @property
    def num_allocated(self) -> int:
        """Buffers allocated so far; constant once iteration has reached its steady state."""
        return self._num_allocated

    @property
    def free_bytes(self) -> int:
        """Memory that is idle in the pool."""
        self._settle()
        return self._free_bytes

    @staticmethod
    def size_of(num_bytes: int) -> int:
        """Return how much memory a buffer of ``num_bytes`` takes: at most an eighth more, at least 64 KiB."""
        size = max(num_bytes, _MIN_BYTES)
        step = max((1 << (size - 1).bit_length()) // (2 * _STEPS_PER_DOUBLING), mmap.PAGESIZE)
        return -(-size // step) * step

    def lend(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return a writable buffer of undefined content.

        Args:
            num_bytes: Size; may be zero.

        Returns:
            ``(num_bytes,)`` uint8, page-aligned. The memory returns to the pool when its last view is freed.
        """
        memory = self._take(self.size_of(num_bytes))
        lease = Lease(memory.address, len(memory), partial(self.take_back, memory))
        return np.asarray(lease)[:num_bytes]

    def _take(self, size: int) -> Memory:
        with self._lock:
            self._drain()
            memory = self._pop(size)
            self._num_allocated += memory is None
        self._settle()  # buffers returned while the lock was held
        return self._allocate(size) if memory is None else memory

    def _allocate(self, size: int) -> Memory:
        memory = Memory(-1, size, **_PRIVATE)
        if size >= _MIN_HUGE_BYTES:
            _ask_for_huge_pages(memory)
        memory.address = np.frombuffer(memory, np.uint8).ctypes.data
        return memory

    def bound(self, max_free_bytes: int) -> None:
        """Change how much memory may be idle; the rest returns to the system."""
        with self._lock:
            self._max_free_bytes = max_free_bytes
            self._drain()
            self._trim(0)
        self._settle()

    def take_back(self, memory: Memory) -> None:
        """Take memory back from a freed lease; safe in any thread and inside a garbage collection."""
        self._returned.append(memory)
        self._settle()

    def _settle(self) -> None:
        """Move returned memory to the free lists, unless another call is doing so."""
        while self._returned:
            if not self._lock.acquire(blocking=False):
                return  # the holder, possibly this thread in an outer call, checks again when it is done
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._returned:
            self._keep(self._returned.popleft())

    def _keep(self, memory: Memory) -> None:
        size = len(memory)
        self._free[size] = [*self._free.pop(size, ()), memory]
        self._free_bytes += size
        self._trim(self._num_spare * size)

    def _trim(self, spare_bytes: int) -> None:
        while self._free_bytes > self._max_free_bytes + spare_bytes:
            oldest = next(iter(self._free))
            self._free_bytes -= len(self._free[oldest].pop())
            if not self._free[oldest]:
                del self._free[oldest]

    def _pop(self, size: int) -> Memory | None:
        """Take a free buffer of a size, which becomes the most recently requested one."""
        stack = self._free.pop(size, None)
        if stack is None:
            return None
        memory = stack.pop()
        self._free_bytes -= size
        if stack:
            self._free[size] = stack
        return memory


def _keep_freed_memory() -> None:
    """Let the allocator keep what decoders free for their next image.

    Without it a picture of 1024 x 1024 is freed to the system at once, and the next one pays for 256 page
    faults. glibc keeps blocks up to the largest one that was ever freed (mallopt(3), dynamic mmap threshold),
    so one is freed here that nobody has touched. With other allocators nothing changes.
    """
    np.empty(_FREED_BYTES, np.uint8)


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Request pages of 2 MiB: the first touch of 21 MB takes 3 ms instead of 17, and decoding is faster."""
    # Systems without huge pages continue with small ones.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)


class Lease:
    """Owner of a lent buffer, kept alive by the arrays on it.

    Args:
        address: Of the buffer.
        size: Of the buffer in bytes.
        give_back: Keeps the memory alive until it is called, when the last array on the buffer is freed,
            possibly in any thread and inside a garbage collection.
    """

    __slots__ = ("_address", "_give_back", "_size")

    def __init__(self, address: int, size: int, give_back: Callable[[], None]) -> None:
        self._address = address
        self._size = size
        self._give_back = give_back

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": (self._address, False)}

    def __del__(self) -> None:
        self._give_back()


class Task(Protocol[_Result_co]):
    """Piece of ordered work."""

    @property
    def num_bytes(self) -> int:
        """Memory that the task holds from `begin` until its result is taken."""

    @property
    def num_parts(self) -> int:
        """Number of parts; may be zero."""

    def begin(self) -> None:
        """Allocate memory; called once, before any part."""

    def run(self, part: int, thread: ThreadState) -> None:
        """Do one part; parts run in any order and at the same time."""

    def finish(self) -> _Result_co:
        """Return the result after all parts are done."""

    def describe(self) -> str:
        """Name the task for a message."""


class _Open(Generic[_Result]):
    """Open task, and its unfinished parts."""

    __slots__ = ("error", "is_done", "num_bytes", "num_left", "result", "task")

    def __init__(self, task: Task[_Result] | None, error: BaseException | None = None) -> None:
        self.task = task
        self.num_bytes = 0 if task is None else task.num_bytes
        self.num_left = 0 if task is None else task.num_parts
        self.result: _Result | None = None
        self.error = error
        self.is_done = False


class OrderedEngine(Generic[_Result]):
    """Thread pool that runs tasks ``0 .. num_tasks - 1`` and returns their results in order.

    Args:
        open_task: Creates a task from its number; called by one thread at a time, in order.
        num_tasks: Number of tasks.
        num_threads: At least 1.
        max_bytes: Bound on the bytes of tasks that are open, or done and not taken.
        wait_timeout_s: Deadline of one `take`.
        counters: Gets the stages ``wait`` (the consumer waited), ``starved`` (it waited because nothing was
            ready), ``idle`` (a thread had nothing to do) and ``collate`` (tasks began and finished), the
            gauges ``ready_batches`` and ``buffered_bytes``, observed at each take, and ``threads_busy``, a
            mean over time.
    """

    def __init__(
        self,
        open_task: Callable[[int], Task[_Result]],
        num_tasks: int,
        *,
        num_threads: int,
        max_bytes: int,
        wait_timeout_s: float,
        counters: StageCounters,
    ) -> None:
        self._open_task = open_task
        self._num_tasks = num_tasks
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._wait_timeout_s = wait_timeout_s
        self._counters = counters
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._threads: dict[threading.Thread, ThreadState] = {}
        self._leaving: dict[threading.Thread, ThreadState] = {}
        self._num_started = 0
        self._window: deque[_Open[_Result]] = deque()
        self._parts: deque[tuple[_Open[_Result], int]] = deque()
        self._held: _Open[_Result] | None = None
        self._num_opened = 0
        self._num_taken = 0
        self._num_ready = 0
        self._is_opening = False
        self._is_closed = False
        self._num_awaiting = 0
        self._is_soon = False
        self._buffered_bytes = 0
        self._num_busy = 0
        self._busy_since = 0.0

    # ---- for the consumer ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, if they have not been started and the engine is not closed."""
        with self._lock:
            if not self._num_started and not self._is_closed:
                self._start_threads()

    def take(self) -> _Result | None:
        """Wait for the next result and return it.

        Returns:
            The result; None if all were taken or the engine is closed.

        Raises:
            WaitTimeoutError: The result was not ready in time; the message names what the threads are doing.
            ShardflowError: The engine was created in another process.
            Exception: Whatever a thread raised while it made this result, with its traceback.
        """
        if self._pid != os.getpid():
            raise ShardflowError(
                "an iteration must go on in the process that began it, got a forked child; "
                "call iter() on the loader in the child."
            )
        start = time.monotonic()
        with self._lock:
            if self._is_closed or self._num_taken == self._num_tasks:
                return None
            self.start()
            self._counters.observe("ready_batches", self._num_ready)
            self._counters.observe("buffered_bytes", self._buffered_bytes)
            self._note_busy(0)
            was_ready = self._is_next_done()
            if self._is_soon and not was_ready:
                self._done.wait(min(_NAP_S, self._wait_timeout_s))
            if not self._wait_for_next(start + self._wait_timeout_s):
                return None
            entry = self._window.popleft()
            self._num_taken += 1
            self._num_ready -= 1
            self._buffered_bytes -= entry.num_bytes
            self._work.notify()  # one thread, because one at a time opens a task
        waited_s = time.monotonic() - start
        self._counters.add("wait", waited_s, entry.num_bytes, 1)
        if not was_ready:
            self._is_soon = waited_s < _SOON_S
            if waited_s > _STARVED_S:
                self._counters.add("starved", waited_s, 0, 1)
        if entry.error is not None:
            raise entry.error
        return entry.result

    def _wait_for_next(self, deadline: float) -> bool:
        """Wait until the next result is ready; returns False if another thread closes the engine."""
        self._num_awaiting += 1
        try:
            while not self._is_next_done():
                if self._is_closed:
                    return False
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise WaitTimeoutError(self.describe_wait(self._wait_timeout_s))
                self._done.wait(left_s)
            return True
        finally:
            self._num_awaiting -= 1

    def _is_next_done(self) -> bool:
        return bool(self._window) and self._window[0].is_done

    def close(self) -> None:
        """End the threads and drop all results that were not taken; may be called twice, and from any thread.

        A thread that is stuck in a read cannot be ended; it is named in a log line and ends with its read.
        """
        if self._pid != os.getpid():
            return  # a forked child has none of the threads, one of which may have held the lock
        with self._lock:
            self._is_closed = True
            self._window.clear()
            self._parts.clear()
            self._held = None
            self._work.notify_all()
            self._done.notify_all()
            ours = {**self._threads, **self._leaving}
        if threading.current_thread() in ours:
            return  # a garbage collection ran in one of these threads: they all end by themselves
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread, state in ours.items():
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                _logger.warning("a loader thread is still busy after close: %s", state.describe())

    def describe_wait(self, timeout_s: float) -> str:
        """Return the message of a wait for the next result that took too long."""
        number = self._num_taken
        with self._lock:
            task = self._window[0].task if self._window else None
        what = task.describe() if task is not None else f"micro-batch {number} of this iteration"
        doing = self.describe_activity() or "no thread is at work on it"
        return (
            f"{what} must be ready within {timeout_s:g} s, got nothing ({doing}); "
            "look at the storage named, or raise wait_timeout_s."
        )

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the tasks that are open, or done and not taken."""
        return self._buffered_bytes

    def resize(self, *, num_threads: int | None = None, max_bytes: int | None = None) -> None:
        """Change the number of threads and the bound; may be called from any thread.

        A surplus thread ends when its part is done. Beyond a lower bound no task is opened; open tasks are
        finished and returned.
        """
        if self._pid != os.getpid():
            return  # see `close`
        with self._lock:
            self._max_bytes = max_bytes or self._max_bytes
            self._num_threads = num_threads or self._num_threads
            self._leaving = {thread: state for thread, state in self._leaving.items() if thread.is_alive()}
            if self._num_started and not self._is_closed:
                self._start_threads()
            self._work.notify_all()

    # ---- on the threads --------------------------------------------------------------------------

    def _start_threads(self) -> None:
        """Start the missing threads; needs the lock."""
        if not self._num_started:
            self._busy_since = time.monotonic()
            _keep_freed_memory()
        while len(self._threads) < self._num_threads:
            state = ThreadState()
            # Daemons, so that a stuck read cannot keep the interpreter alive; streams close the engine at
            # exit.
            thread = threading.Thread(
                target=self._run,
                args=(state,),
                name=f"shardflow-loading-{self._num_started}",
                daemon=True,
            )
            self._note_busy(1)
            wait_for_at_exit(thread).start()
            self._num_started += 1
            self._threads[thread] = state

    def _run(self, state: ThreadState) -> None:
        while True:
            part_task = self._next_part(state)
            if part_task is None:
                return
            entry, part = part_task
            if entry is None:
                self._open_next(state)
                continue
            try:
                if entry.error is None and entry.task is not None and part != _FINISH_ONLY:
                    entry.task.run(part, state)
            except BaseException as error:  # noqa: BLE001 - raised again by `take`
                entry.error = entry.error or error
            self._part_done(entry)
            # Do not keep a batch alive while waiting for work.
            del entry, part_task

    def _next_part(self, state: ThreadState) -> tuple[_Open[_Result] | None, int] | None:
        """Wait for a part, or for room to open a task (``(None, 0)``); None if the engine is closed."""
        with self._lock:
            idle_since: float | None = None
            state.enter("idle", "")
            while True:
                if self._is_closed:
                    return None
                if len(self._threads) > self._num_threads:
                    if idle_since is None:
                        self._note_busy(-1)
                    thread = threading.current_thread()
                    self._leaving[thread] = self._threads.pop(thread)
                    return None
                part_task: tuple[_Open[_Result] | None, int] | None = None
                if len(self._parts) < self._num_threads and self._can_open():
                    self._is_opening = True
                    part_task = (None, 0)
                elif self._parts:
                    part_task = self._parts.popleft()
                if part_task is not None:
                    if idle_since is not None:
                        self._counters.add("idle", time.monotonic() - idle_since, 0, 1)
                        self._note_busy(1)
                    return part_task
                if idle_since is None:
                    idle_since = time.monotonic()
                    self._note_busy(-1)
                if self._num_ready == len(self._window) and not self._is_opening:
                    self._done.notify_all()  # nothing more is made before a result is taken
                self._work.wait()

    def _note_busy(self, change: int) -> None:
        """Count the busy threads since the last change; needs the lock."""
        now = time.monotonic()
        self._counters.observe("threads_busy", self._num_busy, now - self._busy_since)
        self._num_busy, self._busy_since = self._num_busy + change, now

    def _can_open(self) -> bool:
        if self._is_opening:
            return False
        if self._held is not None:
            return self._fits(self._held)
        return self._num_opened < self._num_tasks and (
            self._buffered_bytes < self._max_bytes or not self._window
        )

    def _fits(self, entry: _Open[_Result]) -> bool:
        return not self._window or self._buffered_bytes + entry.num_bytes <= self._max_bytes

    def _open_next(self, state: ThreadState) -> None:
        """Open the next task and queue its parts; only for the thread that set ``_is_opening``."""
        entry = self._held
        if entry is None:
            state.enter("plan", "")
            try:
                entry = _Open(self._open_task(self._num_opened))
            except BaseException as error:  # noqa: BLE001 - raised again by `take`
                entry = _Open(None, error)
        with self._lock:
            if self._held is None:
                self._num_opened += 1
            if self._is_closed:
                return
            self._held = None if self._fits(entry) else entry
            if self._held is not None:
                self._is_opening = False
                return
            self._buffered_bytes += entry.num_bytes
            self._window.append(entry)
        try:
            if entry.task is not None:
                with self._counters.timed("collate", num_items=0):
                    entry.task.begin()
        except BaseException as error:  # noqa: BLE001 - raised again by `take`
            entry.error = error
        with self._lock:
            self._is_opening = False
            if entry.num_left and entry.error is None:
                self._parts.extend((entry, part) for part in range(entry.num_left))
            else:
                entry.num_left = 1  # a task without parts, or one that failed
                self._parts.append((entry, _FINISH_ONLY))
            # No more threads than there are parts. This one opens the next task, or does a part too.
            self._work.notify(entry.num_left)

    def _part_done(self, entry: _Open[_Result]) -> None:
        with self._lock:
            entry.num_left -= 1
            if entry.num_left:
                return
        try:
            if entry.error is None and entry.task is not None:
                with self._counters.timed("collate", entry.num_bytes):
                    entry.result = entry.task.finish()
        except BaseException as error:  # noqa: BLE001 - raised again by `take`
            entry.error = error
        with self._lock:
            entry.is_done = True
            self._num_ready += 1
            entry.task = None
            if self._num_awaiting and self._window and self._window[0] is entry:
                self._done.notify_all()

    def describe_activity(self) -> str:
        """Describe what the threads are doing; may be called from any thread."""
        # Without the lock, which another thread may hold during a wait.
        states = {**self._threads, **self._leaving}.values()
        return "; ".join(text for state in states if (text := state.describe_busy()))
