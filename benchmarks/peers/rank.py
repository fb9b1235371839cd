"""One rank, in the environment of its peer: ``python -m benchmarks.peers.rank PEER FOLDER TASKS``.

Runs the tasks one after the other in one process group and writes a line for each event to
``FOLDER/out/<task>.rank-<rank>.jsonl``, at once, so that a rank that is killed leaves what it had received.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.peers.task import NotOfferedError, Task, read_tasks

_TEXT_CHARACTERS = 300
_POLL_S = 0.02


def run_task(peer: Any, folder: Path, task: Task, rank: int, out: TextIO) -> None:
    """Run one task; what the peer raises is a result."""

    def tell(**event: object) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    tell(event="begin")
    try:
        stream = peer.open_stream(folder / "data", task, rank)
        if task.resume is not None:
            stream.load(folder / "states" / task.resume, rank)
        tell(event="length", batches=stream.length())
        batches = iter(stream.batches())
        for number, keys in enumerate(batches, start=1):
            tell(event="batch", keys=keys)
            if task.together:
                dist.all_reduce(torch.ones(1))
            if number == task.stop_after:
                states = folder / "states" / task.name
                states.mkdir(parents=True, exist_ok=True)
                stream.save(states, rank)
                break
        tell(event="end")
        # Workers end here and not when the next task runs.
        with suppress(AttributeError):
            batches.close()  # type: ignore[attr-defined]
        del batches, stream
    except NotOfferedError:
        tell(event="not offered")
    except Exception as error:  # noqa: BLE001 - a refusal is what is measured
        place = traceback.extract_tb(error.__traceback__)[-1]
        # The last line is the sentence, also where a worker's traceback comes first; a bare assertion says
        # nothing but where it stands.
        lines = str(error).strip().splitlines() or [str(place.line)]
        kind = type(error).__name__
        text = lines[-1] if lines[-1].startswith(kind) else f"{kind}: {lines[-1]}"
        text = text.replace(str(folder), "FOLDER")
        tell(event="error", text=text[:_TEXT_CHARACTERS], raised_in=place.name)


def main() -> None:
    peer = importlib.import_module(f"benchmarks.peers.{sys.argv[1]}")
    folder, rank = Path(sys.argv[2]), int(os.environ["RANK"])
    tasks = read_tasks(folder / sys.argv[3])
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    for number, task in enumerate(tasks):
        with (folder / "out" / f"{task.name}.rank-{rank}.jsonl").open("w", encoding="utf-8") as out:
            run_task(peer, folder, task, rank, out)
        # Not a collective: a rank that still waits inside one must not be answered by this.
        store.add(f"done-{number}", 1)
        while store.add(f"done-{number}", 0) < task.world_size:
            time.sleep(_POLL_S)
    store.add("gone", 1)
    while rank == 0 and store.add("gone", 0) < dist.get_world_size():
        time.sleep(_POLL_S)  # the store lives in this process
    # An orderly goodbye could wait for what a peer left behind.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
