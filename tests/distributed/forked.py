"""Ranks forked from one process that has imported everything: a start takes a second and not eight.

``python -m tests.distributed.forked NUM_RANKS MODULE ARGUMENT...`` runs ``main()`` of a module on each rank;
of several numbers, such as ``1,2``, on the ranks of one world after the other. It stands for torchrun where
the launcher is not what is tested: the same environment and a store of its own, but no restart. A module may
have an ``import_ahead()`` of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from typing import NoReturn

import torch.distributed as dist

__all__ = ["import_ahead", "rank_variables", "run_ranks", "store_server"]

_LATER = (
    "shardflow.training.jobs.generating",
    "shardflow.training.models.reference",
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.vit.modeling_vit",
)
"""What a run imports when it knows its settings, and builds its model."""


def import_ahead() -> None:
    """Import, before the forks, what each rank would import after them: seconds for each."""
    for name in _LATER:
        import_module(name)


def rank_variables(rank: int, world_size: int, port: int, start: int = 0) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "forked",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(start),
    }


@contextmanager
def store_server() -> Iterator[int]:
    """A store in a process of its own, new for each start, as torchrun has it."""
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        os.write(write_end, str(store.port).encode())
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)
    os.close(write_end)
    try:
        yield int(os.read(read_end, 16))
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run_ranks(num_ranks: int, work: Callable[[], int | None]) -> int:
    """Run ``work`` on each rank and return 0; once one fails, the others are killed, and it is 1.

    SIGTERM is passed on to all ranks; if they stop as they should, it is 1 as well.
    """
    fork = multiprocessing.get_context("fork")
    with store_server() as port:
        ranks = [
            fork.Process(target=_be_rank, args=(rank_variables(rank, num_ranks, port), work))
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        # Not before: a rank may run this module by its name, which must then not have been imported.
        from shardflow.training.__main__ import EXIT_STOPPED

        def pass_on(_number: int, _frame: object) -> None:
            for rank in ranks:
                rank.terminate()

        signal.signal(signal.SIGTERM, pass_on)
        while running := [rank for rank in ranks if rank.exitcode is None]:
            wait([rank.sentinel for rank in running])
            if any(rank.exitcode not in {None, 0, EXIT_STOPPED} for rank in ranks):
                for rank in running:
                    rank.kill()
        return int(any(rank.exitcode for rank in ranks))


def _be_rank(variables: dict[str, str], work: Callable[[], int | None]) -> NoReturn:
    os.environ.update(variables)
    sys.exit(work())


def main() -> None:
    sizes, name, *arguments = sys.argv[1:]
    sys.argv = [name, *arguments]
    module = import_module(name)
    if hasattr(module, "import_ahead"):
        module.import_ahead()
    elif name.startswith("shardflow.") or "shardflow.training.distributed" in sys.modules:
        import_ahead()
    if hasattr(module, "__path__"):
        module = import_module(f"{name}.__main__")
    sys.exit(any(run_ranks(int(size), module.main) for size in sizes.split(",")))


if __name__ == "__main__":
    main()
