"""Pieces of HTML that the pages about runs are made of."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from shardflow.monitoring.run_page.chart import Chart, Places, Series, has_values
from shardflow.monitoring.run_page.scales import BY_STEP, BY_TIME, show
from shardflow.monitoring.run_page.svg import draw, outliers

__all__ = ["document", "figure", "legend", "note", "section", "table", "toolbar"]


def section(key: str, title: str, body: str) -> str:
    """A titled card; nothing for an empty body."""
    return f'<section id="{key}"><h2>{title}</h2>{body}</section>\n' if body else ""


def note(text: str) -> str:
    """A small remark; ``text`` is HTML."""
    return f"<p class=note>{text}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], classes: str = "") -> str:
    """A table of cells of HTML; columns whose names begin with # hold numbers."""
    kinds = [" class=number" if name.startswith("#") else "" for name in columns]
    head = "".join(
        f"<th{kind}>{name.removeprefix('#')}</th>" for name, kind in zip(columns, kinds, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    thead = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class=scroll><table class="{classes}">{thead}<tbody>{body}</tbody></table></div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colours and what they mean; each colour once a label."""
    items = "".join(
        f'<li><i class="{colour}"></i>{escape(label)}</li>' for colour, label in dict.fromkeys(entries)
    )
    return f"<ul class=legend>{items}</ul>"


def figure(chart: Chart, places: Mapping[str, Places], ends: Mapping[str, float]) -> str:
    """A chart along steps and along time, of which the page shows one; nothing for one without values."""
    series = [one for one in chart.series if has_values(one)]
    if not series:
        return ""
    drawn = "".join(draw(chart, places, by=by, end=ends[by]) for by in (BY_STEP, BY_TIME))
    num_outside, most = outliers(chart)
    remarks = [chart.note] if chart.note else []
    if num_outside:
        what = "place leaves" if num_outside == 1 else "places leave"
        remarks.append(f"{num_outside} {what} the plot, up to {escape(show(most, chart.unit))}.")
    marks = legend((_chip(one), one.label) for one in series) if len(series) > 1 else ""
    return (
        f'<figure data-chart="{chart.key}"><figcaption>{escape(chart.title)}</figcaption>{marks}{drawn}'
        f"{note(' '.join(remarks)) if remarks else ''}</figure>"
    )


def _chip(series: Series) -> str:
    return f"{series.colour} dashed" if series.kind == "dashed" else series.colour


def toolbar() -> str:
    """What changes all charts at once; hidden where the page's script does not run."""
    return (
        "<nav id=tools hidden><span>Along</span>"
        "<button type=button id=by-step aria-pressed=true>steps</button>"
        "<button type=button id=by-time aria-pressed=false>time</button>"
        "<output id=range></output><button type=button id=reset hidden>show all</button>"
        "<span class=hint>drag over a chart to look closer; double click to see all; "
        "<kbd>+</kbd> <kbd>\u2212</kbd> <kbd>\u2190</kbd> <kbd>\u2192</kbd> on a chart do too</span></nav>"
    )


def document(*, title: str, body: str, numbers: Mapping[str, Any]) -> str:
    """The whole page: its style, its script and its numbers stand in it, and it may ask for nothing else.

    Args:
        title: Plain text.
        body: HTML.
        numbers: What the script reads out; plain JSON values.
    """
    style = _asset("page.css")
    script = _asset("page.js")
    # The browser itself keeps the page from asking for anything, and from running what is not in it.
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'"
    return (
        '<!DOCTYPE html>\n<html lang="en" data-by="step">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n{body}</main>\n<div id=readout hidden></div>\n"
        f'<script type="application/json" id="numbers">{_json(numbers)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _json(value: Any) -> str:
    """Render JSON that cannot end the element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
