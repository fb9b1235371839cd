"""Pieces of HTML that all sections of the page are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["counted", "human_size", "note", "section", "share", "table"]


def section(title: str, body: str) -> str:
    """A titled card."""
    return f"<section><h2>{title}</h2>{body}</section>\n"


def note(text: str) -> str:
    """A small remark; ``text`` is HTML."""
    return f"<p class=note>{text}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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
    return f"<div class=scroll><table>{thead}<tbody>{body}</tbody></table></div>"


def share(count: int, total: int) -> str:
    """A part of a whole in percent."""
    if not total or not count:
        return "0 %"
    percent = 100 * count / total
    return "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """A number of things: ``1 report``, ``1,000 reports``."""
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def human_size(num_bytes: int) -> str:
    """A size in the largest unit that leaves a whole part."""
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
