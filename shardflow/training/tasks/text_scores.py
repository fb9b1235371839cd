"""Scores of written reports and answers against references: findings by class, and words by BLEU and chrF.

Source:
    Classes: Irvin et al., "CheXpert", AAAI 2019, table 1; an uncertain finding counts as a positive one
    ("U-Ones"). BLEU: Papineni et al., ACL 2002. chrF: Popovic, WMT 2015. Both as of sacrebleu, which names
    its settings.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.reports import ReportReader, load_lexicon

LABELS: Final = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other",
    "Fracture", "Support Devices",
)  # fmt: skip
_POSITIVE: Final = frozenset({"present", "uncertain"})
_NO_FINDING, _DEVICES = LABELS[0], LABELS[-1]
_BATCH: Final = 256


def read_labels(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return which classes texts speak of as there or possible, by the rules of `ReportReader`.

    Returns:
        ``(n, 14)`` in the order of `LABELS`; "No Finding" where there is none but support devices.
    """
    reader, lexicon = ReportReader(), load_lexicon()
    found = np.zeros((len(texts), len(LABELS)), bool)
    for start in range(0, len(texts), _BATCH):
        for row, content in enumerate(reader.read_many(texts[start : start + _BATCH]), start=start):
            for entity in content.entities:
                label = lexicon.codes(entity.concept)["chexpert"]
                if entity.assertion in _POSITIVE and label in LABELS:
                    found[row, LABELS.index(label)] = True
    others = [place for place, label in enumerate(LABELS) if label not in (_NO_FINDING, _DEVICES)]
    found[:, 0] = ~found[:, others].any(axis=1)
    return found


def label_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Compare the classes of texts with those of their references.

    Returns:
        ``label_f1_micro`` over all decisions, ``label_f1_macro`` over the classes that a reference has, and
        ``label_f1`` and ``label_support`` by class; None where no text and no reference has it.
    """
    said, wanted = read_labels(texts), read_labels(references)
    right = (said & wanted).sum(axis=0)
    total = said.sum(axis=0) + wanted.sum(axis=0)
    each = [2 * int(a) / int(b) if b else None for a, b in zip(right, total, strict=True)]
    support = wanted.sum(axis=0).tolist()
    counted = [one or 0.0 for one, num in zip(each, support, strict=True) if num]
    return {
        "label_f1_micro": 2 * int(right.sum()) / int(total.sum()) if total.any() else None,
        "label_f1_macro": sum(counted) / len(counted) if counted else None,
        "label_f1": dict(zip(LABELS, each, strict=True)),
        "label_support": dict(zip(LABELS, support, strict=True)),
    }


def has_word_scores() -> bool:
    """Return whether the package for BLEU and chrF is installed."""
    return importlib.util.find_spec("sacrebleu") is not None


def word_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return ``bleu`` and ``chrf`` of a corpus, 0 to 100, and their signatures."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    found: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        found[name] = float(metric.corpus_score(list(texts), [list(references)]).score)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found
