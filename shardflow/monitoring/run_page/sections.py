"""The parts of the page about one run that are no charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Final

from shardflow.monitoring.goodput import Goodput
from shardflow.monitoring.run_page.chart import Places
from shardflow.monitoring.run_page.html import legend, note, table
from shardflow.monitoring.run_page.reading import RunNumbers, VerdictSpan
from shardflow.monitoring.run_page.scales import BY_STEP, BY_TIME, compact, duration, show
from shardflow.monitoring.run_page.settings import shown
from shardflow.monitoring.run_page.svg import TOP, WIDTH, X_UNITS, frame, x_axis
from shardflow.telemetry import Advice, Verdict
from shardflow.telemetry.knobs import setting_text

__all__ = [
    "GOODPUT_PARTS",
    "cards",
    "changed_settings",
    "code_colours",
    "goodput",
    "moves",
    "restarts",
    "settings",
    "surroundings",
    "verdicts",
    "when",
]

GOODPUT_PARTS: Final = (
    ("useful_s", "steps that count", "useful"),
    ("data_wait_s", "waiting for data in them", "wait"),
    ("checkpoint_s", "standing still for checkpoints", "saved"),
    ("evaluation_s", "evaluations", "evaluated"),
    ("restart_s", "starts and restarts", "stopped"),
    ("lost_s", "work done again", "lost"),
    ("other_s", "between all that", "rest"),
)
_NUM_CODE_COLOURS: Final = 8
_STRIP_HEIGHT: Final = 22


def when(time_s: float) -> str:
    """Render a time of the clock."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def cards(run: RunNumbers) -> str:
    """The numbers that people ask for first."""
    good = run.goodput
    steps_s = good.useful_s + good.data_wait_s
    losses = [loss for loss in run.steps.get("loss_median", ()) if loss is not None]
    wait = good.data_wait_s / steps_s if steps_s else None
    total = f" of {run.num_planned_steps:,}" if run.num_planned_steps else ""
    values = [
        (f"{run.num_steps:,}", f"steps{total}"),
        (duration(run.wall_s), "since the first start"),
        (compact(good.num_steps / steps_s) if steps_s else "\u2013", "steps a second, in steps"),
        (show(wait, "share"), "of step time waits for data"),
        (show(good.useful_share if good.wall_s else None, "share"), "useful (goodput)"),
        (show(losses[-1] if losses else None, ""), "loss, last"),
    ]
    return (
        "<div class=cards>"
        + "".join(
            f"<div class=card><b>{escape(value)}</b><span>{escape(name)}</span></div>"
            for value, name in values
        )
        + "</div>"
    )


def code_colours(codes: Sequence[str]) -> dict[str, str]:
    """Give each verdict a colour, in an order that does not depend on the run."""
    return {code: f"code-{place % _NUM_CODE_COLOURS}" for place, code in enumerate(sorted(codes))}


def verdicts(run: RunNumbers, ends: Mapping[str, float]) -> str:
    """What the run was bound by, when, and what to do."""
    if not run.verdicts:
        return ""
    colours = code_colours([one.code for one in run.verdicts])
    used = [(colours[code], code) for code in dict.fromkeys(span.code for span in run.verdict_spans)]
    strip = "".join(_strip(run.verdict_spans, colours, by, ends[by]) for by in (BY_STEP, BY_TIME))
    judged = sum(one.num_steps for one in run.verdicts) or 1
    rows = [
        (
            f'<i class="{colours[one.code]}"></i><b>{escape(one.code)}</b>',
            show(one.num_steps / judged, "share") if one.num_steps else "never first",
            f"{one.last.global_step:,}" if one.last else "",
            _verdict(one.last),
        )
        for one in run.verdicts
    ]
    return (
        f'<figure data-chart="verdicts"><figcaption>Most important verdict</figcaption>{legend(used)}{strip}'
        "</figure>"
        + table(("verdict", "#of all steps", "#last at step", "in words, the last time"), rows, "verdicts")
        + (note("The run wrote no verdicts; these are made of its intervals.") if run.is_judged_here else "")
    )


def _strip(spans: Sequence[VerdictSpan], colours: Mapping[str, str], by: str, end: float) -> str:
    parts = []
    for span in spans:
        begin, stop = (span.first, span.last + 1) if by == BY_STEP else (span.began_s, span.ended_s)
        x, width = (X_UNITS * value / end if end else 0.0 for value in (begin, stop - begin))
        text = f"{span.code}: steps {span.first} to {span.last}"
        parts.append(
            f'<rect class="{colours[span.code]}" x="{x:.1f}" y="0" width="{width:.1f}" '
            f'height="{_STRIP_HEIGHT}"><title>{escape(text)}</title></rect>'
        )
    plot = frame("".join(parts), top=TOP, height=_STRIP_HEIGHT)
    return (
        f'<svg class="chart strip by-{by}" viewBox="0 0 {WIDTH} {TOP + _STRIP_HEIGHT + 22}" role="img" '
        f'tabindex="0" aria-label="Verdicts by {by}" data-end="{end:g}" '
        f'data-bottom="{TOP + _STRIP_HEIGHT}">{plot}'
        f"{x_axis(by, end, TOP + _STRIP_HEIGHT)}</svg>"
    )


def _verdict(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    advice = "".join(f"<li>{_advice(one)}</li>" for one in verdict.advice)
    return escape(verdict.text) + (f"<ul class=advice>{advice}</ul>" if advice else "")


def _advice(advice: Advice) -> str:
    gain = f" <em>expected: {advice.gain:+.0%} steps a second</em>" if advice.gain else ""
    return escape(advice.text) + gain


def goodput(found: Goodput) -> str:
    """Where the run's time went."""
    if not found.wall_s:
        return ""
    x, parts = 0.0, []
    for key, label, colour in GOODPUT_PARTS:
        width = getattr(found, key) / found.wall_s * WIDTH
        text = f"{label}: {duration(getattr(found, key))}"
        parts.append(
            f'<rect class="{colour}" x="{x:.2f}" y="0" width="{max(0.0, width):.2f}" height="22">'
            f"<title>{escape(text)}</title></rect>"
        )
        x += width
    return (
        f'<svg class=split viewBox="0 0 {WIDTH} 22" preserveAspectRatio="none" role="img" '
        f'aria-label="Where the time went">{"".join(parts)}</svg>'
    )


def goodput_table(found: Goodput) -> str:
    """The same in numbers."""
    if not found.wall_s:
        return ""
    rows = [
        (
            f'<i class="{colour}"></i>{label}',
            escape(duration(getattr(found, key))),
            show(getattr(found, key) / found.wall_s, "share"),
        )
        for key, label, colour in GOODPUT_PARTS
    ]
    rows.append(("all", escape(duration(found.wall_s)), "100 %"))
    return table(("", "#time", "#share"), rows, "narrow")


def restarts(run: RunNumbers) -> str:
    """Each start after the first."""
    rows = [
        (
            escape(duration(one.died_s)),
            f"{one.reached:,}",
            f"{one.step:,}",
            f"{one.num_lost_steps:,}",
            escape(duration(one.began_s - one.died_s)) if one.began_s is not None else "no step yet",
        )
        for one in run.restarts
    ]
    if not rows:
        return ""
    left_out = run.num_restarts - len(rows)
    columns = (
        "stopped after",
        "#steps done",
        "#began again at step",
        "#steps done again",
        "#until its first step",
    )
    return table(columns, rows) + (note(f"{left_out:,} earlier ones are not listed.") if left_out else "")


def _value(setting: str, value: str) -> str:
    return shown(setting_text(setting, value))


def moves(run: RunNumbers) -> str:
    """What the tuner did."""
    rows = [
        (
            f"{move.global_step:,}",
            f'<span class="move-{escape(move.kind)}">{escape(move.kind)}</span>',
            f"<code>{escape(move.setting)}</code>" if move.setting else "",
            escape(f"{_value(move.setting, move.old)} \u2192 {_value(move.setting, move.new)}")
            if move.old or move.new
            else "",
            compact(move.rate_before) if move.rate_before else "",
            compact(move.rate_after) if move.rate_after else "",
            escape(move.text),
        )
        for _, move in run.moves
    ]
    if not rows:
        return ""
    left_out = run.num_moves - len(rows)
    columns = ("#step", "", "setting", "from, to", "#samples/s before", "#after", "why")
    return table(columns, rows) + (note(f"{left_out:,} earlier ones are not listed.") if left_out else "")


def changed_settings(run: RunNumbers) -> dict[str, tuple[str, str]]:
    """Return the knobs whose last value is not their first, with both."""
    now = {name: str(value) for name, value in run.latest.settings.items()} if run.latest else {}
    return {
        name: (run.knobs.get(name, ""), value)
        for name, value in sorted(now.items())
        if run.knobs.get(name) != value
    }


def settings(run: RunNumbers) -> str:
    """The configuration, and what became of it under way."""
    changed = changed_settings(run)
    parts = []
    if changed:
        rows = [
            (f"<code>{escape(name)}</code>", escape(shown(old)), escape(shown(new)))
            for name, (old, new) in changed.items()
        ]
        parts.append("<h3>Changed under way</h3>" + table(("setting", "at first", "at last"), rows))
    elif run.knobs:
        parts.append(note("Nothing was changed under way."))
    tables: dict[str, list[tuple[str, str]]] = {}
    for name, value in run.settings.items():
        head, _, key = name.partition(".")
        tables.setdefault(head if key else "", []).append((key or head, value))
    for head, values in tables.items():
        plain = [(f"<code>{escape(key)}</code>", escape(value)) for key, value in values]
        parts.append(
            f"<details><summary><code>[{escape(head)}]</code> {len(values)} settings</summary>"
            f"{table(('', ''), plain, 'plain')}</details>"
        )
    if run.settings:
        parts.append(note("Paths and addresses are cut to their last part."))
    return "".join(parts)


def surroundings(run: RunNumbers) -> str:
    """Versions and machines, as far as the run wrote them."""
    rows = [(escape(name), escape(shown(value))) for name, value in run.surroundings.items()]
    if (latest := run.latest) is not None:
        nodes = -(-latest.world_size // max(1, latest.ranks_per_node))
        rows += [
            ("ranks", f"{latest.world_size:,} on {nodes:,} node{'' if nodes == 1 else 's'}"),
            ("processors of a node", f"{latest.num_cpus:,}"),
            ("memory of a node", show(latest.memory_bytes, "bytes") if latest.memory_bytes else "not known"),
            ("dataset lies in", escape(latest.tier)),
        ]
    return table(("", ""), rows, "narrow") if rows else ""


def ends_of(runs: Sequence[RunNumbers], places: Sequence[Mapping[str, Places]]) -> dict[str, float]:
    """Return where the axes of all charts end."""
    steps = [float(run.num_steps) for run in runs]
    for run in runs:
        steps += [float(restart.reached) for restart in run.restarts]
    for named in places:
        steps += [place for one in named.values() for place in one.steps]
    return {
        BY_STEP: max([1.0, *steps]),
        BY_TIME: max([1e-3, *(run.wall_s for run in runs)]),
    }
