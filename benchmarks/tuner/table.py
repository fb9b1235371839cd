"""Writes the table of docs/tuning.md from the recorded numbers.

python -m benchmarks.tuner.table
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["make_table"]

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "tuner.json"
PAGE = REPOSITORY / "docs" / "tuning.md"
_BEGIN, _END = "<!-- tuner: begin -->\n", "<!-- tuner: end -->"
_BOUND = {
    "store": "a link with 60 ms to the first byte, behind a cache",
    "decode": "decoding",
    "python": "a trainer busy in Python",
    "compute": "a model on the same processors",
}


def make_table(results: Mapping[str, Any]) -> str:
    """Return a row for each job and start."""
    rows = [
        "| bound by | start | untuned | tuned | steps to settle | changes kept |",
        "|---|---|---|---|---|---|",
    ]
    for name, job in results["jobs"].items():
        for start in ("default", "bad"):
            tuned = job["tuned"][start]
            final = job["final"]
            kept = sum(move[1] == "keep" for move in tuned["moves"])
            tries = sum(move[1] == "try" for move in tuned["moves"])
            cells = [
                _BOUND[name],
                start,
                f"{final[f'{start}, untuned']['share']:.0%}",
                f"**{final[f'from {start} start']['share']:.0%}**",
                str(tuned["steps_to_settle"]),
                f"{kept} of {tries}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    about = (
        f"Measured {results['date']} on {results['num_cores']} cores ({results['processor']}), "
        f"{results['steps']} steps a measurement, {results['rounds'] + 1} in turns; 100 % is the best "
        "setting of the sweep, measured again beside the others."
    )
    return "\n".join([*rows, "", about]) + "\n"


def main() -> int:
    """Write it into the page."""
    table = make_table(json.loads(RESULTS.read_text(encoding="utf-8")))
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
