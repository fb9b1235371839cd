"""Texts that a trained model writes: reports of the studies of a split, or last answers of its conversations.

The loader deals the micro-batches of one pass over the split, as in an evaluation, so that the file is the
same on any number of ranks. A conversation is rendered whole by the field of the run; the question is what
stands before its last answer, so that the model sees what it was trained on.

Texts are compared with references: findings by class, and words by BLEU and chrF.

Source:
    Classes: Irvin et al., "CheXpert", AAAI 2019, table 1; an uncertain finding counts as a positive one
    ("U-Ones"). BLEU: Papineni et al., ACL 2002. chrF: Popovic, WMT 2015. Both as of sacrebleu, which names
    its settings.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import GenerationConfig

from shardflow.config import load_config
from shardflow.errors import CheckpointError, ConfigError, os_reason
from shardflow.fields.conversations.field import INCOMPLETE, Conversation
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.conversations.templates import Template
from shardflow.fields.field import Field, with_dependencies
from shardflow.loading import Batch, Loader
from shardflow.reports import ReportReader, load_lexicon
from shardflow.training.checkpoint.files import Checkpoint, CheckpointFolder, read_checkpoint
from shardflow.training.checkpoint.tensors import load_model
from shardflow.training.config import BatchConfig, TrainConfig
from shardflow.training.data import open_data
from shardflow.training.distributed import Ranks, join_ranks
from shardflow.training.inputs import InputMaker
from shardflow.training.model_fields import CONVERSATION_FIELD, REPORT_FIELD
from shardflow.training.models.conversations import ConversationModel
from shardflow.training.models.weights import hold_frozen
from shardflow.training.run import check_bindings, open_loader, open_task
from shardflow.training.step import COMPUTE_TYPES, WeightAverage
from shardflow.training.tasks.conversations import ConversationTask
from shardflow.training.tasks.report import ReportTask

_LOGGER = logging.getLogger(__name__)
CONFIG_NAME: Final = "resolved_config.toml"
_SCORES_NEED: Final = "install shardflow[metrics] for BLEU and chrF; they are left out"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSettings:
    """What is written, and where."""

    run: Path
    """Folder of a run."""
    output: Path
    """JSON lines, one for each sample; replaced."""
    split: str = ""
    """Empty for ``data.eval_split`` of the run."""
    checkpoint: str = ""
    """Name of a checkpoint of the run; empty for the newest sound one."""
    max_new_tokens: int = 512
    has_reference: bool = True
    """Whether samples have the answer, which scores compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Questions of a micro-batch."""

    slots: list[int]
    """Slots that have one."""
    ids: NDArray[np.int64]
    """``(N, T)``, padded in front."""
    mask: NDArray[np.int64]
    """``(N, T)``, 1 for a token."""
    tokens: Mapping[str, NDArray[np.int64]]
    """Other entries with a number for each token, ``(N, T)``."""
    pictures: Mapping[str, NDArray[Any]]
    """Entries of the pictures of these slots, one after another."""
    references: list[list[int]]
    """Token ids of each answer, its end token included."""


def read_prompts(batch: Batch, name: str, renderer: Renderer) -> Prompts:
    """Return what stands before the last answer of each conversation of a micro-batch.

    One whose last answer has the weight 0 is left out: nothing says where it begins.

    Args:
        batch: With a field of conversations; of pairs the chosen one counts.
        name: Of the field.
        renderer: Of the field's processor.
    """
    is_pair = batch[name].ndim == 3

    def chosen(entry: str) -> NDArray[Any]:
        found: NDArray[Any] = np.asarray(batch[entry])
        return found[:, 0] if is_pair else found

    ids, mask, weights = chosen(name), chosen(f"{name}_mask"), chosen(f"{name}_weights")
    small = renderer.example(())
    behind = (
        len(small.ids) - 1 - int(np.flatnonzero(small.weights)[-1])
    )  # such as a line break of the template
    others = [one for one in small.tokens if f"{name}_{one}" in batch]
    slots, starts, references = [], [], []
    for slot in np.flatnonzero(np.asarray(batch.arrays["weight"]) > 0).tolist():
        edges = np.flatnonzero(np.diff(weights[slot] > 0, prepend=False, append=False))
        if not len(edges) or int(mask[slot].sum()) - int(edges[-1]) != behind:
            continue
        start, stop = int(edges[-2]), int(edges[-1])
        slots.append(slot)
        starts.append(start)
        references.append(ids[slot, start:stop].tolist())
    width = max(starts, default=0)

    def padded(array: NDArray[Any], fill: int) -> NDArray[np.int64]:
        found = np.full((len(slots), width), fill, np.int64)
        for place, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            found[place, width - start :] = array[slot, :start]
        return found

    return Prompts(
        slots=slots,
        ids=padded(ids, renderer.pad_id),
        mask=padded(mask, 0),
        tokens={one: padded(chosen(f"{name}_{one}"), 0) for one in others},
        pictures=_pictures(batch, name, slots),
        references=references,
    )


def _pictures(batch: Batch, name: str, slots: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return the entries of the pictures of some slots, of pairs those of the chosen conversation."""
    found = {}
    for entry in [
        one.removesuffix("_offsets")
        for one in batch
        if one.startswith(f"{name}_") and one.endswith("_offsets")
    ]:
        rows = np.asarray(batch.arrays[f"{name}.{entry.removeprefix(f'{name}_')}.rows"])
        is_used = np.zeros(rows.shape, bool)
        is_used[slots, 0] = True
        found[entry.removeprefix(f"{name}_")] = np.asarray(batch[entry])[
            np.repeat(is_used.ravel(), rows.ravel())
        ]
    return {one: values for one, values in found.items() if len(values)}


def end_tokens(renderer: Renderer, model: Any) -> list[int]:
    """Return the tokens that end an answer: those of model and tokenizer, and that of the chat template."""
    small = renderer.example(())
    last = int(small.ids[np.flatnonzero(small.weights > 0)[-1]])
    known = getattr(model.generation_config, "eos_token_id", None)
    found = [last] if last in renderer.tokenizer.all_special_ids else []
    found += [] if known is None else [known] if isinstance(known, int) else list(known)
    own = renderer.tokenizer.eos_token_id
    return list(dict.fromkeys([*found, *([] if own is None else [int(own)])]))


class AnswerWriter:
    """Writes the last answer of conversations, greedily, with a cache of keys and values.

    Args:
        model: The trained model, on its device.
        field: The field of the conversations.
        max_new_tokens: Tokens of an answer, at most.
    """

    def __init__(self, model: ConversationModel, field: Conversation, max_new_tokens: int) -> None:
        self._model: Any = model.model
        self._renderer = Renderer.load(field.processor)
        self._ends = end_tokens(self._renderer, self._model)
        self._settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
        )
        # What is not set above, such as penalties, is taken from here: nothing of the folder's own.
        self._model.generation_config = GenerationConfig()

    def write(self, batch: Batch, device: torch.device) -> dict[int, dict[str, Any]]:
        """Return ``text``, ``reference``, and whether the answer ended, by slot."""
        prompts = read_prompts(batch, CONVERSATION_FIELD, self._renderer)
        if not prompts.slots:
            return {}
        arrays = {
            **prompts.tokens,
            **prompts.pictures,
            "input_ids": prompts.ids,
            "attention_mask": prompts.mask,
        }
        tensors = {name: torch.from_numpy(np.array(one)).to(device) for name, one in arrays.items()}
        made = self._model.generate(**tensors, generation_config=self._settings).cpu().tolist()
        found = {}
        for slot, ids, reference in zip(prompts.slots, made, prompts.references, strict=True):
            new = ids[prompts.ids.shape[1] :]
            found[slot] = {
                "text": self._decoded(new),
                "reference": self._decoded(reference),
                "is_finished": any(one in self._ends for one in new),
            }
        return found

    def _decoded(self, ids: Sequence[int]) -> str:
        end = next((place for place, one in enumerate(ids) if one in self._ends), len(ids))
        return str(self._renderer.tokenizer.decode(list(ids[:end]), skip_special_tokens=True)).strip()


class ReportWriter:
    """Writes the reports of studies, greedily; every token is one pass over the images and the words so far.

    Args:
        model: The trained model, on its device.
        task: The task, whose tokenizer is the model's.
        inputs: Makes the model's tensors.
        max_new_tokens: Tokens of a report, at most.
    """

    def __init__(self, model: nn.Module, task: ReportTask, inputs: InputMaker, max_new_tokens: int) -> None:
        self._model, self._tokenizer, self._inputs = model, task.tokenizer, inputs
        self._max_new_tokens = min(max_new_tokens, task.text.max_tokens - 1)

    def write(self, batch: Batch, device: torch.device) -> dict[int, dict[str, Any]]:
        """Return ``text``, ``reference``, and whether the report ended, by slot."""
        slots = np.flatnonzero(np.asarray(batch.arrays["weight"]) > 0).tolist()
        if not slots:
            return {}
        inputs = self._inputs(batch)
        images, mask, display_range, ids, _ = inputs.model_arguments[:5]
        ids, ends = ids[:, :1], self._tokenizer.end_ids
        is_open = torch.ones(len(ids), dtype=torch.bool, device=device)
        for _ in range(self._max_new_tokens):
            there = torch.ones_like(ids, dtype=torch.bool)
            logits = self._model(images, mask, display_range, ids, there)[:, -1]
            ids = torch.cat([ids, logits.argmax(dim=-1, keepdim=True)], dim=1)
            is_open &= ids[:, -1] != ends[0]
            if not bool(is_open[slots].any()):
                break
        made = ids[:, 1:].cpu().tolist()
        words = batch.get(REPORT_FIELD)
        found = {}
        for slot in slots:
            new = made[slot]
            end = new.index(ends[0]) if ends[0] in new else len(new)
            said = words[slot] if words is not None and isinstance(words[slot], str) else ""
            found[slot] = {
                "text": self._tokenizer.decode(new[:end]).strip(),
                "reference": said.strip(),
                "is_finished": end < len(new),
            }
        return found


def generate(settings: GenerateSettings) -> dict[str, Any]:
    """Write the texts of a split; every rank that torchrun started calls this once.

    Returns:
        Counts and scores, on rank 0; what others return means nothing.

    Raises:
        ConfigError: The folder is that of no run, or of a task that writes nothing; or there is no such
            split.
        CheckpointError: The run has no sound checkpoint.
    """
    config = _read_config(settings)
    with join_ranks(config.run.device, config.timeouts) as ranks, ExitStack() as stack:
        checkpoint = _read_checkpoint(settings)
        loader, writer = _prepare(settings, config, ranks, checkpoint, stack)
        rows, num_left_out = [], 0
        partial = settings.output.with_name(f"{settings.output.name}.partial")
        with ExitStack() as files:
            if ranks.rank == 0:
                files.callback(partial.unlink, missing_ok=True)
                lines = files.enter_context(_open_private(partial))
            for found in _steps(loader, writer, ranks, COMPUTE_TYPES[config.run.precision]):
                if ranks.rank == 0:
                    for row in found:
                        if "text" not in row:
                            num_left_out += 1
                            continue
                        if not settings.has_reference:
                            row.pop("reference")
                        lines.write(json.dumps(row, ensure_ascii=False) + "\n")
                        rows.append(row)
            lacking = _lacking(loader, ranks)
            if ranks.rank != 0:
                return {}
            if not (rows or settings.has_reference):
                raise ConfigError(
                    f"None of the {num_left_out:,} samples of the split has a question: the template asks "
                    "for what they lack, or each of its questions has a condition that is not true; ask "
                    "without it, or leave out --no-reference."
                )
            lines.flush()
            os.fsync(lines.fileno())
            partial.replace(settings.output)
        summary: dict[str, Any] = {
            "checkpoint": checkpoint.name,
            "split": config.data.eval_split,
            "num_texts": len(rows),
            "num_left_out": num_left_out,
            "num_lacking": lacking,
            "num_unfinished": sum(not row["is_finished"] for row in rows),
        }
        return {**summary, "scores": _scores(rows) if settings.has_reference else None}


def _lacking(loader: Loader, ranks: Ranks) -> dict[str, int]:
    """Return how many samples lack what the template names, by its name, over all ranks."""
    own = {
        name.removeprefix(f"{INCOMPLETE}."): totals["num_items"]
        for name, totals in loader.counters.snapshot().items()
        if name.startswith(f"{INCOMPLETE}.")
    }
    found: Counter[str] = Counter()
    for one in ranks.all_gather_json(own):
        found.update(one)
    return dict(sorted(found.items()))


def _scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    pairs = [(row["text"], row["reference"]) for row in rows if row["reference"]]
    if not pairs:
        return None
    texts, references = ([pair[place] for pair in pairs] for place in (0, 1))
    found = {"num_references": len(pairs), **label_scores(texts, references)}
    if not has_word_scores():
        _LOGGER.warning(_SCORES_NEED)
        return found
    return {**found, **word_scores(texts, references)}


def _read_config(settings: GenerateSettings) -> TrainConfig:
    path = settings.run / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"RUN must be the folder of a training run, got one without {CONFIG_NAME} ({settings.run.name}); "
            "name run.output of the run."
        )
    config = load_config(TrainConfig, path)
    if config.task.target or config.task.type not in ("report", "sft", "dpo"):
        name = "a task of your own" if config.task.target else repr(config.task.type)
        raise ConfigError(
            f"A run of the task 'report', 'sft' or 'dpo' writes texts, and this one is of {name}."
        )
    split = settings.split or config.data.eval_split
    if not split:
        raise ConfigError("The run has no data.eval_split; write --split with a split of its dataset.")
    fields = _whole(config.fields if settings.has_reference else _without_references(config))
    data = replace(config.data, eval_split=split)
    return replace(config, data=data, batch=_own_batch(config), fields=fields)


def _whole(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return fields of whole conversations, whose last answer is asked for; longer ones are left out."""
    return {
        name: replace(one, split_long=False, long="skip")
        if isinstance(one, Conversation) and one.split_long
        else one
        for name, one in fields.items()
    }


def _own_batch(config: TrainConfig) -> BatchConfig:
    """Return a batch of single samples, as many as a budget holds of the longest; none is too long for it."""
    batch, size = config.batch, config.batch.micro_batch_size
    if batch.max_tokens is not None:
        field = config.fields.get(CONVERSATION_FIELD)
        longest = field.max_tokens if isinstance(field, Conversation) else batch.max_tokens
        size = min(batch.max_samples, max(1, batch.max_tokens // longest))
    return BatchConfig(micro_batch_size=size, micro_batches_per_step=batch.micro_batches_per_step)


def _without_references(config: TrainConfig) -> dict[str, Field]:
    """Return the fields of samples without an answer, and none that only the answer names.

    Raises:
        ConfigError: Conversations are stored, with their answers.
    """
    found = dict(config.fields)
    if config.task.has_reports:
        return {**found, REPORT_FIELD: replace(found[REPORT_FIELD], missing="pad")}
    talk = found[CONVERSATION_FIELD]
    assert isinstance(talk, Conversation)  # noqa: S101 - of the task
    if not isinstance(talk.template, Template):
        raise ConfigError(
            "--no-reference is for reports and for conversations of a template, and stored ones end with the "
            "answer that is asked for; leave it out."
        )
    found[CONVERSATION_FIELD] = replace(talk, template=talk.template.without_answer(), pairs=False)
    before, after = (with_dependencies(one, [CONVERSATION_FIELD]) for one in (config.fields, found))
    kept = with_dependencies(found, found.keys() - (before - after))
    return {name: one for name, one in found.items() if name in kept}


def _read_checkpoint(settings: GenerateSettings) -> Checkpoint:
    folder = CheckpointFolder(settings.run / "checkpoints", keep_last=1)
    names = folder.names()
    if settings.checkpoint:
        if settings.checkpoint not in names:
            raise ConfigError(
                f"--checkpoint must be one of the run's ({', '.join(names) or 'none'}), got "
                f"{settings.checkpoint!r}; correct it."
            )
        return read_checkpoint(folder.path / settings.checkpoint)
    sound, problems = folder.newest_sound()
    if sound is None:
        raise CheckpointError(f"The run has no checkpoint that can be used. {' '.join(problems)}".strip())
    return sound


def _prepare(
    settings: GenerateSettings, config: TrainConfig, ranks: Ranks, checkpoint: Checkpoint, stack: ExitStack
) -> tuple[Loader, AnswerWriter | ReportWriter]:
    """Open the split, and build the model with the weights of the checkpoint."""
    task = open_task(config)
    if isinstance(task, ConversationTask):
        task.leave_reference()
    bindings = {name: one for name, one in task.bindings().items() if name != "batch.packed"}
    check_bindings(replace(checkpoint, state=_without(checkpoint.state, "batch.packed")), bindings)
    data = open_data(config.data, checkpoint.state["loader"], lock=checkpoint.lock, cache=config.cache)
    assert data.evaluation is not None  # noqa: S101 - a split is named
    loader = stack.enter_context(open_loader(config, task, ranks, data.evaluation, tail="mask"))
    model = task.make_model(loader, None)
    hold_frozen(model, config.model.frozen_dtype, config.model.quantize)
    load_model(model, checkpoint.model)
    if config.optimizer.ema_decay > 0 and config.optimizer.evaluate_ema:
        _load_average(model, checkpoint)
    model = model.to(ranks.device).eval()
    if isinstance(task, ReportTask):
        inputs = task.open_inputs(loader, ranks.device, pinned_bytes=0).for_evaluation()
        return loader, ReportWriter(model, task, inputs, settings.max_new_tokens)
    field = config.fields[CONVERSATION_FIELD]
    assert isinstance(model, ConversationModel)  # noqa: S101 - of the task
    assert isinstance(field, Conversation)  # noqa: S101
    return loader, AnswerWriter(model, field, settings.max_new_tokens)


def _without(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {**state, "bindings": {key: one for key, one in state["bindings"].items() if key != name}}


def _load_average(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put the moving average of the weights in their place, as evaluations of the run did."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            average = f"{name}.{WeightAverage.ENTRY}"
            if average in checkpoint.optimizer:
                parameter.copy_(checkpoint.optimizer[average])


def _steps(
    loader: Loader, writer: AnswerWriter | ReportWriter, ranks: Ranks, compute: torch.dtype | None
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each step in the order of the plan, gathered from all ranks."""
    device, per_rank = ranks.device, loader.num_micro_batches_per_rank
    with closing(iter(loader)) as batches, torch.inference_mode():
        for _ in range(loader.num_steps):
            own = []
            for _ in range(per_rank):
                batch = next(batches)
                with torch.autocast(device.type, dtype=compute, enabled=compute is not None):
                    found = writer.write(batch, device)
                keys = batch.info.sample_keys
                rows = [
                    {"sample_key": key, **found.get(slot, {})}
                    for slot, key in enumerate(keys)
                    if key is not None
                ]
                own.append((batch.info.micro_batch, rows))
            gathered = [one for part in ranks.all_gather_json(own) for one in part]
            yield [row for _, rows in sorted(gathered, key=lambda one: one[0]) for row in rows]


def _open_private(path: Path) -> Any:
    """Open a new file that only its owner may read: it holds texts of patients."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--out cannot be written ({os_reason(error)}); name a file in a writable folder."
        ) from None
    return os.fdopen(descriptor, "w", encoding="utf-8")


LABELS: Final = (
    "No Finding", "Enlarged Cardiomediastinum", "Cardiomegaly", "Lung Opacity", "Lung Lesion", "Edema",
    "Consolidation", "Pneumonia", "Atelectasis", "Pneumothorax", "Pleural Effusion", "Pleural Other",
    "Fracture", "Support Devices",
)  # fmt: skip
_POSITIVE: Final = frozenset({"present", "uncertain"})
_NO_FINDING, _DEVICES = LABELS[0], LABELS[-1]
_BATCH: Final = 256


def read_labels(texts: Sequence[str]) -> NDArray[np.bool_]:
    """Return which classes texts speak of as there or possible, by the rules of `ReportReader`.

    Returns:
        ``(n, 14)`` in the order of `LABELS`; "No Finding" where there is none but support devices.
    """
    reader, lexicon = ReportReader(), load_lexicon()
    found = np.zeros((len(texts), len(LABELS)), bool)
    for start in range(0, len(texts), _BATCH):
        for row, content in enumerate(reader.read_many(texts[start : start + _BATCH]), start=start):
            for entity in content.entities:
                label = lexicon.codes(entity.concept)["chexpert"]
                if entity.assertion in _POSITIVE and label in LABELS:
                    found[row, LABELS.index(label)] = True
    others = [place for place, label in enumerate(LABELS) if label not in (_NO_FINDING, _DEVICES)]
    found[:, 0] = ~found[:, others].any(axis=1)
    return found


def label_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Compare the classes of texts with those of their references.

    Returns:
        ``label_f1_micro`` over all decisions, ``label_f1_macro`` over the classes that a reference has, and
        ``label_f1`` and ``label_support`` by class; None where no text and no reference has it.
    """
    said, wanted = read_labels(texts), read_labels(references)
    right = (said & wanted).sum(axis=0)
    total = said.sum(axis=0) + wanted.sum(axis=0)
    each = [2 * int(a) / int(b) if b else None for a, b in zip(right, total, strict=True)]
    support = wanted.sum(axis=0).tolist()
    counted = [one or 0.0 for one, num in zip(each, support, strict=True) if num]
    return {
        "label_f1_micro": 2 * int(right.sum()) / int(total.sum()) if total.any() else None,
        "label_f1_macro": sum(counted) / len(counted) if counted else None,
        "label_f1": dict(zip(LABELS, each, strict=True)),
        "label_support": dict(zip(LABELS, support, strict=True)),
    }


def has_word_scores() -> bool:
    """Return whether the package for BLEU and chrF is installed."""
    return importlib.util.find_spec("sacrebleu") is not None


def word_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Return ``bleu`` and ``chrf`` of a corpus, 0 to 100, and their signatures."""
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    found: dict[str, Any] = {}
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        found[name] = float(metric.corpus_score(list(texts), [list(references)]).score)
        found[f"{name}_signature"] = str(metric.get_signature())
    return found
