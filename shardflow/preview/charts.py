"""Bar charts as inline SVG: colours come from the page's style, so that they follow its dark and light."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardflow.preview.counts import HU_START, HU_STEP, HU_STOP

__all__ = ["bars", "hounsfield_chart"]

_WIDTH, _ROW, _LABEL = 430, 22, 122
_PLOT_WIDTH, _PLOT_HEIGHT, _LEFT, _BOTTOM = 940, 240, 52, 28


def bars(title: str, labels: Sequence[str], counts: Sequence[int]) -> str:
    """Draw one horizontal bar a label, with its count; empty bins at both ends are left out."""
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return '<p class="none">nothing to show</p>'
    span = range(filled[0], filled[-1] + 1)
    most = max(counts)
    room = _WIDTH - _LABEL - 64
    height = len(span) * _ROW + 4
    parts = [_open(_WIDTH, height, title)]
    for row, place in enumerate(span):
        y, count = row * _ROW + 3, int(counts[place])
        length = max(count / most * room, 2.0) if count else 0.0
        label = escape(labels[place])
        parts.append(
            f'<text class="label" x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{label}</text>'
            f'<rect class="bar" x="{_LABEL}" y="{y}" width="{length:.1f}" height="{_ROW - 6}" rx="2">'
            f"<title>{label}: {count:,}</title></rect>"
            f'<text class="value" x="{_LABEL + length + 6:.1f}" y="{y + 13}">{count:,}</text>'
        )
    return "".join([*parts, "</svg>"])


def hounsfield_chart(counts: Sequence[int]) -> str:
    """Draw the histogram of CT on a logarithmic scale; the first and last count lie outside of its range."""
    inside = [int(count) for count in counts[1:-1]]
    if not any(inside):
        return '<p class="none">no CT in HU</p>'
    total = sum(inside)
    top = math.ceil(math.log10(max(inside) + 1))
    # Six decades are enough to see air, fat and metal; below lies noise.
    floor = max(top - 6, 0)
    plot_height = _PLOT_HEIGHT - _BOTTOM - 8
    plot_width = _PLOT_WIDTH - _LEFT - 8
    step = plot_width / len(inside)
    parts = [_open(_PLOT_WIDTH, _PLOT_HEIGHT, "Pixels of CT by HU")]
    for power in range(floor, top + 1):
        y = 8 + plot_height * (1 - (power - floor) / (top - floor))
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_PLOT_WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="label" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_power(power)}</text>'
        )
    for place, count in enumerate(inside):
        if count:
            share = max((math.log10(count) - floor) / (top - floor), 0.004)
            low = HU_START + place * HU_STEP
            height = plot_height * share
            parts.append(
                f'<rect class="bar" x="{_LEFT + place * step:.1f}" y="{8 + plot_height - height:.1f}" '
                f'width="{step * 0.9:.2f}" height="{height:.1f}"><title>{low} to {low + HU_STEP} HU: '
                f"{count:,} pixels ({count / total:.2%})</title></rect>"
            )
    for hu in range(-1000, HU_STOP, 500):
        x = _LEFT + (hu - HU_START) / HU_STEP * step
        parts.append(
            f'<text class="label" x="{x:.1f}" y="{_PLOT_HEIGHT - 8}" text-anchor="middle">{hu}</text>'
        )
    return "".join([*parts, "</svg>"])


def _open(width: int, height: int, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'


def _power(power: int) -> str:
    return f"{10**power:,}" if power < 4 else f'10<tspan dy="-4" font-size="9">{power}</tspan>'
