"""Tensor files of a checkpoint, and the model and optimizer as flat, named tensors, bit for bit.

The format is that of the safetensors package (8 bytes of header size, a JSON header, the data), compatible
both ways. Our own writer hashes the bytes on their way to the disk, where ``save_file`` would have them read
again; our own reader takes single rows of a tensor from the verified mapping, so that a rank that holds an
eighth of a model copies an eighth. Only plain numbers are ever parsed; no pickle.

Names are the model's parameter names, never positions in an optimizer's group, so that a checkpoint does not
depend on how parameters were grouped. Tied weights appear once, under their first name. A parameter that is a
shard (``DTensor``) stores and loads its own rows, so the same checkpoint fits any number of ranks, with whole
and with sharded parameters.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from shardflow.errors import CheckpointError
from shardflow.training.distributed import is_share, local_part

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
class TensorEntry:
    """A tensor of a file."""

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
            self._entries = parse_entries(self._map)
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
        """Return some rows of the whole tensor; copied only if they are in several files."""
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


def parse_entries(data: mmap.mmap) -> dict[str, TensorEntry]:
    """Find the tensors of a safetensors file in its header.

    Raises:
        ValueError: The header makes no sense; other errors of what it holds likewise.
    """
    size = int.from_bytes(data[:8], "little")
    if not 0 < size <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ValueError
    begin = 8 + size
    entries: dict[str, TensorEntry] = {}
    for name, facts in json.loads(data[8:begin]).items():
        if name == _METADATA:
            continue
        dtype, shape = _TYPES[facts["dtype"]], tuple(map(int, facts["shape"]))
        first, last = facts["data_offsets"]
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        is_inside = 0 <= first <= last <= len(data) - begin
        if not is_inside or last - first != num_bytes or any(size < 0 for size in shape):
            raise ValueError
        entries[name] = TensorEntry(dtype, shape, begin + first)
    return entries


_STEP = "step"


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over what a checkpoint holds of a model: trained parameters and persistent buffers.

    Frozen parameters are left out: they are the base model's, whose files the run names.
    """
    yield from ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
    persistent = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            yield name, buffer


def named_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Walk over the optimizer's state as ``"<parameter name>.<entry>"``."""
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            yield f"{name}.{entry}", value


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model of the same shape; into shards their own rows.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape or type differs; the first one is named.
    """
    own = dict(named_tensors(model))
    _check_names("model", own.keys(), tensors.keys())
    for name, tensor in own.items():
        _check_shape(name, tensor, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            given = _rows_for(name, tensor, tensors)
            _check_type(name, tensor, given)
            local_part(tensor).copy_(given)


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Give a fresh optimizer the state that its tensors were collected from.

    Raises:
        CheckpointError: a tensor belongs to no parameter, or its shape differs.
    """
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name in tensors:
        owner, _, entry = name.rpartition(".")
        if owner not in parameters:
            raise CheckpointError(
                f"optimizer state must belong to a parameter of the model, got {name}; resume with the "
                "[model] settings that wrote the checkpoint."
            )
        parameter = parameters[owner]
        state = states.setdefault(owner, {})
        if entry == _STEP:  # AdamW counts on the CPU
            state[entry] = tensors[name].clone()
            continue
        _check_shape(name, parameter, tensors)
        given = _rows_for(name, parameter, tensors)
        _check_type(name, parameter, given)
        state[entry] = like_share(parameter, given.to(parameter.device, copy=True))
    for owner, state in states.items():
        optimizer.state[parameters[owner]] = state


def like_share(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows as a share like that of a parameter; of a whole one as they are."""
    if is_share(parameter):
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return local


def own_rows(name: str, tensor: DTensor) -> slice:
    """Return the rows of a tensor that this rank holds.

    Raises:
        CheckpointError: It is not shared by rows over one axis of ranks.
    """
    from torch.distributed.tensor import Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or placements != (Shard(0),):
        raise CheckpointError(
            f"{name} must be sharded by rows over one axis of ranks, got {placements}; use fully_shard as "
            "shardflow.training.distributed does."
        )
    # As torch.chunk deals rows: equal pieces rounded up, the last ones shorter or empty.
    num_rows, piece = tensor.shape[0], -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * piece, num_rows)
    return slice(start, min(start + piece, num_rows))


def _rows_for(name: str, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Take the rows of a tensor that this rank holds."""
    if is_share(tensor):
        rows = own_rows(name, tensor)
        if isinstance(tensors, PiecewiseTensors):
            return tensors.rows(name, rows.start, rows.stop)
        return tensors[name][rows]
    return tensors[name]


def _check_names(what: str, own: Iterable[str], given: Iterable[str]) -> None:
    missing, unknown = set(own) - set(given), set(given) - set(own)
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            raise CheckpointError(
                f"the {what}'s tensors must be those of this configuration, got {len(names)} {problem}, "
                f"{min(names)} among them; resume with the [model] settings that wrote the checkpoint."
            )


def _check_shape(name: str, own: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    given = tensors.shape(name) if isinstance(tensors, PiecewiseTensors) else tuple(tensors[name].shape)
    if tuple(own.shape) != given:
        raise _misfit(name, own, f"{given}")


def _check_type(name: str, own: torch.Tensor, given: torch.Tensor) -> None:
    if own.dtype != given.dtype:
        raise _misfit(name, own, f"{given.dtype}")


def _misfit(name: str, own: torch.Tensor, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name} must be {tuple(own.shape)} {own.dtype}, got {found}; resume with the [model] settings that "
        "wrote the checkpoint."
    )
