"""Run tasks in packing processes: what fails is tried again, alone, and only then has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shardflow.errors import ShardflowError, StorageError
from shardflow.packing.engine import Task, TaskDone

if TYPE_CHECKING:
    from shardflow.packing.engine import Engine

__all__ = ["run_all", "run_tasks"]


def run_tasks(
    pool: Engine, tasks: Iterable[Task], on_done: Callable[[Task, dict[str, Any]], None]
) -> list[TaskDone]:
    """Run tasks; those that fail run a second time, one at a time in a fresh process.

    Args:
        pool: The processes.
        tasks: Made as they are needed.
        on_done: Told of each task that was done, in no order.

    Returns:
        What failed twice.

    Raises:
        StorageError: A task could not read or write; nothing of an input decides that.
    """
    failed = _once(pool, tasks, on_done)
    if not failed:
        return []
    pool.restart(1)
    again = _once(pool, [done.task for done in failed], on_done)
    pool.restart()
    return again


def run_all(pool: Engine, tasks: Iterable[Task], on_done: Callable[[Task, dict[str, Any]], None]) -> None:
    """Run tasks that no input can make fail.

    Raises:
        ShardflowError: One failed all the same.
    """
    failed = run_tasks(pool, tasks, on_done)
    if failed:
        raise ShardflowError(
            f"a packing process must do {failed[0].task.kind}, got {failed[0].failure} ({failed[0].detail}); "
            "look at the memory and the disk of this machine."
        )


def _once(
    pool: Engine, tasks: Iterable[Task], on_done: Callable[[Task, dict[str, Any]], None]
) -> list[TaskDone]:
    failed: list[TaskDone] = []

    def take() -> None:
        done = pool.wait()
        if done.failure == "storage":
            raise StorageError(done.detail)
        if done.failure is not None or done.result is None:
            failed.append(done)
        else:
            on_done(done.task, done.result)

    for task in tasks:
        while not pool.has_idle:
            take()
        pool.submit(task)
    while pool.num_running:
        take()
    return failed
