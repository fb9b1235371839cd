"""A Ray cluster of virtual machines on this one, for tests; started and ended by the test that asks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

__all__ = ["actors", "descendants", "foreign_listeners", "packing_workers", "ray_cluster"]


@contextmanager
def ray_cluster(folder: Path, *, num_nodes: int, num_cpus: int = 1) -> Iterator[Any]:
    """Start a cluster whose logs go into ``folder``, which must have a short path."""
    settings = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    former = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    (folder / "ray").mkdir()
    cluster: Any = Cluster()
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=num_cpus, object_store_memory=80 << 20, include_dashboard=False)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def foreign_listeners(pids: set[int]) -> list[str]:
    """Addresses other than the loopback's on which the processes listen, from /proc."""
    listening = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                listening[fields[9]] = fields[1].split(":")[0]
    found = []
    for pid in pids:
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
                    if match and match[1] in listening:
                        found.append(listening[match[1]])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    return [address for address in found if address not in loopback]


def descendants(pid: int) -> set[int]:
    """Process ids of the children of a process, and of theirs."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        with suppress(OSError):
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                children = {int(child) for child in (task / "children").read_text(encoding="ascii").split()}
                waiting += children - found
                found |= children
    return found


def packing_workers(pid: int) -> set[int]:
    """Ray workers that hold a packing process, below a process."""
    return actors(pid, "PackingWorker")


def actors(pid: int, name: str) -> set[int]:
    """Ray workers that hold an actor of a class, below a process."""
    found = set()
    for child in descendants(pid):
        with suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(f"ray::{name}".encode()):
                found.add(child)
    return found
