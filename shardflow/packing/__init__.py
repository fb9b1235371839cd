"""Packing: DICOM studies and reports in, a dataset of format 1 out; resumable, with any number of processes.

`job` describes the data flow, `config` the settings. Knows the sources and the format, never torch or the
loader. Names are imported lazily: a packing process imports this package before it has taken its limits, and
must not load a decoder by then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.job import PackMode, pack
    from shardflow.packing.progress import Progress, SilentProgress
    from shardflow.packing.summary import PackSummary
    from shardflow.packing.workspace import ArrayTask

__all__ = [
    "ArrayTask",
    "PackConfig",
    "PackMode",
    "PackSummary",
    "Progress",
    "SilentProgress",
    "pack",
]
_MODULES: Final = {
    "PackConfig": "shardflow.packing.config",
    "PackMode": "shardflow.packing.job",
    "PackSummary": "shardflow.packing.summary",
    "Progress": "shardflow.packing.progress",
    "ArrayTask": "shardflow.packing.workspace",
    "SilentProgress": "shardflow.packing.progress",
    "pack": "shardflow.packing.job",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
