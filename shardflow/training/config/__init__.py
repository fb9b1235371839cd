"""Settings of a training run: one frozen dataclass, one table of the TOML file for each part.

Owns the names, defaults and ranges of every setting of ``shardflow train``; a module for each area, and the
whole in ``whole``. Does not read files (that is ``shardflow.configs``) and imports no torch, so that a wrong
setting is reported before seconds of imports.
Invariant: an instance that exists is consistent; what two tables must agree on is checked at the top.
"""

from __future__ import annotations

from shardflow.training.config.augment import AugmentSettings
from shardflow.training.config.batch import BatchSettings
from shardflow.training.config.data import DataSettings, ImageSettings, TextSettings
from shardflow.training.config.model import LoraSettings, ModelSettings
from shardflow.training.config.monitor import MonitorSettings
from shardflow.training.config.optimizer import OptimizerSettings
from shardflow.training.config.parallel import ParallelSettings
from shardflow.training.config.run import RunSettings
from shardflow.training.config.tune import TuneSettings
from shardflow.training.config.waiting import LoaderSettings, TimeoutSettings
from shardflow.training.config.whole import TrainConfig

__all__ = [
    "AugmentSettings",
    "BatchSettings",
    "DataSettings",
    "ImageSettings",
    "LoaderSettings",
    "LoraSettings",
    "ModelSettings",
    "MonitorSettings",
    "OptimizerSettings",
    "ParallelSettings",
    "RunSettings",
    "TextSettings",
    "TimeoutSettings",
    "TrainConfig",
    "TuneSettings",
]
