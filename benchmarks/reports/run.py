"""How well findings, their assertions and the mentions of images are read, and how fast.

    python -m benchmarks.reports.run --output benchmarks/results/reports.json

The rules were written with the development parts; only the test parts count. ``--negspacy PYTHON`` and
``--medspacy PYTHON`` ask negspacy and medspaCy's ConText, installed in environments of their own, about the
same findings: they are told where they are. ``--openi PATH`` (or an installed torchxrayvision) adds real
reports (`benchmarks.reports.openi`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from benchmarks.about import processor
from benchmarks.reports import openi
from benchmarks.reports.gold_sets import (
    LANGUAGE_HEADERS,
    LANGUAGE_STYLES,
    STYLES,
    GoldMentions,
    GoldSentence,
    Part,
    digest,
    language_mentions,
    language_sentences,
    mentions,
    sentences,
    styled_sentences,
)
from shardflow import __version__
from shardflow.reports import Entity, EntityFinder, ReportReader, find_mentions, load_lexicon
from shardflow.reports.language import ENGLISH

PARTS: tuple[Part, ...] = ("development", "test")


def match(gold: GoldSentence, found: Sequence[Entity]) -> list[tuple[int, int]]:
    """Pair marked and found findings one to one, those that share most characters first."""
    overlaps = sorted(
        (
            (min(one.span[1], other.span[1]) - max(one.span[0], other.span[0]), -number, -place)
            for number, one in enumerate(gold.entities)
            for place, other in enumerate(found)
            if one.span[0] < other.span[1] and other.span[0] < one.span[1]
        ),
        reverse=True,
    )
    pairs: list[tuple[int, int]] = []
    for _, number, place in overlaps:
        if all(-number != one and -place != other for one, other in pairs):
            pairs.append((-number, -place))
    return pairs


def scores(correct: int, found: int, marked: int) -> dict[str, float]:
    precision, recall = correct / max(1, found), correct / max(1, marked)
    both = precision + recall
    return {
        "precision": round(precision, 4),
        "recall": round(recall, 4),
        "f1": round(2 * precision * recall / both, 4) if both else 0.0,
    }


class EntityScores:
    """Counts of how findings were read, over sentences."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(
            ("marked", "found", "matched", "strict", "assertion", "polar", "polar_right", "named"), 0
        )
        self.stated = {name: [0, 0] for name in ("laterality", "size_mm", "anatomy", "severity", "change")}
        self.confusion: dict[str, int] = {}
        self.errors: list[str] = []

    def add(self, case: GoldSentence, found: Sequence[Entity]) -> None:
        """Count one sentence.

        Args:
            case: The sentence.
            found: What was found in it; spans are of its text.
        """
        counts = self.counts
        pairs = match(case, found)
        counts["marked"] += len(case.entities)
        counts["found"] += len(found)
        counts["matched"] += len(pairs)
        wrong = len(pairs) < max(len(case.entities), len(found))
        for number, place in pairs:
            gold, got = case.entities[number], found[place]
            counts["strict"] += gold.span == got.span
            counts["assertion"] += gold.assertion == got.assertion
            is_named = _is_named(gold.concept, got.concept)
            counts["named"] += is_named
            wrong = wrong or not (is_named or not gold.concept)
            wrong = wrong or gold.assertion != got.assertion
            key = f"{gold.assertion} -> {got.assertion}"
            self.confusion[key] = self.confusion.get(key, 0) + 1
            if gold.assertion in ("absent", "present"):
                counts["polar"] += 1
                counts["polar_right"] += (gold.assertion == "absent") == (got.assertion == "absent")
            for name, is_stated, is_right in (
                ("laterality", gold.laterality or got.laterality, gold.laterality == got.laterality),
                ("size_mm", gold.size_mm or got.size_mm, gold.size_mm == got.size_mm),
                ("anatomy", gold.anatomy, _same_place(case.text, gold.anatomy, got)),
                ("severity", gold.severity, gold.severity == got.severity),
                ("change", gold.change, gold.change == getattr(got, "change", "")),
            ):
                if is_stated:
                    self.stated[name][0] += is_right
                    self.stated[name][1] += 1
                    if not is_right:
                        self.errors.append(
                            f"{case.style} {case.group}: {case.text} | {name} of {got.concept}"
                        )
        if wrong:
            self.errors.append(
                f"{case.style} {case.group}: {case.text} | "
                + "; ".join(f"{case.text[slice(*one.span)]}={one.assertion}" for one in case.entities)
                + " | "
                + "; ".join(f"{case.text[slice(*one.span)]}={one.assertion} {one.concept}" for one in found)
            )

    def summary(self) -> dict[str, Any]:
        """Return shares and counts as JSON."""
        counts = self.counts
        return {
            **{name: counts[name] for name in ("marked", "found", "matched")},
            "overlap": scores(counts["matched"], counts["found"], counts["marked"]),
            "strict_span": scores(counts["strict"], counts["found"], counts["marked"]),
            "assertion_accuracy": round(counts["assertion"] / max(1, counts["matched"]), 4),
            "absent_or_not_accuracy": round(counts["polar_right"] / max(1, counts["polar"]), 4),
            "of_those_with_one": {
                name: {"accuracy": round(right / total, 4), "num": total}
                for name, (right, total) in self.stated.items()
                if total
            },
            "assertions": dict(sorted(self.confusion.items())),
        }


def score_entities(part: Part) -> dict[str, Any]:
    """Score the hand-written sentences of a part, each alone."""
    finder, score = EntityFinder(), EntityScores()
    for case in sentences(part):
        score.add(case, finder.find(case.text))
    return {"sentences": len(sentences(part)), **score.summary()}


def read_styled(reader: ReportReader, case: GoldSentence, header: str = "FINDINGS") -> list[Entity]:
    """Read a sentence under its header, the findings' where it has none; spans are of its text."""
    head = f"{case.section or header}:\n"
    return [_moved(one, len(head)) for one in reader.read(head + case.text).entities]


def _moved(entity: Entity, by: int) -> Entity:
    place = entity.anatomy
    if place is not None:
        place = replace(place, span=(place.span[0] - by, place.span[1] - by))
    return replace(entity, span=(entity.span[0] - by, entity.span[1] - by), anatomy=place)


def score_styles(part: Part, errors: list[str] | None = None) -> dict[str, Any]:
    """Score the sentences of a part's styles: as a whole, by style and by class of the taxonomy."""
    reader, cases = ReportReader(), styled_sentences(part)
    whole = EntityScores()
    parts: dict[str, dict[str, EntityScores]] = {"style": {}, "group": {}}
    for case in cases:
        found = read_styled(reader, case)
        whole.add(case, found)
        for name, of in parts.items():
            of.setdefault(getattr(case, name), EntityScores()).add(case, found)
    if errors is not None:
        errors += whole.errors
    return {
        "sentences": len(cases),
        **whole.summary(),
        **{
            f"by_{name}": {
                key: {
                    "sentences_wrong": len(one.errors),
                    "f1": one.summary()["overlap"]["f1"],
                    "assertion_accuracy": one.summary()["assertion_accuracy"],
                    "num": one.counts["marked"],
                }
                for key, one in sorted(of.items())
            }
            for name, of in parts.items()
        },
    }


def score_language(language: str, part: Part, errors: list[str] | None = None) -> dict[str, Any]:
    """Score the sentences and mentions of a part in another language; concepts count beside places."""
    reader, cases, score = ReportReader(), language_sentences(language, part), EntityScores()
    for case in cases:
        score.add(case, read_styled(reader, case, LANGUAGE_HEADERS[language]))
    if errors is not None:
        errors += [f"{language} {one}" for one in score.errors]
    counts = score.counts
    return {
        "sentences": len(cases),
        **score.summary(),
        "overlap_and_concept": scores(counts["named"], counts["found"], counts["marked"]),
        "mentions": score_mentions(language_mentions(language, part), language),
    }


def _is_named(gold: str, got: str) -> bool:
    """Whether a concept is the marked one, or a narrower one that its place makes of it."""
    lexicon = load_lexicon()
    return gold == got or (got in lexicon.concepts and gold in lexicon.ancestors(lexicon.concepts[got]))


def _same_place(text: str, anatomy: str, got: Entity) -> bool:
    if got.anatomy is None:
        return False
    words = text[slice(*got.anatomy.span)].lower()
    return words in anatomy.lower() or anatomy.lower() in words


HEDGES = {"likely": 0.75, "possible": 0.5, "doubtful": 0.15}
"""Share of findings that are there behind a hedge, near the middle of what radiologists and referrers
answered in published surveys of such words; the gold cannot know it."""
_BINS = 10
_FEWEST = 10
"""Cases that a share is counted on; fewer are pooled with all of their assertion."""


def outcomes(cases: Sequence[GoldSentence]) -> list[tuple[Entity, float]]:
    """Return each finding that is found in some sentences, and how far it is there by the gold."""
    reader, found = ReportReader(), []
    for case in cases:
        got = read_styled(reader, case)
        marked = {place: case.entities[number] for number, place in match(case, got)}
        for place, one in enumerate(got):
            gold = marked.get(place)
            is_there = gold is not None and gold.assertion == "present"
            found.append((one, HEDGES[gold.hedge] if gold and gold.hedge else float(is_there)))
    return found


def calibration(part: Part) -> dict[str, Any]:
    """Compare the probabilities with the gold: the mean distance of ten bins, weighted by their counts."""
    bins: dict[int, list[tuple[float, float]]] = {}
    cases = outcomes(styled_sentences(part))
    for one, truth in cases:
        promised = one.probability or 0.0
        bins.setdefault(min(_BINS - 1, int(promised * _BINS)), []).append((promised, truth))
    rows = {
        f"{number / _BINS:.1f}": {
            "num": len(held),
            "promised": round(sum(one for one, _ in held) / len(held), 4),
            "there": round(sum(truth for _, truth in held) / len(held), 4),
        }
        for number, held in sorted(bins.items())
    }
    error = sum(one["num"] * abs(one["promised"] - one["there"]) for one in rows.values()) / len(cases)
    return {"num": len(cases), "expected_calibration_error": round(error, 4), "bins": rows}


def fit_probabilities() -> list[dict[str, Any]]:
    """Count the shares of ``shardflow/reports/probability.csv``.

    They are counted on the sentences that were written by hand, not on the styles, which the rules are fitted
    to (development) or judged by (test). A case of 0 and one of 1 are added to each, so that none is 0 or 1.
    """
    held: dict[tuple[str, str, str], list[float]] = {}
    hard = [one for one in styled_sentences("development") if one.style == "hard"]
    for one, truth in outcomes([*sentences("development"), *sentences("test"), *hard]):
        basis = one.basis if one.assertion in ("absent", "present") else ""
        held.setdefault((one.assertion, one.certainty, basis), []).append(truth)
    rows: list[dict[str, Any]] = []
    for assertion, basis in (
        *(("absent", one) for one in ("cue", "list")),
        *(("present", one) for one in ("plain", "cue", "list", "shadowed")),
        ("historical", ""),
        ("hypothetical", ""),
    ):
        truths = held.get((assertion, "", basis), [])
        if len(truths) < _FEWEST:
            truths = [truth for key, values in held.items() if key[0] == assertion for truth in values]
        share = round((sum(truths) + 1) / (len(truths) + 2), 3)
        rows.append({"assertion": assertion, "certainty": "", "basis": basis, "probability": share})
    return rows + [
        {"assertion": "uncertain", "certainty": hedge, "basis": "", "probability": share}
        for hedge, share in HEDGES.items()
    ]


def score_mentions(cases: Sequence[GoldMentions], language: str = ENGLISH) -> dict[str, Any]:
    marked = found = correct = whole = 0
    for case in cases:
        got = [str(mention) for mention in find_mentions(case.text, language)]
        left = list(case.expected)
        for one in got:
            if one in left:
                left.remove(one)
                correct += 1
        marked += len(case.expected)
        found += len(got)
        whole += got == list(case.expected)
    return {
        "cases": len(cases),
        "whole_cases_right": whole,
        "marked": marked,
        "found": found,
        **scores(correct, found, marked),
    }


def tell_peer(
    python: Path, script: str, asked: Sequence[tuple[str, Sequence[tuple[int, int]]]]
) -> dict[str, Any]:
    """Return what a peer says of spans of some texts."""
    answer = subprocess.run(
        [python, Path(__file__).with_name(script)],
        input=json.dumps([{"text": text, "spans": spans} for text, spans in asked]),
        capture_output=True,
        check=True,
        text=True,
        timeout=300,
    )
    return cast("dict[str, Any]", json.loads(answer.stdout))


def ask_peer(python: Path, script: str, cases: Sequence[GoldSentence]) -> dict[str, Any]:
    """Ask a peer about the marked findings, told where they are, and score its answers."""
    told = tell_peer(python, script, [(case.text, [one.span for one in case.entities]) for case in cases])
    said = told.get("assertions") or [
        [None if one is None else ("absent" if one else "present") for one in row] for row in told["negated"]
    ]
    right = total = everything = 0
    groups: dict[str, list[int]] = {}
    for case, row in zip(cases, said, strict=True):
        for one, assertion in zip(case.entities, row, strict=True):
            everything += one.assertion == assertion
            if one.assertion in ("absent", "present"):
                total += 1
                is_right = assertion is not None and (assertion == "absent") == (one.assertion == "absent")
                right += is_right
                group = groups.setdefault(case.group or "all", [0, 0])
                group[0] += is_right
                group[1] += 1
    return {
        "versions": told["versions"],
        "absent_or_not_accuracy": round(right / max(1, total), 4),
        "num": total,
        "assertion_accuracy": round(everything / max(1, sum(len(case.entities) for case in cases)), 4),
        "absent_or_not_by_group": {
            name: {"accuracy": round(one / num, 4), "num": num} for name, (one, num) in sorted(groups.items())
        },
    }


def score_openi(
    given: Path | None, negspacy: Path | None, parts: Sequence[Part], errors: list[str]
) -> dict[str, Any] | str:
    """Score the halves of the real reports; a sentence where they are not there."""
    path = openi.find_archive(given)
    if path is None:
        return "not measured: the reports are in the package torchxrayvision; name its wheel with --openi."

    def negations(texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]) -> list[list[bool]]:
        assert negspacy is not None
        told = tell_peer(negspacy, "peer_negspacy.py", list(zip(texts, spans, strict=True)))
        return [[bool(one) for one in row] for row in told["negated"]]

    return {
        **{part: openi.score_part(path, part, negations if negspacy else None, errors) for part in parts},
        "entity_views": openi.compose_views(path),
        "speed": _speed([one.text for one in openi.read_reports(path, "development")][::5]),
    }


_ROUNDS = 9


def speed() -> dict[str, Any]:
    """Read reports made of the gold sentences, in one process; processor time of the best of some rounds."""
    texts = [case.text for part in PARTS for case in sentences(part)]
    report = "INDICATION: Cough.\n\nFINDINGS:\n{}\n\nIMPRESSION:\n{}\n"
    dense = [
        report.format(" ".join(texts[at : at + 18]), " ".join(texts[at + 18 : at + 22]))
        for at in range(0, len(texts) - 22, 7)
    ]
    plain = [case.text for case in styled_sentences("development") if not case.section][::5]
    usual = [
        report.format(" ".join(plain[at : at + 6]), " ".join(plain[at + 6 : at + 8]))
        for at in range(0, len(plain) - 8, 2)
    ]
    return {"usual": _speed(usual), "dense": _speed(dense)}


def _speed(reports: Sequence[str]) -> dict[str, Any]:
    reader = ReportReader()
    num_entities = sum(len(reader.read(one).entities) for one in reports)
    seconds = min(_seconds(reader, reports) for _ in range(_ROUNDS))
    return {
        "reports": len(reports),
        "characters_per_report": round(sum(map(len, reports)) / len(reports)),
        "entities_per_report": round(num_entities / len(reports), 1),
        "cpu_ms_per_report": round(1000 * seconds / len(reports), 3),
        "reports_per_s_per_core": round(len(reports) / seconds, 1),
    }


def _seconds(reader: ReportReader, reports: Sequence[str]) -> float:
    start = time.process_time()
    for one in reports:
        reader.read(one)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--negspacy", type=Path, help="python of an environment with negspacy and spacy")
    parser.add_argument("--medspacy", type=Path, help="python of an environment with medspacy and numpy 1")
    parser.add_argument("--openi", type=Path, help="NLMCXR_reports.tgz, or torchxrayvision's wheel")
    parser.add_argument("--errors", type=Path, help="write the styled sentences that were read wrongly")
    parser.add_argument("--part", choices=PARTS, action="append", help="score this part only")
    parser.add_argument("--fit", action="store_true", help="print the rows of probability.csv and stop")
    arguments = parser.parse_args()
    if arguments.fit:
        for row in fit_probabilities():
            print(",".join(str(row[name]) for name in row))
        return
    parts = arguments.part or PARTS
    errors: list[str] = []
    result = {
        "command": " ".join(["python", "-m", "benchmarks.reports.run", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "shardflow": __version__,
            "python": platform.python_version(),
            "pyahocorasick": version("pyahocorasick"),
        },
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "gold_sha256": {
            name: digest(name)
            for name in (
                "sentences.txt",
                "mentions.txt",
                "mentions_second.txt",
                *(f"styles/{style}.txt" for part in PARTS for style in ("words", *STYLES[part])),
                *(
                    f"{language}/{name}.txt"
                    for language, of in LANGUAGE_STYLES.items()
                    for name in ("words", "mentions", *of["development"], *of["test"])
                ),
            )
        },
        "entities": {part: score_entities(part) for part in parts},
        "styles": {part: score_styles(part, errors) for part in parts},
        "calibration": {part: calibration(part) for part in parts},
        "mentions": {part: score_mentions(mentions(part)) for part in parts},
        "languages": {
            language: {part: score_language(language, part, errors) for part in parts}
            for language in LANGUAGE_STYLES
        },
        "speed": speed(),
    }
    for name in ("negspacy", "medspacy"):
        python = getattr(arguments, name)
        if python:
            result[name] = {
                part: {
                    "sentences": ask_peer(python, f"peer_{name}.py", sentences(part)),
                    "styles": ask_peer(python, f"peer_{name}.py", styled_sentences(part)),
                }
                for part in parts
            }
    result["openi"] = score_openi(arguments.openi, arguments.negspacy, parts, errors)
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.errors:
        arguments.errors.write_text("\n".join(errors) + "\n", encoding="utf-8")
    if arguments.output:
        arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
