"""Adapters for transforms of torchvision, MONAI and albumentations: fields in their types, and back.

Each converts the pixels of a sample by the type of its field, so that an image, its mask and its boxes move
together; texts and everything else pass through. Pixels of uint8 stay uint8, all others go in as float32,
which holds 16 bits exactly, and come out in the dtype that the library returns; masks keep theirs. The random
choices of MONAI and albumentations follow ``__rng__``; torchvision draws from torch's process-global
generator, so a random one needs ``execution="workers"``, where it is seeded for each sample.
"""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import Field, check_choice
from shardflow.fields.outputs import plain_value

EntryKind: TypeAlias = Literal["image", "slices", "mask"]
"""Geometry of an entry of a sample: ``(..., C, H, W)`` of images or a mask, ``(K, C, H, W)`` of slices."""
_KINDS: Final = ("image", "slices", "mask")


def torchvision(transform: Any, *, kinds: Mapping[str, EntryKind] | None = None) -> LibraryTransform:
    """Return a transform of a sample from one of ``torchvision.transforms.v2``.

    Images and slices become ``tv_tensors.Image`` ``(..., C, H, W)``, masks ``tv_tensors.Mask``, boxes
    ``tv_tensors.BoundingBoxes``; a box that is left without area is dropped from its ``NAME_mask``.

    Args:
        transform: The transform, or a ``v2.Compose``.
        kinds: Kinds of entries by name, of those that an earlier step made, or in place of a field's own.

    Raises:
        ConfigError: It is one of the older ``torchvision.transforms``, or a kind is unknown.
    """
    return _Torchvision(transform, kinds)


def monai(transform: Any, *, kinds: Mapping[str, EntryKind] | None = None) -> LibraryTransform:
    """Return a transform of a sample from one of MONAI.

    Images and masks go in channel first: ``(C, H, W)``, with several images ``(N * C, H, W)``; slices and
    their masks ``(C, K, H, W)``. A dictionary transform, such as ``RandFlipd``, gets the sample by the names
    of its fields, and changes the ``keys`` that it names; an array transform is for samples with a single
    field of pixels.

    Args:
        transform: The transform, or a ``Compose``.
        kinds: As in `torchvision`.

    Raises:
        ConfigError: A kind is unknown.
    """
    return _Monai(transform, kinds)


def albumentations(transform: Any, *, kinds: Mapping[str, EntryKind] | None = None) -> LibraryTransform:
    """Return a transform of a sample from one of albumentations.

    Images and masks go in channel last, ``(H, W, C)``, several images or slices as further channels. The
    first field of images is the target ``image``, others are further targets. Boxes go in as ``bboxes``; one
    that the library drops is dropped from its ``NAME_mask``.

    Args:
        transform: The transform, or a ``Compose``.
        kinds: As in `torchvision`.

    Raises:
        ConfigError: A kind is unknown.
    """
    return _Albumentations(transform, kinds)


class LibraryTransform(ABC):
    """Transform of a library, as a transform of a sample; make one with the functions of this module."""

    def __init__(self, transform: Any, kinds: Mapping[str, EntryKind] | None) -> None:
        self.transform = transform
        self._given = dict(kinds or {})
        for name, kind in self._given.items():
            check_choice(f"kinds[{name!r}]", kind, _KINDS)
        self.kinds: dict[str, EntryKind] = dict(self._given)
        self.boxes: dict[str, str] = {}
        self.stacks: set[str] = {name for name, kind in self._given.items() if kind == "slices"}
        self.volumes: set[str] = set()

    @property
    def name(self) -> str:
        """Name of the library's transform, for messages."""
        return type(self.transform).__qualname__

    def for_fields(self, specs: Mapping[str, Field]) -> LibraryTransform:
        """Return the same transform for a sample with some fields."""
        again = copy.copy(self)
        again.kinds = {**_kinds_of(specs), **self._given}
        stacks = {name for name, kind in again.kinds.items() if kind == "slices"}
        likes = {name: str(getattr(spec, "like", "")) for name, spec in specs.items()}
        again.stacks = stacks | {name for name, like in likes.items() if like in stacks}
        volumes = {name for name, spec in specs.items() if spec.type_name == "volume"}
        again.volumes = volumes | {name for name, like in likes.items() if like in volumes}
        again.boxes = {name: likes[name] for name, spec in specs.items() if spec.type_name == "boxes"}
        for name in again.boxes.keys() & again.volumes:
            raise ConfigError(
                f"{self.name} cannot move the boxes {name!r} of a volume; leave out the field, or move "
                "both in a function of your own."
            )
        return again

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the transformed sample."""
        for name in self.kinds.keys() & sample.keys():
            if isinstance(sample[name], list):
                raise ConfigError(
                    f"The images {name!r} of one sample have several sizes, which {self.name} cannot "
                    "take together; give the field a size=."
                )
        pixels = [name for name in self.kinds if isinstance(sample.get(name), np.ndarray)]
        return self._apply(sample, {name: _as_input(sample[name], self.kinds[name]) for name in pixels})

    @abstractmethod
    def _apply(self, sample: dict[str, Any], pixels: dict[str, NDArray[Any]]) -> dict[str, Any]:
        """Return the transformed sample.

        Args:
            sample: The sample.
            pixels: Its entries with a kind, uint8 or floating point, masks as they are.
        """

    def _seed(self, sample: Mapping[str, Any]) -> int:
        return int(sample["__rng__"].integers(2**31))


class _Torchvision(LibraryTransform):
    def __init__(self, transform: Any, kinds: Mapping[str, EntryKind] | None) -> None:
        super().__init__(transform, kinds)
        modules = [kind.__module__ for kind in type(transform).__mro__]
        is_old = any(name.startswith("torchvision.transforms.") for name in modules)
        if is_old and not any(name.startswith("torchvision.transforms.v2") for name in modules):
            raise ConfigError(
                f"{type(transform).__name__} of torchvision.transforms moves an image without its mask; take "
                "the one of torchvision.transforms.v2."
            )

    def _apply(self, sample: dict[str, Any], pixels: dict[str, NDArray[Any]]) -> dict[str, Any]:
        tensors = importlib.import_module("torchvision.tv_tensors")
        wrapped = {
            name: (tensors.Mask if self.kinds[name] == "mask" else tensors.Image)(np.ascontiguousarray(value))
            for name, value in pixels.items()
        }
        places = {name: np.flatnonzero(sample[f"{name}_mask"]) for name in self.boxes if name in sample}
        for name, kept in places.items():
            size = pixels[self.boxes[name]].shape[-2:]
            wrapped[name] = tensors.BoundingBoxes(sample[name][kept], format="XYXY", canvas_size=size)
        found = dict(self.transform(wrapped))
        for name, kept in places.items():
            boxes = np.asarray(plain_value(found.pop(name)), np.float32)
            if len(boxes) != len(kept):
                raise ConfigError(
                    f"{self.name} dropped boxes of {name!r}; leave that step out, boxes without area are "
                    "masked here."
                )
            sample = _with_boxes(sample, name, boxes, kept)
        return {
            **sample,
            **{name: _as_output(value, sample.get(name), self.kinds[name]) for name, value in found.items()},
        }


class _Monai(LibraryTransform):
    def _apply(self, sample: dict[str, Any], pixels: dict[str, NDArray[Any]]) -> dict[str, Any]:
        if hasattr(self.transform, "set_random_state"):
            self.transform.set_random_state(seed=self._seed(sample))
        given = {name: self._channels_first(name, value) for name, value in pixels.items()}
        if _is_dictionary_transform(self.transform):
            rest = {name: value for name, value in sample.items() if not name.startswith("__")}
            found = self.transform({**rest, **given})
            if not isinstance(found, Mapping):
                raise ConfigError(
                    f"{self.name} returned {type(found).__name__}; a sample becomes one sample, so "
                    "leave out num_samples."
                )
        else:
            if len(given) != 1:
                raise ConfigError(
                    f"{self.name} is an array transform, and the sample has {len(given)} fields of "
                    f"pixels; take the dictionary transform {self.name}d(keys=[...])."
                )
            (name,) = given
            found = {**sample, name: self.transform(given[name])}
        return {name: self._back(name, value, sample) for name, value in found.items()}

    def _channels_first(self, name: str, value: NDArray[Any]) -> NDArray[Any]:
        if value.ndim < 4 or name in self.volumes:
            return value
        if name not in self.stacks:
            return value.reshape(-1, *value.shape[-2:])
        return np.ascontiguousarray(np.moveaxis(value, 0, 1))

    def _back(self, name: str, value: Any, sample: Mapping[str, Any]) -> Any:
        if name not in self.kinds:
            return value
        before, after = sample.get(name), np.asarray(plain_value(value))
        if isinstance(before, np.ndarray) and before.ndim == 4 and name not in self.volumes:
            if name in self.stacks:
                after = np.moveaxis(after, 0, 1)
            elif after.ndim == 3 and len(after) == before.shape[0] * before.shape[1]:
                after = after.reshape(*before.shape[:2], *after.shape[1:])
        return _as_output(after, before, self.kinds[name])


def _is_dictionary_transform(transform: Any) -> bool:
    kinds = importlib.import_module("monai.transforms")
    if isinstance(transform, kinds.Compose):
        return all(map(_is_dictionary_transform, transform.transforms))
    return isinstance(transform, kinds.MapTransform)


class _Albumentations(LibraryTransform):
    def __init__(self, transform: Any, kinds: Mapping[str, EntryKind] | None) -> None:
        library = importlib.import_module(type(transform).__module__.partition(".")[0])
        if not isinstance(transform, library.Compose):
            transform = library.Compose([transform])
        super().__init__(transform, kinds)
        self._targets: dict[str, str] = {}

    def _apply(self, sample: dict[str, Any], pixels: dict[str, NDArray[Any]]) -> dict[str, Any]:
        self.transform.set_random_seed(self._seed(sample))
        targets = self._name_targets(pixels)
        given = {targets[name]: _channels_last(value) for name, value in pixels.items()}
        places = {name: np.flatnonzero(sample[f"{name}_mask"]) for name in self.boxes if name in sample}
        if places:
            boxes = np.concatenate([sample[name][kept] for name, kept in places.items()])
            given |= {"bboxes": boxes, _PLACE: np.arange(len(boxes))}
        found = self.transform(**given)
        first = 0
        for name, kept in places.items():
            number = np.asarray(found[_PLACE], np.int64)
            mine = (number >= first) & (number < first + len(kept))
            boxes = np.asarray(found["bboxes"], np.float32).reshape(-1, 4)[mine]
            sample = _with_boxes(sample, name, boxes, kept[number[mine] - first])
            first += len(kept)
        back = {name: _leading_axes(found[target], sample[name]) for name, target in targets.items()}
        return {
            **sample,
            **{name: _as_output(one, sample[name], self.kinds[name]) for name, one in back.items()},
        }

    def for_fields(self, specs: Mapping[str, Field]) -> LibraryTransform:
        """Return the same transform for a sample with some fields, whose boxes are targets as well."""
        again = super().for_fields(specs)
        if again.boxes:
            library = importlib.import_module(type(self.transform).__module__.partition(".")[0])
            parameters = library.BboxParams(format="pascal_voc", label_fields=[_PLACE])
            again.transform = library.Compose([self.transform], bbox_params=parameters)
        return again

    def _name_targets(self, pixels: Mapping[str, NDArray[Any]]) -> dict[str, str]:
        """Return the target of each entry; new ones are added to the transform."""
        if "image" not in pixels and not any(self.kinds[name] != "mask" for name in pixels):
            raise ConfigError(f"{self.name} needs an image beside the masks; add a field of images.")
        first = next(
            name for name in ("image", *pixels) if self.kinds.get(name, "mask") != "mask" and name in pixels
        )
        targets = {name: "image" if name == first else f"shardflow_{name}" for name in pixels}
        missing = {
            target: "mask" if self.kinds[name] == "mask" else "image"
            for name, target in targets.items()
            if target != "image" and target not in self._targets
        }
        if missing:
            self.transform.add_targets(missing)
            self._targets |= missing
        return targets


_PLACE: Final = "shardflow_place"
"""Label that says which box a box was before."""


def _with_boxes(
    sample: Mapping[str, Any], name: str, boxes: NDArray[Any], places: NDArray[np.int64]
) -> dict[str, Any]:
    """Return a sample with other boxes; those without area are dropped, the others move up.

    Args:
        sample: The sample.
        name: Name of the field of boxes.
        boxes: ``(n, 4)``.
        places: ``(n,)`` where each was before, of the M places.
    """
    has_area = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    boxes, places = boxes[has_area], places[has_area]
    found = dict(sample)
    for entry, fill in ((name, 0), (f"{name}_mask", 0), (f"{name}_label", -1), (f"{name}_index", -1)):
        if entry in sample:
            found[entry] = np.full_like(sample[entry], fill)
            found[entry][: len(boxes)] = boxes if entry == name else sample[entry][places]
    return found


def _channels_last(value: NDArray[Any]) -> NDArray[Any]:
    flat = value.reshape(-1, *value.shape[-2:]) if value.ndim > 2 else value[None]
    return np.ascontiguousarray(np.moveaxis(flat, 0, -1))


def _leading_axes(value: Any, before: NDArray[Any]) -> NDArray[Any]:
    """Return pixels of ``(H, W, C)`` with the leading axes that they had."""
    found = np.asarray(plain_value(value))
    if found.ndim == 3:
        found = np.moveaxis(found, -1, 0)
    leading = before.shape[:-2]
    if found.ndim == 3 and len(found) == int(np.prod(leading, dtype=np.int64)):
        found = found.reshape(*leading, *found.shape[-2:])
    return found


def _as_input(value: NDArray[Any], kind: EntryKind) -> NDArray[Any]:
    if kind == "mask" or value.dtype == np.uint8 or value.dtype.kind == "f":
        return value
    return value.astype(np.float32)


def _as_output(value: Any, before: Any, kind: EntryKind) -> Any:
    found = plain_value(value)
    if kind != "mask" or not isinstance(before, np.ndarray) or found.dtype == before.dtype:
        return np.ascontiguousarray(found)
    return np.rint(found).astype(before.dtype)


_TYPE_KINDS: Final[dict[str, EntryKind]] = {
    "image": "image",
    "slices": "slices",
    "mask": "mask",
    "volume": "image",  # (C, D, H, W), as 3-D transforms of MONAI take it
}
_LIBRARIES: Final = {
    "torchvision": torchvision,
    "monai": monai,
    "albumentations": albumentations,
    "albumentationsx": albumentations,
}


def _kinds_of(specs: Mapping[str, Field]) -> dict[str, EntryKind]:
    """Return the kinds of the fields of pixels by name."""
    return {
        name: _TYPE_KINDS[spec.type_name] for name, spec in specs.items() if spec.type_name in _TYPE_KINDS
    }


def adapted(step: Any, specs: Mapping[str, Field]) -> Any:
    """Return a step for a sample with some fields; a bare transform of a known library is wrapped.

    Raises:
        ConfigError: The library's transform cannot move an image and its mask together.
    """
    if not isinstance(step, LibraryTransform):
        roots = (kind.__module__.partition(".")[0] for kind in type(step).__mro__)
        library = next((root for root in roots if root in _LIBRARIES), None)
        if library is None:
            return step
        step = _LIBRARIES[library](step)
    found: LibraryTransform = step
    return found.for_fields(specs)
