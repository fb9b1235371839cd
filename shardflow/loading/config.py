"""How a loader runs: none of it changes which samples come in which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardflow.configs import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.loading.view import ImageView, NativeView

__all__ = ["LoaderConfig"]

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Settings of a loader, per process that iterates.

    Private memory is about ``prefetch_bytes``, plus as much again for recycled buffers, plus ``read_bytes``
    and a slice per thread, plus the batches that the consumer holds.
    """

    view: ImageView | NativeView | None = None
    """What to deliver of the images; None reads no image bytes at all."""
    text: bool = True
    """Whether to deliver the reports. Without text and view a batch is rows, weights and keys, and reads
    nothing.
    """
    num_threads: Annotated[int, Bounds(1, 256)] = 2
    """Threads that read and decode. They start with the first batch and end with the iteration."""
    prefetch_bytes: ByteSize = 256 * _MIB
    """Bound on the micro-batches that are under way or wait; one alone may exceed it."""
    read_bytes: ByteSize = 8 * _MIB
    """How much a thread reads at once. Larger studies take several reads; one field is never split."""
    wait_timeout_s: Annotated[float, Bounds(0.001)] = 300.0
    """How long one micro-batch may be waited for before the wait becomes an error that names what is slow."""
    on_bad_sample: Literal["mask", "raise"] = "mask"
    """A sample that is damaged: a slot of weight 0 and a quarantine row, or a `SampleError`."""
    max_bad_samples: Annotated[int, Bounds(0)] = 100
    """How many samples this rank may mask in the loader's life before it raises `SampleError`."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("prefetch_bytes", "read_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1 byte, got {getattr(self, name)}; correct it.")
