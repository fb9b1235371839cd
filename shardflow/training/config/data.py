"""Settings of what is read and how it becomes samples: the dataset, the view of a study, its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardflow.configs import Bounds, Place, check_fields
from shardflow.errors import ConfigError
from shardflow.loading.selection import FULL_STUDY
from shardflow.training.config.ranges import Count, CountOrZero, Share

__all__ = ["DataSettings", "ImageSettings", "TextSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """What is trained on."""

    dataset: Place
    """Folder or address of a packed dataset, or a blend file (``.toml``), whose components name their
    splits."""
    manifest_version: Count | None = None
    """Version to open; without it a fresh run takes the newest, a resumed one the version it began with."""
    view: str = FULL_STUDY
    """What a sample is: ``full_study``, or the name of an entity view that ``shardflow entities`` made."""
    train_split: str = "train"
    """Split that is trained on, or several joined by ``+``."""
    subset: tuple[str, ...] = ()
    """Terms that all samples trained on must meet, such as ``"modality=CT"`` or ``"num_slices>=16"``."""
    keys: Path | None = None
    """File of sample keys, one a line: only these are trained on."""
    eval_split: str = ""
    """Split whose loss is measured; empty measures none. Of a blend: that of all its datasets."""

    def __post_init__(self) -> None:
        check_fields(self)
        if any(term.partition("=")[0].strip() == "keys" for term in self.subset):
            raise ConfigError(
                "data.subset must hold no keys=, got one; name the file as data.keys, which is found from "
                "the configuration's folder."
            )
        if self.is_blend:
            given = {
                "view": self.view != FULL_STUDY,
                "train_split": self.train_split != "train",
                "manifest_version": self.manifest_version is not None,
                "subset": bool(self.subset),
                "keys": self.keys is not None,
            }
            for name, is_given in given.items():
                if is_given:
                    raise ConfigError(
                        f"{name} must be left out where dataset is a blend file, got one; say it for each "
                        "component of the file."
                    )

    @property
    def is_blend(self) -> bool:
        """Whether ``dataset`` names a blend file."""
        return self.dataset.endswith(".toml")

    @property
    def terms(self) -> tuple[str, ...]:
        """All terms of the subset that is trained on."""
        return self.subset if self.keys is None else (*self.subset, f"keys={self.keys}")


_SIZE = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})(?:\*([1-9]\d{0,3}))?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """The view of a study that the model sees: K slices of its primary series, resized."""

    num_slices: Count = 8
    rows: Count = 64
    columns: Count = 64
    resolution: Literal["full", "small"] = "full"
    """``small`` reads the small versions that packing made (``variants.small_px``), and no byte of the large
    slices; a dataset without them is refused."""
    slice_choice: Literal["even", "random"] = "even"
    """``random`` draws other slices each epoch, keyed by (seed, epoch, sample)."""
    dtype: Literal["uint8", "int16", "uint16", "float32"] = "float32"
    """How pixels travel to the device. ``float32`` is right for every series. ``int16`` is half the bytes and
    right for series that are stored as int16 or uint8, such as CT; ``uint16`` for radiographs of 16 bits,
    ``uint8`` for pictures of 8 bits. Others are cut and rounded, with a warning."""
    transfer_rows: CountOrZero = 0
    """Rows that images have on their way to the device, which brings them to ``rows``; 0: the same."""
    transfer_columns: CountOrZero = 0
    padding: Literal["cap", "longest"] = "cap"
    """Places of a micro-batch's slices: always ``num_slices``, or as many as its longest study needs, at most
    ``num_slices``."""
    fit: Literal["stretch", "letterbox"] = "stretch"
    """Slices of another shape are stretched, or keep their shape in a frame that is dark outside them."""
    windows: tuple[str, ...] = ()
    """Names of windows, such as ``["lung", "bone"]``: each CT sample of each epoch gets one of them, keyed by
    (seed, epoch, sample). None: what the study says."""
    augment_pool: Share = 0.0
    """Share of the samples that get one of the augmented variants that packing made of them
    (``variants.augment``), keyed by (seed, epoch, sample); none in evaluations."""
    sizes: tuple[str, ...] = ()
    """Sizes that a sample may get in place of ``num_slices`` and the rows and columns that travel, such as
    ``["32x64x64", "8x224x224*2"]``: slices x rows x columns, and how likely it is. Which one is drawn anew
    each epoch, keyed by (seed, epoch, sample); the device brings all to ``rows`` x ``columns``."""
    max_tiles: CountOrZero = 0
    """Cut each slice into up to so many tiles of ``rows`` x ``columns`` and an overview, each a slice to the
    model; 0: a slice is one image."""
    standardise: tuple[str, ...] = ()
    """Modalities, such as ``["MR"]``, whose images get their own mean 0 and deviation 1 in place of a
    window."""
    compile: bool = False
    """Compile the device's image operators with ``torch.compile``."""
    transform: str = ""
    """``package.module:function`` that changes each sample in place, see docs/loading.md; none in
    evaluations."""

    def __post_init__(self) -> None:
        check_fields(self)
        bad = [size for size in self.sizes if not _SIZE.fullmatch(size)]
        if bad:
            raise ConfigError(
                f"image.sizes must be like '8x224x224' or '8x224x224*2' (slices x rows x columns), got "
                f"{bad[0]!r}."
            )
        if self.sizes and self.max_tiles:
            raise ConfigError(
                "image.sizes and image.max_tiles must not both be set, got both; leave out one."
            )
        if self.augment_pool and (self.sizes or self.max_tiles or self.resolution != "full"):
            raise ConfigError(
                "image.augment_pool must be 0 with image.sizes, image.max_tiles or image.resolution small, "
                f"got {self.augment_pool:g}; leave out one of them."
            )
        is_framed = (
            self.padding != "cap" or self.fit != "stretch" or self.transfer_rows or self.transfer_columns
        )
        if is_framed and (self.sizes or self.max_tiles):
            raise ConfigError(
                "image.padding, fit, transfer_rows and transfer_columns must be left out with image.sizes or "
                "image.max_tiles, got one of them; those decide it."
            )

    @property
    def size_table(self) -> tuple[tuple[int, int, int, int], ...]:
        """``sizes`` as numbers: slices, rows, columns and weight of each."""
        found = [_SIZE.fullmatch(size) for size in self.sizes]
        numbers = [tuple(int(part or 1) for part in match.groups()) for match in found if match]
        return tuple((slices, rows, columns, weight) for slices, rows, columns, weight in numbers)

    @property
    def num_places(self) -> int:
        """Places for slices, or their tiles, that a sample has at most."""
        most = max([self.num_slices, *(size[0] for size in self.size_table)])
        return most * (self.max_tiles + 1 if self.max_tiles > 1 else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """How reports become tokens."""

    tokenizer: Path
    """Folder of a ``PreTrainedTokenizerFast``; ``shardflow train-tokenizer`` makes one."""
    max_tokens: Annotated[int, Bounds(2)] = 256
    """Longer reports are cut; counts the begin and end tokens."""
    tokens: Literal["online", "stored"] = "online"
    """Tokenized while training, or taken from what ``shardflow tokenize`` stored with this tokenizer:
    the same tokens."""
    prompt: str = "Describe the findings."
    """What the user says behind the slices, in the chat template of a LLaVA-style model; never predicted."""

    def __post_init__(self) -> None:
        check_fields(self)
