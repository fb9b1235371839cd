"""Tables of the task and of augmentation, and the fields that each task takes; imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from shardflow.config import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.field import Field
from shardflow.fields.registry import type_name
from shardflow.fields.types.columns import Column, Columns
from shardflow.fields.types.masks import Mask
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.pixel_field import PixelField
from shardflow.fields.types.text import Text
from shardflow.fields.types.tokens import Tokens
from shardflow.fields.volumes.augmentation import VolumeAugmentSettings
from shardflow.fields.volumes.field import Volume
from shardflow.format.keys import CONVERSATION_FIELD as STORED_CONVERSATION

IMAGE_FIELD: Final = "image"
REPORT_FIELD: Final = "report"
LABEL_FIELD: Final = "label"
MASK_FIELD: Final = "mask"
CONVERSATION_FIELD: Final = "conversation"
REFERENCE_FIELD: Final = "reference_log_probabilities"
"""Names of the fields that tasks take; the last is made by the task itself."""

_NO_CHANNELS: Final = frozenset({"index", "is_known", "row", "shape", "start", "target"})
"""Names of what a task of segmentation gets beside its channels."""
_MAX_CLASSES: Final = 255
"""A map of classes takes a byte for each voxel, and 0 is the background."""
_OF_TOKENS: Final = ("pretrain", "sft")
_OF_CONVERSATIONS: Final = (*_OF_TOKENS, "dpo", "reward")
_ASSISTANT: Final = "assistant"
_OF_COST_RULES: Final = frozenset(
    {"text_tokens", "over_budget", "image_tokens_per_slice", "counts_delivered"}
)
"""Settings of ``[batch]`` that charge for what no table counts."""
_TAKEN: Final = {
    "labels": ("classify", "segment"),
    "ignore": ("classify",),
    "overlap": ("segment",),
    "mode": ("segment",),
    "beta": ("dpo",),
    "reference": ("dpo",),
}
"""Types that take a setting."""


Share = Annotated[float, Bounds(0.0, 1.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """Augmentation of training images, within the limits of their modality; evaluations use none.

    Each number is drawn anew for each sample of each epoch, keyed by seed, epoch, step, micro-batch and slot.
    """

    rotate_deg: Annotated[float, Bounds(0.0, 180.0)] = 0.0
    """Turned by up to this, either way."""
    zoom: Share = 0.0
    """Enlarged by up to this share, so that a crop fills the frame."""
    shift: Share = 0.0
    """Moved by up to this share of width and height."""
    intensity: Share = 0.0
    """Gain, offset and gamma changed by up to this share; never where intensities are measurements."""
    mirror: Share = 0.0
    """Probability of left and right exchanged; never where the report names a side."""
    flip: Share = 0.0
    """Probability of top and bottom exchanged, where a modality has no top."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_active(self) -> bool:
        """Whether anything is wanted."""
        return self != AugmentConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class VolumeAugmentConfig:
    """Augmentation of the volumes of ``segment`` on the device; evaluations use none.

    The loader then delivers stored voxels with a margin, and the device resamples them once, to
    ``fields.image.roi_size`` and its ``spacing_mm``.
    """

    preset: str = "none"
    """``nnunet``, ``geometry`` or ``strong``, see `shardflow.VolumeAugmentation`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of `shardflow.VolumeAugmentation` that differ from the preset's, such as ``flip_prob = [0.0,
    0.5, 0.5]``."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("roi_size", "spacing_mm", "interpolation"):
            if name in self.settings:
                raise ConfigError(f"settings.{name} follows fields.image.{name}; remove it.")
        VolumeAugmentSettings.preset(self.preset, roi_size=(1, 1, 1), **self.settings)

    @property
    def is_active(self) -> bool:
        """Whether anything is wanted."""
        return self.preset != "none" or bool(self.settings)

    def check(self, volume: Volume) -> None:
        """Refuse volumes that only the loader can resample.

        Raises:
            ConfigError: They are such.
        """
        for name, refused in (("center", "whole"), ("interpolation", "nearest"), ("antialias", True)):
            if self.is_active and getattr(volume, name) == refused:
                raise ConfigError(
                    f"fields.image.{name} = {refused!r} is resampled by the loader, and [augment_volumes] "
                    "resamples on the device; remove one of them."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """What is learned, see docs/howto/classify.md, segment-volumes.md and conversations.md."""

    type: Literal["report", "classify", "segment", "pretrain", "sft", "dpo", "reward"] = "report"
    """``report``: write the report of images. ``classify``: tell the classes of an image; takes the fields
    ``image`` and ``label``, of type ``column`` or ``columns``. ``segment``: tell the class of each voxel;
    takes the fields ``image``, of type ``volume``, and ``mask``, of type ``mask``. The others take the field
    ``conversation``, of that type, and a model of transformers as ``model.path``, or one of your own as
    ``model.target``. ``pretrain``: every token, of documents with text and images or of conversations.
    ``sft``: the words that the field weighs. ``dpo``: prefer the chosen to the rejected conversation of a
    pair, against the model as it was at first. ``reward``: a number for a conversation, higher for the chosen
    of a pair, or without pairs the score that it has."""
    target: str = ""
    """A task of your own in place of these, ``"package.module:Class"`` of an `ArrayTask`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """What it is made with."""
    labels: Literal["auto", "binary", "multi_label", "multi_class"] = "auto"
    """Of ``classify``. ``auto``: a column of categories is ``multi_class``, one of numbers ``binary``,
    several columns are ``multi_label``. Of ``segment``: with ``multi_class`` (``auto``) a voxel has one class
    at most, the last of ``fields.mask.labels`` where several are marked; with ``multi_label`` they
    overlap."""
    ignore: tuple[float, ...] = ()
    """Of ``classify``: labels that count as missing, such as ``[-1]`` for uncertain ones."""
    overlap: Annotated[float, Bounds(0.0, 0.9)] = 0.5
    """Of ``segment``: part of a window that the next one covers again, in evaluations."""
    mode: Literal["gaussian", "constant"] = "gaussian"
    """Of ``segment``: weights of the voxels of a window, in evaluations, as in MONAI."""
    beta: Annotated[float, Bounds(0.0)] = 0.1
    """Of ``dpo``: how much the model is held back from leaving what it was at first."""
    reference: Literal["model", "stored"] = "model"
    """Of ``dpo``, what it is held back to: a frozen copy of the model that is run beside it, or the
    log-probabilities that ``shardflow train --store-reference`` wrote into the dataset, without a copy."""

    def __post_init__(self) -> None:
        check_fields(self)
        defaults = {
            "type": "report",
            "labels": "auto",
            "ignore": (),
            "overlap": 0.5,
            "mode": "gaussian",
            "beta": 0.1,
            "reference": "model",
        }
        given = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.target and given:
            raise ConfigError(
                f"task.target is set, and so is task.{given[0]}, which it does not take; leave out one."
            )
        if self.arguments and not self.target:
            raise ConfigError("task.arguments needs task.target, which is not set; remove it.")
        for name in given:
            if self.type not in (types := _TAKEN.get(name, (self.type,))):
                wanted = " or ".join(map(repr, types))
                raise ConfigError(f"task.{name} needs task.type = {wanted}; set it, or remove task.{name}.")
        if self.type == "segment" and self.labels == "binary":
            raise ConfigError(
                "task.labels of 'segment' is 'multi_class' or 'multi_label'; with one label in "
                "fields.mask.labels both tell it from the background."
            )

    @property
    def has_reports(self) -> bool:
        """Whether reports are learned."""
        return self.type == "report" and not self.target

    @property
    def has_conversations(self) -> bool:
        """Whether conversations are learned."""
        return self.type in _OF_CONVERSATIONS and not self.target

    @property
    def has_next_tokens(self) -> bool:
        """Whether the next token of conversations is learned, and nothing about whole ones."""
        return self.type in _OF_TOKENS and not self.target


def _check_type(
    fields: Mapping[str, Field],
    name: str,
    kinds: type[Field] | tuple[type[Field], ...],
    types: tuple[str, str],
) -> None:
    one = fields.get(name)
    if one is None:
        raise ConfigError(
            f"[fields] has no field {name!r}, which the model takes; add [fields.{name}] with type = "
            f'"{types[0]}" or "{types[1]}".'
        )
    if not isinstance(one, kinds):
        raise ConfigError(
            f'fields.{name} must be of type "{types[0]}" or "{types[1]}" for the model, got '
            f'"{type_name(type(one))}"; give the other field another name.'
        )


def check_classify_fields(fields: Mapping[str, Field]) -> None:
    """Refuse fields from which no classes can be learned.

    Args:
        fields: The tables ``[fields.NAME]``.

    Raises:
        ConfigError: ``image`` or ``label`` is missing or of a wrong type, or images have no one size.
    """
    _check_type(fields, IMAGE_FIELD, PixelField, ("image", "slices"))
    _check_type(fields, LABEL_FIELD, (Column, Columns), ("column", "columns"))
    images = fields[IMAGE_FIELD]
    assert isinstance(images, PixelField)  # noqa: S101 - checked above
    num_places(images)
    if images.size is None or images.tiles or (isinstance(images, Slices) and images.sizes):
        raise ConfigError(
            "fields.image must have a size, and neither sizes nor tiles, as a classifier takes images of one "
            "shape; set size to [image.rows, image.columns]."
        )


def segment_volumes(fields: Mapping[str, Field]) -> dict[str, Volume]:
    """Return the field ``image`` and the volumes that are like it, whose channels a model gets in this order.

    Raises:
        ConfigError: One of these has the name of something else that the model gets.
    """
    volumes = {name: one for name, one in fields.items() if isinstance(one, Volume)}
    found = {IMAGE_FIELD: volumes[IMAGE_FIELD]}
    found |= {name: one for name, one in volumes.items() if one.like == IMAGE_FIELD}
    taken = sorted(found.keys() & _NO_CHANNELS)
    if taken:
        raise ConfigError(
            f"fields.{taken[0]} cannot be a channel, as something else has this name; choose another one, "
            "such as that of the sequence."
        )
    return found


def check_segment_fields(fields: Mapping[str, Field], task: TaskConfig, *, is_evaluated: bool) -> Volume:
    """Refuse fields from which the classes of voxels cannot be learned.

    Args:
        fields: The tables ``[fields.NAME]``.
        task: The table ``[task]``.
        is_evaluated: Whether there are evaluations, which cut windows.

    Returns:
        The field ``image``.

    Raises:
        ConfigError: ``image`` or ``mask`` is missing or of a wrong type, they do not go together, or there
            are too many labels.
    """
    for name, kind, written in ((IMAGE_FIELD, Volume, "volume"), (MASK_FIELD, Mask, "mask")):
        if not isinstance(fields.get(name), kind):
            raise ConfigError(
                f'task.type "segment" takes a field {name!r} of type "{written}"; add [fields.{name}] with '
                f'type = "{written}".'
            )
    volume, mask = fields[IMAGE_FIELD], fields[MASK_FIELD]
    assert isinstance(volume, Volume)  # noqa: S101 - checked above
    assert isinstance(mask, Mask)  # noqa: S101
    if volume.like is not None:
        raise ConfigError(
            "fields.image has the region that the other channels follow; write roi_size for it, and like = "
            '"image" for the others.'
        )
    if volume.center == "grid" or volume.margin not in (0, (0, 0, 0)):
        raise ConfigError(
            'fields.image trains on regions without a margin, such as center = "foreground"; evaluations cut '
            "windows of the same roi_size by themselves."
        )
    segment_volumes(fields)
    if mask.like != IMAGE_FIELD:
        raise ConfigError('fields.mask must follow the volume; write like = "image".')
    num_labels = len(mask.labels or ()) if mask.merge == "stack" else 1
    if num_labels > _MAX_CLASSES and task.labels != "multi_label":
        raise ConfigError(
            f"fields.mask.labels has {num_labels} labels that exclude each other, and {_MAX_CLASSES} are "
            "allowed; leave some out, or set task.labels = 'multi_label'."
        )
    for name, refused in (("center", "whole"), ("irregular", "resample")):
        if is_evaluated and getattr(volume, name) == refused:
            raise ConfigError(
                f"Evaluations cut windows that fields.image.{name} = {refused!r} does not fit; remove it, or "
                "leave out data.eval_split."
            )
    return volume


def check_conversation_fields(
    fields: Mapping[str, Field], task: TaskConfig, model: Any, batch: Collection[str]
) -> None:
    """Refuse settings from which no conversations can be learned.

    Args:
        fields: The tables ``[fields.NAME]``.
        task: The table ``[task]``.
        model: The table ``[model]``.
        batch: Settings of ``[batch]`` that are given.

    Raises:
        ConfigError: The field ``conversation`` is missing or of another type, its ``pairs`` do not fit the
            task, or the model does not.
    """
    found = fields.get(CONVERSATION_FIELD)
    if not isinstance(found, Conversation):
        raise ConfigError(
            f'task.type "{task.type}" takes a field {CONVERSATION_FIELD!r} of that type; add '
            f'[fields.{CONVERSATION_FIELD}] with type = "conversation", processor and max_tokens.'
        )
    without_effect = sorted({*batch} & _OF_COST_RULES)
    if without_effect:
        raise ConfigError(
            f"batch.{without_effect[0]} has no effect with task.type {task.type!r}, whose tokens were "
            "counted; remove it."
        )
    if "packed" in batch and "max_tokens" not in batch:
        raise ConfigError(
            "batch.packed fills sequences of conversations, whose length is missing; set batch.max_tokens in "
            "place of batch.micro_batch_size."
        )
    if found.packed:
        raise ConfigError(
            f"fields.{CONVERSATION_FIELD}.packed follows batch.packed; leave it out, and set batch.packed."
        )
    if task.type != "reward" and found.pairs != (task.type == "dpo"):
        wanted = "takes single conversations; leave out" if found.pairs else "takes pairs; set"
        raise ConfigError(f'task.type "{task.type}" {wanted} fields.{CONVERSATION_FIELD}.pairs.')
    if task.type == "pretrain" and found.train_on != (_ASSISTANT,):
        raise ConfigError(
            f'task.type "pretrain" learns every token, so fields.{CONVERSATION_FIELD}.train_on has no '
            'effect; remove it, or set task.type to "sft".'
        )
    path, target = bool(model.path), bool(model.target)
    if path == target:
        raise ConfigError(
            f'task.type "{task.type}" trains a model of transformers, whose folder is model.path, or what '
            f"the function model.target returns, got {'both' if path else 'neither'}; name one of them."
        )
    if task.reference == "stored" and REFERENCE_FIELD in fields:
        raise ConfigError(
            f"fields.{REFERENCE_FIELD} has the name of the field of task.reference 'stored'; rename it."
        )
    if task.reference == "stored" and (found.template is not None or found.member != STORED_CONVERSATION):
        raise ConfigError(
            "task.reference 'stored' belongs to the conversations as they are stored; leave out template and "
            f"member of fields.{CONVERSATION_FIELD}, or task.reference."
        )
    if task.reference == "stored" and target:
        raise ConfigError(
            "task.reference 'stored' is bound to the files of model.path, and model.target has none; remove "
            "task.reference."
        )


def check_stored_reference(task: TaskConfig, data: Any, *, is_whole: bool) -> None:
    """Refuse samples that have no row of their own in a table of conversations, or change after it.

    Args:
        task: The table ``[task]``.
        data: The table ``[data]``.
        is_whole: Whether samples are those of the dataset itself, not of a view.

    Raises:
        ConfigError: The task has a stored reference, and they are such.
    """
    if task.reference == "stored" and (data.transform or data.unit != "study" or not is_whole):
        raise ConfigError(
            "task.reference 'stored' belongs to the conversations as they are stored; leave out "
            "data.transform, data.unit and data.view, or task.reference."
        )
    if task.reference == "stored" and data.adopt_new_versions != "never":
        raise ConfigError(
            "task.reference 'stored' has no values for pairs of a newer version; leave out "
            "data.adopt_new_versions, and store them before a run of that version."
        )


def check_report_fields(fields: Mapping[str, Field], *, needs_text: bool) -> None:
    """Refuse fields from which no report can be learned.

    Args:
        fields: The tables ``[fields.NAME]``.
        needs_text: Whether the words of reports are asked for, beside their tokens.

    Raises:
        ConfigError: ``image`` or ``report`` is missing or of a wrong type, or the model cannot take it.
    """
    _check_type(fields, IMAGE_FIELD, PixelField, ("slices", "image"))
    _check_type(fields, REPORT_FIELD, (Text, Tokens), ("text", "tokens"))
    images = fields[IMAGE_FIELD]
    assert isinstance(images, PixelField)  # noqa: S101 - checked above
    if images.channels == 3:
        raise ConfigError("fields.image.channels must be 1, as the model takes gray images; leave it out.")
    num_places(images)
    if images.size is None and (images.fit == "letterbox" or not isinstance(images, Slices)):
        raise ConfigError(
            "fields.image.size must be set with type 'image' or fit 'letterbox', so that all images of a "
            "micro-batch are of one size; set it to [image.rows, image.columns]."
        )
    if needs_text and text_field(fields) is None:
        raise ConfigError(
            "augment.mirror exchanges no sides of a report that names one, and fields.report delivers "
            'tokens; add [fields.words] with type = "text", or set augment.mirror to 0.'
        )


def text_field(fields: Mapping[str, Field]) -> str | None:
    """Return the name of a field that delivers the text of reports; None where there is none."""
    for name, one in fields.items():
        if isinstance(one, Text) and one.member is None:
            return name
    return None


def num_places(images: PixelField) -> int:
    """Return the most images, slices or tiles that a field delivers of a sample.

    Raises:
        ConfigError: It has no bound, but a model has a position for each.
    """
    if isinstance(images, Slices):
        name, most = "num_slices", max((size[0] for size in images.sizes), default=images.num_slices)
    else:
        name, most = "num_images", getattr(images, "num_images", None)
    if not isinstance(most, int):
        raise ConfigError(
            f"fields.image.{name} must be a number, as the model has a position for each; set it."
        )
    tiles = images.tiles or 1
    return most * (tiles + 1 if tiles > 1 else 1)
