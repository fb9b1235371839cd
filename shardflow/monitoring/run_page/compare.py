"""The page that compares two runs: a table of what differs, and the same charts overlaid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from shardflow.monitoring.lines import damage_note
from shardflow.monitoring.run_page import sections
from shardflow.monitoring.run_page.chart import Places, chart_json, has_values, places_json
from shardflow.monitoring.run_page.compare_charts import LETTERS, comparison_charts
from shardflow.monitoring.run_page.differences import (
    Difference,
    differences,
    different_settings,
    loss_caution,
)
from shardflow.monitoring.run_page.html import document, figure, note, section, table, toolbar
from shardflow.monitoring.run_page.page import facts
from shardflow.monitoring.run_page.reading import RunNumbers
from shardflow.monitoring.run_page.run_charts import run_places
from shardflow.monitoring.run_page.scales import show
from shardflow.monitoring.run_page.stretch_charts import LOOP_STAGES, loader_stages
from shardflow.monitoring.run_page.svg import WIDTH

__all__ = ["render_comparison"]

_TITLES: Final = {
    "timeline": "Timeline",
    "learning": "Learning",
    "loading": "Loading",
    "ranks": "Ranks",
    "memory": "Memory",
}
_BAR_ROW: Final = 26


def render_comparison(runs: tuple[RunNumbers, RunNumbers]) -> str:
    """Write the page about two runs.

    Returns:
        HTML. Equal runs give equal text.
    """
    places: dict[str, Places] = {}
    for run, letter in zip(runs, LETTERS, strict=True):
        places |= run_places(run, f"{letter}.")
    ends = sections.ends_of(runs, [places])
    charts = comparison_charts(runs)
    figures = {key: "".join(figure(one, places, ends) for one in found) for key, found in charts.items()}
    found = differences(runs)
    parts = [
        _head(runs),
        section("differences", "What differs", _differences(runs, found)),
        toolbar(),
        section("timeline", _TITLES["timeline"], figures["timeline"] + _downsampled(runs)),
        section("learning", _TITLES["learning"], figures["learning"]),
        section("stages", "Stages", _stages(runs)),
        *(section(key, _TITLES[key], figures[key]) for key in ("loading", "ranks", "memory")),
        section("goodput", "Goodput", _goodput(runs)),
        section("verdicts", "What they were bound by", _verdicts(runs)),
        section("settings", "Settings that differ", _settings(runs)),
    ]
    numbers = {
        "runs": [facts(run) for run in runs],
        "differences": [one.to_json() for one in found],
        "settings": {name: list(values) for name, values in different_settings(runs).items()},
        "ends": ends,
        "places": places_json(places),
        "charts": {
            chart.key: chart_json(chart)
            for group in charts.values()
            for chart in group
            if any(map(has_values, chart.series))
        },
        "heat": {"begins": {}, "stops": {}, "maps": {}},
    }
    title = f"Runs {runs[0].name} and {runs[1].name}"
    return document(title=title, body="".join(parts), numbers=numbers)


def _head(runs: Sequence[RunNumbers]) -> str:
    lines = []
    for run, letter in zip(runs, LETTERS, strict=True):
        began = sections.when(run.began_at_s) if run.began_at_s else "no measurements yet"
        state = f"; {escape(run.outcome or 'goes on, or was killed')}" if run.began_at_s else ""
        lines.append(
            f'<p><i class="{letter}"></i><b class="{letter}">{letter.upper()}</b> {escape(run.name)} '
            f"<em>{began}{state}</em></p>"
        )
        if run.num_damaged:
            lines.append(f"<p class=warning>{letter.upper()}: {damage_note(run.num_damaged)}</p>")
    return (
        "<header class=two><p class=kind>Two training runs</p>"
        f"<h1>{escape(runs[0].name)} and {escape(runs[1].name)}</h1>{''.join(lines)}</header>"
    )


def _differences(runs: Sequence[RunNumbers], found: Sequence[Difference]) -> str:
    rows = []
    for one in found:
        change = one.change
        kind = ""
        if change is not None and one.is_better is not None and abs(change) >= 0.01:
            kind = "better" if one.is_better else "worse"
        rows.append(
            (
                escape(one.name),
                *(escape(show(value, one.unit)) for value in (one.a, one.b)),
                f'<span class="{kind}">{escape(one.shown_change)}</span>',
            )
        )
    heads = tuple(
        f'#<b class="{letter}">{letter.upper()}</b> {escape(run.name)}'
        for run, letter in zip(runs, LETTERS, strict=True)
    )
    caution = loss_caution(runs)
    return table(("", *heads, "#B against A"), rows) + (note(escape(caution)) if caution else "")


def _downsampled(runs: Sequence[RunNumbers]) -> str:
    most = max(run.steps_per_row for run in runs)
    if most == 1:
        return ""
    return note(f"A place holds up to {most:,} steps: their median, in a band from the least to the most.")


def _stages(runs: Sequence[RunNumbers]) -> str:
    if not any(run.stretches for run in runs):
        return ""
    loop = [(name, [_loop_share(run, name) for run in runs]) for name in LOOP_STAGES]
    names = list(dict.fromkeys(name for run in runs for name in loader_stages(run.stretches)))
    loader = [(name, [_threads(run, name) for run in runs]) for name in names]
    return _bars("The training loop, shares of all ranks' time", "share", loop) + _bars(
        "The loader, threads of a rank at work", "", loader
    )


def _loop_share(run: RunNumbers, name: str) -> float:
    total = sum(row.rank_wall_s for row in run.stretches)
    return sum(row.stage_s.get(name, 0.0) for row in run.stretches) / total if total else 0.0


_threads = _loop_share
"""The same quotient: of stages at which threads work it is how many did, as a mean."""


def _bars(title: str, unit: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    rows = [(name, values) for name, values in rows if any(values)]
    if not rows:
        return ""
    most = max(max(values) for _, values in rows)
    left, room = 130, WIDTH - 240
    parts = []
    for place, (name, values) in enumerate(rows):
        y = place * _BAR_ROW + 2
        parts.append(
            f'<text class="label" x="{left - 8}" y="{y + 14}" text-anchor="end">'
            f"{escape(name.replace('_', ' '))}</text>"
        )
        for number, (value, letter) in enumerate(zip(values, LETTERS, strict=True)):
            width, top, text = value / most * room, y + 10 * number, escape(show(value, unit))
            parts.append(
                f'<rect class="fill {letter}" x="{left}" y="{top}" width="{max(width, 0.5):.1f}" height="9">'
                f"<title>{letter.upper()}: {text}</title></rect>"
                f'<text class="value" x="{left + width + 6:.1f}" y="{top + 8.5}">{text}</text>'
            )
    height = len(rows) * _BAR_ROW + 4
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class=bars viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _goodput(runs: Sequence[RunNumbers]) -> str:
    bars = "".join(
        f'<p class=splitname><b class="{letter}">{letter.upper()}</b> {escape(run.name)}</p>'
        f"{sections.goodput(run.goodput)}"
        for run, letter in zip(runs, LETTERS, strict=True)
        if run.goodput.wall_s
    )
    if not bars:
        return ""
    rows = [
        (f'<i class="{colour}"></i>{label}', *(cell for run in runs for cell in _part(run, key)))
        for key, label, colour in sections.GOODPUT_PARTS
    ]
    return bars + table(("", "#A", "#", "#B", "#"), rows, "narrow")


def _part(run: RunNumbers, key: str) -> tuple[str, str]:
    seconds, wall_s = getattr(run.goodput, key), run.goodput.wall_s
    return escape(show(seconds, "s")), show(seconds / wall_s if wall_s else None, "share")


def _verdicts(runs: Sequence[RunNumbers]) -> str:
    found = [_verdict_shares(run) for run in runs]
    codes = sorted(
        {code for one in found for code in one}, key=lambda code: -max(one.get(code, 0.0) for one in found)
    )
    rows = [
        (escape(code), *(show(one[code], "share") if code in one else "" for one in found)) for code in codes
    ]
    return (
        table(("most important verdict", "#A, of all steps", "#B, of all steps"), rows, "narrow")
        if rows
        else ""
    )


def _verdict_shares(run: RunNumbers) -> Mapping[str, float]:
    total = sum(one.num_steps for one in run.verdicts) or 1
    return {one.code: one.num_steps / total for one in run.verdicts if one.num_steps}


def _settings(runs: tuple[RunNumbers, RunNumbers]) -> str:
    rows = [
        (f"<code>{escape(name)}</code>", escape(a), escape(b))
        for name, (a, b) in different_settings(runs).items()
    ]
    if rows:
        return table(("setting", "A", "B"), rows) + note("Paths and addresses are cut to their last part.")
    return note("None, as far as the run folders tell.") if any(run.settings for run in runs) else ""
