"""Puts the watch over a run, and turns a broken exchange into the sentence of who broke it.

When a rank dies, the others meet it as a torn connection somewhere in a backward pass; when one hangs, they
wait. Either way the watch knows which rank it is. Here the ranks' sides are introduced to each other, and the
error that follows from another rank's fault becomes a :class:`RankLostError` with that fault's sentence.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from shardflow.errors import RankLostError, ShardflowError, WaitTimeoutError
from shardflow.logs import describe_exception
from shardflow.training.distributed import Ranks
from shardflow.training.starts import REFUSALS
from shardflow.training.watch import RankWatch

__all__ = ["watch_over"]

_LOGGER = logging.getLogger(__name__)

_NAMED_WITHIN_S: Final = 3.0
"""A connection breaks at once; that its rank is gone is known a moment later."""
_LOOPBACK: Final = "127.0.0.1"
_START_S: Final = 20.0


@contextmanager
def watch_over(ranks: Ranks, run: Path, *, lost_s: float) -> Iterator[Ranks]:
    """Watch the ranks for the length of the block.

    A process that torchrun did not start has no watch: there is nobody to tell, and a person may be
    debugging.

    Args:
        ranks: The ranks, joined; ``timeouts.hang`` bounds what each does alone.
        run: The run folder, for stacks and the list of faults.
        lost_s: How long nothing may be heard of another machine.

    Yields:
        The same ranks, watched.

    Raises:
        RankLostError: another rank ended or hangs, and the block met the consequence.
    """
    if "RANK" not in os.environ:
        yield ranks
        return
    if not hasattr(os, "memfd_create"):
        _LOGGER.warning("ranks are watched on Linux only; a rank that hangs is not named here")
        yield ranks
        return
    watch = _start(ranks, run, lost_s)
    try:
        yield replace(ranks, watch=watch)
    except (RuntimeError, WaitTimeoutError) as error:
        fault = watch.fault_elsewhere(_NAMED_WITHIN_S)
        if fault is None:
            watch.bye("failed", text=describe_exception(error).splitlines()[0])
            raise
        watch.bye("lost")
        raise RankLostError(fault.sentence(), is_refusal=fault.is_refusal) from None
    except ShardflowError as error:
        watch.bye("failed", text=error.message, is_refusal=isinstance(error, REFUSALS))
        raise
    except BaseException as error:
        watch.bye("failed", text=describe_exception(error).splitlines()[0])
        raise
    else:
        watch.bye("finished")
    finally:
        watch.close()


def _start(ranks: Ranks, run: Path, lost_s: float) -> RankWatch:
    """Start this rank's side and introduce it to that of rank 0."""
    hosts = ranks.gather_json(socket.gethostname())
    # As little of the network as will do: a run on one machine listens on nothing else.
    address = _LOOPBACK if len(set(hosts)) == 1 else os.environ["MASTER_ADDR"]
    listen = _resolve(address) if ranks.rank == 0 else ""
    watch = RankWatch(
        rank=ranks.rank,
        hang_s=ranks.timeouts.hang_s or 0.0,
        lost_s=lost_s,
        run=run,
        listen=listen,
        token=ranks.from_first(secrets.token_hex(16)),
    )
    # None where rank 0 listens nowhere: each rank is then watched by itself.
    port = ranks.from_first(watch.hub_port(_START_S) if listen else None)
    if ranks.rank > 0 and port is not None:
        watch.report_to(address, port)
    return watch


def _resolve(address: str) -> str:
    """Address to listen on; empty where the rendezvous' name leads nowhere on this machine."""
    try:
        return socket.gethostbyname(address)
    except OSError as error:
        _LOGGER.warning(
            "the rendezvous address must resolve on its own machine, got %s; faults of other ranks are not "
            "named",
            type(error).__name__,
        )
        return ""
