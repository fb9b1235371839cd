"""Event loop thread: runs cancellable object store requests for other threads.

A thread blocked inside the client cannot be woken, so a hanging request would block it until the last
timeout. A task can be cancelled, and the client then drops the connection. So all reads of a store run on
one loop, and callers wait for the result.

The client's own threads enter Python once per call, to deliver a result or to find the call cancelled,
possibly long afterwards. Entering Python during interpreter shutdown would abort the process. So
`ClientLoop` tracks every call until its thread has left Python, and the loop closes only then, before the
interpreter does.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextvars import Context
from typing import Any, Final, TypeVar, TypeVarTuple

from shardflow.errors import StorageError

_Value = TypeVar("_Value")
_Arguments = TypeVarTuple("_Arguments")

# A client thread returns within milliseconds; later only if the machine is too busy to run it.
_RETURN_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.002


class _Call:
    """A call of the client, until its thread has left Python."""

    __slots__ = ("has_returned",)

    def __init__(self) -> None:
        self.has_returned = False


class _Outcome(asyncio.Future[Any]):
    """Future of a client call, which notices when the client's thread looks at it for the last time."""

    def __init__(self, loop: ClientLoop) -> None:
        super().__init__(loop=loop)
        self.call_state = _Call()
        self._own_thread = threading.get_ident()

    def cancelled(self) -> bool:
        """Return whether the call was cancelled; if so, the client's thread leaves after asking."""
        found = super().cancelled()
        if found and threading.get_ident() != self._own_thread:
            # The last action of that thread: no other thread can run between this store and the return, and
            # the client releases the GIL with the return.
            self.call_state.has_returned = True
        return found


class ClientLoop(asyncio.SelectorEventLoop):
    """Event loop that tracks the client calls whose threads have not returned.

    The client creates the future of a call with `create_future` and delivers its result with
    `call_soon_threadsafe`, or finds it cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_calling = False
        self._calls: deque[_Call] = deque()

    def call_client(self, call: Callable[[], Awaitable[_Value]]) -> Awaitable[_Value]:
        """Start a client call in this loop's thread."""
        self._is_calling = True
        try:
            return call()
        finally:
            self._is_calling = False

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future; one that is tracked if the client creates it."""
        if not self._is_calling:
            return super().create_future()
        while self._calls and self._calls[0].has_returned:
            self._calls.popleft()
        outcome = _Outcome(self)
        self._calls.append(outcome.call_state)
        return outcome

    def call_soon_threadsafe(
        self, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in this loop's thread; client threads deliver results this way, and leave."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        first: object = args[0] if args else None
        if isinstance(first, _Outcome):
            first.call_state.has_returned = True  # its last action, see `_Outcome.cancelled`
        return handle

    @property
    def num_under_way(self) -> int:
        """Client calls whose threads have not returned."""
        return sum(not call_state.has_returned for call_state in list(self._calls))


def call_client(call: Callable[[], Awaitable[_Value]]) -> Awaitable[_Value]:
    """Start a client call in a coroutine of an `EventLoopThread`."""
    loop = asyncio.get_running_loop()
    return loop.call_client(call) if isinstance(loop, ClientLoop) else call()


class EventLoopThread:
    """Runs coroutines for other threads, until its last reference or the interpreter goes.

    Closing cancels running coroutines and waits for all client threads to return.
    """

    def __init__(self, name: str) -> None:
        self._loop = ClientLoop()
        self._gate = _Gate()
        thread = threading.Thread(target=_serve, args=(self._loop,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._loop, thread, self._gate, os.getpid())

    @property
    def num_under_way(self) -> int:
        """Client calls whose threads have not returned."""
        return self._loop.num_under_way

    def close(self) -> None:
        """Close now; callers waiting for a result get a `StorageError`."""
        self._end()

    def run(self, coroutine: Coroutine[Any, Any, _Value]) -> _Value:
        """Run a coroutine and return its result.

        An interrupt of the calling thread cancels the coroutine, and propagates only after it has ended:
        until then it may write into the caller's buffers.

        Raises:
            StorageError: The thread has ended, or ends before the coroutine does.
        """
        outcome: Future[_Value] = Future()
        tasks: list[asyncio.Task[_Value]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _forward(task, outcome))

        if not self._gate.submit(lambda: self._loop.call_soon_threadsafe(start)):
            coroutine.close()
            raise _over()
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                # Callbacks of one thread run in order: the task exists when this one runs.
                self._gate.submit(
                    lambda: self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                )
                wait([outcome])
            raise


class _Gate:
    """Admits calls to a loop until it is closed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, call: Callable[[], object]) -> bool:
        """Make a call; return False without making it once closed."""
        with self._lock:
            if not self._is_closed:
                call()
            return not self._is_closed

    def close(self, last_call: Callable[[], object]) -> None:
        """Make a last call."""
        with self._lock:
            self._is_closed = True
            last_call()


async def run_all(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines concurrently; the first error cancels the others and is raised once all have ended."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _serve(loop: ClientLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(_wait_for(tasks))
        deadline = time.monotonic() + _RETURN_TIMEOUT_S
        while loop.num_under_way and time.monotonic() < deadline:
            loop.run_until_complete(asyncio.sleep(_POLL_S))
    finally:
        loop.close()


async def _wait_for(tasks: set[asyncio.Task[Any]]) -> None:
    # Not gather, which would raise an interrupt of one of them.
    if tasks:
        await asyncio.wait(tasks)


def _end(loop: ClientLoop, thread: threading.Thread, gate: _Gate, pid: int) -> None:
    if pid != os.getpid():
        return  # a fork has no thread, and the loop's descriptors belong to the parent
    gate.close(lambda: loop.call_soon_threadsafe(loop.stop))
    if thread is not threading.current_thread():
        thread.join(2 * _RETURN_TIMEOUT_S)


def _forward(task: asyncio.Task[_Value], outcome: Future[_Value]) -> None:
    if task.cancelled():
        outcome.set_exception(_over())
        return
    error = task.exception()
    if error is None:
        outcome.set_result(task.result())
    else:
        outcome.set_exception(error)


def _over() -> StorageError:
    return StorageError(
        "the remote store was closed before the read finished, because the process ends; read earlier."
    )
