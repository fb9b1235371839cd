"""Picture of one conversation: turns below each other, images in their places, what a model learns tinted.

Needs Pillow (the extra ``view``).
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shardflow.errors import FormatError
from shardflow.format.keys import CONVERSATION_FIELD
from shardflow.logs import counted
from shardflow.viewing.study import generated_mark, place_of
from shardflow.viewing.typeface import FAINT, INK, PAPER, RULE, Typeface, png_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from shardflow.format.dataset import Dataset

_MARGIN: Final = 28
_WIDTH: Final = 1040
_IMAGE_SIDE: Final = 360
_GAP: Final = 8
_MAX_HEIGHT: Final = 12_000
_LEARNED: Final = "#dafbe1"
_SECTIONS: Final = (("messages", ""), ("chosen", "chosen answer"), ("rejected", "rejected answer"))

_Block: TypeAlias = "tuple[Typeface, str, str, str] | list[Image]"
"""A line with its color and its tint, or images beside each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationView:
    """A conversation with its images."""

    sample_key: str
    place: str
    about: Mapping[str, Any]
    """Content of ``conversation.json``."""
    images: Sequence[bytes]
    """JPEG and PNG files, by number."""

    @property
    def generated(self) -> str:
        """Label of generated text, or empty."""
        texts = (part.get("text", "") for turn in self.about["messages"] for part in turn["content"])
        return next((mark for text in texts if (mark := generated_mark(text))), "")


def has_conversation(dataset: Dataset, row: int) -> bool:
    """Return whether a sample is a conversation."""
    return any(field.name == CONVERSATION_FIELD for field in dataset.sample_fields(row)[1])


def read_conversation(dataset: Dataset, row: int) -> ConversationView:
    """Read a conversation for display.

    Raises:
        FormatError: ``conversation.json`` is no description of a conversation.
    """
    about: Any = json.loads(dataset.read_fields(row, [CONVERSATION_FIELD])[CONVERSATION_FIELD])
    if not isinstance(about, dict) or not isinstance(about.get("messages"), list):
        raise FormatError(
            f"{CONVERSATION_FIELD} of samples row {row} describes no conversation (docs/format.md, section "
            "4)."
        )
    names = [entry["member"] for entry in about.get("images", [])]
    payloads = dataset.read_fields(row, names) if names else {}
    return ConversationView(
        sample_key=dataset.samples.sample_key(row),
        place=place_of(dataset, row),
        about=about,
        images=[payloads[name] for name in names],
    )


def render_conversation(view: ConversationView, *, font: Path | None = None) -> bytes:
    """Draw a conversation.

    Args:
        view: From `read_conversation`.
        font: A font file for the text, preferred to those of the system.

    Returns:
        A PNG file. What is learned by default is tinted: the words of assistants, but for turns of weight 0;
        of a document all.

    Raises:
        ConfigError: Pillow is missing, or the font file cannot be read.
        FormatError: An image cannot be decoded.
    """
    body, small, title = Typeface(19, font), Typeface(15, font), Typeface(27, font)
    images = [_decoded(payload) for payload in view.images]
    blocks: list[_Block] = [(title, _title(view), INK, PAPER), (small, _facts(view), FAINT, PAPER)]
    for what, heading in _SECTIONS:
        turns = view.about.get(what, [])
        blocks += [(small, heading.upper(), FAINT, PAPER)] if heading and turns else []
        for turn in turns:
            blocks += _turn_blocks(turn, images, body, small)
    if "answer" in view.about:
        blocks.append((small, "ANSWER TO VERIFY", FAINT, PAPER))
        blocks += [(body, line, INK, PAPER) for line in body.wrap(view.about["answer"], _WIDTH)]
    return _drawn(blocks, view.generated, body, small)


def render_pieces(
    title: str,
    facts: str,
    sections: Sequence[tuple[str, Sequence[tuple[str, float] | int]]],
    pictures: Sequence[Image],
    *,
    font: Path | None = None,
) -> bytes:
    """Draw conversations as a processor renders them, special tokens included; what is learned is tinted.

    Args:
        title: First line.
        facts: Second line.
        sections: Headings, empty for none, and under each the texts with their weight in the loss, and the
            numbers of pictures where the model has them.
        pictures: RGB images.
        font: A font file for the text, preferred to those of the system.

    Returns:
        A PNG file.

    Raises:
        ConfigError: Pillow is missing, or the font file cannot be read.
    """
    body, small, head = Typeface(19, font), Typeface(15, font), Typeface(27, font)
    shown = [one.copy() for one in pictures]
    for one in shown:
        one.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
    blocks: list[_Block] = [(head, title, INK, PAPER), (small, facts, FAINT, PAPER)]
    generated = ""
    for heading, pieces in sections:
        blocks += [(small, heading.upper(), FAINT, PAPER)] if heading else []
        for piece in pieces:
            if isinstance(piece, int):
                blocks.append([shown[piece]])
                continue
            text, weight = piece
            generated = generated or generated_mark(text)
            note = "" if weight in (0.0, 1.0) else f" (weight {weight:g})"
            lines = body.wrap(text.strip("\n") + note, _WIDTH) if text.strip("\n") else []
            blocks += [(body, line, INK, _LEARNED if weight else PAPER) for line in lines]
    return _drawn(blocks, generated, body, small)


def _drawn(blocks: Sequence[_Block], generated: str, body: Typeface, small: Typeface) -> bytes:
    """Draw blocks below each other; returns a PNG file."""
    from PIL import Image, ImageDraw

    heights = [_height(block) for block in blocks]
    height = min(sum(heights) + 2 * _MARGIN, _MAX_HEIGHT)
    sheet = Image.new("RGB", (_WIDTH + 2 * _MARGIN, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    y = _MARGIN
    for block, block_height in zip(blocks, heights, strict=True):
        if y + block_height > height - _MARGIN:
            small.draw(draw, (_MARGIN, y), "(the rest is left out)", fill=FAINT)
            break
        if isinstance(block, list):
            x = _MARGIN
            for image in block:
                sheet.paste(image, (x, y))
                draw.rectangle((x - 1, y - 1, x + image.width, y + image.height), outline=RULE)
                x += image.width + _GAP
        else:
            face, text, color, tint = block
            draw.rectangle((_MARGIN - 6, y, _MARGIN + _WIDTH + 6, y + block_height - 1), fill=tint)
            face.draw(draw, (_MARGIN, y), text, fill=color)
        y += block_height
    if generated:
        body.draw_badge(draw, generated, right=_WIDTH + _MARGIN, top=_MARGIN)
    return png_of(sheet)


def _title(view: ConversationView) -> str:
    return f"{view.about.get('kind', 'conversation').capitalize()} - {view.place}"


def _facts(view: ConversationView) -> str:
    about = view.about
    told = [
        f"form {about.get('form')}",
        counted(len(view.images), "image"),
        *(f"{name} {about[name]}" for name in ("score", "source", "license") if name in about),
        "tinted: learned",
    ]
    return "; ".join(told)


def _turn_blocks(
    turn: Mapping[str, Any], images: Sequence[Image], body: Typeface, small: Typeface
) -> Iterator[_Block]:
    """Lay out a turn: its role, then its texts and images in their order."""
    weight = turn.get("weight", 1)
    is_learned = turn["role"] in ("assistant", "document") and weight > 0
    note = "" if weight == 1 else f" (weight {weight:g})"
    yield small, f"{turn['role'].upper()}{note}", FAINT, PAPER
    row: list[Image] = []
    for part in turn["content"]:
        if part["type"] == "image":
            image = images[part["image"]]
            if sum(one.width + _GAP for one in row) + image.width > _WIDTH:
                yield row
                row = []
            row.append(image)
            continue
        if row:
            yield row
            row = []
        for line in body.wrap(part["text"], _WIDTH):
            yield body, line, INK, _LEARNED if is_learned else PAPER
    if row:
        yield row


def _height(block: _Block) -> int:
    if isinstance(block, list):
        return max(image.height for image in block) + _GAP
    return block[0].line_height


def _decoded(payload: bytes) -> Image:
    """Decode an image as processors of models do, no larger than shown."""
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(payload)) as image:
            is_deep = image.mode.startswith("I")  # 16 bits
            gray = image.point(lambda value: value / 257).convert("L") if is_deep else image
            shown = ImageOps.exif_transpose(gray).convert("RGB")
    except (OSError, ValueError, SyntaxError):
        raise FormatError("an image of a conversation cannot be decoded; run `shardflow verify`.") from None
    shown.thumbnail((_IMAGE_SIDE, _IMAGE_SIDE))
    return shown
