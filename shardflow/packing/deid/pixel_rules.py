"""Pixel rules: a table over header values that finds images which may show text or a face; sites extend it.

An absent attribute proves nothing: a file that does not declare burned-in text may have some, so the kinds
of images that often have it are suspect. Pixels themselves are examined by `heads` and `pixel_text`.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from shardflow.errors import ConfigError

Box = tuple[int, int, int, int]
"""First row, first column, row and column behind the last."""

Values = Mapping[str, Sequence[str | int | float]]

PAGE: Final = "page"
"""Name of the rule that recognizes pages of text by their pixels (`pixel_text.is_page`)."""
TEXT: Final = "text"
"""Name of the rule that finds text in pixels (`pixel_text`)."""
DECLARED: Final = "declared"
"""Name of the rule for files that declare text: it may be blanked, but it must be found."""
_CONDITIONS: Final = frozenset({"when", "words", "unless", "unless_words", "without_words"})
_TABLES: Final = {
    "accept": (frozenset({"name", "rules"}), _CONDITIONS),
    "burned_in": (frozenset({"name", "verdict"}), _CONDITIONS),
    "blackout": (frozenset({"name", "boxes", "clears"}), _CONDITIONS),
    "face": (frozenset({"name"}), _CONDITIONS),
}
_VERDICTS: Final = ("dirty", "suspect")
_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")
_NOT_READ: Final = frozenset({"SOPClassUID", "Rows", "Columns", "BurnedInAnnotation", "ImageType"})


_SEAMS: Final = re.compile(
    r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\W_]+"
)
"""Where words meet: letters and digits, a change of case, and signs."""


def split_words(text: str) -> str:
    """Return the words of a description in lower case without accents, separated by single blanks.

    Example:
        >>> split_words("t1_mprage_sag"), split_words("3D_BRAVO"), split_words("DoseReport-1")
        ('t 1 mprage sag', '3 d bravo', 'dose report 1')
    """
    decomposed = unicodedata.normalize("NFKD", text)
    plain = unicodedata.normalize("NFC", "".join(one for one in decomposed if not unicodedata.combining(one)))
    return " ".join(part for part in _SEAMS.sub(" ", plain).casefold().split(" ") if part)


@dataclass(frozen=True, slots=True)
class _Condition:
    """One line of a condition: any value of any of its attributes matches."""

    keywords: tuple[str, ...]
    pattern: re.Pattern[str]
    is_words: bool
    """Whether the pattern is searched for among the words of a value, instead of matching it as a whole."""

    def matches(self, values: Values, without: Sequence[_Condition] = ()) -> bool:
        for keyword in self.keywords:
            for value in values.get(keyword, ()):
                text = str(value).strip()
                if not self.is_words:
                    if self.pattern.fullmatch(text):
                        return True
                    continue
                text = f" {split_words(text)} "
                for other in without:
                    if keyword in other.keywords:
                        text = other.pattern.sub(" |", text)
                if self.pattern.search(text):
                    return True
        return False


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    verdict: str
    when: tuple[_Condition, ...]
    unless: tuple[_Condition, ...]
    without: tuple[_Condition, ...]
    """Phrases that are taken out before words are searched for."""

    def matches(self, values: Values) -> bool:
        matches = all(condition.matches(values, self.without) for condition in self.when)
        return matches and not (self.unless and all(condition.matches(values) for condition in self.unless))


@dataclass(frozen=True, kw_only=True, slots=True)
class Blackout:
    """Boxes to black out in the images of one device."""

    name: str
    boxes: tuple[Box, ...]
    clears: frozenset[str]
    """Rules whose suspicion it resolves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelVerdict:
    """Verdict of the rules on a group of similar images."""

    held_back: tuple[str, ...]
    """Names of the rules that hold the images back; none if they may be packed."""
    suspected: tuple[str, ...]
    """Names of the rules for which the images are searched for text, instead of being held back."""
    accepts_pages: bool
    """Whether pages of text are packed."""
    accepts_text: bool
    """Whether text that is found stays."""
    accepted: tuple[str, ...]
    """Names of the rules that matched and were accepted by the settings."""
    blackout: Blackout | None
    face: tuple[str, ...]
    """Names of the rules that detect a head."""


@dataclass(frozen=True, slots=True)
class PixelRules:
    """The rules of a job."""

    burned_in: tuple[_Rule, ...]
    faces: tuple[_Rule, ...]
    blackouts: tuple[tuple[_Rule, Blackout], ...]
    accepted: tuple[tuple[_Rule, frozenset[str]], ...]
    """Devices, with the rules whose images are packed all the same."""
    digest: str
    """SHA-256 of the shipped table and the added ones."""

    @property
    def keywords(self) -> tuple[str, ...]:
        """Attributes to be read of a file, beside what its header row holds."""
        tables = (*self.blackouts, *self.accepted)
        rules = [*self.burned_in, *self.faces, *(rule for rule, _ in tables)]
        conditions = [one for rule in rules for one in (*rule.when, *rule.unless)]
        named = {keyword for one in conditions for keyword in one.keywords}
        return tuple(sorted(named - _NOT_READ))

    def judge(
        self, values: Values, *, accept: Iterable[str], trusts_no: bool, blanks_text: bool = False
    ) -> PixelVerdict:
        """Judge a group of images by their header values.

        Args:
            values: Values by DICOM keyword, for all `keywords`.
            accept: Names of rules that hold nothing back.
            trusts_no: Whether a declared ``BurnedInAnnotation = NO`` clears a suspicion.
            blanks_text: Whether images that are suspected, or declared, to show text are searched for it.
        """
        blackout = next((boxes for rule, boxes in self.blackouts if rule.matches(values)), None)
        matched = [rule for rule in self.burned_in if rule.matches(values)]
        declared = {str(value).upper() for value in values.get("BurnedInAnnotation", ())}
        if trusts_no and declared == {"NO"}:
            matched = [rule for rule in matched if rule.verdict == "dirty"]
        if blackout is not None:
            matched = [rule for rule in matched if rule.name not in blackout.clears]
        accepted = frozenset(accept).union(*(names for rule, names in self.accepted if rule.matches(values)))
        doubted = [rule for rule in matched if rule.name not in accepted]
        may_blank = blanks_text and TEXT not in accepted
        searched = [rule for rule in doubted if rule.verdict == "suspect" or rule.name == DECLARED]
        is_searched = may_blank and len(searched) == len(doubted)
        return PixelVerdict(
            held_back=() if is_searched else tuple(rule.name for rule in doubted),
            suspected=tuple(rule.name for rule in matched) if is_searched else (),
            accepts_pages=PAGE in accepted,
            accepts_text=TEXT in accepted,
            accepted=tuple(rule.name for rule in matched if rule.name in accepted),
            blackout=blackout,
            face=tuple(rule.name for rule in self.faces if rule.matches(values)),
        )

    def check_names(self, names: Iterable[str]) -> None:
        """Check that every name is that of a rule.

        Raises:
            ConfigError: One is not.
        """
        known = {PAGE, TEXT, *(rule.name for rule in self.burned_in)}
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"deid.accept names {name!r}, which is no rule for burned-in text; choose among "
                    f"{', '.join(sorted(known))}."
                )


@cache
def load_rules(*added: str) -> PixelRules:
    """Read the shipped table and the tables that a site adds to it.

    Args:
        added: Texts of further tables (TOML).

    Raises:
        ConfigError: A table is not as the shipped one describes it.
    """
    shipped = (files("shardflow.packing.deid") / "pixel_rules.toml").read_text(encoding="utf-8")
    texts = [shipped, *added]
    tables: dict[str, list[Mapping[str, Any]]] = {name: [] for name in _TABLES}
    for text in texts:
        for name, entries in _parse(text).items():
            tables[name] += entries
    burned_in = tuple(_rule(entry, entry["verdict"]) for entry in tables["burned_in"])
    names = [PAGE, TEXT, *(rule.name for rule in burned_in)]
    if len(set(names)) != len(names):
        raise _problem("burned_in", "names that are used once")
    blackouts = tuple((_rule(entry, ""), _blackout(entry, set(names))) for entry in tables["blackout"])
    accepted = tuple((_rule(entry, ""), _names(entry, "rules", set(names))) for entry in tables["accept"])
    return PixelRules(
        burned_in,
        tuple(_rule(entry, "") for entry in tables["face"]),
        blackouts,
        accepted,
        hashlib.sha256("\0".join(texts).encode("utf-8")).hexdigest(),
    )


def _parse(text: str) -> dict[str, list[Mapping[str, Any]]]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the pixel rules are not valid TOML: {error}; correct the file.") from None
    for name, entries in tables.items():
        if name not in _TABLES or not isinstance(entries, list):
            raise ConfigError(
                f"the pixel rules must be tables [[{']], [['.join(_TABLES)}]], got {name!r}; rename it."
            )
        needed, optional = _TABLES[name]
        for entry in entries:
            if not isinstance(entry, dict) or not needed <= set(entry) <= needed | optional:
                raise _problem(name, f"the keys {', '.join(sorted(needed))}")
            if not isinstance(entry["name"], str) or not _NAME.fullmatch(entry["name"]):
                raise _problem(name, "a name of [a-z0-9_]")
            if name == "burned_in" and entry["verdict"] not in _VERDICTS:
                raise _problem(name, "the verdict dirty or suspect")
    return tables


def _rule(entry: Mapping[str, Any], verdict: str) -> _Rule:
    when = (*_conditions(entry, "when"), *_conditions(entry, "words"))
    if not when:
        raise _problem(entry["name"], "a condition")
    unless = (*_conditions(entry, "unless"), *_conditions(entry, "unless_words"))
    return _Rule(entry["name"], verdict, when, unless, _conditions(entry, "without_words"))


def _conditions(entry: Mapping[str, Any], key: str) -> tuple[_Condition, ...]:
    table = entry.get(key, {})
    if not isinstance(table, dict):
        raise _problem(entry["name"], f"a table under {key!r}")
    conditions = []
    is_words = key.endswith("words")
    for keyword, expressions in sorted(table.items()):
        if (
            not isinstance(expressions, list)
            or not expressions
            or not all(isinstance(one, str) for one in expressions)
        ):
            raise _problem(entry["name"], f"a list of expressions for {keyword!r}")
        try:
            whole = "|".join(f"(?:{one})" for one in expressions)
            pattern = re.compile(f" (?:{whole})(?= )" if is_words else whole, re.IGNORECASE)
        except re.error as error:
            raise _problem(entry["name"], f"expressions that compile ({error})") from None
        conditions.append(_Condition(tuple(keyword.split()), pattern, is_words))
    return tuple(conditions)


def _blackout(entry: Mapping[str, Any], names: set[str]) -> Blackout:
    boxes = entry["boxes"]
    if not isinstance(boxes, list) or not boxes or not all(map(_is_box, boxes)):
        raise _problem(entry["name"], "boxes of [first row, first column, end row, end column]")
    return Blackout(
        name=entry["name"],
        boxes=tuple((box[0], box[1], box[2], box[3]) for box in boxes),
        clears=_names(entry, "clears", names),
    )


def _names(entry: Mapping[str, Any], key: str, known: set[str]) -> frozenset[str]:
    if not isinstance(entry[key], list) or not set(entry[key]) <= known:
        raise _problem(entry["name"], f"names of rules under {key!r}")
    return frozenset(entry[key])


def _is_box(box: object) -> bool:
    if not isinstance(box, list) or len(box) != 4 or not all(type(edge) is int for edge in box):
        return False
    top, left, bottom, right = (int(edge) for edge in box)
    return 0 <= top < bottom and 0 <= left < right


def _problem(name: str, expected: str) -> ConfigError:
    return ConfigError(f"a pixel rule must have {expected}, but {name} has not; correct it.")
