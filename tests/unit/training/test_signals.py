"""Stop signals set a flag, and nothing else."""

from __future__ import annotations

import os
import signal

import pytest

from shardflow.training.distributed import STOP_SIGNALS, StopRequest

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_is_remembered_and_repeats_change_nothing(number: signal.Signals) -> None:
    stop = StopRequest()
    with stop.listening():
        flags = [stop.is_set]
        for sent in (number, signal.SIGUSR1):
            os.kill(os.getpid(), sent)
            flags.append(stop.is_set)
    assert flags == [False, True, True]
    assert stop.signal_name == number.name


def test_former_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest().listening():
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
