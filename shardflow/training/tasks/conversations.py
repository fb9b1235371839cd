"""Tasks of conversations: supervised fine-tuning, preference optimization, and a reward model.

The loader's field renders conversations, see `shardflow.Conversation`. The loss of ``sft`` is the mean
cross-entropy of the weighted tokens of a step over all ranks; of ``dpo`` and ``reward`` the mean over pairs,
and of ``reward`` without pairs the mean squared difference from the scores.

Source:
    DPO: Rafailov et al., "Direct Preference Optimization", NeurIPS 2023, equation 7. Reward: Ouyang et al.,
    "Training language models to follow instructions with human feedback", NeurIPS 2022, equation 1.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import Renderer, blank_picture
from shardflow.fields.field import Field
from shardflow.loading import Batch, Selection
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from shardflow.sampling.spec import Tail
from shardflow.training.config import LoraConfig, ModelConfig
from shardflow.training.data import with_lanes
from shardflow.training.distributed import settle, unwrap
from shardflow.training.model_fields import CONVERSATION_FIELD, TaskConfig
from shardflow.training.models.building import folder_digest, weights_digest
from shardflow.training.models.conversations import build_conversation_model
from shardflow.training.models.shapes import without_values
from shardflow.training.tasks.task import _WEIGHTS, ArrayInputs, ArrayTask, Scores

# ruff: noqa: N806
# Tensors carry their axes as a suffix: B slots, N sequences, T tokens; a packed row has those of N sequences.

_TOKENS: Final = "tokens."
_PICTURES: Final = "pictures."
_LEARNED: Final = "learned"
_SEGMENTS: Final = "segments"
"""Number of the sequence that each token of a packed row belongs to, ``(1, T)``."""
_ENDS: Final = "ends"
"""Last token of each sequence of a packed row, ``(N,)``."""
_SCORE: Final = "score"
"""What a reward model without pairs is to say of each slot, ``(B,)``."""
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
        self._has_reference = task.type == "dpo" and not lora.rank
        self._has_scores = task.type == "reward" and not field.pairs
        renderer = Renderer.load(field.processor)
        has_pictures = renderer.has_pictures and field.max_images != 0
        self._small = renderer.example([blank_picture(64, 64)] if has_pictures else ())

    def leave_reference(self) -> None:
        """Build no second model, which only the loss of ``dpo`` compares with."""
        self._has_reference = False

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

    def batch_spec(self, selection: Selection, tail: Tail | None) -> BatchSpec:
        """Return how steps are formed."""
        batch = self._run.batch
        if batch.max_tokens is None:
            return super().batch_spec(selection, tail)
        budget = TokenBudget(
            max_tokens=batch.max_tokens,
            max_samples=batch.max_samples,
            padded=not batch.packed,
            cost=CostRule(quadratic_tokens=batch.quadratic_tokens),
        )
        spec = BatchSpec(
            budget=budget,
            micro_batches_per_step=batch.micro_batches_per_step,
            tail=tail or batch.tail,
            lanes=batch.lanes or 1,
            window_bytes=batch.window_bytes,
        )
        if batch.lanes is not None:
            return spec
        return with_lanes(spec, selection, self.fields(selection, is_evaluation=False))

    def fields(self, selection: Selection, *, is_evaluation: bool) -> dict[str, Field]:
        """Return the fields of the settings, with conversations packed where sequences are, and scores."""
        found = super().fields(selection, is_evaluation=is_evaluation)
        talk = found[CONVERSATION_FIELD]
        assert isinstance(talk, Conversation)  # noqa: S101 - checked when the settings were read
        packed, scores = self._run.batch.packed, self._has_scores
        return {**found, CONVERSATION_FIELD: replace(talk, packed=packed, scores=scores)}

    def build_model(self, example: Batch | None) -> nn.Module:  # noqa: ARG002
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
            is_packed=self._run.batch.packed,
            seed=self._run.seed,
        )
        if self._has_reference:
            self._reference = copy.deepcopy(model).eval().requires_grad_(False)
        return model

    def largest_inputs(self) -> ArrayInputs:
        """Return a micro-batch of the largest shapes, whose floats have no values; a budget as one sample."""
        batch, of_slot = self._run.batch, self._field.num_sequences
        num_slots, length = batch.micro_batch_size or 1, self._field.max_tokens
        num_images = self._field.max_images
        if batch.max_tokens is not None:
            # A conversation longer than the budget is a micro-batch of its own.
            length = max(batch.max_tokens // of_slot, length)
            num_images = None if num_images is None else num_images * batch.max_samples
        one = Renderer.load(self._field.processor).largest(length, num_images)

        def rows(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).repeat(num_slots * of_slot, *[1] * (array.ndim - 1))

        tensors = {
            _LEARNED: rows(one.weights[None]),
            f"{_TOKENS}input_ids": rows(one.ids[None]),
            f"{_TOKENS}attention_mask": rows(np.ones((1, length), np.int64)),
            **{f"{_TOKENS}{name}": rows(values[None]) for name, values in one.tokens.items()},
            _WEIGHTS: torch.ones(num_slots),
        }
        for name, values in one.pictures.items():
            is_float = values.dtype.kind == "f"
            shape = (num_slots * of_slot * len(values), *values.shape[1:])
            tensors[f"{_PICTURES}{name}"] = torch.empty(shape, device="meta") if is_float else rows(values)
        if self._has_scores:
            tensors[_SCORE] = torch.zeros(num_slots)
        return ArrayInputs(task=self, tensors=without_values(tensors), num_tokens=0, num_samples=num_slots)

    def arrays(self, batch: Batch, *, is_evaluation: bool) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002
        """Return what the processor returned, ``(N, T)`` or rows of pictures; pairs in a row."""
        name, small = CONVERSATION_FIELD, self._small
        beside = dict(self._pictures(batch))
        if self._has_scores:
            beside[_SCORE] = batch[f"{name}_score"]
        if f"{name}_segment_ids" in batch:
            return self._packed_arrays(batch) | beside
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
        return found | beside

    def _packed_arrays(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the tokens of a packed row, ``(1, T)``."""
        name = CONVERSATION_FIELD
        segments = batch[f"{name}_segment_ids"]
        numbers = np.arange(len(batch.info.weight) * self._field.num_sequences)
        return {
            _LEARNED: batch[f"{name}_weights"],
            _SEGMENTS: segments,
            _ENDS: np.maximum(np.searchsorted(segments[0], numbers, side="right") - 1, 0),
            f"{_TOKENS}input_ids": np.where(batch[f"{name}_mask"], batch[name], 0),
            f"{_TOKENS}position_ids": batch[f"{name}_position_ids"],
            **{f"{_TOKENS}{one}": batch[f"{name}_{one}"] for one in self._small.tokens},
        }

    def _pictures(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the pictures of a batch, or a blank one in place of none."""
        name, small = CONVERSATION_FIELD, self._small
        is_blank = bool(small.pictures) and not any(len(batch[f"{name}_{one}"]) for one in small.pictures)
        if is_blank:
            return {f"{_BLANK}{one}": values for one, values in small.pictures.items()}
        return {f"{_PICTURES}{one}": batch[f"{name}_{one}"] for one in small.pictures}

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
        if self._has_scores:
            off: torch.Tensor = output - tensors[_SCORE].to(output.dtype)
            return off.square() * self._is_learned(tensors)
        # A pair that was too long has no tokens, and is no pair.
        return -functional.logsigmoid(self._margins(output)) * self._is_learned(tensors)

    def counts(self, arrays: Mapping[str, NDArray[Any]], num_slots: int) -> NDArray[Any]:
        """Return the weights of the learned tokens of each slot, or 1 for each pair or score."""
        learned: NDArray[np.float64] = arrays[_LEARNED][:, 1:].sum(axis=1, dtype=np.float64)
        if _SEGMENTS in arrays:
            number, weights = arrays[_SEGMENTS][0], arrays[_LEARNED][0].astype(np.float64)
            learned = np.bincount(number, weights, minlength=len(arrays[_ENDS])).astype(np.float64)
        if self._task.type == "sft":
            return learned
        is_learned = np.all(learned.reshape(num_slots, -1) > 0, axis=1)
        return np.asarray(is_learned, np.float64)

    def scores(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return learned and right tokens of each slot, how far the chosen is ahead, or the score is off."""
        if self._has_scores:
            off = (output - tensors[_SCORE].to(output.dtype)).abs()
            return {"off": off, "is_scored": self._is_learned(tensors)}
        if self._task.type != "sft":
            return {"margin": self._margins(output), "is_pair": self._is_learned(tensors)}
        learned_NT = tensors[_LEARNED][:, 1:] > 0
        right_NT = output[:, :-1].argmax(dim=-1) == tensors[f"{_TOKENS}input_ids"][:, 1:]
        return {"learned": _summed(learned_NT, tensors), "right": _summed(right_NT & learned_NT, tensors)}

    def metrics(self, scores: Scores) -> Mapping[str, float | None]:
        """Return the share of learned tokens that were right, or of pairs whose chosen one is ahead.

        Of scores it is the mean absolute difference.
        """
        if self._has_scores:
            off = scores["off"][scores["is_scored"] > 0]
            return {"score_mae": float(off.mean()) if len(off) else None}
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

    def _is_learned(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return which slots have words to learn from, in each of their sequences, ``(B,)``."""
        learned_N = _summed(tensors[_LEARNED][:, 1:], tensors)
        return (learned_N > 0).reshape(-1, self._field.num_sequences).all(dim=1)

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
    packing = {name: tensors[name] for name in (_SEGMENTS, _ENDS) if name in tensors}
    return model(tokens, pictures or blank, is_blank=bool(blank), **packing)


def _summed(values_NT: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # noqa: N803
    """Sum what belongs to the targets, all tokens but the first, over each sequence, ``(N,)``."""
    if _SEGMENTS not in tensors:
        return values_NT.sum(dim=1)
    numbers = torch.arange(len(tensors[_ENDS]), device=values_NT.device)
    is_own_NT = tensors[_SEGMENTS][:, 1:] == numbers[:, None]
    return torch.where(is_own_NT, values_NT, torch.zeros_like(values_NT)).sum(dim=1)


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
    return -_summed(losses * learned_NT.to(losses.dtype), tensors)
