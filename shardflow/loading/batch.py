"""Micro-batch in memory: one flat buffer and a descriptor of its arrays; and the streams that yield them.

A batch consists of nothing else, so it crosses a process boundary as bytes and a JSON text, and its arrays
are rebuilt there without copying.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import StateError
from shardflow.fields.quarantine import QuarantineRow
from shardflow.fields.registry import present_entries
from shardflow.fields.types.findings import FINDING_ENTRIES
from shardflow.format.facts.units import Unit, parse_unit_key
from shardflow.loading.layout import BatchLayout, view_of

if TYPE_CHECKING:
    from shardflow.loading.tensors import Device
    from shardflow.viewing.sheet import SlotSheet


class SlotKeys:
    """Sample keys by slot, looked up when the first of them is asked for. Safe for many threads.

    Args:
        look_up: Returns the keys of rows as byte strings.
        rows: ``(B,)``, the sample of each slot; -1 in padding.
    """

    __slots__ = ("_keys", "_look_up", "_rows")

    def __init__(
        self, look_up: Callable[[NDArray[np.int64]], NDArray[np.bytes_]], rows: NDArray[np.int64]
    ) -> None:
        self._look_up, self._rows = look_up, rows
        self._keys: NDArray[np.bytes_] | None = None

    def __len__(self) -> int:
        """Number of slots, padding included."""
        return len(self._rows)

    def __getitem__(self, slot: int) -> str | None:
        """Return the key of a slot; None in padding."""
        return self._by_slot()[slot].decode("ascii") if self._rows[slot] >= 0 else None

    def of(self, slots: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Return the keys of some slots as byte strings, ``(n,)``."""
        keys: NDArray[np.bytes_] = self._by_slot()[slots]
        return keys

    def to_list(self) -> list[str | None]:
        """Return the key of each slot."""
        keys: list[str | None] = self._by_slot().astype("U").tolist()
        for slot in np.flatnonzero(self._rows < 0).tolist():
            keys[slot] = None
        return keys

    def _by_slot(self) -> NDArray[np.bytes_]:
        keys = self._keys
        if keys is None:  # two threads may look them up at once, and find the same ones
            is_sample = self._rows >= 0
            found = self._look_up(self._rows[is_sample])
            keys = np.zeros(len(self._rows), found.dtype)
            keys[is_sample] = found
            self._keys = keys
        return keys


@dataclass(frozen=True)
class BatchInfo:
    """Identity of a batch: its samples, and its place in the run."""

    weight: NDArray[np.float32]
    """``(B,)``, 1 for a sample, 0 for padding and for a masked sample."""
    epoch: int
    step: int
    micro_batch: int
    """Number of the micro-batch in its step."""
    classes: Mapping[str, Sequence[str]]
    """By field the names of its classes, in the order of their numbers; of fields that have classes, whatever
    a transform makes of them. Of a field of several columns by ``NAME.COLUMN``."""
    columns: Mapping[str, Sequence[str]]
    """By field of several columns their names, in order."""
    _batch: Batch = field(repr=False)

    @cached_property
    def sample_keys(self) -> list[str | None]:
        """Sample key per slot; None in a padding slot. A masked sample keeps its key."""
        return self._batch.sample_keys

    @cached_property
    def units(self) -> list[Unit | None]:
        """Place of each sample in its study; None in a padding slot.

        It holds the study's key, and for samples that are series or images the number of the series and the
        position in it.
        """
        return self._batch.units


class Batch(Mapping[str, Any]):
    """Micro-batch of one rank: a mapping from the names of fields to their values.

    The entries are the fields of the loader and what belongs to them, such as ``NAME_mask``. `info` says
    which samples are in it.

    Its memory is recycled: it returns to the loader when the batch, its arrays and everything made from them
    without a copy (slices, ``torch.from_numpy``) are gone, never earlier.

    Args:
        buffer: ``(num_bytes,)`` uint8, the memory of all arrays.
        descriptor: JSON-able; see `descriptor`. ``arrays`` and ``keys`` are None in it if the arguments
            below give them: they are made JSON when somebody asks for it.
        arrays: The arrays that ``descriptor`` describes.
        layout: Where they are in the buffer.
        keys: Of the samples.

    Attributes:
        buffer: The flat buffer.
    """

    __slots__ = ("_arrays", "_descriptor", "_keys", "_layout", "_values", "buffer")

    def __new__(cls, *arguments: Any, **settings: Any) -> Self:  # noqa: ARG004
        """Return a new batch; of a mapping alone a dict.

        Frameworks that convert or move what they find in a mapping, such as torch's default collation and
        Accelerate, rebuild it as ``type(batch)({...})``.
        """
        if len(arguments) == 1 and isinstance(arguments[0], Mapping):
            return dict(arguments[0])  # type: ignore[return-value]
        return super().__new__(cls)

    def __init__(
        self,
        buffer: NDArray[np.uint8],
        descriptor: dict[str, Any],
        *,
        arrays: dict[str, NDArray[Any]] | None = None,
        layout: BatchLayout | None = None,
        keys: SlotKeys | None = None,
    ) -> None:
        self.buffer = buffer
        self._descriptor = descriptor
        self._layout, self._keys = layout, keys
        self._values: Mapping[str, Any] | None = None
        if arrays is None:
            arrays = {
                entry["name"]: view_of(buffer, np.dtype(entry["dtype"]), entry["shape"], entry["offset"])
                for entry in descriptor["arrays"]
            }
        self._arrays = arrays

    def __reduce__(self) -> tuple[type[Batch], tuple[NDArray[np.uint8], dict[str, Any]]]:
        """Cross a process boundary as a plain batch: buffer and descriptor."""
        return Batch, (self.buffer, self.descriptor)

    @property
    def descriptor(self) -> dict[str, Any]:
        """Content of the batch besides its arrays, and where those are.

        ``version``, ``epoch``, ``step``, ``micro``, ``slot``, ``arrays`` (``name``, ``dtype``, ``shape``,
        ``offset`` each), ``keys`` and ``quarantined``.
        """
        if self._layout is not None and self._descriptor["arrays"] is None:
            self._descriptor["arrays"] = self._layout.to_json()
        if self._keys is not None and self._descriptor["keys"] is None:
            self._descriptor["keys"] = self._keys.to_list()
        return self._descriptor

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name, writable views of `buffer`; B slots, K slices.

        - ``row``: ``(B,)`` int64, row of the samples table; -1 in a padding slot.
        - with a blend: ``component`` ``(B,)`` int64, which component the sample, its key and its row belong
          to, from 0 in the order of the blend file; -1 in a padding slot.
        - ``weight``: ``(B,)`` float32, 1 for a sample, 0 for padding and for a masked sample.
        - with an entity view: ``entity`` (number in its report), ``entity_series``, ``entity_centre`` (index
          of the slice that comes first), ``entity_label``, ``entity_anatomy``, ``entity_assertion`` and
          ``entity_laterality`` (positions in `EntityNames`), all ``(B,)`` int64; ``entity_span`` ``(B, 2)``
          int64, where in the bytes of the text its words are; ``entity_confidence`` ``(B,)`` float64. All are
          -1 in padding slots, and for whole studies of a blend.
        - of the fields, as their types store them; the entries of the batch are made of them.
        """
        return self._arrays

    @property
    def epoch(self) -> int:
        """Epoch of the step."""
        return int(self._descriptor["epoch"])

    @property
    def step(self) -> int:
        """Step of the micro-batch."""
        return int(self._descriptor["step"])

    @property
    def micro(self) -> int:
        """Number of the micro-batch in its step; from ``micro_batches_per_step`` on it is padding."""
        return int(self._descriptor["micro"])

    @property
    def slot(self) -> int:
        """Number of the micro-batch among this rank's of the step, from 0."""
        return int(self._descriptor["slot"])

    @property
    def sample_keys(self) -> list[str | None]:
        """Sample key per slot, as planned: None in a padding slot; a masked sample keeps its key."""
        return list(self.descriptor["keys"])

    @property
    def components(self) -> list[int]:
        """Component of a blend per slot, from 0; -1 in a padding slot, and 0 without a blend."""
        found = self._arrays.get("component")
        if found is None:
            return [-1 if row < 0 else 0 for row in self._arrays["row"].tolist()]
        components: list[int] = found.tolist()
        return components

    @property
    def modalities(self) -> list[str]:
        """DICOM modality of each slot, such as ``CT``; empty in padding or if unknown.

        It is that of the series where samples are series, images or findings, of studies that of the primary
        series.

        Known where a field delivers images or slices of series; else all are empty.
        """
        return list(self._descriptor.get("modalities", [""] * self.num_slots))

    @property
    def quarantined(self) -> list[QuarantineRow]:
        """The slots that were masked because their sample is bad."""
        return [QuarantineRow.from_json(row) for row in self._descriptor["quarantined"]]

    @property
    def num_slots(self) -> int:
        """Number of slots (B), padding included."""
        return len(self._arrays["row"])

    @property
    def info(self) -> BatchInfo:
        """Samples of the batch, and its place in the run."""
        classes: dict[str, tuple[str, ...]] = {}
        columns: dict[str, tuple[str, ...]] = {}
        for entry in [*(self._descriptor.get("entries") or ()), *self._descriptor.get("named", ())]:
            if "classes" in entry:
                classes[entry["name"]] = tuple(entry["classes"])
            if "columns" in entry:
                columns[entry["name"]] = tuple(entry["columns"])
                classes |= {name: tuple(names) for name, names in entry["column_classes"].items()}
        place = self.epoch, self.step, self.micro
        return BatchInfo(self._arrays["weight"], *place, classes, columns, self)

    @property
    def units(self) -> list[Unit | None]:
        """Place of each sample in its study, see `BatchInfo.units`."""
        names = self._descriptor.get("units")  # left out where all are studies, also in a blend
        found: list[Unit | None] = []
        for key, component in zip(self.sample_keys, self.components, strict=True):
            unit = "study" if names is None else names[component]
            found.append(None if key is None else parse_unit_key(key, unit))
        return found

    def __getitem__(self, name: str) -> Any:
        """Return an entry: an array, or a list with an item per slot where sizes differ.

        Raises:
            KeyError: There is no such entry; the message names those that there are.
        """
        values = self._entries()
        if name not in values:
            raise KeyError(f"the batch has no entry {name!r}; it has {', '.join(values)}")
        return values[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the entries."""
        return iter(self._entries())

    def __len__(self) -> int:
        """Return the number of entries; `num_slots` is the number of samples it has room for."""
        return len(self._entries())

    def __bool__(self) -> bool:
        """Return True: a batch without entries is a batch."""
        return True

    def torch(self, device: Device = None, *, pin_memory: bool | None = None) -> dict[str, Any]:
        """Return the entries with tensors in place of numeric arrays, and ``weight`` ``(B,)`` float32.

        Shapes are those of the arrays; a list of arrays becomes a list of tensors, with None where it has
        None. Texts, JSON and bytes stay as they are. Every dtype stays as it is: 16-bit pixels are
        ``torch.uint16`` and token ids may be ``torch.uint32``, for which torch has conversions but hardly any
        arithmetic, so write ``batch.torch()["image"].float()`` or ``["token_ids"].long()``.

        On the CPU tensors share the memory of the batch, which returns to the loader when the last of them is
        gone. On a GPU they are views of one copy, through at most 256 MiB of pinned memory, on a stream of
        its own; the host does not wait, the current stream waits for the copy, and the batch may be dropped
        at once.

        Args:
            device: Where the tensors are wanted; the CPU by default.
            pin_memory: Whether to go through pinned memory, by default to a GPU. With the CPU as the device
                the tensors are copies in pinned memory, for a loop that moves them itself.

        Raises:
            ConfigError: There is no such device, or no GPU to pin memory for.
        """
        from shardflow.loading.tensors import to_tensors

        entries = {**self._entries(), "weight": self._arrays["weight"]}
        return to_tensors(entries, device, pin_memory=pin_memory)

    def show(self, slot: int = 0, *, max_pictures: int = 12) -> SlotSheet:
        """Draw a slot: its pictures in their display range with masks and boxes over them, and texts below.

        A notebook displays what this returns; elsewhere ``batch.show(0).save("slot.png")``. Needs Pillow, and
        no display.

        Args:
            slot: Which slot; a negative one counts from the last.
            max_pictures: Images shown of a field; of more, as many evenly spaced ones.

        Raises:
            IndexError: There is no such slot.
            ConfigError: Pillow is missing.
        """
        from shardflow.viewing.sheet import render_slot, show_entries

        if not -self.num_slots <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is none of the {self.num_slots} slots of the batch")
        slot %= self.num_slots
        entries = self._descriptor["entries"]
        key = self.sample_keys[slot]
        state = "" if self._arrays["weight"][slot] else " (masked)"
        title = "padding" if key is None else f"{key}{state}"
        title = f"{title} · slot {slot} of epoch {self.epoch}, step {self.step}, micro-batch {self.micro}"
        shown = (
            []
            if key is None
            else show_entries(entries, self._entries(), slot, num_slots=len(self._arrays["row"]))
        )
        return render_slot(title, shown, max_pictures=max_pictures)

    def _entries(self) -> Mapping[str, Any]:
        if self._values is None:
            arrays = self._arrays
            findings = {name: arrays[name] for name in FINDING_ENTRIES if name in arrays}
            self._values = present_entries(self._descriptor["entries"], arrays) | findings
        return self._values

    def __repr__(self) -> str:
        held = [
            f"{name} {list(value.shape)} {value.dtype}" if isinstance(value, np.ndarray) else f"{name} list"
            for name, value in self.items()
        ]
        names = ", ".join(held)
        return f"Batch(epoch {self.epoch}, step {self.step}, micro {self.micro}: {names})"


class BatchStream(Iterator[Batch], ABC):
    """Micro-batches of a rank in order, made ahead by threads or processes.

    Its end, an error and `close` end what makes them.

    Args:
        num_batches: How many there are.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_left = num_batches
        self._is_closed = False

    def __next__(self) -> Batch:
        """Return the next micro-batch.

        Raises:
            WaitTimeoutError: It was not ready in time; the message names what it waits for.
            SampleError: A sample is bad, and the loader is configured to raise.
            LoaderProcessError: The loader process that makes it died.
            StateError: The stream was closed, or ended with an error, before its last micro-batch.
            ShardflowError: A shard cannot be read, or the stream was started in another process.
        """
        try:
            batch = self._take() if self._num_left and not self._is_closed else None
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            if self._num_left:
                # StopIteration here would look like the end of the epoch.
                raise StateError(
                    f"an iteration must go on to its end, got {self._num_left} micro-batches left of one "
                    "that was closed or ended with an error; call iter() again."
                )
            raise StopIteration
        self._num_left -= 1
        return batch

    @abstractmethod
    def start(self) -> None:
        """Begin before the first micro-batch is requested."""

    @abstractmethod
    def describe_activity(self) -> str:
        """Describe the shard, tier and stage of what is being made, from any thread; empty if nothing is."""

    def close(self) -> None:
        """End the threads or the iteration of the processes; the stream yields nothing more."""
        self._is_closed = True
        self._end()

    @abstractmethod
    def _take(self) -> Batch | None:
        """Wait for the next micro-batch; None if the stream is being closed."""

    @abstractmethod
    def _end(self) -> None:
        """End what makes the micro-batches; may be called more than once."""


class EpochIterator(Iterator[Batch]):
    """Iteration of a loader, which references it weakly: when its user drops it, its threads end.

    Args:
        stream: The micro-batches.
        numbers: Their numbers among the rank's micro-batches of the epoch.
        check_alive: Raises if the iteration is no longer the loader's newest.
        count: Counts a micro-batch as consumed; gets its epoch, its masked slots and its number.
    """

    def __init__(
        self,
        stream: BatchStream,
        numbers: range,
        check_alive: Callable[[EpochIterator], None],
        count: Callable[[int, list[QuarantineRow], int], None],
    ) -> None:
        self._stream = stream
        self._numbers = numbers
        self._check_alive = check_alive
        self._count = count
        self._num_fetched = 0
        self._has_failed = False
        # What counting needs of the micro-batches that were fetched and not counted; not their memory.
        self._uncounted: deque[tuple[int, list[QuarantineRow], int]] = deque()

    def __next__(self) -> Batch:
        """Return the next micro-batch and count it; raises what `fetch` and `count_fetched` raise."""
        batch = self.fetch()
        if batch is None:
            raise StopIteration
        self.count_fetched()
        return batch

    def fetch(self) -> Batch | None:
        """Return the next micro-batch without counting it as consumed, or None after the last one.

        For consumers that work ahead of their own steps, such as a copy to a device: the loader's position
        follows the steps, so call `count_fetched` for each micro-batch when its step takes it.
        """
        if self._num_fetched == len(self._numbers):
            if not self._uncounted:
                self.close()
            return None
        self._check_alive(self)
        try:
            batch = next(self._stream)
        except BaseException:
            self._has_failed = True
            raise
        self._uncounted.append((batch.epoch, batch.quarantined, self._numbers[self._num_fetched]))
        self._num_fetched += 1
        return batch

    def count_fetched(self) -> None:
        """Count the oldest micro-batch that was fetched and not counted as consumed.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` or ``max_bad_share`` allow.
            StateError: The iteration was retired.
        """
        self._check_alive(self)
        try:
            self._count(*self._uncounted.popleft())
        except BaseException:
            self.close()
            raise

    def hand_over(self, open_stream: Callable[[range], BatchStream]) -> bool:
        """Continue with another stream from the next micro-batch to fetch; call it between two of them.

        What the current stream has made ahead is dropped. If the other one cannot start, it continues.

        Args:
            open_stream: Opens a stream of the numbers that are left.

        Returns:
            Whether the stream changed; False if nothing is left.
        """
        left = self._numbers[self._num_fetched :]
        if not left or self._has_failed:
            return False
        following = open_stream(left)
        following.start()
        current, self._stream = self._stream, following
        current.close()
        return True

    def describe_activity(self) -> str:
        """Describe what its micro-batches wait for; may be called from any thread."""
        return self._stream.describe_activity()

    def close(self) -> None:
        """End the iteration."""
        self._stream.close()
