"""How a remote store asks: sizes, limits and patience."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from shardflow.configs import Bounds, check_fields
from shardflow.storage.requests import RequestCost
from shardflow.storage.retrying import RetryPolicy

__all__ = ["RemoteCounts", "RemoteOptions"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """How a remote store asks."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    cost: RequestCost = field(default_factory=RequestCost)
    """Decides which gaps are read over, and when a request is late."""
    timeout_s: Annotated[float, Bounds(0.001)] = 60.0
    """Of one request, its body with it; what passes it is tried again."""
    stall_timeout_s: Annotated[float, Bounds(0.001)] = 10.0
    """Longest time without a byte before a request is given up and tried again."""
    request_bytes: Annotated[int, Bounds(1)] = 8 << 20
    """Largest ranged request; a larger read becomes several, side by side."""
    max_concurrency: Annotated[int, Bounds(1)] = 16
    """Reading requests of one process under way at once; fewer while the store says that it is overloaded."""
    pause_s: Annotated[float, Bounds(0.0)] = 2.0
    """First pause of all requests when a store refuses several in a row (503 SlowDown, 429)."""
    hedge_share: Annotated[float, Bounds(0.0, 1.0)] = 0.02
    """Second requests for late ones, as a share of all; 0 sends none."""
    part_bytes: Annotated[int, Bounds(5 << 20)] = 16 << 20
    """Objects above this are uploaded in parts of it."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteCounts:
    """What a remote store did in this process."""

    num_requests: int
    """Reading requests, second ones and tries again with them."""
    num_bytes: int
    """Of the bodies that were taken."""
    num_retries: int
    num_hedges: int
    num_pauses: int
    """How often the store was left alone because it was overloaded."""
