"""What lives inside a Ray worker: one packing process of the local engine, and nothing else.

The Ray worker itself never reads an input. It starts the same killable, memory-capped process that the local
engine starts, and that process dies with it. Only JSON passes between job and worker, and no exception leaves
one: Ray would write its text and a traceback into logs.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from shardflow.errors import ShardflowError
from shardflow.logs import describe_exception
from shardflow.packing.engine import Answer, Task, WorkerSetup
from shardflow.packing.pool import ChildPool
from shardflow.packing.wire import decode, encode

__all__ = ["PackingWorker"]


class PackingWorker:
    """Runs one task at a time in a packing process of its own.

    Args:
        start: `WorkerSetup` as JSON.
        folder: Working directory of the job.
    """

    def __init__(self, start: str, folder: str) -> None:
        with suppress(OSError):
            os.chdir(folder)
        self._pool = ChildPool(1, decode(WorkerSetup, json.loads(start)))

    def pid(self) -> int:
        """Return the process id of the Ray worker."""
        return os.getpid()

    def run(self, task: str) -> str:
        """Run a `Task`, given as JSON; return the `Answer`, likewise."""
        try:
            self._pool.submit(decode(Task, json.loads(task)))
            done = self._pool.wait()
            answer = Answer(
                result=done.result,
                failure=done.failure,
                detail=done.detail,
                peak_memory_bytes=self._pool.peak_memory_bytes,
            )
        except ShardflowError as error:
            answer = Answer(cannot_start=error.message)
        except Exception as error:  # noqa: BLE001 - Ray would log its text
            answer = Answer(cannot_start=f"a Ray worker failed: {describe_exception(error)}")
        return json.dumps(encode(answer))
