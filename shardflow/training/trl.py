"""Trainers of TRL over a loader of conversations: no second sharding, exact resume of the data.

Needs the package trl (``shardflow[trl]``). TRL's trainers want a dataset of their own when they are made, and
look at its first row; they get one that stands in for the loader, and its batches afterwards. A checkpoint
holds the loader's position, see `shardflow.training.hf`. What is generated in between (GRPO) is drawn anew
after a resume.

The loader renders conversations with the model's own processor, so TRL prepares, truncates and packs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any, ClassVar, Final

import datasets
import numpy as np
import torch
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer

from shardflow.errors import ConfigError, TrainingError
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import Rendered, Renderer, blank_picture
from shardflow.fields.conversations.templates import Template
from shardflow.loading import Batch, Loader
from shardflow.training.hf import LoaderTrainer

_IGNORED: Final = -100
_BESIDE: Final = frozenset({"mask", "weights"})
"""Entries that tell what others tell, or what the model is not given."""


class _TrlTrainer(LoaderTrainer):
    """What the trainers of TRL share."""

    stand_in: ClassVar[Mapping[str, list[Any]]]
    """A row of the dataset that TRL looks at."""
    takes_pairs: ClassVar[bool] = True
    """Whether samples are preferences."""
    weighs_tokens: ClassVar[bool] = True
    """Whether the loss is one of tokens that are learned or not."""

    def __init__(
        self, model: Any = None, args: Any = None, *, train_dataset: Loader, field: str, **arguments: Any
    ) -> None:
        if field not in train_dataset.fields:
            raise ConfigError(
                f"field={field!r} is none of the loader's fields, {list(train_dataset.fields)}; name "
                "that of the conversations."
            )
        if getattr(args, "packing", False) or getattr(args, "padding_free", False):
            raise ConfigError("TRL packs datasets of its own only; leave out packing and padding_free.")
        self._field = field
        self._blank: Rendered | None = None
        spec = train_dataset.fields[field]
        if isinstance(spec, Conversation):
            self._check_conversations(train_dataset, spec)
            self._blank = _blank(spec)
        super().__init__(model, args, train_dataset=train_dataset, data_collator=self._to_inputs, **arguments)

    def _to_inputs(self, batch: Batch) -> Any:
        raise NotImplementedError

    def _check_conversations(self, loader: Loader, spec: Conversation) -> None:
        """Refuse conversations that TRL would learn otherwise, as far as settings and the first batch say."""
        if spec.packed:
            raise ConfigError(
                "TRL takes conversations as rows here; leave out packed of the loader's field, or train by "
                "[task] with batch.packed."
            )
        if spec.pairs != self.takes_pairs:
            wanted = "takes pairs; set" if self.takes_pairs else "takes single conversations; leave out"
            raise ConfigError(f"{type(self).__name__} {wanted} pairs of the loader's field.")
        if not self.weighs_tokens:
            return
        turns = spec.template.turns if isinstance(spec.template, Template) else ()
        _learned(torch.tensor([one.weight for one in turns]))
        with closing(loader.stream(0, range(1))) as batches:
            batch = next(batches)
        is_used = batch.torch()["weight"] > 0
        _learned(_rendered(batch, self._field)["weights"][is_used])

    def _shown(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        rows = datasets.Dataset.from_dict(dict(self.stand_in))
        evaluation = given["eval_dataset"]
        if isinstance(evaluation, Mapping):
            evaluation = dict.fromkeys(evaluation, rows)
        return {**given, "train_dataset": rows, "eval_dataset": evaluation and rows}


class LoaderSFTTrainer(_TrlTrainer, SFTTrainer):
    """``trl.SFTTrainer`` whose conversations come from loaders.

    Args:
        model: As of ``SFTTrainer``; a folder or a model of transformers.
        args: An ``SFTConfig`` with ``gradient_accumulation_steps=loader.num_micro_batches_per_rank`` and
            ``dataset_kwargs={"skip_prepare_dataset": True}``.
        train_dataset: The training loader.
        field: Name of its field `shardflow.Conversation`, whose tokens are learned where they have weight 1.
        eval_dataset: The evaluation loader, or loaders by name, each with ``tail="mask"`` and this field.
        **arguments: The rest, such as ``processing_class``.

    Raises:
        ConfigError: As `LoaderTrainer`; or there is no such field, it is packed or of pairs; or weights of
            tokens are neither 0 nor 1, which TRL does not know.
    """

    stand_in: ClassVar[Mapping[str, list[Any]]] = {"input_ids": [[0, 0]], "labels": [[0, 0]]}
    takes_pairs = False

    def _to_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return rows and labels; where none shows a picture, one more that does and counts nothing.

        So every trained parameter takes part in every backward on every rank, as in a run of ``[task]``.
        """
        found = _rendered(batch, self._field)
        # A masked slot may hold words.
        learned = _learned(found.pop("weights") * batch.torch()["weight"][:, None])
        found["labels"] = torch.where(learned, found["input_ids"], _IGNORED)
        if self._blank is None or self._blank.pictures.keys() & found.keys():
            return found
        return _with_blank(found, self._blank)


class _PairTrainer(_TrlTrainer):
    def __init__(self, model: Any = None, args: Any = None, **arguments: Any) -> None:
        if arguments.get("eval_dataset") is not None:
            raise ConfigError(
                "TRL counts a padding slot as a pair, so evaluations take no loader; evaluate by [task] type "
                "= 'dpo' or 'reward', or with a dataset of TRL in another trainer."
            )
        loader = arguments.get("train_dataset")
        if isinstance(loader, Loader) and loader.plan.spec.tail == "mask":
            raise ConfigError("TRL counts a padding slot as a sample; write tail='drop' or tail='repeat'.")
        super().__init__(model, args, **arguments)

    def _pairs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return the chosen conversations and, behind them, the rejected ones; masked slots are left out."""
        found = _rendered(batch, self._field)
        learned = found["weights"] > 0  # (B, 2, T)
        used = torch.nonzero(learned.any(dim=2).all(dim=1) & (batch.torch()["weight"] > 0))[:, 0]
        if not len(used):  # a sequence against itself: its gradient is zero
            return {
                "input_ids": torch.zeros((2, 2), dtype=torch.int64),
                "attention_mask": torch.ones((2, 2), dtype=torch.int64),
                "weights": torch.zeros((2, 2)),
            }
        return {name: one[used].transpose(0, 1).flatten(0, 1) for name, one in found.items()}


class LoaderDPOTrainer(_PairTrainer, DPOTrainer):
    """``trl.DPOTrainer`` whose pairs come from a loader.

    Args:
        model: As of ``DPOTrainer``; a folder or a model of transformers.
        args: A ``DPOConfig`` with ``gradient_accumulation_steps=loader.num_micro_batches_per_rank``.
        train_dataset: The training loader.
        field: Name of its field `shardflow.Conversation` with ``pairs=True`` and no pictures.
        **arguments: The rest, such as ``ref_model`` and ``processing_class``.

    Raises:
        ConfigError: As `LoaderTrainer`; or there is no such field, it is packed, without pairs or with
            pictures; or weights of tokens are neither 0 nor 1; or ``eval_dataset`` is given.
    """

    stand_in: ClassVar[Mapping[str, list[Any]]] = {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}

    def _to_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        found = self._pairs(batch)
        found["completion_mask"] = _learned(found.pop("weights")).long()
        return found


class LoaderRewardTrainer(_PairTrainer, RewardTrainer):
    """``trl.RewardTrainer`` whose pairs come from a loader.

    Args:
        model: As of ``RewardTrainer``; a folder or a model for sequence classification with one label.
        args: A ``RewardConfig`` with ``gradient_accumulation_steps=loader.num_micro_batches_per_rank``.
        train_dataset: The training loader.
        field: Name of its field `shardflow.Conversation` with ``pairs=True`` and no pictures.
        **arguments: The rest, such as ``processing_class``.

    Raises:
        ConfigError: As `LoaderDPOTrainer`, whatever weights tokens have; or TRL would not find the last token
            of a conversation, which it scores, by the padding behind it.
    """

    stand_in: ClassVar[Mapping[str, list[Any]]] = {"chosen_ids": [[0]], "rejected_ids": [[0]]}
    weighs_tokens = False

    def __init__(self, model: Any = None, args: Any = None, **arguments: Any) -> None:
        super().__init__(model, args, **arguments)
        spec = self.train_dataset.fields[self._field]
        assert isinstance(spec, Conversation)  # noqa: S101 - TRL gets its tokens
        renderer, inner = Renderer.load(spec.processor), self.model
        pad = inner.config.get_text_config().pad_token_id
        if pad != renderer.pad_id or int(renderer.example(()).ids[-1]) == pad:
            raise ConfigError(
                f"TRL scores the last token that is not its padding token ({pad}), and conversations end "
                f"with it too, or are padded with {renderer.pad_id}; give the tokenizer of the field's "
                "processor a padding token of its own, and pass it as processing_class."
            )

    def _to_inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        found = self._pairs(batch)
        del found["weights"]
        return found


class LoaderGRPOTrainer(_PairTrainer, GRPOTrainer):
    """``trl.GRPOTrainer`` whose prompts come from a loader, each in as many neighboring slots as generations.

    The plan repeats the prompts: a micro-batch is what a rank generates at once. Reward functions get the
    verifiable ``answer`` and the ``sample_key`` of each completion. A prompt that cannot be read gives its
    slots to another one of the micro-batch.

    Args:
        model: As of ``GRPOTrainer``.
        args: A ``GRPOConfig`` with ``num_generations`` slots of each prompt, ``per_device_train_batch_size``
            the slots of a micro-batch, ``steps_per_generation=1``, ``num_iterations=1`` and
            ``gradient_accumulation_steps=loader.num_micro_batches_per_rank``.
        train_dataset: The training loader.
        field: Name of its field ``sf.Json(member="conversation.json", num_samples=num_generations)`` of
            samples of the kind ``prompt``, text alone.
        **arguments: The rest, such as ``reward_funcs`` and ``processing_class``.

    Raises:
        ConfigError: As `LoaderTrainer`; or there is no such field, ``eval_dataset`` is given, or the settings
            generate in other groups than the plan.
        TrainingError: A sample is no prompt, shows pictures, or a micro-batch has none that can be read.
    """

    stand_in: ClassVar[Mapping[str, list[Any]]] = {"prompt": ["a"]}

    def __init__(self, model: Any = None, args: Any = None, **arguments: Any) -> None:
        loader = arguments.get("train_dataset")
        if isinstance(loader, Loader):
            num = max(one.num_crops for one in loader.fields.values())
            wanted = {
                "num_generations": num,
                "per_device_train_batch_size": loader.plan.spec.micro_batch_size * num,
                "steps_per_generation": 1,
                "num_iterations": 1,
            }
            for name, value in wanted.items():
                if getattr(args, name, None) != value:
                    raise ConfigError(
                        f"{name} is {getattr(args, name, None)}, and the plan of the loader has "
                        f"{value}; pass {name}={value}, or write num_samples of the field and "
                        "micro_batch_size for it."
                    )
        super().__init__(model, args, **arguments)

    def _shown(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: one for name, one in super()._shown(given).items() if name != "data_collator"}

    def _to_inputs(self, batch: Batch) -> list[dict[str, Any]]:
        documents, keys = batch[self._field], batch.sample_keys
        weights = batch.info.weight.tolist()
        is_there = [weight > 0 and one is not None for weight, one in zip(weights, documents, strict=True)]
        used = [slot for slot, is_used in enumerate(is_there) if is_used]
        if not used:
            raise TrainingError(
                "No prompt of a micro-batch can be read; `shardflow verify` names what is broken."
            )
        group = max(one.num_crops for one in self.train_dataset.fields.values())
        firsts = [slot if is_there[slot] else used[0] for slot in range(0, len(documents), group)]
        return [
            {**_prompt(documents[slot]), "sample_key": keys[slot]} for slot in firsts for _ in range(group)
        ]


def _prompt(document: Mapping[str, Any]) -> dict[str, Any]:
    if document.get("kind") != "prompt":
        raise TrainingError(
            f"GRPO takes samples of the kind 'prompt', got {document.get('kind')!a}; select them by where=, "
            "or pack prompts with answers."
        )
    messages = [(one["role"], one["content"]) for one in document["messages"]]
    if any(part["type"] != "text" for _, content in messages for part in content):
        raise TrainingError(
            "A prompt shows pictures, and only text is handed on to GRPO; leave such prompts out."
        )
    shown = [{"role": role, "content": "".join(one["text"] for one in content)} for role, content in messages]
    return {"prompt": shown, "answer": document["answer"]}


def _learned(weights: torch.Tensor) -> torch.Tensor:
    """Return which tokens are learned.

    Raises:
        ConfigError: One has another weight than 0 and 1.
    """
    if bool(((weights != 0) & (weights != 1)).any()):
        raise ConfigError(
            "TRL learns a token or does not, and a message has another weight than 0 and 1; train it by "
            "[task] type = 'sft' or 'dpo', or leave the weights out."
        )
    return weights > 0


def _blank(spec: Conversation) -> Rendered | None:
    """Return a small conversation about a blank picture; None for text alone."""
    renderer = Renderer.load(spec.processor)
    has_pictures = renderer.has_pictures and spec.max_images != 0
    return renderer.example([blank_picture(64, 64)]) if has_pictures else None


def _with_blank(found: Mapping[str, torch.Tensor], blank: Rendered) -> dict[str, torch.Tensor]:
    """Add a row that shows a blank picture, of which nothing is learned."""
    num = len(blank.ids)
    rows = {"input_ids": blank.ids, "attention_mask": np.ones(num, np.int64), **blank.tokens}
    rows["labels"] = np.full(num, _IGNORED, np.int64)
    made = dict(found)
    for name, row in rows.items():
        old = found[name]
        width = max(num, old.shape[1])
        made[name] = old.new_full((len(old) + 1, width), _IGNORED if name == "labels" else 0)
        made[name][:-1, : old.shape[1]] = old
        made[name][-1, :num] = torch.from_numpy(row)
    return made | {name: torch.from_numpy(np.array(one)) for name, one in blank.pictures.items()}


def _rendered(batch: Batch, name: str) -> dict[str, torch.Tensor]:
    """Return what the processor returned, and the weight of each token; sequences of pairs have an axis."""
    tensors = batch.torch()
    ids, mask = tensors[name].long(), tensors[f"{name}_mask"].long()
    found = {"input_ids": ids, "weights": tensors[f"{name}_weights"]}
    # A softmax over nothing would be NaN.
    found["attention_mask"] = torch.where(mask.any(dim=-1, keepdim=True), mask, 1)
    for key, one in tensors.items():
        short = key.removeprefix(f"{name}_")
        if short == key or short in _BESIDE or short.endswith("_offsets"):
            continue
        if one.shape[: ids.ndim] == ids.shape:
            found[short] = one.long()
        elif len(one):
            found[short] = one
        if ids.ndim == 3 and one.shape[: ids.ndim] != ids.shape and len(one):
            raise ConfigError(
                "TRL's pairs are text alone here, and these show pictures; train them by [task] type = 'dpo' "
                "or 'reward', or set max_images=0."
            )
    return found
