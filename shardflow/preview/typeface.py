"""Text in any script: each character in the first font that has it, wrapped to a width in pixels.

Needs Pillow (the extra ``pack``).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

__all__ = ["Typeface", "require_pillow"]

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
