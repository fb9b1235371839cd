"""Text corpora: packs JSONL and Parquet of any size into a dataset of format 1.

`job` describes the data flow, `config` the settings. Built on the engines, workspace and files of
`shardflow.packing`; knows neither torch nor the loader. Names are imported lazily: a packing process imports
this package before it has taken its limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shardflow._lazy import lazy_names

if TYPE_CHECKING:
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.corpora.job import CorpusMode, CorpusSummary, pack_corpus

__all__ = [
    "CorpusConfig",
    "CorpusMode",
    "CorpusSummary",
    "pack_corpus",
]
_SOURCES: Final = {
    "CorpusConfig": ".config:CorpusConfig",
    "CorpusMode": ".job:CorpusMode",
    "CorpusSummary": ".job:CorpusSummary",
    "pack_corpus": ".job:pack_corpus",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _SOURCES)
