"""The fault matrix: a run is hurt in one way, started again until it ends, and left to be compared.

``python -m tests.distributed.faults INPUT OUTPUT CASE...`` runs cases in turn, and beside them each of those
that mostly wait. Ranks are forked, see `tests.distributed.forked`; each is the real job, with processes,
gloo, health monitor and signals of its own. ``OUTPUT/CASE/`` holds the run, what each rank of each start
wrote, and ``result.json``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

from shardflow.training.__main__ import main as train_main
from shardflow.training.metrics import read_metrics
from tests.distributed.forked import import_ahead, rank_variables, store_server
from tests.distributed.moving_tuner import moving
from tests.distributed.orphans import adopt_orphans, end_what_is_left
from tests.tiny_runs import TinyInput, write_config

NUM_STEPS = 12
START_TIMEOUT_S = 600.0
MOST_STARTS = 6
HANG_S = 20.0
PREPARATION_S = 32.0
SETTINGS = {
    "run.max_steps": NUM_STEPS,
    "run.num_epochs": 4,
    "loader.wait_timeout_s": 90,
}

Hurt = Callable[[ExitStack], None]
"""Prepares a fault inside one rank; patches live as long as the stack."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix."""

    world_size: int = 2
    rank: int = 1
    """The rank that is hurt, in the first start."""
    hurt: Hurt | None = None
    """Inside the rank, before the job begins."""
    send: signal.Signals | None = None
    """From outside, once some steps are done; to all ranks for SIGTERM."""
    after_s: float = 0.0
    """More seconds before it is sent."""
    on_all: Hurt | None = None
    """Inside all ranks, in every start."""
    settings: dict[str, object] = field(default_factory=dict)
    dataset: str = "dataset"
    waits: bool = False
    """Whether it mostly waits for a timeout: it runs beside the other cases."""


# ---- ways to hurt a rank from inside ------------------------------------------------------------


def kill_myself() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def at_call(target: str, number: int, act: Callable[[], None]) -> Hurt:
    """Act right before the ``number``-th call of a function or method."""

    def hurt(stack: ExitStack) -> None:
        patcher = mock.patch(target)
        original, _ = patcher.get_original()
        count = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                act()
            return original(*args, **kwargs)

        stack.enter_context(mock.patch(target, counted))

    return hurt


def kill_my_loader() -> None:
    """SIGKILL to the process that reads for this rank."""
    me = os.getpid()
    for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
        if b"health.side" not in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


def ask_all_to_stop() -> None:
    """SIGTERM as torchrun sends it to a rank's process group: the processes that it started get it too."""
    for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        os.kill(int(child), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def raise_strange() -> None:
    raise ValueError("patient Doe, born 1950-01-01")  # must not be shown to other ranks


def sleep_long() -> None:
    time.sleep(3600)


def prepare_long() -> None:
    """Longer than any exchange between ranks may take in this run."""
    time.sleep(PREPARATION_S)


def no_large_files(stack: ExitStack) -> None:
    """A file that grows past 100 KB fails, as on a full disk: the model's, not the ledger's."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def before_each(target: str, seconds: float) -> Hurt:
    """Make every call of a function or method take longer."""

    def hurt(stack: ExitStack) -> None:
        original, _ = mock.patch(target).get_original()

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(seconds)
            return original(*args, **kwargs)

        stack.enter_context(mock.patch(target, slowly))

    return hurt


# A signal from outside must find the run under way: a free one may be done before it comes.
unhurried = before_each("shardflow.training.step.seed_micro_batch", 0.2)


_BEGUN = "shardflow.loading.process.LoaderProcess.start_iteration"
"""Called right after a loader's process was started, and when it goes on with another epoch."""

CASES: dict[str, Case] = {
    "whole": Case(),
    "whole-bad": Case(dataset="bad"),
    "kill-before-ledger-line": Case(
        hurt=at_call("shardflow.training.ledger.LedgerWriter.write", 5, kill_myself)
    ),
    "kill-amid-checkpoint": Case(
        rank=0, hurt=at_call("shardflow.training.checkpoint.files._write_synced", 3, kill_myself)
    ),
    "stop-without-end": Case(
        send=signal.SIGSTOP, hurt=unhurried, settings={"timeouts.hang_s": HANG_S}, waits=True
    ),
    "asked-to-stop": Case(send=signal.SIGTERM, hurt=unhurried),
    "error-in-transform": Case(
        hurt=at_call("shardflow.training.text.ReportTokenizer.encode", 11, raise_strange)
    ),
    "bad-sample": Case(
        hurt=at_call("shardflow.training.step.seed_micro_batch", 17, kill_myself), dataset="bad"
    ),
    "full-disk": Case(rank=0, hurt=no_large_files),
    "slow-storage": Case(hurt=before_each("shardflow.storage.local.LocalStore.read_ranges", 0.05)),
    "loader-process-killed": Case(
        hurt=at_call("shardflow.training.step.seed_micro_batch", 11, kill_my_loader),
        settings={"loader.execution": "process"},
    ),
    "long-preparation": Case(
        hurt=at_call("shardflow.training.run.open_data", 1, prepare_long),
        settings={"timeouts.steady_s": 25, "timeouts.hang_s": HANG_S, "loader.wait_timeout_s": 15},
        waits=True,
    ),
    "asked-to-stop-while-execution-changes": Case(
        hurt=at_call(_BEGUN, 1, ask_all_to_stop), on_all=moving, settings={"tune.mode": "on"}
    ),
    "read-that-never-ends": Case(
        hurt=at_call("shardflow.storage.local.LocalStore.read_ranges", 9, sleep_long),
        settings={"loader.wait_timeout_s": 15},
        waits=True,
    ),
}
"""The rows that ``make test`` runs, behind the undisturbed runs that they are compared with."""
LONGER_CASES: dict[str, Case] = {
    "whole-4": Case(world_size=4),
    "kill-at-four-ranks": Case(world_size=4, rank=2, send=signal.SIGKILL, hurt=unhurried),
    "kill-while-execution-changes": Case(
        hurt=at_call(_BEGUN, 1, kill_myself), on_all=moving, settings={"tune.mode": "on"}
    ),
    "kill-in-forward": Case(hurt=at_call("shardflow.training.step.seed_micro_batch", 11, kill_myself)),
    "kill-before-update": Case(rank=0, hurt=at_call("shardflow.training.step.Updates.apply", 7, kill_myself)),
    "kill-while-fetching": Case(
        hurt=at_call("shardflow.storage.local.LocalStore.read_ranges", 9, kill_myself)
    ),
    "kill-before-checkpoint-has-its-name": Case(
        rank=0, hurt=at_call("shardflow.training.checkpoint.files.CheckpointFolder._rename", 3, kill_myself)
    ),
    "kill-before-latest-moves": Case(
        rank=0,
        hurt=at_call("shardflow.training.checkpoint.files.CheckpointFolder._point_latest", 3, kill_myself),
    ),
    "kill-of-the-rank-that-tunes": Case(
        rank=0, hurt=at_call(_BEGUN, 3, kill_myself), on_all=moving, settings={"tune.mode": "on"}
    ),
    "preparation-of-a-minute": Case(
        hurt=at_call("shardflow.training.run.open_data", 1, partial(time.sleep, 60)),
        settings={"timeouts.steady_s": 5, "timeouts.hang_s": 4, "loader.wait_timeout_s": 3},
    ),
}
"""Rows of ``make test-slow``."""


def random_case(seed: int) -> Case:
    """A rank of two, three or four is killed or stopped at a time nobody chose."""
    rng = random.Random(seed)
    world_size = rng.choice((2, 2, 4))
    return Case(
        world_size=world_size,
        rank=rng.randrange(world_size),
        send=rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)),
        after_s=rng.uniform(0.0, 0.6),
    )


def case_of(name: str) -> Case:
    return (
        random_case(int(name.removeprefix("random-")))
        if name.startswith("random-")
        else {**CASES, **LONGER_CASES}[name]
    )


# ---- one case -----------------------------------------------------------------------------------


def run_case(tiny: TinyInput, name: str, folder: Path) -> dict[str, Any]:
    """Start the job until it has finished.

    Returns:
        Exit codes by start and rank, and the command lines of processes that outlived their ranks.
    """
    case = case_of(name)
    folder.mkdir(parents=True)
    settings = {**SETTINGS, "data.dataset": tiny.folder / case.dataset, **case.settings}
    config = write_config(tiny, folder / "train.toml", folder / "run", settings)
    starts: list[list[int]] = []
    left: list[str] = []
    while len(starts) < MOST_STARTS:
        codes = run_start(case, config, folder, len(starts))
        starts.append(codes)
        left += end_what_is_left()
        if set(codes) == {0}:
            break
    return {"starts": starts, "left": left}


def run_start(case: Case, config: Path, folder: Path, number: int) -> list[int]:
    """Fork the ranks, hurt one in the first start, and wait for all; none is told to end."""
    is_hurt = number == 0
    with store_server() as port:
        pids = []
        for rank in range(case.world_size):
            pid = os.fork()
            if pid == 0:
                hurt = case.hurt if is_hurt and rank == case.rank else None
                be_rank(rank, case.world_size, port, number, config, folder, hurt, case.on_all)
            pids.append(pid)
        if is_hurt and case.send is not None:
            wait_for_steps(folder / "run", 2, pids)
            time.sleep(case.after_s)
            victims = pids if case.send == signal.SIGTERM else [pids[case.rank]]
            for pid in victims:
                os.kill(pid, case.send)
        return wait_for_all(pids)


def be_rank(
    rank: int,
    world_size: int,
    port: int,
    start: int,
    config: Path,
    folder: Path,
    *hurts: Hurt | None,
) -> NoReturn:
    """Run the job in this forked process and leave with its code."""
    code = 99
    try:
        for descriptor, kind in ((1, "out"), (2, "err")):
            path = folder / f"start-{start}-rank-{rank}.{kind}"
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
        os.environ.update(rank_variables(rank, world_size, port, start))
        with ExitStack() as stack:
            for hurt in hurts:
                if hurt is not None:
                    hurt(stack)
            code = train_main([f"--config={config}"])
    except BaseException as error:  # noqa: BLE001 - what torchrun would show as a traceback
        sys.stderr.write(f"rank {rank} raised {type(error).__name__}: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for_steps(run: Path, number: int, pids: list[int]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while len(read_metrics(run)) < number and time.monotonic() < deadline:
        time.sleep(0.005)


def wait_for_all(pids: list[int]) -> list[int]:
    """Exit code of each process, -N for signal N; those that do not end are killed and have 1000."""
    deadline = time.monotonic() + START_TIMEOUT_S
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = 1000
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def damage_one_sample(tiny: TinyInput) -> None:
    """Make ``bad``, the same dataset with a byte of each slice of one training sample changed."""
    bad = tiny.folder / "bad"
    shutil.copytree(tiny.dataset, bad)
    shard = min((bad / "shards").glob("train-*.tar"))
    with tarfile.open(shard) as archive:
        members = archive.getmembers()
    with shard.open("r+b") as file:
        for member in members:
            key, _, name = member.name.partition(".")
            if key == members[0].name.partition(".")[0] and name.startswith("s0"):
                file.seek(member.offset_data + member.size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 0xFF]))


def run_lane(tiny: TinyInput, output: Path, names: Sequence[str]) -> None:
    """Run cases in turn and leave the result of each."""
    adopt_orphans()
    for name in names:
        began = time.monotonic()
        result = run_case(tiny, name, output / name)
        result["elapsed_s"] = time.monotonic() - began
        (output / name / "result.json").write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    tiny, output, names = TinyInput(Path(sys.argv[1])), Path(sys.argv[2]), sys.argv[3:]
    torch.set_num_threads(1)
    import_ahead()
    if not (tiny.folder / "bad").exists():
        damage_one_sample(tiny)
    waiting = [name for name in names if case_of(name).waits]
    lanes = [[name for name in names if name not in waiting], *([name] for name in waiting)]
    fork = multiprocessing.get_context("fork")
    running = [fork.Process(target=run_lane, args=(tiny, output, lane)) for lane in lanes]
    for lane in running:
        lane.start()
    for lane in running:
        lane.join()
    sys.exit(any(lane.exitcode for lane in running))


if __name__ == "__main__":
    main()
