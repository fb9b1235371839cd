"""Tokenizer of reports: a fast tokenizer from a local folder, and a helper that trains a small one.

Owns the meaning of the special tokens and the rows of token ids. Report text passes through here and must not
leave: no message of this module holds any of it. Invariant: the tokens of a micro-batch depend on its reports
only, so every world size sees the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.keys import REPORT_FIELD
from shardflow.storage import write_atomic
from shardflow.training.tokenizing import tokenizer_digest

_BEGIN, _END, _PADDING = "<s>", "</s>", "<pad>"
_FILE = "tokenizer.json"
# Attention kernels and all-reduce buckets like round sizes, and fewer distinct shapes fragment memory less.
_LENGTH_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The reports of one micro-batch as tokens, padded on the right to a common length T."""

    token_ids: npt.NDArray[np.int64]
    """``(B, T)``: begin token, report, end token; the padding token behind."""
    token_mask: npt.NDArray[np.bool_]
    """``(B, T)``: true for tokens, false for padding; the begin token is there in every row."""


class ReportTokenizer:
    """A fast tokenizer with a begin, an end and a padding token.

    Attributes:
        vocab_size: Number of token ids, added tokens included.
        digest: SHA-256 of ``tokenizer.json``: the tokens' identity, whatever the folder is called.
    """

    def __init__(self, tokenizer: Any, digest: str) -> None:
        self._tokenizer = tokenizer
        self.digest = digest
        self.vocab_size = len(tokenizer)
        end = tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                "text.tokenizer must have an end-of-sequence token, got none; set eos_token in its "
                "tokenizer_config.json."
            )
        # GPT-2's tokenizer has one special token for all three.
        self.end_ids: tuple[int, ...] = (int(end),)
        self.end_id = int(end)
        self.begin_id = self.end_id if tokenizer.bos_token_id is None else int(tokenizer.bos_token_id)
        self.padding_id = self.end_id if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a ``PreTrainedTokenizerFast`` from a local folder; nothing is downloaded.

        Raises:
            ConfigError: no ``tokenizer.json`` there, or one that cannot be read.
        """
        digest = tokenizer_digest(folder)
        from transformers import PreTrainedTokenizerFast

        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception for a broken file
            raise ConfigError(
                f"text.tokenizer must be a readable tokenizer, got {type(error).__name__} ({folder.name}); "
                "make it anew, or correct its files."
            ) from None
        return cls(tokenizer, digest)

    def framed(self, *, begin_id: int, end_ids: Sequence[int]) -> Self:
        """Return one whose rows begin and end otherwise, as a chat template or a decoder wants."""
        other = type(self)(self._tokenizer, self.digest)
        other.begin_id, other.end_ids = begin_id, tuple(end_ids)
        return other

    def name_of(self, token_id: int) -> str:
        """Return a token as the chat template writes it."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    def chat_parts(
        self, messages: Sequence[Mapping[str, Any]], marker: str, *, image: tuple[str, str] | None = None
    ) -> tuple[list[int], list[int]]:
        """Render the chat template and return the token ids before and behind a marker in it.

        Args:
            messages: Roles and contents, as ``apply_chat_template`` takes them; one has the marker.
            marker: Text that the template passes on as it is.
            image: What the template writes for an image, and what the model's processor puts there.

        Raises:
            ConfigError: there is no template, it cannot be rendered, or it loses the marker.
        """
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        except Exception as error:  # noqa: BLE001 - a stranger's template may raise anything
            raise ConfigError(
                f"text.tokenizer must have a chat template that can be rendered, got {type(error).__name__}; "
                "take the tokenizer of model.path, with its chat_template.jinja."
            ) from None
        if image is not None:
            text = str(text).replace(*image)
        before, found, behind = str(text).partition(marker)
        if not found:
            raise ConfigError(
                "the chat template of text.tokenizer must pass the assistant's words on, got a template that "
                "does not; take that of model.path."
            )
        return self._ids_of(before), self._ids_of(behind)

    def _ids_of(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def encode(self, reports: Sequence[str], max_tokens: int) -> TokenRows:
        """Turn the reports of a micro-batch into rows of token ids.

        Args:
            reports: One text a slot; the empty text of a padding slot becomes begin and end.
            max_tokens: Longest row, begin and end included; a longer report loses its tail and the end token.
        """
        encoded = self._tokenizer(
            list(reports),
            add_special_tokens=False,
            return_attention_mask=False,
            split_special_tokens=True,  # a report that happens to spell "</s>" must not end there
        )
        return self.rows(encoded["input_ids"], max_tokens)

    def rows(self, reports: Sequence[Sequence[int]], max_tokens: int) -> TokenRows:
        """Turn token ids of whole reports, such as stored ones, into rows; otherwise as `encode`."""
        rows = [[self.begin_id, *ids, *self.end_ids][:max_tokens] for ids in reports]
        longest = max(len(row) for row in rows)
        width = min(max_tokens, -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE)
        token_ids = np.full((len(rows), width), self.padding_id, np.int64)
        token_mask = np.zeros((len(rows), width), np.bool_)
        for number, row in enumerate(rows):
            token_ids[number, : len(row)] = row
            token_mask[number, : len(row)] = True
        return TokenRows(token_ids, token_mask)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids back into text, without the special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def train_tokenizer(
    dataset: Dataset,
    split: str,
    vocab_size: int,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> ReportTokenizer:
    """Train a byte-level BPE on the reports of a split and write it to ``folder``.

    The same reports and size give the same files, byte for byte. A byte-level vocabulary knows every text,
    so there is no unknown token.

    Args:
        dataset: A packed dataset.
        split: Whose reports to learn from; the training split, so that no evaluation text leaks in.
        vocab_size: Number of tokens, at least 259 (256 bytes and three special tokens); fewer come out
            where the reports are too few.
        folder: Where ``tokenizer.json`` and ``tokenizer_config.json`` are written.
        progress: Called with the number of samples whose report was read, and of all.

    Returns:
        The tokenizer, loaded from ``folder``.

    Raises:
        ConfigError: ``vocab_size`` is too small, there is no such split, or no report in it.
    """
    smallest = 256 + 3
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size must be at least {smallest}, got {vocab_size}; use 512 or more.")
    if split not in dataset.samples.splits:
        known = ", ".join(sorted(dataset.samples.splits))
        raise ConfigError(f"split must be one of the dataset's ({known}), got {split!r}; correct it.")
    every = np.asarray(dataset.samples.splits[split], dtype=np.int64)
    rows = every[dataset.samples.gather("text_bytes", every) > 0]  # studies may be packed without a report
    if not len(rows):
        raise ConfigError(
            f"split must hold reports to learn from, got {split!r} without any; choose another."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_BEGIN, _END, _PADDING],
        # Sorted: alphabet() is a set, whose order differs between processes.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_reports(dataset, rows, progress), trainer=trainer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BEGIN,
        "eos_token": _END,
        "pad_token": _PADDING,
        "model_max_length": 1_000_000,
    }
    write_atomic(folder / _FILE, [tokenizer.to_str(pretty=True).encode()], replace=True)
    write_atomic(
        folder / "tokenizer_config.json", [json.dumps(config, indent=1).encode() + b"\n"], replace=True
    )
    return ReportTokenizer.load(folder)


def _reports(
    dataset: Dataset, rows: npt.NDArray[np.int64], progress: Callable[[int, int], None] | None
) -> Iterator[str]:
    for done, row in enumerate(rows, start=1):
        yield dataset.read_fields(int(row), [REPORT_FIELD])[REPORT_FIELD].decode()
        if progress is not None:
            progress(done, len(rows))
