"""Whether what a configuration asks for can lie in this machine's memory at all."""

from __future__ import annotations

from shardflow.errors import ConfigError
from shardflow.loading.batch import BatchLayout
from shardflow.telemetry.machine import machine_bytes

__all__ = ["check_fits", "check_layout"]


def check_fits(num_bytes: int, what: str, remedy: str) -> None:
    """Refuse sizes that no allocator can give: it would say so in its own words, or be killed.

    Args:
        num_bytes: How much is needed at once.
        what: What needs it.
        remedy: What to change.

    Raises:
        ConfigError: This machine has less memory.
    """
    if num_bytes > machine_bytes():
        raise ConfigError(
            f"{what} must fit into the {machine_bytes() / 1e9:.1f} GB of memory of this machine, got "
            f"{num_bytes / 1e9:.1f} GB; {remedy}."
        )


def check_layout(layout: BatchLayout) -> None:
    """Refuse a micro-batch that does not fit; see `check_fits`."""
    if layout.num_bytes > machine_bytes():
        largest = max(layout.arrays, key=lambda array: array.num_bytes)
        what = f"a micro-batch with {largest.name} {largest.dtype} {list(largest.shape)}"
        check_fits(layout.num_bytes, what, "lower its samples or tokens, or the sizes of the view")
