"""The page about a dataset: one HTML file that asks for nothing else; it holds no clock and no host."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from shardflow.preview.charts import bars, hounsfield_chart
from shardflow.preview.counts import HU_START, HU_STOP, Histogram
from shardflow.preview.facts import DatasetFacts, Thumbnail
from shardflow.preview.style import STYLE
from shardflow.shards import Dataset
from shardflow.shards.manifest import FORMAT_VERSION
from shardflow.sources.reasons import REASONS, Reason

__all__ = ["render_page"]

_MOST_ROWS: Final = 12
_OUTCOMES: Final = ("packed", "skipped", "quarantined")


def render_page(dataset: Dataset, facts: DatasetFacts) -> str:
    """Write the page about a dataset.

    Args:
        dataset: The dataset.
        facts: From `gather`.

    Returns:
        HTML. Equal datasets and facts give equal text.
    """
    parts = [
        _head(dataset, facts),
        _section("Inputs", _outcomes(dataset) + _reasons(facts)),
        _section("Splits", _splits(dataset, facts)),
        _section("What the studies are", _shapes(facts)),
        _section("CT values", _hounsfield(facts)),
        _section("Thumbnails", _gallery(facts)) if facts.thumbnails or facts.num_burned_in else "",
        _section("Identity", _identity(dataset)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself keeps the page from asking for anything.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>Dataset {dataset.dataset_id[:12]}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _head(dataset: Dataset, facts: DatasetFacts) -> str:
    manifest = dataset.manifest
    num_bytes = sum(file.num_bytes for file in manifest.files()) + len(manifest.encode())
    numbers = [
        (f"{dataset.samples.num_samples:,}", "samples"),
        (f"{int(dataset.samples.column('num_slices').sum(dtype='int64')):,}", "slices"),
        (f"{len(manifest.shards):,}", "shards"),
        (_size(num_bytes), "on disk"),
        (f"{manifest.counts.quarantined:,}", "inputs quarantined"),
    ]
    cards = "".join(f"<div class=card><b>{value}</b><span>{name}</span></div>" for value, name in numbers)
    note = ""
    if facts.num_generated:
        what = "All" if facts.num_generated == dataset.samples.num_samples else f"{facts.num_generated:,}"
        note = f"<p class=generated>{what} reports say that they are generated.</p>"
    return (
        f"<header><h1>Dataset</h1><p class=id>{dataset.dataset_id}</p>"
        f"<p>version {dataset.manifest_version}, format {FORMAT_VERSION}</p>{note}</header>"
        f"<div class=cards>{cards}</div>"
    )


def _outcomes(dataset: Dataset) -> str:
    counts = {name: int(getattr(dataset.manifest.counts, name)) for name in _OUTCOMES}
    total = sum(counts.values())
    strip = "".join(
        f'<span class="{name}" style="flex-grow:{count}" title="{name}: {count:,}"></span>'
        for name, count in counts.items()
        if count
    )
    legend = "".join(
        f'<li><i class="{name}"></i>{count:,} {name} <em>{_share(count, total)}</em></li>'
        for name, count in counts.items()
    )
    said = f"<p>{total:,} inputs, each with one outcome.</p>"
    return f"{said}<div class=strip>{strip}</div><ul class=legend>{legend}</ul>"


def _reasons(facts: DatasetFacts) -> str:
    if not facts.reasons:
        return "<p class=none>Every input is packed.</p>"
    order = sorted(facts.reasons.items(), key=lambda item: (item[0][0], -item[1], item[0]))
    rows = [
        (f'<i class="{outcome}"></i>{outcome}', f"<code>{escape(reason)}</code>", escape(kind), f"{count:,}",
         escape(_sentence(reason)))
        for (outcome, reason, kind), count in order
    ]  # fmt: skip
    return _table(("outcome", "reason", "kind", "#inputs", "what it means"), rows)


def _sentence(reason: str) -> str:
    try:
        return REASONS[Reason(reason)].sentence
    except ValueError:
        return "(a reason of another writer)"


def _splits(dataset: Dataset, facts: DatasetFacts) -> str:
    modalities = sorted({name for counts in facts.modalities.values() for name in counts})
    total = dataset.samples.num_samples
    rows = []
    for split, numbers in dataset.manifest.splits.items():
        num_bytes = sum(shard.num_bytes for shard in dataset.manifest.shards if shard.split == split)
        of = facts.modalities.get(split, Counter())
        rows.append(
            (escape(split), f"{numbers['num_samples']:,}", _share(numbers["num_samples"], total),
             f"{numbers['num_shards']:,}", _size(num_bytes), *(f"{of[name]:,}" for name in modalities))
        )  # fmt: skip
    columns = (
        "split",
        "#samples",
        "#share",
        "#shards",
        "#size",
        *(f"#{escape(name)}" for name in modalities),
    )
    return _table(columns, rows) + "<p class=note>Modality is that of the primary series.</p>"


def _shapes(facts: DatasetFacts) -> str:
    together: Counter[str] = Counter()
    for counts in facts.modalities.values():
        together.update(counts)
    charts = [
        _figure("Modality", _ranked("Modality", together), ""),
        _figure("Body part", _ranked("Body part", facts.body_parts), ""),
        _histogram("Slices of a study", facts.slices),
        _histogram("Series of a study", facts.series),
        _histogram("Longer side of a slice, pixels", facts.sides),
        _histogram("Pixel spacing", facts.spacing),
        _histogram("Slice spacing", facts.gap),
        _histogram("Report, bytes", facts.text),
    ]
    note = ""
    if facts.num_not_described:
        note = f"<p class=note>{facts.num_not_described:,} samples have no description (study.json).</p>"
    return (
        f"<div class=charts>{''.join(charts)}</div>{note}<p class=note>Sizes and spacings are "
        "those of the primary series; of two pixel spacings the larger one counts.</p>"
        f"{_flags(facts)}"
    )


def _flags(facts: DatasetFacts) -> str:
    """What is odd about series, with the number of series."""
    if not facts.flags:
        return ""
    order = sorted(facts.flags.items(), key=lambda item: (-item[1], item[0]))
    rows = [(escape(name.replace("_", " ")), f"{count:,}") for name, count in order]
    return f"<h3>Flags</h3>{_table(('what is odd', '#series'), rows)}"


def _histogram(title: str, histogram: Histogram) -> str:
    unknown = f"{histogram.unknown:,} unknown" if histogram.unknown else ""
    return _figure(title, bars(title, histogram.labels, histogram.counts.tolist()), unknown)


def _ranked(title: str, counter: Counter[str]) -> str:
    """Draw the most frequent names, and the others together."""
    order = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    shown, rest = order[:_MOST_ROWS], order[_MOST_ROWS:]
    if rest:
        shown.append((f"({len(rest)} others)", sum(count for _, count in rest)))
    return bars(title, [_short(name) for name, _ in shown], [count for _, count in shown])


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}\u2026"


def _figure(title: str, chart: str, note: str) -> str:
    caption = f" <em>{escape(note)}</em>" if note else ""
    return f"<figure><figcaption>{escape(title)}{caption}</figcaption>{chart}</figure>"


def _hounsfield(facts: DatasetFacts) -> str:
    below, above = int(facts.hounsfield[0]), int(facts.hounsfield[-1])
    total = int(facts.hounsfield.sum())
    if not total:
        return "<p class=none>The dataset holds no CT in HU.</p>"
    counted = (
        f"all {facts.num_ct_slices:,} slices"
        if facts.num_ct_slices == facts.num_ct_slices_counted
        else f"{facts.num_ct_slices_counted:,} of {facts.num_ct_slices:,} slices, evenly spread"
    )
    return (
        f"<p>{total:,} pixels of {counted}; the scale is logarithmic. Air lies at -1000, water at 0.</p>"
        f"<figure class=wide>{hounsfield_chart(facts.hounsfield.tolist())}</figure>"
        f"<p class=note>{below:,} pixels ({_share(below, total)}) lie below {HU_START} HU, {above:,} "
        f"({_share(above, total)}) above {HU_STOP} HU.</p>"
    )


def _gallery(facts: DatasetFacts) -> str:
    note = (
        "<p class=warning>Thumbnails are pixels of patients, unless marked GENERATED: keep this page where "
        "the dataset may lie. <code>--thumbnails 0</code> leaves them out.</p>"
    )
    if facts.num_burned_in:
        note += f"<p class=note>{facts.num_burned_in:,} left out: text is burned into their pixels.</p>"
    return f"{note}<div class=gallery>{''.join(map(_thumbnail, facts.thumbnails))}</div>"


def _thumbnail(thumbnail: Thumbnail) -> str:
    data = base64.b64encode(thumbnail.jpeg).decode("ascii")
    amount = "1 image" if thumbnail.num_slices == 1 else f"{thumbnail.num_slices:,} slices"
    what = f"{escape(thumbnail.modality)} {amount}".strip()
    badge = f"<b>{thumbnail.generated}</b>" if thumbnail.generated else ""
    return (
        f'<figure><div class=film><img width={thumbnail.width} height={thumbnail.height} alt="slice of '
        f'{thumbnail.place}" src="data:image/jpeg;base64,{data}"></div>'
        f"<figcaption><code>{thumbnail.place}</code> {what}{badge}</figcaption></figure>"
    )


def _identity(dataset: Dataset) -> str:
    manifest = dataset.manifest
    rows = [
        ("dataset_id", f"<code>{dataset.dataset_id}</code>"),
        ("settings (config_digest)", f"<code>{manifest.config_digest or '-'}</code>"),
        ("pseudonym key (key_id)", f"<code>{escape(manifest.key_id or '-')}</code>"),
        ("ledger head", f"<code>{manifest.ledger.head if manifest.ledger else '-'}</code>"),
        *((escape(name), escape(value)) for name, value in sorted(manifest.created_with.items())),
    ]
    return _table(("", ""), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose names begin with # hold numbers."""
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


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _share(count: int, total: int) -> str:
    if not total or not count:
        return "0 %"
    share = 100 * count / total
    return "< 0.1 %" if share < 0.1 else f"{share:.1f} %"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
