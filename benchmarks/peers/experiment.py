"""The tasks of one peer, in the order in which they can be run, and what they showed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.judge import Run, judge_epoch, judge_resume
from benchmarks.peers.launch import events
from benchmarks.peers.task import Task

__all__ = ["STOPPED", "Experiment"]

Settings = dict[str, dict[str, Any]]

_WORLDS = (1, 2, 4)
_WORKERS = (0, 2)
STOPPED = {"world_size": 2, "num_workers": 2, "after_steps": 3}
_RESUMES = ((2, 2), (2, 0), (4, 2), (1, 2))
"""World size and workers of a rank of those that go on."""


class Experiment:
    """Every setting of a peer: undisturbed epochs, an epoch in lockstep where ranks are unequal, resumes.

    Args:
        folder: Where the ranks write.
        settings: Options of the peer by the setting's name; ``total_workers`` among them fixes the number of
            workers over all ranks.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._epochs = {name: _epochs(name, options) for name, options in settings.items()}
        self._stopped = {name: _stopped(name, options) for name, options in settings.items()}
        self._resumed = {name: _resumed(self._stopped[name]) for name in settings}

    def stages(self) -> Iterator[list[Task]]:
        """Yield tasks that may run in any order; the next ones depend on what these showed."""
        yield [task for tasks in self._epochs.values() for task in tasks] + list(self._stopped.values())
        yield [
            task
            for name in self._settings
            for task in (*self._together(name), *(() if self._is_stateless(name) else self._resumed[name]))
        ]

    def results(self) -> dict[str, dict[str, Any]]:
        """Judge what the ranks left, setting by setting."""
        return {name: self._result(name) for name in self._settings}

    def _result(self, name: str) -> dict[str, Any]:
        # The first epoch is that of one rank, which all others are compared with.
        alone, stopped = self._run(self._epochs[name][0]), self._run(self._stopped[name])
        world = STOPPED["world_size"], self._stopped[name].num_workers
        whole = next(task for task in self._epochs[name] if (task.world_size, task.num_workers) == world)
        return {
            "options": self._settings[name],
            "epochs": [
                {**_world(task), **judge_epoch(self._run(task), alone)} for task in self._epochs[name]
            ],
            "together": [
                {**_world(task), "end": self._run(task).end, "batches_per_rank": self._run(task).counts}
                for task in self._together(name)
            ],
            "resumes": [
                {**_world(task), **judge_resume(stopped, self._run(task), self._run(whole))}
                for task in self._resumed[name]
            ],
        }

    def _run(self, task: Task) -> Run:
        return Run([events(self._folder, task, rank) for rank in range(task.world_size)])

    def _is_stateless(self, name: str) -> bool:
        return self._run(self._stopped[name]).end == "not offered"

    def _together(self, name: str) -> list[Task]:
        """The first world with unequal ranks, in lockstep: one hang shows as much as six."""
        unequal = (
            replace(task, name=f"{task.name}-together", together=True)
            for task in self._epochs[name]
            if self._run(task).end == "end" and len(set(self._run(task).counts)) > 1
        )
        return [task for task in (next(unequal, None),) if task is not None]


def _epochs(setting: str, options: dict[str, Any]) -> list[Task]:
    total = options.get("total_workers")
    return [
        Task(
            name=f"{_slug(setting)}-{world_size}-{num_workers}",
            setting=setting,
            options=options,
            world_size=world_size,
            num_workers=num_workers,
        )
        for world_size in _WORLDS
        for num_workers in ((total // world_size,) if total else _WORKERS)
    ]


def _stopped(setting: str, options: dict[str, Any]) -> Task:
    return Task(
        name=f"{_slug(setting)}-stopped",
        setting=setting,
        options=options,
        world_size=STOPPED["world_size"],
        num_workers=STOPPED["num_workers"],
        stop_after=STOPPED["after_steps"],
    )


def _resumed(stopped: Task) -> list[Task]:
    total = stopped.options.get("total_workers")
    worlds = [(world_size, total // world_size if total else workers) for world_size, workers in _RESUMES]
    return [
        replace(
            stopped,
            name=f"{_slug(stopped.setting)}-resumed-{world_size}-{num_workers}",
            world_size=world_size,
            num_workers=num_workers,
            stop_after=None,
            resume=stopped.name,
        )
        for world_size, num_workers in dict.fromkeys(worlds)
    ]


def _world(task: Task) -> dict[str, int]:
    return {"world_size": task.world_size, "num_workers": task.num_workers}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
