"""The first lines of a live view: whose run it is, how it stands, how far it is, and what holds it up."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rich.text import Text

from pipelines.top_draw import DIM, Glyphs, bar, duration, fitted, percent
from shardflow.monitoring.lines import damage_note
from shardflow.monitoring.live import LiveView, RunState

__all__ = ["header_lines"]

_WIDE: Final = 78
_STATE_STYLES: Final[dict[RunState, str]] = {
    "waiting": DIM,
    "starting": "#539bf5",
    "running": "green",
    "silent": "red",
    "finished": "green",
    "stopped": "yellow",
}


def header_lines(view: LiveView, width: int, glyphs: Glyphs, *, most_verdict: int) -> list[Text]:
    """Draw the head.

    Args:
        view: What is known.
        width: Of the lines.
        glyphs: What they are drawn with.
        most_verdict: Lines for verdict and advice.
    """
    lines = [_headline(view, width, glyphs)]
    if not view.num_starts:
        text = "The run has not written metrics.jsonl yet; the picture comes when it does."
        return lines + _paragraph(text, width, glyphs)
    lines.append(_progress(view, width, glyphs))
    if view.num_damaged:
        lines.append(fitted(Text(damage_note(view.num_damaged), style="yellow"), width, glyphs))
    if view.step is None:
        text = "No step is done yet: data, compilation and connections come first."
        return lines + _paragraph(text, width, glyphs)
    lines += _verdict_lines(view, width, glyphs, most=most_verdict)
    if view.interval is None:
        text = "Parts of a step are not measured: an interval is not over yet, or [monitor] interval_s is 0."
        lines += _paragraph(text, width, glyphs)
    return lines


def _paragraph(text: str, width: int, glyphs: Glyphs) -> list[Text]:
    return [fitted(Text(line, style=DIM), width, glyphs) for line in _wrapped(text, width, limit=3)]


def _headline(view: LiveView, width: int, glyphs: Glyphs) -> Text:
    style = _STATE_STYLES[view.state]
    head = Text.assemble(("shardflow top ", "bold"), (f"{view.name}  ", "bold #539bf5"))
    head.append(f"{glyphs.dot} {_state_text(view)}", style=style)
    if view.num_starts > 1:
        head.append(f"  start {view.num_starts}", style="yellow")
    parts = [f"epoch {view.epoch}"] if view.step is not None else []
    if view.goodput is not None and view.goodput.wall_s:
        parts.append(f"useful {percent(view.goodput.useful_share)}")
    if view.interval is not None:
        parts.append(f"{view.interval.world_size:,} ranks")
    right = Text(f" {glyphs.between} ".join(parts), style=DIM)
    left_room = width - right.cell_len - 1
    if head.cell_len > left_room:
        if view.state == "silent":
            # What it may mean is for those who have room; that nothing comes is not.
            head = Text(head.plain.partition(":")[0], style=style) if head.cell_len > width else head
        return fitted(head, width, glyphs)
    return fitted(head, left_room + 1, glyphs).append_text(right)


def _state_text(view: LiveView) -> str:
    age = duration(view.age_s)
    match view.state:
        case "waiting":
            return "waits for the first line"
        case "starting":
            return f"starting for {age}"
        case "running":
            return f"running, last line {age} ago"
        case "silent":
            return f"nothing new for {age}: it hangs, or was killed"
        case "finished" | "stopped":
            return f"{view.state} {_clock(view.ended_s, view.now_s)}"


def _clock(time_s: float, now_s: float) -> str:
    """A time of day here; with the date where it was another day."""
    then, now = (datetime.fromtimestamp(one).astimezone() for one in (time_s, now_s))
    return f"at {then:%H:%M:%S}" if then.date() == now.date() else f"on {then:%Y-%m-%d at %H:%M:%S}"


def _progress(view: LiveView, width: int, glyphs: Glyphs) -> Text:
    done = f"step {view.num_done:,}"
    if not view.num_steps:
        return fitted(Text(done), width, glyphs)
    share = view.num_done / view.num_steps
    said = f"{done} of {view.num_steps:,}  {percent(share)}"
    if view.left_s is not None:
        said += f"  {duration(view.left_s)} left"
        if width >= _WIDE:
            said += f", {_clock(view.now_s + view.left_s, view.now_s)}"
    room = max(4, width - len(said) - 2)
    return fitted(Text.assemble(said, "  ", bar(share, room, "#57ab5a", glyphs)), width, glyphs)


def _verdict_lines(view: LiveView, width: int, glyphs: Glyphs, *, most: int) -> list[Text]:
    if not view.verdicts:
        return []
    first = view.verdicts[0]
    style = "green" if first.code == "compute-bound" else "bold yellow"
    since = f"  since step {view.verdict_since + 1:,}"
    room = width - 2
    said = _wrapped(first.text, room, limit=2)
    if len(said) == 1 and len(said[0]) + len(since) > room:
        said.append("")
    # On the last line, which gives up its end for it where both are long.
    said[-1] = fitted(Text(said[-1]), min(len(said[-1]), room - len(since)), glyphs).plain
    lines = [
        Text.assemble((f"{glyphs.dot} " if not at else "  ", style), (line, style))
        for at, line in enumerate(said)
    ]
    lines[-1].append(since, style=DIM)
    if first.advice:
        advice = first.advice[0]
        gain = f" (estimate: {advice.gain:+.0%})" if advice.gain else ""
        for at, line in enumerate(_wrapped(advice.text + gain, room - 2, limit=2)):
            lines.append(
                Text.assemble("  ", (f"{glyphs.arrow} " if not at else " " * (len(glyphs.arrow) + 1)), line)
            )
    for other in view.verdicts[1:]:
        also = _wrapped(f"also: {other.text}", room, limit=max(1, most - len(lines)))
        lines += [Text(f"{'  ' if not at else '    '}{line}", style=DIM) for at, line in enumerate(also)]
    return [fitted(line, width, glyphs) for line in lines[:most]]


def _wrapped(text: str, width: int, *, limit: int) -> list[str]:
    """The text in at most so many lines; what is too long for them goes on the last one and is cut there."""
    lines: list[str] = []
    for word in text.split():
        fits = lines and (len(lines[-1]) + 1 + len(word) <= width or len(lines) == limit)
        lines = [*lines[:-1], f"{lines[-1]} {word}"] if fits else [*lines, word]
    return lines or [""]
