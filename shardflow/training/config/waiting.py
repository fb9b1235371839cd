"""Settings of the loader and of every wait: buffers, deadlines, and what a bad sample does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardflow.configs import ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.training.config.ranges import Count, CountOrZero, Seconds, SecondsOrZero

__all__ = ["LoaderSettings", "TimeoutSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """How bytes become batches; none of it changes what is trained."""

    execution: Literal["threads", "process", "workers"] = "threads"
    """Where it happens, see docs/howto/execution.md; ``process`` where the loop is busy in Python."""
    num_threads: Count = 2
    prefetch_bytes: ByteSize = 256 * 1024**2
    max_node_bytes: ByteSize = 0
    """Cap on the memory of the loaders of all ranks of a node; 0 is that of the machine or its cgroup."""
    pinned_bytes: ByteSize = 256 * 1024**2
    """Pinned memory that micro-batches pass on their way to a GPU; none is taken on CPUs."""
    wait_timeout_s: Seconds = 60.0
    """A wait for data that is longer names its shard and stage and ends the run."""
    on_bad_sample: Literal["mask", "raise"] = "mask"
    max_bad_samples: CountOrZero = 10

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutSettings:
    """How long ranks wait for one another, in seconds."""

    startup_s: Seconds = 600.0
    """Until all ranks have joined and prepared; nothing is exchanged before that."""
    steady_s: Seconds = 100.0
    """For one exchange of gradients once steps are running."""
    control_s: Seconds = 600.0
    """For meetings outside the gradient path: a checkpoint being written, an evaluation ending."""
    hang_s: SecondsOrZero = 60.0
    """A rank that does not get on in a step of its own, or shows no sign of its interpreter, for longer is
    named, and ends the run. 0 waits for ever, as under a debugger."""
    lost_s: Seconds = 10.0
    """A machine that nothing is heard of for longer is taken for dead."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hang_s >= self.steady_s:
            # Else the ranks that wait for the hung one give up first, and nobody names it.
            raise ConfigError(
                f"timeouts.hang_s must be less than timeouts.steady_s ({self.steady_s:g}), got "
                f"{self.hang_s:g}; lower it, or raise timeouts.steady_s."
            )
