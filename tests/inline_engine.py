"""A packing engine without processes, for tests of what is packed: a job spares a start of a second.

``python -m tests.inline_engine pack ...`` is ``shardflow pack ...`` with it.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from shardflow.cli.main import main
from shardflow.errors import StorageError
from shardflow.logs import describe_exception
from shardflow.packing import job
from shardflow.packing.corpora import job as corpus_job
from shardflow.packing.engines.base import Engine, Task, TaskDone, WorkerSetup, decode, encode
from shardflow.packing.engines.local import LocalEngine
from shardflow.packing.engines.worker import Handler, peak_memory_bytes
from shardflow.packing.registry import TASK_HANDLERS

__all__ = ["InlineEngine", "is_packing_inline", "packing_inline"]


class InlineEngine(Engine):
    """Runs each task when it is submitted, through the messages that a packing process gets and sends."""

    def __init__(self, worker: WorkerSetup) -> None:
        self._done: deque[TaskDone] = deque()
        start = decode(WorkerSetup, _sent(worker))
        with _silence():
            self._handle: Handler = resolve_name(TASK_HANDLERS[start.handlers])(start.setup)

    @property
    def has_idle(self) -> bool:
        return not self._done

    @property
    def num_running(self) -> int:
        return len(self._done)

    def submit(self, task: Task) -> None:
        with _silence():
            self._done.append(self._run(task, _sent(task)))
        self.peak_memory_bytes = peak_memory_bytes()

    def wait(self) -> TaskDone:
        return self._done.popleft()

    def restart(self, num_processes: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass

    def _run(self, task: Task, message: Any) -> TaskDone:
        try:
            result = self._handle(message["kind"], message["payload"])
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - as in a packing process
            return TaskDone(task=task, failure="failed", detail=describe_exception(error))
        return TaskDone(task=task, result=_sent(result))


@contextmanager
def packing_inline() -> Iterator[None]:
    """Let jobs of one process, which nothing is to end, run in this one."""

    def engine(num_processes: int, worker: WorkerSetup) -> Engine:
        is_inline = num_processes == 1 and worker.handlers in TASK_HANDLERS
        return InlineEngine(worker) if is_inline else LocalEngine(num_processes, worker)

    with mock.patch.object(job, "LocalEngine", engine), mock.patch.object(corpus_job, "LocalEngine", engine):
        yield


def is_packing_inline() -> bool:
    """Whether jobs of this process run in it."""
    return vars(job)["LocalEngine"] is not LocalEngine


def _sent(value: Any) -> Any:
    return json.loads(json.dumps(encode(value)))


@contextmanager
def _silence() -> Iterator[None]:
    """What libraries say of inputs goes nowhere, as in a packing process."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


if __name__ == "__main__":
    with packing_inline():
        sys.exit(main())
