"""Weights of a folder, read straight to where they stay: a rank's rows of a share, or whole tensors.

A model that is built inside `weights_later` has its parameters on the meta device, and its modules know where
each one stands in the safetensors of the folder; `shard` cuts it there, and `load_weights` gives each rank
memory for what it holds and reads that part of the files alone, in pieces of a few megabytes. So starting
takes the memory of the shares, on the device where they stay. Layers of 4 bits are read whole and quantized,
one at a time. Which name in a file is which parameter is what transformers says. Folders that it converts
while it reads (experts that are merged, quantized weights), or with several values for tied weights, are read
whole on the CPU as before.

Forward passes on the meta device, where nothing is computed and nothing allocated, tell which parameters an
output depends on, and how many places pictures take.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardflow.errors import ConfigError, os_reason
from shardflow.training.checkpoint.tensors import TensorEntry, like_share, own_rows, parse_entries
from shardflow.training.distributed import blocks_of, is_share, local_part

_LOGGER = logging.getLogger(__name__)
_LATER: ContextVar[bool] = ContextVar("weights_later", default=False)
_STORED: Final = "_stored_weights"
"""Attribute of a module: where its parameters and buffers are stored, by their names in it."""
_PIECE_BYTES: Final = 4 * 1024**2
_QUANTIZED: Final = "nf4"
_QUANTIZED_BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file."""

    path: Path
    entry: TensorEntry


@contextlib.contextmanager
def weights_later() -> Iterator[None]:
    """Leave the stored weights of models that are built inside the block to `load_weights`."""
    token = _LATER.set(True)
    try:
        yield
    finally:
        _LATER.reset(token)


def are_weights_later() -> bool:
    """Tell whether a model is being built inside `weights_later`."""
    return _LATER.get()


def build_without_weights(kind: Any, config: Any, path: Path, attention: Mapping[str, str]) -> Any:
    """Build a model of a folder on the meta device; its buffers have their values.

    Args:
        kind: The class, or auto class, of transformers.
        config: The configuration of the folder.
        path: The folder.
        attention: ``attn_implementation``, or nothing.

    Returns:
        The model in float32; None where its weights must be read whole.

    Raises:
        ConfigError: The files lack weights of the model, or hold them in another shape or an unknown type.
        OSError: There are no safetensors, or they cannot be read.
    """
    if getattr(config, "quantization_config", None) is not None:
        return None
    make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    with parameters_on_meta():
        model = make(copy.deepcopy(config), dtype=torch.float32, **attention).float()
    return model.eval() if _remember(model, _entries(path)) else None


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Take the memory of parameters away when modules get them; buffers are computed, and stay."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _entries(path: Path) -> dict[str, _Stored]:
    """Find the tensors of a folder, of one file or of those that an index names."""
    single = path / "model.safetensors"
    if single.is_file():
        files = [single]
    else:
        index = json.loads((path / "model.safetensors.index.json").read_bytes())
        files = sorted({path / Path(name).name for name in index["weight_map"].values()})
    found: dict[str, _Stored] = {}
    for file in files:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found |= {name: _Stored(file, entry) for name, entry in parse_entries(data).items()}
    return found


def _remember(model: Any, stored: Mapping[str, _Stored]) -> bool:
    """Note at each module where its tensors are stored; return whether they can be read in parts.

    Raises:
        ConfigError: The files lack weights of the model, or hold them in another shape.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    own = model.state_dict(keep_vars=True)
    read: dict[int, tuple[str, _Stored]] = {}
    for source in sorted(stored, key=dot_natural_key):
        name, converter = rename_source_key(source, renamings, converters, model.base_model_prefix, own)
        if name not in own and source in own:
            name, converter = rename_source_key(source, [], [], model.base_model_prefix, own)
        if name not in own:
            continue
        if converter is not None or id(own[name]) in read:
            _LOGGER.info(
                "weights of model.path are converted or tied while they are read, whole on each rank"
            )
            return False
        read[id(own[name])] = name, stored[source]
    for name, tensor in own.items():
        found = read.get(id(tensor))
        if found is None:
            raise ConfigError(
                f"model.path lacks weights of its own model, {name} among them; copy the folder anew, or set "
                "model.weights = 'random' for a model that is not trained yet."
            )
        if tuple(tensor.shape) != found[1].entry.shape:
            raise ConfigError(
                f"model.path holds {name} as {found[1].entry.shape}, and its config.json says "
                f"{tuple(tensor.shape)}; copy the folder anew."
            )
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        module.__dict__.setdefault(_STORED, {})[attribute] = found[1]
    return True


class QuantizedLinear(nn.Linear):
    """Linear layer with weights of 4 bits (NF4), which are not trained.

    64 neighbors share a scale in float32, so a weight takes 4.5 bits. A layer gets this class in place, by
    `quantize`.

    Source:
        Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023, section 3.
    """

    codes: torch.Tensor
    """``(n / 2, 1)`` uint8, two weights each."""
    scales: torch.Tensor
    """``(n / 64,)`` float32."""

    @staticmethod
    def quantize(layer: nn.Linear) -> None:
        """Quantize a layer; one on the meta device stays there, and is filled by `fill`."""
        weight = layer.weight.detach()
        del layer.weight
        layer.__class__ = QuantizedLinear
        assert isinstance(layer, QuantizedLinear)  # noqa: S101 - as of the line before
        num_weights = weight.numel()
        codes = torch.empty(((num_weights + 1) // 2, 1), dtype=torch.uint8, device="meta")
        scales = torch.empty(-(-num_weights // _QUANTIZED_BLOCK), device="meta")
        layer.register_buffer("codes", codes, persistent=False)
        layer.register_buffer("scales", scales, persistent=False)
        if not weight.is_meta:
            layer.fill(weight)

    def fill(self, weight: torch.Tensor) -> None:
        """Take the weights, ``(outputs, inputs)`` float32, on the device where they stay.

        Raises:
            ConfigError: bitsandbytes is not installed.
        """
        try:
            from bitsandbytes.functional import quantize_4bit
        except ImportError:
            raise ConfigError(
                "model.quantize needs the package bitsandbytes, which is not installed; install "
                "shardflow[qlora], or remove model.quantize."
            ) from None
        self.codes, state = quantize_4bit(
            weight.contiguous(), blocksize=_QUANTIZED_BLOCK, compress_statistics=False, quant_type=_QUANTIZED
        )
        self.scales = state.absmax

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Multiply by the weights, read back in the type that is computed in."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import QuantState, get_4bit_type

        state = QuantState(
            self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=get_4bit_type(_QUANTIZED, device=input.device),
            blocksize=_QUANTIZED_BLOCK,
            quant_type=_QUANTIZED,
            dtype=dtype,
        )
        own: nn.Parameter | None = self._parameters["bias"]
        bias = None if own is None else own.to(dtype)
        found: torch.Tensor = matmul_4bit(input.to(dtype), self.codes.t(), quant_state=state, bias=bias)
        return found


def hold_frozen(model: nn.Module, dtype: str, quantize: str = "none") -> None:
    """Choose the type of the weights that are not trained, before the model is cut and loaded.

    Args:
        model: The model; changed in place.
        dtype: ``fp32`` leaves them as they are, ``bf16`` halves the memory of floats.
        quantize: ``nf4`` makes those of linear layers in repeated blocks numbers of 4 bits.
    """
    layers = [layer for block in blocks_of(model) for layer in block.modules()] if quantize != "none" else []
    for layer in layers:
        if type(layer) is nn.Linear and not layer.weight.requires_grad:
            QuantizedLinear.quantize(layer)
    for parameter in model.parameters() if dtype == "bf16" else ():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()


@torch.no_grad()
def load_weights(model: nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory on a device and their stored values; a share its rows alone.

    Tied parameters stay tied. Buffers get their stored values where they are. A model that has its weights
    already stays as it is.

    Args:
        model: The model, whole or cut by `shard`; changed in place.
        device: Where the weights stay.

    Raises:
        ConfigError: A file cannot be read, or ends early.
    """
    made: dict[int, nn.Parameter] = {}
    old = []  # kept, so that no other parameter gets the id of one that is gone
    for module in model.modules():
        stored: Mapping[str, _Stored] = module.__dict__.pop(_STORED, {})
        for name, parameter in [*module._parameters.items()]:
            if parameter is None or not local_part(parameter).is_meta:
                continue
            if id(parameter) not in made:
                old.append(parameter)
                made[id(parameter)] = _read(name, parameter, stored[name], device)
            setattr(module, name, made[id(parameter)])
        if isinstance(module, QuantizedLinear) and module.codes.is_meta:
            module.fill(_rows(stored["weight"], slice(0, None), torch.float32, device))
        for name, one in stored.items():
            if name in module._buffers:
                buffer = module.get_buffer(name)
                buffer.copy_(_rows(one, slice(0, None), buffer.dtype, torch.device("cpu")))


def _read(name: str, parameter: nn.Parameter, stored: _Stored, device: torch.device) -> nn.Parameter:
    rows = own_rows(name, parameter) if is_share(parameter) else slice(0, None)
    values = like_share(parameter, _rows(stored, rows, parameter.dtype, device))
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _rows(stored: _Stored, rows: slice, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Read rows of a tensor into new memory, a piece at a time."""
    entry, shape = stored.entry, stored.entry.shape
    if shape:
        start, stop, _ = rows.indices(shape[0])
        shape = (stop - start, *shape[1:])
    else:
        start = 0
    found = torch.empty(shape, dtype=dtype, device=device)
    flat, size = found.view(-1), entry.dtype.itemsize
    width = found.numel() // shape[0] if shape and shape[0] else 1
    offset, step = entry.offset + start * width * size, _PIECE_BYTES // size
    piece = torch.empty(min(step, flat.numel()), dtype=entry.dtype)
    try:
        with stored.path.open("rb", buffering=0) as file:
            for at in range(0, flat.numel(), step):
                part = piece[: flat.numel() - at]
                view: memoryview = part.view(torch.uint8).numpy().data
                _fill(file.fileno(), view, offset + at * size)
                flat[at : at + len(part)].copy_(part)
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"model.path cannot be read ({os_reason(error)} in {stored.path.name}); copy the folder anew."
        ) from None
    return found


def _fill(descriptor: int, view: memoryview, offset: int) -> None:
    while len(view):
        num_bytes = os.preadv(descriptor, [view], offset)
        if not num_bytes:
            raise EOFError
        view, offset = view[num_bytes:], offset + num_bytes


@contextlib.contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Show parameters without values as ones of the CPU without memory of their own inside the block.

    Adapters are made beside weights, on their device and of their type; their own values must be real.
    """
    hidden = {
        (module, name): parameter
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    }
    for (module, name), parameter in hidden.items():
        shown = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        module._parameters[name] = nn.Parameter(shown, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for (module, name), parameter in hidden.items():
            module._parameters[name] = parameter


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations whose tensors are partly without values; those have one answer to every yes-or-no question.

    Such a question is whether a mask is all true. What is computed from tensors with values alone, such as
    ids and places, has values.
    """

    def __init__(self, *, answer: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_question = function is torch.ops.aten._local_scalar_dense.default
        if is_question and args[0].is_meta and args[0].dtype is torch.bool:
            return self._answer
        given = args, kwargs or {}
        if len({one.is_meta for one in tree_leaves(given) if isinstance(one, torch.Tensor)}) > 1:
            if function is torch.ops.aten.index.Tensor:
                given = (args[0], _numbers(args[1])), {}
            given = tree_map_only(torch.Tensor, lambda one: one.to("meta"), given)
        return function(*given[0], **given[1])


def _numbers(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return masks as the numbers of what they mark, whose count is the shape of what they choose."""
    found: list[torch.Tensor | None] = []
    for one in indices:
        is_mask = one is not None and not one.is_meta and one.dtype is torch.bool
        found += one.nonzero(as_tuple=True) if is_mask and one is not None else [one]
    return found


def used_parameters(model: nn.Module, arguments: Sequence[Any]) -> set[str]:
    """Return the names of the parameters that the output depends on, whatever questions are answered.

    Args:
        model: The model, with values or without.
        arguments: Of its forward, tensors or mappings of them; of floats only the shapes count.
    """
    used = _used(model, arguments, answer=True)
    # What only the other branch uses stays trained; if it has no gradient, the first step names it.
    with contextlib.suppress(Exception):
        used |= _used(model, arguments, answer=False)
    return used


def num_picture_features(model: nn.Module, pictures: Mapping[str, torch.Tensor]) -> int | None:
    """Return how many places of a sequence pictures take, as the model sees them; None if it cannot be known.

    Args:
        model: With ``get_image_features``, with values or without.
        pictures: What it takes; of floats only the shapes count.
    """
    features = _PictureFeatures(model)
    with contextlib.suppress(Exception), Answers(answer=True), torch.no_grad():
        found = torch.func.functional_call(features, _stand_ins(features), (), without_values(dict(pictures)))
        pooled = getattr(found, "pooler_output", found)
        parts = pooled if isinstance(pooled, list | tuple) else [pooled]
        return int(sum(math.prod(one.shape[:-1]) for one in parts))
    return None


class _PictureFeatures(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **pictures: torch.Tensor) -> Any:
        return self.model.get_image_features(**pictures)


def _stand_ins(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty_like(parameter, device="meta", requires_grad=True)
        for name, parameter in model.named_parameters()
    }


def _used(model: nn.Module, arguments: Sequence[Any], *, answer: bool) -> set[str]:
    parameters = _stand_ins(model)
    with Answers(answer=answer):
        output = torch.func.functional_call(model, parameters, tuple(map(without_values, arguments)))
    return computed_from(output, parameters.items())


def without_values(given: Any) -> Any:
    """Return floats of tensors or mappings of them on the meta device, and the rest as it is."""
    return tree_map_only(torch.Tensor, lambda one: one.to("meta") if one.is_floating_point() else one, given)


def computed_from(output: torch.Tensor, parameters: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Return the names of the parameters that a tensor was computed from, without a backward."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting += [following for following, _ in node.next_functions]
    return {name for name, parameter in parameters if id(parameter) in found}
