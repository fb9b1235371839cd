"""HTML page that compares two runs: a table of differences, and overlaid charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from html import escape
from statistics import median
from typing import Final

from shardflow.monitoring.history import damage_note
from shardflow.monitoring.run_page import page
from shardflow.monitoring.run_page.page import column
from shardflow.monitoring.run_page.reading import RunNumbers, Summary, mean_of, shown
from shardflow.monitoring.run_page.svg import Chart, Series, figure
from shardflow.monitoring.units import show
from shardflow.viewing.markup import note, section, table

Runs = tuple[RunNumbers, RunNumbers]
_LETTERS: Final = ("a", "b")
"""Classes of the style sheet, and the runs' names in capitals."""
_WINDOW: Final = 20
"""A loss is a mean over so many steps: one step alone is mostly noise."""
_SAME_RATE: Final = 0.01


@dataclass(frozen=True, slots=True)
class _Difference:
    """One number of both runs."""

    key: str
    name: str
    unit: str
    a: float | None
    b: float | None
    better: int = 0
    """1 if more is better, -1 if less is, 0 if neither."""

    @property
    def change(self) -> float | None:
        """How much more B is, relative to A; the plain difference of shares. None if one is missing."""
        if self.a is None or self.b is None:
            return None
        if self.unit == "share":
            return self.b - self.a
        return self.b / self.a - 1.0 if self.a else None

    def to_html(self) -> tuple[str, ...]:
        """Return the cells of a row."""
        kind, text = "", ""
        if self.change is not None:
            text = f"{100 * self.change:+.1f} {'points' if self.unit == 'share' else '%'}"
            if self.better and abs(self.change) >= 0.01:
                kind = "better" if (self.change > 0) == (self.better > 0) else "worse"
        values = (escape(show(value, self.unit)) for value in (self.a, self.b))
        return (escape(self.name), *values, f'<span class="{kind}">{text}</span>')


def render_comparison(runs: Runs) -> str:
    """Render the page about two runs; equal runs give equal HTML."""
    charts, found, settings = _charts(runs), _differences(runs), _different_settings(runs)
    end = page.end_of(runs)
    drawn = "".join(figure(chart, end) for chart in charts)
    heads = [
        f'<b class="{letter}">{letter.upper()}</b> {escape(run.name)}'
        for run, letter in zip(runs, _LETTERS, strict=True)
    ]
    caution = _loss_caution(runs)
    changes = table(("", *(f"#{head}" for head in heads), "#B against A"), [one.to_html() for one in found])
    body = [
        "<header class=two><p class=kind>Two training runs</p>",
        f"<h1>{escape(runs[0].name)} and {escape(runs[1].name)}</h1>",
        *(f"<p>{head} <em>{page.span(run)}</em></p>" for run, head in zip(runs, heads, strict=True)),
        "</header>",
        *(
            f"<p class=warning>{letter.upper()}: {damage_note(run.num_damaged)}</p>"
            for run, letter in zip(runs, _LETTERS, strict=True)
            if run.num_damaged
        ),
        section("What differs", changes + (note(escape(caution)) if caution else ""), "differences"),
        section("Overlaid", drawn and drawn + page.downsampled(runs), "charts"),
        section("Stages", _stages(runs), "stages"),
        section("Goodput", page.goodput({"A": runs[0].goodput, "B": runs[1].goodput}), "goodput"),
        section("What they were bound by", _verdicts(runs), "verdicts"),
        section("Settings that differ", _settings(runs, settings), "settings"),
    ]
    numbers = {
        "runs": [page.facts(run) for run in runs],
        "differences": [{"key": one.key, "a": one.a, "b": one.b, "change": one.change} for one in found],
        "settings": {name: list(values) for name, values in settings.items()},
    }
    return page.assemble(f"Runs {runs[0].name} and {runs[1].name}", "".join(body), charts, numbers)


def _charts(runs: Runs) -> list[Chart]:
    def both(make: Callable[[RunNumbers, str, str], Series]) -> list[Series]:
        return [
            make(run, f"{letter.upper()} {run.name}", letter)
            for run, letter in zip(runs, _LETTERS, strict=True)
        ]

    def steps(name: str) -> list[Series]:
        return both(lambda run, label, color: column(run, name, label, color))

    def summaries(value: Callable[[Summary], float | None]) -> list[Series]:
        return both(lambda run, label, color: page.over(run, label, color, value))

    checks = [replace(one, label=f"{one.label}, evaluation") for one in both(page.evaluations)]
    return [
        Chart("step_time", "Time of a step", "s", steps("step_s"), height=200, is_clipped=True),
        Chart("data_wait", "Waiting for data in a step", "s", steps("data_wait_s"), is_clipped=True),
        Chart("throughput", "Throughput in steps", "samples/s", steps("samples_per_s")),
        Chart("loss", "Loss", "nats", steps("loss") + checks, height=200, is_from_zero=False),
        Chart("learning_rate", "Learning rate", "", steps("learning_rate")),
        Chart("queue", page.READY_TITLE, "", both(page.ready_batches)),
        Chart("origin", "Bytes from the store, all ranks", "bytes/s", summaries(_origin)),
        Chart("memory", "Processes of a rank (PSS), most of a rank", "bytes", summaries(_pss)),
    ]


def _origin(row: Summary) -> float | None:
    # Without a cache all bytes come from where the dataset is.
    return page.bytes_per_s(row, "cache_origin" if "cache_origin" in row.stage_bytes else "read")


def _pss(row: Summary) -> float | None:
    return page.most_of_ranks(row, "pss_bytes")


def _differences(runs: Runs) -> list[_Difference]:
    """Return the numbers that people compare, without those that neither run has."""

    def samples_per_s(run: RunNumbers) -> float | None:
        return run.total_samples / run.goodput.steps_s if run.goodput.steps_s else None

    def wait_share(run: RunNumbers) -> float | None:
        return run.goodput.data_wait_s / run.goodput.steps_s if run.goodput.steps_s else None

    def middle(run: RunNumbers) -> float | None:
        values = [value for value in run.steps["step_s_median"] if value is not None]
        return median(values) if values else None

    def pss(run: RunNumbers) -> float | None:
        return max((float(one.pss_bytes) for one in run.ranks.values()), default=0.0) or None

    rows: list[tuple[str, str, str, Callable[[RunNumbers], float | None], int]] = [
        ("num_steps", "steps that count", "", lambda run: run.goodput.num_steps, 0),
        ("wall_s", "time, all starts", "s", lambda run: run.goodput.wall_s or None, 0),
        ("samples_per_s", "samples per second, in steps", "", samples_per_s, 1),
        ("step_s", "time of a step, median", "s", middle, -1),
        ("wait_share", "step time that waits for data", "share", wait_share, -1),
        ("useful_share", "useful (goodput)", "share", lambda run: run.goodput.useful_share, 1),
        ("checkpoint_s", "paused for checkpoints", "s", lambda run: run.goodput.checkpoint_s, -1),
        ("lost_s", "work done again", "s", lambda run: run.goodput.lost_s, -1),
        ("restarts", "restarts", "", lambda run: float(run.num_restarts), -1),
        ("pss_bytes", "memory of a rank, most", "bytes", pss, -1),
    ]
    if (window := _loss_window(runs)) is not None:
        first, last = window
        name = f"loss, mean of steps {first:,} to {last:,}, which both have taken"
        # With different schedules neither loss is the better one.
        rows.append(
            ("loss", name, "nats", lambda run: _loss_in(run, first, last), 0 if _loss_caution(runs) else -1)
        )
    found = []
    for key, name, unit, value, better in rows:
        a, b = (value(run) if run.num_steps else None for run in runs)
        found.append(_Difference(key, name, unit, a, b, better))
    return [one for one in found if one.a is not None or one.b is not None]


def _loss_window(runs: Runs) -> tuple[int, int] | None:
    """Return the first and last step that losses are compared over; None if the runs share none.

    Of long runs only groups of steps are known, so the one with the larger groups decides.
    """
    coarse = max(runs, key=lambda run: run.steps_per_row)
    groups = zip(coarse.steps["first"], coarse.steps["last"], strict=True)
    num_steps = min(run.num_steps for run in runs)
    taken = [(int(begin or 0), int(end or 0)) for begin, end in groups if (end or 0) < num_steps]
    if not taken:
        return None
    last = taken[-1][1]
    return next(begin for begin, end in taken if end >= last - _WINDOW), last


def _loss_in(run: RunNumbers, first: int, last: int) -> float | None:
    rows = zip(run.steps["first"], run.steps["last"], run.steps["loss_mean"], strict=True)
    inside = (loss for begin, end, loss in rows if (end or 0) >= first and (begin or 0) <= last)
    return mean_of([loss for loss in inside if loss is not None])


def _loss_caution(runs: Runs) -> str:
    """Return why the difference of the losses says little; empty if nothing suggests that.

    In a longer run the learning rate decays later: at the same step the shorter one has a lower rate, and for
    that alone a lower loss.
    """
    window = _loss_window(runs)
    if window is None:
        return ""
    causes = []
    lengths = [run.num_planned_steps for run in runs]
    if all(lengths) and lengths[0] != lengths[1]:
        causes.append(f"A is planned for {lengths[0]:,} steps and B for {lengths[1]:,}")
    a, b = (_rate_at(run, window[1]) for run in runs)
    if a is not None and b is not None and abs(a - b) > _SAME_RATE * max(abs(a), abs(b)):
        causes.append(f"at step {window[1]:,} their learning rates are {a:.2e} and {b:.2e}")
    if not causes:
        return ""
    return (
        f"Losses at the same step are hardly comparable here: {', and '.join(causes)}. A run whose rate has "
        "decayed further has a lower loss for that alone; compare runs of one schedule, or both at their end."
    )


def _rate_at(run: RunNumbers, step: int) -> float | None:
    rows = zip(run.steps["last"], run.steps["learning_rate"], strict=True)
    return next((rate for end, rate in rows if end is not None and end >= step), None)


def _stages(runs: Runs) -> str:
    def mean(run: RunNumbers, name: str) -> float | None:
        total = sum(row.rank_wall_s for row in run.summaries)
        return sum(row.stage_s.get(name, 0.0) for row in run.summaries) / total if total else None

    loader = dict.fromkeys(name for run in runs for name in page.loader_stages(run))
    rows = [
        (name.replace("_", " "), *(show(value, unit) for value in values))
        for names, unit in ((page.LOOP_STAGES, "share"), (loader, "threads"))
        for name in names
        if any(values := [mean(run, name) for run in runs])
    ]
    remark = note("Of the loop shares of all ranks' time, of the loader busy threads of a rank.")
    return table(("", "#A", "#B"), rows, "narrow") + remark if rows else ""


def _verdicts(runs: Runs) -> str:
    shares: list[Mapping[str, float]] = []
    for run in runs:
        total = sum(one.num_steps for one in run.verdicts) or 1
        shares.append({one.code: one.num_steps / total for one in run.verdicts if one.num_steps})
    codes = sorted({code for one in shares for code in one})
    codes.sort(key=lambda code: -max(one.get(code, 0.0) for one in shares))
    rows = [(escape(code), *(show(one.get(code), "share") for one in shares)) for code in codes]
    columns = ("most important verdict", "#A, of all steps", "#B, of all steps")
    return table(columns, rows, "narrow") if rows else ""


def _different_settings(runs: Runs) -> dict[str, tuple[str, str]]:
    """Return the settings that differ, and the tunables as they were at the end.

    A setting that only one run has is an empty text in the other one.
    """

    def at_the_end(run: RunNumbers) -> dict[str, str]:
        tunables = run.latest.settings if run.latest else {}
        return run.settings | {f"{name} (at the end)": shown(value) for name, value in tunables.items()}

    a, b = map(at_the_end, runs)
    # What only one run recorded is no difference between them.
    names = a.keys() | b.keys() if runs[0].settings and runs[1].settings else a.keys() & b.keys()
    return {name: (a.get(name, ""), b.get(name, "")) for name in sorted(names) if a.get(name) != b.get(name)}


def _settings(runs: Runs, different: Mapping[str, tuple[str, str]]) -> str:
    rows = [(f"<code>{escape(name)}</code>", escape(a), escape(b)) for name, (a, b) in different.items()]
    if rows:
        return table(("setting", "A", "B"), rows) + note("Paths and addresses are cut to their last part.")
    return note("None that the run folders record.") if any(run.settings for run in runs) else ""
