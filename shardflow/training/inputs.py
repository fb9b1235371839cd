"""Model inputs from the loader's batches, and the feed that brings them to the device.

Takes two fields of a batch, ``image`` and ``report``; others may be beside them. Owns the labels (report
tokens only) and the transforms of each image. Images cross to the device in the dtype of their field (int16
is half of float32) and are resized, windowed and rotated there, see ``shardflow.training.device``.

On a device the feed is one micro-batch ahead across the end of a step: while the device still computes the
last backward, the next step's first micro-batch is copied. The loader's position counts what was delivered,
never what was only sent ahead, so a checkpoint between the two has the right step.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardflow.fields.augmentation import Draw, draw_sample, names_a_side
from shardflow.loading import Batch, Loader
from shardflow.loading.tensors import Parcel
from shardflow.logs import counted
from shardflow.telemetry import StageCounters
from shardflow.training.device.images import (
    ImageParameters,
    Place,
    gather_slices,
    places_of,
    slice_mask_of,
    stack_draws,
)
from shardflow.training.device.transfer import Transfer, open_transfer
from shardflow.training.hooks import LoopHook
from shardflow.training.ledger import LedgerMicroBatch
from shardflow.training.model_fields import IMAGE_FIELD, REPORT_FIELD, AugmentConfig
from shardflow.training.sequences import IGNORED_LABEL, Packing, pack_row, weighted_token_loss
from shardflow.training.text import ReportTokenizer

# ruff: noqa: N803, N815
# Tensors carry their axes as a suffix: B slots, K slices, H rows, W columns, T tokens.

_LOGGER = logging.getLogger(__name__)
_RING_BYTES = 64 << 20


class StepInputs(Protocol):
    """One micro-batch on the device, as the step takes it."""

    @property
    def num_tokens(self) -> float:
        """Weighted targets, labeled tokens or labels: the micro-batch's part of the divisor of the loss."""

    @property
    def num_samples(self) -> float:
        """Sum of the weights of the samples."""

    @property
    def weights_B(self) -> torch.Tensor:  # noqa: N802 - the axes are a suffix
        """float32, a weight for each row."""

    def forward(self, model: nn.Module) -> Any:
        """Run the model."""

    def loss(self, output: Any) -> torch.Tensor:
        """Return the weighted sum of losses of what the model returned."""


class InputSource(Protocol):
    """Maker of inputs from batches, in two halves: one on the host, one on the device."""

    transfer: Transfer

    def for_evaluation(self) -> InputSource:
        """Return the same without augmentation."""

    def __call__(self, batch: Batch) -> StepInputs:
        """Run both halves at once."""

    def send(self, batch: Batch) -> Any:
        """Run the host's half: everything begins to move."""

    def receive(self, sent: Any) -> StepInputs:
        """Run the device's half, on the current stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroInputs:
    """One micro-batch of images and reports on the device."""

    images_BKHW: torch.Tensor
    """int16, uint8, uint16 or float32 in the unit the series was stored in; float32 as the vision model takes
    it where ``display_range`` is None."""
    slice_mask_BK: torch.Tensor
    """bool, false for padded slices."""
    display_range: torch.Tensor | None
    """``(B, 2)`` or ``(B, K, 2)`` float32, the intensities that become -1 and 1; None where images are
    windowed already."""
    token_ids_BT: torch.Tensor
    """int64; of a packed micro-batch ``(1, T)``, the text of all slots."""
    token_mask_BT: torch.Tensor
    """bool, false for padding."""
    labels_BT: torch.Tensor
    """int64, the next token of each position or ``IGNORED_LABEL``; of a packed micro-batch ``(T, 1)``."""
    weights_B: torch.Tensor
    """float32, a weight for each row of labels, 0 for padding slots."""
    num_tokens: float
    """Weighted labeled tokens, the micro-batch's part of the step's N; known without asking the device."""
    num_samples: float
    """Sum of the weights of the samples."""
    packing: Packing | None = None
    """Positions of the slots in one sequence; None where each has a row."""

    @property
    def model_arguments(self) -> tuple[Any, ...]:
        """Arguments of the model's call; without packing for a model that does not support it."""
        rows = (
            self.images_BKHW,
            self.slice_mask_BK,
            self.display_range,
            self.token_ids_BT,
            self.token_mask_BT,
        )
        return rows if self.packing is None else (*rows, self.packing)

    def forward(self, model: nn.Module) -> Any:
        """Run the model."""
        return model(*self.model_arguments)

    def loss(self, output: Any) -> torch.Tensor:
        """Return the sum of the weighted token losses."""
        return weighted_token_loss(output, self.labels_BT, self.weights_B)

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        images_BKHW: torch.Tensor,
        display_range: torch.Tensor | None,
        *,
        num_tokens: float,
        num_samples: float,
        longest: int,
    ) -> MicroInputs:
        """Combine images with the tensors of text and labels; ``longest`` is 0 where those are not packed."""
        token_ids = tensors["token_ids"]
        token_mask = tensors.get("token_mask")
        return cls(
            images_BKHW=images_BKHW,
            slice_mask_BK=tensors["slice_mask"].bool(),
            display_range=display_range,
            token_ids_BT=token_ids,
            token_mask_BT=torch.ones_like(token_ids, dtype=torch.bool) if token_mask is None else token_mask,
            labels_BT=tensors["labels"],
            weights_B=tensors["weights"],
            num_tokens=num_tokens,
            num_samples=num_samples,
            packing=Packing.of(tensors, longest=longest) if longest else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SentInputs:
    """A micro-batch on its way to the device."""

    parcel: Parcel
    num_tokens: float
    num_samples: float
    longest: int
    """Of a packed micro-batch: elements of its longest study; else 0."""
    places: list[Place] | None = None
    """Of samples of many sizes: where each one's slices are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageMaker:
    """Transforms of images on the device, in place of the window that the model applies by itself."""

    pipeline: Callable[[torch.Tensor, torch.Tensor, ImageParameters], torch.Tensor]
    """An `ImagePipeline`, compiled or not."""
    size: tuple[int, int]
    """Rows and columns of its result."""
    standardized: tuple[str, ...] = ()
    """Modalities whose images get their own mean and deviation in place of a window."""
    augment: AugmentConfig | None = None
    """None for an evaluation."""
    seed: int = 0

    def arrays(self, batch: Batch, reports: list[str]) -> dict[str, NDArray[Any]]:
        """Compute each sample's parameters on the host: a few numbers a sample."""
        modalities = batch.modalities
        arrays: dict[str, NDArray[Any]] = {}
        if self.standardized:
            arrays["is_standardized"] = np.array([name in self.standardized for name in modalities], np.uint8)
        if self.augment is not None and self.augment.is_active:
            place = (batch.epoch, batch.step, batch.micro)
            draws = [
                draw_sample(
                    self.augment,
                    modality=modality,
                    report_names_a_side=names_a_side(report),
                    seed=self.seed,
                    place=(*place, slot),
                )
                if modality
                else Draw()
                for slot, (modality, report) in enumerate(zip(modalities, reports, strict=True))
            ]
            arrays["affine"], arrays["intensity"] = stack_draws(
                draws, rows=self.size[0], columns=self.size[1]
            )
        return arrays

    def images(self, tensors: dict[str, torch.Tensor], slice_mask_BK: torch.Tensor) -> torch.Tensor:
        """Make the images that the vision model takes."""
        standardized = tensors.get("is_standardized")
        return self.pipeline(
            tensors["image"],
            slice_mask_BK,
            ImageParameters(
                display_range=tensors["display_range"],
                is_standardized_B=None if standardized is None else standardized.bool(),
                intensity_B3=tensors.get("intensity"),
                affine_B23=tensors.get("affine"),
                content_box_BK4=tensors.get("content_box"),
            ),
        )


class InputMaker:
    """Maker of the model's tensors from batches, in two halves: one on the host, one on the device.

    Of a batch without the field ``image`` the model sees no slice.

    Args:
        tokenizer: Turns reports into token ids.
        max_tokens: Longest row of tokens.
        transfer: How arrays get to the device.
        images: What becomes of images there; None leaves it to the model to window them.
        packed: Put all slots into one sequence.
        size: Rows and columns that the model takes; samples of many sizes are brought to it.
        num_places: Empty places for slices of a batch without the field ``image``.
        words: Field of the text of reports, which may be beside their tokens; None where there is none.
        counters: Gets the stage ``tokenize``.
    """

    def __init__(
        self,
        tokenizer: ReportTokenizer,
        *,
        max_tokens: int,
        transfer: Transfer,
        images: ImageMaker | None = None,
        packed: bool = False,
        size: tuple[int, int] = (1, 1),
        num_places: int = 1,
        words: str | None = REPORT_FIELD,
        counters: StageCounters | None = None,
    ) -> None:
        self.transfer = transfer
        self._counters = counters or StageCounters()
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._images = images
        self._packed = packed
        self._size = size
        self._num_places = num_places
        self._words = words

    def for_evaluation(self) -> InputMaker:
        """Return the same without augmentation."""
        other = copy.copy(self)
        other._counters = StageCounters()
        if self._images is not None:
            other._images = replace(self._images, augment=None)
        return other

    def __call__(self, batch: Batch) -> MicroInputs:
        """Run both halves at once."""
        return self.receive(self.send(batch))

    def send(self, batch: Batch) -> SentInputs:
        """Run the host's half: text becomes tokens, and everything begins to move.

        Args:
            batch: One micro-batch of the loader; on a device its memory may be reused once this returns, on
                the CPU the result shares it and keeps it alive.
        """
        began_s = time.perf_counter()
        weights = np.asarray(batch.arrays["weight"], np.float32)
        reports: list[str] = [""] * len(weights) if self._words is None else batch[self._words]
        if self._words == REPORT_FIELD:
            rows = self._tokenizer.encode(reports, self._max_tokens)
        else:
            rows = self._tokenizer.rows(_stored_tokens(batch), self._max_tokens)
        labels = np.full(rows.token_ids.shape, IGNORED_LABEL, np.int64)
        labels[:, :-1] = np.where(rows.token_mask[:, 1:], rows.token_ids[:, 1:], IGNORED_LABEL)
        tokens_per_slot = (labels != IGNORED_LABEL).sum(axis=1)
        arrays, places = _image_arrays(batch, (self._num_places, *self._size))
        longest = 0
        if self._packed:
            row = pack_row(arrays["slice_mask"], rows.token_ids, rows.token_mask, labels, weights)
            arrays |= row.arrays
            longest = row.longest
        else:
            arrays |= {
                "token_ids": rows.token_ids,
                "token_mask": rows.token_mask,
                "labels": labels,
                "weights": weights,
            }
        if self._images is not None:
            arrays |= self._images.arrays(batch, reports)
        self._counters.add("tokenize", time.perf_counter() - began_s, 0, 1)
        return SentInputs(
            parcel=self.transfer.send(arrays),
            num_tokens=float(np.dot(tokens_per_slot, weights.astype(np.float64))),
            num_samples=float(weights.sum(dtype=np.float64)),
            longest=longest,
            places=places,
        )

    def receive(self, sent: SentInputs) -> MicroInputs:
        """Run the device's half, on the current stream."""
        tensors = self.transfer.receive(sent.parcel)
        slice_mask = tensors["slice_mask"].bool()
        if sent.places is not None:
            tensors["image"] = gather_slices(tensors.pop("pixels"), sent.places, self._size)
        images, display_range = tensors["image"], tensors.get("display_range")
        if self._images is not None:
            images, display_range = self._images.images(tensors, slice_mask), None
        return MicroInputs.of(
            tensors,
            images,
            display_range,
            num_tokens=sent.num_tokens,
            num_samples=sent.num_samples,
            longest=sent.longest,
        )


def _stored_tokens(batch: Batch) -> list[list[int]]:
    """Return the stored token ids of each slot's report."""
    ids, mask = batch[REPORT_FIELD], batch[f"{REPORT_FIELD}_mask"]
    if f"{REPORT_FIELD}_offsets" in batch:
        offsets = batch[f"{REPORT_FIELD}_offsets"].tolist()
        return [ids[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]
    return [row[is_token].tolist() for row, is_token in zip(ids, mask.astype(bool), strict=True)]


def _image_arrays(
    batch: Batch, empty: tuple[int, int, int]
) -> tuple[dict[str, NDArray[Any]], list[Place] | None]:
    """Return the arrays of images that travel, and the places of slices in a flat array, if they are flat.

    Args:
        batch: Its field ``image`` is one array, or a list of stacks of slices; it may lack the field.
        empty: Slices, rows and columns of a sample where there is no such field.
    """
    name = IMAGE_FIELD
    if name not in batch:
        num_slots = batch.num_slots
        return {
            "image": np.zeros((num_slots, *empty), np.float32),
            "slice_mask": np.zeros((num_slots, empty[0]), np.uint8),
            "display_range": np.zeros((num_slots, 2), np.float32),
        }, None
    pixels, ranges = batch[name], batch[f"{name}_range"]
    if isinstance(pixels, list):
        flat, places = places_of(pixels)
        arrays = {"pixels": flat, "display_range": ranges, "slice_mask": slice_mask_of(places)}
        return arrays, places
    return image_arrays(batch), None


def image_arrays(batch: Batch) -> dict[str, NDArray[Any]]:
    """Return images, masks and ranges; several images, slices and colors side by side as channels."""
    name = IMAGE_FIELD
    pixels = batch[name]
    num_slots, (rows, columns) = len(pixels), pixels.shape[-2:]
    mask = batch[f"{name}_mask"].reshape(num_slots, -1)
    pixels = pixels.reshape(num_slots, -1, rows, columns)
    each = pixels.shape[1] // mask.shape[1]
    ranges = batch[f"{name}_range"]
    arrays = {
        "image": pixels,
        "slice_mask": np.repeat(mask, each, axis=1),
        "display_range": ranges if ranges.ndim == 2 else np.repeat(ranges, each, axis=1),
    }
    if f"{name}_box" in batch:
        arrays["content_box"] = np.repeat(batch[f"{name}_box"].reshape(*mask.shape, 4), each, axis=1)
    return arrays


def make_inputs(
    batch: Batch, tokenizer: ReportTokenizer, *, max_tokens: int, device: torch.device, packed: bool = False
) -> MicroInputs:
    """Make one micro-batch's tensors, see `InputMaker`; a loop that makes many keeps one of those."""
    transfer = open_transfer(device, ring_bytes=_RING_BYTES, counters=StageCounters())
    return InputMaker(tokenizer, max_tokens=max_tokens, transfer=transfer, packed=packed)(batch)


def map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with each tensor, also in dataclasses, replaced by what a function returns for it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        mapped = {one.name: map_tensors(getattr(value, one.name), function) for one in fields(value)}
        return replace(value, **mapped)
    return value


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FedMicroBatch:
    """A micro-batch on the device, and its entry in the ledger."""

    inputs: StepInputs
    entry: LedgerMicroBatch


class MicroFeed(Protocol):
    """Source of the micro-batches of steps."""

    looks_ahead: bool
    """Whether `look_ahead` does anything."""

    def take(self) -> FedMicroBatch | None:
        """Return the next micro-batch on the device; None where there is none left."""

    def look_ahead(self) -> None:
        """Start on the micro-batch that follows those that were taken."""

    def drain(self) -> float:
        """Return the seconds waited for data since the last call."""


class DeviceFeed:
    """This rank's micro-batches of the rest of an epoch, on the device.

    Args:
        loader: At the position to resume from.
        maker: Makes the model's tensors.
        looks_ahead: Send the next step's first micro-batch before it is asked for; pointless on CPUs.
        shows_first: Log what the first micro-batch holds and what the model gets of it.

    Attributes:
        looks_ahead: Whether it does.
    """

    def __init__(
        self, loader: Loader, maker: InputSource, *, looks_ahead: bool, shows_first: bool = False
    ) -> None:
        self._maker = maker
        self.looks_ahead = looks_ahead
        self._loader = loader
        self._batches = iter(loader)
        self._ahead: tuple[Any, LedgerMicroBatch] | None = None
        self._shows_next = shows_first
        self._first = ""

    def take(self) -> FedMicroBatch | None:
        """Return the next micro-batch; None at the end of the epoch."""
        self._maker.transfer.ask()
        found, self._ahead = self._ahead or self._send_next(), None
        if found is None:
            return None
        self._batches.count_fetched()
        sent, entry = found
        inputs = self._maker.receive(sent)
        if self._first:
            _LOGGER.info("first micro-batch: %s", self._first)
            _LOGGER.info("the model gets %s", describe_inputs(inputs))
            self._first = ""
        return FedMicroBatch(inputs=inputs, entry=entry)

    def look_ahead(self) -> None:
        """Send the next micro-batch, if that is worth it; call it when the step's work has been launched."""
        if self.looks_ahead and self._ahead is None:
            self._maker.transfer.ask()
            self._ahead = self._send_next()
            self._maker.transfer.got()

    def apply_pending(self) -> bool:
        """Apply changes of the loader's settings that wait for a boundary, see `Loader.apply_pending`.

        Call it between two steps. A micro-batch that was sent ahead remains, and is delivered next.
        """
        return self._loader.apply_pending()

    def drain(self) -> float:
        """Return the seconds waited for data since the last call, see `Transfer.drain`."""
        return self._maker.transfer.drain()

    def close(self) -> None:
        """End the loader's threads; what was sent ahead is dropped."""
        self._ahead = None
        self._batches.close()

    def _send_next(self) -> tuple[Any, LedgerMicroBatch] | None:
        batch = self._batches.fetch()
        if batch is None:
            return None
        if self._shows_next:
            self._first, self._shows_next = describe_batch(batch), False
        return self._maker.send(batch), _entry(batch)


def describe_batch(batch: Batch) -> str:
    """Describe the fields of a micro-batch by shapes, dtypes, ranges and counts; no text, no identifier.

    Example:
        ``image (2, 3, 1, 16, 16) float32 from -1024 to 1371; report 2 texts of 431 characters``
    """
    return "; ".join(f"{name} {_described(batch[name])}" for name in batch)


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        shape = f"({', '.join(map(str, value.shape))}) {value.dtype}"
        has_range = value.size and value.ndim > 2 and value.dtype.kind in "iuf"
        return f"{shape} from {value.min():g} to {value.max():g}" if has_range else shape
    if not isinstance(value, Sequence) or not value:
        return "empty" if isinstance(value, Sequence) else type(value).__name__
    if all(isinstance(one, str) for one in value):
        return f"{counted(len(value), 'text')} of {counted(sum(map(len, value)), 'character')}"
    return f"{len(value)} of {_described(value[0])}"


def describe_inputs(inputs: StepInputs) -> str:
    """Describe what the model gets of a micro-batch: tensors by shape and dtype, targets and samples."""
    made: Any = inputs
    held = getattr(made, "tensors", None)
    if held is None and is_dataclass(made):
        held = {one.name: getattr(made, one.name) for one in fields(made)}
    tensors = [
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in (held or {}).items()
        if isinstance(value, torch.Tensor)
    ]
    targets = f"{inputs.num_tokens:g} weighted targets of {inputs.num_samples:g} samples"
    return "; ".join([*tensors, targets])


def step_inputs(
    feed: MicroFeed, num_micro_batches: int, hooks: LoopHook | None = None
) -> Iterator[tuple[int, StepInputs]]:
    """Yield number and inputs of a rank's micro-batches of one step, padding ones included.

    Args:
        feed: At the step's first micro-batch.
        num_micro_batches: Of this rank in the step; fewer come where the loader ends.
        hooks: Called around each.
    """
    hooks = hooks or LoopHook()
    for slot in range(num_micro_batches):
        hooks.on_data_wait()
        fed = feed.take()
        if fed is None:
            return
        hooks.on_micro_batch(fed.entry, is_last=slot == num_micro_batches - 1)
        yield fed.entry.micro, fed.inputs
    if feed.looks_ahead:
        # Whoever asks for one more has launched the last backward.
        hooks.on_look_ahead()
        feed.look_ahead()
        hooks.on_look_ahead_end()


def _entry(batch: Batch) -> LedgerMicroBatch:
    return LedgerMicroBatch(
        micro=batch.micro,
        keys=tuple(batch.sample_keys),
        weights=tuple(batch.arrays["weight"].tolist()),
        components=tuple(batch.components) if "component" in batch.arrays else (),
    )
