"""Transforms of samples for tests; loader processes import them from here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def mark(sample: dict[str, Any]) -> dict[str, Any]:
    """Rebind the image: a crop of another dtype, moved by a keyed offset; and add entries."""
    offset = int(sample["__rng__"].integers(0, 1000))
    return {
        "image": sample["image"][:, 1:7, 2:7].astype(np.float32) + offset,
        "offset": offset,
        "key": sample["__key__"],
        "num_series": len(sample["__facts__"]),
        "report": sample["report"],
        "report_words": sample["report"].split(),
    }


def change_in_place(sample: dict[str, Any]) -> dict[str, Any]:
    """Change the pixels where they are."""
    sample["image"] += np.uint16(7)
    return sample


def native_crop(sample: dict[str, Any]) -> dict[str, Any]:
    """Return images whose sizes differ between samples."""
    return {
        "first": sample["views"][0][:, ::2] if sample["views"] else None,
        "views": [one[:, :, 1:] for one in sample["views"]],
        "raw": sample["report"].encode(),
    }


def pad_to_longest(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate texts as a padded array of their bytes."""
    encoded = [np.frombuffer(one["report"].encode(), np.uint8) for one in samples]
    ids = np.zeros((len(samples), max(map(len, encoded), default=0)), np.uint8)
    for row, one in zip(ids, encoded, strict=True):
        row[: len(one)] = one
    return {"ids": ids, "image": np.stack([one["image"] for one in samples]), "count": len(samples)}


def global_noise(sample: dict[str, Any]) -> dict[str, Any]:
    """Draw from the generators of the process."""
    sample["noise"] = np.float64(random.random() + np.random.random())  # noqa: NPY002
    return sample


def image_of_another_shape(sample: dict[str, Any]) -> dict[str, Any]:
    """Return one shape for the synthetic sample and another one for samples."""
    image = sample["image"]
    return {"image": image if sample["__key__"] == "synthetic" else image[:, 1:]}


class Scale:
    """Transform with a parameter and a state of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.num_calls = 0

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Scale the image."""
        self.num_calls += 1
        return {**sample, "image": sample["image"] * np.float32(self.factor)}
