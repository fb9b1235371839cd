"""HTML page about a dataset: one self-contained file without scripts, clocks or host names.

Its style, ``assets/page.css``, covers light and dark themes, screen and print, and names no file and no
address. `summarize` is the only place that derives statements about de-identification from a manifest. Update
it whenever packing treats identifiers differently: a page must not promise what did not happen.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardflow.format import Dataset
from shardflow.format.keys import LANGUAGE_WITHOUT_RULES, REPORT_COUNTS
from shardflow.format.manifest import manifest_path
from shardflow.format.reasons import FLAGS, REASONS, Reason, remedy_of
from shardflow.logs import counted, human_bytes
from shardflow.viewing.dataset_facts import HU_START, HU_STEP, HU_STOP, DatasetFacts, Histogram, Thumbnail
from shardflow.viewing.markup import document, note, section, table

if TYPE_CHECKING:
    from shardflow.format import Manifest


def share(count: int, total: int) -> str:
    """Return a part of a whole in percent."""
    if not total or not count:
        return "0 %"
    percent = 100 * count / total
    return "< 0.1 %" if percent < 0.1 else f"{percent:.1f} %"


_WIDTH, _ROW, _LABEL = 430, 22, 122
_PLOT_WIDTH, _PLOT_HEIGHT, _LEFT, _BOTTOM = 940, 240, 52, 28


def bars(title: str, labels: Sequence[str], counts: Sequence[int]) -> str:
    """Draw one horizontal bar for each label, with its count; empty bins at both ends are left out."""
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
    """Draw the histogram of CT on a logarithmic scale; the first and last count are outside of its range."""
    inside = [int(count) for count in counts[1:-1]]
    if not any(inside):
        return '<p class="none">no CT in HU</p>'
    total = sum(inside)
    top = math.ceil(math.log10(max(inside) + 1))
    # Six decades show air, fat and metal; below is noise.
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


_OPTIONS: Final = {
    "113100": "Basic Application Confidentiality Profile",
    "113101": "Clean Pixel Data Option",
    "113105": "Clean Descriptors Option",
    "113107": "Retain Longitudinal Temporal Information Modified Dates Option",
    "113108": "Retain Patient Characteristics Option",
}
_HELD_BACK: Final = ("BURNED_IN_ANNOTATION", "FACE_RISK")


class Treatment(StrEnum):
    """Treatment of a category of information."""

    REMOVED = "removed"
    REPLACED = "replaced"
    GENERALIZED = "generalized"
    KEPT = "kept"
    UNTOUCHED = "stored as is"
    """Not examined: it may identify a person."""


class Statement(NamedTuple):
    """One category and its treatment."""

    treatment: Treatment
    category: str
    how: str
    details: tuple[str, ...] = ()
    """Names for a list that can be unfolded, such as attributes."""


class DeidSummary(NamedTuple):
    """De-identification of a dataset."""

    key_id: str
    """Identifier of the secret key that made the surrogates; not the key."""
    statements: tuple[Statement, ...]
    option_codes: tuple[tuple[str, str], ...] = ()
    """Code and meaning of each option of DICOM PS3.15, E.1, that was applied, such as ``("113100", ...)``."""


def summarize(
    manifest: Manifest, *, num_reports: int, kept_keywords: Sequence[str], max_age_years: int
) -> DeidSummary | None:
    """Summarize what packing did to identifiers; return None for a dataset that shardflow did not pack.

    Args:
        manifest: Of the dataset.
        num_reports: Samples with a report.
        kept_keywords: DICOM keywords of the technical attributes that packing keeps.
        max_age_years: Age from which on packing names no year.
    """
    if manifest.key_id is None:
        return None
    statements = [
        Statement(
            Treatment.REMOVED,
            "Everything not named below",
            "names, addresses, record numbers, dates and times, descriptions, comments, private elements, "
            "file names: an attribute that is on no list is not copied",
        ),
        Statement(
            Treatment.REPLACED,
            "Identifiers of patient, study, series and inputs",
            "by surrogates that only the holder of the secret key can derive again",
        ),
        Statement(
            Treatment.GENERALIZED,
            "Age, maker, contrast agent",
            f"whole years, from {max_age_years} on as one class; one spelling of a known maker; only whether "
            "there was contrast",
        ),
        Statement(
            Treatment.KEPT,
            f"Sex, and up to {len(kept_keywords)} technical attributes",
            "only if the value is a plausible number or a word of a closed list",
            tuple(kept_keywords),
        ),
    ]
    done: Any = manifest.extra.get("deidentification", {})
    counts: Mapping[str, int] = done.get("counts", {})
    statements += _pixels(manifest, counts)
    if num_reports:
        statements.append(_reports(num_reports, str(done.get("report_text", "keep")), counts))
    codes = tuple((code, _OPTIONS.get(code, "")) for code in done.get("profile_codes", ()))
    return DeidSummary(manifest.key_id, tuple(statements), codes)


def _pixels(manifest: Manifest, counts: Mapping[str, int]) -> list[Statement]:
    untouched = "Pixels of images that no rule suspects"
    searched, blanked = counts.get("text_searched_slices", 0), counts.get("text_blanked_slices", 0)
    how = "not searched for text or faces" if not searched else "searched for text in a share of them only"
    statements = [Statement(Treatment.UNTOUCHED, untouched, how)]
    if searched:
        how = f"text was found in {blanked:,} of {searched:,} slices searched, by a model that misses some"
        statements.append(Statement(Treatment.REMOVED, "Text in pixels", how))
    reasons: Any = manifest.extra.get("reasons", {})
    if num_held := sum(int(reasons.get(reason, 0)) for reason in _HELD_BACK):
        what = f"{counted(num_held, 'image')} that may show text or a face"
        statements.append(Statement(Treatment.REMOVED, what, "quarantined by rules over their headers"))
    if num_slices := counts.get("blackout_slices"):
        how = "blanked where the site's rules say that the device writes"
        statements.append(Statement(Treatment.REMOVED, f"Boxes in {counted(num_slices, 'slice')}", how))
    if num_series := counts.get("face_risk_series"):
        how = "flagged only: their surface could be rendered as a face"
        statements.append(Statement(Treatment.UNTOUCHED, f"{num_series:,} series of heads", how))
    return statements


def _reports(num_reports: int, mode: str, counts: Mapping[str, int]) -> Statement:
    what = f"Text of {counted(num_reports, 'report')}"
    if mode == "keep":
        return Statement(Treatment.UNTOUCHED, what, "unchanged: names, dates and numbers are still in it")
    places = {name.removeprefix("report_"): n for name, n in counts.items() if name.startswith("report_")}
    how = (
        f"{sum(places.values()):,} places replaced by their category (mode {mode}): values of the study's "
        "headers, and patterns such as dates and numbers; whatever is neither may still be there"
    )
    details = tuple(f"{name}: {count:,}" for name, count in sorted(places.items()))
    return Statement(Treatment.GENERALIZED, what, how, details)


_OUTCOMES: Final = ("packed", "skipped", "quarantined")


def inputs(dataset: Dataset, facts: DatasetFacts) -> str:
    """Show the outcomes of all inputs, what is quarantined with what to do, and what is skipped."""
    counts = {name: int(getattr(dataset.manifest.counts, name)) for name in _OUTCOMES}
    total = sum(counts.values())
    strip = "".join(
        f'<span class="{name}" style="flex-grow:{count}" title="{name}: {count:,}"></span>'
        for name, count in counts.items()
        if count
    )
    legend = "".join(
        f'<li><i class="{name}"></i>{count:,} {name} <em>{share(count, total)}</em></li>'
        for name, count in counts.items()
    )
    if not total:
        return "<p class=none>The dataset has no ledger of its inputs.</p>"
    what = "1 input, with one outcome" if total == 1 else f"{total:,} inputs, each with one outcome"
    return (
        f"<p>{what}.</p><div class=strip>{strip}</div><ul class=legend>{legend}</ul>"
        f"<h3>Quarantined: should have been packed, and could not be</h3>{_quarantined(facts)}"
        f"<h3>Skipped: not meant to be packed</h3>{_skipped(facts)}"
    )


def reports(dataset: Dataset) -> str:
    """Show the reports by language, how many were not read whole, and whether several rules read them."""
    counts: Any = dataset.manifest.extra[REPORT_COUNTS]
    chart = _ranked("Reports by language", Counter(counts["languages"]))
    unread = int(counts["unread"].get(LANGUAGE_WITHOUT_RULES, 0))
    remarks = [f"{unread:,} not read whole, for want of rules for their language"] if unread else []
    num_rules = len(counts.get("rules", {}))
    remarks += [f"read by {num_rules} sets of rules, as shardflow info lists them"] if num_rules > 1 else []
    return _figure("Reports by language", chart, "; ".join(remarks))


def _quarantined(facts: DatasetFacts) -> str:
    rows = [
        (f"<code>{escape(reason)}</code>", escape(kind), f"{count:,}", escape(_sentence(reason)),
         escape(remedy_of(reason)))
        for reason, kind, count in _of_outcome(facts, "quarantined")
    ]  # fmt: skip
    if not rows:
        return "<p class=none>Nothing is quarantined.</p>"
    return table(("reason", "kind", "#inputs", "what it means", "what to do"), rows) + note(
        "In the private folder of the job, <code>inputs-*.jsonl</code> maps the surrogates of the ledger "
        "back to the files."
    )


def _skipped(facts: DatasetFacts) -> str:
    rows = [
        (f"<code>{escape(reason)}</code>", escape(kind), f"{count:,}", escape(_sentence(reason)))
        for reason, kind, count in _of_outcome(facts, "skipped")
    ]
    if not rows:
        return "<p class=none>Nothing is skipped.</p>"
    return table(("reason", "kind", "#inputs", "what it means"), rows)


def _of_outcome(facts: DatasetFacts, outcome: str) -> Iterable[tuple[str, str, int]]:
    """Return the reasons of an outcome, the most frequent first."""
    found = [(reason, kind, count) for (of, reason, kind), count in facts.reasons.items() if of == outcome]
    return sorted(found, key=lambda item: (-item[2], item))


def _sentence(reason: str) -> str:
    try:
        return REASONS[Reason(reason)].sentence
    except ValueError:
        return "(a reason of another writer)"


def deidentification(summary: DeidSummary | None) -> str:
    """Show what was done to identifiers."""
    if summary is None:
        return "<p class=warning>The manifest does not say that anything was de-identified.</p>"
    body = table(("treatment", "what", "how"), [_statement(one) for one in summary.statements])
    codes = ""
    if summary.option_codes:
        listed = table(
            ("code", "option"), [(f"<code>{escape(c)}</code>", escape(t)) for c, t in summary.option_codes]
        )
        codes = f"<h3>Options applied (DICOM PS3.15, E.1)</h3>{listed}"
    key = note(f"Surrogates were made with the key <code>{escape(summary.key_id or '-')}</code>.")
    return body + codes + key


def _statement(statement: Statement) -> tuple[str, str, str]:
    is_alarm = statement.treatment is Treatment.UNTOUCHED
    treatment = f"<b class=alarm>{statement.treatment}</b>" if is_alarm else str(statement.treatment)
    details = ""
    if statement.details:
        names = ", ".join(map(escape, statement.details))
        details = f"<details><summary>their names</summary><p class=note>{names}</p></details>"
    return treatment, escape(statement.category), escape(statement.how) + details


_MAX_ROWS: Final = 12
_MAX_NAME: Final = 18
# Flags about how a file was read, rather than about a stack's geometry.
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
             f"{numbers['num_shards']:,}", human_bytes(num_bytes), *(f"{of[name]:,}" for name in modalities))
        )  # fmt: skip
    named = [f"#{escape(name)}" for name in modalities]
    columns = ("split", "#samples", "#share", "#shards", "#size", *named)
    return table(columns, rows) + note("Modality is that of the primary series.")


def shapes(dataset: Dataset, facts: DatasetFacts) -> str:
    """Show what the studies are, as histograms."""
    together = sum(facts.modalities.values(), Counter[str]())
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
        f"<p>{total:,} pixels: {slices} of {studies}. The scale is logarithmic. Air is at -1000, water "
        "at 0; padding counts as air.</p>"
        f"<figure class=wide>{hounsfield_chart(facts.hounsfield.tolist())}</figure>"
        + note(
            f"{below:,} pixels ({share(below, total)}) are below {HU_START} HU, {above:,} "
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
        "<p class=warning>Thumbnails are pixels of patients, unless marked GENERATED: keep this page only "
        f"where the dataset may be stored. {remedy} leaves them out.</p>"
    )  # fmt: skip
    if facts.num_burned_in:
        warning += note(f"{facts.num_burned_in:,} left out: text is burned into their pixels.")
    return f"{warning}<div class=gallery>{''.join(map(_thumbnail, facts.thumbnails))}</div>" + note(
        "The middle slice of the primary series of studies that a hash of their keys chose."
    )


def _thumbnail(thumbnail: Thumbnail) -> str:
    picture = thumbnail.picture
    data = base64.b64encode(picture.jpeg).decode("ascii")
    amount = "1 image" if thumbnail.num_slices == 1 else counted(thumbnail.num_slices, "slice")
    what = f"{escape(thumbnail.modality)} {amount}".strip()
    badge = f"<b>{escape(thumbnail.generated)}</b>" if thumbnail.generated else ""
    place = escape(thumbnail.place)
    return (
        f'<figure><div class=film><img width={picture.width} height={picture.height} alt="slice of '
        f'{place}" src="data:image/jpeg;base64,{data}"></div>'
        f"<figcaption><code>{place}</code> {what}{badge}</figcaption></figure>"
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
    shown, rest = order[:_MAX_ROWS], order[_MAX_ROWS:]
    if rest:
        shown.append((f"({len(rest)} others)", sum(count for _, count in rest)))
    return bars(title, [_short(name) for name, _ in shown], [count for _, count in shown])


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}\u2026"


def _figure(title: str, chart: str, remark: str) -> str:
    caption = f" <em>{escape(remark)}</em>" if remark else ""
    return f"<figure><figcaption>{escape(title)}{caption}</figcaption>{chart}</figure>"


def render_page(
    dataset: Dataset,
    facts: DatasetFacts,
    *,
    kept_keywords: Sequence[str],
    max_age_years: int,
    is_inside: bool = False,
) -> str:
    """Write the page about a dataset.

    Args:
        dataset: The dataset.
        facts: From `gather`.
        kept_keywords: DICOM keywords of the technical attributes that packing keeps.
        max_age_years: Age from which on packing names no year.
        is_inside: Whether the page becomes a file of the dataset. The manifest names it then, so the page
            cannot hold the dataset_id, which is the manifest's digest.

    Returns:
        HTML. Equal datasets and facts give equal text.
    """
    has_gallery = facts.thumbnails or facts.num_burned_in
    remedy = "<code>page.num_thumbnails = 0</code>" if is_inside else "<code>--thumbnails 0</code>"
    deid = summarize(
        dataset.manifest,
        num_reports=facts.num_reports,
        kept_keywords=kept_keywords,
        max_age_years=max_age_years,
    )
    parts = [
        _head(dataset, facts, is_inside=is_inside),
        section("Inputs", inputs(dataset, facts)),
        section("De-identification", deidentification(deid)),
        section("Splits", splits(dataset, facts)),
        section("Reports", reports(dataset)) if REPORT_COUNTS in dataset.manifest.extra else "",
        section("What the studies are", shapes(dataset, facts)),
        section("Findings about series", findings(dataset, facts)),
        section("CT values", hounsfield(facts)),
        section("Thumbnails", gallery(facts, remedy=remedy)) if has_gallery else "",
        section("Identity", _identity(dataset, is_inside=is_inside)),
    ]  # fmt: skip
    title = (
        f"Dataset, version {dataset.manifest_version}" if is_inside else f"Dataset {dataset.dataset_id[:12]}"
    )
    style = resources.files(__package__).joinpath("assets", "page.css").read_text(encoding="utf-8")
    policy = "style-src 'unsafe-inline'; img-src data:"
    return document(title, "".join(parts), style=style, policy=policy)


def _head(dataset: Dataset, facts: DatasetFacts, *, is_inside: bool) -> str:
    manifest = dataset.manifest
    num_bytes = sum(file.num_bytes for file in manifest.files() if file != manifest.page)
    numbers = [
        (f"{dataset.samples.num_samples:,}", "samples"),
        (f"{int(dataset.samples.column('num_slices').sum(dtype='int64')):,}", "slices"),
        (f"{len(manifest.shards):,}", "shards"),
        (human_bytes(num_bytes), "on disk"),
        (f"{manifest.counts.quarantined:,}", "inputs quarantined"),
    ]
    cards = "".join(f"<div class=card><b>{value}</b><span>{name}</span></div>" for value, name in numbers)
    mark = ""
    if facts.num_generated:
        if facts.num_generated == facts.num_described:
            what = "All studies say that they are generated."
        elif facts.num_generated == 1:
            what = "1 study says that it is generated."
        else:
            what = f"{facts.num_generated:,} studies say that they are generated."
        mark = f"<p class=generated>{what}</p>"
    identity = "" if is_inside else f"<p class=id>{dataset.dataset_id}</p>"
    return (
        f"<header><h1>Dataset</h1>{identity}"
        f"<p>version {dataset.manifest_version}, format {dataset.manifest.format_version}</p>{mark}</header>"
        f"<div class=cards>{cards}</div>"
    )


def _identity(dataset: Dataset, *, is_inside: bool) -> str:
    manifest = dataset.manifest
    name = (
        f"the digest of <code>{manifest_path(manifest.manifest_version)}</code>, which names this page"
        if is_inside
        else f"<code>{dataset.dataset_id}</code>"
    )
    rows = [
        ("dataset_id", name),
        ("settings (config_digest)", f"<code>{manifest.config_digest or '-'}</code>"),
        ("pseudonym key (key_id)", f"<code>{escape(manifest.key_id or '-')}</code>"),
        ("ledger head", f"<code>{manifest.ledger.head if manifest.ledger else '-'}</code>"),
        *((escape(name), escape(value)) for name, value in sorted(manifest.created_with.items())),
    ]
    return table(("", ""), rows)
