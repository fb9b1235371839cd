"""Tensor files: safetensors, hashed while they are written, read by rows from the mapping that was checked.

The format is that of the safetensors package (8 bytes of header size, a JSON header, the data), which reads
what is written here and writes what is read here. Our own writer hashes the bytes on their way to the disk,
where ``save_file`` would have them read again; our own reader takes single rows of a tensor, so that a rank
that holds an eighth of a model copies an eighth. Only plain numbers are ever parsed; no pickle.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

__all__ = ["PiecewiseTensors", "TensorFile", "TensorFileError", "write_tensors"]

_TYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES: Final = {dtype: name for name, dtype in _TYPES.items()}
_METADATA: Final = "__metadata__"
_ALIGNMENT: Final = 8
_MAX_HEADER_BYTES: Final = 100_000_000
_CHUNK: Final = 16 * 1024**2


class TensorFileError(Exception):
    """A tensor file cannot be parsed, or is not the one that was recorded; holds no bytes of it."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write tensors into a new file and sync it.

    Args:
        path: The file; must not exist.
        tensors: Contiguous tensors on the CPU.

    Returns:
        ``{"num_bytes": size, "sha256": digest}`` of the file.

    Raises:
        OSError: it could not be written.
        TensorFileError: a tensor has a type that the format does not know.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    # Wide types first, as the safetensors package writes them: every tensor is aligned for its type.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _NAMES:
            raise TensorFileError(f"{name} of type {tensor.dtype}")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), digest)
        for name in names:
            _write(file.fileno(), _bytes_of(tensors[name]), digest)
        os.fsync(file.fileno())
    return {"num_bytes": 8 + len(text) + offset, "sha256": digest.hexdigest()}


def _write(descriptor: int, data: memoryview, digest: Any) -> None:
    for start in range(0, len(data), _CHUNK):
        rest = data[start : start + _CHUNK]
        digest.update(rest)
        while len(rest):  # a disk that fills up takes a part first
            rest = rest[os.write(descriptor, rest) :]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Of the data, from the beginning of the file."""


class TensorFile:
    """A tensor file that was checked; the mapping that was hashed is the one that is read.

    Args:
        path: The file.
        num_bytes: Its recorded size.
        sha256: Its recorded digest; compared before anything is parsed.

    Raises:
        OSError: it cannot be read.
        TensorFileError: size or digest differ, or the header makes no sense.
    """

    def __init__(self, path: Path, *, num_bytes: int, sha256: str) -> None:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes or num_bytes == 0:
                raise TensorFileError("another size")
            # Private and writable: torch wants memory that it may write to; what it writes reaches no file.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if hashlib.sha256(self._map).hexdigest() != sha256:
            raise TensorFileError("another digest")
        try:
            self._entries = _parse(self._map)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            # Its digest is right, so a stranger made both.
            raise TensorFileError(f"a header that cannot be read ({type(error).__name__})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entries[name].shape

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows ``start`` to ``stop`` of a tensor without a copy; the file stays mapped meanwhile.

        A tensor without axes counts as one row.
        """
        entry = self._entries[name]
        shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
        num_elements = torch.Size(shape).numel()
        if num_elements == 0:
            return torch.empty(shape, dtype=entry.dtype)
        row = torch.Size(entry.shape[1:]).numel() * entry.dtype.itemsize
        flat = torch.frombuffer(
            self._map, dtype=entry.dtype, count=num_elements, offset=entry.offset + start * row
        )
        return flat.view(shape)


class PiecewiseTensors(Mapping[str, torch.Tensor]):
    """Tensors of one or more files; a tensor in several is their rows, one file's behind the other's.

    Args:
        files: The files in the order of the ranks that wrote them.
    """

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self._pieces: dict[str, list[TensorFile]] = {}
        for file in files:
            for name in file:
                self._pieces.setdefault(name, []).append(file)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.rows(name, 0, self.shape(name)[0] if self.shape(name) else 1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        first, *others = (file.shape(name) for file in self._pieces[name])
        return (first[0] + sum(shape[0] for shape in others), *first[1:]) if others else first

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return some rows of the whole tensor; copied only where they lie in several files."""
        found: list[torch.Tensor] = []
        at = 0
        for file in self._pieces[name]:
            shape = file.shape(name)
            size = shape[0] if shape else 1
            first, last = max(start, at), min(stop, at + size)
            if first < last or len(self._pieces[name]) == 1:
                found.append(file.rows(name, first - at, max(first, last) - at))
            at += size
        return found[0] if len(found) == 1 else torch.cat(found)


def _parse(data: mmap.mmap) -> dict[str, _Entry]:
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError
    begin = 8 + size
    entries: dict[str, _Entry] = {}
    for name, facts in json.loads(data[8:begin]).items():
        if name == _METADATA:
            continue
        dtype, shape = _TYPES[facts["dtype"]], tuple(map(int, facts["shape"]))
        first, last = facts["data_offsets"]
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        is_inside = 0 <= first <= last <= len(data) - begin
        if not is_inside or last - first != num_bytes or any(size < 0 for size in shape):
            raise ValueError
        entries[name] = _Entry(dtype, shape, begin + first)
    return entries
