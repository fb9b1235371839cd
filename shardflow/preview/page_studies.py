"""Sections of the page about studies: splits, shapes, findings about geometry, values of CT, thumbnails."""

from __future__ import annotations

import base64
from collections import Counter
from html import escape
from typing import Final

from shardflow.preview.charts import bars, hounsfield_chart
from shardflow.preview.counts import HU_START, HU_STOP, Histogram
from shardflow.preview.facts import DatasetFacts, Thumbnail
from shardflow.preview.html import counted, human_size, note, share, table
from shardflow.shards import Dataset
from shardflow.sources.flags import FLAGS

__all__ = ["findings", "gallery", "hounsfield", "shapes", "splits"]

_MOST_ROWS: Final = 12
_MOST_NAME: Final = 18
# Flags that are no fault of a stack's geometry, but say how a file was read.
_OF_FILES: Final = frozenset(
    {
        "derived",
        "encoding_contradicts_syntax",
        "excess_pixel_bytes",
        "high_bit_corrected",
        "no_preamble",
        "no_transfer_syntax",
    }
)


def splits(dataset: Dataset, facts: DatasetFacts) -> str:
    """Show the splits with their modalities."""
    modalities = sorted({name for counts in facts.modalities.values() for name in counts})
    total = dataset.samples.num_samples
    rows = []
    for split, numbers in dataset.manifest.splits.items():
        num_bytes = sum(shard.num_bytes for shard in dataset.manifest.shards if shard.split == split)
        of = facts.modalities.get(split, Counter())
        rows.append(
            (escape(split), f"{numbers['num_samples']:,}", share(numbers["num_samples"], total),
             f"{numbers['num_shards']:,}", human_size(num_bytes), *(f"{of[name]:,}" for name in modalities))
        )  # fmt: skip
    columns = (
        "split",
        "#samples",
        "#share",
        "#shards",
        "#size",
        *(f"#{escape(name)}" for name in modalities),
    )
    return table(columns, rows) + note("Modality is that of the primary series.")


def shapes(dataset: Dataset, facts: DatasetFacts) -> str:
    """Show what the studies are, as histograms."""
    together: Counter[str] = Counter()
    for counts in facts.modalities.values():
        together.update(counts)
    charts = [
        _figure("Modality", _ranked("Modality", together), ""),
        _histogram("Slices of a study", facts.slices),
        _histogram("Series of a study", facts.series),
        _histogram("Longer side of a slice, pixels", facts.sides),
        _histogram("Report, bytes", facts.text),
        _figure("Body part", _ranked("Body part", facts.body_parts), ""),
        _histogram("Pixel spacing", facts.spacing),
        _histogram("Slice spacing", facts.gap),
    ]
    remark = (
        "Sizes and spacings are those of the primary series; of two pixel spacings the larger one counts."
    )
    if facts.num_not_described:
        remark += f" {facts.num_not_described:,} samples have no description (study.json)."
    return f"<div class=charts>{''.join(charts)}</div>{_of_how_many(dataset, facts)}{note(remark)}"


def findings(dataset: Dataset, facts: DatasetFacts) -> str:
    """Show what is odd about series, with what it means."""
    order = sorted(facts.flags.items(), key=lambda item: (-item[1], item[0]))
    rows = {
        is_of_files: [
            (escape(name.replace("_", " ")), f"{count:,}", share(count, facts.num_series),
             escape(FLAGS.get(name, "(a flag of another writer)")))
            for name, count in order
            if (name in _OF_FILES) is is_of_files
        ]
        for is_of_files in (False, True)
    }  # fmt: skip
    columns = ("finding", "#series", "#share", "what it means")
    stacks = table(columns, rows[False]) if rows[False] else "<p class=none>No series is odd.</p>"
    files = f"<h3>Files</h3>{table(columns, rows[True])}" if rows[True] else ""
    sums = (
        f"{facts.num_missing:,} slices are missing from regular grids. {facts.num_padding:,} pixels are "
        f"called padding; {facts.num_clipped:,} did not fit their number type and were set to its limit."
    )
    return f"{stacks}{files}{_of_how_many(dataset, facts)}{note(sums)}"


def hounsfield(facts: DatasetFacts) -> str:
    """Show the histogram of CT."""
    below, above = int(facts.hounsfield[0]), int(facts.hounsfield[-1])
    total = int(facts.hounsfield.sum())
    if not total:
        return "<p class=none>The dataset holds no CT in HU.</p>"
    num_slices, all_slices = facts.num_ct_slices_counted, facts.num_ct_slices
    studies = counted(facts.num_ct_studies_counted, "study", "studies")
    slices = counted(all_slices, "slice")
    if num_slices < all_slices:
        slices = f"{num_slices:,} of {slices}"
    elif num_slices > 1:
        slices = f"all {slices}"
    return (
        f"<p>{total:,} pixels: {slices} of {studies}. The scale is logarithmic. Air lies at -1000, water "
        "at 0; padding counts as air.</p>"
        f"<figure class=wide>{hounsfield_chart(facts.hounsfield.tolist())}</figure>"
        + note(
            f"{below:,} pixels ({share(below, total)}) lie below {HU_START} HU, {above:,} "
            f"({share(above, total)}) above {HU_STOP} HU."
        )
    )


def gallery(facts: DatasetFacts, *, remedy: str) -> str:
    """Show the thumbnails.

    Args:
        facts: With at least one thumbnail, or one that was left out.
        remedy: How to make a page without them, HTML.
    """
    is_all_generated = all(one.generated == "GENERATED" for one in facts.thumbnails)
    warning = "" if is_all_generated else (
        "<p class=warning>Thumbnails are pixels of patients, unless marked GENERATED: keep this page where "
        f"the dataset may lie. {remedy} leaves them out.</p>"
    )  # fmt: skip
    if facts.num_burned_in:
        warning += note(f"{facts.num_burned_in:,} left out: text is burned into their pixels.")
    return f"{warning}<div class=gallery>{''.join(map(_thumbnail, facts.thumbnails))}</div>" + note(
        "The middle slice of the primary series of studies that a hash of their keys chose."
    )


def _thumbnail(thumbnail: Thumbnail) -> str:
    data = base64.b64encode(thumbnail.jpeg).decode("ascii")
    amount = "1 image" if thumbnail.num_slices == 1 else counted(thumbnail.num_slices, "slice")
    what = f"{escape(thumbnail.modality)} {amount}".strip()
    badge = f"<b>{thumbnail.generated}</b>" if thumbnail.generated else ""
    return (
        f'<figure><div class=film><img width={thumbnail.width} height={thumbnail.height} alt="slice of '
        f'{thumbnail.place}" src="data:image/jpeg;base64,{data}"></div>'
        f"<figcaption><code>{thumbnail.place}</code> {what}{badge}</figcaption></figure>"
    )


def _of_how_many(dataset: Dataset, facts: DatasetFacts) -> str:
    total = dataset.samples.num_samples
    if facts.num_described == total:
        return ""
    return note(
        f"Body parts, spacings and findings are of {facts.num_described:,} of {total:,} studies, which a "
        "hash of their keys chose."
    )


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
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}\u2026"


def _figure(title: str, chart: str, remark: str) -> str:
    caption = f" <em>{escape(remark)}</em>" if remark else ""
    return f"<figure><figcaption>{escape(title)}{caption}</figcaption>{chart}</figure>"
