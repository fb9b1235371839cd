"""What de-identification did how often in a version: the sum over its samples, and over no others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ShardflowError
from shardflow.shards.keys import STUDY_FIELD

if TYPE_CHECKING:
    from shardflow.shards.dataset import Dataset

__all__ = ["counts_without"]

_BLACKOUT: Final = "blackout_slices"
_CLEAN_PIXELS: Final = "113101"


def counts_without(recorded: Mapping[str, Any], dataset: Dataset, rows: Iterable[int]) -> dict[str, Any]:
    """Return ``extra.deidentification`` of a manifest for a version without some of its samples.

    Args:
        recorded: What the version before has there.
        dataset: That version.
        rows: The samples that go. One that cannot be read stays in the counts: a damaged shard must not keep
            anybody in the dataset.
    """
    counts = Counter({name: int(count) for name, count in recorded.get("counts", {}).items()})
    for row in rows:
        try:
            study = json.loads(dataset.read_fields(row, [STUDY_FIELD])[STUDY_FIELD])
            counts.subtract(_tallies(study))
        except (ShardflowError, ValueError, KeyError, TypeError):
            continue
    kept = {name: count for name, count in sorted(counts.items()) if count > 0}
    codes = [
        code for code in recorded.get("profile_codes", ()) if code != _CLEAN_PIXELS or kept.get(_BLACKOUT)
    ]
    return {**recorded, "counts": kept, "profile_codes": codes}


def _tallies(study: Mapping[str, Any]) -> Counter[str]:
    """Count in a ``study.json`` what `shardflow.packing.privacy` counted while it was written."""
    found: Counter[str] = Counter()
    for category, count in study["deidentification"]["report_text"]["replaced"].items():
        found[f"report_{category}"] += int(count)
    for series in study["series"]:
        done = series["deidentification"]
        found["face_risk_series"] += bool(done["face_risk"])
        if done["blackout"] is not None:
            found[_BLACKOUT] += int(series["num_slices"])
    return found
