"""The table of docs/comparison.md, made from the recorded numbers and nothing else.

    python -m benchmarks.peers.table

Rewrites what stands between the two markers of the page; a test holds the page to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "page_with_tables", "tables"]

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "peers_epochs.json"
PAGE = REPOSITORY / "docs" / "comparison.md"
_BEGIN, _END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def page_with_tables(page: str, results: dict[str, Any]) -> str:
    """Return the page with the tables of these results between its markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables(results)}\n{_END}{after}"


def tables(results: dict[str, Any]) -> str:
    """Return the table as Markdown: each peer at its best setting."""
    rows = []
    for peer in results["peers"].values():
        name, setting = max(peer["settings"].items(), key=lambda item: _rank(item[1]))
        cells = (f"{peer['name']} {peer['version']}", f"`{name}`", *_epochs(setting), *_resumes(setting))
        rows.append(cells)
    head = ("loader", "setting", "batches of the ranks", "dropped", "repeated")
    resumes = ("resume, same world", "resume, other worlds")
    parts = [_table((*head, "same steps as one rank", *resumes), rows), _made_by(results)]
    return "\n".join(parts)


def _rank(setting: dict[str, Any]) -> tuple[float, ...]:
    """Order settings: ends, equal lengths, resumes (exact, any), equal steps; then the fewest samples off."""
    epochs, resumes = setting["epochs"], setting["resumes"]
    return (
        _share(epoch["end"] == "end" for epoch in epochs),
        _share(epoch["is_equal"] for epoch in epochs),
        _share(bool(resume.get("is_exact")) for resume in resumes),
        _share(resume["end"] == "end" for resume in resumes),
        _share(epoch["num_same_steps"] == epoch["num_steps"] for epoch in epochs),
        -max(epoch["num_dropped"] + epoch["num_repeated"] for epoch in epochs),
    )


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _epochs(setting: dict[str, Any]) -> tuple[str, ...]:
    epochs = setting["epochs"]
    ended = [epoch for epoch in epochs if epoch["end"] == "end"]
    unequal = [epoch["batches_per_rank"] for epoch in epochs if not epoch["is_equal"]]
    batches = "equal"
    if unequal:
        worst = max(unequal, key=lambda counts: max(counts) - min(counts))
        batches = f"unequal: {', '.join(map(str, worst))}"
    if len(ended) < len(epochs):
        batches += "; fails with " + ", ".join(_place(epoch) for epoch in epochs if epoch["end"] != "end")
    first = (epochs[0]["world_size"], epochs[0]["num_workers"])
    others = [epoch for epoch in epochs if (epoch["world_size"], epoch["num_workers"]) != first]
    same = sum(epoch["num_same_steps"] == epoch["num_steps"] for epoch in others)
    return (
        batches,
        _span(epoch["num_dropped"] for epoch in ended),
        _span(epoch["num_repeated"] for epoch in ended),
        f"{same} of {len(others)} runs",
    )


def _resumes(setting: dict[str, Any]) -> tuple[str, str]:
    same, *others = (_resumed(resume) for resume in setting["resumes"])
    return same, "; ".join(dict.fromkeys(others))


def _resumed(resume: dict[str, Any]) -> str:
    if resume["end"] != "end":
        return resume["end"] if resume["end"] in {"hang", "crash", "not offered"} else "refused"
    if resume["is_exact"]:
        return "exact"
    if not resume["is_repeatable"]:
        return "the epoch cannot be repeated"
    off = [
        f"{verb} {resume[key]}"
        for verb, key in (("repeats", "num_repeated"), ("loses", "num_lost"))
        if resume[key]
    ]
    if len(set(resume["batches_per_rank"])) > 1:
        off.append(f"unequal: {', '.join(map(str, resume['batches_per_rank']))}")
    return ", ".join((*off, f"{resume['num_same_steps']} of {resume['num_wanted_steps']} steps the same"))


def _place(run: dict[str, Any]) -> str:
    ranks = "1 rank" if run["world_size"] == 1 else f"{run['world_size']} ranks"
    return f"{ranks} x {run['num_workers']} workers"


def _span(values: Iterable[int]) -> str:
    found = sorted(set(values))
    if not found:
        return "-"
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _made_by(results: dict[str, Any]) -> str:
    """Say where, when and with what; once for peers that agree in it."""
    found: dict[str, list[str]] = {}
    for peer in results["peers"].values():
        hardware = peer["hardware"]
        where = (
            f"{peer['date']}, {hardware['num_cpus']} processors ({hardware['processor']}), "
            f"Python {peer['python']}, torch {peer['torch']}, deadline {peer['deadline_s']:g} s"
        )
        found.setdefault(where, []).append(f"{peer['name']} {peer['version']}")
    return "".join(f"Run: {', '.join(names)}: {where}.\n" for where, names in found.items())


if __name__ == "__main__":
    main()
