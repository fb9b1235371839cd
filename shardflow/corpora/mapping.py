"""From a line's fields to a record: what is text, who says what, what keeps lines together.

Nothing here reads files or knows shards. A line that does not fit is a `LineError` with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from shardflow.corpora.config import FieldsConfig
from shardflow.corpora.reasons import LineError, LineReason

__all__ = ["Record", "Turn", "make_mapper", "parse_line", "value_at"]

_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side of a dialogue says."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The texts of one line."""

    text: str | None = None
    """Of a line that is one text."""
    turns: tuple[Turn, ...] = ()
    """Of any other line; those of a preference end with the chosen answer."""
    rejected: tuple[Turn, ...] = ()
    """Turns that end with the rejected answer."""

    def texts(self) -> list[str]:
        """Return all texts, in order."""
        if self.text is not None:
            return [self.text]
        return [turn.content for turn in (*self.turns, *self.rejected)]


def parse_line(line: bytes) -> Mapping[str, Any]:
    """Read a line of JSON.

    Raises:
        LineError: It is white space, no UTF-8, or no JSON object; NaN, and a key given twice, are no JSON.
    """
    line = line.removeprefix(_BOM)
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise LineError(LineReason.INVALID_UTF8) from None
    if not text or text.isspace():
        raise LineError(LineReason.EMPTY_LINE)
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise LineError(LineReason.INVALID_JSON) from None
    if not isinstance(value, dict):
        raise LineError(LineReason.INVALID_JSON)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError  # which of the two was meant?
    return value


def _refuse(_: str) -> None:
    raise ValueError


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse)


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, or None; a dot leads into an object, unless a field has that name."""
    if path in fields:
        return fields[path]
    value: Any = fields
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def make_mapper(config: FieldsConfig) -> Callable[[Mapping[str, Any]], Record]:
    """Return what makes records of fields; it raises `LineError` for fields that do not fit."""

    def text(fields: Mapping[str, Any]) -> Record:
        return Record(text=_text(fields, config.text))

    def pair(fields: Mapping[str, Any]) -> Record:
        prompt = _turns(fields, config.prompt, "user", config)
        answer = _turns(fields, config.response, "assistant", config)
        return Record(turns=(*_system(fields, config), *prompt, *answer))

    def dialogue(fields: Mapping[str, Any]) -> Record:
        turns = _turns(fields, config.turns, None, config)
        return Record(turns=(*_system(fields, config), *turns))

    def preference(fields: Mapping[str, Any]) -> Record:
        # Some write the prompt apart, some repeat it in front of both answers.
        has_prompt = bool(config.prompt) and value_at(fields, config.prompt) is not None
        prompt = _turns(fields, config.prompt, "user", config) if has_prompt else ()
        before = (*_system(fields, config), *prompt)
        chosen = _turns(fields, config.chosen, "assistant", config)
        rejected = _turns(fields, config.rejected, "assistant", config)
        return Record(turns=_behind(before, chosen), rejected=_behind(before, rejected))

    kinds = {"text": text, "pair": pair, "dialogue": dialogue, "preference": preference}
    return kinds[config.kind]


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
