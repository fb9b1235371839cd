"""Scores of classifiers and of volumes; equal on any number of ranks.

Metrics of classifiers (AUROC, average precision, accuracy, calibration error) follow from the scores and
labels of every sample, in any order. A metric that is not defined, such as AUROC of one class, is None.

Dice is of whole volumes: windows of all ranks are stitched, each volume is measured once and forgotten.
Windows come in the order of volumes, so that a volume is complete on all ranks soon after it begins, and a
rank holds one or two. Sums are integers (`shardflow.fields.volumes.windows`). A volume is added up in
slabs, each on another rank, which counts its voxels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shardflow.fields.volumes.geometry import Shape
from shardflow.fields.volumes.windows import Mode, WindowWeights
from shardflow.format.facts.units import WindowTable
from shardflow.loading import Selection
from shardflow.training.distributed import Ranks

_LOGGER = logging.getLogger(__name__)
_NUM_BINS = 15
Floats = NDArray[np.float64]


def auroc(scores: Floats, is_positive: NDArray[np.bool_]) -> float | None:
    """Compute the area under the receiver operating characteristic; ties count half.

    Example:
        >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
        0.75
    """
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Twice the mean rank of each value is an integer, so the sum is exact.
    double_ranks = 2 * np.cumsum(counts) - counts + 1
    rank_sum = int(double_ranks[place[is_positive]].sum())
    return (rank_sum - num_positive * (num_positive + 1)) / (2 * num_positive * num_negative)


def average_precision(scores: Floats, is_positive: NDArray[np.bool_]) -> float | None:
    """Compute the sum of precisions at each threshold, weighted by the rise of recall.

    Example:
        >>> round(average_precision(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True])), 3)
        0.833
    """
    num_positive = int(is_positive.sum())
    if not num_positive:
        return None
    values, place = np.unique(-scores, return_inverse=True)
    found = np.cumsum(np.bincount(place[is_positive], minlength=len(values)))
    seen = np.cumsum(np.bincount(place, minlength=len(values)))
    return float(np.sum(np.diff(found, prepend=0) * (found / seen)) / num_positive)


def calibration_error(confidence: Floats, is_right: NDArray[np.bool_]) -> float | None:
    """Compute the expected calibration error: 15 bins of equal width, the gaps weighted by their samples.

    Args:
        confidence: ``(n,)`` probabilities.
        is_right: ``(n,)``, whether what they are of is so.
    """
    if not len(confidence):
        return None
    inner_edges = np.linspace(0.0, 1.0, _NUM_BINS + 1)[1:-1]
    place = np.searchsorted(inner_edges, confidence)
    order = np.lexsort((confidence, place))
    sums = np.bincount(place[order], weights=confidence[order], minlength=_NUM_BINS)
    right = np.bincount(place[is_right], minlength=_NUM_BINS)
    return float(np.abs(sums - right).sum() / len(confidence))


def binary_metrics(logits: Floats, is_positive: NDArray[np.bool_]) -> dict[str, float | None]:
    """Compute all metrics of one yes-or-no question from its logits, ``(n,)``."""
    return {
        "auroc": auroc(logits, is_positive),
        "average_precision": average_precision(logits, is_positive),
        "accuracy": float(((logits > 0) == is_positive).mean()) if len(logits) else None,
        "calibration_error": calibration_error(_sigmoid(logits), is_positive),
    }


def multi_label_metrics(
    logits: Floats, labels: Floats, is_known: NDArray[np.bool_], names: Sequence[str]
) -> dict[str, float | None]:
    """Compute the metrics of several questions: of each as ``METRIC/NAME``, and their means as ``METRIC``.

    Args:
        logits: ``(n, k)``.
        labels: ``(n, k)``, 0 or 1.
        is_known: ``(n, k)``: others are left out.
        names: Of the k questions.
    """
    each = [
        binary_metrics(logits[known, place], labels[known, place] > 0)
        for place, known in enumerate(is_known.T)
    ]
    return _with_means(dict(zip(names, each, strict=True)))


def multi_class_metrics(
    logits: Floats, labels: NDArray[np.int64], names: Sequence[str]
) -> dict[str, float | None]:
    """Compute the metrics of one of k classes.

    AUROC and average precision are of each class against all others and, as ``METRIC``, their means; accuracy
    and calibration error are of the likeliest class.

    Args:
        logits: ``(n, k)``.
        labels: ``(n,)``.
        names: Of the k classes.
    """
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = shifted / shifted.sum(axis=1, keepdims=True)
    each = {
        name: {
            "auroc": auroc(shares[:, place], labels == place),
            "average_precision": average_precision(shares[:, place], labels == place),
        }
        for place, name in enumerate(names)
    }
    is_right = logits.argmax(axis=1) == labels
    return {
        **_with_means(each),
        "accuracy": float(is_right.mean()) if len(labels) else None,
        "calibration_error": calibration_error(shares.max(axis=1, initial=0.0), is_right),
    }


def _with_means(each: Mapping[str, Mapping[str, float | None]]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for metric in next(iter(each.values()), {}):
        defined = [one for one in (values[metric] for values in each.values()) if one is not None]
        found[metric] = float(np.mean(defined)) if defined else None
    return found | {
        f"{metric}/{name}": one for name, values in each.items() for metric, one in values.items()
    }


def _sigmoid(logits: NDArray[Any]) -> Floats:
    share: Floats = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return share


_SLAB_BYTES: Final = 64 << 20
_MAX_NAMED: Final = 20


class Segmentation(Protocol):
    """What the meter takes of the task."""

    names: Sequence[str]
    has_overlaps: bool

    @property
    def num_outputs(self) -> int:
        """Logits of a voxel."""


@dataclass(slots=True, eq=False)
class _Open:
    """Windows of a volume on this rank."""

    sums: NDArray[np.int64] | None = None
    """``(K, D, H, W)``."""
    target: NDArray[np.uint8] | None = None
    """``(1 or L, D, H, W)``: classes, or a plane for each label."""
    num_windows: int = 0
    num_masked: int = 0
    is_known: bool = False


class VolumeMeter:
    """Dice of the volumes of one evaluation, gathered exactly: each volume once, without padding.

    `add` exchanges with all ranks, so every rank calls it as often.

    Args:
        task: The task.
        windows: The samples of the evaluation.
        ranks: The ranks of the run.
        roi_size: Voxels of a window.
        mode: Weights of the voxels of a window.
    """

    def __init__(
        self, task: Segmentation, windows: Selection, ranks: Ranks, *, roi_size: Shape, mode: Mode
    ) -> None:
        table = windows.datasets[0].samples
        assert isinstance(table, WindowTable)  # noqa: S101 - of `select_windows`
        self._task, self._table, self._ranks = task, table, ranks
        self._keys = windows.datasets[0].studies
        self._weights = WindowWeights(roi_size, mode, 0.125)
        counts = table.counts(np.arange(self._keys.num_samples))
        self._studies = np.flatnonzero(counts)
        self._last_rows = np.cumsum(counts[self._studies]) - 1
        self._num_closed = 0
        self._open: dict[int, _Open] = {}
        self._counts: list[NDArray[np.int64]] = []
        self._incomplete: list[str] = []
        self._unannotated: list[str] = []

    def add(self, inputs: Any, output: Any) -> None:
        """Add the windows of a micro-batch, and measure the volumes that are complete on all ranks."""
        tensors: Mapping[str, torch.Tensor] = inputs.tensors
        rows = tensors["row"].cpu().numpy()
        is_sample = inputs.weights_B.cpu().numpy() > 0
        is_known = tensors["is_known"].cpu().numpy()
        starts, shapes = (tensors[name].cpu().numpy() for name in ("start", "shape"))
        scores = output.detach().float().cpu().numpy()
        target = tensors["target"].cpu().numpy()
        studies = self._table.study_rows(np.maximum(rows, 0)).tolist()
        for slot in np.flatnonzero(rows >= 0).tolist():
            part = self._open.setdefault(studies[slot], _Open())
            if not is_sample[slot]:
                part.num_masked += 1
                continue
            if part.sums is None or part.target is None:
                shape = tuple(shapes[slot].tolist())
                part.sums = np.zeros((self._task.num_outputs, *shape), np.int64)
                part.target = np.zeros((target.shape[1], *shape), np.uint8)
            part.num_windows += 1
            part.is_known |= bool(is_known[slot])
            start = starts[slot].tolist()
            self._weights.add(scores[slot], (start[0], start[1], start[2]), part.sums, None)
            self._weights.put(target[slot], (start[0], start[1], start[2]), part.target)
        last = float(rows.max(initial=-1))
        done = self._ranks.all_gather_numbers([last], self._ranks.timeouts.control_s).max()
        self._close(int(np.searchsorted(self._last_rows, int(done), side="right")))

    def finish(self) -> dict[str, float | None]:
        """Return the metrics, equal on all ranks; a collective."""
        self._close(len(self._studies))
        num_labels = len(self._task.names)
        own = np.array(self._counts, np.float64).reshape(-1)
        # Whole numbers below 2**53: their sum is exact.
        total = self._ranks.all_gather_numbers(own, self._ranks.timeouts.control_s).sum(dim=0).numpy()
        both, each = total.reshape(-1, num_labels, 2).transpose(2, 0, 1)
        is_defined = each > 0
        dice = np.where(is_defined, 2 * both / np.maximum(each, 1), np.nan)
        by_label = {
            name: float(np.mean(values[defined])) if defined.any() else None
            for name, values, defined in zip(self._task.names, dice.T, is_defined.T, strict=True)
        }
        means = [one for one in by_label.values() if one is not None]
        if self._ranks.rank == 0:
            for keys, what in (
                (self._incomplete, "have windows that could not be read"),
                (self._unannotated, "are not annotated"),
            ):
                if keys:
                    named = ", ".join(keys[:_MAX_NAMED]) + (", ..." if len(keys) > _MAX_NAMED else "")
                    _LOGGER.warning(
                        "%d volumes of the evaluation %s and count nothing: %s", len(keys), what, named
                    )
        return {
            "dice": float(np.mean(means)) if means else None,
            **{f"dice/{name}": one for name, one in by_label.items()},
            "num_volumes": float(len(self._counts)),
            "num_incomplete_volumes": float(len(self._incomplete)),
            "num_unannotated_volumes": float(len(self._unannotated)),
        }

    def _close(self, num_done: int) -> None:
        """Measure the volumes up to a number of them; the same on all ranks."""
        for place in range(self._num_closed, num_done):
            self._measure(int(self._studies[place]))
        self._num_closed = max(self._num_closed, num_done)

    def _measure(self, study: int) -> None:
        part = self._open.pop(study, None) or _Open()
        shape = None if part.sums is None else list(part.sums.shape[1:])
        facts = self._ranks.all_gather_json([shape, part.num_windows, part.num_masked, part.is_known])
        shapes = [one for one, *_ in facts if one is not None]
        num_windows, num_masked = (sum(one[place] for one in facts) for place in (1, 2))
        if num_windows + num_masked == 0:  # the evaluation has none of it
            return
        key = self._keys.sample_key(study)
        if num_windows < int(self._table.counts(np.array([study]))[0]):
            self._incomplete.append(key)
        elif not any(one[3] for one in facts):
            self._unannotated.append(key)
        else:
            self._counts.append(self._count(part, shapes[0]))

    def _count(self, part: _Open, shape: Sequence[int]) -> NDArray[np.int64]:
        """Return ``(L, 2)`` of this rank's slabs: voxels predicted and marked, and the sum of both."""
        task, ranks = self._task, self._ranks
        num_planes = len(task.names) if task.has_overlaps else 1
        counts = np.zeros((len(task.names), 2), np.int64)
        depth = max(1, _SLAB_BYTES // (8 * task.num_outputs * shape[1] * shape[2]))
        for number, first in enumerate(range(0, shape[0], depth)):
            stop, owner = min(first + depth, shape[0]), number % ranks.world_size
            sums = np.zeros((task.num_outputs, stop - first, *shape[1:]), np.int64)
            target = np.zeros((num_planes, *sums.shape[1:]), np.uint8)
            if part.sums is not None and part.target is not None:
                sums[...], target[...] = part.sums[:, first:stop], part.target[:, first:stop]
            ranks.reduce_integers(torch.from_numpy(sums), owner)
            ranks.reduce_integers(torch.from_numpy(target), owner, is_largest=True)
            if owner != ranks.rank:
                continue
            best = None if task.has_overlaps else sums.argmax(axis=0)
            for place in range(len(task.names)):
                predicted = sums[place] > 0 if best is None else best == place + 1
                marked = target[place] > 0 if best is None else target[0] == place + 1
                counts[place] += (
                    np.count_nonzero(predicted & marked),
                    np.count_nonzero(predicted) + np.count_nonzero(marked),
                )
        return counts
