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

# A client's thread is home within milliseconds, and later only where the machine is too busy to run it.
_HOME_TIMEOUT_S: Final = 10.0
_LOOK_AGAIN_S: Final = 0.002


class _Errand:
    """A call's way through the client."""

    __slots__ = ("is_home",)

    def __init__(self) -> None:
        self.is_home = False


class _Outcome(asyncio.Future[Any]):
    """What a call of the client will bring; its thread asks for it, and is seen to do so."""

    def __init__(self, loop: ClientLoop) -> None:
        super().__init__(loop=loop)
        self.errand = _Errand()
        self._own_thread = threading.get_ident()

    def cancelled(self) -> bool:
        """Tell whether nobody waits any more; the client's thread asks last of all, and leaves if so."""
        found = super().cancelled()
        if found and threading.get_ident() != self._own_thread:
            # The last thing done here: from a plain store to the return nothing lets another thread run, and
            # the client gives the interpreter back with the return.
            self.errand.is_home = True
        return found


class ClientLoop(asyncio.SelectorEventLoop):
    """A loop that knows which calls of the client have a thread under way.

    The client makes the future of a call with `create_future` and brings its outcome with
    `call_soon_threadsafe`, or finds it cancelled.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_calling = False
        self._errands: deque[_Errand] = deque()

    def call_client(self, call: Callable[[], Awaitable[_Value]]) -> Awaitable[_Value]:
        """Begin a call of the client, in this loop's thread."""
        self._is_calling = True
        try:
            return call()
        finally:
            self._is_calling = False

    def create_future(self) -> asyncio.Future[Any]:
        """Make a future; one that is followed if it is the client that asks."""
        if not self._is_calling:
            return super().create_future()
        while self._errands and self._errands[0].is_home:
            self._errands.popleft()
        outcome = _Outcome(self)
        self._errands.append(outcome.errand)
        return outcome

    def call_soon_threadsafe(
        self, callback: Callable[[*_Arguments], object], *args: *_Arguments, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in this loop's thread; a client's thread brings an outcome so, and leaves."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        first: object = args[0] if args else None
        if isinstance(first, _Outcome):
            first.errand.is_home = True  # the last thing done here, see `_Outcome.cancelled`
        return handle

    @property
    def num_under_way(self) -> int:
        """Calls whose thread has still to come."""
        return sum(not errand.is_home for errand in list(self._errands))


def call_client(call: Callable[[], Awaitable[_Value]]) -> Awaitable[_Value]:
    """Begin a call of the client in a coroutine of an `EventLoopThread`."""
    loop = asyncio.get_running_loop()
    return loop.call_client(call) if isinstance(loop, ClientLoop) else call()


class EventLoopThread:
    """Runs coroutines for other threads; ends with its last reference, or with the interpreter.

    Its end cancels what runs and waits until no thread of the client is under way.
    """

    def __init__(self, name: str) -> None:
        self._loop = ClientLoop()
        self._gate = _Gate()
        thread = threading.Thread(target=_serve, args=(self._loop,), name=name, daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end, self._loop, thread, self._gate, os.getpid())

    @property
    def num_under_way(self) -> int:
        """Calls of the client whose thread has still to come."""
        return self._loop.num_under_way

    def close(self) -> None:
        """End now; whoever waits for an outcome gets a `StorageError`."""
        self._end()

    def run(self, coroutine: Coroutine[Any, Any, _Value]) -> _Value:
        """Run a coroutine to its end and return what it returns.

        An interrupt of the calling thread cancels it, and is passed on only when it has ended: it may write
        into the caller's buffers until then.

        Raises:
            StorageError: The thread has ended, or ends before the coroutine does.
        """
        outcome: Future[_Value] = Future()
        tasks: list[asyncio.Task[_Value]] = []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: _pass_on(task, outcome))

        if not self._gate.pass_on(lambda: self._loop.call_soon_threadsafe(start)):
            coroutine.close()
            raise _over()
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():
                # Calls of one thread run in their order: the task is there when this one runs.
                self._gate.pass_on(
                    lambda: self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                )
                wait([outcome])
            raise


class _Gate:
    """Lets calls into a loop until it is closed. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False

    def pass_on(self, call: Callable[[], object]) -> bool:
        """Make a call; False, without it, once closed."""
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
    """Run coroutines side by side; the first error cancels the others and is raised once all have ended."""
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
        deadline = time.monotonic() + _HOME_TIMEOUT_S
        while loop.num_under_way and time.monotonic() < deadline:
            loop.run_until_complete(asyncio.sleep(_LOOK_AGAIN_S))
    finally:
        loop.close()


async def _wait_for(tasks: set[asyncio.Task[Any]]) -> None:
    # Not gather, which would raise the interrupt that one of them may have met.
    if tasks:
        await asyncio.wait(tasks)


def _end(loop: ClientLoop, thread: threading.Thread, gate: _Gate, pid: int) -> None:
    if pid != os.getpid():
        return  # a fork has the loop's file descriptors, which are the parent's, and no thread
    gate.close(lambda: loop.call_soon_threadsafe(loop.stop))
    if thread is not threading.current_thread():
        thread.join(2 * _HOME_TIMEOUT_S)


def _pass_on(task: asyncio.Task[_Value], outcome: Future[_Value]) -> None:
    if task.cancelled():
        outcome.set_exception(_over())
        return
    error = task.exception()
    if error is None:
        outcome.set_result(task.result())
    else:
        outcome.set_exception(error)


def _over() -> StorageError:
    return StorageError("a remote store must be read before the process ends, got the end; read it earlier.")
