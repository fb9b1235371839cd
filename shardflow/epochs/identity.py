"""The name of a plan: a digest of all that decides, besides seed and epoch, what is in which step."""

from __future__ import annotations

import hashlib
import json

from shardflow.epochs.spec import BatchSpec

__all__ = ["DEFAULT_VIEW", "PLAN_VERSION", "plan_id"]

DEFAULT_VIEW = "full_study"
"""The view in which a sample is a whole study with its report."""

PLAN_VERSION = 1
"""Raised with every change of the order or of how steps are formed (change class ITERATION ORDER)."""


def plan_id(
    *, dataset_id: str, split: str, spec: BatchSpec, view: str = DEFAULT_VIEW, subset: str | None = None
) -> str:
    """Return the identity of a plan.

    Two runs of equal identity and seed run the same steps on any world size. What not every plan uses (a
    subset, later sidecars) enters the digest only where it is used, so that plans which do not use it keep
    their identity.

    Args:
        dataset_id: Digest of the manifest; it fixes the samples table and the manifest version. Of a blend,
            its own digest.
        split: Name of the split that is the population.
        spec: How micro-batches and steps are formed.
        view: What a sample is.
        subset: Digest of the rows, where they are not all of the split.

    Returns:
        64 hexadecimal digits, the SHA-256 of the canonical JSON of it all.
    """
    parts = {
        "plan_version": PLAN_VERSION,
        "dataset_id": dataset_id,
        "split": split,
        "view": view,
        "batch": spec.to_json(),
        **({} if subset is None else {"subset": subset}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
