"""Model beside the rules: a local token-classification folder of transformers finds what no pattern does.

Imported only where ``deid.model`` names a folder; it needs shardflow[deid-model]. The model only adds spans:
what the rules replace stays replaced. It reads windows of 512 tokens that overlap, on one CPU thread, so that
the same text gives the same spans in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError
from shardflow.packing.deid.text_patterns import Category, Span

_CATEGORIES: Final = (
    (r"age", Category.AGE),
    (r"date|time", Category.DATE),
    (r"e-?mail", Category.EMAIL),
    (r"phone|tel|fax|contact", Category.PHONE),
    (r"url|web|ip", Category.URL),
    (r"loc|city|street|zip|address|hospital|org|place|state|country|gpe|facility|vendor", Category.PLACE),
    (r"per|name|patient|doctor|staff|hcw|phys|user", Category.NAME),
    (r"id|num|record|account|device|license|licence|plate|ssn|bio", Category.ID),
)
_OUTSIDE: Final = frozenset({"o", "out", "outside", "none"})
_PREFIX: Final = re.compile(r"^[BIESLU]-", re.IGNORECASE)
_UNNAMED: Final = re.compile(r"LABEL_\d+")
_MAX_TOKENS: Final = 512
_STRIDE: Final = 64


class TextModel:
    """Token classifier of a local folder.

    Args:
        folder: As ``save_pretrained`` writes it: configuration with named labels, weights as safetensors,
            and a fast tokenizer.

    Raises:
        ConfigError: transformers is missing, the folder holds no such model, or labels have no names.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import torch
            from transformers import AutoModelForTokenClassification, AutoTokenizer
        except ImportError:
            raise ConfigError(
                "deid.model needs torch and transformers; install shardflow[deid-model]."
            ) from None
        if not (folder / "config.json").is_file():
            raise ConfigError("deid.model must be a folder with a config.json; save a model there.")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            self._model: Any = AutoModelForTokenClassification.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"deid.model cannot be loaded as a token classifier ({type(error).__name__}); save it with "
                "save_pretrained, its tokenizer too."
            ) from None
        if not self._tokenizer.is_fast:
            raise ConfigError("deid.model has a slow tokenizer, which knows no places; save a fast one.")
        self._model.eval()
        torch.set_num_threads(1)
        self._torch = torch
        self._labels = {int(at): _category(str(name)) for at, name in self._model.config.id2label.items()}
        if all(_UNNAMED.fullmatch(str(name)) for name in self._model.config.id2label.values()):
            raise ConfigError("deid.model has labels without names; set id2label in its config.json.")

    def find(self, text: str) -> Iterator[Span]:
        """Find what the model labels; words are covered whole."""
        if not text.strip():
            return
        longest = min(_MAX_TOKENS, int(getattr(self._model.config, "max_position_embeddings", _MAX_TOKENS)))
        windows = self._tokenizer(
            text,
            truncation=True,
            max_length=longest,
            stride=min(_STRIDE, longest // 4),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        for ids, offsets in zip(windows["input_ids"], windows["offset_mapping"], strict=True):
            with self._torch.inference_mode():
                logits = self._model(input_ids=self._torch.tensor([ids])).logits[0]
            for label, (start, end) in zip(logits.argmax(-1).tolist(), offsets, strict=True):
                category = self._labels.get(label)
                if category is not None and end > start:
                    yield Span(start=_word_start(text, start), end=_word_end(text, end), category=category)


def model_digest(folder: Path) -> str:
    """Return the SHA-256 of a model's files, which decides bytes of a dataset.

    Raises:
        ConfigError: The folder cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file():
                digest.update(path.name.encode("utf-8", "surrogateescape") + b"\0")
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ConfigError(
            f"deid.model must be a readable folder, got {type(error).__name__}; check the path."
        ) from None
    return digest.hexdigest()


def _category(label: str) -> Category | None:
    """Return the category of a label such as ``B-PATIENT``; None for what is left alone."""
    name = _PREFIX.sub("", label).lower()
    if name in _OUTSIDE:
        return None
    return next((category for pattern, category in _CATEGORIES if re.search(pattern, name)), Category.WORD)


def _word_start(text: str, start: int) -> int:
    while start > 0 and text[start - 1].isalnum() and text[start].isalnum():
        start -= 1
    return start


def _word_end(text: str, end: int) -> int:
    while end < len(text) and text[end].isalnum() and text[end - 1].isalnum():
        end += 1
    return end
