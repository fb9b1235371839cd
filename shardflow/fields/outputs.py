"""Output contract of a transform: which entries it returns for a sample, and how they are stored in a batch.

Arrays of one shape are stored side by side, arrays whose shape varies one after another, and texts and JSON
values with the descriptor of the batch. The contract also says what a slot without a sample holds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError, SampleError
from shardflow.fields.field import RESERVED_NAMES, Arrays, ArraySpec

OutputKind: TypeAlias = Literal["array", "ragged", "arrays", "bytes", "text", "json"]
ENTRY_TYPE: Final = "output"
"""Type of the entries of a batch that a transform returned, in its descriptor."""
_STORED: Final = ("ragged", "arrays", "bytes")
"""Kinds that are stored one after another."""


@dataclass(frozen=True, slots=True)
class Output:
    """Entry that a transform returns for each sample."""

    name: str
    kind: OutputKind
    """``array`` of one shape, ``ragged`` array of varying shape or None, list of ``arrays``, ``bytes``,
    ``text``, or a value of ``json``."""
    dtype: str = ""
    """Of arrays; empty for other kinds."""
    shape: tuple[int, ...] | None = None
    """Of an ``array``; of other arrays the most in each axis, None for no bound."""

    @property
    def num_bytes(self) -> int:
        """Size of one sample's entry, at most; 0 where it has no bound."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize if self.shape is not None else 0

    def blank(self) -> Any:
        """Return what a slot without a sample holds."""
        if self.kind == "array":
            return np.zeros(cast("tuple[int, ...]", self.shape), self.dtype)
        return {"arrays": [], "bytes": b"", "text": ""}.get(self.kind)

    def check(self, value: Any, where: str) -> Any:
        """Return the value of a sample as it is stored.

        Args:
            value: What the transform returned.
            where: Name of the transform and key of the sample, for messages.

        Raises:
            SampleError: It is not what the contract says.
        """
        given, value = value, plain_value(value)
        match self.kind:
            case "array":
                return self._array(value, where)
            case "ragged":
                return None if value is None else self._array(value, where)
            case "arrays" if isinstance(value, list):
                return [self._array(plain_value(one), where) for one in value]
            case "bytes" if isinstance(value, bytes):
                return value
            case "text" if isinstance(value, str):
                return value
            case "json" if not isinstance(given, np.ndarray | np.generic | bytes):
                return self._json(given, where)
        raise self._deviates(_described(value), where)

    def _array(self, value: Any, where: str) -> NDArray[Any]:
        if not isinstance(value, np.ndarray | np.generic):
            raise self._deviates(_described(value), where)
        array = np.asarray(value)
        fits = array.dtype == np.dtype(self.dtype)
        if self.kind == "array":
            fits &= array.shape == self.shape
        elif self.shape is not None:
            pairs = zip(array.shape, self.shape, strict=False)
            fits &= array.ndim == len(self.shape) and all(side <= most for side, most in pairs)
        if not fits:
            raise self._deviates(_described(array), where)
        return array

    def _json(self, value: Any, where: str) -> Any:
        try:
            return json.loads(json.dumps(value))  # the same in this process and from another one
        except (TypeError, ValueError, RecursionError):
            raise SampleError(
                f"{where} returned {self.name!r} as {type(value).__name__}, which a batch cannot hold; "
                "return an array, a number, a string, bytes, or JSON values."
            ) from None

    def _deviates(self, found: str, where: str) -> SampleError:
        return SampleError(
            f"{where} returned {self.name!r} as {found}, and its output contract says {self.describe()}; "
            "return one shape and dtype for all samples, or declare outputs= with max_shape."
        )

    def describe(self) -> str:
        """Name dtype and shape for a message."""
        if self.kind in ("array", "ragged", "arrays"):
            most = "" if self.kind == "array" else "at most "
            shape = "of any shape" if self.shape is None else f"{most}{self.shape}"
            return f"{'a list of ' if self.kind == 'arrays' else ''}{self.dtype} {shape}"
        return {"text": "a string", "bytes": "bytes", "json": "a JSON value"}[self.kind]


@dataclass(frozen=True, slots=True)
class OutputContract:
    """Entries that a transform returns for each sample."""

    outputs: tuple[Output, ...]
    generators: tuple[str, ...] = ()
    """Process-global generators that the transform draws from, such as ``numpy.random``."""

    @property
    def is_fixed(self) -> bool:
        """Whether the arrays of a batch are known before its samples are."""
        return not any(one.kind in _STORED for one in self.outputs)

    def num_bytes(self, num_slots: int) -> int:
        """Return the size of a batch's outputs, as far as it is known before its samples are."""
        return num_slots * sum(one.num_bytes for one in self.outputs)

    def blank(self) -> dict[str, Any]:
        """Return the entries of a slot without a sample."""
        return {one.name: one.blank() for one in self.outputs}

    def check(self, sample: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the entries of a sample as they are stored.

        Raises:
            SampleError: An entry is missing, unknown, or of another shape or dtype.
        """
        names = {one.name for one in self.outputs}
        for name in names - sample.keys():
            raise SampleError(
                f"{where} returned no {name!r}, and its output contract has it; return it always."
            )
        for name in sample.keys() - names:
            raise SampleError(
                f"{where} returned {name!r}, and its output contract has only {', '.join(sorted(names))}; "
                "return the same keys for all samples, or declare outputs=."
            )
        return {one.name: one.check(sample[one.name], where) for one in self.outputs}

    def array_specs(self, num_slots: int, samples: Sequence[Mapping[str, Any]] | None) -> list[ArraySpec]:
        """Name the arrays of a batch.

        Args:
            num_slots: Slots of the batch (B).
            samples: The checked samples of all slots; None is enough if the contract is fixed.
        """
        specs: list[ArraySpec] = []
        for one in self.outputs:
            if one.kind == "array":
                specs.append(ArraySpec.of(one.name, one.dtype, num_slots, *(one.shape or ())))
            elif one.kind in _STORED and samples is not None:
                specs += _item_specs(one.name, one.dtype or "uint8", [_items(one, each) for each in samples])
        return specs

    def put(self, arrays: Arrays, slot: int, sample: Mapping[str, Any]) -> None:
        """Store the arrays of one shape of a checked sample."""
        for one in self.outputs:
            if one.kind == "array":
                arrays[one.name][slot] = sample[one.name]

    def put_items(self, arrays: Arrays, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store the arrays of varying shape of all slots."""
        for one in self.outputs:
            if one.kind in _STORED:
                _put_items(arrays, one.name, [_items(one, each) for each in samples])

    def describe(self, values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the entries of a batch for its descriptor.

        Args:
            values: For each slot the entries of the kinds ``text`` and ``json``.
        """
        found: list[dict[str, Any]] = []
        for one in self.outputs:
            entry: dict[str, Any] = {"type": ENTRY_TYPE, "name": one.name, "kind": one.kind}
            if one.kind in ("text", "json"):
                entry["values"] = [each[one.name] for each in values]
            found.append(entry)
        return found


def declared_contract(outputs: Mapping[str, Any]) -> OutputContract:
    """Return the contract that a user declared.

    Args:
        outputs: By name ``(dtype, shape)``, ``{"dtype": ..., "max_shape": ...}``, ``str`` for a text,
            ``bytes``, or ``dict`` for a JSON value.

    Raises:
        ConfigError: A declaration cannot be read.
    """
    if not outputs or not hasattr(outputs, "items"):
        raise ConfigError(
            "outputs is a mapping from the names that the transform returns, such as "
            "{'image': ('float32', (1, 224, 224))}."
        )
    check_output_names(outputs)
    return OutputContract(tuple(_declared(name, one) for name, one in outputs.items()))


_KINDS_OF_TYPES: Final[dict[Any, OutputKind]] = {str: "text", bytes: "bytes", dict: "json"}


def _declared(name: str, declaration: Any) -> Output:
    try:
        if isinstance(declaration, type):
            return Output(name, _KINDS_OF_TYPES[declaration])
        if isinstance(declaration, Mapping):
            (kind,) = {*declaration} - {"dtype"}
            dtype, shape = declaration["dtype"], declaration[kind]
            kinds: dict[str, OutputKind] = {"shape": "array", "max_shape": "ragged"}
            return Output(name, kinds[kind], np.dtype(dtype).name, _shape(shape))
        dtype, shape = declaration
        return Output(name, "array", np.dtype(dtype).name, _shape(shape))
    except (TypeError, ValueError, KeyError):
        raise ConfigError(
            f"outputs[{name!r}] is (dtype, shape), such as ('float32', (1, 224, 224)), or {{'dtype': ..., "
            "'max_shape': ...} for a varying shape, or str, bytes or dict (JSON)."
        ) from None


def _shape(sides: Any) -> tuple[int, ...]:
    found = tuple(int(side) for side in sides)
    if any(side < 0 for side in found):
        raise ValueError
    return found


def check_output_names(names: Iterable[Any]) -> None:
    """Refuse names of entries that a batch cannot have.

    Raises:
        ConfigError: A name is no string, is reserved, or contains a dot.
    """
    for name in names:
        if not isinstance(name, str) or not name or "." in name or name.startswith("__"):
            raise ConfigError(f"The name of an output is a string without dots, got {name!r}; rename it.")
        if name in RESERVED_NAMES:
            raise ConfigError(
                f"Every batch has an entry {name!r} of its own; choose another name for the output."
            )


def probed_contract(samples: Sequence[Mapping[str, Any]], where: str) -> OutputContract:
    """Return the contract that the results of probes show; shapes that differ between them vary.

    Raises:
        SampleError: A value cannot be in a batch, or the probes returned different keys or dtypes.
    """
    first = samples[0]
    check_output_names(first)
    if not first:
        raise SampleError(f"{where} returned no entry; return the entries that a batch is to hold.")
    found = tuple(_probed(name, [plain_value(each.get(name)) for each in samples], where) for name in first)
    contract = OutputContract(found)
    for each in samples:
        contract.check(each, where)
    return contract


def _probed(name: str, values: list[Any], where: str) -> Output:
    first = values[0]
    if isinstance(first, str | bytes):
        return Output(name, "text" if isinstance(first, str) else "bytes")
    lists = [one for one in values if isinstance(one, list) and any(map(_is_array, one))]
    if lists:
        return Output(name, "arrays", np.asarray(plain_value(lists[0][0])).dtype.name)
    if not _is_array(first):
        return Output(name, "json")
    shapes = {one.shape for one in values if _is_array(one)}
    if first.dtype.hasobject or first.dtype.kind in "USMmV":
        raise SampleError(
            f"{where} returned {name!r} as an array of {first.dtype}, which a batch cannot hold; return "
            "numbers, or strings of Python."
        )
    if len(shapes) > 1:
        return Output(name, "ragged", first.dtype.name)
    return Output(name, "array", first.dtype.name, first.shape)


def _is_array(value: Any) -> bool:
    return isinstance(plain_value(value), np.ndarray | np.generic)


def plain_value(value: Any) -> Any:
    """Return tensors and numbers as NumPy values, and everything else as it is."""
    if isinstance(value, np.ndarray | np.generic):
        return value
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return np.int64(value)
    if isinstance(value, float):
        return np.float64(value)
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor, of whatever library
        return np.asarray(value.detach().cpu().numpy())
    return value


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray | np.generic):
        return f"{value.dtype.name} {value.shape}"
    return type(value).__name__


# ---- arrays of varying shape ---------------------------------------------------------------------


def _items(output: Output, sample: Mapping[str, Any]) -> list[NDArray[Any]]:
    """Return the arrays that are stored for an entry of a sample."""
    value = sample[output.name]
    if output.kind == "bytes":
        return [np.frombuffer(value, np.uint8)]
    if output.kind == "arrays":
        return list(value)
    return [] if value is None else [value]


def _item_specs(name: str, dtype: str, items: Sequence[Sequence[NDArray[Any]]]) -> list[ArraySpec]:
    flat = [one for each in items for one in each]
    num_axes = max((one.ndim for one in flat), default=0)
    return [
        ArraySpec.of(f"{name}.data", dtype, sum(one.size for one in flat)),
        ArraySpec.of(f"{name}.start", np.int64, len(items) + 1),
        ArraySpec.of(f"{name}.shape", np.int64, len(flat), num_axes + 1),
    ]


def _put_items(arrays: Arrays, name: str, items: Sequence[Sequence[NDArray[Any]]]) -> None:
    data, starts, shapes = (arrays[f"{name}.{part}"] for part in ("data", "start", "shape"))
    starts[0], shapes[:], stop, place = 0, 0, 0, 0
    for slot, each in enumerate(items):
        for one in each:
            data[stop : stop + one.size] = one.reshape(-1)
            shapes[place, 0], shapes[place, 1 : one.ndim + 1] = one.ndim, one.shape
            stop, place = stop + one.size, place + 1
        starts[slot + 1] = place


def _read_items(arrays: Arrays, name: str) -> list[list[NDArray[Any]]]:
    data = arrays[f"{name}.data"]
    found, stop = [], 0
    for num_axes, *sides in arrays[f"{name}.shape"].tolist():
        shape = sides[:num_axes]
        size = math.prod(shape)
        found.append(data[stop : stop + size].reshape(shape))
        stop += size
    starts = arrays[f"{name}.start"].tolist()
    return [found[start:end] for start, end in pairwise(starts)]


def present_output(entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
    """Return an entry of a batch that a transform, or ``collate=``, returned."""
    name, kind = entry["name"], entry["kind"]
    if kind in ("text", "json"):
        return {name: entry["values"]}
    if kind == "array":
        return {name: arrays[name]}
    items = _read_items(arrays, name)
    if kind == "arrays":
        return {name: items}
    if kind == "bytes":
        return {name: [one[0].tobytes() for one in items]}
    return {name: [one[0] if one else None for one in items]}


class CollatedBatch:
    """Result of ``collate=`` for the samples of a micro-batch, as it is stored.

    Args:
        result: By name an array, a number, a string, a list of arrays of one dtype, or JSON values.
        where: Name of the function and of the micro-batch, for messages.

    Raises:
        SampleError: It is no mapping, or a batch cannot hold an entry.
    """

    def __init__(self, result: Any, where: str) -> None:
        if not isinstance(result, Mapping):
            raise SampleError(
                f"{where} returned {type(result).__name__}; return a dict from names to arrays or lists."
            )
        check_output_names(result)
        self._arrays: dict[str, NDArray[Any]] = {}
        self._lists: dict[str, list[list[NDArray[Any]]]] = {}
        self.entries: list[dict[str, Any]] = []
        for name, value in result.items():
            found = plain_value(value)
            entry: dict[str, Any] = {"type": ENTRY_TYPE, "name": name}
            if _is_array(found):
                self._arrays[name] = np.asarray(found)
                self.entries.append({**entry, "kind": "array"})
            elif isinstance(found, list) and any(map(_is_array, found)) and not _are_numbers(found):
                kinds = [None if one is None else np.asarray(plain_value(one)) for one in found]
                self._lists[name] = [[] if one is None else [one] for one in kinds]
                self.entries.append({**entry, "kind": "ragged"})
            else:
                values = Output(name, "json").check(found, where)
                self.entries.append({**entry, "kind": "json", "values": values})

    def array_specs(self) -> list[ArraySpec]:
        """Name the arrays of the batch."""
        specs = [ArraySpec(name, array.dtype, array.shape) for name, array in self._arrays.items()]
        for name, items in self._lists.items():
            dtype = np.result_type(*(one.dtype for each in items for one in each))
            specs += _item_specs(name, dtype.name, items)
        return specs

    def put(self, arrays: Arrays) -> None:
        """Store the arrays."""
        for name, array in self._arrays.items():
            arrays[name][...] = array
        for name, items in self._lists.items():
            _put_items(arrays, name, items)


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(one, bool | int | float) for one in values)
