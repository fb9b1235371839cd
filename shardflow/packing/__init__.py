"""Packing: DICOM studies and reports in, a dataset of format 1 out; resumable, with any number of processes.

`job` describes the data flow, `config` the settings. Knows the sources and the format, never torch or the
loader. Names are imported lazily: a packing process imports this package before it has taken its limits, and
must not load a decoder by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.packing.config import PackConfig
    from shardflow.packing.job import PackMode, pack
    from shardflow.packing.progress import Progress, SilentProgress
    from shardflow.packing.publish import PackSummary
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
_SOURCES: Final = {
    "ArrayTask": ".workspace:ArrayTask",
    "PackConfig": ".config:PackConfig",
    "PackMode": ".job:PackMode",
    "PackSummary": ".publish:PackSummary",
    "Progress": ".progress:Progress",
    "SilentProgress": ".progress:SilentProgress",
    "pack": ".job:pack",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
