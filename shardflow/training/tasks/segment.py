"""Task of segmentation: the class of each voxel, from regions of volumes with their masks.

A region's loss is the cross-entropy of its voxels plus one minus the mean soft Dice of its classes; a step's
is the mean over its annotated regions on all ranks. Evaluations run windows over whole volumes and measure
the Dice of each volume once, see `shardflow.training.tasks.scores`.

Source:
    Dice loss: Milletari et al., "V-Net", 3DV 2016; its sum with cross-entropy: Isensee et al., "nnU-Net",
    2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from shardflow.errors import ConfigError
from shardflow.fields.field import Field
from shardflow.fields.types.masks import Mask
from shardflow.fields.volumes.field import BoundVolume, Volume
from shardflow.loading import Batch, Selection
from shardflow.loading.binding import bind_fields
from shardflow.loading.rows.windows import select_windows
from shardflow.sampling import BatchSpec
from shardflow.sampling.spec import Tail
from shardflow.telemetry import StageCounters
from shardflow.training.config import ModelConfig
from shardflow.training.device.volumes import VolumeAugmentation
from shardflow.training.distributed import Ranks
from shardflow.training.model_fields import IMAGE_FIELD, MASK_FIELD, TaskConfig, VolumeAugmentConfig
from shardflow.training.models.building import build_target, freeze
from shardflow.training.models.unet import UNet3d
from shardflow.training.tasks.scores import VolumeMeter
from shardflow.training.tasks.task import ArrayTask, Meter

_SMOOTH: Final = 1e-5
_BESIDE: Final = ("range", "mask")
WINDOW_ARRAYS: Final = ("row", "index", "start", "shape")
"""Arrays of evaluations that say which window of which volume a slot is."""


class SegmentTask(ArrayTask):
    """Segmentation of volumes; see docs/howto/segment-volumes.md.

    Args:
        task: The table ``[task]``.
        model: The table ``[model]``.
        volumes: The field of the volumes and those that are like it, whose channels follow.
        mask: The field of the masks: a plane for each label, or one of all.
        augment: The table ``[augment_volumes]``.
    """

    def __init__(
        self,
        task: TaskConfig,
        model: ModelConfig,
        volumes: Mapping[str, Volume],
        mask: Mask,
        augment: VolumeAugmentConfig,
    ) -> None:
        self._task, self._model, self._augment = task, model, augment
        self._volumes, self._volume = volumes, volumes[IMAGE_FIELD]
        labels = tuple(mask.labels or ())
        self.names: Sequence[str] = labels if mask.merge == "stack" or len(labels) == 1 else ("foreground",)
        """Of the labels; of several that are one plane ``foreground``."""
        self.has_overlaps = task.labels == "multi_label"
        """Whether a voxel may have several labels."""
        self._windows: Selection | None = None

    def settings(self) -> Mapping[str, Any]:
        """Return what a checkpoint must match: model, scale of the image, labels, augmentation."""
        windows = {
            f"fields.{name}.windows": [one if isinstance(one, str) else list(one) for one in volume.windows]
            for name, volume in self._volumes.items()
        }
        return {
            "task.labels": "multi_label" if self.has_overlaps else "multi_class",
            "task.names": list(self.names),
            **windows,
            "augment_volumes.preset": self._augment.preset,
            "augment_volumes.settings": self._augment.settings,
            "model.target": self._model.target,
            "model.arguments": self._model.arguments,
            **({"model.frozen": list(self._model.frozen)} if self._model.frozen else {}),
        }

    # ---- data ------------------------------------------------------------------------------------

    def fields(self, selection: Selection, *, is_evaluation: bool) -> dict[str, Field]:
        """Return the fields of the settings; of an evaluation windows that cover each volume."""
        found = super().fields(selection, is_evaluation=is_evaluation)
        if not is_evaluation:
            return {**found, IMAGE_FIELD: self._region(selection)}
        grid = replace(
            self._volume,
            center="grid",
            overlap=self._task.overlap,
            num_samples=1,
            within=None,
            labels=None,
            pos=1.0,
            neg=1.0,
        )
        return {**found, IMAGE_FIELD: grid}

    def _region(self, selection: Selection) -> Volume:
        """Return the volume to train on: with augmentation stored voxels and the margin that it needs."""
        augmentation, volume = self.augmentation, self._volume
        if augmentation is None:
            return volume
        anywhere = replace(volume, center="random", within=None, labels=None, pos=1.0, neg=1.0)
        _, bound = bind_fields(selection, {IMAGE_FIELD: anywhere}, StageCounters())
        (field,) = bound.bound
        assert isinstance(field, BoundVolume)  # noqa: S101 - of a volume
        return replace(
            volume,
            spacing_mm=None,
            placement="centered",
            margin=augmentation.margin(field.finest_spacing_mm()),
        )

    @property
    def augmentation(self) -> VolumeAugmentation | None:
        """Augmentation of the regions, keyed by the seed of the run."""
        if not self._augment.is_active:
            return None
        volume = self._volume
        return VolumeAugmentation.preset(
            self._augment.preset,
            roi_size=volume.roi_size,
            spacing_mm=volume.spacing_mm,
            interpolation=volume.interpolation,
            seed=self._run.seed,
            **self._augment.settings,
        )

    def evaluation_samples(self, selection: Selection) -> Selection:
        """Return the windows of the volumes of an evaluation split."""
        self._windows = select_windows(selection, self.fields(selection, is_evaluation=True))
        return self._windows

    def batch_spec(self, selection: Selection, tail: Tail | None) -> BatchSpec:
        """Return how steps are formed; windows come in order, so that few volumes are open at a time."""
        spec = super().batch_spec(selection, tail)
        return replace(spec, lanes=0) if "window" in selection.units else spec

    def arrays(self, batch: Batch, *, is_evaluation: bool) -> Mapping[str, NDArray[Any]]:
        """Return regions, masks, and whether somebody looked; of an evaluation also where windows are."""
        mask = batch[MASK_FIELD]
        is_known = (batch[f"{IMAGE_FIELD}_mask"] > 0) & (batch[f"{MASK_FIELD}_mask"] > 0)
        arrays = {
            **{name: batch[name] for name in self._volumes},
            **{f"{name}_{beside}": batch[f"{name}_{beside}"] for name in self._volumes for beside in _BESIDE},
            MASK_FIELD: mask,
            "is_known": is_known & (np.asarray(batch.arrays["weight"]) > 0),
        }
        if is_evaluation:
            arrays["row"] = np.asarray(batch.arrays["row"])
            arrays |= {name: batch[f"{IMAGE_FIELD}_{name}"] for name in WINDOW_ARRAYS[1:]}
        return arrays

    def counts(self, arrays: Mapping[str, NDArray[Any]], num_slots: int) -> NDArray[Any]:  # noqa: ARG002
        """Return 1 for each annotated region."""
        return arrays["is_known"].astype(np.int64)

    def prepare(self, tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Scale the regions to -1 to 1, and of labels that exclude each other make one map of classes."""
        image = torch.cat([self._scaled(name, tensors) for name in self._volumes], dim=1)
        target = mask = tensors[MASK_FIELD]
        if not self.has_overlaps:
            numbers = torch.arange(1, len(self.names) + 1, device=mask.device, dtype=torch.uint8)
            target = (mask * numbers.view(1, -1, 1, 1, 1)).amax(dim=1, keepdim=True)
        kept: dict[str, torch.Tensor] = {name: tensors[name] for name in WINDOW_ARRAYS if name in tensors}
        return {"image": image, "target": target, "is_known": tensors["is_known"].bool(), **kept}

    def _scaled(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the channels of a field from -1 to 1; of a series that a study lacks -1."""
        volume, image = self._volumes[name], tensors[name].float()
        if not volume.windows:
            low, high = tensors[f"{name}_range"].reshape(-1, 2, 1, 1, 1, 1).unbind(dim=1)
            image = ((image - low) / torch.where(high > low, high - low, torch.ones_like(low))).clamp(0, 1)
        elif volume.dtype == "uint8":
            image = image / 255
        is_there = tensors[f"{name}_mask"].reshape(-1, 1, 1, 1, 1) > 0
        return torch.where(is_there, image * 2 - 1, torch.full_like(image, -1))

    # ---- model -----------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """Logits of a voxel: with labels that exclude each other also one of the background, the first."""
        return len(self.names) + (not self.has_overlaps)

    def build_model(self, example: Batch) -> nn.Module:
        """Build the model that the settings name, or the small one."""
        if self._model.target:
            model = build_target(self._model)
        else:
            num_channels = sum(example[name].shape[1] for name in self._volumes)
            model = UNet3d(num_channels, self.num_outputs)
        freeze(model, self._model.frozen)
        return model

    def forward(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits of each voxel, ``(B, num_outputs, D, H, W)``."""
        image = tensors["image"]
        found = model(image)
        wanted = (len(image), self.num_outputs, *image.shape[2:])
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != wanted:
            shown = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            what = "one of each label" if self.has_overlaps else "the background and each label"
            raise ConfigError(
                f"model.target must return logits {wanted} ({what}), got {shown}; set the numbers of "
                "channels in [model.arguments], and sides of fields.image.roi_size that the model divides."
            )
        return found

    def losses(self, output: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return cross-entropy plus Dice loss of each region; 0 where nobody looked."""
        logits = output if output.dtype == torch.float64 else output.float()
        target = tensors["target"]
        if self.has_overlaps:
            wanted = target.to(logits.dtype)
            entropy = (
                functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
                .flatten(1)
                .mean(1)
            )
            shares = logits.sigmoid()
        else:
            classes = torch.arange(self.num_outputs, device=target.device, dtype=target.dtype)
            whole = (target == classes.view(1, -1, 1, 1, 1)).to(logits.dtype)
            # Sums of products, as gathering by class adds in no fixed order on a GPU.
            logs = functional.log_softmax(logits, dim=1)
            entropy = -(logs * whole).sum(dim=1).flatten(1).mean(1)
            shares, wanted = logs.exp()[:, 1:], whole[:, 1:]
        both = (shares * wanted).flatten(2).sum(2)
        each = shares.flatten(2).sum(2) + wanted.flatten(2).sum(2)
        found = entropy + 1 - ((2 * both + _SMOOTH) / (each + _SMOOTH)).mean(1)
        return torch.where(tensors["is_known"], found, torch.zeros_like(found))

    # ---- metrics ---------------------------------------------------------------------------------

    def meter(self, ranks: Ranks) -> Meter:
        """Return a collector of the Dice of whole volumes."""
        assert self._windows is not None  # noqa: S101 - an evaluation has samples
        return VolumeMeter(self, self._windows, ranks, roi_size=self._volume.roi_size, mode=self._task.mode)
