"""Numbers of series and images in a text: single ones, ranges, lists; what looks like them is left out."""

from __future__ import annotations

import re

__all__ = ["Numbers", "read_numbers"]

Numbers = list[tuple[int, int]]
"""Closed ranges."""

_ONES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_TEENS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = {
    **{word: value for value, word in enumerate((*_ONES, *_TEENS), start=1)},
    **{word: 10 * value for value, word in enumerate(_TENS, start=2)},
    **{
        f"{ten}-{one}": 10 * value + unit
        for value, ten in enumerate(_TENS, start=2)
        for unit, one in enumerate(_ONES, start=1)
    },
}
_NUMBER = re.compile(
    r"#?\s?(?:(?P<digits>\d{1,5})(?!\d|\.\d|[a-zA-Z])|"
    rf"(?P<word>{'|'.join(sorted(_WORDS, reverse=True))})\b)",
    re.IGNORECASE,
)
_RANGE = re.compile(
    r"\s*(?:-|\u2013|\u2014|\bup\s+to\b|\bto\b|\bthrough\b|\bthru\b|\buntil\b)\s*(?:(?P<image>image|img|im|slice|frame)\s*)?(?=#?\d|\w)",
    re.IGNORECASE,
)
_NEXT = re.compile(r"\s*(?:,?\s*(?:and|or|&|plus|as well as)\s*|,\s*|/\s*)(?=#?\d)", re.IGNORECASE)
_TOTAL = re.compile(
    r"\s*(?:of|out of|/)\s*(?:a\s+total\s+of\s+)?\d{1,5}(?![\d:.])\s*(?:images|slices|frames)?", re.IGNORECASE
)
# A number in front of these is a measure, a count or a date.
_UNIT = re.compile(
    r"\s?-?\s?(?:mm|cm|m|ml|cc|mg|mcg|units?|inch(?:es)?|g|t|kv|kvp|ma|mas|hz|sec|secs|seconds?|s|ms|min|minutes?|hours?|hrs?|days?|weeks?|months?|years?|"
    r"percent|x\s?\d|per|times|weeks|am|pm|radiographs?|views?|(?:images|slices|frames)(?!\s*[#:]?\s*\d)|patients|nodules|lesions|"
    r"cysts|masses|stones)\b|\s?[%\u00d7\u00b0]|/\d+/\d",
    re.IGNORECASE,
)
_FOLLOWER = re.compile(
    r"\s*(?:$|[.,;:)\]&?!]|(?:and|or|of|on|in|at|from|to|through|series|ser|se|is|are|show|shows|as|where|which|but|with|for)\b|[-\u2013])",
    re.IGNORECASE,
)


_BETWEEN = re.compile(r"\bbetween\s+(?:axial\s+)?(?:images?|slices?|frames?)\s+$", re.IGNORECASE)


def read_numbers(
    text: str, start: int, end: int, *, is_series: bool, is_plural: bool
) -> tuple[Numbers, int] | None:
    """Read the numbers that stand at a place.

    Args:
        text: The report.
        start: Where the first number must begin.
        end: Where reading ends.
        is_series: The numbers are of series: a comma is a list only before its last "and".
        is_plural: The word before was a plural; a list is likely then.

    Returns:
        The numbers and where they end; None: there are none.
    """
    first = _read_one(text, start, end, is_series=is_series)
    if first is None:
        return None
    numbers, at = [first[0]], first[1]
    while True:
        following = _NEXT.match(text, at, end)
        if following is None:
            break
        item = _read_one(text, following.end(), end, is_series=is_series)
        if item is None:
            break
        mark = following.group().strip()
        if mark == "/":
            # 45/47 are two images, 33/120 is one of 120; without a plural only close ones are two.
            near = 0 < item[0][0] - numbers[-1][1] <= 3 and not is_series and _has_series_before(text, start)
            if not near:
                break
        elif not _may_follow(text, item, end, mark, is_series=is_series, is_plural=is_plural):
            break
        numbers.append(item[0])
        at = item[1]
    total = _TOTAL.match(text, at, end)
    if total and not _UNIT.match(text, total.end(), end):
        at = total.end()
    return numbers, at


def _may_follow(
    text: str, item: tuple[tuple[int, int], int], end: int, mark: str, *, is_series: bool, is_plural: bool
) -> bool:
    if is_series and mark == ",":
        # "series 3, 5 and 7" is a list; "series 3, 45" is not known to be one.
        return (
            re.compile(r"(?:\s*,\s*\d{1,4})*\s*,?\s*(?:and|&)\s*\d{1,4}(?!\s?(?:mm|cm))").match(
                text, item[1], end
            )
            is not None
        )
    return is_plural or _FOLLOWER.match(text[item[1] : end]) is not None


def _has_series_before(text: str, start: int) -> bool:
    return (
        re.search(r"\bse(?:r|ries)?\b[^.]{0,25}$", text[max(0, start - 40) : start], re.IGNORECASE)
        is not None
    )


def _read_one(text: str, start: int, end: int, *, is_series: bool) -> tuple[tuple[int, int], int] | None:
    first = _value(text, start, end)
    if first is None:
        return None
    if not is_series and _BETWEEN.search(text[max(0, start - 25) : start]):
        link = re.compile(r"\s+and\s+(?:image\s+)?(?P<image>(?!.))?", re.IGNORECASE).match(
            text, first[1], end
        )
        last = _value(text, link.end(), end) if link else None
        if last is not None:
            return (min(first[0], last[0]), max(first[0], last[0])), last[1]
    link = _RANGE.match(text, first[1], end)
    if link and not (is_series and link["image"]):
        last = _value(text, link.end(), end)
        if last is not None:
            return (min(first[0], last[0]), max(first[0], last[0])), last[1]
    return (first[0], first[0]), first[1]


def _value(text: str, start: int, end: int) -> tuple[int, int] | None:
    match = _NUMBER.match(text, start, end)
    if match is None or _UNIT.match(text, match.end(), end):
        return None
    value = int(match["digits"]) if match["digits"] else _WORDS[match["word"].lower()]
    return value, match.end()
