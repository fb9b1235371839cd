"""Text drawing with font fallback, and reports with marked findings.

Each character is drawn in the first font that has it, and lines are wrapped to a width in pixels. Each
assertion has its own tint and kind of line, so that the picture can be read without colors. Needs Pillow (the
extra ``view``).
"""

from __future__ import annotations

import io
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

# Usual locations of fonts of many scripts. All are optional: Pillow's own font covers Latin scripts.
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
PAPER, INK, FAINT, RULE, LETTER = "#ffffff", "#1b1f24", "#59636e", "#d1d9e0", "#ffd75e"
"""Colors of the pictures: background, text, notes, lines, and letters on pixels."""
_HEADER, _MENTION, _ALARM = "#0a3069", "#57606a", "#c4320a"


def require_pillow() -> None:
    """Check that Pillow is installed.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL.ImageFont  # noqa: F401
    except ImportError:
        raise ConfigError(
            "drawing text needs Pillow; install the extra: pip install 'shardflow[pack]'."
        ) from None


def png_of(picture: Image) -> bytes:
    """Return a picture as PNG."""
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=False)
    return stream.getvalue()


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
        font: A font file that is preferred to those of the system, or None.

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
            raise ConfigError("--font must be a readable TrueType or OpenType file.") from None

    @property
    def line_height(self) -> int:
        """Pixels from line to line."""
        return round(self.size * 1.42)

    def width(self, text: str) -> float:
        """Return the width of a line in pixels."""
        return sum(float(_load(path, self.size).getlength(run)) for path, run in self._runs(text))

    def draw(self, draw: ImageDraw, place: tuple[float, float], text: str, **style: Any) -> None:
        """Draw a line with its upper left corner at ``(x, y)``."""
        x, y = place
        for path, run in self._runs(text):
            font = _load(path, self.size)
            draw.text((x, y + self.size), run, font=font, anchor="ls", **style)
            x += font.getlength(run)

    def draw_outlined(self, draw: ImageDraw, place: tuple[float, float], text: str, color: str) -> None:
        """Draw a line that is legible on white and on black pixels."""
        self.draw(draw, place, text, fill=color, stroke_width=2, stroke_fill="#000000")

    def draw_badge(self, draw: ImageDraw, text: str, *, right: int, top: int) -> None:
        """Draw white text on a box in the color of warnings."""
        left = right - self.width(text) - 28
        draw.rounded_rectangle((left, top, right, top + self.line_height + 10), radius=8, fill=_ALARM)
        self.draw(draw, (left + 14, top + 7), text, fill="#ffffff")

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


_PIECE = re.compile(r"\S+[^\S\n]*|[^\S\n]+|\n")


_Stroke: TypeAlias = "Callable[[ImageDraw, float, float, float, str], None]"


def _dashes(length: int, gap: int) -> _Stroke:
    """Return a stroke of dashes; without a gap it is solid."""

    def stroke(draw: ImageDraw, left: float, right: float, y: float, color: str) -> None:
        at = left
        while at < right:
            end = min(at + length - 1, right) if gap else right
            draw.line((at, y, end, y), fill=color, width=3)
            at = at + length + gap if gap else right

    return stroke


def _double(draw: ImageDraw, left: float, right: float, y: float, color: str) -> None:
    draw.line((left, y - 1, right, y - 1), fill=color, width=1)
    draw.line((left, y + 2, right, y + 2), fill=color, width=1)


def _strike(draw: ImageDraw, left: float, right: float, y: float, color: str) -> None:
    draw.line((left, y - 10, right, y - 10), fill=color, width=2)


class _Style(NamedTuple):
    tint: str
    line: str
    stroke: _Stroke


# Okabe and Ito's colors, which people of any color vision can distinguish, with tints of them.
ASSERTIONS: Final[Mapping[str, _Style]] = {
    "present": _Style("#cfe6f7", "#0072b2", _dashes(1, 0)),
    "uncertain": _Style("#fce9c4", "#b87400", _dashes(9, 6)),
    "absent": _Style("#e7eaee", "#59636e", _strike),
    "historical": _Style("#f3e0ec", "#a8527f", _dashes(3, 4)),
    "hypothetical": _Style("#d3efe6", "#00795a", _double),
}
"""Style of marked findings, by assertion."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text and its offset in the report."""

    start: int
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A finding in the text."""

    span: tuple[int, int]
    assertion: str
    number: int | None = None
    """Number of the finding's slices beside the report; None if there are none."""

    @property
    def style(self) -> _Style:
        """Style of its assertion."""
        return ASSERTIONS.get(self.assertion, ASSERTIONS["absent"])


def lay_out(text: str, face: Typeface, width: float) -> list[Line]:
    """Break a text into lines of at most a width in pixels, each with its offset."""
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
    """Draw lines downward from ``(x, y)``; spans are character offsets in the report."""
    x, y = place
    for line in lines:
        for span in mentions:
            for left, right in _within(face, line, span, x):
                draw.rectangle((left - 2, y + 1, right + 1, y + face.size + 7), outline=_MENTION, width=1)
        for mark in marks:
            for left, right in _within(face, line, mark.span, x):
                draw.rectangle((left - 1, y + 2, right, y + face.size + 6), fill=mark.style.tint)
        for text, fill, offset in _pieces(face, line, headers):
            face.draw(draw, (x + offset, y), text, fill=fill)
        for mark in marks:
            for left, right in _within(face, line, mark.span, x):
                mark.style.stroke(draw, left, right, y + face.size + 5, mark.style.line)
                if mark.number is not None and mark.span[1] <= line.start + len(line.text):
                    # Raised after the last word, where it hides no letter.
                    tag(draw, small, (right - 2, y - 9), mark.number, mark.style.line)
        y += face.line_height


def tag(draw: ImageDraw, face: Typeface, place: tuple[float, float], number: int, color: str) -> None:
    """Draw the number of a finding in a disc with its upper left corner at ``(x, y)``."""
    words = str(number)
    size = face.size + 3
    x, y = place
    draw.ellipse((x, y, x + size, y + size), fill=color)
    face.draw(draw, (x + (size - face.width(words)) / 2, y - 1), words, fill="#ffffff")


def draw_legend(draw: ImageDraw, face: Typeface, place: tuple[int, int], width: int) -> int:
    """Draw the legend of the marks; return its height in pixels."""
    x, y = place
    for name, style in ASSERTIONS.items():
        wide = face.width(name)
        if x + wide > place[0] + width:
            x, y = place[0], y + face.line_height + 6
        draw.rectangle((x - 1, y + 2, x + wide, y + face.size + 6), fill=style.tint)
        face.draw(draw, (x, y), name, fill=INK)
        style.stroke(draw, x, x + wide, y + face.size + 5, style.line)
        x += round(wide) + 20
    words = "image named"
    if x + face.width(words) > place[0] + width:
        x, y = place[0], y + face.line_height + 6
    draw.rectangle((x - 3, y + 1, x + face.width(words) + 2, y + face.size + 7), outline=_MENTION, width=1)
    face.draw(draw, (x, y), words, fill=FAINT)
    return y - place[1] + face.line_height + 8


def _within(face: Typeface, line: Line, span: tuple[int, int], x: int) -> Iterator[tuple[float, float]]:
    """Yield left and right edge of the part of a span that is on a line."""
    first, last = (
        max(span[0], line.start) - line.start,
        min(span[1], line.start + len(line.text)) - line.start,
    )
    if first < last:
        yield x + face.width(line.text[:first]), x + face.width(line.text[:last].rstrip())


def _pieces(
    face: Typeface, line: Line, headers: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, str, float]]:
    """Cut a line where headers begin and end: text, color, pixels from the left."""
    cuts = {0, len(line.text)}
    for first, last in headers:
        cuts.update(edge - line.start for edge in (first, last) if 0 < edge - line.start < len(line.text))
    places = sorted(cuts)
    for first, last in pairwise(places):
        middle = line.start + first
        is_header = any(begin <= middle < end for begin, end in headers)
        yield line.text[first:last], _HEADER if is_header else INK, face.width(line.text[:first])
