"""Settings of the batch spec: how samples become micro-batches and steps."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from shardflow.configs import ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.training.config.ranges import Count, CountOrZero

__all__ = ["BatchSettings"]

_OF_BUDGET = {"text_tokens", "max_samples", "over_budget", "image_tokens_per_slice", "quadratic_tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The batch spec of the epoch plan; a part of the run's identity."""

    micro_batch_size: Count | None = None
    """Samples in one forward and backward of one rank; this or ``max_tokens``."""
    max_tokens: Count | None = None
    """Token budget of a micro-batch instead; padding counted, but where ``packed``."""
    packed: bool = False
    """All samples of a micro-batch stand in one sequence, each attending to itself alone, and nothing is
    padded."""
    text_tokens: Literal["estimated", "counted"] = "estimated"
    """Tokens of text under ``max_tokens``: from the bytes of a report, or as ``shardflow tokenize`` counted
    them for the run's tokenizer."""
    max_samples: Count = 64
    """Samples of a micro-batch under ``max_tokens``, whatever their length."""
    over_budget: Literal["alone", "skip", "truncate"] = "alone"
    """A sample longer than ``max_tokens``: a micro-batch of its own, left out, or counted as cut."""
    image_tokens_per_slice: CountOrZero = 0
    """Counted towards ``max_tokens`` for each slice that the view takes."""
    quadratic_tokens: CountOrZero = 0
    """Length at which attention costs as much as all the rest; ranks are balanced by it. 0 leaves it out."""
    lanes: CountOrZero | None = None
    """Lanes that samples are mixed in; 0 mixes the whole epoch. Not given: 0, and under ``max_tokens`` a
    number chosen from the data."""
    window_bytes: ByteSize = 1024**3
    """How much of a lane is mixed at a time."""
    micro_batches_per_step: Count
    """Micro-batches in one optimizer step over all ranks (M): ``world_size * accumulation`` fills exactly."""
    tail: Literal["drop", "repeat", "mask"] = "drop"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.micro_batch_size is None) == (self.max_tokens is None):
            found = "neither" if self.max_tokens is None else "both"
            raise ConfigError(f"batch must have one of micro_batch_size and max_tokens, got {found}.")
        if self.max_tokens is None:
            for entry in fields(self):
                if entry.name in _OF_BUDGET and getattr(self, entry.name) != entry.default:
                    raise ConfigError(
                        f"batch.{entry.name} must come with max_tokens, got it without; remove it, or set a "
                        "budget."
                    )
        if self.max_tokens is not None and self.lanes == 0:
            raise ConfigError(
                "batch.lanes must be at least 1 under max_tokens, got 0; leave it out to have it chosen."
            )
