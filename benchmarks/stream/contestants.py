"""Who takes part, in which workload, and where its loop is: a module each, for its own environment."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.stream.records import Loop

__all__ = ["CONTESTANTS", "PEERS", "RESUMED_PEERS", "loop", "prepare"]

PEERS = ("webdataset", "mosaic", "litdata", "energon")
RESUMED_PEERS = tuple(f"{peer}_resumed" for peer in PEERS)
_OURS = ("shardflow", "shardflow_process", "shardflow_resumed")
CONTESTANTS = {
    "ct": ("limit", *_OURS, *PEERS, *RESUMED_PEERS, "webdataset_png", "dicom"),
    "cxr": ("limit", *_OURS, *PEERS),
    "gray": ("limit", "shardflow", *PEERS),
    "text": ("shardflow_tokens", "shardflow_tokens_resumed", "shardflow", *PEERS, "litdata_typed"),
}
_MODULES = {"shardflow": "ours", "limit": "limit", "dicom": "loose_dicom"}


def loop(name: str, workload: str, folder: Path, num_workers: int) -> Loop:
    """Return a contestant's loop over a workload's records: ``mosaic_resumed`` is the peer's ``resumed``."""
    module, _, function = name.partition("_")
    found: Callable[[str, Path, int], Loop] = getattr(_module(module), function or "loop")
    return found(workload, folder, num_workers)


def prepare(peer: str, workload: str, folder: Path) -> None:
    """Write a workload's records in a peer's format, beside ours."""
    _module(peer).prepare(workload, folder)


def _module(name: str) -> ModuleType:
    return import_module(f"benchmarks.stream.{_MODULES.get(name, f'peer_{name}')}")
