"""HTML shared by the pages about a dataset and about a run: documents, sections, tables, notes.

A page is one file that loads nothing: style and script are inside it, and a content security policy keeps the
browser from asking for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def document(title: str, body: str, *, style: str, policy: str, end: str = "") -> str:
    """Return a whole page.

    Args:
        title: Plain text.
        body: HTML of its main part.
        style: CSS.
        policy: What the browser may load besides nothing, as in Content-Security-Policy.
        end: HTML after the main part, such as scripts.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; {policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<main>\n{body}</main>\n{end}</body>\n</html>\n"
    )


def section(title: str, body: str, key: str = "") -> str:
    """Return a titled card, with an ``id`` if one is given; nothing for an empty body."""
    name = f' id="{key}"' if key else ""
    return f"<section{name}><h2>{title}</h2>{body}</section>\n" if body else ""


def note(text: str) -> str:
    """Return a small remark; ``text`` is HTML."""
    return f"<p class=note>{text}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], classes: str = "") -> str:
    """Return a table of HTML cells; columns whose names begin with # hold numbers."""
    kinds = [" class=number" if name.startswith("#") else "" for name in columns]

    def line(tag: str, cells: Sequence[str]) -> str:
        drawn = (f"<{tag}{kind}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(drawn)}</tr>"

    head = line("th", [name.removeprefix("#") for name in columns])
    thead = f"<thead>{head}</thead>" if any(columns) else ""
    lines = "".join(line("td", row) for row in rows)
    marked = f' class="{classes}"' if classes else ""
    return f"<div class=scroll><table{marked}>{thead}<tbody>{lines}</tbody></table></div>"
