"""Metrics of classifiers: AUROC, average precision, accuracy and calibration error, exact and by NumPy alone.

All follow from the scores and labels of every sample; their order does not matter, so any number of ranks
gives equal numbers. A metric that is not defined, such as AUROC of one class, is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
