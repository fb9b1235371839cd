"""Tasks of conversations: supervised fine-tuning, preference optimization, and a reward model.

The loader's field renders conversations, see `shardflow.Conversation`. The loss of ``sft`` is the mean
cross-entropy of the weighted tokens of a step over all ranks; of ``dpo`` and ``reward`` the mean over pairs.

Source:
    DPO: Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, equation 7. Reward: Ouyang et al.,
    "Training language models to follow instructions with human feedback", NeurIPS 2022, equation 1.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import Renderer, blank_picture
from shardflow.loading import Batch
from shardflow.training.config import LoraConfig, ModelConfig
from shardflow.training.distributed import settle, unwrap
from shardflow.training.model_fields import CONVERSATION_FIELD, TaskConfig
from shardflow.training.models.building import folder_digest, weights_digest
from shardflow.training.models.conversations import build_conversation_model
from shardflow.training.tasks.task import ArrayTask, Scores

# ruff: noqa: N806
# Tensors carry their axes as a suffix: B slots, N sequences, T tokens.

_TOKENS: Final = "tokens."
_PICTURES: Final = "pictures."
_LEARNED: Final = "learned"
_BLANK: Final = "blank."
"""In place of the name of pictures where no sequence shows one; known without asking the device."""


class ConversationTask(ArrayTask):
    """Task of conversations; see docs/howto/conversations.md.

    Args:
        task: The table ``[task]``.
        model: The table ``[model]``.
        lora: The table ``[lora]``.
        field: The field of the conversations.
    """

    def __init__(self, task: TaskConfig, model: ModelConfig, lora: LoraConfig, field: Conversation) -> None:
        self._task, self._model, self._lora, self._field = task, model, lora, field
        self._reference: nn.Module | None = None
        renderer = Renderer.load(field.processor)
        has_pictures = renderer.has_pictures and field.max_images != 0
        self._small = renderer.example([blank_picture(64, 64)] if has_pictures else ())

    def settings(self) -> Mapping[str, Any]:
        """Return what a checkpoint must match; the loader compares the processor."""
        model, lora = self._model, self._lora
        assert model.path is not None  # noqa: S101 - checked when the settings were read
        found: dict[str, Any] = {
            "model.path digest": folder_digest(model.path),
            "model.path weights": weights_digest(model.path),
        }
        if self._task.type == "dpo":
            found["task.beta"] = self._task.beta
        if model.frozen_dtype != "fp32":
            found["model.frozen_dtype"] = model.frozen_dtype
        if model.frozen:
            found["model.frozen"] = list(model.frozen)
        if lora.rank:
            found |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha, "lora.targets": list(lora.targets)}
        return found

    def build_model(self, example: Batch) -> nn.Module:  # noqa: ARG002
        """Build the model of the folder, and for ``dpo`` keep it as it is."""
        small = self._small
        model = build_conversation_model(
            self._model,
            self._lora,
            example={
                "tokens": {
                    "input_ids": torch.from_numpy(small.ids)[None],
                    "attention_mask": torch.ones((1, len(small.ids)), dtype=torch.int64),
                    **{name: torch.from_numpy(one)[None] for name, one in small.tokens.items()},
                },
                "pictures": {name: torch.from_numpy(one) for name, one in small.pictures.items()},
            },
            has_score=self._task.type == "reward",
            seed=self._run.seed,
        )
        if self._task.type == "dpo" and not self._lora.rank:
            self._reference = copy.deepcopy(model).eval().requires_grad_(False)
        return model

    def arrays(self, batch: Batch, *, is_evaluation: bool) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002
        """Return what the processor returned, ``(N, T)`` or rows of pictures; pairs in a row."""
        name, small = CONVERSATION_FIELD, self._small
        mask = _sequences(batch[f"{name}_mask"]).astype(np.int64)
        # The model may have no row for the token that fills up, such as one that was added for it alone.
        ids = np.where(mask, _sequences(batch[name]), 0)
        found = {
            _LEARNED: _sequences(batch[f"{name}_weights"]),
            f"{_TOKENS}input_ids": ids,
            # A softmax over nothing would be NaN, also in the gradient of what counts nothing.
            f"{_TOKENS}attention_mask": np.where(mask.any(axis=1, keepdims=True), mask, 1),
            **{f"{_TOKENS}{one}": _sequences(batch[f"{name}_{one}"]) for one in small.tokens},
        }
        is_blank = bool(small.pictures) and not any(len(batch[f"{name}_{one}"]) for one in small.pictures)
        if is_blank:
            return {**found, **{f"{_BLANK}{one}": values for one, values in small.pictures.items()}}
        return {**found, **{f"{_PICTURES}{one}": batch[f"{name}_{one}"] for one in small.pictures}}

    def forward(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return logits or scores; for ``dpo`` log-probabilities of the model and of the reference."""
        if self._task.type != "dpo":
            return _run(model, tensors)
        with torch.no_grad(), self._as_at_first(model) as reference:
            expected_N = _log_probabilities(_run(reference, tensors), tensors)
        return _log_probabilities(_run(model, tensors), tensors), expected_N

    def losses(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each slot, ``(B,)``."""
        if self._task.type == "sft":
            return -_log_probabilities(output, tensors)
        # A pair that was too long has no tokens, and is no pair.
        return -functional.logsigmoid(self._margins(output)) * self._pairs(tensors)

    def counts(self, arrays: Mapping[str, NDArray[Any]], num_slots: int) -> NDArray[Any]:
        """Return the weights of the learned tokens of each slot, or 1 for each pair."""
        learned: NDArray[np.float64] = arrays[_LEARNED][:, 1:].sum(axis=1, dtype=np.float64)
        if self._task.type == "sft":
            return learned
        is_pair = np.all(learned.reshape(num_slots, 2) > 0, axis=1)
        return np.asarray(is_pair, np.float64)

    def scores(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return learned and right tokens of each slot, or how far the chosen is ahead."""
        if self._task.type != "sft":
            return {"margin": self._margins(output), "is_pair": self._pairs(tensors)}
        learned_NT = tensors[_LEARNED][:, 1:] > 0
        right_NT = output[:, :-1].argmax(dim=-1) == tensors[f"{_TOKENS}input_ids"][:, 1:]
        return {"learned": learned_NT.sum(dim=1), "right": (right_NT & learned_NT).sum(dim=1)}

    def metrics(self, scores: Scores) -> Mapping[str, float | None]:
        """Return the share of learned tokens that were right, or of pairs whose chosen one is ahead."""
        if self._task.type == "sft":
            total = float(scores["learned"].sum())
            return {"token_accuracy": float(scores["right"].sum()) / total if total else None}
        margins = scores["margin"][scores["is_pair"] > 0]
        return {"pair_accuracy": float((margins > 0).mean()) if len(margins) else None}

    def _margins(self, output: Any) -> torch.Tensor:
        """Return how far the chosen sequence of each pair is ahead, ``(B,)``."""
        if self._task.type == "reward":
            found_N, scale = output, 1.0
        else:
            own_N, expected_N = output
            found_N, scale = own_N - expected_N, self._task.beta
        found_B2: torch.Tensor = found_N.reshape(-1, 2)
        return scale * (found_B2[:, 0] - found_B2[:, 1])

    def _pairs(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        learned_N = tensors[_LEARNED][:, 1:].sum(dim=1)
        return (learned_N > 0).reshape(-1, 2).all(dim=1)

    @property
    def references(self) -> Sequence[nn.Module]:
        """Return the model as it was at first, where adapters cannot be turned off instead."""
        return () if self._reference is None else (self._reference,)

    @contextlib.contextmanager
    def _as_at_first(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the model with the weights that it had at first: a copy, or itself without its adapters."""
        inner = unwrap(model)
        if self._reference is not None:
            yield self._reference
            settle(self._reference)  # no backward follows, which would release what was gathered
            return
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapters = [one for one in inner.modules() if isinstance(one, BaseTunerLayer)]
        is_training = inner.training
        inner.eval()
        for one in adapters:
            one.enable_adapters(False)
        try:
            yield inner
        finally:
            for one in adapters:
                one.enable_adapters(True)
            inner.train(is_training)


def _sequences(array: NDArray[Any]) -> NDArray[Any]:
    """Return rows of tokens one after another, ``(N, T)``."""
    return array.reshape(-1, array.shape[-1])


def _run(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
    tokens, pictures, blank = (_named(tensors, beginning) for beginning in (_TOKENS, _PICTURES, _BLANK))
    return model(tokens, pictures or blank, is_blank=bool(blank))


def _named(tensors: Mapping[str, torch.Tensor], beginning: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(beginning): one for name, one in tensors.items() if name.startswith(beginning)}


def _log_probabilities(logits_NTV: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: N803
    """Return the weighted sum of the log-probabilities of each sequence's learned tokens, ``(N,)``."""
    if logits_NTV.dtype in {torch.float16, torch.bfloat16}:
        logits_NTV = logits_NTV.float()
    ids_NT, learned_NT = tensors[f"{_TOKENS}input_ids"][:, 1:], tensors[_LEARNED][:, 1:]
    losses = functional.cross_entropy(
        logits_NTV[:, :-1].flatten(0, 1), ids_NT.flatten(), reduction="none"
    ).view_as(learned_NT)
    return -(losses * learned_NT.to(losses.dtype)).sum(dim=1)
