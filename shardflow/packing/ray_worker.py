"""What lives inside a Ray worker: one packing process of the local engine, and nothing else.

The Ray worker itself never reads an input. It starts the same killable, memory-capped process that the local
engine starts, and that process dies with it. Only JSON passes between job and worker, and no exception leaves
one: Ray would write its text and a traceback into logs.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from shardflow.errors import ShardflowError
from shardflow.logs import describe_exception
from shardflow.packing.engine import Task
from shardflow.packing.limits import ChildLimits
from shardflow.packing.pool import ChildPool

__all__ = ["PackingWorker"]


class PackingWorker:
    """Runs one task at a time in a packing process of its own.

    Args:
        start: JSON: ``limits``, ``handlers``, ``setup`` and ``log_path`` of `ChildPool`, and ``folder``, the
            working directory of the job.
    """

    def __init__(self, start: str) -> None:
        fields = json.loads(start)
        with suppress(OSError):
            os.chdir(fields["folder"])
        self._pool = ChildPool(
            1,
            ChildLimits.from_json(fields["limits"]),
            handlers=fields["handlers"],
            setup=fields["setup"],
            log_path=Path(fields["log_path"]),
        )

    def pid(self) -> int:
        """Return the process id of the Ray worker."""
        return os.getpid()

    def run(self, task: str) -> str:
        """Run a task.

        Args:
            task: JSON: ``kind``, ``payload`` and ``timeout_s`` of `Task`.

        Returns:
            JSON: ``result``, ``failure``, ``detail`` and ``peak_memory_bytes``; or ``cannot_start``.
        """
        try:
            self._pool.submit(Task(**json.loads(task)))
            done = self._pool.wait()
            answer = {"result": done.result, "failure": done.failure, "detail": done.detail}
            return json.dumps({**answer, "peak_memory_bytes": self._pool.peak_memory_bytes})
        except ShardflowError as error:
            return json.dumps({"cannot_start": error.message})
        except Exception as error:  # noqa: BLE001 - Ray would log its text
            return json.dumps({"cannot_start": f"a Ray worker failed: {describe_exception(error)}"})
