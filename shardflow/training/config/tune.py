"""Settings of the tuner: whether it may act, and how far it may go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shardflow.configs import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.training.config.ranges import CountOrZero

__all__ = ["TuneSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneSettings:
    """Finds settings of loader and cache while the run goes on; none of it changes what is trained."""

    mode: Literal["off", "observe", "on"] = "observe"
    """``observe`` says what it would change; ``on`` changes it, one setting at a time, see docs/tuning.md."""
    start_from: Path | None = None
    """A ``tuned.toml`` that another run wrote: settings to begin with. A restart begins with its own."""
    settle_steps: Annotated[int, Bounds(50)] = 200
    """A search ends within so many steps."""
    max_threads: CountOrZero = 0
    """Most threads, or processes, of the loader of a rank. For all four: 0 leaves it to the machine."""
    max_fetches: CountOrZero = 0
    """Most reads ahead, and requests to a store, that a rank has under way."""
    max_bytes: ByteSize = 0
    """Most memory that each setting of bytes may take in a rank: what is under way, what is read ahead, the
    cache in memory. All of a node together stay within ``loader.max_node_bytes`` as well."""
    max_disk_bytes: ByteSize = 0
    """Largest cache folder; 0: it is not made larger than ``cache.max_bytes`` says."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("max_bytes", "max_disk_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0 bytes, got {getattr(self, name)}; correct it.")
