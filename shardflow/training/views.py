"""From settings to what the loader reads of a study, and what the device makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardflow.fields.views import View
from shardflow.loading import ImageView, SizedView, SliceSize, TileView
from shardflow.telemetry import StageCounters
from shardflow.training.config import AugmentSettings, ImageSettings, TextSettings
from shardflow.training.device.images import ImagePipeline
from shardflow.training.device.transfer import HostTransfer, open_transfer
from shardflow.training.inputs import ImageMaker, InputMaker, MicroInputs
from shardflow.training.losses import IGNORED_LABEL
from shardflow.training.packing import Packing, pack_row
from shardflow.training.text import ReportTokenizer


def image_view(settings: ImageSettings, *, is_evaluation: bool = False) -> View:
    """Return what the loader reads of each study.

    Args:
        settings: The table ``[image]``.
        is_evaluation: Nothing is chosen at random, so that two evaluations measure the same.
    """
    shared: dict[str, Any] = {
        "resolution": settings.resolution,
        "slice_choice": "even" if is_evaluation else settings.slice_choice,
        "dtype": settings.dtype,
        "windows": settings.windows[:1] if is_evaluation else settings.windows,
    }
    if settings.sizes:
        # Keyed by the epoch, and every evaluation is an epoch 0.
        sizes = tuple(
            SliceSize(num_slices=num_slices, rows=rows, columns=columns, weight=weight)
            for num_slices, rows, columns, weight in settings.size_table
        )
        return SizedView(sizes=sizes, **shared)
    if settings.max_tiles:
        return TileView(
            rows=settings.rows,
            columns=settings.columns,
            max_tiles=settings.max_tiles,
            num_slices=settings.num_slices,
            **shared,
        )
    rows, columns = _transfer_size(settings)
    return ImageView(
        num_slices=settings.num_slices,
        rows=rows,
        columns=columns,
        padding=settings.padding,
        fit=settings.fit,
        augment_pool=0.0 if is_evaluation else settings.augment_pool,
        **shared,
    )


def open_inputs(
    tokenizer: ReportTokenizer,
    device: torch.device,
    counters: StageCounters,
    *,
    image: ImageSettings,
    text: TextSettings,
    augment: AugmentSettings,
    packed: bool,
    pinned_bytes: int,
    seed: int,
) -> InputMaker:
    """Return what makes the model's tensors from the loader's batches.

    Args:
        tokenizer: Frames the reports.
        device: Where the tensors go.
        counters: Get the stages of the way.
        image: The table ``[image]``.
        text: The table ``[text]``.
        augment: The table ``[augment]``.
        packed: Whether all samples of a micro-batch share one sequence.
        pinned_bytes: Pinned memory on the way to a GPU.
        seed: Run-level seed, of the augmentation.
    """
    return InputMaker(
        tokenizer,
        max_tokens=text.max_tokens,
        transfer=open_transfer(device, ring_bytes=pinned_bytes, counters=counters),
        images=_image_maker(image, augment, seed=seed),
        packed=packed,
        size=(image.rows, image.columns),
        counters=counters,
    )


def sample_inputs(
    image: ImageSettings,
    augment: AugmentSettings,
    device: torch.device,
    *,
    packed: bool,
    num_samples: int = 1,
    num_tokens: int = 2,
    is_full: bool = False,
) -> MicroInputs:
    """Return a made-up micro-batch in the run's shapes.

    Args:
        image: The table ``[image]``.
        augment: The table ``[augment]``; whether the device prepares images.
        device: Where its tensors lie.
        packed: Whether all samples share one sequence.
        num_samples: Of the micro-batch.
        num_tokens: Of each text.
        is_full: As large as the settings let it become, with every slice; else padding of weight 0, as for
            the warm-up.
    """
    is_windowed = _prepares_images(image, augment)
    label = 0 if is_full else IGNORED_LABEL
    num_slices = image.num_places if is_full and (image.sizes or image.max_tiles) else image.num_slices
    rows, columns = (image.rows, image.columns) if is_windowed else _transfer_size(image)
    slice_mask = np.full((num_samples, num_slices), is_full)
    token_ids = np.zeros((num_samples, num_tokens), np.int64)
    token_mask = np.ones((num_samples, num_tokens), bool)
    labels = np.full((num_samples, num_tokens), label, np.int64)
    arrays: dict[str, Any] = {
        "slice_mask": slice_mask,
        "token_ids": token_ids,
        "token_mask": token_mask,
        "labels": labels,
        "weights": np.full(num_samples, is_full, np.float32),
    }
    longest = 0
    if packed:
        row = pack_row(slice_mask, token_ids, token_mask, labels, arrays["weights"])
        arrays |= row.arrays
        arrays["token_mask"] = np.ones_like(row.arrays["token_ids"], bool)
        longest = row.longest
    tensors = {
        name: tensor.to(device) for name, tensor in HostTransfer(StageCounters()).send(arrays).tensors.items()
    }
    return MicroInputs(
        images_BKHW=torch.zeros(
            (num_samples, num_slices, rows, columns),
            dtype=torch.float32 if is_windowed else torch.int16,
            device=device,
        ),
        slice_mask_BK=tensors["slice_mask"],
        display_range_B2=None if is_windowed else torch.zeros((num_samples, 2), device=device),
        token_ids_BT=tensors["token_ids"],
        token_mask_BT=tensors["token_mask"],
        labels_BT=tensors["labels"],
        weights_B=tensors["weights"],
        num_tokens=float(is_full * num_samples * num_tokens),
        num_samples=float(is_full * num_samples),
        packing=Packing.of(tensors, longest=longest) if packed else None,
    )


def _transfer_size(settings: ImageSettings) -> tuple[int, int]:
    """Rows and columns that images have on their way to the device."""
    return settings.transfer_rows or settings.rows, settings.transfer_columns or settings.columns


def _prepares_images(image: ImageSettings, augment: AugmentSettings) -> bool:
    """Whether images need more on the device than the model's own window."""
    return bool(
        augment.is_active
        or image.standardise
        or image.fit == "letterbox"
        or _transfer_size(image) != (image.rows, image.columns)
    )


def _image_maker(image: ImageSettings, augment: AugmentSettings, *, seed: int) -> ImageMaker | None:
    if not _prepares_images(image, augment):
        return None
    size = (image.rows, image.columns)
    pipeline: Any = ImagePipeline(*size)
    return ImageMaker(
        pipeline=torch.compile(pipeline, fullgraph=True) if image.compile else pipeline,
        size=size,
        standardised=image.standardise,
        augment=augment,
        seed=seed,
    )
