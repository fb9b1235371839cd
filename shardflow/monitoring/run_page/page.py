"""HTML page of one run: a single file that loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from html import escape
from importlib import resources
from statistics import median
from typing import Any, Final

from shardflow.logs import counted
from shardflow.monitoring.goodput import Goodput
from shardflow.monitoring.history import damage_note
from shardflow.monitoring.run_page.reading import Mark, RunNumbers, Summary, shown
from shardflow.monitoring.run_page.svg import Chart, Series, bars, figure, legend
from shardflow.monitoring.units import compact, duration, show
from shardflow.telemetry import STAGES, Advice
from shardflow.telemetry.intervals import setting_text
from shardflow.viewing import markup
from shardflow.viewing.markup import note, section, table

_GOODPUT: Final = (
    ("useful_s", "useful steps", "useful"),
    ("data_wait_s", "waiting for data in them", "wait"),
    ("checkpoint_s", "paused for checkpoints", "saved"),
    ("evaluation_s", "evaluations", "evaluated"),
    ("restart_s", "starts and restarts", "stopped"),
    ("lost_s", "work done again", "lost"),
    ("other_s", "everything else", "rest"),
)
LOOP_STAGES: Final = (
    *("data_wait", "forward", "backward", "exchange", "optimizer", "agree", "checkpoint", "evaluate"),
)
"""In the order of the stack."""
_TIERS: Final = {
    "cache_ram": "from memory",
    "cache_disk": "from node's disk",
    "cache_origin": "from store",
}
_MEMORY: Final = (
    ("processes (PSS)", "pss_bytes", "forward"),
    ("pinned", "pinned_bytes", "wait"),
    ("device", "device_bytes", "exchange"),
    ("cache in memory", "cache_ram_bytes", "optimizer"),
    ("cache on disk", "cache_disk_bytes", "checkpoint"),
)
_RANK_PARTS: Final = (
    ("compute_s", "computing", "forward"),
    ("data_wait_s", "waiting for data", "wait"),
    ("exchange_s", "waiting for gradients of others", "exchange"),
)
_MOST_RANKS: Final = 32
READY_TITLE: Final = "Micro-batches ready when the loop takes one"
_NUM_CODE_COLORS: Final = 8


def render_run_page(run: RunNumbers) -> str:
    """Render the page about a run; equal runs give equal HTML."""
    charts = _charts(run) if run.num_steps or run.summaries else {}
    end = end_of([run])
    drawn = {key: "".join(figure(chart, end) for chart in found) for key, found in charts.items()}
    body = [
        f"<header><p class=kind>Training run</p><h1>{escape(run.name)}</h1><p>{span(run)}</p></header>",
        _cards(run),
        _remarks(run),
        section("What it was bound by", _verdicts(run), "verdicts"),
        section("Timeline", drawn.get("timeline", "") + downsampled([run]), "timeline"),
        section("Learning", drawn.get("learning", ""), "learning"),
        section("Stages", drawn.get("stages", ""), "stages"),
        section("Ranks", _ranks(run) + drawn.get("ranks", ""), "ranks"),
        section("Memory", drawn.get("memory", ""), "memory"),
        section("Goodput", goodput({"time": run.goodput}), "goodput"),
        section("Starts", _restarts(run), "restarts"),
        section("What the tuner did", _moves(run), "tuner"),
        section("Settings", _settings(run), "settings"),
        section("Where it ran", _environment(run), "surroundings"),
    ]
    found = [chart for group in charts.values() for chart in group]
    numbers = {"runs": [facts(run)], "ranks": _rank_shares(run)}
    return assemble(f"Run {run.name}", "".join(body), found, numbers)


def facts(run: RunNumbers) -> dict[str, Any]:
    """Return the numbers of a run that are no series, for tools that read the page."""
    names = ("name", "num_steps", "wall_s", "total_samples", "total_tokens", "num_moves", "num_checkpoints")
    verdicts = [{"code": one.code, "num_steps": one.num_steps, "number": one.number} for one in run.verdicts]
    restarts = [
        {"step": one.step, "reached": one.reached, "num_lost_steps": one.num_lost_steps}
        for one in run.restarts
    ]
    found = {name: getattr(run, name) for name in names}
    return {**found, "goodput": run.goodput.to_json(), "restarts": restarts, "verdicts": verdicts}


def end_of(runs: Sequence[RunNumbers]) -> float:
    """Return where the axes of steps end."""
    reached = [one.reached for run in runs for one in run.restarts]
    return float(max([1, *reached, *(run.num_steps for run in runs)]))


def column(run: RunNumbers, name: str, label: str, color: str, **more: Any) -> Series:
    """Return a column of the steps as a series; one with an envelope as its median in it."""
    steps = [(value or 0.0) + 1 for value in run.steps["last"]]
    if name in run.steps:
        return Series(label, color, steps, run.steps[name], **more)
    values = run.steps[f"{name}_median"]
    if run.steps_per_row == 1:
        return Series(label, color, steps, values)
    least, most = run.steps[f"{name}_least"], run.steps[f"{name}_most"]
    return Series(f"{label}, median", color, steps, values, least, most)


def over(
    run: RunNumbers, label: str, color: str, value: Callable[[Summary], float | None], **more: Any
) -> Series:
    """Return a number of each interval summary as a series."""
    steps = [row.last + 1.0 for row in run.summaries]
    return Series(label, color, steps, [value(row) for row in run.summaries], **more)


def evaluations(run: RunNumbers, label: str, color: str) -> Series:
    """Return the losses of evaluations as points."""
    found = run.evaluations.values()
    return Series(label, color, [step for step, _ in found], [loss for _, loss in found], kind="points")


def ready_batches(run: RunNumbers, label: str, color: str) -> Series:
    """Return the micro-batches ready in the loader, with their envelope."""
    found = [row.ready or (None, None, None) for row in run.summaries]
    means = [
        None if total is None else total / max(1, row.num_steps)
        for row, (total, _, _) in zip(run.summaries, found, strict=True)
    ]
    steps = [row.last + 1.0 for row in run.summaries]
    return Series(label, color, steps, means, [one[1] for one in found], [one[2] for one in found])


def loader_stages(run: RunNumbers) -> list[str]:
    """Return the stages of the loader's threads, without those that are parts of others."""
    return [
        name
        for name, stage in STAGES.items()
        if stage.group in ("fetch", "make")
        and not stage.is_part_of
        and any(row.stage_s.get(name) for row in run.summaries)
    ]


def most_of_ranks(row: Summary, name: str) -> float | None:
    """Return the largest number of a rank."""
    return max((float(getattr(one, name)) for one in row.ranks.values()), default=None)


def _charts(run: RunNumbers) -> dict[str, list[Chart]]:
    """Return the charts by section."""
    rows = run.summaries

    def stack(names: Mapping[str, str], value: Callable[..., float | None]) -> list[Series]:
        return [
            over(run, label, name, partial(value, stage=name), kind="stack") for name, label in names.items()
        ]

    def single(key: str, title: str, unit: str, name: str, color: str, **more: Any) -> Chart:
        return Chart(key, title, unit, [column(run, name, title, color)], **more)

    waits = column(run, "data_wait_s_mean", "waiting for data", "wait", kind="stack")
    rest = [
        None if step is None else max(0.0, step - (wait or 0.0))
        for step, wait in zip(run.steps["step_s_mean"], waits.values, strict=True)
    ]
    step_time = [waits, replace(waits, label="everything else", color="rest", values=rest)]
    if run.steps_per_row > 1:
        step_time.append(column(run, "step_s", "step", "step"))
    used = [name for name in LOOP_STAGES if any(row.stage_s.get(name) for row in rows)]
    loop = stack({name: name.replace("_", " ") for name in used}, Summary.busy)
    if rows:
        loop.append(over(run, "everything else", "rest", _outside, kind="stack"))
    loader = stack({name: name.replace("_", " ") for name in loader_stages(run)}, Summary.busy)
    tiers = {name: label for name, label in _TIERS.items() if any(row.stage_bytes.get(name) for row in rows)}
    read = stack(tiers or {"read": "from the dataset"}, bytes_per_s)
    memory = [
        over(run, label, color, partial(most_of_ranks, name=name))
        for label, name, color in _MEMORY
        if any(most_of_ranks(row, name) for row in rows)
    ]
    available = over(run, "available", "rate", lambda row: row.available_bytes or None)
    loss = [column(run, "loss", "training", "loss"), evaluations(run, "evaluation", "checked")]
    title, marks = "Time of a step, on the slowest rank", _marks(run)
    return {
        "timeline": [
            Chart("step_time", title, "s", step_time, height=230, is_clipped=True, marks=marks),
            single("throughput", "Throughput in steps", "samples/s", "samples_per_s", "rate"),
        ],
        "learning": [
            Chart("loss", "Loss", "nats", loss, height=200, is_from_zero=False),
            single("learning_rate", "Learning rate", "", "learning_rate", "rate"),
            single("gradient_norm", "Gradient norm", "", "gradient_norm", "loss", is_clipped=True),
        ],
        "stages": [
            Chart("loop", "The training loop, shares of all ranks' time", "share", loop, height=200, top=1.0),
            Chart("loader", "The loader, busy threads of a rank", "threads", loader),
            Chart("queue", READY_TITLE, "", [ready_batches(run, "micro-batches ready", "rate")]),
            Chart("tier_bytes", "Bytes read, all ranks", "bytes/s", read),
        ],
        "ranks": [_spread(run)],
        "memory": [
            Chart("memory", "Memory of a rank, largest of the ranks", "bytes", memory),
            Chart("available", "Memory that a node has left, least of the nodes", "bytes", [available]),
        ],
    }


def _outside(row: Summary) -> float:
    return max(0.0, 1.0 - sum(row.busy(name) or 0.0 for name in LOOP_STAGES))


def bytes_per_s(row: Summary, stage: str) -> float | None:
    """Return the bytes that a stage read in a second, over all ranks."""
    return row.stage_bytes.get(stage, 0) / row.wall_s if row.wall_s else None


def _spread(run: RunNumbers) -> Chart:
    """Return the chart of differences between ranks."""
    series = []
    for name, label, color in _RANK_PARTS:
        found = [
            [getattr(one, name) / one.step_s for one in row.ranks.values() if one.step_s]
            for row in run.summaries
        ]
        least, middle, most = ([pick(one) if one else None for one in found] for pick in (min, median, max))
        steps = [row.last + 1.0 for row in run.summaries]
        series.append(Series(label, color, steps, middle, least, most))
    return Chart("spread", "Least, median and most of the ranks, shares of the steps' time", "share", series)


def _marks(run: RunNumbers) -> list[Mark]:
    restarts = [
        Mark("lost", one.step, f"restarted after {one.reached} steps: {one.num_lost_steps} done again")
        for one in run.restarts
    ]
    moves = [
        Mark("tuned", move.global_step + 1, f"tuner: {move.kind} {move.setting} {move.old} \u2192 {move.new}")
        for move in run.moves
        if move.kind in ("try", "revert", "keep")
    ]
    return [*run.marks, *restarts, *moves]


def span(run: RunNumbers) -> str:
    """Return when a run began and ended."""
    if not run.began_at_s:
        return "no measurements yet"
    began, newest = (
        datetime.fromtimestamp(one, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        for one in (run.began_at_s, run.began_at_s + run.wall_s)
    )
    return f"{began} to {newest}; {escape(run.outcome or 'running, or was killed')}"


def downsampled(runs: Sequence[RunNumbers]) -> str:
    """Return a remark about charts whose points are several steps."""
    most = max(run.steps_per_row for run in runs)
    text = (
        f"A point of these charts holds up to {most:,} steps: the line is their median, the band reaches "
        "from the least to the most, stacks are means. No step is left out."
    )
    return note(text) if most > 1 else ""


def _cards(run: RunNumbers) -> str:
    good = run.goodput
    steps_s = good.steps_s
    losses = [loss for loss in run.steps["loss_median"] if loss is not None]
    total = f" of {run.num_planned_steps:,}" if run.num_planned_steps else ""
    values = [
        (f"{run.num_steps:,}", f"steps{total}"),
        (duration(run.wall_s), "since the first start"),
        (show(good.num_steps / steps_s if steps_s else None), "steps per second, in steps"),
        (show(good.data_wait_s / steps_s if steps_s else None, "share"), "of step time waits for data"),
        (show(good.useful_share if good.wall_s else None, "share"), "useful (goodput)"),
        (show(losses[-1] if losses else None), "loss, last"),
    ]
    cards = [f"<div class=card><b>{escape(value)}</b><span>{name}</span></div>" for value, name in values]
    return f"<div class=cards>{''.join(cards)}</div>"


def _remarks(run: RunNumbers) -> str:
    remarks = [damage_note(run.num_damaged)] if run.num_damaged else []
    if not run.num_steps:
        remarks.append("No step was measured yet; make the page again later.")
    elif not run.summaries:
        remarks.append(
            "This run wrote no intervals (an older version, <code>monitor.interval_s = 0</code>, or only its "
            "first seconds): stages, ranks and memory are not known."
        )
    return "".join(f"<p class=warning>{remark}</p>" for remark in remarks)


def _verdicts(run: RunNumbers) -> str:
    """Return the verdicts: which, when, and what to do."""
    if not run.verdicts:
        return ""
    codes = sorted(one.code for one in run.verdicts)
    colors = {code: f"code-{place % _NUM_CODE_COLORS}" for place, code in enumerate(codes)}
    judged = sum(one.num_steps for one in run.verdicts) or 1
    parts = [
        ((one.last - one.first + 1) / judged, colors[one.code], f"{one.code}: {one.first} to {one.last}")
        for one in run.verdict_spans
    ]
    rows = []
    for one in run.verdicts:
        advice = "".join(map(_advice, one.last.advice if one.last else ()))
        words = escape(one.last.text if one.last else "") + (advice and f"<ul class=advice>{advice}</ul>")
        share = show(one.num_steps / judged, "share") if one.num_steps else "never first"
        last = f"{one.last.global_step:,}" if one.last else ""
        rows.append((f'<i class="{colors[one.code]}"></i><b>{escape(one.code)}</b>', share, last, words))
    columns = ("verdict", "#of all steps", "#last at step", "in words, the last time")
    remark = "The run wrote no verdicts; these are derived from its intervals."
    drawn = bars("Most important verdict", [("steps", parts)]) + table(columns, rows)
    return drawn + (note(remark) if run.is_judged_here else "")


def _advice(advice: Advice) -> str:
    gain = f" <em>expected: {advice.gain:+.0%} steps a second</em>" if advice.gain else ""
    return f"<li>{escape(advice.text)}{gain}</li>"


def _rank_shares(run: RunNumbers) -> dict[str, list[float]]:
    """Return the parts of the steps' time by rank: of all, or of the 32 that computed and waited most."""
    found = [one for one in run.ranks.items() if one[1].step_s]
    found.sort(key=lambda one: -(one[1].compute_s + one[1].data_wait_s))
    return {
        f"rank {rank}" + (f" \u00b7 {sums.host}" if sums.host else ""): [
            getattr(sums, name) / sums.step_s for name, _, _ in _RANK_PARTS
        ]
        for rank, sums in sorted(found[:_MOST_RANKS], key=lambda one: one[0])
    }


def _ranks(run: RunNumbers) -> str:
    shares = _rank_shares(run)
    world_size = run.latest.world_size if run.latest else 0
    text = f"The {len(shares)} of {counted(world_size, 'rank')} that computed and waited for data most."
    colors = legend((color, label) for _, label, color in _RANK_PARTS)
    drawn = _part_bars("Shares of the steps' time, whole run", shares, _RANK_PARTS)
    return colors + drawn + (note(text) if world_size > len(shares) else "") if shares else ""


def _part_bars(
    title: str, shares: Mapping[str, Sequence[float]], parts: Sequence[tuple[str, str, str]]
) -> str:
    """Return a stacked bar for each name."""
    rows = [
        (
            name.partition(" \u00b7 ")[0],
            [
                (share, color, f"{name} {label}: {show(share, 'share')}")
                for share, (_, label, color) in zip(values, parts, strict=True)
            ],
        )
        for name, values in shares.items()
    ]
    return f"<h3>{title}</h3>{bars(title, rows)}"


def goodput(runs: Mapping[str, Goodput]) -> str:
    """Return the goodput of runs: a bar and two columns for each."""
    runs = {name: good for name, good in runs.items() if good.wall_s}
    shares = {name: [good.share(key) for key, _, _ in _GOODPUT] for name, good in runs.items()}
    rows = []
    for key, label, color in _GOODPUT:
        cells = [(duration(getattr(good, key)), show(good.share(key), "share")) for good in runs.values()]
        rows.append([f'<i class="{color}"></i>{label}', *(escape(cell) for pair in cells for cell in pair)])
    columns = ["", *(head for name in runs for head in (f"#{name}", "#"))]
    return (
        _part_bars("Where the time went", shares, _GOODPUT) + table(columns, rows, "narrow") if runs else ""
    )


def _restarts(run: RunNumbers) -> str:
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
    columns = ("stopped after", "#steps done", "#resumed at", "#steps done again", "#until its first step")
    return (table(columns, rows) if rows else "") + _left_out(run.num_restarts - len(rows))


def _left_out(number: int) -> str:
    return note(f"{number:,} earlier ones are not listed.") if number else ""


def _moves(run: RunNumbers) -> str:
    rows = [
        (
            f"{move.global_step:,}",
            f'<span class="move-{escape(move.kind)}">{escape(move.kind)}</span>',
            f"<code>{escape(move.setting)}</code>" if move.setting else "",
            " \u2192 ".join(
                escape(shown(setting_text(move.setting, value))) for value in (move.old, move.new) if value
            ),
            compact(move.rate_before) if move.rate_before else "",
            compact(move.rate_after) if move.rate_after else "",
            escape(move.text),
        )
        for move in run.moves
    ]
    columns = ("#step", "", "setting", "from, to", "#samples/s before", "#after", "why")
    return (table(columns, rows) if rows else "") + _left_out(run.num_moves - len(rows))


def _settings(run: RunNumbers) -> str:
    """Return the configuration, and the tunables that changed during the run."""
    now = {name: str(value) for name, value in run.latest.settings.items()} if run.latest else {}
    changed = [
        (f"<code>{escape(name)}</code>", escape(shown(run.tunables.get(name, ""))), escape(shown(value)))
        for name, value in sorted(now.items())
        if run.tunables.get(name) != value
    ]
    parts = [table(("changed during the run", "at first", "at last"), changed)] if changed else []
    tables: dict[str, list[tuple[str, str]]] = {}
    for name, value in run.settings.items():
        head, _, key = name.rpartition(".") if name.count(".") < 2 else name.partition(".")
        tables.setdefault(head, []).append((f"<code>{escape(key)}</code>", escape(value)))
    parts += [
        f"<details><summary><code>[{escape(head)}]</code> {len(values)} settings</summary>"
        f"{table(('', ''), values, 'plain')}</details>"
        for head, values in tables.items()
    ]
    return "".join(parts) + (note("Paths and addresses are cut to their last part.") if run.settings else "")


def _environment(run: RunNumbers) -> str:
    """Return versions and machines, as far as the run wrote them."""
    rows = [(escape(name), escape(shown(value))) for name, value in run.environment.items()]
    if (latest := run.latest) is not None:
        rows += [
            ("ranks", f"{latest.world_size:,}, {latest.ranks_per_node:,} on a node"),
            ("CPUs of a node", f"{latest.num_cpus:,}"),
            ("memory of a node", show(latest.memory_bytes or None, "bytes")),
            ("dataset is in", escape(latest.tier)),
        ]
    return table(("", ""), rows, "narrow") if rows else ""


def assemble(title: str, body: str, charts: Iterable[Chart], numbers: Mapping[str, Any]) -> str:
    """Return the whole page, with style, script and numbers inside it.

    Args:
        title: Plain text.
        body: HTML.
        charts: Charts whose values the script shows.
        numbers: More numbers, for tools that read the page; plain JSON values.
    """
    style, script = (
        resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js")
    )
    # The browser itself prevents requests, and any script but this one.
    digests = [
        f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
        for text in (style, script)
    ]
    policy = f"style-src '{digests[0]}'; script-src '{digests[1]}'"
    found = {chart.key: chart.to_json() for chart in charts if any(one.has_values for one in chart.series)}
    data = json.dumps({**numbers, "charts": found}, separators=(",", ":"), allow_nan=False)
    # The data cannot close the element that contains them.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    end = (
        "<div id=readout hidden></div>\n"
        f'<script type="application/json" id="numbers">{data}</script>\n<script>{script}</script>\n'
    )
    return markup.document(title, body, style=style, policy=policy, end=end)
