"""Text drawing with font fallback, and reports with marked findings.

Each character is drawn in the first font that has it, and lines are wrapped to a width in pixels. Each
assertion has its own tint and kind of line, so that the picture can be read without colors. Needs Pillow (the
extra ``pack``).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

# Where systems keep fonts of many scripts. None of them is needed: Pillow's own covers Latin scripts.
_SYSTEM_FONTS = (
    "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf",
    "/usr/share/fonts/dejavu-sans-fonts/DejaVuSans.ttf",
    "/usr/share/fonts/truetype/noto/NotoSans-Regular.ttf",
    "/usr/share/fonts/opentype/noto/NotoSansCJK-Regular.ttc",
    "/usr/share/fonts/google-noto-cjk/NotoSansCJK-Regular.ttc",
    "/usr/share/fonts/truetype/wqy/wqy-microhei.ttc",
    "/usr/share/fonts/truetype/wqy/wqy-zenhei.ttc",
    "/usr/share/fonts/truetype/droid/DroidSansFallbackFull.ttf",
)
_NO_CHARACTER = "\U0010fffe"


def require_pillow() -> None:
    """Say which extra is missing.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL.ImageFont  # noqa: F401
    except ImportError:
        raise ConfigError(
            "drawing text must have Pillow, got none; install the extra: pip install 'shardflow[pack]'."
        ) from None


@lru_cache(maxsize=64)
def _load(path: str, size: int) -> Any:
    from PIL import ImageFont

    if not path:
        return ImageFont.load_default(size)
    return ImageFont.truetype(path, size)


@lru_cache(maxsize=64)
def _missing_glyph(path: str, size: int) -> bytes:
    return bytes(_load(path, size).getmask(_NO_CHARACTER))


@lru_cache(maxsize=65536)
def _has(path: str, size: int, character: str) -> bool:
    return character.isspace() or bytes(_load(path, size).getmask(character)) != _missing_glyph(path, size)


@dataclass(slots=True)
class Typeface:
    """One size of text.

    Args:
        size: Height of a line's letters in pixels.
        font: A font file that is asked first, or None.

    Raises:
        ConfigError: The font file cannot be read, or Pillow is missing.
    """

    size: int
    font: Path | None = None
    _fonts: list[str] = field(init=False)
    missing: set[str] = field(init=False, default_factory=set)
    """Characters that no font has; they are drawn as a box."""

    def __post_init__(self) -> None:
        require_pillow()
        self._fonts = ([str(self.font)] if self.font else []) + [
            path for path in _SYSTEM_FONTS if Path(path).is_file()
        ]
        self._fonts.append("")
        try:
            _load(self._fonts[0], self.size)
        except OSError:
            raise ConfigError("--font must be a TrueType or OpenType file, got another one.") from None

    @property
    def line_height(self) -> int:
        """Pixels from line to line."""
        return round(self.size * 1.42)

    def width(self, text: str) -> float:
        """Return the width of a line in pixels."""
        return sum(float(_load(path, self.size).getlength(run)) for path, run in self._runs(text))

    def draw(self, draw: ImageDraw, place: tuple[float, float], text: str, **style: Any) -> None:
        """Draw a line whose upper left corner lies at a place ``(x, y)``."""
        x, y = place
        for path, run in self._runs(text):
            font = _load(path, self.size)
            draw.text((x, y + self.size), run, font=font, anchor="ls", **style)
            x += font.getlength(run)

    def wrap(self, text: str, width: float) -> list[str]:
        """Break text into lines of at most a width in pixels; control characters become spaces."""
        lines: list[str] = []
        for paragraph in text.replace("\r\n", "\n").replace("\r", "\n").replace("\t", "    ").split("\n"):
            plain = "".join(" " if unicodedata.category(c) in {"Cc", "Cs"} else c for c in paragraph)
            lines += self._wrap_paragraph(plain.rstrip(), width)
        return lines

    def _wrap_paragraph(self, text: str, width: float) -> Iterator[str]:
        line = ""
        for word in _words(text):
            if line and self.width(line + word.rstrip()) > width:
                yield line.rstrip()
                line = ""
            while self.width(word.rstrip()) > width:
                cut = self._longest(word, width)
                yield word[:cut]
                word = word[cut:]
            line += word
        yield line.rstrip()

    def _longest(self, word: str, width: float) -> int:
        """Return how many characters of an overlong word fit, at least one."""
        low, high = 1, len(word)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.width(word[:middle]) <= width else (low, middle - 1)
        return low

    def _runs(self, text: str) -> Iterator[tuple[str, str]]:
        """Split a line into pieces of one font."""
        start, current = 0, None
        for place, character in enumerate(text):
            path = self._font_of(character)
            if current is not None and path != current:
                yield current, text[start:place]
                start = place
            current = path
        if current is not None:
            yield current, text[start:]

    def _font_of(self, character: str) -> str:
        for path in self._fonts:
            if _has(path, self.size, character):
                return path
        self.missing.add(character)
        return self._fonts[0]


def _words(text: str) -> Iterator[str]:
    """Split text after its spaces, and around every character of a script that is written without them."""
    word = ""
    for character in text:
        is_wide = unicodedata.east_asian_width(character) in {"W", "F"}
        if word and (is_wide or (word[-1].isspace() and not character.isspace())):
            yield word
            word = ""
        word += character
    if word:
        yield word


_INK, _HEADER, _FAINT = "#1b1f24", "#0a3069", "#59636e"
_MENTION = "#57606a"
_PIECE = re.compile(r"\S+[^\S\n]*|[^\S\n]+|\n")


@dataclass(frozen=True, slots=True)
class _Style:
    tint: str
    line: str


# Okabe and Ito's colours, which people of any colour vision tell apart, with tints of them.
ASSERTIONS: Final[Mapping[str, _Style]] = {
    "present": _Style("#cfe6f7", "#0072b2"),
    "uncertain": _Style("#fce9c4", "#b87400"),
    "absent": _Style("#e7eaee", "#59636e"),
    "historical": _Style("#f3e0ec", "#a8527f"),
    "hypothetical": _Style("#d3efe6", "#00795a"),
}
"""How findings are marked, by assertion."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text and where it begins in the report."""

    start: int
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A finding in the text."""

    span: tuple[int, int]
    assertion: str
    number: int | None = None
    """Of the finding's slices beside the report; None where there are none."""


def lay_out(text: str, face: Typeface, width: float) -> list[Line]:
    """Break a text into lines of at most a width in pixels, each with its place."""
    lines: list[Line] = []
    start, line, used = 0, "", 0.0
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece == "\n":
            lines.append(Line(start, line))
            start, line, used = match.end(), "", 0.0
            continue
        wide = face.width(piece)
        if line and used + face.width(piece.rstrip()) > width:
            lines.append(Line(start, line))
            start, line, used = match.start(), "", 0.0
        line, used = line + piece, used + wide
    lines.append(Line(start, line))
    return [
        one
        for number, one in enumerate(lines)
        if one.text.strip() or (number and lines[number - 1].text.strip())
    ]


def draw_lines(
    draw: ImageDraw,
    face: Typeface,
    small: Typeface,
    place: tuple[int, int],
    lines: Sequence[Line],
    marks: Sequence[Mark],
    headers: Sequence[tuple[int, int]],
    mentions: Sequence[tuple[int, int]],
) -> None:
    """Draw lines from a place ``(x, y)`` down; spans are characters of the report."""
    x, y = place
    for line in lines:
        for span in mentions:
            for left, right in _within(face, line, span, x):
                draw.rectangle((left - 2, y + 1, right + 1, y + face.size + 7), outline=_MENTION, width=1)
        for mark in marks:
            style = ASSERTIONS.get(mark.assertion, ASSERTIONS["absent"])
            for left, right in _within(face, line, mark.span, x):
                draw.rectangle((left - 1, y + 2, right, y + face.size + 6), fill=style.tint)
        for text, fill, offset in _pieces(face, line, headers):
            face.draw(draw, (x + offset, y), text, fill=fill)
        for mark in marks:
            for left, right in _within(face, line, mark.span, x):
                _LINES.get(mark.assertion, _strike)(
                    draw,
                    left,
                    right,
                    y + face.size + 5,
                    ASSERTIONS.get(mark.assertion, ASSERTIONS["absent"]).line,
                )
                if mark.number is not None and mark.span[1] <= line.start + len(line.text):
                    # Raised behind the last word, where it hides no letter.
                    tag(draw, small, (right - 2, y - 9), mark.number, mark.assertion)
        y += face.line_height


def tag(draw: ImageDraw, face: Typeface, place: tuple[float, float], number: int, assertion: str) -> None:
    """Draw the number of a finding in a disc whose upper left corner lies at a place."""
    words = str(number)
    size = face.size + 3
    x, y = place
    draw.ellipse((x, y, x + size, y + size), fill=ASSERTIONS.get(assertion, ASSERTIONS["absent"]).line)
    face.draw(draw, (x + (size - face.width(words)) / 2, y - 1), words, fill="#ffffff")


def draw_legend(draw: ImageDraw, face: Typeface, place: tuple[int, int], width: int) -> int:
    """Draw what the marks mean; return the height."""
    x, y = place
    for name, style in ASSERTIONS.items():
        wide = face.width(name)
        if x + wide > place[0] + width:
            x, y = place[0], y + face.line_height + 6
        draw.rectangle((x - 1, y + 2, x + wide, y + face.size + 6), fill=style.tint)
        face.draw(draw, (x, y), name, fill=_INK)
        _LINES[name](draw, x, x + wide, y + face.size + 5, style.line)
        x += round(wide) + 20
    words = "image named"
    if x + face.width(words) > place[0] + width:
        x, y = place[0], y + face.line_height + 6
    draw.rectangle((x - 3, y + 1, x + face.width(words) + 2, y + face.size + 7), outline=_MENTION, width=1)
    face.draw(draw, (x, y), words, fill=_FAINT)
    return y - place[1] + face.line_height + 8


def _within(face: Typeface, line: Line, span: tuple[int, int], x: int) -> Iterator[tuple[float, float]]:
    """Give left and right of what a line holds of a span."""
    first, last = (
        max(span[0], line.start) - line.start,
        min(span[1], line.start + len(line.text)) - line.start,
    )
    if first < last:
        yield x + face.width(line.text[:first]), x + face.width(line.text[:last].rstrip())


def _pieces(
    face: Typeface, line: Line, headers: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, str, float]]:
    """Cut a line where headers begin and end: text, colour, pixels from the left."""
    cuts = {0, len(line.text)}
    for first, last in headers:
        cuts.update(edge - line.start for edge in (first, last) if 0 < edge - line.start < len(line.text))
    places = sorted(cuts)
    for first, last in pairwise(places):
        middle = line.start + first
        is_header = any(begin <= middle < end for begin, end in headers)
        yield line.text[first:last], _HEADER if is_header else _INK, face.width(line.text[:first])


def _solid(draw: ImageDraw, left: float, right: float, y: float, colour: str) -> None:
    draw.line((left, y, right, y), fill=colour, width=3)


def _dashed(draw: ImageDraw, left: float, right: float, y: float, colour: str) -> None:
    _strokes(draw, left, right, y, colour, 9, 6)


def _dotted(draw: ImageDraw, left: float, right: float, y: float, colour: str) -> None:
    _strokes(draw, left, right, y, colour, 3, 4)


def _double(draw: ImageDraw, left: float, right: float, y: float, colour: str) -> None:
    draw.line((left, y - 1, right, y - 1), fill=colour, width=1)
    draw.line((left, y + 2, right, y + 2), fill=colour, width=1)


def _strike(draw: ImageDraw, left: float, right: float, y: float, colour: str) -> None:
    draw.line((left, y - 10, right, y - 10), fill=colour, width=2)


def _strokes(
    draw: ImageDraw, left: float, right: float, y: float, colour: str, length: int, gap: int
) -> None:
    at = left
    while at < right:
        draw.line((at, y, min(at + length - 1, right), y), fill=colour, width=3)
        at += length + gap


_LINES: Final[Mapping[str, Callable[[Any, float, float, float, str], None]]] = {
    "absent": _strike,
    "historical": _dotted,
    "hypothetical": _double,
    "present": _solid,
    "uncertain": _dashed,
}
