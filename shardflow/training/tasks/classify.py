"""Task of classes: from an image to yes-or-no answers, or to one of several classes.

Labels come from a field of columns; one that is missing, or that the settings ignore, is masked by its own
mask, so a sample may be labeled for some questions only. A step's loss is the sum over labels, divided by
their number over all ranks; labels and the number of the model's outputs are checked before the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from shardflow.errors import ConfigError, TrainingError
from shardflow.fields.field import Field
from shardflow.fields.types.columns import Column, Columns
from shardflow.fields.types.pixel_field import PixelField
from shardflow.format.facts.columns import open_columns
from shardflow.loading import Batch, Loader, Selection
from shardflow.training.config import ImageConfig, ModelConfig
from shardflow.training.device.images import ImagePipeline
from shardflow.training.inputs import ImageMaker, image_arrays
from shardflow.training.model_fields import IMAGE_FIELD, LABEL_FIELD, AugmentConfig, TaskConfig
from shardflow.training.models.building import build_target, freeze
from shardflow.training.tasks.report import image_bindings
from shardflow.training.tasks.scores import binary_metrics, multi_class_metrics, multi_label_metrics
from shardflow.training.tasks.task import ArrayTask, Scores

_LOGGER = logging.getLogger(__name__)
_BLOCK = 1 << 20
_SHOWN_VALUES = 5
_WIDTHS = (16, 32, 64)
_GROUPS = 8

Kind = Literal["binary", "multi_label", "multi_class"]


class SmallConvNet(nn.Sequential):
    """Convolutional network of six layers, for images of some 32 to 256 pixels; nothing depends on the batch.

    Args:
        num_channels: Of its images.
        num_outputs: Logits of each.
    """

    def __init__(self, num_channels: int, num_outputs: int) -> None:
        layers: list[nn.Module] = []
        for width in _WIDTHS:
            layers += [
                nn.Conv2d(num_channels, width, 3, padding=1, bias=False),
                nn.GroupNorm(_GROUPS, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(_GROUPS, width),
                nn.ReLU(),
            ]
            num_channels = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_channels, num_outputs))


class ClassifyTask(ArrayTask):
    """Classifier of images; see docs/howto/classify.md.

    Args:
        task: The table ``[task]``.
        model: The table ``[model]``.
        images: The field of the images.
        image: The table ``[image]``.
        augment: The table ``[augment]``.
        has_transform: Whether labels may change on their way, so that the stored ones need not fit.
    """

    def __init__(
        self,
        task: TaskConfig,
        model: ModelConfig,
        images: PixelField,
        image: ImageConfig,
        augment: AugmentConfig,
        *,
        has_transform: bool,
        seed: int,
    ) -> None:
        self._task, self._model, self._images, self._image = task, model, images, image
        self._augment, self._has_transform = augment, has_transform
        pipeline: Any = ImagePipeline(image.rows, image.columns)
        self._maker = ImageMaker(
            pipeline=torch.compile(pipeline, fullgraph=True) if image.compile else pipeline,
            size=(image.rows, image.columns),
            standardized=image.standardize,
            augment=augment,
            seed=seed,
        )
        self.kind: Kind = "binary"
        self.names: Sequence[str] = ()
        """Of the questions, or of the classes."""

    def settings(self) -> Mapping[str, Any]:
        """Return what a checkpoint must match: model, images, labels."""
        found: dict[str, Any] = {"task.labels": self._task.labels, "task.ignore": list(self._task.ignore)}
        for table, value in (("image", self._image), ("augment", self._augment)):
            for name, one in asdict(value).items():
                found[f"{table}.{name}"] = list(one) if isinstance(one, tuple) else one
        del found["image.compile"]
        found |= image_bindings(self._images)
        found |= {"model.target": self._model.target, "model.arguments": self._model.arguments}
        return found | ({"model.frozen": list(self._model.frozen)} if self._model.frozen else {})

    def fields(self, selection: Selection, *, is_evaluation: bool) -> dict[str, Field]:
        """Return the fields of the settings, with images of the channels that the model takes."""
        found = super().fields(selection, is_evaluation=is_evaluation)
        images: Any = found[IMAGE_FIELD]
        return {**found, IMAGE_FIELD: replace(images, channels=self._images.channels)}

    # ---- labels ----------------------------------------------------------------------------------

    def check(self, loader: Loader, evaluation: Selection | None, example: Batch) -> None:
        """Find what kind of labels there are, and refuse what does not fit.

        Raises:
            ConfigError: Their type, their values or their number.
        """
        field, values, info = loader.fields[LABEL_FIELD], example[LABEL_FIELD], example.info
        classes = info.classes.get(LABEL_FIELD, ())
        columns = list(info.columns.get(LABEL_FIELD, ()))
        if isinstance(field, Columns):
            names = [name.rpartition(".")[2] for name in columns]
            self._choose("multi_label", ("multi_label",), "several columns")
            if any(f"{LABEL_FIELD}.{name}" in info.classes for name in names):
                raise ConfigError(
                    "fields.label has columns of categories, but the labels of several columns are 0 and 1; "
                    "name columns of numbers, or one column of categories."
                )
            self.names = names if len(set(names)) == len(names) else columns
        else:
            assert isinstance(field, Column)  # noqa: S101 - checked when the settings were read
            columns = [field.column]
            if values.ndim > 1:
                raise ConfigError(
                    f"fields.label: {field.column} holds lists of numbers, which are no labels; name a "
                    "column of numbers or categories."
                )
            what = "a column of categories" if classes else "a column of numbers"
            self._choose("multi_class" if classes else "binary", ("binary", "multi_class"), what)
            self.names = tuple(classes) or (field.column,)
        self._check_values(loader.selection, evaluation, columns, classes)

    def _check_values(
        self,
        training: Selection,
        evaluation: Selection | None,
        columns: Sequence[str],
        classes: Sequence[str],
    ) -> None:
        if self._has_transform:
            if self.kind == "multi_class" and not classes:
                raise ConfigError(
                    "task.labels 'multi_class' of numbers does not go with data.transform, as their number "
                    "is not known; attach the column with --type COLUMN=category."
                )
            return
        num_labels, largest = self._survey(training, columns, has_classes=bool(classes))
        if not num_labels.sum():
            raise ConfigError(
                f"No sample of the training split has a label: {', '.join(columns)} is missing in all of them"
                f"{' or in task.ignore' if self._task.ignore else ''}; attach labels of these samples, or "
                "choose another split."
            )
        for name, number in zip(self.names, num_labels.tolist(), strict=False):
            if not number and self.kind == "multi_label":
                _LOGGER.warning("no sample of the training split has a label of %s", name)
        if self.kind == "multi_class" and not classes:
            self.names = [str(number) for number in range(largest + 1)]
        if self.kind == "binary" and classes and len(classes) != 2:
            raise ConfigError(
                f"task.labels 'binary' needs two classes, but {columns[0]} has {len(classes)} "
                f"({_shown(classes)}); set 'multi_class'."
            )
        if evaluation is not None:
            _, other = self._survey(evaluation, columns, has_classes=bool(classes))
            if self.kind == "multi_class" and other >= len(self.names):
                raise ConfigError(
                    f"{columns[0]} has the class {other} in the evaluation split, but the training split has "
                    f"none above {len(self.names) - 1}; choose other splits."
                )

    def _choose(self, found: Kind, possible: Sequence[Kind], what: str) -> None:
        wanted = self._task.labels
        self.kind = found if wanted == "auto" else wanted
        if self.kind not in possible:
            raise ConfigError(
                f"task.labels is {wanted!r}, but fields.label is {what}, which gives "
                f"{' or '.join(map(repr, possible))} labels; correct one of them."
            )

    def _survey(
        self, selection: Selection, columns: Sequence[str], *, has_classes: bool
    ) -> tuple[NDArray[np.int64], int]:
        """Return the number of labels of each column, and the largest label; refuse what is none."""
        counts, largest = np.zeros(len(columns), np.int64), 0
        for component, dataset in enumerate(selection.datasets):
            opened = open_columns(dataset)
            rows = np.flatnonzero(selection.population_of(component))
            for place, name in enumerate(columns):
                for start in range(0, len(rows), _BLOCK):
                    found = opened.gather(name, rows[start : start + _BLOCK])
                    values = found.values if found.is_missing is None else found.values[~found.is_missing]
                    if has_classes:
                        counts[place] += len(values)
                        continue
                    values = values.astype(np.float64)
                    values = values[~np.isin(values, self._task.ignore)]
                    counts[place] += len(values)
                    largest = max(largest, int(self._checked(values, name).max(initial=0)))
        return counts, largest

    def _checked(self, values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        if self.kind == "multi_class":
            is_good, wanted = (values >= 0) & (values == np.floor(values)), "whole numbers from 0"
        else:
            is_good, wanted = np.isin(values, (0, 1)), "0 and 1"
        if not is_good.all():
            shown = ", ".join(f"{one:g}" for one in np.unique(values[~is_good])[:_SHOWN_VALUES])
            raise ConfigError(
                f"{name} has values that are no labels ({shown}); {self.kind} labels are {wanted}: name "
                "another column, or list values that count as missing in task.ignore."
            )
        return values

    def arrays(self, batch: Batch, *, is_evaluation: bool) -> Mapping[str, NDArray[Any]]:
        """Return the images in stored units and the labels with their mask, ``(B, n)``."""
        num_slots = batch.num_slots
        labels = np.asarray(batch[LABEL_FIELD]).reshape(num_slots, -1)
        is_known = np.asarray(batch[f"{LABEL_FIELD}_mask"]).reshape(num_slots, -1) > 0
        if self._task.ignore:
            is_known &= ~np.isin(labels, self._task.ignore)
        is_known &= np.asarray(batch.arrays["weight"])[:, None] > 0
        labels = np.where(is_known, labels, 0)
        num_classes = len(self.names) if self.kind == "multi_class" else 2
        if ((labels < 0) | (labels >= num_classes) | (labels != np.floor(labels))).any():
            raise TrainingError(
                f"data.transform returned labels that are not whole numbers from 0 to {num_classes - 1}; "
                "correct it, or mask them in label_mask."
            )
        maker = replace(self._maker, augment=None) if is_evaluation else self._maker
        return {
            **image_arrays(batch),
            **maker.arrays(batch, [""] * num_slots),
            "labels": labels.astype(np.int64),
            "is_known": is_known,
        }

    def counts(self, arrays: Mapping[str, NDArray[Any]], num_slots: int) -> NDArray[Any]:  # noqa: ARG002
        """Return the number of labels of each sample."""
        counts: NDArray[Any] = arrays["is_known"].sum(axis=1)
        return counts

    # ---- model -----------------------------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """Logits of an image."""
        return 1 if self.kind == "binary" else len(self.names)

    def build_model(self, example: Batch) -> nn.Module:
        """Build the model that the settings name, or the small one."""
        settings = self._model
        if settings.target:
            model = build_target(settings)
        else:
            model = SmallConvNet(image_arrays(example)["image"].shape[1], self.num_outputs)
        freeze(model, settings.frozen)
        return model

    def prepare(self, tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Resize, window and augment the images, in float32, -1 to 1 over their display range."""
        images = self._maker.images(tensors, tensors["slice_mask"].bool())
        return {"image": images, "labels": tensors["labels"], "is_known": tensors["is_known"].bool()}

    def forward(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits, ``(B, num_outputs)``; of transformers' models those of their output."""
        found = model(tensors["image"])
        logits = found if isinstance(found, torch.Tensor) else getattr(found, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise ConfigError(
                f"model.target must return logits or something that has them, got {type(found).__name__}; "
                "write a function that does."
            )
        num_slots = len(tensors["labels"])
        if logits.shape == (num_slots,):
            logits = logits[:, None]
        if logits.shape != (num_slots, self.num_outputs):
            shown = ", ".join(self.names[:_SHOWN_VALUES]) + (
                ", ..." if len(self.names) > _SHOWN_VALUES else ""
            )
            raise ConfigError(
                f"the model returns logits of shape {tuple(logits.shape)} for {num_slots} images, but "
                f"{self.kind} labels need {self.num_outputs} of each ({shown}); set the number of classes in "
                "[model.arguments]."
            )
        return logits

    def losses(self, output: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of the labels of each sample; of what has none it is 0."""
        logits = output if output.dtype == torch.float64 else output.float()
        labels, is_known = tensors["labels"], tensors["is_known"]
        if self.kind == "multi_class":
            found = functional.cross_entropy(logits, labels[:, 0], reduction="none")[:, None]
        else:
            found = functional.binary_cross_entropy_with_logits(
                logits, labels.to(logits.dtype), reduction="none"
            )
        return torch.where(is_known, found, torch.zeros_like(found)).sum(dim=1)

    # ---- metrics ---------------------------------------------------------------------------------

    def scores(self, output: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return logits, labels and which of them are known."""
        return {"logits": output, "labels": tensors["labels"], "is_known": tensors["is_known"]}

    def metrics(self, scores: Scores) -> Mapping[str, float | None]:
        """Compute AUROC, average precision, accuracy and calibration error."""
        logits, labels, is_known = scores["logits"], scores["labels"], scores["is_known"] > 0
        if self.kind == "multi_label":
            return multi_label_metrics(logits, labels, is_known, self.names)
        known = is_known[:, 0]
        if self.kind == "binary":
            return binary_metrics(logits[known, 0], labels[known, 0] > 0)
        return multi_class_metrics(logits[known], labels[known, 0].astype(np.int64), self.names)


def _shown(names: Sequence[str]) -> str:
    rest = [] if len(names) <= _SHOWN_VALUES else ["..."]
    return ", ".join([*names[:_SHOWN_VALUES], *rest])
