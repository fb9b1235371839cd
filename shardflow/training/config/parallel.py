"""Settings of how several ranks hold one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardflow.configs import check_fields
from shardflow.errors import ConfigError

__all__ = ["ParallelSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSettings:
    """How several ranks hold one model; changes memory and traffic, never what is trained."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    """``ddp``: every rank holds the whole model. ``fsdp2``: each holds an equal share of every parameter,
    gradient and moment, and gathers a layer at a time; checkpoints load into either."""
    accumulation: Literal["whole", "sharded"] = "whole"
    """Under ``fsdp2``, between the micro-batches of a step: keep whole gradients and exchange once a step, or
    exchange after each one and keep shares."""
    reshard_after_forward: bool = True
    """Under ``fsdp2``, free a layer's gathered parameters after its forward and gather them again in the
    backward: less memory, half as much traffic again."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.strategy == "ddp" and (self.accumulation != "whole" or not self.reshard_after_forward):
            raise ConfigError(
                "parallel.accumulation and parallel.reshard_after_forward must be left out under ddp, got "
                "one; remove it, or set parallel.strategy to 'fsdp2'."
            )
