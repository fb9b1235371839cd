"""The whole configuration of a run, and what settings of different tables must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardflow.errors import ConfigError
from shardflow.storage import CacheConfig
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

__all__ = ["TrainConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Every setting of a training job."""

    data: DataSettings
    batch: BatchSettings
    text: TextSettings
    run: RunSettings
    image: ImageSettings = field(default_factory=ImageSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    cache: CacheConfig = field(default_factory=CacheConfig)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    tune: TuneSettings = field(default_factory=TuneSettings)

    def __post_init__(self) -> None:
        self._keep_folders_apart()
        if self.image.augment_pool and self.augment.is_active:
            raise ConfigError(
                "image.augment_pool must be 0 with [augment], got both: a sample would be turned twice, "
                "beyond what its modality allows; leave out one."
            )
        for name in ("rows", "columns"):
            size, patch = getattr(self.image, name), self.model.patch_size
            if size % patch and self.model.path is None:
                raise ConfigError(
                    f"image.{name} must be a multiple of model.patch_size ({patch}), got {size}; "
                    f"use {patch * max(1, round(size / patch))}."
                )
        if self.batch.packed and self.model.path is not None:
            raise ConfigError(
                "batch.packed must be false with model.path, got true; the reference model alone packs."
            )
        if self.model.path is not None and (self.image.sizes or self.image.max_tiles):
            raise ConfigError(
                "image.sizes and image.max_tiles must be left out with model.path, got one; that model takes "
                "one number of slices."
            )
        if self.loader.wait_timeout_s >= self.timeouts.steady_s:
            # Else the ranks that wait in the gradient exchange give up first, and the message names no shard.
            raise ConfigError(
                f"loader.wait_timeout_s must be less than timeouts.steady_s ({self.timeouts.steady_s:g}), "
                f"got {self.loader.wait_timeout_s:g}; lower it, or raise timeouts.steady_s."
            )
        if self.cache.is_on and self.cache.wait_s >= self.loader.wait_timeout_s:
            # A block that another rank fetches is fetched again before the loader gives up on it.
            raise ConfigError(
                f"cache.wait_s must be less than loader.wait_timeout_s ({self.loader.wait_timeout_s:g}), got "
                f"{self.cache.wait_s:g}; lower it, or raise loader.wait_timeout_s."
            )
        if self.run.evaluate_every_steps and not self.data.eval_split:
            raise ConfigError(
                "data.eval_split must name a split where run.evaluate_every_steps is set, got an empty text; "
                "name one, or remove evaluate_every_steps."
            )

    def _keep_folders_apart(self) -> None:
        """Refuse to write into the dataset, or a run and a cache into one folder."""
        dataset, output, cache = self.data.dataset, self.run.output, self.cache.directory
        # An address has no folders in it.
        for name, folder in (("run.output", output), ("cache.directory", cache)):
            if folder is not None and folder.is_relative_to(dataset):
                raise ConfigError(
                    f"{name} must lie outside data.dataset, got a folder in it; choose a folder of its own."
                )
        if cache is not None and output.is_relative_to(cache):
            raise ConfigError(
                "run.output must lie outside cache.directory, got a folder in it; choose another one for the "
                "cache, on a disk of the node."
            )
