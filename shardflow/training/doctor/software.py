"""Rules about versions with known holes, and about torchrun's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shardflow.training.doctor.finding import Finding, error, fine, warning
from shardflow.training.doctor.surroundings import Surroundings

__all__ = ["check_software"]

_FLOORS: Final = {
    "torch": ("2.10.0", "CVE-2026-24747: a stranger's checkpoint corrupts the heap, weights_only or not"),
    "pydicom": ("3.0.2", "CVE-2026-32711: a DICOMDIR leads out of its folder"),
}
"""Package: first sound version, and what is wrong below it. pydicom 2.4.5 is sound too, but too old."""
_NO_SOUND_RELEASE: Final = {
    "pylibjpeg-openjpeg": (
        "OSV-2025-219 in the OpenJPEG that it bundles: a heap overflow while decoding",
        "decode JPEG 2000 of others in packing alone: its processes may be killed",
    ),
    "python-gdcm": (
        "CVE-2026-3650: one malformed file fills the memory",
        "uninstall it: shardflow does not use it",
    ),
}
_EXPAT: Final = "2.6.0"
_STALE: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LEAST_SHUTDOWN_S: Final = 30


def check_software(around: Surroundings) -> Iterator[Finding]:
    """Check versions, and what torchrun is told by variables."""
    yield from _versions(around)
    yield from _launcher(around)


def _versions(around: Surroundings) -> Iterator[Finding]:
    for package, (floor, hole) in _FLOORS.items():
        found = around.versions.get(package)
        if found is None:
            continue
        if _numbers(found) < _numbers(floor):
            yield error(package, f"be at least {floor} ({hole})", found, f"pip install '{package}>={floor}'")
        else:
            yield fine(package, f"be at least {floor}", found)
    for package, (hole, fix) in _NO_SOUND_RELEASE.items():
        if package in around.versions:
            yield warning(package, f"be free of {hole}", around.versions[package], fix)
    expat = around.versions.get("expat")
    if expat is not None and _numbers(expat) < _numbers(_EXPAT):
        yield warning(
            "expat",
            f"be at least {_EXPAT} (one large token takes quadratic time)",
            expat,
            "take a newer Python; shardflow refuses DTDs and entities by itself",
        )


def _launcher(around: Surroundings) -> Iterator[Finding]:
    environment = around.environment
    is_started = "TORCHELASTIC_RUN_ID" in environment
    stale = [name for name in _STALE if name in environment]
    if stale and not is_started:
        yield warning(
            ", ".join(stale),
            "be set by torchrun alone",
            "them set already, as by another launcher or an older shell",
            f"unset {' '.join(stale)}",
        )
    restarts = environment.get("PET_MAX_RESTARTS", "0")
    shared = environment.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    if restarts.isdigit() and int(restarts) > 0 and shared != "1":
        yield error(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
            "be 1 where torchrun restarts ranks (pytorch #135712)",
            "it unset: the first restart after a kill fails",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or start shardflow train",
        )
    timeout = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) < _LEAST_SHUTDOWN_S:
        yield warning(
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            f"be at least {_LEAST_SHUTDOWN_S}: a step and a checkpoint must fit in before SIGKILL",
            timeout,
            "raise it, and the scheduler's grace time with it",
        )
    config = around.config
    world_size = around.num_nodes * around.ranks_per_node
    if config is not None:
        steps = config.batch.micro_batches_per_step
        must = f"be at most batch.micro_batches_per_step ({steps}), and divide it"
        if world_size > steps:
            yield error("ranks", must, str(world_size), "start fewer, or raise it for a new run")
        elif steps % world_size:
            share = steps / (-(-steps // world_size) * world_size)
            yield warning(
                "ranks", must, f"{world_size}: {1 - share:.0%} of the work are fillers", "start a divisor"
            )
        else:
            yield fine("ranks", must, str(world_size))


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` as numbers that compare."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
