"""The samples of a run: a dataset with its splits, or a blend of several, at the versions it began with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.epochs.component_state import components_from_json
from shardflow.errors import ConfigError
from shardflow.loading import Selection, open_blend, open_view, select
from shardflow.loading.blend_file import evaluation_blend
from shardflow.shards import Dataset
from shardflow.shards.manifest import versions
from shardflow.storage import CacheConfig, LocalStore
from shardflow.training.config import DataSettings

__all__ = ["TrainingData", "open_data"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """What a run reads."""

    training: Selection
    evaluation: Selection | None
    """None where nothing is measured."""

    def check_modalities(self, name: str, wanted: Sequence[str]) -> None:
        """Refuse modalities that no sample has: a mistyped one would go without a word.

        Args:
            name: Of the setting.
            wanted: DICOM modalities that it holds.
        """
        selections = [self.training, *([self.evaluation] if self.evaluation else [])]
        known = {
            modality
            for selection in selections
            for dataset in selection.datasets
            for modality in dataset.samples.modalities
            if modality
        }
        for modality in wanted:
            if modality not in known:
                raise ConfigError(
                    f"{name} must hold modalities of the data ({', '.join(sorted(known))}), got "
                    f"{modality!r}; correct it."
                )


def open_data(
    settings: DataSettings, saved: Mapping[str, Any] | None, *, cache: CacheConfig | None = None
) -> TrainingData:
    """Open what a run trains on and is measured on.

    Args:
        settings: The table ``[data]``.
        saved: The loader state of the checkpoint that the run goes on from.
        cache: The table ``[cache]``.

    Raises:
        ConfigError: There is no dataset or blend, a split is missing, or no sample is left.
    """
    if settings.is_blend:
        return _open_blend(settings, saved, cache)
    if "://" not in settings.dataset and not Path(settings.dataset).is_dir():
        raise ConfigError(
            "data.dataset must be an existing folder, an address or a blend file, got none; correct it, or "
            "make one with: shardflow pack."
        )
    if "://" not in settings.dataset:
        _check_manifest(settings)
    version = settings.manifest_version
    if version is None and saved is not None:
        # A newer manifest is adopted on purpose only: it has other samples, so another plan. A blend's state
        # has 0 here; it is refused later, by its components.
        version = saved["manifest_version"] or None
    dataset = open_view(Dataset.open(settings.dataset, version=version, cache=cache), settings.view)
    for key, split in (("train_split", settings.train_split), ("eval_split", settings.eval_split)):
        if split and not set(split.split("+")) <= set(dataset.splits):
            known = ", ".join(sorted(dataset.splits))
            raise ConfigError(
                f"data.{key} must be a split of the dataset ({known}), got {split!r}; correct it."
            )
    return TrainingData(
        training=select(dataset, settings.train_split, settings.terms),
        evaluation=select(dataset, settings.eval_split) if settings.eval_split else None,
    )


def _check_manifest(settings: DataSettings) -> None:
    """Tell a wrong setting from a damaged dataset: the second is no matter of settings."""
    found = versions(LocalStore(settings.dataset))
    if not found:
        raise ConfigError(
            "data.dataset must be a packed dataset, got a folder without a manifest; correct the path, or "
            "let its packing finish."
        )
    wanted = settings.manifest_version
    if wanted is not None and wanted not in found:
        raise ConfigError(
            f"data.manifest_version must be one of the dataset's ({', '.join(map(str, found))}), got "
            f"{wanted}; correct it."
        )


def _open_blend(
    settings: DataSettings, saved: Mapping[str, Any] | None, cache: CacheConfig | None
) -> TrainingData:
    pinned = None
    if saved is not None:
        pinned = [state.manifest_version for state in components_from_json(saved.get("components", []))]
    blend = open_blend(settings.dataset, versions=pinned, cache=cache)
    return TrainingData(
        training=blend,
        evaluation=evaluation_blend(blend, settings.eval_split) if settings.eval_split else None,
    )
