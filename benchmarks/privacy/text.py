"""Recall of the scrubbers on the planted corpus by category and language, what they lose, and speed.

    python -m benchmarks.privacy.text [--presidio PYTHON] [--openi ARCHIVE] [-o FILE]

Rules were written with the development part; the test part is only measured. `--presidio` names the Python of
an environment with presidio-analyzer: it runs with its default regular expressions and a blank tokenizer,
because its names come from a model that would have to be downloaded. Its languages are set to English.

Words lost are also counted where nobody is named: in the sentences of ``benchmarks/reports/gold`` in five
languages, and in the real reports of Open-i, whose identifiers were replaced by ``XXXX`` (`--openi`: see
``benchmarks/reports/openi.py``). Their development halves were read to find words that lists lacked; their
test halves were only measured.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.about import about_run
from benchmarks.reports.gold_sets import Part, language_sentences, sentences, styled_sentences
from benchmarks.reports.openi import find_archive, read_reports
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.pseudonyms import ReportTextMode
from shardflow.packing.deid.report_text import find_spans
from shardflow.synthetic.identifiers import Measured, PlantedText, measure, plant

_RESULTS = Path(__file__).parent.parent / "results" / "privacy_text.json"
_NUM_VALUES = 8
_NUM_TIMED = 20
_PRESIDIO = """
import json, sys, logging
logging.disable(logging.CRITICAL)
import spacy
from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
from presidio_analyzer.nlp_engine import NlpArtifacts, SpacyNlpEngine
class Blank(SpacyNlpEngine):
    def __init__(self):
        super().__init__()
        self.nlp = {"en": spacy.blank("en")}
registry = RecognizerRegistry()
registry.load_predefined_recognizers(languages=["en"])
engine = AnalyzerEngine(nlp_engine=Blank(), registry=registry, supported_languages=["en"])
for line in sys.stdin:
    found = engine.analyze(text=json.loads(line), language="en")
    print(json.dumps([[one.start, one.end] for one in found]), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presidio", metavar="PYTHON", type=Path)
    parser.add_argument("--openi", metavar="ARCHIVE", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "about": about_run(["rapidfuzz"]),
        "what": "generated texts; nothing is known from headers; a fault is a token left or a word lost",
        "parts": {},
    }
    for part in _PARTS:
        texts = list(plant(part, num_values=_NUM_VALUES))
        runs: dict[str, Any] = {}
        for mode in ("strict", "scrub"):
            runs[mode] = _run(
                texts,
                lambda text, mode=mode: [  # type: ignore[misc]
                    (span.start, span.end) for span in find_spans(text, _NOBODY, mode=mode)
                ],
            )
        if arguments.presidio is not None:
            with subprocess.Popen(
                [arguments.presidio, "-c", _PRESIDIO],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                runs["presidio-analyzer, regular expressions"] = _run(texts, lambda text: _ask(process, text))
        results["parts"][part] = runs
    results["words_lost_where_nobody_is_named"] = {part: _lost(part, arguments.openi) for part in _PARTS}
    reports = ["\n".join(one.text for one in _ENGLISH[at::_NUM_TIMED]) for at in range(_NUM_TIMED)]
    results["ms_per_report"] = {
        mode: round(_speed(reports, lambda text, mode=mode: find_spans(text, _NOBODY, mode=mode)), 3)  # type: ignore[misc]
        for mode in ("strict", "scrub")
    }
    results["characters_per_report"] = sum(map(len, reports)) // len(reports)
    arguments.output.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for part, runs in results["parts"].items():
        for name, run in runs.items():
            print(part, name, {key: value for key, value in run.items() if not isinstance(value, dict)})
    print(results["words_lost_where_nobody_is_named"])
    print(results["ms_per_report"])


def _lost(part: Part, openi: Path | None) -> dict[str, Any]:
    """Return the words that each mode loses in different sentences and reports that name nobody."""
    texts = {
        "sentences, English": [one.text for one in (*sentences(part), *styled_sentences(part))],
        **{
            f"sentences, {language.title()}": [one.text for one in language_sentences(language, part)]
            for language in ("chinese", "french", "german", "spanish")
        },
    }
    archive = find_archive(openi)
    if archive is not None:
        texts["reports of Open-i"] = [one.text for one in read_reports(archive, part)]
    return {
        name: {"texts": len(set(those)), **{mode: _lost_of(set(those), mode) for mode in _MODES}}
        for name, those in texts.items()
    }


def _lost_of(texts: set[str], mode: ReportTextMode) -> dict[str, Any]:
    words = lost = 0
    for text in texts:
        spans = find_spans(text, _NOBODY, mode=mode)
        for match in _WORD.finditer(text):
            if set(match[0].lower()) != {"x"}:
                words += 1
                lost += any(span.start < match.end() and match.start() < span.end for span in spans)
    return {"words": words, "lost": lost, "lost_share": round(lost / words, 6)}


_NOBODY = KnownValues(())
_PARTS: tuple[Part, ...] = ("development", "test")
_MODES: tuple[ReportTextMode, ...] = ("strict", "scrub")
_WORD = re.compile(r"[\u3400-\u9fff]|(?:(?![\u3400-\u9fff])[^\W\d_]){2,}")
_ENGLISH = [text for text in plant("development", num_values=1) if text.language == "en"]


def _run(texts: list[PlantedText], find: Callable[[str], Any]) -> dict[str, Any]:
    started = time.process_time()
    result: Measured = measure(texts, find)
    seconds = time.process_time() - started
    return {**result.table(), "ms_per_text": round(1000 * seconds / len(texts), 4)}


def _ask(process: subprocess.Popen[str], text: str) -> list[tuple[int, int]]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(text) + "\n")
    process.stdin.flush()
    return [(start, end) for start, end in json.loads(process.stdout.readline())]


def _speed(reports: list[str], find: Callable[[str], Any]) -> float:
    """Return milliseconds of processor time a report; the best of five rounds."""
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for report in reports:
            find(report)
        rounds.append(1000 * (time.process_time() - started) / len(reports))
    return min(rounds)


if __name__ == "__main__":
    main()
