"""Conversations from the fields of a line: forms, turns, and places of pictures.

The form of a line (`Form`) is recognized by its fields, or set by ``conversations.form``. All forms become
the same: turns of known roles in a known order, whose content is texts and places of pictures in reading
order. Nothing is dropped silently: a line that does not fit gets a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from shardflow.packing.corpora.config import (
    ConversationsConfig,
    FieldsConfig,
    LineError,
    LineReason,
)
from shardflow.packing.corpora.lines import TarLine

Kind: TypeAlias = Literal["conversation", "preference", "reward", "prompt", "document"]

# Names of fields by what they hold; those of the settings come first, and the order decides.
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "turns": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "problem"),
    "response": ("response", "completion"),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "answer": ("answer", "solution", "ground_truth"),
    "score": ("reward",),
    "texts": ("texts",),
    "images": ("images", "image"),
}
_ROLES: Final = {
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "developer": "system",
    "function": "tool",
    "observation": "tool",
}
_ROLE_KEYS: Final = ("role", "from")
_CONTENT_KEYS: Final = ("content", "value")
_HISTORY: Final = "history"
# What a model would have been given, or have thought, and no stored conversation holds.
_NOT_HELD: Final = ("tools", "videos", "audios")
_NOT_HELD_OF_TURN: Final = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
_NOTHING: Final = ("", "[]", "{}", "null")
_TEXT_TYPES: Final = frozenset({"text", "input_text", "output_text"})
_IMAGE_TYPES: Final = frozenset({"image", "image_url", "input_image"})
_REFERENCES: Final = ("image", "image_url", "url", "path", "source", "bytes", "data")


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlace:
    """Place in a packed study that a picture shows."""

    study: str
    """Its key, of the kind given in the settings."""
    series: int | None = None
    slices: int | tuple[int, int] | None = None
    """Number of slices, or a half-open range of them."""
    region: int | None = None
    """Number of a region in ``annotations.json``."""
    finding: int | None = None
    """Position of a finding in ``report.json``."""
    window: str | tuple[float, float] | None = None
    """Name of a window, or center and width."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of a picture, by its name, with its bytes, or in a study."""

    name: str = ""
    data: bytes | None = None
    study: StudyPlace | None = None
    number: int | None = None
    """Number of the picture in the line, until pictures are assigned to places."""


Part: TypeAlias = str | Slot | None
"""A text, a picture, or None: the next picture of the line."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message."""

    role: str
    content: tuple[Part, ...]
    weight: float | None = None
    """Weight of its tokens in the loss; None for 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The content of one line."""

    form: str
    kind: Kind
    messages: tuple[Turn, ...]
    chosen: tuple[Turn, ...] = ()
    """Of a preference: turns that follow the messages, as do those of ``rejected``."""
    rejected: tuple[Turn, ...] = ()
    score: float | None = None
    answer: str | None = None

    def turns(self) -> tuple[Turn, ...]:
        """Return all turns in the order of reading."""
        return (*self.messages, *self.chosen, *self.rejected)

    def texts(self) -> Iterator[str]:
        """Yield all texts, in order."""
        for turn in self.turns():
            yield from (part for part in turn.content if isinstance(part, str))
        if self.answer is not None:
            yield self.answer

    def slots(self) -> Iterator[Slot]:
        """Yield all places of pictures, in order."""
        for turn in self.turns():
            yield from (part for part in turn.content if isinstance(part, Slot))


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value of a field, or None; a dot enters an object, unless a field has that name."""
    if path in fields or "." not in path:
        return fields.get(path)
    value: Any = fields
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value


def names_of(fields: FieldsConfig, config: ConversationsConfig) -> dict[str, tuple[str, ...]]:
    """Return the candidate fields of each item; the first that a line has is used."""
    named = {
        "turns": fields.turns,
        "prompt": fields.prompt,
        "response": fields.response,
        "instruction": config.instruction,
        "input": config.input,
        "output": config.output,
        "answer": config.answer,
        "score": config.score,
        "texts": config.texts,
        "images": config.images,
    }
    names = {what: tuple(dict.fromkeys([named[what], *known])) for what, known in _NAMES.items()}
    # An empty name is no name: `score` and `images` are then recognized.
    found = {what: tuple(name for name in each if name) for what, each in names.items()}
    beside = {"chosen": fields.chosen, "rejected": fields.rejected, "system": fields.system or "system"}
    return found | {what: (name,) for what, name in beside.items()} | {"history": (_HISTORY,)}


class ConversationReader:
    """Reads lines as conversations.

    Args:
        fields: Names of fields, and roles.
        config: The settings of conversations.
    """

    def __init__(self, fields: FieldsConfig, config: ConversationsConfig) -> None:
        self._config = config
        self._names = names_of(fields, config)
        self._roles = _ROLES | dict(fields.roles)
        self._role_keys = tuple(dict.fromkeys([fields.role, *_ROLE_KEYS]))
        self._content_keys = tuple(dict.fromkeys([fields.content, *_CONTENT_KEYS]))
        known = {*fields.keep, *(name for names in self._names.values() for name in names)}
        self._not_held = tuple(name for name in _NOT_HELD if name not in known)
        self._not_held_of_turn = tuple(
            name for name in _NOT_HELD_OF_TURN if name not in (*self._content_keys, *self._role_keys)
        )

    @property
    def columns(self) -> list[str]:
        """Fields that may be read of a line."""
        return [name for names in self._names.values() for name in names] + list(self._not_held)

    def read(self, fields: Mapping[str, Any]) -> Conversation:
        """Read the conversation of a line; its pictures are not resolved.

        Raises:
            LineError: It is of no known form, or its content does not fit.
        """
        if any(_holds(fields.get(name)) for name in self._not_held):
            raise LineError(LineReason.UNSUPPORTED_CONTENT)
        form = self._form(fields) if self._config.form == "auto" else self._config.form
        read = {
            "document": self._document,
            "preference": self._preference,
            "prompt": self._prompt,
        }.get(form)
        if read is not None:
            found = read(fields, form)
        else:
            score = self._score(fields) if form == "reward" else None
            kind: Kind = "conversation" if score is None else "reward"
            found = Conversation(form=form, kind=kind, messages=self._messages(fields), score=score)
        num_places = sum(part is None for turn in found.turns() for part in turn.content)
        # Those beside a line are taken unless all of its places have names.
        takes_beside = num_places > 0 or all(slot.number is not None for slot in found.slots())
        placed = self._placed(found, self._pictures(fields, takes_beside=takes_beside), num_places)
        if isinstance(fields, TarLine):
            placed = _mapped(placed, lambda turn: _beside(turn, fields))
        return _checked(placed)

    # ---- forms -----------------------------------------------------------------------------------

    def _value(self, fields: Mapping[str, Any], what: str) -> Any:
        """Return the value of the first field of those names that the line has; None for none."""
        for name in self._names[what]:
            value = value_at(fields, name)
            if value is not None:
                return value
        return None

    def _has(self, fields: Mapping[str, Any], *what: str) -> bool:
        return all(self._value(fields, each) is not None for each in what)

    def _form(self, fields: Mapping[str, Any]) -> str:
        """Return the form of a line, recognized by its fields.

        Raises:
            LineError: No form is recognized.
        """
        if self._has(fields, "chosen", "rejected"):
            return "preference"
        if self._has(fields, "score") and self._has_turns(fields):
            return "reward"
        if self._has(fields, "turns"):
            turns = self._value(fields, "turns")
            if self._has(fields, "answer") and self._ends_with_prompt(turns):
                return "prompt"
            first = turns[0] if isinstance(turns, list) and turns else None
            if not isinstance(first, dict) or "from" not in first:
                return "messages"
            return "llava" if self._has(fields, "images") else "sharegpt"
        if self._has(fields, "prompt", "response"):
            return "pair"
        if self._has(fields, "instruction", "output"):
            return "alpaca"
        if self._has(fields, "prompt", "answer"):
            return "prompt"
        if self._has(fields, "texts") or isinstance(fields.get("text"), str):
            return "document"
        raise LineError(LineReason.UNKNOWN_FORM)

    def _has_turns(self, fields: Mapping[str, Any]) -> bool:
        pairs = (("turns",), ("prompt", "response"), ("instruction", "output"))
        return any(self._has(fields, *each) for each in pairs)

    def _ends_with_prompt(self, turns: Any) -> bool:
        last = turns[-1] if isinstance(turns, list) and turns else None
        role = _first(last, self._role_keys) if isinstance(last, dict) else None
        return isinstance(role, str) and self._roles.get(role) in ("user", "tool")

    def _messages(self, fields: Mapping[str, Any]) -> tuple[Turn, ...]:
        """Read the turns of a conversation in any form."""
        if self._has(fields, "turns"):
            return (*self._system(fields), *self._turns(self._value(fields, "turns"), None))
        if self._has(fields, "prompt", "response"):
            prompt = self._turns(self._value(fields, "prompt"), "user")
            answer = self._turns(self._value(fields, "response"), "assistant")
            return (*self._system(fields), *prompt, *answer)
        if self._has(fields, "instruction", "output"):
            return self._alpaca(fields)
        raise LineError(LineReason.MISSING_FIELD)

    def _alpaca(self, fields: Mapping[str, Any]) -> tuple[Turn, ...]:
        output = _text(self._value(fields, "output"))
        return (
            *self._system(fields),
            *self._instruction(fields),
            Turn("assistant", self._content(output)),
        )

    def _instruction(self, fields: Mapping[str, Any]) -> tuple[Turn, ...]:
        """Read what comes before the answer of a line of Alpaca."""
        turns: list[Turn] = []
        history = self._value(fields, "history") or []
        if not isinstance(history, list):
            raise LineError(LineReason.WRONG_TYPE)
        for pair in history:
            if not isinstance(pair, list) or len(pair) != 2:
                raise LineError(LineReason.WRONG_TYPE)
            turns += [Turn("user", self._content(pair[0])), Turn("assistant", self._content(pair[1]))]
        instruction, given = _text(self._value(fields, "instruction")), self._value(fields, "input")
        asked = f"{instruction}\n\n{_text(given)}" if given else instruction
        return (*turns, Turn("user", self._content(asked)))

    def _preference(self, fields: Mapping[str, Any], form: str) -> Conversation:
        answers = self._value(fields, "chosen"), self._value(fields, "rejected")
        if None in answers:
            raise LineError(LineReason.MISSING_FIELD)
        chosen, rejected = (self._turns(answer, "assistant") for answer in answers)
        system, before = self._system(fields), self._before(fields)
        # Some write the prompt apart, some repeat it before both answers, some write it only there.
        if not before or (chosen[: len(before)] == before and rejected[: len(before)] == before):
            num_common = 0
            for one, other in zip(chosen[:-1], rejected[:-1], strict=False):
                if one != other:
                    break
                num_common += 1
            before, chosen, rejected = chosen[:num_common], chosen[num_common:], rejected[num_common:]
        before = (*system, *before)
        return Conversation(form=form, kind="preference", messages=before, chosen=chosen, rejected=rejected)

    def _prompt(self, fields: Mapping[str, Any], form: str) -> Conversation:
        answer = self._value(fields, "answer")
        if isinstance(answer, (int, float)) and not isinstance(answer, bool):
            answer = str(answer)
        before = (*self._system(fields), *self._before(fields))
        if answer is None or not before:
            raise LineError(LineReason.MISSING_FIELD)
        if not _text(answer).strip():
            raise LineError(LineReason.EMPTY_TURN)
        return Conversation(form=form, kind="prompt", messages=before, answer=answer)

    def _before(self, fields: Mapping[str, Any]) -> tuple[Turn, ...]:
        """Read what comes before an answer: a prompt, messages or an instruction; empty if there is none."""
        for what, role in (("prompt", "user"), ("turns", None)):
            if self._has(fields, what):
                return self._turns(self._value(fields, what), role)
        return self._instruction(fields) if self._has(fields, "instruction") else ()

    def _document(self, fields: Mapping[str, Any], form: str) -> Conversation:
        texts = self._value(fields, "texts")
        if texts is None:
            parts = self._content(_text(fields.get("text")))
        else:
            pictures = self._value(fields, "images") or [None] * len(texts)
            if not isinstance(texts, list) or not isinstance(pictures, list):
                raise LineError(LineReason.WRONG_TYPE)
            if len(texts) != len(pictures):
                raise LineError(LineReason.IMAGE_COUNT)
            both: list[Part] = []
            for text, picture in zip(texts, pictures, strict=True):
                both += [] if picture is None else [_slot(picture)]
                both += [] if text is None else [_text(text)]
            parts = _joined(iter(both))
        return Conversation(form=form, kind="document", messages=(Turn("document", parts),))

    # ---- turns -----------------------------------------------------------------------------------

    def _system(self, fields: Mapping[str, Any]) -> tuple[Turn, ...]:
        value = self._value(fields, "system")
        return () if value is None or value == "" else (Turn("system", self._content(_text(value))),)

    def _turns(self, value: Any, text_role: str | None) -> tuple[Turn, ...]:
        """Read a list of turns; with a role given, a text or a list of parts is one turn."""
        if isinstance(value, dict):
            return (self._turn(value),)
        if isinstance(value, str) and text_role is not None:
            return (Turn(text_role, self._content(value)),)
        if not isinstance(value, list):
            raise LineError(LineReason.WRONG_TYPE)
        if text_role is not None and value and isinstance(value[0], dict) and "type" in value[0]:
            return (Turn(text_role, self._content(value)),)
        return tuple(self._turn(each) for each in value)

    def _turn(self, value: Any) -> Turn:
        if not isinstance(value, dict):
            raise LineError(LineReason.WRONG_TYPE)
        if any(_holds(value.get(name)) for name in self._not_held_of_turn):
            raise LineError(LineReason.UNSUPPORTED_CONTENT)
        role, content = _first(value, self._role_keys), _first(value, self._content_keys)
        if role is None or content is None:
            raise LineError(LineReason.MISSING_FIELD)
        if not isinstance(role, str):
            raise LineError(LineReason.WRONG_TYPE)
        if role not in self._roles:
            raise LineError(LineReason.UNKNOWN_ROLE)
        weight = value.get("weight")
        return Turn(
            self._roles[role], self._content(content), None if weight is None else _number(weight, least=0.0)
        )

    def _content(self, value: Any) -> tuple[Part, ...]:
        """Read the content of a turn: a text, in which a marker is a picture, or a list of parts."""
        if isinstance(value, str):
            pieces = value.split(self._config.marker)
            return tuple(part for piece in pieces for part in (None, piece) if part != "")[1:]
        if not isinstance(value, list):
            raise LineError(LineReason.WRONG_TYPE)
        return _joined(part for each in value for part in self._part(each))

    def _part(self, value: Any) -> tuple[Part, ...]:
        if isinstance(value, str):
            return self._content(value)
        if not isinstance(value, dict):
            raise LineError(LineReason.WRONG_TYPE)
        kind = value.get("type")
        if kind in _TEXT_TYPES:
            return self._content(_text(value.get("text")))
        if kind not in _IMAGE_TYPES:
            raise LineError(LineReason.UNSUPPORTED_CONTENT)
        if value.get("study") is not None:
            return (_slot(value),)
        reference, number = _first(value, _REFERENCES), value.get("index")
        if reference is None and number is not None:
            return (Slot(number=_whole(number)),)
        return (None if reference is None else _slot(reference),)

    # ---- pictures --------------------------------------------------------------------------------

    def _pictures(self, fields: Mapping[str, Any], *, takes_beside: bool) -> list[Slot]:
        """Return the pictures that a line lists beside its turns."""
        value = self._value(fields, "images")
        if self._has(fields, "texts"):
            return []
        if value is None:
            beside = fields.pictures if isinstance(fields, TarLine) and takes_beside else ()
            return [Slot(name=name) for name in beside]
        return [_slot(each) for each in (value if isinstance(value, list) else [value])]

    def _placed(self, found: Conversation, pictures: list[Slot], num_places: int) -> Conversation:
        """Assign the pictures of a line to their places, by number or in reading order.

        Raises:
            LineError: There are more or fewer than places.
        """
        numbers = {slot.number for slot in found.slots() if slot.number is not None}
        if numbers:
            if num_places or numbers != {*range(len(pictures))}:
                raise LineError(LineReason.IMAGE_COUNT)
            return _mapped(found, lambda turn: _numbered(turn, pictures))
        messages = found.messages
        if pictures and not num_places and self._config.unplaced_images == "first":
            at = next((n for n, turn in enumerate(messages) if turn.role in ("user", "document")), None)
            if at is not None:
                turn = messages[at]
                content = (*(None,) * len(pictures), *turn.content)
                messages = (*messages[:at], Turn(turn.role, content, turn.weight), *messages[at + 1 :])
                num_places = len(pictures)
        if num_places != len(pictures):
            raise LineError(LineReason.IMAGE_COUNT)
        if not pictures:
            return found
        following = iter(pictures)

        def placed(turn: Turn) -> Turn:
            parts = (next(following) if part is None else part for part in turn.content)
            return replace(turn, content=tuple(parts))

        return _mapped(replace(found, messages=messages), placed)

    def _score(self, fields: Mapping[str, Any]) -> float:
        value = self._value(fields, "score")
        if value is None:
            raise LineError(LineReason.MISSING_FIELD)
        return _number(value)


def _mapped(found: Conversation, change: Callable[[Turn], Turn]) -> Conversation:
    """Return a conversation with every turn mapped, in reading order."""
    messages, chosen, rejected = (
        tuple(change(turn) for turn in turns) for turns in (found.messages, found.chosen, found.rejected)
    )
    return replace(found, messages=messages, chosen=chosen, rejected=rejected)


def _numbered(turn: Turn, pictures: Sequence[Slot]) -> Turn:
    """Return a turn with numbers replaced by pictures."""
    parts = (
        pictures[part.number] if isinstance(part, Slot) and part.number is not None else part
        for part in turn.content
    )
    return replace(turn, content=tuple(parts))


def _holds(value: Any) -> bool:
    """Return whether a field has content; in Parquet a list may be written as a text."""
    return value.strip() not in _NOTHING if isinstance(value, str) else bool(value)


def _beside(turn: Turn, line: TarLine) -> Turn:
    """Return a turn with the pictures that are stored beside the line in its tar."""
    parts: list[Part] = []
    for part in turn.content:
        data = line.picture(part.name) if isinstance(part, Slot) and part.name else None
        parts.append(part if data is None else Slot(data=data))
    return replace(turn, content=tuple(parts))


def _joined(parts: Iterator[Part]) -> tuple[Part, ...]:
    """Join consecutive texts; leave out empty ones."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return tuple(joined)


def _checked(found: Conversation) -> Conversation:
    """Return a conversation if its turns are in order and none is empty.

    Raises:
        LineError: They are not.
    """
    turns = found.turns()
    if not any(text.strip() for text in found.texts()) and not any(found.slots()):
        raise LineError(LineReason.EMPTY_TEXT)
    for turn in turns:
        if all(isinstance(part, str) and not part.strip() for part in turn.content):
            raise LineError(LineReason.EMPTY_TURN)
    if found.kind == "document":
        return found
    if found.kind == "preference":
        for answer in (found.chosen, found.rejected):
            _check_order((*found.messages, *answer), ends_with=("assistant",))
            if len(answer) == 0 or answer[0].role != "assistant":
                raise LineError(LineReason.TURN_ORDER)
        if found.chosen == found.rejected:
            raise LineError(LineReason.SAME_ANSWERS)
    else:
        _check_order(turns, ends_with=("user", "tool") if found.kind == "prompt" else ("assistant",))
    return found


_FOLLOWING: Final = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


def _check_order(turns: Sequence[Turn], ends_with: tuple[str, ...]) -> None:
    before = ""
    for turn in turns:
        if turn.role not in _FOLLOWING[before]:
            raise LineError(LineReason.TURN_ORDER)
        before = turn.role
    if before not in ends_with:
        raise LineError(LineReason.TURN_ORDER)


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first value that is present and not null."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def _text(value: Any) -> str:
    if value is None:
        raise LineError(LineReason.MISSING_FIELD)
    if not isinstance(value, str):
        raise LineError(LineReason.WRONG_TYPE)
    return value


def _number(value: Any, least: float = -math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LineError(LineReason.WRONG_TYPE)
    if not math.isfinite(value) or value < least:
        raise LineError(LineReason.WRONG_TYPE)
    return float(value)


def _study_place(value: Mapping[str, Any]) -> StudyPlace:
    """Read a place in a study."""
    study, slices, window = value["study"], value.get("slices"), value.get("window")
    if not isinstance(study, (str, int)) or isinstance(study, bool):
        raise LineError(LineReason.WRONG_TYPE)
    if isinstance(slices, list):
        bounds = tuple(_whole(each) for each in slices)
        if len(bounds) != 2 or not bounds[0] < bounds[1]:
            raise LineError(LineReason.WRONG_TYPE)
        slices = bounds
    elif slices is not None and _whole(slices) < 1:
        raise LineError(LineReason.WRONG_TYPE)
    if isinstance(window, list):
        window = tuple(_number(each) for each in window)
        if len(window) != 2 or window[1] <= 0:
            raise LineError(LineReason.WRONG_TYPE)
    elif window is not None:
        window = _text(window)
    places = {name: value.get(name) for name in ("series", "region", "finding")}
    return StudyPlace(
        study=str(study),
        slices=slices,
        window=window,
        **{name: None if place is None else _whole(place) for name, place in places.items()},
    )


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise LineError(LineReason.WRONG_TYPE)
    return value


def _slot(value: Any) -> Slot:
    """Read a reference to a picture: a text, bytes, an object with either, or a place in a study."""
    if isinstance(value, str):
        return Slot(name=value)
    if isinstance(value, bytes):
        return Slot(data=value)
    if isinstance(value, dict) and value.get("study") is not None:
        return Slot(study=_study_place(value))
    if isinstance(value, dict):
        # Hugging Face writes {"bytes", "path"}, OpenAI {"url"}, others {"type": "base64", "data"}.
        for name in ("bytes", "url", "path", "data", "image", "image_url"):
            inner = value.get(name)
            if name == "data" and isinstance(inner, str):
                return Slot(name=f"data:;base64,{inner}")
            if inner is not None:
                return _slot(inner)
    raise LineError(LineReason.WRONG_TYPE)
