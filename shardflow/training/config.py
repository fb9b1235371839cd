"""Settings of a training run: one frozen dataclass, one table of the TOML file for each part.

Owns the names, defaults and ranges of every setting of ``pipelines.train``. Does not read files (that is
``shardflow.configs``) and imports no torch, so that a wrong setting is reported before seconds of imports.
Invariant: an instance that exists is consistent; what two settings must agree on is checked at the top.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardflow.configs import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError

__all__ = [
    "BatchSettings",
    "DataSettings",
    "ImageSettings",
    "LoaderSettings",
    "ModelSettings",
    "OptimizerSettings",
    "RunSettings",
    "TextSettings",
    "TimeoutSettings",
    "TrainConfig",
]

_Count = Annotated[int, Bounds(1)]
_CountOrZero = Annotated[int, Bounds(0)]
_Seconds = Annotated[float, Bounds(0.1)]
_Share = Annotated[float, Bounds(0.0, 1.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSettings:
    """What is trained on."""

    dataset: Path
    """Folder of a packed dataset."""
    manifest_version: _Count | None = None
    """Version to open; without it a fresh run takes the newest, a resumed one the version it began with."""
    train_split: str = "train"
    eval_split: str = ""
    """Split whose loss is measured; empty measures none."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The batch spec of the epoch plan; a part of the run's identity."""

    micro_batch_size: _Count | None = None
    """Samples in one forward and backward of one rank; this or ``max_tokens``."""
    max_tokens: _Count | None = None
    """Token budget of a micro-batch instead, padding counted; tokens are estimated from bytes of text."""
    max_samples: _Count = 64
    """Samples of a micro-batch under ``max_tokens``, whatever their length."""
    over_budget: Literal["alone", "skip", "truncate"] = "alone"
    """A sample longer than ``max_tokens``: a micro-batch of its own, left out, or counted as cut."""
    image_tokens_per_slice: _CountOrZero = 0
    """Counted towards ``max_tokens`` for each slice that the view takes."""
    quadratic_tokens: _CountOrZero = 0
    """Length at which attention costs as much as all the rest; ranks are balanced by it. 0 leaves it out."""
    lanes: _CountOrZero | None = None
    """Lanes that samples are mixed in; 0 mixes the whole epoch. Not given: 0, and under ``max_tokens`` a
    number chosen from the data."""
    window_bytes: ByteSize = 1024**3
    """How much of a lane is mixed at a time."""
    micro_batches_per_step: _Count
    """Micro-batches in one optimizer step over all ranks (M): ``world_size * accumulation`` fills exactly."""
    tail: Literal["drop", "repeat", "mask"] = "drop"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            found = "neither" if self.max_tokens is None else "both"
            raise ConfigError(f"batch must have one of micro_batch_size and max_tokens, got {found}.")
        if self.max_tokens is not None and self.lanes == 0:
            raise ConfigError(
                "batch.lanes must be at least 1 under max_tokens, got 0; leave it out to have it chosen."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSettings:
    """The view of a study that the model sees: K slices of its primary series, resized."""

    num_slices: _Count = 8
    rows: _Count = 64
    columns: _Count = 64
    slice_choice: Literal["even", "random"] = "even"
    """``random`` draws other slices each epoch, keyed by (seed, epoch, sample)."""
    dtype: Literal["int16", "float32"] = "float32"
    """How pixels travel to the device. ``float32`` is right for every series; ``int16`` is half the bytes and
    right for series that are stored as int16 or uint8, such as CT: others are cut and rounded, with a
    warning."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSettings:
    """How reports become tokens."""

    tokenizer: Path
    """Folder of a ``PreTrainedTokenizerFast``; ``python -m pipelines.train_tokenizer`` makes one."""
    max_tokens: Annotated[int, Bounds(2)] = 256
    """Longer reports are cut; counts the begin and end tokens."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """A vision encoder and a causal language model, built from these numbers; nothing is downloaded."""

    language: Literal["gpt2", "llama"] = "gpt2"
    patch_size: _Count = 8
    """Pixels on the side of a vision patch; must divide rows and columns of the view."""
    vision_width: _Count = 128
    vision_layers: _Count = 4
    vision_heads: _Count = 4
    language_width: _Count = 128
    language_layers: _Count = 4
    language_heads: _Count = 4
    dropout: Annotated[float, Bounds(0.0, 0.9)] = 0.1
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, about a third more compute."""

    def __post_init__(self) -> None:
        check_fields(self)
        for part in ("vision", "language"):
            width, heads = getattr(self, f"{part}_width"), getattr(self, f"{part}_heads")
            if width % heads or (width // heads) % 2:
                raise ConfigError(
                    f"{part}_width must be an even multiple of {part}_heads ({heads}), got {width}; "
                    f"use {2 * heads * max(1, round(width / (2 * heads)))}."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW, linear warm-up, cosine decay."""

    learning_rate: Annotated[float, Bounds(0.0)] = 3e-4
    """Highest learning rate, reached at the end of the warm-up."""
    final_learning_rate_share: _Share = 0.1
    """The cosine ends at this share of the highest learning rate."""
    warmup_steps: _CountOrZero = 10
    weight_decay: Annotated[float, Bounds(0.0)] = 0.01
    """Applied to matrices only, not to biases, norms and position tables."""
    beta1: Annotated[float, Bounds(0.0, 0.9999)] = 0.9
    beta2: Annotated[float, Bounds(0.0, 0.99999)] = 0.95
    epsilon: Annotated[float, Bounds(0.0)] = 1e-8
    max_gradient_norm: Annotated[float, Bounds(0.0)] = 1.0
    """Gradients of a larger norm are scaled down to it."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_gradient_norm == 0.0:
            raise ConfigError(
                "max_gradient_norm must be above 0, got 0; use 1.0, or a large number for no clipping."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """How bytes become batches; none of it changes what is trained."""

    num_threads: _Count = 2
    prefetch_bytes: ByteSize = 256 * 1024**2
    wait_timeout_s: _Seconds = 60.0
    """A wait for data that is longer names its shard and stage and ends the run."""
    on_bad_sample: Literal["mask", "raise"] = "mask"
    max_bad_samples: _CountOrZero = 10

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutSettings:
    """How long ranks wait for one another, in seconds."""

    startup_s: _Seconds = 600.0
    """Until all ranks have joined and prepared; nothing is exchanged before that."""
    steady_s: _Seconds = 100.0
    """For one exchange of gradients once steps are running."""
    control_s: _Seconds = 600.0
    """For meetings outside the gradient path: a checkpoint being written, an evaluation ending."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run itself: where it writes, how long it goes, on what it runs."""

    output: Path
    """Run folder; belongs to one run, whose restarts share it."""
    seed: int = 0
    num_epochs: _Count | None = None
    """Passes over the training split; one where ``max_steps`` is not set either."""
    max_steps: _Count | None = None
    """Steps of the whole run, also inside an epoch. With both, what comes first ends the run; the learning
    rate's cosine ends there too."""
    checkpoint_every_steps: _Count = 100
    """A checkpoint is also written at the end and on SIGTERM or SIGUSR1."""
    keep_last: _Count = 2
    resume: str = "auto"
    """``auto``: the run folder's newest sound checkpoint, else step 0. ``never``: refuse a run folder that
    holds checkpoints. Or a checkpoint folder to start from where the run folder holds none yet."""
    evaluate_every_steps: _CountOrZero = 0
    """0 evaluates at the end of each epoch; needs ``data.eval_split``."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16``: autocast; weights and optimizer stay fp32."""
    tensorboard: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.resume:
            raise ConfigError(
                "resume must be 'auto', 'never' or a checkpoint folder, got an empty text; use 'auto'."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything that ``pipelines.train`` is told."""

    data: DataSettings
    batch: BatchSettings
    text: TextSettings
    run: RunSettings
    image: ImageSettings = ImageSettings()
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    loader: LoaderSettings = LoaderSettings()
    timeouts: TimeoutSettings = TimeoutSettings()

    def __post_init__(self) -> None:
        for name in ("rows", "columns"):
            size, patch = getattr(self.image, name), self.model.patch_size
            if size % patch:
                raise ConfigError(
                    f"image.{name} must be a multiple of model.patch_size ({patch}), got {size}; "
                    f"use {patch * max(1, round(size / patch))}."
                )
        if self.loader.wait_timeout_s >= self.timeouts.steady_s:
            # Else the ranks that wait in the gradient exchange give up first, and the message names no shard.
            raise ConfigError(
                f"loader.wait_timeout_s must be less than timeouts.steady_s ({self.timeouts.steady_s:g}), "
                f"got {self.loader.wait_timeout_s:g}; lower it, or raise timeouts.steady_s."
            )
        if self.run.evaluate_every_steps and not self.data.eval_split:
            raise ConfigError(
                "data.eval_split must name a split where run.evaluate_every_steps is set, got an empty text; "
                "name one, or remove evaluate_every_steps."
            )
