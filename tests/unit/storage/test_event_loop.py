"""A loop thread ends only when no thread of the client is under way, and then it ends for good."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from shardflow.errors import StorageError
from shardflow.storage.event_loop import EventLoopThread, call_client

pytestmark = pytest.mark.fast


class _Client:
    """Calls whose outcome a thread of the client brings when it is let, as obstore's do."""

    def __init__(self) -> None:
        self.may_come = threading.Event()
        self.threads: list[threading.Thread] = []

    def call(self) -> Awaitable[str]:
        loop = asyncio.get_running_loop()
        outcome = loop.create_future()
        thread = threading.Thread(target=self._bring, args=(loop, outcome))
        thread.start()
        self.threads.append(thread)
        return outcome

    def _bring(self, loop: asyncio.AbstractEventLoop, outcome: asyncio.Future[str]) -> None:
        self.may_come.wait(300)
        if not outcome.cancelled():
            loop.call_soon_threadsafe(_set, outcome, "brought")


def _set(outcome: asyncio.Future[str], value: str) -> None:
    outcome.set_result(value)


async def _wait_for(call: Callable[[], Awaitable[str]]) -> str:
    return await call_client(call)


async def _give_up(call: Callable[[], Awaitable[str]]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0):
            await call_client(call)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_call_is_followed_until_its_thread_is_home() -> None:
    client, loop = _Client(), EventLoopThread("test")
    client.may_come.set()
    assert loop.run(_wait_for(client.call)) == "brought"
    for thread in client.threads:
        thread.join(300)
    assert loop.num_under_way == 0
    loop.close()


def test_the_end_waits_for_the_thread_of_a_call_that_was_given_up() -> None:
    client, loop = _Client(), EventLoopThread("test")
    loop.run(_give_up(client.call))
    assert loop.num_under_way == 1
    end = _in_thread(loop.close)
    end.join(0.2)
    assert end.is_alive(), "the loop ended while a thread of the client had still to come"
    client.may_come.set()
    end.join(300)
    assert not end.is_alive()
    assert loop.num_under_way == 0


def test_the_end_takes_back_what_runs_and_refuses_what_comes() -> None:
    client, loop = _Client(), EventLoopThread("test")
    caught: list[BaseException] = []

    def read() -> None:
        try:
            loop.run(_wait_for(client.call))
        except StorageError as error:
            caught.append(error)

    reader = _in_thread(read)
    while not client.threads:
        reader.join(0.001)
    client.may_come.set()  # too late or not: either the outcome, or the end
    loop.close()
    reader.join(300)
    assert not reader.is_alive()
    with pytest.raises(StorageError, match="before the read finished"):
        loop.run(_wait_for(client.call))
    assert len(client.threads) == 1, "a call began after the end"
