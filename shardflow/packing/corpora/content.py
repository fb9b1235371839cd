"""Samples from the fields of a line: texts, roles, split and sample key, with texts scrubbed.

``report.txt`` is what a model reads, as in every dataset, so that loader, tokens and training need nothing
new. ``corpus.json`` locates the content of each turn in it; a single text with nothing kept has none, and
costs one member of the tar. A line that cannot be packed is a `LineError` with its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardflow.format.keys import REPORT_FIELD
from shardflow.packing.corpora.config import (
    CorpusConfig,
    CorpusDeidConfig,
    FieldsConfig,
    LineError,
    LineReason,
)
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.deid.report_text import scrub
from shardflow.packing.plan import split_of_bucket
from shardflow.packing.scan import NUM_BUCKETS

CORPUS_FIELD: Final = "corpus.json"
REJECTED_FIELD: Final = "rejected.txt"
_MAX_VALUE_BYTES: Final = 4096
_MAX_LEVELS: Final = 100
"""Levels of a kept field: each takes one of the interpreter's stack, here and in every reader."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a dialogue."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The texts of one line."""

    text: str | None = None
    """The text of a line that is one text."""
    turns: tuple[Turn, ...] = ()
    """Turns of any other line; those of a preference end with the chosen answer."""
    rejected: tuple[Turn, ...] = ()
    """Turns that end with the rejected answer."""

    def texts(self) -> list[str]:
        """Return all texts, in order."""
        if self.text is not None:
            return [self.text]
        return [turn.content for turn in (*self.turns, *self.rejected)]


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, or None; a dot enters an object, unless a field has that name."""
    if path in fields:
        return fields[path]
    value: Any = fields
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def read_record(fields: Mapping[str, Any], config: FieldsConfig) -> Record:
    """Read the texts of a line.

    Raises:
        LineError: The fields are not those of the kind.
    """
    if config.kind == "text":
        return Record(text=_text(fields, config.text))
    system = _system(fields, config)
    if config.kind == "dialogue":
        return Record(turns=(*system, *_turns(fields, config.turns, None, config)))
    if config.kind == "pair":
        prompt = _turns(fields, config.prompt, "user", config)
        return Record(turns=(*system, *prompt, *_turns(fields, config.response, "assistant", config)))
    # Some write the prompt apart, some repeat it before both answers.
    has_prompt = bool(config.prompt) and value_at(fields, config.prompt) is not None
    before = (*system, *(_turns(fields, config.prompt, "user", config) if has_prompt else ()))
    chosen = _turns(fields, config.chosen, "assistant", config)
    rejected = _turns(fields, config.rejected, "assistant", config)
    return Record(turns=_behind(before, chosen), rejected=_behind(before, rejected))


def _behind(before: tuple[Turn, ...], answer: tuple[Turn, ...]) -> tuple[Turn, ...]:
    return answer if answer[: len(before)] == before else (*before, *answer)


def _text(fields: Mapping[str, Any], path: str) -> str:
    value = value_at(fields, path)
    if value is None:
        raise LineError(LineReason.MISSING_FIELD)
    if not isinstance(value, str):
        raise LineError(LineReason.WRONG_TYPE)
    return value


def _system(fields: Mapping[str, Any], config: FieldsConfig) -> tuple[Turn, ...]:
    if not config.system or value_at(fields, config.system) is None:
        return ()
    return (Turn("system", _text(fields, config.system)),)


def _turns(
    fields: Mapping[str, Any], path: str, text_role: str | None, config: FieldsConfig
) -> tuple[Turn, ...]:
    """Read a list of turns; where a role is given, a text alone is a turn of it."""
    value = value_at(fields, path)
    if value is None:
        raise LineError(LineReason.MISSING_FIELD)
    if isinstance(value, str) and text_role is not None:
        return (Turn(text_role, value),)
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise LineError(LineReason.WRONG_TYPE)
    return tuple(_turn(each, config) for each in value)


def _turn(value: Any, config: FieldsConfig) -> Turn:
    if not isinstance(value, dict):
        raise LineError(LineReason.WRONG_TYPE)
    role, content = value.get(config.role), value.get(config.content)
    if role is None or content is None:
        raise LineError(LineReason.MISSING_FIELD)
    if not isinstance(role, str) or not isinstance(content, str):
        raise LineError(LineReason.WRONG_TYPE)
    if role not in config.roles:
        raise LineError(LineReason.UNKNOWN_ROLE)
    return Turn(config.roles[role], content)


@dataclass(frozen=True, slots=True)
class Identity:
    """Sample key and split of a line."""

    sample_key: str
    split: str


def texts_digest(record: Record) -> bytes:
    """Return a digest of 16 bytes of a line's texts and roles, before scrubbing."""
    turns = [[turn.role, turn.content] for turn in record.turns]
    rejected = [[turn.role, turn.content] for turn in record.rejected]
    text = record.text if record.text is not None else json.dumps([turns, rejected])
    kind = b"text\0" if record.text is not None else b"turns\0"
    return hashlib.blake2b(kind + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class ContentMaker:
    """Makes samples from the fields of lines.

    Args:
        config: All settings.
        key: Makes sample keys and splits.

    Attributes:
        config: All settings.
        tallies: Places that were scrubbed, by category.
    """

    def __init__(self, config: CorpusConfig, key: SecretKey) -> None:
        self.config = config
        self._fields = config.fields
        self._deid = config.deid
        self._key = key
        self._nobody = KnownValues(())
        self._label = "split" if not config.splits.seed else f"split-{config.splits.seed}"
        self.tallies: Counter[str] = Counter()

    @property
    def columns(self) -> list[str]:
        """Top-level fields that are read of a line."""
        fields, deid, splits = self._fields, self._deid, self.config.splits
        texts = {
            "text": [fields.text],
            "pair": [fields.system, fields.prompt, fields.response],
            "dialogue": [fields.system, fields.turns],
            "preference": [fields.system, fields.prompt, fields.chosen, fields.rejected],
        }[fields.kind]
        paths = [*texts, fields.key, splits.group, *fields.keep, *deid.names, *deid.identifiers]
        # A column may itself have a dot in its name.
        return sorted({name for path in paths if path for name in (path, path.partition(".")[0])})

    def read(self, fields: Mapping[str, Any]) -> Record:
        """Make the record of a line.

        Raises:
            LineError: Its fields do not fit, it has no text or too much, or JSON cannot hold a field that is
                to be kept.
        """
        record = read_record(fields, self._fields)
        num_bytes = 0
        is_empty = True
        for text in record.texts():
            try:
                num_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
            except UnicodeEncodeError:
                raise LineError(LineReason.INVALID_UTF8) from None
            is_empty = is_empty and (not text or text.isspace())
        if is_empty:
            raise LineError(LineReason.EMPTY_TEXT)
        if num_bytes > self.config.limits.max_text_bytes:
            raise LineError(LineReason.TEXT_TOO_LONG)
        for path in self._fields.keep:
            _check_kept(value_at(fields, path))
        return record

    def user_key(self, fields: Mapping[str, Any]) -> str | None:
        """Return the line's own key; None if keys are made from places.

        Raises:
            LineError: It is missing, or neither a text nor an integer.
        """
        return _name(fields, self._fields.key) if self._fields.key else None

    def identify(self, fields: Mapping[str, Any], record: Record, file: str, place: int) -> Identity:
        """Name a line and find its split.

        Args:
            fields: Fields of the line.
            record: What `read` made of them.
            file: Surrogate of its file.
            place: Where it begins in the file: a byte, or a row.

        Raises:
            LineError: Its key or its group is missing, or of another type.
        """
        user_key = self.user_key(fields)
        if user_key is None:
            sample_key = self._key.surrogate("corpus-line", f"{file}:{place}")
        else:
            sample_key = self._key.surrogate("corpus-key", user_key)
        splits = self.config.splits
        if splits.group:
            bucket = self._key.bucket(self._label, _name(fields, splits.group), NUM_BUCKETS)
        else:
            bucket = self._key.bucket(f"text-{self._label}", texts_digest(record).hex(), NUM_BUCKETS)
        return Identity(sample_key, split_of_bucket(splits.parts, bucket))

    def fields(self, fields: Mapping[str, Any], record: Record) -> list[tuple[str, bytes]]:
        """Return the fields of a sample with their bytes, in the order of a shard.

        Args:
            fields: Fields of the line.
            record: What `read` made of them.
        """
        has_names = bool(self._deid.names or self._deid.identifiers)
        known = KnownValues([_known_values(fields, self._deid)]) if has_names else self._nobody
        about: dict[str, Any] = {"format_version": 1, "kind": self._fields.kind}
        members: list[tuple[str, bytes]] = []
        if record.text is not None:
            members.append((REPORT_FIELD, self._clean(record.text, known).encode("utf-8")))
            if not self._fields.keep:
                return members
        for name, entry, turns in (
            (REJECTED_FIELD, "rejected", record.rejected),
            (REPORT_FIELD, "turns", record.turns),
        ):
            if turns:
                payload, places = _render(turns, self._fields, lambda text: self._clean(text, known))
                members.append((name, payload))
                about[entry] = places
        if self._fields.keep:
            about["fields"] = {path: self._kept(value_at(fields, path), known) for path in self._fields.keep}
        encoded = json.dumps(about, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return [(CORPUS_FIELD, encoded.encode("ascii")), *members]

    def _clean(self, text: str, known: KnownValues) -> str:
        if self._deid.text == "keep":
            return text
        scrubbed = scrub(text, known, mode=self._deid.text, order=self._deid.date_order)
        self.tallies.update(scrubbed.counts)
        return scrubbed.text

    def _kept(self, value: Any, known: KnownValues) -> Any:
        if isinstance(value, str):
            return self._clean(value, known)
        if isinstance(value, list):
            return [self._kept(item, known) for item in value]
        if isinstance(value, dict):
            # Keys of an object may be names of people; two that are scrubbed to the same text stay two.
            kept: dict[str, Any] = {}
            for name, item in value.items():
                cleaned = self._clean(name, known)
                number = 1
                while (unique := cleaned if number == 1 else f"{cleaned} {number}") in kept:
                    number += 1
                kept[unique] = self._kept(item, known)
            return kept
        return value


def _known_values(fields: Mapping[str, Any], deid: CorpusDeidConfig) -> dict[str, list[str]]:
    """Return the values that name people, by the DICOM keyword that they correspond to."""
    found: dict[str, list[str]] = {"PatientName": [], "PatientID": []}
    for keyword, paths in (("PatientName", deid.names), ("PatientID", deid.identifiers)):
        for path in paths:
            value = value_at(fields, path)
            if isinstance(value, (str, int)) and not isinstance(value, bool):
                found[keyword].append(str(value)[:_MAX_VALUE_BYTES])
    return found


def _check_kept(value: Any, levels: int = _MAX_LEVELS) -> None:
    """Refuse values that JSON cannot hold (Parquet has dates, bytes and more) or that nest too deeply."""
    if not levels:
        raise LineError(LineReason.INVALID_JSON)
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise LineError(LineReason.INVALID_UTF8) from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise LineError(LineReason.WRONG_TYPE)
    elif isinstance(value, list):
        for item in value:
            _check_kept(item, levels - 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_kept(name, levels - 1)
            _check_kept(item, levels - 1)
    else:
        raise LineError(LineReason.WRONG_TYPE)


def _name(fields: Mapping[str, Any], path: str) -> str:
    value = value_at(fields, path)
    if value is None or value == "":
        raise LineError(LineReason.MISSING_FIELD)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise LineError(LineReason.WRONG_TYPE)
    return str(value)


def _render(
    turns: Sequence[Turn], config: FieldsConfig, clean: Callable[[str], str]
) -> tuple[bytes, list[dict[str, Any]]]:
    """Join turns; return the text, and the byte range of each content in it."""
    before, between, behind = config.turn_parts
    pieces: list[bytes] = []
    places: list[dict[str, Any]] = []
    position = 0
    for turn in turns:
        head = f"{before}{turn.role}{between}".encode()
        content = clean(turn.content).encode("utf-8")
        pieces += [head, content, behind.encode()]
        start = position + len(head)
        places.append({"role": turn.role, "start": start, "stop": start + len(content)})
        position = start + len(content) + len(behind.encode())
    return b"".join(pieces), places
