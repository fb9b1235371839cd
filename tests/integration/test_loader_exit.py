"""A process ends as any other, however busy its threads are at that moment: with C++, say."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.format import Dataset
from shardflow.processes import waited_for
from shardflow.sampling import BatchSpec
from shardflow.storage import CacheConfig
from tests.factories import make_dataset
from tests.fault_proxy import FaultProxy
from tests.integration.loader_support import open_loader
from tests.object_stores import WebServer

CACHE = CacheConfig(ram_bytes=30_000, read_ahead_bytes=20_000, read_ahead_threads=4, block_bytes=4096)
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
FIELDS = {"image": sf.Slices(num_slices=2, size=(16, 16)), "report": sf.Text()}

# NumPy lets go of the interpreter here; a thread that is ended while it wants it back ends the process.
_IN_A_LIBRARY = """
import sys, threading, weakref
import numpy as np
from shardflow.processes import wait_for_at_exit
class Owner: pass
owner, ending, numbers = Owner(), threading.Event(), np.arange(2000) % 50
weakref.finalize(owner, ending.set)
def run():
    while not ending.is_set(): np.unique(numbers)
for _ in range(3): wait_for_at_exit(threading.Thread(target=run, daemon=True)).start()
ending.wait(0.1)
"""


def test_the_exit_waits_for_threads_that_are_in_a_library() -> None:
    command = [sys.executable, "-c", _IN_A_LIBRARY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset") / "a"
    return Path(make_dataset(folder, num_samples=24, samples_per_shard=6, facts=True))


def _threads() -> set[threading.Thread]:
    names = ("shardflow-loading", "shardflow-ahead", "shardflow-foresight")
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def test_the_exit_waits_for_each_thread_of_a_loader_and_close_ends_them(folder: Path) -> None:
    with WebServer(folder) as server, FaultProxy(server.port, latency_s=0.1) as slow:
        with open_loader(Dataset.open(slow.url, cache=CACHE), SPEC, FIELDS) as loader:
            iterator = iter(loader)
            next(iterator)
            running = _threads()
            assert {thread.name for thread in running} >= {"shardflow-loading-0", "shardflow-ahead-0"}
            assert not {thread for thread in running - set(waited_for()) if thread.is_alive()}
            # To the end: what is read then is of the next epoch, and no batch waits for it.
            assert len(list(iterator)) == len(loader) - 1
            running |= _threads()
        assert not {thread for thread in running if thread.is_alive()}
