"""What the doctor looks at, collected once, so that the rules are functions of plain values."""

from __future__ import annotations

import os
import platform
import pyexpat
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from shardflow.telemetry.machine import machine_bytes, num_processors
from shardflow.training.config import TrainConfig

__all__ = ["Surroundings", "look_around"]

_PACKAGES: Final = ("torch", "pydicom", "pylibjpeg-openjpeg", "python-gdcm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """A machine, an environment, and what is to run there."""

    environment: Mapping[str, str] = field(default_factory=dict)
    config: TrainConfig | None = None
    """The run's settings; None where none were given."""
    num_nodes: int = 1
    ranks_per_node: int = 1
    interfaces: tuple[str, ...] = ("lo", "eth0")
    hcas: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters."""
    limits: Mapping[str, int | None] = field(default_factory=dict)
    """Soft limits by name (``nofile``, ``memlock``, ``nproc``); None is unlimited."""
    num_cores: float = 8.0
    """Cores this process may use: of its affinity, and of its cgroup's quota."""
    memory_bytes: int = 64 << 30
    """Memory that the ranks of this machine may fill: of the machine and of the cgroup."""
    shm_bytes: int | None = 32 << 30
    """Size of /dev/shm; None where there is none."""
    free_bytes: Mapping[str, int] = field(default_factory=dict)
    """Free space by what it is for: ``run.output``, ``cache.directory`` (its blocks count as free)."""
    checkpoint_bytes: int | None = None
    """Size of the run's newest checkpoint; None where there is none yet."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of installed packages; those that are absent are left out."""


def look_around(
    config: TrainConfig | None = None,
    *,
    num_nodes: int = 1,
    ranks_per_node: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Surroundings:
    """Collect what the rules look at, on this machine.

    Args:
        config: The run's settings.
        num_nodes: Machines of the job.
        ranks_per_node: Ranks on each; by default the GPUs of this machine, at least one.
        environment: Variables to look at; those of this process by default.
    """
    environment = dict(os.environ if environment is None else environment)
    return Surroundings(
        environment=environment,
        config=config,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node or max(1, len(list(Path("/dev").glob("nvidia[0-9]*")))),
        interfaces=_names(Path("/sys/class/net")),
        hcas=_names(Path("/sys/class/infiniband")),
        limits={
            "nofile": _soft_limit(resource.RLIMIT_NOFILE),
            "memlock": _soft_limit(resource.RLIMIT_MEMLOCK),
            "nproc": _soft_limit(resource.RLIMIT_NPROC),
        },
        num_cores=num_processors(),
        memory_bytes=machine_bytes(),
        shm_bytes=_total_bytes(Path("/dev/shm")),  # noqa: S108 - it is asked for its size
        free_bytes={} if config is None else _free_of(config),
        checkpoint_bytes=None if config is None else _newest_checkpoint_bytes(config.run.output),
        versions=_versions(),
    )


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _total_bytes(folder: Path) -> int | None:
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _free_of(config: TrainConfig) -> dict[str, int]:
    free = {"run.output": _free_bytes(config.run.output)}
    folder = config.cache.directory
    if folder is not None:
        held = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        free["cache.directory"] = _free_bytes(folder) + held
    return free


def _free_bytes(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _newest_checkpoint_bytes(run: Path) -> int | None:
    names = sorted(path for path in (run / "checkpoints").glob("step-*") if path.is_dir())
    return sum(path.stat().st_size for path in names[-1].iterdir()) if names else None


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "expat": ".".join(map(str, pyexpat.version_info)),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
