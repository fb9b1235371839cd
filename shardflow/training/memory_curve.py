"""How large a micro-batch fits: memory measured for some sizes, a line through them, and a proposal.

A process of its own builds the run's model and optimizer, and takes one step with 1, 2, 4, ... samples in
the largest shapes that the settings allow: the whole number of slices, the longest text. What it does to
memory, also when it runs out of it, is no matter to the caller. Nothing is ever changed under way: the size
of a micro-batch is a part of the plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shardflow.configs import dump_config
from shardflow.errors import ConfigError, TrainingError
from shardflow.training.config import TrainConfig

__all__ = ["MemoryCurve", "MemoryPoint", "fit_memory", "measure_memory_curve"]

MARGIN: Final = 0.1
"""Of the memory that stays free: kernels, communication, fragments of the allocator."""
_TIMEOUT_S: Final = 900.0
_OF_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    """One size that was run."""

    micro_batch_size: int
    peak_bytes: int
    """Most memory at once: of the device, or of the process where that is the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """What micro-batches take, and how many samples fit."""

    device: str
    points: tuple[MemoryPoint, ...]
    fixed_bytes: int
    """Weights, gradients, optimizer, libraries."""
    sample_bytes: int
    """Of each sample of a micro-batch."""
    room_bytes: int
    """That a rank may fill, margin taken off."""
    largest: int
    """Samples of a micro-batch that fit; 0 for none."""
    proposed: int
    """The largest that leaves a step's samples as they are; 0 for none."""
    proposed_micro_batches: int
    """Micro-batches of a step with it."""

    def text(self) -> str:
        """Say what is proposed, in a sentence."""
        each = f"{self.fixed_bytes / 1e9:.3g} GB and {self.sample_bytes / 1e9:.3g} GB a sample"
        if not self.proposed:
            return f"not one sample fits into {self.room_bytes / 1e9:.3g} GB: the model takes {each}"
        return (
            f"{self.largest} samples fit into {self.room_bytes / 1e9:.3g} GB ({each}); with steps of as many "
            f"samples as now: batch.micro_batch_size = {self.proposed}, batch.micro_batches_per_step = "
            f"{self.proposed_micro_batches}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all numbers."""
        return {
            **{name: getattr(self, name) for name in self.__slots__ if name != "points"},
            "points": [[one.micro_batch_size, one.peak_bytes] for one in self.points],
        }


def fit_memory(points: Sequence[MemoryPoint]) -> tuple[int, int]:
    """Return what is taken by no sample, and by each: a line by least squares, raised above all points.

    Args:
        points: At least one; of a single one the whole is taken for the sample's.

    Example:
        >>> fit_memory([MemoryPoint(micro_batch_size=size, peak_bytes=100 + 20 * size) for size in (1, 2, 4)])
        (100, 20)
    """
    sizes = [one.micro_batch_size for one in points]
    peaks = [one.peak_bytes for one in points]
    mean_size, mean_peak = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    if not spread:
        return 0, peaks[0] // sizes[0]
    slope = (
        sum((size - mean_size) * (peak - mean_peak) for size, peak in zip(sizes, peaks, strict=True)) / spread
    )
    slope = max(slope, 1.0)
    fixed = max(peak - slope * size for size, peak in zip(sizes, peaks, strict=True))
    return max(0, round(fixed)), round(slope)


def measure_memory_curve(config: TrainConfig, *, ranks_per_node: int = 1) -> MemoryCurve:
    """Measure a run's model on this machine.

    Args:
        config: All settings; its device, precision and shapes count.
        ranks_per_node: How many share the memory of the node, where that is what they compute in.

    Raises:
        ConfigError: The settings have a token budget, or share the model among ranks.
        TrainingError: Not even one sample could be run; the message has the last line that was said.
    """
    batch = config.batch
    if batch.micro_batch_size is None:
        raise ConfigError(
            "batch.micro_batch_size must be set to have one proposed, got a token budget; the curve counts "
            "samples."
        )
    if config.parallel.strategy != "ddp":
        raise ConfigError(
            f"parallel.strategy must be 'ddp' to have a micro-batch proposed, got "
            f"'{config.parallel.strategy}'; one process alone cannot hold a share of the model."
        )
    room_bytes, device, points = _run_sizes(config)
    if device == "cpu":
        room_bytes //= max(1, ranks_per_node)
    room_bytes = int(room_bytes * (1 - MARGIN))
    fixed, each = fit_memory(points)
    largest = max(0, (room_bytes - fixed) // each)
    per_step = batch.micro_batch_size * batch.micro_batches_per_step
    proposed = max((size for size in range(1, min(largest, per_step) + 1) if per_step % size == 0), default=0)
    return MemoryCurve(
        device=device,
        points=tuple(points),
        fixed_bytes=fixed,
        sample_bytes=each,
        room_bytes=room_bytes,
        largest=largest,
        proposed=proposed,
        proposed_micro_batches=per_step // proposed if proposed else 0,
    )


def _run_sizes(config: TrainConfig) -> tuple[int, str, list[MemoryPoint]]:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    with tempfile.TemporaryDirectory(prefix="shardflow-memory-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "shardflow.training.memory_probe", str(path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
            text, said = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:  # what it has measured by then counts
            text, said = _text(error.stdout), _text(error.stderr)
    room_bytes, device, points = 0, "", []
    for line in text.splitlines():
        found = json.loads(line)
        if "room_bytes" in found:
            room_bytes, device = int(found["room_bytes"]), str(found["device"])
        else:
            points.append(MemoryPoint(micro_batch_size=found["size"], peak_bytes=found["peak_bytes"]))
    if not points:
        last = (said.strip().splitlines() or ["nothing"])[-1]
        raise TrainingError(
            f"one sample must be trainable to measure memory, got a process that said: {last} Lower the "
            "sizes of [image], [text] or [model]."
        )
    return room_bytes, device, points


def _text(output: str | bytes | None) -> str:
    whole = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return whole[: whole.rfind("\n") + 1]
