"""The channel: whole messages in order, whatever the pieces, and nothing but JSON objects."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from shardflow.packing.engines.worker import Channel, ChannelClosedError

pytestmark = pytest.mark.fast


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


def _frame(value: object) -> bytes:
    body = json.dumps(value).encode()
    return struct.pack("<I", len(body)) + body


def test_messages_cross(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    other = Channel(theirs)
    message = {"path": b"caf\xe9".decode("utf-8", "surrogateescape"), "n": [1, None, 2.5]}
    channel.send(message)
    channel.send({"second": True})
    assert other.receive() == message
    assert other.receive() == {"second": True}


def test_pieces_become_whole_messages(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    data = _frame({"a": 1}) + _frame({"b": "x" * 100_000}) + _frame({"c": 3})
    seen = []
    for start in range(0, len(data), 977):
        theirs.sendall(data[start : start + 977])
        seen += list(channel.receive_available())
    while len(seen) < 3:
        seen += list(channel.receive_available())
    assert [next(iter(message)) for message in seen] == ["a", "b", "c"]


def test_nothing_there_is_no_message(ends: tuple[Channel, socket.socket]) -> None:
    assert list(ends[0].receive_available()) == []


def test_the_end_comes_after_what_was_sent(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(_frame({"last": 1}) + b"\x07")
    theirs.close()
    assert next(channel.receive_available()) == {"last": 1}
    with pytest.raises(ChannelClosedError):
        list(channel.receive_available())
    with pytest.raises(ChannelClosedError):
        channel.receive()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 4) + b"\xff\xff\xff\xff",
        _frame([1, 2]),
        _frame("text"),
        struct.pack("<I", 200_000) + b"[" * 200_000,
    ],
)
def test_junk_closes_the_channel(ends: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, theirs = ends
    sender = threading.Thread(target=theirs.sendall, args=(data,))
    sender.start()
    with pytest.raises(ChannelClosedError):
        channel.receive()
    sender.join()


def test_sending_to_nobody_is_noticed(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosedError):
        channel.send({"a": 1})


def test_sending_to_one_that_does_not_listen_ends(ends: tuple[Channel, socket.socket]) -> None:
    with pytest.raises(ChannelClosedError):
        ends[0].send({"a": "x" * 10_000_000}, timeout_s=0.1)
