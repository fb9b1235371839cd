"""The stages of a run by name: what each is, and who spends its time there.

The names are those of the counters, of the lines of ``metrics.jsonl``, and of the label ``stage`` wherever
numbers leave the process. None of them ever names a patient, a file or a path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["STAGES", "Stage", "StageGroup", "metric_name"]

StageGroup = Literal["fetch", "make", "device", "step", "idle"]
"""``fetch``: bytes come to the process. ``make``: threads make micro-batches of them. ``device``: these go to
where the model computes. ``step``: the trainer's loop. ``idle``: somebody waits for somebody else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage."""

    group: StageGroup
    text: str
    """What happens there, for a person."""
    is_part_of: str = ""
    """The stage whose seconds hold this one's too; empty for none."""


STAGES: Final[dict[str, Stage]] = {
    "read": Stage(group="fetch", text="reading the bytes of fields, from whatever tier has them"),
    "cache_ram": Stage(group="fetch", text="blocks from the cache in memory", is_part_of="read"),
    "cache_disk": Stage(group="fetch", text="blocks from the cache on the node's disk", is_part_of="read"),
    "cache_origin": Stage(group="fetch", text="blocks from the store behind the cache, ahead or not"),
    "cache_wait": Stage(
        group="fetch", text="waiting for blocks that another rank fetches", is_part_of="read"
    ),
    "index": Stage(group="fetch", text="opening the index of a shard"),
    "plan": Stage(group="make", text="looking up what a micro-batch holds"),
    "check": Stage(group="make", text="checksums"),
    "decode": Stage(group="make", text="decoding slices"),
    "transform": Stage(group="make", text="resizing, windowing and placing slices"),
    "user_transform": Stage(group="make", text="the user's own transform"),
    "tokens": Stage(group="make", text="placing stored tokens"),
    "collate": Stage(group="make", text="getting memory for a micro-batch, and putting it together"),
    "tokenize": Stage(group="device", text="making tokens and the model's tensors of a micro-batch"),
    "pin": Stage(group="device", text="into pinned memory, and waiting for room there"),
    "copy": Stage(group="device", text="from pinned memory to the device"),
    "data_wait": Stage(group="step", text="the loop, or the device, waits for its next micro-batch"),
    "forward": Stage(group="step", text="the model's forward, and its loss"),
    "backward": Stage(group="step", text="gradients, up to the last one of this rank"),
    "exchange": Stage(group="step", text="waiting for gradients of other ranks, after this rank's last one"),
    "optimizer": Stage(group="step", text="scaling and clipping gradients, updating weights"),
    "agree": Stage(
        group="step", text="the small exchange of numbers of each step, and waiting for ranks in it"
    ),
    "checkpoint": Stage(group="step", text="training stands still for a checkpoint"),
    "evaluate": Stage(group="step", text="evaluations"),
    "wait": Stage(group="idle", text="a consumer waits for the loader"),
    "starved": Stage(group="idle", text="waits for a loader that had nothing ready"),
    "idle": Stage(group="idle", text="threads of the loader have nothing to do"),
}
"""All stages, in the order of a sample's way. Seconds of the groups ``fetch`` and ``make`` are summed over
threads."""


def metric_name(name: str) -> str:
    """Return the OpenTelemetry name of a metric of ours: dots, no unit in the name, one namespace.

    Example:
        >>> metric_name("stage.duration")
        'shardflow.stage.duration'
    """
    return f"shardflow.{name}"
