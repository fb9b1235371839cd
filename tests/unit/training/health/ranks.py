"""A rank without a model, for tests: ``python -m tests.unit.training.health.ranks RANK FOLDER``.

Says ``{"port": N}`` once it is watched, then does what it is told, a JSON object a line: ``port`` (report
there), ``hold`` (the interpreter's lock, for ever), ``stick`` (in a phase), ``bye`` (and end).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from shardflow.training.health.monitor import RankHealthMonitor

# Of a loaded machine, where a sound rank may get no processor for some seconds.
HANG_S = 12.0
WHERE = "stage read of shard train-000003, tier remote for 9.0 s"


def main() -> None:
    logging.basicConfig(format="%(message)s")
    rank, run = int(sys.argv[1]), Path(sys.argv[2])
    listen = "127.0.0.1" if rank == 0 else ""
    monitor = RankHealthMonitor(
        rank=rank, hang_s=HANG_S, lost_s=HANG_S, run=run, listen=listen, token="secret", grace_s=0.5
    )
    # A signal to a rank's whole group may come when its side has hardly begun: it is none of the side's.
    for side in sides_of(os.getpid()):
        os.kill(side, signal.SIGTERM)
    monitor.enter("step 7, computing")
    if rank == 0:
        say({"port": monitor.hub_port(60.0)})
    for line in sys.stdin:
        order = json.loads(line)
        if "port" in order:
            monitor.report_to("127.0.0.1", order["port"])
            say({})
        elif "hold" in order:
            hold_the_interpreter()
        elif "stick" in order:
            monitor.enter("step 8, waiting for data", 1.0, describe=lambda: WHERE)
            time.sleep(3600)
        else:
            monitor.report_end(order["bye"], text="the reason")
            monitor.close()
            return


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def hold_the_interpreter() -> None:
    """Compute in C for hours without letting another thread in."""
    sum(range(10**15))


def sides_of(pid: int) -> list[int]:
    """Processes beside a rank."""
    return [int(side) for side in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def port_of(pid: int) -> int:
    """Port that the side of a process listens on."""
    for side in sides_of(pid):
        sockets = {
            link.readlink().name.removeprefix("socket:[").removesuffix("]")
            for link in Path(f"/proc/{side}/fd").iterdir()
            if link.readlink().name.startswith("socket:")
        }
        for line in Path(f"/proc/{side}/net/tcp").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in sockets:
                return int(columns[1].split(":")[1], 16)
    raise AssertionError("the side listens on no port")


if __name__ == "__main__":
    main()
