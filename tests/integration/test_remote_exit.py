"""A process that read from an object store ends as any other, whatever it left open."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.factories import make_dataset
from tests.object_stores import WebServer

# A thread of the client that waits for the interpreter gets it late: what a busy machine does now and then.
_LATE = "import sys; sys.setswitchinterval(1)\n"
_OPEN = _LATE + (
    "from shardflow.format import Dataset\n"
    "dataset = Dataset.open(sys.argv[1])\n"
    "dataset.store.read('ledger.jsonl')\n"
)
_LOADER = _LATE + (
    "from shardflow.sampling import BatchSpec\n"
    "from shardflow.fields.types.text import Text\n"
    "from shardflow.loading import Loader\n"
    "from shardflow.format import Dataset\n"
    "spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=2)\n"
    "fields = {'report': Text()}\n"
    "batches = iter(Loader(Dataset.open(sys.argv[1]), split='train', batch=spec, seed=7, fields=fields))\n"
    "next(batches)\n"
)
_THREAD = _LATE + (
    "import contextlib, threading\n"
    "from shardflow.errors import StorageError\n"
    "from shardflow.format import Dataset\n"
    "store = Dataset.open(sys.argv[1]).store\n"
    "begun = threading.Event()\n"
    "def read():\n"
    "    with contextlib.suppress(StorageError):  # the end, which comes while it reads\n"
    "        while True:\n"
    "            store.read('ledger.jsonl')\n"
    "            begun.set()\n"
    "threading.Thread(target=read, daemon=True).start()\n"
    "begun.wait()\n"
)


@pytest.mark.parametrize("script", [_OPEN, _LOADER, _THREAD], ids=["open", "loader", "thread"])
def test_a_process_that_closes_nothing_ends_well(script: str, tmp_path: Path) -> None:
    make_dataset(tmp_path / "dataset", splits={"train": 13})

    def run(_: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, server.url],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    with WebServer(tmp_path / "dataset") as server, ThreadPoolExecutor(2) as pool:
        ends = [(done.returncode, done.stderr) for done in pool.map(run, range(7))]
    assert set(ends) == {(0, "")}
