"""Token classifier of a local folder: spans of texts and the names of their labels.

It needs torch and transformers, which are imported when it is made. It reads windows that overlap, many of
one length at a time and never padded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from shardflow.errors import ConfigError, os_reason

_PREFIX: Final = re.compile(r"^[BIESLU]-", re.IGNORECASE)
_OUTSIDE: Final = frozenset({"o", "out", "outside", "none"})
_UNNAMED: Final = re.compile(r"LABEL_\d+")
_MAX_TOKENS: Final = 512
_STRIDE: Final = 64

Labeled = tuple[int, int, str]
"""Start and end of a word or of several, closed-open, in characters; the name of their label."""


class TokenClassifier:
    """Token classifier of a local folder.

    Args:
        folder: As ``save_pretrained`` writes it: configuration with named labels, weights as safetensors,
            and a fast tokenizer.
        setting: Name of the setting, for messages.
        extra: Extra of the package that installs what it needs.
        device: ``"cpu"``, or a device of torch such as ``"cuda"``. On a CPU it takes one thread.
        batch_size: Windows at a time.

    Raises:
        ConfigError: transformers is missing, the folder holds no such model or not all of it, labels have no
            names, or there is no such device.
    """

    def __init__(
        self, folder: Path, *, setting: str, extra: str, device: str = "cpu", batch_size: int = 1
    ) -> None:
        try:
            import torch
            from safetensors import SafetensorError
            from transformers import AutoModelForTokenClassification, AutoTokenizer
        except ImportError:
            raise ConfigError(
                f"{setting} needs torch and transformers; install shardflow[{extra}]."
            ) from None
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{setting} must be a folder with a config.json; save a model there.")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            self._model: Any
            self._model, loaded = AutoModelForTokenClassification.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"{setting} cannot be loaded as a token classifier ({os_reason(error)}); save it with "
                "save_pretrained, its tokenizer too."
            ) from None
        # transformers fills what is missing with random weights, and with a tokenizer that knows no words.
        if loaded["missing_keys"]:
            raise ConfigError(
                f"{setting} lacks weights of a token classifier, {len(loaded['missing_keys'])} in all; save "
                "a model that was trained to label tokens."
            )
        files = {"tokenizer.json", *self._tokenizer.vocab_files_names.values()}
        if not any((folder / name).is_file() for name in files):
            raise ConfigError(f"{setting} has no tokenizer; save it with save_pretrained in the same folder.")
        if not self._tokenizer.is_fast:
            raise ConfigError(f"{setting} has a slow tokenizer, which knows no places; save a fast one.")
        names = {int(at): str(name) for at, name in self._model.config.id2label.items()}
        if all(_UNNAMED.fullmatch(name) for name in names.values()):
            raise ConfigError(f"{setting} has labels without names; set id2label in its config.json.")
        self._labels = {
            at: "" if _PREFIX.sub("", name).lower() in _OUTSIDE else name for at, name in names.items()
        }
        try:
            self._model.eval().to(device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"{setting} cannot be moved to the device of its settings ({type(error).__name__}); name "
                "another one, such as cpu."
            ) from None
        torch.set_num_threads(1)
        self._torch, self._device, self._batch_size = torch, device, batch_size

    @property
    def labels(self) -> list[str]:
        """Names of labels without the prefixes of words (``B-``, ``I-``), sorted."""
        return sorted({_PREFIX.sub("", name) for name in self._labels.values() if name})

    def find(self, texts: Sequence[str], *, is_joined: bool = True) -> list[list[Labeled]]:
        """Return what the model labels in each text, in order; words are covered whole.

        Args:
            texts: Any texts.
            is_joined: Neighbors of one label are one span, unless a prefix says that another begins; else
                each word is one.
        """
        longest = min(_MAX_TOKENS, int(getattr(self._model.config, "max_position_embeddings", _MAX_TOKENS)))
        windows: list[tuple[int, list[int], list[tuple[int, int]]]] = []
        for number, text in enumerate(texts):
            if text.strip():
                cut = self._tokenizer(
                    text,
                    truncation=True,
                    max_length=longest,
                    stride=min(_STRIDE, longest // 4),
                    return_overflowing_tokens=True,
                    return_offsets_mapping=True,
                )
                windows += [
                    (number, ids, offsets)
                    for ids, offsets in zip(cut["input_ids"], cut["offset_mapping"], strict=True)
                ]
        pieces: list[dict[tuple[int, int], str]] = [{} for _ in texts]
        by_length: dict[int, list[int]] = {}
        for place, (_, ids, _) in enumerate(windows):
            by_length.setdefault(len(ids), []).append(place)
        for places in by_length.values():
            for first in range(0, len(places), self._batch_size):
                batch = places[first : first + self._batch_size]
                found = self._classify([windows[place][1] for place in batch])
                for place, labels in zip(batch, found, strict=True):
                    number, _, offsets = windows[place]
                    text = texts[number]
                    for label, (start, end) in zip(labels, offsets, strict=True):
                        name = self._labels.get(label, "")
                        if name and end > start:
                            pieces[number].setdefault((_word_start(text, start), _word_end(text, end)), name)
        if is_joined:
            return [_joined(text, found) for text, found in zip(texts, pieces, strict=True)]
        return [
            [(start, end, _PREFIX.sub("", name)) for (start, end), name in sorted(found.items())]
            for found in pieces
        ]

    def _classify(self, batch: list[list[int]]) -> list[list[int]]:
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(input_ids=torch.tensor(batch, device=self._device)).logits
        labels: list[list[int]] = logits.argmax(-1).tolist()
        return labels


def model_digest(folder: Path, setting: str) -> str:
    """Return the SHA-256 of a model's files, which decides bytes of a dataset.

    Args:
        folder: Its folder.
        setting: Name of the setting, for messages.

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
            f"{setting} must be a readable folder, got {os_reason(error)}; check the path."
        ) from None
    return digest.hexdigest()


def _joined(text: str, pieces: dict[tuple[int, int], str]) -> list[Labeled]:
    spans: list[Labeled] = []
    for (start, end), name in sorted(pieces.items()):
        label = _PREFIX.sub("", name)
        if spans:
            first, last, before = spans[-1]
            begins = name[:2].upper() in ("B-", "U-", "S-") and start >= last
            if label == before and not begins and not text[last:start].strip(" -"):
                spans[-1] = (first, max(last, end), label)
                continue
        spans.append((start, end, label))
    return spans


def _word_start(text: str, start: int) -> int:
    while start > 0 and text[start - 1].isalnum() and text[start].isalnum():
        start -= 1
    return start


def _word_end(text: str, end: int) -> int:
    while end < len(text) and text[end].isalnum() and text[end - 1].isalnum():
        end += 1
    return end
