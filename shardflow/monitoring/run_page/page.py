"""The page about one run: one HTML file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from shardflow.monitoring.lines import damage_note
from shardflow.monitoring.run_page import sections
from shardflow.monitoring.run_page.chart import chart_json, has_values, places_json, rounded
from shardflow.monitoring.run_page.columns import MOST_RANKS
from shardflow.monitoring.run_page.heat import HeatMap, draw_heat, heat_json, heat_maps
from shardflow.monitoring.run_page.html import document, figure, note, section, toolbar
from shardflow.monitoring.run_page.reading import RunNumbers
from shardflow.monitoring.run_page.run_charts import run_charts, run_places
from shardflow.monitoring.run_page.scales import BY_STEP, BY_TIME, show

__all__ = ["facts", "render_run_page"]

_TITLES: Final = {
    "timeline": "Timeline",
    "learning": "Learning",
    "stages": "Stages",
    "tiers": "Where bytes come from",
    "ranks": "Ranks",
    "memory": "Memory",
}


def render_run_page(run: RunNumbers) -> str:
    """Write the page about a run.

    Returns:
        HTML. Equal runs give equal text.
    """
    places = run_places(run)
    ends = sections.ends_of([run], [places])
    charts = run_charts(run) if run.num_steps or run.stretches else {}
    heats = heat_maps(run.stretches)
    figures = {key: "".join(figure(chart, places, ends) for chart in found) for key, found in charts.items()}
    figures["timeline"] = figures.get("timeline", "") + _downsampled(run)
    figures["ranks"] = _ranks(run, heats, ends) + figures.get("ranks", "")
    parts = [
        _head(run),
        sections.cards(run),
        _remarks(run),
        toolbar() if charts else "",
        section("verdicts", "What it was bound by", sections.verdicts(run, ends)),
        *(section(key, title, figures.get(key, "")) for key, title in _TITLES.items()),
        section("goodput", "Goodput", sections.goodput(run.goodput) + sections.goodput_table(run.goodput)),
        section("restarts", "Starts", sections.restarts(run)),
        section("tuner", "What the tuner did", sections.moves(run)),
        section("settings", "Settings", sections.settings(run)),
        section("surroundings", "Where it ran", sections.surroundings(run)),
    ]
    numbers = {
        "runs": [facts(run)],
        "ends": ends,
        "places": places_json(places),
        "charts": {
            chart.key: chart_json(chart)
            for found in charts.values()
            for chart in found
            if any(map(has_values, chart.series))
        },
        "heat": _heat_numbers(run, heats),
    }
    return document(title=f"Run {run.name}", body="".join(parts), numbers=numbers)


def facts(run: RunNumbers) -> dict[str, Any]:
    """Return the numbers of a run that are no series, for tools that read the page."""
    return {
        "name": run.name,
        "num_steps": run.num_steps,
        "wall_s": run.wall_s,
        "total_samples": run.total_samples,
        "total_tokens": run.total_tokens,
        "goodput": run.goodput.to_json(),
        "restarts": [
            {"step": one.step, "reached": one.reached, "num_lost_steps": one.num_lost_steps}
            for one in run.restarts
        ],
        "verdicts": [
            {"code": one.code, "num_steps": one.num_steps, "number": one.number} for one in run.verdicts
        ],
        "num_moves": run.num_moves,
        "num_checkpoints": sum(one.number for one in run.checkpoints),
        "steps_per_row": run.steps_per_row,
    }


def _head(run: RunNumbers) -> str:
    span = "no measurements yet"
    if run.began_at_s:
        newest = sections.when(run.began_at_s + run.wall_s)
        state = run.outcome or "goes on, or was killed"
        span = f"{sections.when(run.began_at_s)} to {newest}; {escape(state)}"
    return f"<header><p class=kind>Training run</p><h1>{escape(run.name)}</h1><p>{span}</p></header>"


def _remarks(run: RunNumbers) -> str:
    remarks = []
    if not run.num_steps:
        remarks.append("No step was measured yet; make the page again once there are some.")
    elif not run.stretches:
        remarks.append(
            "This run wrote no intervals (an older version, <code>monitor.interval_s = 0</code>, or only its "
            "first seconds): stages, tiers, ranks and memory are not known."
        )
    if run.num_damaged:
        remarks.append(damage_note(run.num_damaged))
    return "".join(f"<p class=warning>{remark}</p>" for remark in remarks)


def _downsampled(run: RunNumbers) -> str:
    if run.steps_per_row == 1:
        return ""
    return note(
        f"A place of these charts holds {run.steps_per_row:,} steps: the line is their median, the band "
        "reaches from the least to the most, stacks are means. No step is left out of them."
    )


def _ranks(run: RunNumbers, heats: list[HeatMap], ends: Mapping[str, float]) -> str:
    if not heats:
        return ""
    parts = []
    for heat in heats:
        drawn = "".join(draw_heat(heat, by=by, end=ends[by]) for by in (BY_STEP, BY_TIME))
        most = show(heat.most, "share")
        parts.append(
            f'<figure data-heat="{heat.key}"><figcaption>{escape(heat.title)} <em>strongest: {most} of '
            f"the steps' time</em></figcaption>{drawn}</figure>"
        )
    world_size = run.latest.world_size if run.latest else 0
    if world_size > len(heats[0].ranks):
        text = f"The {len(heats[0].ranks)} of {world_size:,} ranks that computed and waited for data most."
        if world_size > MOST_RANKS:
            text += f" Of an interval the {MOST_RANKS} slowest ranks are written, so quantiles are of these."
        parts.append(note(text))
    return "".join(parts)


def _heat_numbers(run: RunNumbers, heats: list[HeatMap]) -> dict[str, Any]:
    rows = run.stretches
    return {
        "begins": {BY_STEP: [row.first for row in rows], BY_TIME: rounded([row.began_s for row in rows])},
        "stops": {BY_STEP: [row.last + 1 for row in rows], BY_TIME: rounded([row.ended_s for row in rows])},
        "maps": {heat.key: heat_json(heat) for heat in heats},
    }
