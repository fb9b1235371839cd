"""HL7 version 2 messages: segments, fields, escapes.

Owns the syntax alone (HL7 v2.5.1, chapter 2). Read as it is met and not as it should be: any line end, lines
that were broken inside a field, segments that were put on one line, several messages in a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Message", "Segment", "Separators", "decode_message", "read_messages", "unescape"]

_LINE_END: Final = re.compile(r"\r\n|\r|\n")
_SEGMENT: Final = re.compile(r"[A-Z][A-Z0-9]{2}(?=[^\w\s]|$)")
_INLINE: Final = re.compile(
    r"(?:(?<=[ \t])|(?<=\|))(?=(?:MSH|PID|PV1|ORC|OBR|NTE|NK1|ZDS)\|)|(?<=[ \t|])(?=OBX\|\d)"
)
"""Where a segment begins on the line of another; its separator would be escaped inside a field."""
_NOT_DATA: Final = frozenset({"BHS", "BTS", "FHS", "FTS"})
_ESCAPE: Final = re.compile(r"\\([EFHNRST]|X[0-9A-Fa-f]*|[CMZ][0-9A-Za-z]*|\.[a-z]{2} ?[+-]?\d*)\\")
"""What is none of them, such as the path of a file, stays as it is."""
_MAX_BLANK_LINES: Final = 20
_DEFAULT_SEPARATORS: Final = "|^~\\&"


@dataclass(frozen=True, kw_only=True, slots=True)
class Separators:
    """MSH-1 and MSH-2."""

    field: str = "|"
    component: str = "^"
    repetition: str = "~"
    escape: str = "\\"
    subcomponent: str = "&"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment; fields are numbered as the standard numbers them, from 1."""

    name: str
    fields: tuple[str, ...] = field(repr=False)
    separators: Separators = field(repr=False)

    def raw(self, number: int) -> str:
        """A field with its separators and escapes; ``""`` where absent."""
        return self.fields[number - 1] if 0 < number <= len(self.fields) else ""

    def repetitions(self, number: int) -> list[str]:
        """The repetitions of a field, raw."""
        text = self.raw(number)
        return text.split(self.separators.repetition) if text else []

    def components(self, number: int) -> Iterator[list[str]]:
        """The components of each repetition of a field, without escapes."""
        for one in self.repetitions(number):
            yield [self.plain(part) for part in one.split(self.separators.component)]

    def get(self, number: int, component: int = 1) -> str:
        """A component of the first repetition of a field, without escapes, its space made single."""
        first = next(self.components(number), [])
        return " ".join(first[component - 1].split()) if component <= len(first) else ""

    def plain(self, text: str) -> str:
        """Resolve the escapes of a text."""
        return unescape(text, self.separators)


@dataclass(frozen=True, slots=True)
class Message:
    """The segments between one MSH and the next; of a file without one, all."""

    segments: tuple[Segment, ...] = field(repr=False)

    def of(self, *names: str) -> Iterator[Segment]:
        """Segments of some names, in order."""
        return (segment for segment in self.segments if segment.name in names)


def decode_message(data: bytes) -> str:
    """Decode by what the bytes are: UTF-8 where they are that, else Latin-1, the sets of most senders."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def read_messages(text: str) -> Iterator[Message]:
    """Cut a text into messages.

    Frames of the minimal lower layer protocol around messages are taken off.
    """
    separators, segments = _separators(_DEFAULT_SEPARATORS), list[Segment]()
    for line in _lines(text):
        name = line[:3]
        if name == "MSH":
            if segments:
                yield Message(tuple(segments))
                segments = []
            separators = _separators(line[3:8])
        if name in _NOT_DATA:
            continue
        parts = line.split(separators.field)
        # The separator itself is MSH-1.
        fields = (separators.field, *parts[1:]) if name == "MSH" else tuple(parts[1:])
        segments.append(Segment(name, tuple(part.strip() for part in fields), separators))
    if segments:
        yield Message(tuple(segments))


def unescape(text: str, separators: Separators = Separators()) -> str:
    r"""Resolve the escapes of a text; formatting becomes line ends, what is unknown disappears.

    Example:
        >>> unescape(r"A \T\ B\.br\C\H\!\N\\X41\ ")
        'A & B\nC!A '
    """
    if separators.escape not in text:
        return text
    marked = text if separators.escape == "\\" else text.replace(separators.escape, "\\")

    def resolve(match: re.Match[str]) -> str:
        code = match[1]
        meanings = {
            "F": separators.field,
            "S": separators.component,
            "T": separators.subcomponent,
            "R": separators.repetition,
            "E": separators.escape,
        }
        if code in meanings:
            return meanings[code]
        if code[0] == "X":
            return _hexadecimal(code[1:])
        if code[0] == ".":
            return _formatting(code[1:])
        return ""

    return _ESCAPE.sub(resolve, marked)


def _hexadecimal(digits: str) -> str:
    if len(digits) % 2:
        return ""
    text = decode_message(bytes.fromhex(digits))
    return "".join(
        sign for sign in text.replace("\r\n", "\n").replace("\r", "\n") if sign >= " " or sign == "\n"
    )


def _formatting(command: str) -> str:
    """HL7 v2.5.1, 2.7.6: line breaks, spaces, indents."""
    match = re.fullmatch(r"(br|sp|ce|in|ti|sk|fi|nf)\s*([+-]?\d{1,4})?", command)
    if match is None:
        return ""
    count = min(max(int(match[2] or 1), 1), _MAX_BLANK_LINES)
    if match[1] in {"br", "ce", "sp"}:
        return "\n" * (count if match[1] == "sp" else 1)
    return " " * count if match[1] == "sk" else ""


def _separators(text: str) -> Separators:
    given = text.ljust(5)
    if given[0].isalnum() or given[0].isspace():
        given = _DEFAULT_SEPARATORS
    # A field that ends early leaves the rest as usual; a doubled escape is a slip of whoever wrote it down.
    signs = given[1:].split(given[0])[0].replace("\\\\", "\\")
    signs = "".join(
        sign if not (sign.isspace() or sign.isalnum()) else default
        for sign, default in zip(signs.ljust(4), _DEFAULT_SEPARATORS[1:], strict=False)
    )
    return Separators(
        field=given[0], component=signs[0], repetition=signs[1], escape=signs[2], subcomponent=signs[3]
    )


def _lines(text: str) -> Iterator[str]:
    """Segments as lines: broken ones joined (their line ends stay), joined ones cut."""
    waiting = ""
    for line in _LINE_END.split(text.replace("\x0b", "").replace("\x1c", "")):
        if _SEGMENT.match(line.lstrip()):
            if waiting:
                yield from _cut(waiting)
            waiting = line.lstrip()
        elif waiting and line.strip():
            waiting += "\n" + line.strip()
    if waiting:
        yield from _cut(waiting)


def _cut(line: str) -> Iterator[str]:
    """Cut a line at segments that begin inside it."""
    yield from (part.strip(" \t") for part in _INLINE.split(line) if part.strip(" \t"))
