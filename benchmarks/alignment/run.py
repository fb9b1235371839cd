"""How well findings are placed on slices, and whether their confidence holds, on generated studies.

    python -m benchmarks.alignment.run --output benchmarks/results/alignment.json

Studies are generated, packed, and read back; their truth knows which slices show which lesion. Weights were
chosen with the settings of the part ``tuning`` alone (``--part tuning``); ``test`` has other seeds, sizes,
oddities and rates, and is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.alignment.scoring import StudyScore, score_study, summary
from benchmarks.alignment.settings import SETTINGS, Part, Setting
from benchmarks.alignment.studies import packed_studies
from benchmarks.plan.scale import processor
from shardflow import __version__
from shardflow.config import load_config
from shardflow.reports import ReportReader
from shardflow.reports.alignment.aligning import align
from shardflow.reports.alignment.evidence import RULES_VERSION, AlignmentRules

PARTS: tuple[Part, ...] = ("tuning", "test")


def run_setting(
    setting: Setting, num_studies: int, rules: AlignmentRules
) -> tuple[list[StudyScore], dict[str, Any]]:
    reader = ReportReader()
    scores: list[StudyScore] = []
    spent, num_stored, num_equal = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for one in packed_studies(setting, num_studies, Path(folder)):
            report = json.loads(json.dumps(reader.read(one.text).to_json()))
            start = time.process_time()
            aligned = align(one.study, report, one.annotations, rules, text=one.text)
            spent += time.process_time() - start
            if one.stored is not None and one.annotations is None:
                num_stored += 1
                num_equal += one.stored == aligned
            scores.append(score_study(one, aligned, report))
    facts = {
        "settings": setting.synth(num_studies).to_json(),
        "marks": asdict(setting.marks) if setting.marks else None,
        "ms_per_study": round(1000 * spent / max(1, len(scores)), 3),
        "packed_alignments_equal": f"{num_equal} of {num_stored}",
        **summary(scores, rules.threshold),
    }
    return scores, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--studies", type=int, default=50, help="of each setting (50)")
    parser.add_argument("--part", choices=PARTS, action="append", help="score this part only")
    parser.add_argument("--rules", type=Path, help="TOML file of weights")
    arguments = parser.parse_args()
    rules = load_config(AlignmentRules, arguments.rules) if arguments.rules else AlignmentRules()
    result: dict[str, Any] = {
        "command": " ".join(["python", "-m", "benchmarks.alignment.run", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"shardflow": __version__, "python": platform.python_version(), "rules": RULES_VERSION},
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "rules": {**asdict(rules), "digest": rules.digest()},
    }
    for part in arguments.part or PARTS:
        scores: list[StudyScore] = []
        settings: dict[str, Any] = {}
        for setting in SETTINGS:
            if setting.part == part:
                own, settings[setting.name] = run_setting(setting, arguments.studies, rules)
                scores += own
        facts = summary(scores, rules.threshold)
        result[part] = {"all": facts, "settings": settings}
        error = facts["calibration"]["expected_error"]
        print(f"{part}: expected calibration error {error}, {facts['above_the_threshold']}", file=sys.stderr)
        if arguments.output:
            # After each part: the next one takes minutes.
            arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not arguments.output:
        print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
