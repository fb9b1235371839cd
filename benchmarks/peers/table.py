"""The tables of docs/comparison.md, made from the recorded numbers and nothing else.

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
_ERROR_CHARACTERS = 160


def main() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def page_with_tables(page: str, results: dict[str, Any]) -> str:
    """Return the page with the tables of these results between its markers."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables(results)}\n{_END}{after}"


def tables(results: dict[str, Any]) -> str:
    """Return three tables as Markdown: each peer at its best, all epochs, all resumes."""
    notes = _Notes()
    rows = [
        (peer["name"], peer["version"], name, setting)
        for peer in results["peers"].values()
        for name, setting in peer["settings"].items()
    ]
    best = [
        max((row for row in rows if row[0] == peer["name"]), key=lambda row: _rank(row[3]))
        for peer in results["peers"].values()
    ]
    head = ("loader", "setting")
    epoch_head = ("batches of the ranks", "dropped", "repeated", "same steps as one rank", "in lockstep")
    resume_head = tuple(_resume_title(cell) for cell in _fullest(rows))
    parts = [
        "### Each at its best setting\n",
        _table(
            (*head, *epoch_head[:4], "resume, same world", "resume, other worlds"),
            [
                (f"{name} {version}", f"`{setting}`", *_epochs(found)[:4], *_best_resumes(found))
                for name, version, setting, found in best
            ],
        ),
        "### One epoch, all settings\n",
        _table(
            (*head, *epoch_head),
            [(name, f"`{setting}`", *_epochs(found, notes)) for name, _, setting, found in rows],
        ),
        f"### Stopped after {results['content']['stopped']['after_steps']} steps, and resumed\n",
        _table(
            (*head, *resume_head),
            [
                (name, f"`{setting}`", *_padded(_resumes(found, notes), len(resume_head)))
                for name, _, setting, found in rows
            ],
        ),
        *(f"[{number}] `{text}`\n" for number, text in enumerate(notes.texts, start=1)),
        _made_by(results),
    ]
    return "\n".join(parts)


class _Notes:
    """What peers said, numbered in the order of the tables."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> str:
        short = text.replace("`", "'").replace("|", "/")
        short = short if len(short) <= _ERROR_CHARACTERS else f"{short[: _ERROR_CHARACTERS - 3]}..."
        if short not in self.texts:
            self.texts.append(short)
        return f"[{self.texts.index(short) + 1}]"


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


def _epochs(setting: dict[str, Any], notes: _Notes | None = None) -> tuple[str, ...]:
    epochs = setting["epochs"]
    unequal = [epoch for epoch in epochs if not epoch["is_equal"]]
    batches = "equal"
    if unequal:
        worst = max(
            unequal, key=lambda epoch: max(epoch["batches_per_rank"]) - min(epoch["batches_per_rank"])
        )
        batches = f"unequal: {', '.join(map(str, worst['batches_per_rank']))}"
    failed = [epoch for epoch in epochs if epoch["end"] != "end"]
    if failed:
        where = ", ".join(_place(epoch) for epoch in failed)
        note = "" if notes is None else " ".join(dict.fromkeys(_end(epoch["end"], notes) for epoch in failed))
        batches += f"; {note or 'fails'} with {where}"
    others = [epoch for epoch in epochs if (epoch["world_size"], epoch["num_workers"]) != _first(epochs)]
    same = sum(epoch["num_same_steps"] == epoch["num_steps"] for epoch in others)
    lockstep = [f"{run['end']} ({_place(run)})" for run in setting["together"]]
    return (
        batches,
        _span(epoch["num_dropped"] for epoch in epochs if epoch["end"] == "end"),
        _span(epoch["num_repeated"] for epoch in epochs if epoch["end"] == "end"),
        f"{same} of {len(others)} runs",
        ", ".join(lockstep) or "-",
    )


def _first(epochs: list[dict[str, Any]]) -> tuple[int, int]:
    return epochs[0]["world_size"], epochs[0]["num_workers"]


def _resumes(setting: dict[str, Any], notes: _Notes) -> list[str]:
    return [_resumed(resume, notes) for resume in setting["resumes"]]


def _resumed(resume: dict[str, Any], notes: _Notes) -> str:
    if resume["end"] != "end":
        return _end(resume["end"], notes)
    if resume["is_exact"]:
        return "exact"
    if not resume["is_repeatable"]:
        return "the epoch cannot be repeated"
    off = [
        f"{verb} {resume[key]}"
        for verb, key in (("repeats", "num_repeated"), ("loses", "num_lost"))
        if resume[key]
    ]
    steps = f"{resume['num_same_steps']} of {resume['num_wanted_steps']} steps the same"
    if len(set(resume["batches_per_rank"])) > 1:
        off.append(f"unequal: {', '.join(map(str, resume['batches_per_rank']))}")
    return ", ".join((*off, steps))


def _best_resumes(setting: dict[str, Any]) -> tuple[str, str]:
    same, *others = setting["resumes"]
    words = _Notes()
    found = dict.fromkeys(_bare(_resumed(resume, words)) for resume in others)
    return _bare(_resumed(same, words)), "; ".join(found)


def _bare(cell: str) -> str:
    return cell.partition(" [")[0]


def _end(text: str, notes: _Notes) -> str:
    if text in {"hang", "crash", "not offered"}:
        return text
    return f"refused {notes.number(text)}"


def _padded(cells: list[str], width: int) -> list[str]:
    """Leave out the column that a setting with a fixed number of workers has none for."""
    return cells if len(cells) == width else [cells[0], "-", *cells[1:]]


def _fullest(rows: Iterable[tuple[str, str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    resumes: list[dict[str, Any]] = max((row[3]["resumes"] for row in rows), key=len)
    return resumes


def _resume_title(resume: dict[str, Any]) -> str:
    return f"on {_place(resume)}"


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
