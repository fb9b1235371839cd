"""Forward passes without values: on the meta device, where nothing is computed and nothing allocated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


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
