"""Review of findings: uncertain ones as a CSV file with corrections read back, and phrases no lexicon knows.

Both files hold words of reports, so their mode is 0600, and nothing of them is logged.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast, get_args

from shardflow.errors import ConfigError, os_reason
from shardflow.format import Dataset
from shardflow.format.entities import EntityRules
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, sha256_hex
from shardflow.reports.assertion import Assertion, find_cues
from shardflow.reports.detection import detect_languages
from shardflow.reports.entity_rows import (
    ALIGNMENT_FIELD,
    CONTENT_FIELD,
    Correction,
    Corrections,
    EntityRow,
    finding_key,
    study_rows,
)
from shardflow.reports.entity_views import chosen
from shardflow.reports.language import LANGUAGES, load_language
from shardflow.reports.lexicon import Lexicon, load_lexicon
from shardflow.reports.sections import split_sections
from shardflow.reports.tokens import PhraseIndex, fold_words, tokenize

_FIELDS: Final = (ALIGNMENT_FIELD, CONTENT_FIELD, REPORT_FIELD, STUDY_FIELD)
_SHOWN: Final = ("label", "assertion", "laterality", "section", "kind", "probability", "confidence")
COLUMNS: Final = ("finding", "words", *_SHOWN, "right", "new_label", "new_assertion")
"""Columns of the file; a person fills in the last three."""
_YES, _NO = frozenset(("y", "yes", "true", "1")), frozenset(("n", "no", "false", "0"))


def write_findings(
    dataset: Dataset, path: Path, *, rules: EntityRules, least: float, most: float, limit: int | None = None
) -> int:
    """Write findings whose probability times confidence lies between two bounds, the least sure first.

    Args:
        dataset: A packed dataset with alignments.
        path: CSV file to create; it holds sentences of reports.
        rules: Its condition selects findings; its threshold does not count.
        least: Lower bound, exclusive.
        most: Upper bound, inclusive.
        limit: Most rows; None for all.

    Returns:
        Number of rows.

    Raises:
        ConfigError: The file exists or cannot be written, or nothing lies between the bounds.
    """
    found = list(_unsure(dataset, rules, least, most))
    found.sort(key=lambda one: (one[0], one[1]["finding"]))
    rows = [row for _, row in found[:limit]]
    if not rows:
        raise ConfigError(
            f"no finding with slices is between {least} and {most} under this condition; widen --least, "
            "--most or --where."
        )
    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_private(path, file.getvalue())
    return len(rows)


def _unsure(
    dataset: Dataset, rules: EntityRules, least: float, most: float
) -> Iterator[tuple[float, dict[str, str]]]:
    for study, fields in _read(dataset, _FIELDS):
        text = fields[REPORT_FIELD]
        seen: set[int] = set()
        for row in chosen(list(study_rows(fields, rules)), rules, Counter()):
            sure = row.probability * row.confidence
            if least < sure <= most and row.entity not in seen:
                seen.add(row.entity)
                yield sure, _cells(row, dataset.studies.sample_key(study), text)


def _cells(row: EntityRow, study_key: str, text: bytes) -> dict[str, str]:
    words = text[slice(*row.text)].decode("utf-8", errors="replace")
    shown = {name: getattr(row, name) for name in _SHOWN}
    return {
        "finding": finding_key(study_key, row.entity),
        # A spreadsheet runs what begins like a formula.
        "words": re.sub(r"^\s*([=+@-])", r"'\1", " ".join(words.split())),
        **{name: f"{value:.3f}" if isinstance(value, float) else value for name, value in shown.items()},
    }


def read_corrections(path: Path) -> Corrections:
    """Read a file that `write_findings` wrote and a person filled in.

    ``right`` is y or n, ``new_label`` a name of the lexicon, ``new_assertion`` an assertion; empty cells
    leave a finding as it is. Without a new label or assertion, one that is right is present, else absent.

    Raises:
        ConfigError: The file cannot be read, or a cell holds something else; the message names the line.
    """
    lexicon = load_lexicon()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="")
            rows = list(reader)
            missing = {"finding", "right", "new_label", "new_assertion"} - set(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"the file of corrections must be a readable CSV in UTF-8, got {os_reason(error)}; write one "
            "with: shardflow reports review DATASET -o FILE"
        ) from None
    if missing:
        lacking = ", ".join(sorted(missing))
        raise ConfigError(f"the file of corrections lacks the columns {lacking}; keep them.")
    found: dict[str, Correction] = {}
    for line, row in enumerate(rows, start=2):
        correction = _correction(row, line, lexicon)
        if correction is not None and found.setdefault(row["finding"].strip(), correction) != correction:
            raise ConfigError(
                f"line {line} of the corrections corrects a finding that another line corrects otherwise; "
                "keep one of them."
            )
    said = "".join(f"{key} {one.label} {one.assertion}\n" for key, one in sorted(found.items()))
    return Corrections(digest=sha256_hex(said.encode()), of=found)


def _correction(row: Mapping[str, str], line: int, lexicon: Lexicon) -> Correction | None:
    right, label, assertion = (row[name].strip() for name in ("right", "new_label", "new_assertion"))
    if right.lower() not in {"", *_YES, *_NO}:
        raise ConfigError(f"the column right holds y or n, got another word (line {line}); correct it.")
    if assertion not in {"", *get_args(Assertion)}:
        known = ", ".join(get_args(Assertion))
        raise ConfigError(
            f"new_assertion must be one of {known}, got another word (line {line}); correct it."
        )
    if label:
        concept = lexicon.phrases.get(" ".join(fold_words(label)))
        if concept is None or concept.kind == "anatomy":
            raise ConfigError(
                f"new_label must be a finding of the lexicon, got another name (line {line}); correct it, or "
                "add the name to the table of reports.findings and pack again."
            )
        label = concept.name
    if not (right or label or assertion):
        return None
    if not assertion and not label:
        assertion = "present" if right.lower() in _YES else "absent"
    return Correction(label=label, assertion=cast("Assertion", assertion) if assertion else None)


_LONGEST_PHRASE = 4


def write_unknown_phrases(dataset: Dataset, path: Path, *, min_reports: int, limit: int) -> tuple[int, int]:
    """Write the phrases of findings and impressions that the lexicon does not know, the most frequent first.

    Args:
        dataset: A packed dataset with reports.
        path: CSV file to create: phrase, number of reports.
        min_reports: A phrase of fewer reports is left out: what one report says may name a person.
        limit: Most phrases.

    Returns:
        Numbers of phrases written and of reports read.

    Raises:
        ConfigError: The file exists or cannot be written, or the dataset has no reports.
    """
    read = _read(dataset, (REPORT_FIELD,))
    texts = (fields[REPORT_FIELD].decode("utf-8", errors="replace") for _, fields in read)
    counts, num_reports = count_unknown(texts)
    if not num_reports:
        raise ConfigError("DATASET must hold reports, got none; pack it with inputs.reports.")
    kept = [(phrase, num) for phrase, num in counts.items() if num >= min_reports]
    kept.sort(key=lambda one: (-one[1], one[0]))
    rows = [f"{phrase},{num}\n" for phrase, num in kept[:limit]]
    write_private(path, "".join(["phrase,reports\n", *rows]))
    return len(rows), num_reports


def count_unknown(texts: Iterable[str]) -> tuple[Counter[str], int]:
    """Count the reports that hold each run of words that no table of its language knows.

    Args:
        texts: The reports; parts in languages without rules are passed over.
    """
    readers: dict[str, _KnownWords] = {}
    counts: Counter[str] = Counter()
    num_reports = 0
    for text in texts:
        num_reports += 1
        here: set[str] = set()
        detected = detect_languages(text)
        for language in sorted({name for _, _, name in detected.pieces} & {*LANGUAGES}):
            if language not in readers:
                readers[language] = _KnownWords(load_lexicon(language=language))
            here |= readers[language].unknown(detected.blank(text, language))
        counts.update(here)
    return counts, num_reports


class _KnownWords:
    """Words that the tables of a language know."""

    def __init__(self, lexicon: Lexicon) -> None:
        language = load_language(lexicon.language)
        self._lexicon = lexicon
        self._index = PhraseIndex(dict.fromkeys(lexicon.phrases, True))
        self._ordinary = language.plain | language.spoken

    def unknown(self, text: str) -> set[str]:
        """Return the runs of other words in findings and impressions."""
        found: set[str] = set()
        for section in split_sections(text, self._lexicon):
            if section.kind not in ("findings", "impression", "findings_impression"):
                continue
            tokens = tokenize(text[slice(*section.body)], self._lexicon.language)
            known: set[int] = set()
            for match in self._index.find(tokens):
                known.update(range(match.first, match.last))
            for cue in find_cues(tokens, self._lexicon.language):
                known.update(range(cue.first, cue.last))
            run: list[str] = []
            for number, word in enumerate([*tokens.words, "."]):
                is_unknown = number not in known and word.isalpha() and word not in self._ordinary
                if number < len(tokens) and is_unknown:
                    run.append(word)
                    continue
                if 0 < len(run) <= _LONGEST_PHRASE:
                    found.add(" ".join(run))
                run = []
        return found


def write_private(path: Path, text: str) -> None:
    """Create a file that its owner alone may read.

    Raises:
        ConfigError: It exists, or cannot be created.
    """
    try:
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the output must be a new file, got {os_reason(error)}; name another.") from None


def _read(dataset: Dataset, names: Sequence[str]) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield the studies that have all of some fields."""
    for study in range(dataset.studies.num_samples):
        _, locations = dataset.sample_fields(study)
        if set(names) <= {one.name for one in locations}:
            yield study, dict(dataset.read_fields(study, list(names)))
