"""Data of a run: a dataset with its splits, or a blend, at the versions it began with.

Translates settings into the batch spec, the fields of a batch, and the device's transforms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardflow.errors import ConfigError
from shardflow.fields.field import Field
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.pixel_field import PixelField
from shardflow.fields.types.tokens import Tokens
from shardflow.format import Dataset
from shardflow.format.manifest import versions
from shardflow.loading import Selection, open_blend, open_view, select
from shardflow.loading.binding import bind_fields, charge_for_delivered
from shardflow.loading.rows.blend_file import evaluation_blend
from shardflow.loading.rows.lock import with_tables
from shardflow.sampling import BatchSpec, CostRule, TileRule, TokenBudget, choose_lanes
from shardflow.sampling.blend import components_from_json
from shardflow.sampling.spec import Tail
from shardflow.storage import CacheConfig, LocalStore
from shardflow.telemetry import StageCounters
from shardflow.training.config import BatchConfig, DataConfig, ImageConfig, TextConfig, default_fields
from shardflow.training.device.images import ImagePipeline
from shardflow.training.device.transfer import Transfer, open_transfer
from shardflow.training.inputs import ImageMaker, InputMaker, MicroInputs
from shardflow.training.model_fields import IMAGE_FIELD, REPORT_FIELD, AugmentConfig, num_places, text_field
from shardflow.training.sequences import IGNORED_LABEL, pack_row
from shardflow.training.text import ReportTokenizer
from shardflow.training.tokenizing import tokenizer_digest


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """Selections of samples that a run reads."""

    training: Selection
    evaluation: Selection | None
    """None without an evaluation split."""

    def check_modalities(self, name: str, wanted: Sequence[str]) -> None:
        """Refuse modalities that no sample has: a mistyped one would have no effect.

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
    settings: DataConfig,
    saved: Mapping[str, Any] | None,
    *,
    lock: Mapping[str, Any] | None = None,
    cache: CacheConfig | None = None,
    version: int | None = None,
) -> TrainingData:
    """Open the training and evaluation data of a run.

    Args:
        settings: The table ``[data]``.
        saved: The loader state of the checkpoint that the run resumes from.
        lock: The lock beside it, which has the versions of tables, and those of a blend of many components.
        cache: The table ``[cache]``.
        version: What the run trains on, where it adopts versions; of a blend None.

    Raises:
        ConfigError: There is no dataset or blend, a split is missing, or no sample is left.
        SignatureError: A dataset is not signed by one of ``data.trusted_keys``.
    """
    if settings.is_blend:
        return _open_blend(settings, saved, lock, cache)
    if "://" not in settings.dataset:
        _check_folder(settings)
    version = version or settings.manifest_version
    if version is None and saved is not None:
        # A newer manifest is adopted on purpose only: it has other samples, so another plan. A blend's state
        # has 0 here; it is refused later, by its components.
        version = saved["manifest_version"] or None
    dataset = Dataset.open(settings.dataset, version=version, cache=cache, signed_by=settings.trusted_keys)
    if lock is not None and len(lock["datasets"]) == 1:
        dataset = with_tables(dataset, lock["datasets"][0])
    dataset = open_view(dataset, settings.view)
    for key, split in (("train_split", settings.train_split), ("eval_split", settings.eval_split)):
        if split and not set(split.split("+")) <= set(dataset.splits):
            known = ", ".join(sorted(dataset.splits))
            raise ConfigError(
                f"data.{key} must be a split of the dataset ({known}), got {split!r}; correct it."
            )
    return TrainingData(
        training=select(
            dataset, settings.train_split, unit=settings.unit, where=settings.where, keys=settings.keys
        ),
        evaluation=select(dataset, settings.eval_split, unit=settings.unit) if settings.eval_split else None,
    )


def _check_folder(settings: DataConfig) -> None:
    """Refuse a wrong setting here, so that it is not reported as a damaged dataset."""
    if not Path(settings.dataset).is_dir():
        raise ConfigError(
            "data.dataset must be an existing folder, an address or a blend file, got none; correct it, or "
            "make one with: shardflow pack."
        )
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
    settings: DataConfig,
    saved: Mapping[str, Any] | None,
    lock: Mapping[str, Any] | None,
    cache: CacheConfig | None,
) -> TrainingData:
    pinned = None
    if saved is not None:
        pinned = [state.manifest_version for state in components_from_json(saved.get("components", []))]
    blend = open_blend(
        settings.dataset, versions=pinned, lock=lock, cache=cache, signed_by=settings.trusted_keys
    )
    return TrainingData(
        training=blend,
        evaluation=evaluation_blend(blend, settings.eval_split) if settings.eval_split else None,
    )


def batch_spec(
    batch: BatchConfig,
    images: PixelField,
    text: TextConfig,
    selection: Selection,
    fields: Mapping[str, Field],
    *,
    tail: Tail | None = None,
) -> BatchSpec:
    """Return how steps are formed.

    Args:
        batch: The table ``[batch]``.
        images: The field that decides what images cost.
        text: Decides what text costs.
        selection: The samples; where lanes are to be chosen they follow from them, never from the world.
        fields: What a batch holds, which ``counts_delivered`` charges for.
        tail: Instead of the tail of the settings.
    """
    spec = BatchSpec(
        micro_batch_size=batch.micro_batch_size or 0,
        budget=_budget(batch, images, text),
        micro_batches_per_step=batch.micro_batches_per_step,
        tail=tail or batch.tail,
        lanes=batch.lanes or (0 if batch.max_tokens is None else 1),
        window_bytes=batch.window_bytes,
    )
    if spec.budget is None or batch.lanes is not None:
        return spec
    return with_lanes(spec, selection, fields if batch.counts_delivered else {})


def with_lanes(spec: BatchSpec, selection: Selection, fields: Mapping[str, Field]) -> BatchSpec:
    """Return a batch spec with lanes that are chosen from the data.

    Args:
        spec: With a token budget.
        selection: The samples.
        fields: What the budget charges for; none where its cost rule charges for what is stored.
    """
    charged = spec
    if fields:
        selection, bound = bind_fields(selection, fields, StageCounters())
        selection, charged = charge_for_delivered(selection, bound, spec)
    return replace(spec, lanes=choose_lanes(selection.layout(charged), charged))


def _budget(batch: BatchConfig, images: PixelField, text: TextConfig) -> TokenBudget | None:
    if batch.max_tokens is None:
        return None
    return TokenBudget(
        max_tokens=batch.max_tokens,
        max_samples=batch.max_samples,
        padded=not batch.packed,
        over_budget=batch.over_budget,
        cost=CostRule(
            # Begin and end of the text, and in a packed sequence the start of the sample.
            tokens_per_sample=2 + batch.packed,
            max_text_tokens=text.max_tokens,
            **_image_cost(images, batch),
            quadratic_tokens=batch.quadratic_tokens,
            tokenizer=tokenizer_digest(text.folder) if batch.text_tokens == "counted" else "",
        ),
    )


def _image_cost(images: PixelField, batch: BatchConfig) -> dict[str, Any]:
    """Return the token cost of the images of a sample."""
    tokens = batch.image_tokens_per_slice
    if batch.counts_delivered:
        return {"image_tokens_per_slice": tokens, "counts_delivered": True}
    if not tokens:
        return {}
    if isinstance(images, Slices) and images.sizes:
        return {"buckets": images.buckets([tokens] * len(images.sizes))}
    tiles = None
    if images.tiles and images.size is not None:
        tiles = TileRule(rows=images.size[0], columns=images.size[1], max_tiles=images.tiles)
    most = num_places(replace(images, tiles=None))
    return {"image_tokens_per_slice": tokens, "max_slices": most, "tiles": tiles}


def run_fields(
    fields: Mapping[str, Field],
    image: ImageConfig,
    tokenizer: Path,
    selection: Selection,
    *,
    is_evaluation: bool = False,
) -> dict[str, Field]:
    """Return what the batches of a run hold, by name.

    Args:
        fields: The tables ``[fields.NAME]``; those of a run that names none follow the samples: of a finding
            the series that shows it is delivered, and of texts alone no image.
        image: The table ``[image]``.
        tokenizer: Folder whose tokens a field of stored tokens must deliver.
        selection: The samples.
        is_evaluation: Nothing is drawn at random, so that two evaluations measure the same.

    Raises:
        ConfigError: The stored tokens are those of another tokenizer.
    """
    found: dict[str, Field] = dict(fields)
    images: Any = found[IMAGE_FIELD]
    found[IMAGE_FIELD] = replace(images, channels=1)
    if fields == default_fields(image):
        if "entity" in selection.units:  # the series of a finding is any of its study's
            found[IMAGE_FIELD] = replace(images, series=None)
        has_images = any(
            dataset.samples.column("num_slices")[selection.population_of(place)].any()
            for place, dataset in enumerate(selection.datasets)
        )
        if not has_images:
            del found[IMAGE_FIELD]
    report = found[REPORT_FIELD]
    if isinstance(report, Tokens) and report.tokenizer != (digest := tokenizer_digest(tokenizer)):
        raise ConfigError(
            f"fields.report.tokenizer must be the digest of text.tokenizer ({digest}), got another one; set "
            "it, after shardflow tokenize has stored its tokens."
        )
    return {name: one.for_evaluation() if is_evaluation else one for name, one in found.items()}


def open_inputs(
    tokenizer: ReportTokenizer,
    device: torch.device,
    counters: StageCounters,
    *,
    fields: Mapping[str, Field],
    images: PixelField,
    image: ImageConfig,
    text: TextConfig,
    augment: AugmentConfig,
    packed: bool,
    pinned_bytes: int,
    seed: int,
) -> InputMaker:
    """Return the maker of the model's tensors from the loader's batches.

    Args:
        tokenizer: Frames the reports.
        device: Device of the tensors.
        counters: Get the stages of the transfer.
        fields: What a batch holds.
        images: The field of the model's images.
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
        images=_image_maker(images, image, augment, seed=seed),
        packed=packed,
        size=(image.rows, image.columns),
        num_places=num_places(images),
        words=text_field(fields),
        counters=counters,
    )


def sample_inputs(
    images: PixelField,
    image: ImageConfig,
    augment: AugmentConfig,
    device: torch.device,
    *,
    packed: bool,
    num_samples: int = 1,
    num_tokens: int = 2,
    is_full: bool = False,
) -> MicroInputs:
    """Return a synthetic micro-batch in the run's shapes.

    Args:
        images: The field of the model's images.
        image: The table ``[image]``.
        augment: The table ``[augment]``; whether the device prepares images.
        device: Device of its tensors.
        packed: Whether all samples share one sequence.
        num_samples: Of the micro-batch.
        num_tokens: Of each text.
        is_full: Whether it is as large as the settings allow, with every slice; else padding of weight 0, as
            for the warm-up.
    """
    is_windowed = _prepares_images(images, image, augment)
    label = 0 if is_full else IGNORED_LABEL
    num_slices = num_places(images)
    rows, columns = image.rows, image.columns
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
        del arrays["token_mask"]
        longest = row.longest
    transfer = Transfer(StageCounters(), device)
    tensors = transfer.receive(transfer.send(arrays))
    return MicroInputs.of(
        tensors,
        torch.zeros(
            (num_samples, num_slices, rows, columns),
            dtype=torch.float32 if is_windowed else torch.int16,
            device=device,
        ),
        None if is_windowed else torch.zeros((num_samples, 2), device=device),
        num_tokens=float(is_full * num_samples * num_tokens),
        num_samples=float(is_full * num_samples),
        longest=longest,
    )


def _prepares_images(images: PixelField, image: ImageConfig, augment: AugmentConfig) -> bool:
    """Return whether images need more on the device than the model's own window."""
    size = (image.rows, image.columns)
    # Slices of several sizes become one array of the model's size before anything else.
    is_resized = not (isinstance(images, Slices) and images.sizes) and images.size != size
    return bool(augment.is_active or image.standardize or images.fit == "letterbox" or is_resized)


def _image_maker(
    images: PixelField, image: ImageConfig, augment: AugmentConfig, *, seed: int
) -> ImageMaker | None:
    if not _prepares_images(images, image, augment):
        return None
    size = (image.rows, image.columns)
    pipeline: Any = ImagePipeline(*size)
    return ImageMaker(
        pipeline=torch.compile(pipeline, fullgraph=True) if image.compile else pipeline,
        size=size,
        standardized=image.standardize,
        augment=augment,
        seed=seed,
    )
