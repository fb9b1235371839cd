"""Text in pixels: found and read on a CPU, so that what is burned into an image can be blanked.

A text detector (PP-OCR, differentiable binarization: Liao et al. 2020) marks the pixels of lines of text,
in the whole range of values and in that of most of them: letters in white are found in the one, faint ones
in the other. Large images are searched in tiles at full resolution and once as a whole; small ones are
enlarged. Small lines are searched again, turned upright and enlarged: the first search finds only parts of
those that are vertical or faint. What it marks is text to be blanked. A reader (CTC) decides on weak marks,
and keeps markers that identify nobody, such as the side.

The models are files in the wheel of `rapidocr` and run in onnxruntime, one thread, without a network;
nothing else of rapidocr is imported. Both are in the extra ``pixels``.

Pages of text among images (dose reports, protocols, screen saves) are recognized without a model: a page is
mostly of one value, and on it small connected shapes of one height follow each other in lines. Pictures
with a few lines of text are no pages.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.packing.deid.pixel_rules import Box

_PAGE_SIDE: Final = 1024
_MIN_PAPER: Final = 0.6
"""Least share of the most frequent value."""
_NEAR: Final = 10
_INK: Final = 56
"""Differences in 8 bits from that value: of paper at most, of ink at least."""
_LETTER_PX: Final = (4, 40)
_MIN_LINES: Final = 5
_MIN_LETTERS: Final = 60
_PER_LINE: Final = 5


def is_page(pixels: NDArray[Any]) -> bool:
    """Return whether an image is a page of text.

    Args:
        pixels: ``(rows, columns)`` or ``(rows, columns, 3)``, of any dtype.
    """
    gray = _gray(pixels)
    if gray is None:
        return False
    paper = int(np.bincount(gray.ravel(), minlength=256).argmax())
    distance = np.abs(gray.astype(np.int16) - paper)
    if (distance <= _NEAR).mean() < _MIN_PAPER:
        return False
    letters = _letters((distance >= _INK).astype(np.uint8))
    lines = _lines(letters)
    return len(lines) >= _MIN_LINES and sum(lines) >= _MIN_LETTERS


def _gray(pixels: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return an image in 8 bits and at most `_PAGE_SIDE` pixels; None for one of a single value."""
    plane = pixels.astype(np.float32)
    if plane.ndim == 3:
        plane = plane.mean(axis=2)
    low, high = float(plane.min()), float(plane.max())
    if not high > low:
        return None
    gray = ((plane - low) * (255 / (high - low))).astype(np.uint8)
    scale = _PAGE_SIDE / max(gray.shape)
    if scale < 1:
        gray = cv2.resize(gray, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    return np.asarray(gray, np.uint8)


def _letters(ink: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return what may be letters, ``(n, 4)``: left, top, width, height."""
    count, _, stats, _ = cv2.connectedComponentsWithStats(ink, connectivity=8)
    boxes = np.asarray(stats[1:count], np.int64)
    width, height, area = boxes[:, 2], boxes[:, 3], boxes[:, 4]
    low, high = _LETTER_PX
    is_letter = (height >= low) & (height <= high) & (width <= 2 * height) & (area >= 0.15 * width * height)
    is_letter &= (area >= 5) & (area < 0.95 * width * height + 3)
    letters: NDArray[np.int64] = boxes[is_letter][:, :4]
    return letters


def _lines(letters: NDArray[np.int64]) -> list[int]:
    """Return the numbers of letters of the lines: neighbors on one base line, of like height."""
    found: list[int] = []
    order = np.lexsort((letters[:, 0], letters[:, 1] + letters[:, 3]))
    letters = letters[order]
    bottoms = letters[:, 1] + letters[:, 3]
    taken = np.zeros(len(letters), bool)
    for first in range(len(letters)):
        if taken[first]:
            continue
        height = letters[first, 3]
        stop = np.searchsorted(bottoms, bottoms[first] + max(2, height // 4), side="right")
        row = np.arange(first, stop)
        like = (letters[row, 3] >= 0.6 * height) & (letters[row, 3] <= 1.7 * height) & ~taken[row]
        row = row[like]
        row = row[np.argsort(letters[row, 0], kind="stable")]
        ends = letters[row, 0] + letters[row, 2]
        gaps = letters[row[1:], 0] - ends[:-1]
        for word in np.split(row, np.flatnonzero(gaps > 4 * height) + 1):
            if len(word) >= _PER_LINE:
                taken[word] = True
                found.append(len(word))
    return found


MARKERS: Final = (
    "L", "R", "LT", "RT", "LEFT", "RIGHT", "LI", "RE", "LINKS", "RECHTS", "AP", "PA", "LAT", "LL", "RL",
    "OBL", "A", "P", "H", "F", "S", "I", "LCC", "RCC", "LMLO", "RMLO", "CC", "MLO", "LML", "RML", "LXCCL",
    "RXCCL", "SUPINE", "PRONE", "ERECT", "UPRIGHT", "DECUB", "PORTABLE",
)  # fmt: skip
"""Texts that identify nobody and say where an image shows what."""

_MODELS: Final = {"detector": "*_det_*.onnx", "reader": "*_rec_*.onnx"}
_STEP: Final = 32
"""Sides of what the detector reads are multiples of it."""
_SIDE: Final = 1280
_OVERLAP: Final = 192
_COARSE: Final = 960
_GROWTH: Final = 2.0, 3.0, 1024
"""Enlargement of small images, and of those that are no larger than so many pixels afterwards."""
_INNER: Final = (1.0, 99.0)
_NOISE_PX: Final = 0.8
_SURROUNDINGS_PX: Final = 8.0
_LEVEL: Final = 0.2
"""Least probability of a pixel of text."""
_MIN_SCORE: Final = 0.5
"""Least mean probability of a line that is blanked without being read,"""
_WEAK_SCORE: Final = 0.35
"""and of one that is, if the reader finds letters in it."""
_MIN_THICK_PX: Final = 3.0
_MAX_THICK: Final = 24.0, 0.035
"""Height of the core of a line, in pixels or as a share of the longer side, whichever is more, from which it
must be read in any case: bodies look like large letters,"""
_MOST: Final = 0.3
"""and as a share of the shorter side, from which it is none."""
_LARGE: Final = 14.0, 0.018
"""Likewise, from which a line must be read unless it is marked without doubt: spines look like lines."""
_SURE_SCORE: Final = 0.9
_HUGE: Final = 0.12
"""Height as a share of the shorter side of an image from which a line must be read, too: in small images
bodies look like letters without doubt."""
_UNCLIP: Final = 0.8
"""The detector marks the core of a line, which shrinks by a share of its height (ratio 1.6, the paper)."""
_ALONG: Final = 2.0
"""Likewise at its ends, where it misses letters that stand apart."""
_SMALL_PX: Final = 8.0
"""Height of the core of a line below which it is searched again, closer,"""
_CLOSE_PX: Final = 12.0
"""the height that it is enlarged to,"""
_REACH: Final = 20.0, 2.5
"""and how far the search goes beyond its ends and its sides, as multiples of its height."""
_LONG: Final = 1.6
"""Least ratio of the sides of a mark that tells how its line runs."""
_READ_HEIGHT: Final = 48
_MAX_READ_WIDTH: Final = 1600
_MIN_READ: Final = 0.6
_MIN_MARKER: Final = 0.9
_SIGNS: Final = re.compile(r"[^A-Z0-9]+")
_MAX_FRAMES: Final = 16
"""Frames of a cine that are searched one by one."""
_PAGE_LINES: Final = 16
_PAGE_SHARE: Final = 0.12


def as_marker(text: str) -> str:
    """Return a text in capitals and digits alone.

    Example:
        >>> as_marker("R-MLO ")
        'RMLO'
    """
    return _SIGNS.sub("", text.upper())


@dataclass(frozen=True, slots=True)
class FoundText:
    """Text in one image."""

    boxes: tuple[Box, ...]
    """What is to be blanked, sorted."""
    kept: tuple[Box, ...]
    """Markers."""
    is_page: bool
    """Whether the image is a page of text rather than a picture."""


class _Core(NamedTuple):
    """The smallest rectangle around the core of a line: center ``(x, y)``, and length and direction."""

    center: tuple[float, float]
    length_px: float
    degrees: float


@dataclass(frozen=True, slots=True)
class _Line:
    box: Box
    score: float
    window: int
    height_px: float
    sure_score: float
    """Least score from which it is text without being read."""
    core: _Core

    @property
    def is_sure(self) -> bool:
        """Whether it is text without being read."""
        return self.score >= self.sure_score


class TextFinder:
    """Finder of text: detector and reader.

    Args:
        keep: Texts that stay, as `as_marker` returns them.

    Raises:
        ConfigError: The models are not installed.
    """

    def __init__(self, keep: Collection[str] = MARKERS) -> None:
        self._keep = frozenset(keep)
        self._detector = _session("detector")
        self._reader = _session("reader")
        names = self._reader.get_modelmeta().custom_metadata_map["character"].split("\n")
        self._letters = ("", *names, " ")

    def find(self, pixels: NDArray[Any]) -> FoundText:
        """Find the text of an image.

        Args:
            pixels: ``(rows, columns)`` or ``(rows, columns, 3)``, of any dtype.
        """
        windows = _windows(pixels)
        lines = [line for number, window in enumerate(windows) for line in self._lines(window, number)]
        mask, kept = np.zeros(pixels.shape[:2], np.uint8), list[Box]()
        for group in _overlapping(lines, pixels.shape[:2]):
            texts = [one for one in group if one.is_sure or self._has_letters(windows[one.window], one.box)]
            texts += self._seen_closer(windows, group, is_text=bool(texts))
            if texts and self._is_marker(windows, texts, _around(texts)):
                kept.append(_around(texts))
                continue
            for line in texts:
                top, left, bottom, right = line.box
                mask[top:bottom, left:right] = 1
        boxes = _boxes(mask)
        is_full = len(boxes) >= _PAGE_LINES and float(mask.mean()) > _PAGE_SHARE
        return FoundText(boxes, tuple(sorted(kept)), is_full or is_page(pixels))

    def find_in_frames(self, frames: Iterable[NDArray[Any]], num_frames: int) -> FoundText:
        """Find the text of an image of several frames; what one of them shows is to be blanked in all.

        Frames spread over the cine are searched, and the largest and the smallest value of each pixel over
        all frames, in which text stands that is shown all the time or over dark or bright places.

        Args:
            frames: Each like the image of `find`; taken one by one.
            num_frames: Number of frames.
        """
        places = np.linspace(0, num_frames - 1, min(num_frames, _MAX_FRAMES))
        chosen = set(places.round().astype(int).tolist())
        found: list[FoundText] = []
        highest: NDArray[Any] | None = None
        lowest: NDArray[Any] | None = None
        for number, pixels in enumerate(frames):
            if number in chosen:
                found.append(self.find(pixels))
            highest = pixels if highest is None else np.maximum(highest, pixels)
            lowest = pixels if lowest is None else np.minimum(lowest, pixels)
        if num_frames > len(chosen) and highest is not None and lowest is not None:
            found += [self.find(highest), self.find(lowest)]
        if len(found) == 1:
            return found[0]
        boxes = sorted({box for one in found for box in one.boxes})
        kept = sorted({box for one in found for box in one.kept})
        return FoundText(_merged(boxes), tuple(kept), any(one.is_page for one in found))

    def _lines(self, window: NDArray[np.uint8], number: int) -> Iterator[_Line]:
        """Yield what looks like lines of text in an image in 8 bits."""
        rows, columns = window.shape[:2]
        longest = max(rows, columns)
        if longest <= _SIDE:
            usual, most, side = _GROWTH
            scale = min(_SIDE / longest, max(usual, min(most, side / longest)))
            grown = cv2.resize(window, None, fx=scale, fy=scale, interpolation=cv2.INTER_CUBIC)
            yield from self._detect(grown, (0, 0), scale, (rows, columns), number)
            return
        scale = _COARSE / longest
        coarse = cv2.resize(window, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        yield from self._detect(coarse, (0, 0), scale, (rows, columns), number)
        for top in _starts(rows):
            for left in _starts(columns):
                tile = window[top : top + _SIDE, left : left + _SIDE]
                yield from self._detect(tile, (top, left), 1.0, (rows, columns), number)

    def _detect(
        self,
        part: NDArray[np.uint8],
        corner: tuple[int, int],
        scale: float,
        shape: Sequence[int],
        number: int,
    ) -> Iterator[_Line]:
        """Detect lines in a part of an image of some shape that starts at a corner of it and is scaled."""
        shortest, longest = min(shape), max(shape)
        rows, columns = part.shape[:2]
        padded = cv2.copyMakeBorder(part, 0, -rows % _STEP, 0, -columns % _STEP, cv2.BORDER_REPLICATE)
        tensor = _tensor(padded)
        (answer,) = self._detector.run(None, {self._detector.get_inputs()[0].name: tensor})
        probability = answer[0, 0, :rows, :columns]
        binary = (probability > _LEVEL).astype(np.uint8)
        count, labels, stats, _ = cv2.connectedComponentsWithStats(binary, connectivity=8)
        for at in range(1, count):
            left, top, width, height, _area = (int(one) for one in stats[at])
            inside = (labels[top : top + height, left : left + width] == at).astype(np.uint8)
            points = cv2.findNonZero(inside)
            center, sides, degrees = cv2.minAreaRect(points)
            thick = min(sides) + 1.0
            height_px = thick / scale
            is_thick = height_px > _limit(_MAX_THICK, longest)
            if thick < _MIN_THICK_PX or (is_thick and height_px > _MOST * shortest):
                continue
            score = float(probability[top : top + height, left : left + width][inside > 0].mean())
            if score < _WEAK_SCORE:
                continue
            down = (_ALONG if height > 2 * width else _UNCLIP) * thick + 1
            across = (_ALONG if width > 2 * height else _UNCLIP) * thick + 1
            box = (
                max(0, int((top - down) / scale)) + corner[0],
                max(0, int((left - across) / scale)) + corner[1],
                int(np.ceil(min(rows, top + height + down) / scale)) + corner[0],
                int(np.ceil(min(columns, left + width + across) / scale)) + corner[1],
            )
            core = _Core(
                ((left + center[0]) / scale + corner[1], (top + center[1]) / scale + corner[0]),
                (max(sides) + 1.0) / scale,
                degrees + 90.0 * (sides[1] > sides[0]),
            )
            sure_score = _SURE_SCORE if height_px > _limit(_LARGE, longest) else _MIN_SCORE
            if is_thick or height_px > _HUGE * shortest:
                sure_score = math.inf
            yield _Line(box, score, number, height_px, sure_score, core)

    def _seen_closer(
        self, windows: Sequence[NDArray[np.uint8]], group: Sequence[_Line], *, is_text: bool
    ) -> Iterator[_Line]:
        """Search the best mark of a small line again; what is no text yet must be read, too."""
        best = max(group, key=lambda line: line.score)
        if best.height_px >= _SMALL_PX:
            return
        window, core = windows[best.window], best.core
        is_long = core.length_px >= _LONG * best.height_px
        for degrees in (core.degrees,) if is_long else (0.0, 90.0):
            along, across = _REACH
            length = core.length_px + 2 * along * best.height_px
            height = best.height_px * (1 + 2 * across)
            straight = _straight(core.center, degrees, length, height)
            zoom = _CLOSE_PX / best.height_px
            size = round(length * zoom), round(height * zoom)
            part = cv2.warpAffine(
                window, zoom * straight, size, flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
            )
            part = np.asarray(part, np.uint8)
            for line in self._detect(part, (0, 0), zoom, window.shape[:2], best.window):
                top, _, bottom, _ = line.box
                is_beside = bottom < height / 2 or top > height / 2
                if is_beside or not line.is_sure:
                    continue
                box = _placed(line.box, straight, window.shape)
                if box is None:
                    continue
                if is_text or self._has_letters(part, _scaled(line.box, zoom, part.shape)):
                    yield replace(line, box=box)

    def _has_letters(self, window: NDArray[np.uint8], box: Box) -> bool:
        """Return whether the reader finds letters or digits of any script."""
        text, confidence = self._read(window, box)
        return confidence >= _MIN_READ and sum(map(str.isalnum, text)) >= 2

    def _is_marker(self, windows: Sequence[NDArray[np.uint8]], group: Sequence[_Line], box: Box) -> bool:
        """Return whether a region holds a text to be kept and nothing else."""
        longest = max(map(len, self._keep), default=0)
        height, width = box[2] - box[0], box[3] - box[1]
        if width > (longest + 1.5) * height:
            return False
        is_marker = False
        for number in sorted({line.window for line in group}):
            text, confidence = self._read(windows[number], box)
            signs = as_marker(text)
            fits = width <= (len(signs) + 1.5) * height
            if confidence >= _MIN_MARKER and signs in self._keep and fits:
                is_marker = True
            elif confidence >= _MIN_READ and len(signs) > 1:
                return False
        return is_marker

    def _read(self, window: NDArray[np.uint8], box: Box) -> tuple[str, float]:
        """Read one line of text; return the best reading with the mean confidence of its letters."""
        crop = window[box[0] : box[2], box[1] : box[3]]
        turns = (1, 3) if crop.shape[0] > 1.5 * crop.shape[1] else (0, 2)
        return max((self._read_upright(np.rot90(crop, turn)) for turn in turns), key=lambda found: found[1])

    def _read_upright(self, crop: NDArray[np.uint8]) -> tuple[str, float]:
        height, width = crop.shape[:2]
        size = min(_MAX_READ_WIDTH, max(16, round(width * _READ_HEIGHT / max(1, height))))
        tensor = _tensor(cv2.resize(np.ascontiguousarray(crop), (size, _READ_HEIGHT)))
        (answer,) = self._reader.run(None, {self._reader.get_inputs()[0].name: tensor})
        best = answer[0].argmax(axis=1)
        is_new = np.concatenate(([True], best[1:] != best[:-1])) & (best != 0)
        if not is_new.any():
            return "", 0.0
        text = "".join(
            self._letters[one] if one < len(self._letters) else "" for one in best[is_new].tolist()
        )
        return text.strip(), float(answer[0].max(axis=1)[is_new].mean())


SEARCH_VERSION: Final = 3
"""Increased whenever a search may find other boxes: a resumed job must not mix the results of two."""


def models_digest() -> str:
    """Return the SHA-256 of the installed models, which decide bytes of a dataset.

    Raises:
        ConfigError: They are not installed.
    """
    digest = hashlib.sha256()
    for name in sorted(_MODELS):
        with _model(name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _model(name: str) -> Path:
    """Return the file of a model in the wheel of rapidocr, without importing it."""
    spec = importlib.util.find_spec("rapidocr")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent / "models"
    found = [] if folder is None else sorted(folder.glob(_MODELS[name]))
    if not found:
        raise ConfigError("deid.pixel_text needs a text detector; install shardflow[pixels].")
    return found[0]


@cache
def _session(name: str) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError("deid.pixel_text needs a text detector; install shardflow[pixels].") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(_model(name)), options, providers=["CPUExecutionProvider"])


def _windows(pixels: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Return an image in 8 bits: its whole range, that of most of it, and its details."""
    plane = pixels.astype(np.float32)
    low, high = float(plane.min()), float(plane.max())
    if not high > low:
        return []
    windows = [_to_8_bits(plane, low, high)]
    gray = plane.max(axis=2) if plane.ndim == 3 else plane
    inner = [float(one) for one in np.percentile(gray, _INNER)]
    if inner[1] > inner[0] and (inner[1] - inner[0]) < 0.9 * (high - low):
        windows.append(_to_8_bits(gray, inner[0], inner[1]))
    windows.append(_flattened(_to_8_bits(gray, low, high)))
    return windows


def _flattened(gray: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return what differs from its surroundings, on gray: bodies as a whole look like letters otherwise."""
    plane = gray.astype(np.float32)
    detail = np.asarray(cv2.GaussianBlur(plane, (0, 0), _NOISE_PX), np.float32)
    detail -= cv2.GaussianBlur(plane, (0, 0), _SURROUNDINGS_PX)
    strongest = max(float(np.percentile(np.abs(detail), 99.5)), 4.0)
    return np.asarray(np.clip(128 + 127 * detail / strongest, 0, 255), np.uint8)


def _to_8_bits(plane: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    return np.asarray(np.clip((plane - low) * (255 / (high - low)), 0, 255), np.uint8)


def _tensor(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return ``(1, 3, rows, columns)`` from -1 to 1."""
    scaled = image.astype(np.float32) / 127.5 - 1
    planes = scaled[None] if scaled.ndim == 2 else scaled.transpose(2, 0, 1)
    return np.ascontiguousarray(np.broadcast_to(planes, (3, *scaled.shape[:2]))[None])


def _straight(
    center: tuple[float, float], degrees: float, length: float, height: float
) -> NDArray[np.float64]:
    """Return what maps ``(x, y)`` of an image to a picture of a line in it, from left to right."""
    turn = np.asarray(cv2.getRotationMatrix2D(center, degrees, 1.0), np.float64)
    turn[:, 2] += length / 2 - center[0], height / 2 - center[1]
    return turn


def _placed(box: Box, straight: NDArray[np.float64], shape: Sequence[int]) -> Box | None:
    """Return the box of an image around a box of the picture of a line; None if it is beside the image."""
    back = np.asarray(cv2.invertAffineTransform(straight), np.float64)
    top, left, bottom, right = box
    corners = np.array([[x, y, 1] for x in (left, right) for y in (top, bottom)]) @ back.T
    (first_x, first_y), (last_x, last_y) = corners.min(axis=0), corners.max(axis=0)
    top, left = max(0, math.floor(first_y)), max(0, math.floor(first_x))
    bottom, right = min(shape[0], math.ceil(last_y)), min(shape[1], math.ceil(last_x))
    return (top, left, bottom, right) if top < bottom and left < right else None


def _scaled(box: Box, scale: float, shape: Sequence[int]) -> Box:
    top, left, bottom, right = (round(edge * scale) for edge in box)
    return max(0, top), max(0, left), min(shape[0], bottom), min(shape[1], right)


def _limit(limit: tuple[float, float], longest: int) -> float:
    """Return a limit of pixels, or of a share of the longer side, whichever is more."""
    return max(limit[0], limit[1] * longest)


def _starts(length: int) -> list[int]:
    """Return where tiles begin, so that they cover a side and overlap."""
    if length <= _SIDE:
        return [0]
    count = -(-(length - _OVERLAP) // (_SIDE - _OVERLAP))
    return [round(at * (length - _SIDE) / (count - 1)) for at in range(count)]


def _overlapping(lines: Sequence[_Line], shape: tuple[int, int]) -> list[list[_Line]]:
    """Group lines whose boxes overlap."""
    mask = np.zeros(shape, np.uint8)
    for line in lines:
        top, left, bottom, right = line.box
        mask[top:bottom, left:right] = 1
    _, labels = cv2.connectedComponents(mask, connectivity=8)
    groups: dict[int, list[_Line]] = {}
    for line in lines:
        groups.setdefault(int(labels[line.box[0], line.box[1]]), []).append(line)
    return list(groups.values())


def _merged(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Return boxes of which none is inside another."""
    return tuple(
        one
        for one in boxes
        if not any(
            other != one
            and other[0] <= one[0]
            and other[1] <= one[1]
            and other[2] >= one[2]
            and other[3] >= one[3]
            for other in boxes
        )
    )


def _around(lines: Sequence[_Line]) -> Box:
    tops, lefts, bottoms, rights = zip(*(line.box for line in lines), strict=True)
    return min(tops), min(lefts), max(bottoms), max(rights)


def _boxes(mask: NDArray[np.uint8]) -> tuple[Box, ...]:
    count, _, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    return tuple(
        sorted(
            (int(top), int(left), int(top + height), int(left + width))
            for left, top, width, height, _ in stats[1:count].tolist()
        )
    )
