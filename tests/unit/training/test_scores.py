"""Metrics of classifiers equal those of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics
from sklearn.calibration import calibration_curve

from shardflow.training.tasks.scores import (
    auroc,
    average_precision,
    binary_metrics,
    multi_class_metrics,
    multi_label_metrics,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("seed", range(8))
def test_binary_metrics_equal_those_of_scikit_learn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=200).round(1 if seed % 2 else 6)  # with ties, and without
    labels = rng.random(200) < 1 / (1 + np.exp(-logits))
    found = binary_metrics(logits, labels)
    shares = 1 / (1 + np.exp(-logits))
    true, predicted = calibration_curve(labels, shares, n_bins=15)
    counts = np.histogram(shares, np.linspace(0, 1, 16))[0]
    expected = {
        "auroc": metrics.roc_auc_score(labels, logits),
        "average_precision": metrics.average_precision_score(labels, logits),
        "accuracy": metrics.accuracy_score(labels, logits > 0),
        "calibration_error": (np.abs(true - predicted) * counts[counts > 0]).sum() / 200,
    }
    assert found == pytest.approx(expected, abs=1e-12)
    order = rng.permutation(200)
    assert binary_metrics(logits[order], labels[order]) == found, "the order of ranks does not matter"


def test_multi_class_metrics_equal_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(300, 3)), rng.integers(0, 3, 300)
    logits[np.arange(300), labels] += 0.7
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = multi_class_metrics(logits, labels, ["a", "b", "c"])
    assert found["auroc"] == pytest.approx(
        metrics.roc_auc_score(labels, shares, multi_class="ovr"), abs=1e-12
    )
    precision = metrics.average_precision_score(np.eye(3)[labels], shares)
    assert found["average_precision"] == pytest.approx(precision, abs=1e-12)
    assert found["accuracy"] == metrics.accuracy_score(labels, logits.argmax(axis=1))


def test_of_several_labels_unknown_ones_are_left_out() -> None:
    rng = np.random.default_rng(4)
    logits, labels = rng.normal(size=(100, 2)), rng.integers(0, 2, (100, 2)).astype(float)
    is_known = rng.random((100, 2)) < 0.6
    found = multi_label_metrics(logits, labels, is_known, ["x", "y"])
    each = [
        metrics.roc_auc_score(labels[known, place], logits[known, place])
        for place, known in enumerate(is_known.T)
    ]
    assert [found["auroc/x"], found["auroc/y"]] == pytest.approx(each, abs=1e-12)
    assert found["auroc"] == pytest.approx(np.mean(each), abs=1e-12)


def test_metrics_of_a_single_class_are_not_defined() -> None:
    nothing = np.zeros(3, bool)
    assert auroc(np.arange(3.0), nothing) is None
    assert auroc(np.arange(3.0), ~nothing) is None
    assert average_precision(np.arange(3.0), nothing) is None
