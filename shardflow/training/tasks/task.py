"""Task of a training run: fields, model, inputs, loss and metrics.

The loop, checkpoints and resume are the same for all. `Task` is what the run works with; the task of reports
implements it. A task whose inputs are arrays with a row a sample, such as the classifier, is an `ArrayTask`:
it states losses per sample, and this module weighs, sums and counts them, so that padding never counts and
any number of ranks makes the same step.

The first sample of a run is written as text, with what its loss counts marked: a wrong template or mask is
seen at a glance, and in no number. The text is that of a patient, so it goes into a file of the run folder
that only its owner may read, where the settings ask for it; the log has its counts.
"""

from __future__ import annotations

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shardflow.errors import ConfigError, TrainingError
from shardflow.fields.field import Field
from shardflow.fields.transforming import load_function
from shardflow.loading import Batch, Loader, Selection
from shardflow.loading.tensors import Parcel
from shardflow.logs import counted
from shardflow.sampling import BatchSpec
from shardflow.sampling.spec import Tail
from shardflow.storage import write_atomic
from shardflow.telemetry import StageCounters
from shardflow.training.config import BatchConfig
from shardflow.training.device.transfer import Transfer, open_transfer
from shardflow.training.device.volumes import VolumeAugmentation, VolumeDraw
from shardflow.training.distributed import Ranks
from shardflow.training.inputs import InputSource, StepInputs
from shardflow.training.model_fields import TaskConfig

_LOGGER = logging.getLogger(__name__)

Scores = Mapping[str, NDArray[Any]]
"""By name, values of samples, ``(n, ...)``; as an evaluation gathers them from all ranks."""


class Meter(Protocol):
    """Collector of what the metrics of one evaluation follow from."""

    def add(self, inputs: Any, output: Any) -> None:
        """Take a micro-batch and what the model returned for it; all ranks call it as often."""

    def finish(self) -> dict[str, float | None]:
        """Return the metrics, equal on all ranks; a collective."""


class ScoreMeter:
    """Scores of the samples of one evaluation, gathered exactly: each sample once, without padding.

    Args:
        task: Says what to keep of a micro-batch, and what to compute of all.
        ranks: The ranks of the run.
    """

    def __init__(self, task: ArrayTask, ranks: Ranks) -> None:
        self._task, self._ranks = task, ranks
        self._parts: list[dict[str, NDArray[Any]]] = []

    def add(self, inputs: Any, output: Any) -> None:
        """Keep the scores of a micro-batch."""
        assert isinstance(inputs, ArrayInputs)  # noqa: S101 - of the same task
        is_sample = (inputs.tensors[_WEIGHTS] > 0).cpu()
        found = self._task.scores(output, inputs.tensors)
        self._parts.append(
            {name: one.detach().cpu()[is_sample].double().numpy() for name, one in found.items()}
        )

    def finish(self) -> dict[str, float | None]:
        """Gather the scores of all ranks and return the metrics."""
        ranks = self._ranks
        own = {name: np.concatenate([part[name] for part in self._parts]) for name in self._names()}
        shapes = ranks.all_gather_json({name: list(one.shape) for name, one in own.items()})
        names = next((list(shape) for shape in shapes if shape), [])
        if not names:
            return {}
        gathered: dict[str, NDArray[Any]] = {}
        for name in names:
            rest = next(shape[name][1:] for shape in shapes if shape)
            counts = [shape[name][0] * math.prod(rest) if shape else 0 for shape in shapes]
            flat = np.zeros(max(counts))
            if name in own:
                flat[: own[name].size] = own[name].reshape(-1)
            by_rank = ranks.all_gather_numbers(flat, ranks.timeouts.control_s).numpy()
            parts = [row[:count] for row, count in zip(by_rank, counts, strict=True)]
            gathered[name] = np.concatenate(parts).reshape(-1, *rest)
        return dict(self._task.metrics(gathered))

    def _names(self) -> list[str]:
        return list(self._parts[0]) if self._parts else []


class Task(Protocol):
    """What is learned, as the run sees it."""

    def bindings(self) -> dict[str, Any]:
        """Return the settings that must match the tensors of a checkpoint, JSON values by name."""

    def batch_spec(self, selection: Selection, tail: Tail | None) -> BatchSpec:
        """Return how steps are formed, with another tail than the settings' where one is given."""

    def fields(self, selection: Selection, *, is_evaluation: bool) -> dict[str, Field]:
        """Return what a batch holds; in an evaluation nothing is drawn at random."""

    def make_model(self, loader: Loader, evaluation: Selection | None) -> nn.Module:
        """Build what is trained, on the CPU in training mode, from the seed alone.

        Raises:
            ConfigError: The data or the model do not fit the task.
        """

    def open_inputs(self, loader: Loader, device: torch.device, *, pinned_bytes: int) -> InputSource:
        """Return the maker of the model's tensors from batches; called after `make_model`."""

    def padding(self, inputs: InputSource, device: torch.device) -> StepInputs:
        """Return a micro-batch of weight 0 in the shapes of the run."""

    def evaluation_samples(self, selection: Selection) -> Selection:
        """Return what an evaluation of some samples takes one by one: by default these."""

    def meter(self, ranks: Ranks) -> Meter | None:
        """Return a new collector of the scores of an evaluation; None where only its loss is wanted."""

    def first_sample(self, loader: Loader) -> Mapping[str, Pieces]:
        """Return the first sample of the first step for people; nothing of a task without texts."""

    @property
    def references(self) -> Sequence[nn.Module]:
        """Models that are run beside the trained one and stay as they are; held by the ranks like it."""


_WEIGHTS = "sample_weights"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArrayInputs:
    """One micro-batch of an `ArrayTask` on the device."""

    task: ArrayTask
    tensors: Mapping[str, torch.Tensor]
    num_tokens: float
    num_samples: float

    @property
    def weights_B(self) -> torch.Tensor:  # noqa: N802 - the axes are a suffix
        """float32, 0 for padding and masked samples."""
        return self.tensors[_WEIGHTS]

    def forward(self, model: nn.Module) -> Any:
        """Run the model."""
        return self.task.forward(model, self.tensors)

    def loss(self, output: Any) -> torch.Tensor:
        """Return the weighted sum of the losses of the samples."""
        losses = self.task.losses(output, self.tensors)
        weights = self.weights_B
        if losses.shape != weights.shape:
            raise TrainingError(
                f"The losses of a task are one of each sample, {tuple(weights.shape)}, got "
                f"{tuple(losses.shape)}; sum over the other axes."
            )
        weights = weights.to(losses.dtype)
        return (torch.where(weights > 0, losses, torch.zeros_like(losses)) * weights).sum()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sent:
    parcel: Parcel
    augmented: Sequence[VolumeDraw]
    num_tokens: float
    num_samples: float


class _ArraySource:
    """Maker of the tensors of an `ArrayTask`.

    Args:
        task: The task.
        transfer: How arrays get to the device.
    """

    def __init__(self, task: ArrayTask, transfer: Transfer) -> None:
        self.transfer = transfer
        self._task = task
        self._is_evaluation = False

    def for_evaluation(self) -> _ArraySource:
        other = copy.copy(self)
        other._is_evaluation = True
        return other

    def __call__(self, batch: Batch) -> ArrayInputs:
        return self.receive(self.send(batch))

    def send(self, batch: Batch, *, is_padding: bool = False) -> _Sent:
        """Run the host's half; as padding, the same with weight 0."""
        arrays = dict(self._task.arrays(batch, is_evaluation=self._is_evaluation))
        weights = np.array(batch.arrays["weight"], np.float32) * (not is_padding)
        counts = np.asarray(self._task.counts(arrays, len(weights)), np.float64)
        augmentation = None if self._is_evaluation else self._task.augmentation
        return _Sent(
            parcel=self.transfer.send({**arrays, _WEIGHTS: weights}),
            augmented=() if augmentation is None else augmentation.draw_batch(batch),
            num_tokens=float(np.dot(counts, weights.astype(np.float64))),
            num_samples=float(weights.sum(dtype=np.float64)),
        )

    def receive(self, sent: _Sent) -> ArrayInputs:
        received = self.transfer.receive(sent.parcel)
        if sent.augmented and self._task.augmentation is not None:
            received = self._task.augmentation.apply(received, sent.augmented)
        tensors = {**self._task.prepare(received), _WEIGHTS: received[_WEIGHTS]}
        return ArrayInputs(
            task=self._task, tensors=tensors, num_tokens=sent.num_tokens, num_samples=sent.num_samples
        )


class ArrayTask(ABC):
    """Task whose inputs are arrays with a row a sample; subclass it for ``task.target``.

    Example::

        class Age(ArrayTask):
            def build_model(self, example):
                return Net()

            def arrays(self, batch, *, is_evaluation):
                return {"image": batch["image"].astype("float32"), "age": batch["age"]}

            def forward(self, model, tensors):
                return model(tensors["image"])

            def losses(self, output, tensors):
                return (output[:, 0] - tensors["age"]) ** 2
    """

    _run: RunSettings
    _example: Batch

    # ---- what a task states --------------------------------------------------------------------

    @abstractmethod
    def build_model(self, example: Batch) -> nn.Module:
        """Build the model from torch's random numbers, which are seeded.

        Args:
            example: The first micro-batch of the training data.
        """

    @abstractmethod
    def arrays(self, batch: Batch, *, is_evaluation: bool) -> Mapping[str, NDArray[Any]]:
        """Return what the model and the loss take, by name, ``(B, ...)`` each; on the host."""

    @abstractmethod
    def forward(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Run the model on the tensors of a micro-batch."""

    @abstractmethod
    def losses(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each sample, ``(B,)``, of padding any finite number."""

    def counts(self, arrays: Mapping[str, NDArray[Any]], num_slots: int) -> NDArray[Any]:  # noqa: ARG002
        """Return ``(B,)`` how many targets each loss adds up: what the step's loss is divided by; 1 each."""
        return np.ones(num_slots)

    @property
    def augmentation(self) -> VolumeAugmentation | None:
        """Augmentation of the volumes of training batches on the device, before `prepare`; None for none.

        It changes the arrays that have the names of fields of volumes, and masks of these.
        """
        return None

    def prepare(self, tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Transform the tensors on the device, for example images; nothing by default."""
        return tensors

    def scores(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:  # noqa: ARG002
        """Return what `metrics` takes of each sample, ``(B, ...)`` by name; nothing by default."""
        return {}

    def metrics(self, scores: Scores) -> Mapping[str, float | None]:  # noqa: ARG002
        """Compute the metrics of an evaluation from all samples of all ranks, in no order that counts."""
        return {}

    def settings(self) -> Mapping[str, Any]:
        """Return JSON values that a checkpoint must have been trained with as well."""
        return {}

    def check(  # noqa: B027 - may be left as it is
        self, loader: Loader, evaluation: Selection | None, example: Batch
    ) -> None:
        """Refuse data that do not fit, before the model is built."""

    # ---- what the run takes ----------------------------------------------------------------------

    def open(self, run: RunSettings) -> ArrayTask:
        """Take the settings of the run; returns the task."""
        self._run = run
        return self

    def bindings(self) -> dict[str, Any]:
        """Return the settings of the task."""
        return {"task": self._run.name, **self.settings()}

    def batch_spec(self, selection: Selection, tail: Tail | None) -> BatchSpec:  # noqa: ARG002
        """Return how steps are formed."""
        batch = self._run.batch
        return BatchSpec(
            micro_batch_size=batch.micro_batch_size or 0,
            micro_batches_per_step=batch.micro_batches_per_step,
            tail=tail or batch.tail,
            lanes=batch.lanes or 0,
            window_bytes=batch.window_bytes,
        )

    def fields(self, selection: Selection, *, is_evaluation: bool) -> dict[str, Field]:  # noqa: ARG002
        """Return the fields of the settings."""
        fields = self._run.fields
        return {name: one.for_evaluation() if is_evaluation else one for name, one in fields.items()}

    def make_model(self, loader: Loader, evaluation: Selection | None) -> nn.Module:
        """Read the first micro-batch, check the data, and build the model."""
        with closing(loader.stream(0, range(1))) as batches:
            self._example = next(batches)
        self.check(loader, evaluation, self._example)
        torch.manual_seed(self._run.seed)
        return self.build_model(self._example).train()

    def open_inputs(self, loader: Loader, device: torch.device, *, pinned_bytes: int) -> _ArraySource:
        """Return the maker of tensors."""
        counters: StageCounters = loader.counters
        return _ArraySource(self, open_transfer(device, ring_bytes=pinned_bytes, counters=counters))

    def padding(self, inputs: InputSource, device: torch.device) -> StepInputs:  # noqa: ARG002
        """Return the first micro-batch with weight 0."""
        assert isinstance(inputs, _ArraySource)  # noqa: S101 - of `open_inputs`
        return inputs.receive(inputs.send(self._example, is_padding=True))

    def evaluation_samples(self, selection: Selection) -> Selection:
        """Return the samples."""
        return selection

    def meter(self, ranks: Ranks) -> Meter:
        """Return a collector of scores."""
        return ScoreMeter(self, ranks)

    def first_sample(self, loader: Loader) -> Mapping[str, Pieces]:  # noqa: ARG002
        """Return nothing."""
        return {}

    @property
    def references(self) -> Sequence[nn.Module]:
        """Return models that `forward` runs beside the trained one, of `build_model`; none by default."""
        return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings of the run that an `ArrayTask` is part of."""

    name: str
    """Identity of the task."""
    batch: BatchConfig
    fields: Mapping[str, Field]
    seed: int
    precision: str = "fp32"
    """Type that is computed in: ``fp32``, ``bf16`` or ``fp16``."""


def make_own_task(settings: TaskConfig) -> ArrayTask:
    """Import and make the task of ``task.target``.

    Raises:
        ConfigError: It cannot be imported, or is no `ArrayTask`.
    """
    make: Any = load_function(settings.target, "task.target")
    try:
        found = make(**settings.arguments)
    except TypeError as error:
        raise ConfigError(f"task.arguments do not fit {settings.target}: {error}.") from error
    if not isinstance(found, ArrayTask):
        raise ConfigError(
            f"task.target must make a shardflow.training.tasks.task.ArrayTask, got {type(found).__name__}; "
            "subclass it."
        )
    return found


Pieces: TypeAlias = Sequence[tuple[str, float] | int]
"""Texts with their weight in the loss, and numbers of pictures, in the order of the model."""
FIRST_SAMPLE_NAME: Final = "first_sample.txt"
"""Name of the file in the run folder."""
_MOST_CHARACTERS: Final = 20_000
_HEAD: Final = (
    "First sample of the first step, as the model gets it. The loss counts what is between ⟦ and ⟧, with a "
    "weight where it is not 1.\n"
)


def write_first_sample(folder: Path, sample: Mapping[str, Pieces]) -> None:
    """Write the file, and log its counts.

    Args:
        folder: The run folder.
        sample: Pieces by the name of the sequence, such as both of a pair.

    Raises:
        StorageError: It cannot be written.
    """
    text = _HEAD + "".join(f"\n--- {name} ---\n{_marked(pieces)}\n" for name, pieces in sample.items())
    left_out = len(text) - _MOST_CHARACTERS
    if left_out > 0:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]}\n--- {left_out:,} characters left out ---\n{text[-half:]}"
    write_atomic(folder / FIRST_SAMPLE_NAME, [text.encode()], replace=True, mode=0o600)
    pieces = [one for each in sample.values() for one in each]
    texts = [one for one in pieces if not isinstance(one, int)]
    num_learned = sum(len(text) for text, weight in texts if weight)
    _LOGGER.info(
        "the first sample is in %s: %s and %s, %d of them in the loss",
        FIRST_SAMPLE_NAME,
        counted(len(pieces) - len(texts), "picture"),
        counted(sum(len(text) for text, _ in texts), "character"),
        num_learned,
    )


def _marked(pieces: Pieces) -> str:
    return "".join(map(_marked_piece, pieces))


def _marked_piece(piece: tuple[str, float] | int) -> str:
    if isinstance(piece, int):
        return f"<picture {piece + 1}>"
    text, weight = piece
    if not weight:
        return text
    return f"⟦{text}⟧" if weight == 1 else f"⟦{weight:g}: {text}⟧"
