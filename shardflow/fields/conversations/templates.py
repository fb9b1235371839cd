"""Templates: conversations made from the fields and columns of a packed study, as views of it.

A template is a list of turns. The text of a turn names what fills it: ``{facts.sex}`` a column,
``{findings}`` a field of text or of boxes of the same loader, ``<image:frontal>`` the pictures of a field of
images or slices; ``{{`` and ``}}`` are braces. Of several phrasings one is drawn by the key of the plan.
``when`` is an expression over columns and fields; a field is true where the sample has it. Its last turn may
have a ``chosen`` and a ``rejected`` answer in place of a text, which makes pairs. Nothing is stored: a
template changes without a byte of the dataset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.fields.field import FIELD_NAME, DrawKey, Field, check_choice, settings_of
from shardflow.format.keys import Json, canonical_json, sha256_hex

Coordinates: TypeAlias = Literal["thousandths", "pixels", "model"]
Draws: TypeAlias = Literal["epoch", "sample"]
_ROLES: Final = ("system", "user", "assistant")
_PIECE: Final = re.compile(
    r"(?P<brace>\{\{|\}\})|\{(?P<name>[A-Za-z_][\w.]*)(?::(?P<format>[^{}]*))?\}|<image:(?P<image>\w+)>|(?P<slip>[{}])",
    re.ASCII,
)
_FORMAT: Final = re.compile(r"d|(?:\.\d{1,2})?[fg%]", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_EDGES: Final = ("x0", "y0", "x1", "y1")
_ENDS: Final = ("chosen", "rejected")
_WORD: Final = 1 << 64
_MAX_CHARACTERS: Final = 1 << 16
_ASKED: Final = "..."
"""Stands for an answer that is asked for, and is never read."""


class IncompleteError(Exception):
    """A sample lacks what a template names; the message holds none of its values.

    Args:
        message: What it lacks.
        name: Of the field or column that has nothing; empty where no turn applies.
    """

    def __init__(self, message: str, name: str = "") -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of the text of a turn."""

    kind: Literal["text", "value", "image"]
    text: str
    """The text, or the name of a column or field."""
    format: str = ""
    """How a number is written, as in Python: ``.1f``."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Turn of a template."""

    role: Literal["system", "user", "assistant"]
    text: str | tuple[str, ...] = ()
    """What is said; of several phrasings one is drawn for each sample, see `Template.draws`."""
    when: str = ""
    """Expression that must be true, else the turn is left out; empty for always."""
    weight: float = 1.0
    """Multiplies the weight of its tokens in the loss."""
    chosen: str | tuple[str, ...] = ()
    """In place of ``text``, with ``rejected``: the better answer of a pair."""
    rejected: str | tuple[str, ...] = ()
    """The worse answer."""

    def __post_init__(self) -> None:
        check_choice("role", self.role, _ROLES)
        for name in ("text", *_ENDS):
            given: Any = getattr(self, name)
            texts = (given,) if isinstance(given, str) else tuple(given)
            if not all(isinstance(one, str) and one.strip() for one in texts):
                raise ConfigError(
                    f"The {name} of a turn is one phrasing or a list of them, none of them empty."
                )
            object.__setattr__(self, name, texts)
        if bool(self.text) == self.is_pair or bool(self.chosen) != bool(self.rejected):
            raise ConfigError(
                "A turn has a text, or of a pair a chosen and a rejected answer; write text, or both chosen "
                "and rejected."
            )
        if self.is_pair and self.role != "assistant":
            raise ConfigError(f"chosen and rejected are answers, of the role 'assistant', got {self.role!r}.")
        for one in self.phrasings:
            parse_text(one)
        if not isinstance(self.when, str):
            raise ConfigError("when of a turn is an expression, such as \"facts.sex == 'F'\".")
        weight: object = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ConfigError(f"weight of a turn is a number from 0, got {weight!r}.")

    def __repr__(self) -> str:
        return _repr(self, later=_ENDS)

    @property
    def is_pair(self) -> bool:
        """Whether it has two answers."""
        return bool(self.chosen or self.rejected)

    @property
    def phrasings(self) -> tuple[str, ...]:
        """All phrasings of its text, or of its answers."""
        return (*self.text, *self.chosen, *self.rejected)

    @property
    def pieces(self) -> list[Piece]:
        """Parts of all phrasings."""
        return [piece for one in self.phrasings for piece in parse_text(one)]

    @property
    def possible_fields(self) -> set[str]:
        """Names that may be those of fields: they have no dot."""
        named = [one.text for one in self.pieces if one.kind != "text"]
        return {name for name in [*named, *_NAME.findall(self.when)] if FIELD_NAME.fullmatch(name)}

    def first(self) -> Turn:
        """Return the turn with the first phrasing of its text, or of each answer."""
        return replace(self, text=self.text[:1], chosen=self.chosen[:1], rejected=self.rejected[:1])


@dataclass(frozen=True, kw_only=True)
class Template:
    """Template of conversations, for `Conversation`; see docs/howto/templates.md.

    Example::

        sf.Template(turns=[
            {"role": "user", "text": ["<image:frontal>Write the findings.", "<image:frontal>What is seen?"]},
            {"role": "assistant", "text": "{findings}"},
        ])

    Raises:
        ConfigError: A turn is malformed, or the roles cannot follow each other.
    """

    turns: tuple[Turn, ...]
    """Turns in order; mappings in Python, a table ``[[turns]]`` each in TOML."""
    words: dict[str, str] = field(default_factory=dict)
    """What stands for a value of a column or a label of a box, such as ``{F = "woman"}``."""
    coordinates: Coordinates = "thousandths"
    """Of boxes: ``thousandths`` of width and height of the delivered image, its ``pixels``, or pixels of the
    image that the ``model`` sees, which Qwen2.5-VL was trained with."""
    box: str = "[{x0}, {y0}, {x1}, {y1}]"
    """How a box is written; ``{label}`` is its label."""
    separator: str = ", "
    """Between boxes."""
    draws: Draws = "epoch"
    """Of several phrasings one is drawn for each sample: anew in each ``epoch``, or once for each ``sample``,
    which a token budget needs, since the tokens of one were counted."""

    def __post_init__(self) -> None:
        turns: Any = self.turns
        if isinstance(turns, str | Mapping) or not turns:
            raise ConfigError(
                "turns is a list of turns, such as {'role': 'user', 'text': '<image:frontal>What is seen?'}."
            )
        object.__setattr__(self, "turns", tuple(_turn(one) for one in turns))
        check_choice("coordinates", self.coordinates, ("thousandths", "pixels", "model"))
        check_choice("draws", self.draws, ("epoch", "sample"))
        words: Any = self.words
        if not isinstance(words, Mapping) or not all(
            isinstance(one, str) and one for pair in words.items() for one in pair
        ):
            raise ConfigError("words maps values of columns to what is written for them, both texts.")
        named = [piece.text for piece in parse_text(self.box) if piece.kind != "text"]
        if not {*_EDGES} <= {*named} <= {*_EDGES, "label"}:
            raise ConfigError(
                "box names {x0}, {y0}, {x1} and {y1}, and may name {label}, such as "
                "'{label} [{x0}, {y0}, {x1}, {y1}]'."
            )
        roles = [one.role for one in self.turns]
        if "system" in roles[1:]:
            raise ConfigError("The turn of the role 'system' is the first one; move it there.")
        spoken = [one for one in roles if one != "system"]
        if spoken[:1] != ["user"] or spoken[-1] != "assistant":
            raise ConfigError(
                "The first turn is of the role 'user' and the last one of 'assistant'; add what is missing."
            )
        are_pairs = [one.is_pair for one in self.turns]
        if are_pairs != sorted(are_pairs):
            raise ConfigError(
                "chosen and rejected end a conversation, so no turn with a text follows them; move turns "
                "with a text before them, or write two answers there too."
            )

    def __repr__(self) -> str:
        return _repr(self, later=("draws",))

    @property
    def has_pairs(self) -> bool:
        """Whether it makes pairs of a chosen and a rejected conversation."""
        return self.turns[-1].is_pair

    @property
    def varies(self) -> bool:
        """Whether a sample may have other words in another epoch."""
        answers = ((one.text, one.chosen, one.rejected) for one in self.turns)
        return self.draws == "epoch" and any(len(texts) > 1 for each in answers for texts in each)

    @property
    def values(self) -> tuple[str, ...]:
        """Names of columns and fields whose values are written."""
        return self._named("value")

    @property
    def images(self) -> tuple[str, ...]:
        """Names of fields whose pictures are shown."""
        return self._named("image")

    @property
    def possible_fields(self) -> tuple[str, ...]:
        """Names that may be those of fields, ascending."""
        return tuple(sorted({name for one in self.turns for name in one.possible_fields}))

    @property
    def optional_fields(self) -> set[str]:
        """Names that may be those of fields of which only turns with a condition need something."""
        always = {name for one in self.turns if not one.when for name in one.possible_fields}
        return {*self.possible_fields} - always

    @property
    def has_labels(self) -> bool:
        """Whether boxes are written with their labels."""
        return any(piece.text == "label" and piece.kind == "value" for piece in parse_text(self.box))

    def first(self) -> Template:
        """Return the template with the first phrasing of each turn, so that nothing is drawn."""
        return replace(self, turns=tuple(one.first() for one in self.turns))

    def without_answer(self) -> Template:
        """Return the template for samples without an answer: the last question that is said is left open."""
        asked = max(place for place, one in enumerate(self.turns) if one.role == "user")
        return replace(self, turns=(*self.turns[: asked + 1], Turn(role="assistant", text=_ASKED)))

    def _named(self, kind: str) -> tuple[str, ...]:
        found = (piece.text for one in self.turns for piece in one.pieces if piece.kind == kind)
        return tuple(dict.fromkeys(found))

    def compose(
        self,
        draw: DrawKey,
        is_said: Sequence[bool],
        value: Callable[[str, str], str],
        pictures: Callable[[str], Sequence[Any]],
    ) -> tuple[dict[str, Any], list[Any]]:
        """Return a conversation in the stored form, and its pictures.

        Args:
            draw: Key of the choices among phrasings.
            is_said: Whether each turn is said.
            value: Returns what is written for a name, given its format.
            pictures: Returns the pictures of a field.

        Raises:
            IncompleteError: It has no question, or no answer to the last one.
            ValueError: Two turns of one role follow each other.
        """
        shown: list[Any] = []
        places: dict[str, range] = {}

        def written(turn: Turn, texts: Sequence[str], choice: str) -> dict[str, Any]:
            chosen = texts[draw.derive(choice) * len(texts) // _WORD]
            parts: list[dict[str, Any]] = []
            for piece in parse_text(chosen):
                if piece.kind == "image":
                    if piece.text not in places:
                        found = pictures(piece.text)
                        places[piece.text] = range(len(shown), len(shown) + len(found))
                        shown.extend(found)
                    parts += [{"type": "image", "image": place} for place in places[piece.text]]
                    continue
                said = piece.text if piece.kind == "text" else value(piece.text, piece.format)
                if parts and parts[-1]["type"] == "text":
                    parts[-1]["text"] += said
                else:
                    parts.append({"type": "text", "text": said})
            weight = {} if turn.weight == 1 else {"weight": turn.weight}
            return {"role": turn.role, "content": parts, **weight}

        messages: list[dict[str, Any]] = []
        answers: dict[str, list[dict[str, Any]]] = {}
        roles = []
        for number in self._said(is_said):
            turn, choice = self.turns[number], f"template-{number}"
            roles.append(turn.role)
            if turn.is_pair:
                ends = (turn.chosen, turn.rejected)
                answers = {
                    name: [written(turn, texts, f"{choice}-{name}")]
                    for name, texts in zip(_ENDS, ends, strict=True)
                }
            else:
                messages.append(written(turn, turn.text, choice))
        _check_order(roles)
        if self.has_pairs and not answers:
            raise IncompleteError("no pair of the template applies to it")
        if answers and answers["chosen"] == answers["rejected"]:
            raise IncompleteError("its chosen and its rejected answer are the same", "rejected")
        kind = "preference" if answers else "conversation"
        images = [{"member": str(place)} for place in range(len(shown))]
        return {"format_version": 1, "kind": kind, "messages": messages, **answers, "images": images}, shown

    def _said(self, is_said: Sequence[bool]) -> list[int]:
        """Return the numbers of the turns that are said: up to the last question if its answer is asked."""
        found = [number for number, one in enumerate(is_said) if one]
        if self.turns[-1].text != (_ASKED,):
            return found
        asked = [number for number in found if self.turns[number].role == "user"]
        if not asked:
            raise IncompleteError("no question of the template applies to it")
        return [*(number for number in found if number <= asked[-1]), len(self.turns) - 1]

    def write_boxes(
        self,
        boxes: NDArray[np.floating[Any]],
        labels: Sequence[str],
        shown: tuple[int, int],
        seen: tuple[int, int],
    ) -> str:
        """Return how boxes are written.

        Args:
            boxes: ``(M, 4)`` of ``x0, y0, x1, y1`` in pixels of the delivered image.
            labels: Of each box; empty where they are not written.
            shown: Rows and columns of the delivered image.
            seen: Rows and columns that coordinates count.
        """
        rows, columns = (to / of for to, of in zip(seen, shown, strict=True))
        scaled = np.floor(boxes.astype(np.float64) * (columns, rows, columns, rows) + 0.5).astype(np.int64)
        pieces = parse_text(self.box)
        texts = []
        for place, box in enumerate(scaled.tolist()):
            known = dict(zip(_EDGES, map(str, box), strict=True))
            if labels:
                known["label"] = self.words.get(labels[place], labels[place])
            texts.append("".join(one.text if one.kind == "text" else known[one.text] for one in pieces))
        return self.separator.join(texts)

    def write_value(self, value: Any, form: str) -> str:
        """Return how a value of a column is written.

        Args:
            value: Text, number or answer.
            form: How a number is written; empty for all its digits.
        """
        if isinstance(value, bool):
            found = "yes" if value else "no"
        elif isinstance(value, str):
            found = value
        elif form:
            found = format(int(value) if form == "d" else float(value), form)
        elif isinstance(value, int):
            found = str(value)
        else:
            found = np.format_float_positional(value, trim="-")
        return self.words.get(found, found)


def load_template(given: Any) -> Template:
    """Return a template, read from its TOML file if it is the path of one.

    Raises:
        ConfigError: It is neither, or malformed.
    """
    if isinstance(given, Template):
        return given
    if isinstance(given, str | Path):
        return load_config(Template, given)
    raise ConfigError(f"template is the path of a TOML file or an sf.Template, got {type(given).__name__}.")


def template_digest(template: Template, named: Mapping[str, Field]) -> str:
    """Return the identity of a template, with the fields that it names as an evaluation takes them.

    Args:
        template: The template.
        named: Those fields, and the fields that they depend on, by name.
    """
    fields: dict[str, Json] = {
        name: {
            "type": one.type_name or type(one).__qualname__,
            # What a sample lacks makes no conversation of it, whatever becomes of its slot.
            "settings": {**settings_of(replace(one.for_evaluation(), missing="pad"))},
        }
        for name, one in named.items()
    }
    return sha256_hex(canonical_json({"template": repr(template), "fields": fields}))


@lru_cache(maxsize=1 << 10)
def parse_text(text: str) -> tuple[Piece, ...]:
    """Split the text of a turn.

    Raises:
        ConfigError: A brace stands alone, or a format is unknown.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError(
            f"The text of a turn has at most {_MAX_CHARACTERS:,} characters, got {len(text):,}."
        )
    return tuple(_merged(_pieces(text)))


def _pieces(text: str) -> Iterator[Piece]:
    end = 0
    for found in _PIECE.finditer(text):
        if found.start() > end:
            yield Piece("text", text[end : found.start()])
        end = found.end()
        if found["slip"]:
            raise ConfigError(
                f"A brace of a template begins or ends a name, such as {{facts.sex}} or "
                f"{{facts.age_years:.0f}}; write {{{{ or }}}} for the sign itself, at character "
                f"{found.start()} of a turn."
            )
        if found["brace"]:
            yield Piece("text", found["brace"][0])
        elif found["image"]:
            yield Piece("image", found["image"])
        else:
            form = found["format"] or ""
            if found["format"] is not None and not _FORMAT.fullmatch(form):
                raise ConfigError(
                    f"The format of {{{found['name']}}} is one of numbers, such as .1f, got {form!r}."
                )
            yield Piece("value", found["name"], form)
    if end < len(text):
        yield Piece("text", text[end:])


def _merged(pieces: Iterator[Piece]) -> Iterator[Piece]:
    text = ""
    for one in pieces:
        if one.kind == "text":
            text += one.text
            continue
        if text:
            yield Piece("text", text)
            text = ""
        yield one
    if text:
        yield Piece("text", text)


def _turn(given: Any) -> Turn:
    if isinstance(given, Turn):
        return given
    known = {one.name for one in fields(Turn)}
    if not isinstance(given, Mapping) or not {*given} <= known or "role" not in given:
        raise ConfigError(
            "A turn has role and text, or chosen and rejected, and may have when and weight, such as "
            "{'role': 'user', 'text': 'What is seen?'}."
        )
    return Turn(**given)


def _check_order(roles: Sequence[str]) -> None:
    spoken = [one for one in roles if one != "system"]
    if not spoken:
        raise IncompleteError("no turn of the template applies to it")
    for place, role in enumerate(spoken):
        if role != ("user", "assistant")[place % 2]:
            raise ValueError("turns of one role follow each other in its template; check their conditions")
    if spoken[-1] == "user":
        raise IncompleteError("no answer of the template applies to it")


def _repr(given: Turn | Template, *, later: Sequence[str]) -> str:
    """Return what identifies a turn or template; a setting that came later is left out at its default.

    Identities of runs hold it, so that those from before the setting can be resumed.
    """
    values = {one.name: getattr(given, one.name) for one in fields(given)}
    defaults = {one.name: one.default for one in fields(given)}
    shown = [f"{name}={one!r}" for name, one in values.items() if name not in later or one != defaults[name]]
    return f"{type(given).__name__}({', '.join(shown)})"
