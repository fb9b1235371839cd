"""Tasks of conversations: pretraining, supervised fine-tuning, preference optimization, and a reward model.

The loader's field renders conversations, see `shardflow.Conversation`. The loss of ``sft`` is the mean
cross-entropy of the weighted tokens of a step over all ranks, and of ``pretrain`` that of all tokens; of
``dpo`` and ``reward`` the mean over pairs, and of ``reward`` without pairs the mean squared difference from
the scores.

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

from shardflow.errors import ChecksumError, ConfigError, FormatError, ShortReadError, TrainingError
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import EVERYTHING, Rendered, Renderer, blank_picture
from shardflow.fields.conversations.stored import count_conversations, picture_entries
from shardflow.fields.field import Field
from shardflow.fields.types.columns import Columns
from shardflow.format import Dataset
from shardflow.format.facts.columns import open_columns
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.loading import Batch, Loader, Selection
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from shardflow.sampling.spec import Tail
from shardflow.training.config import LoraConfig, ModelConfig
from shardflow.training.data import with_lanes
from shardflow.training.distributed import settle, unwrap
from shardflow.training.model_fields import CONVERSATION_FIELD, REFERENCE_FIELD, TaskConfig
from shardflow.training.models.building import folder_digest, model_bindings, weights_digest
from shardflow.training.models.conversations import build_conversation_model
from shardflow.training.models.weights import without_values
from shardflow.training.tasks.task import _WEIGHTS, ArrayInputs, ArrayTask, Pieces, Scores

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
_REFERENCE: Final = "reference"
"""Stored log-probabilities of the reference of each pair, ``(B, 2)``."""
_ENDS_OF_PAIRS: Final = ("chosen", "rejected")
_TABLE: Final = "reference_"
"""Beginning of the names of tables of stored references; what they follow from is the rest."""
_STORE: Final = "run: shardflow train --config FILE --store-reference"
_NUM_CHECKED: Final = 64
_NUM_PACKED: Final = 2
"""Sequences of the packed row that memory is planned for."""
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
        self._is_stored = task.reference == "stored"
        self._has_reference = task.type == "dpo" and not lora.rank and not self._is_stored
        self._has_scores = task.type == "reward" and not field.pairs
        renderer = Renderer.load(field.processor)
        has_pictures = renderer.has_pictures and field.max_images != 0
        self._small = renderer.example([blank_picture(64, 64)] if has_pictures else ())

    def leave_reference(self) -> None:
        """Take nothing of the reference, which only the loss of ``dpo`` compares with."""
        self._has_reference = self._is_stored = False

    @property
    def reference_table(self) -> str:
        """Name of the table with the log-probabilities of the reference: a digest of what they follow from.

        That is the model as it is at first, its processor, what is learned of a conversation, and the type
        that is computed in: what is rounded otherwise would pass for what was learned.
        """
        model = self._model
        assert model.path is not None  # noqa: S101 - checked when the settings were read
        facts = [folder_digest(model.path), weights_digest(model.path)]
        facts += [Renderer.load(self._field.processor).digest, *self._field.train_on]
        facts += [] if model.weights == "stored" else [model.weights, str(self._run.seed)]
        facts += [] if model.quantize == "none" else [model.quantize]
        facts += [] if self._run.precision == "fp32" else [self._run.precision]
        return f"{_TABLE}{sha256_hex(canonical_json(list(facts)))[:16]}"

    def settings(self) -> Mapping[str, Any]:
        """Return what a checkpoint must match; the loader compares the processor."""
        model = self._model
        found = model_bindings(model, self._lora)
        if model.path is None:
            found |= {"model.target": model.target, "model.arguments": model.arguments}
        if self._task.type == "dpo":
            found["task.beta"] = self._task.beta
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
        talk = replace(talk, packed=self._run.batch.packed, scores=self._has_scores)
        if self._task.type == "pretrain":
            talk = replace(talk, train_on=(EVERYTHING,))
        found |= {CONVERSATION_FIELD: talk}
        if self._is_stored:
            table = self.reference_table
            for dataset in selection.datasets:
                _check_has_table(dataset, table)
            found[REFERENCE_FIELD] = Columns(tuple(f"{table}.{end}" for end in _ENDS_OF_PAIRS), missing="pad")
        return found

    def check(self, loader: Loader, evaluation: Selection | None, example: Batch) -> None:  # noqa: ARG002
        """Refuse pairs that have no stored reference although they can be trained on, such as later ones."""
        selections = [one for one in (loader.selection, evaluation) if one is not None and self._is_stored]
        for selection in selections:
            for place, dataset in enumerate(selection.datasets):
                self._check_has_values(dataset, selection.population_of(place))

    def _check_has_values(self, dataset: Dataset, population: NDArray[np.bool_]) -> None:
        found = open_columns(dataset).column(f"{self.reference_table}.{_ENDS_OF_PAIRS[0]}")
        rows = np.flatnonzero(population & found.is_missing) if found.is_missing is not None else ()
        # Those that are bad or too long have none, and are not trained on; some of all say which these are.
        renderer, entries = Renderer.load(self._field.processor), None
        for row in np.asarray(rows)[:: max(1, len(rows) // _NUM_CHECKED)].tolist():
            entries = picture_entries(renderer) if entries is None else entries
            try:
                counts = count_conversations(renderer, dataset, np.array([row]), entries)
            except (ChecksumError, FormatError, ShortReadError):
                continue
            if self._is_taken(counts.tokens[0], counts.images[0]):
                raise ConfigError(
                    f"{len(rows):,} of {int(population.sum()):,} samples have no log-probabilities of the "
                    f"reference in the table {self.reference_table}, and some of them are pairs like the "
                    f"others; {_STORE}."
                )

    def _is_taken(self, tokens: NDArray[Any], images: NDArray[Any]) -> bool:
        """Return whether a pair of some counts ``(2,)`` is trained on."""
        batch, field = self._run.batch, self._field
        length = int(tokens.sum() if batch.packed else 2 * tokens.max())
        is_short = tokens.max() <= field.max_tokens and length <= (batch.max_tokens or length)
        has_room = field.max_images is None or images.max() <= field.max_images
        return bool(tokens.all() and is_short and has_room)

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
        renderer = Renderer.load(self._field.processor)
        one = renderer.largest(length, num_images)

        def rows(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).repeat(num_slots * of_slot, *[1] * (array.ndim - 1))

        tensors = {
            _LEARNED: rows(one.weights[None]),
            f"{_TOKENS}input_ids": rows(one.ids[None]),
            f"{_TOKENS}attention_mask": rows(np.ones((1, length), np.int64)),
            **{f"{_TOKENS}{name}": rows(values[None]) for name, values in one.tokens.items()},
        }
        if batch.packed:
            tensors = _as_packed(tensors, has_grids=bool(self._small.pictures and renderer.mrope))
        for name, values in one.pictures.items():
            is_float = values.dtype.kind == "f"
            shape = (num_slots * of_slot * len(values), *values.shape[1:])
            tensors[f"{_PICTURES}{name}"] = torch.empty(shape, device="meta") if is_float else rows(values)
        if batch.packed:
            num_slots = _NUM_PACKED // of_slot
        tensors[_WEIGHTS] = torch.ones(num_slots)
        if self._has_scores:
            tensors[_SCORE] = torch.zeros(num_slots)
        if self._is_stored:
            tensors[_REFERENCE] = torch.zeros((num_slots, of_slot))
        return ArrayInputs(task=self, tensors=without_values(tensors), num_tokens=0, num_samples=num_slots)

    def arrays(self, batch: Batch, *, is_evaluation: bool) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002
        """Return what the processor returned, ``(N, T)`` or rows of pictures; pairs in a row."""
        name = CONVERSATION_FIELD
        beside = dict(self._pictures(batch))
        if self._has_scores:
            beside[_SCORE] = batch[f"{name}_score"]
        is_packed = f"{name}_segment_ids" in batch
        found = self._packed_arrays(batch) if is_packed else self._padded_arrays(batch)
        if self._is_stored:
            beside[_REFERENCE] = self._stored_reference(batch, found)
        return found | beside

    def _padded_arrays(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the tokens of rows, ``(N, T)``."""
        name, small = CONVERSATION_FIELD, self._small
        mask = _sequences(batch[f"{name}_mask"]).astype(np.int64)
        # The model may have no row for the token that fills up, such as one that was added for it alone.
        ids = np.where(mask, _sequences(batch[name]), 0)
        return {
            _LEARNED: _sequences(batch[f"{name}_weights"]),
            f"{_TOKENS}input_ids": ids,
            # A softmax over nothing would be NaN, also in the gradient of what counts nothing.
            f"{_TOKENS}attention_mask": np.where(mask.any(axis=1, keepdims=True), mask, 1),
            **{f"{_TOKENS}{one}": _sequences(batch[f"{name}_{one}"]) for one in small.tokens},
        }

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

    def first_sample(self, loader: Loader) -> Mapping[str, Pieces]:  # noqa: ARG002
        """Return the first sample, by the name of the sequence."""
        name, batch = CONVERSATION_FIELD, self._example
        names = _ENDS_OF_PAIRS if self._field.pairs else (name,)
        found: dict[str, Pieces] = {}
        for number, title in enumerate(names):
            if f"{name}_segment_ids" in batch:
                here = (batch[f"{name}_segment_ids"][0] == number) & (batch[f"{name}_mask"][0] > 0)
                ids, weights = batch[name][0][here], batch[f"{name}_weights"][0][here]
            else:
                here = _sequences(batch[f"{name}_mask"])[number] > 0
                ids, weights = (_sequences(batch[one])[number][here] for one in (name, f"{name}_weights"))
            found[title] = Renderer.load(self._field.processor).pieces(Rendered(ids, weights, {}, {}))
        return found

    def _pictures(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """Return the pictures of a batch, or a blank one in place of none."""
        name, small = CONVERSATION_FIELD, self._small
        is_blank = bool(small.pictures) and not any(len(batch[f"{name}_{one}"]) for one in small.pictures)
        if is_blank:
            return {f"{_BLANK}{one}": values for one, values in small.pictures.items()}
        return {f"{_PICTURES}{one}": batch[f"{name}_{one}"] for one in small.pictures}

    def _stored_reference(self, batch: Batch, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Return the stored log-probabilities of each pair, ``(B, 2)``.

        Raises:
            TrainingError: A pair that is learned has none.
        """
        has_none = (np.asarray(batch[f"{REFERENCE_FIELD}_mask"]) == 0).any(axis=1)
        weights = np.asarray(batch.arrays["weight"])
        num_lacking = int(((self.counts(arrays, len(weights)) * weights > 0) & has_none).sum())
        if num_lacking:
            raise TrainingError(
                f"{num_lacking} pairs of a micro-batch have no stored log-probabilities of the reference, as "
                f"they were bad or too long when it was stored; {_STORE}, and resume with "
                "run.accept_content_change=true."
            )
        return np.asarray(batch[REFERENCE_FIELD], np.float32)

    def reference_values(self, model: nn.Module, batch: Batch, inputs: ArrayInputs) -> Any:
        """Return what is stored of each pair: a masked array of its log-probabilities, ``(B, 2)`` float64.

        Masked are sequences without tokens, which were too long.
        """
        found_N = _log_probabilities(_run(model, inputs.tensors), inputs.tensors)
        mask = np.asarray(batch[f"{CONVERSATION_FIELD}_mask"])
        if _SEGMENTS in inputs.tensors:
            segments = np.asarray(batch[f"{CONVERSATION_FIELD}_segment_ids"])[0]
            num_tokens = np.bincount(segments, mask[0], minlength=len(found_N))
        else:
            num_tokens = _sequences(mask).sum(axis=1)
        values = found_N.double().cpu().numpy().reshape(-1, 2)
        return np.ma.masked_array(values, num_tokens.reshape(-1, 2) == 0)

    def forward(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return logits or scores; for ``dpo`` log-probabilities of the model and of the reference."""
        if self._task.type != "dpo":
            return _run(model, tensors)
        if _REFERENCE in tensors:
            own_N = _log_probabilities(_run(model, tensors), tensors)
            return own_N, tensors[_REFERENCE].reshape(-1).to(own_N.dtype)
        with torch.no_grad(), self._as_at_first(model) as reference:
            expected_N = _log_probabilities(_run(reference, tensors), tensors)
        return _log_probabilities(_run(model, tensors), tensors), expected_N

    def losses(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of each slot, ``(B,)``."""
        if self._task.has_next_tokens:
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
        if self._task.has_next_tokens:
            return learned
        is_learned = np.all(learned.reshape(num_slots, -1) > 0, axis=1)
        return np.asarray(is_learned, np.float64)

    def scores(self, output: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return learned and right tokens of each slot, how far the chosen is ahead, or the score is off."""
        if self._has_scores:
            off = (output - tensors[_SCORE].to(output.dtype)).abs()
            return {"off": off, "is_scored": self._is_learned(tensors)}
        if not self._task.has_next_tokens:
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
        if self._task.has_next_tokens:
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


def _check_has_table(dataset: Dataset, table: str) -> None:
    """Refuse a dataset without the stored reference of this model and processor."""
    if table in dataset.tables:
        return
    others = [one for one in dataset.tables if one.startswith(_TABLE)]
    has = f"those of other settings are there ({', '.join(others)}); " if others else ""
    raise ConfigError(
        f"Version {dataset.manifest_version} of the dataset has no log-probabilities of the reference for "
        f"this model, processor, train_on and precision (table {table}); {has}{_STORE}, or set "
        "task.reference to 'model'."
    )


def _as_packed(tensors: Mapping[str, torch.Tensor], *, has_grids: bool) -> dict[str, torch.Tensor]:
    """Return the tokens of rows as those of one packed row of two sequences, ``(1, T)``."""
    total = tensors[_LEARNED].numel()
    half = total // _NUM_PACKED
    place = torch.arange(total)[None]
    segments = (place >= half).long()
    positions = place - half * segments
    found = {name: one.reshape(1, -1) for name, one in tensors.items() if name != f"{_TOKENS}attention_mask"}
    found[f"{_TOKENS}position_ids"] = positions.expand(4, 1, -1) if has_grids else positions
    return found | {_SEGMENTS: segments, _ENDS: torch.tensor([half - 1, total - 1])}


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
