"""Text corpora: packs JSONL and Parquet of any size into a dataset of format 1.

`job` describes the data flow, `config` the settings. Built on the engines, workspace and files of
`shardflow.packing`; knows neither torch nor the loader. Names are imported lazily: a packing process imports
this package before it has taken its limits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.corpora.job import CorpusMode, CorpusSummary, pack_corpus

__all__ = [
    "CorpusConfig",
    "CorpusMode",
    "CorpusSummary",
    "pack_corpus",
]
_MODULES: Final = {
    "CorpusConfig": "config",
    "CorpusMode": "job",
    "CorpusSummary": "job",
    "pack_corpus": "job",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
