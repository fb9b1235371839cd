"""How a loader runs: none of it changes which samples come in which micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from shardflow.configs import Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.fields.raw import FieldsView
from shardflow.fields.tokens import StoredTokens
from shardflow.fields.transforms import check_name
from shardflow.fields.views import View

__all__ = ["LoaderConfig"]

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """Settings of a loader, per process that iterates.

    Private memory is about ``prefetch_bytes``, plus as much again for recycled buffers, plus ``read_bytes``
    and a slice per thread, plus the batches that the consumer holds.
    """

    view: View | FieldsView | None = None
    """What to deliver of the images, or which fields by name; None reads no image bytes at all."""
    text: bool = True
    """Whether to deliver the reports. Without text, tokens and view a batch is rows, weights and keys, and
    reads nothing.
    """
    tokens: StoredTokens | None = None
    """Which stored token ids to deliver, in place of the reports or beside them; None delivers none."""
    execution: Literal["threads", "process", "workers"] = "threads"
    """Where reading and decoding run: threads of this process; one process beside it, with threads, for a
    trainer whose own Python is busy; or processes of one thread each, for transforms that are Python. Linux
    only but for the first.
    """
    num_threads: Annotated[int, Bounds(1, 256)] = 2
    """Threads that read and decode; with ``workers`` so many processes. Threads start with the first batch
    and end with the iteration, processes end with the loader. Stored tokens alone of a local dataset take
    one.
    """
    transform: str = ""
    """``"package.module:function"`` to call for each sample, with its arrays, to be changed in place, and a
    random generator that is the sample's own; see `shardflow.fields.transforms`.
    """
    prefetch_bytes: ByteSize = 256 * _MIB
    """Bound on the micro-batches that are under way or wait; one alone may exceed it."""
    read_bytes: ByteSize = 8 * _MIB
    """How much a thread reads at once. Larger studies take several reads; one field is never split."""
    max_node_bytes: ByteSize = 0
    """Cap on the memory of all loaders of a node, buffers, caches in memory and bytes under way together;
    checked at the start, for as many ranks as the ``World`` says a node has. 0 is the memory of the machine,
    or of its cgroup.
    """
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
        if self.max_node_bytes < 0:
            raise ConfigError(
                f"max_node_bytes must be at least 0 bytes, got {self.max_node_bytes}; correct it, or "
                "leave it out for the memory of the machine."
            )
        check_name(self.transform)
