"""HTML page about a dataset: one self-contained file without scripts, clocks or host names.

Its style covers light and dark themes, screen and print.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from shardflow.format import Dataset
from shardflow.format.manifest import FORMAT_VERSION, manifest_path
from shardflow.viewing.dataset_facts import DatasetFacts
from shardflow.viewing.page_sections import (
    deidentification,
    findings,
    gallery,
    hounsfield,
    human_size,
    inputs,
    section,
    shapes,
    splits,
    summarise,
    table,
)

STYLE: Final = """
:root{color-scheme:light dark;--page:#f6f8fa;--card:#fff;--ink:#1b1f24;--faint:#59636e;--line:#d8dee4;
--bar:#2f6fde;--good:#2f6fde;--skipped:#9aa4ae;--bad:#c4320a;--warn:#fff3d6;--warnline:#d9a520}
@media screen and (prefers-color-scheme:dark){:root{--page:#0d1117;--card:#161b22;--ink:#e6edf3;
--faint:#9198a1;--line:#30363d;--bar:#5b9bff;--good:#5b9bff;--skipped:#6b7580;--bad:#ff7b54;--warn:#2d2410;--warnline:#9e7a1d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",
sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 24px 64px}
header p{margin:0;color:var(--faint)}
h1{font-size:28px;margin:0 0 4px}
h2{font-size:19px;margin:0 0 12px}
code,.id{font-family:ui-monospace,"DejaVu Sans Mono",Consolas,monospace;font-size:13px;overflow-wrap:anywhere}
header .generated{display:inline-block;margin-top:10px;padding:3px 10px;border-radius:6px;
background:var(--bad);color:var(--page);font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.card,section{background:var(--card);border:1px solid var(--line);border-radius:10px}
.card{padding:14px 16px}
.card b{display:block;font-size:24px;line-height:1.25}
.card span{color:var(--faint)}
section{padding:20px 22px;margin:16px 0}
section>p{margin:8px 0}
em{font-style:normal;color:var(--faint);font-weight:400}
.note,.none{color:var(--faint);font-size:13px}
.warning{background:var(--warn);border-left:4px solid var(--warnline);padding:8px 12px;border-radius:4px}
.strip{display:flex;height:16px;border-radius:8px;overflow:hidden;gap:2px;margin:10px 0}
.strip span{min-width:4px}
span.packed,i.packed{background:var(--good)}
span.skipped,i.skipped{background:var(--skipped)}
span.quarantined,i.quarantined{background:var(--bad)}
i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:7px}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 24px;padding:0;margin:0 0 14px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
tr:last-child td{border-bottom:0}
th{color:var(--faint);font-weight:500;white-space:nowrap}
td:first-child{white-space:nowrap}
.alarm{color:var(--bad)}
details{margin-top:4px}
summary{cursor:pointer;color:var(--faint);font-size:13px}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.charts{columns:2 400px;column-gap:36px}
.charts figure{break-inside:avoid;padding-bottom:20px}
h3{font-size:15px;margin:18px 0 6px}
figure{margin:0;min-width:0}
figcaption{font-weight:600;margin-bottom:6px}
svg{display:block;width:100%;height:auto}
.charts svg{max-width:480px}
.wide{overflow-x:auto}
.bar{fill:var(--bar)}
.grid{stroke:var(--line)}
.label{fill:var(--faint);font-size:12px}
.value{fill:var(--ink);font-size:12px}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(168px,1fr));gap:14px}
.gallery figcaption{font-weight:400;font-size:12.5px;margin:4px 0 0}
.gallery b{display:block;color:var(--bad);font-size:11px;letter-spacing:.04em}
.film{background:#000;height:168px;display:flex;align-items:center;justify-content:center;border-radius:6px;
overflow:hidden}
.film img{display:block}
@media screen and (max-width:600px){main{padding:20px 10px}section{padding:16px 12px}
.cards{grid-template-columns:repeat(auto-fit,minmax(105px,1fr))}.card{padding:10px}.card b{font-size:18px}
td:first-child{white-space:normal}td:first-child code{overflow-wrap:normal}
td:last-child:not(.number){min-width:15em}.wide svg{min-width:640px}}
@media print{*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
:root{color-scheme:light}body{background:#fff;font-size:13px}main{max-width:none;padding:0}
.cards{grid-template-columns:repeat(5,1fr)}.card b{font-size:20px}.scroll,.wide{overflow:visible}
.charts{columns:2 200px}
section{border:0;padding:6px 0;margin:8px 0}.card,tr,figure{break-inside:avoid}h2,h3{break-after:avoid}}
"""
"""The style sheet; it names no file and no address."""


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
    deid = summarise(
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
        section("What the studies are", shapes(dataset, facts)),
        section("Findings about series", findings(dataset, facts)),
        section("CT values", hounsfield(facts)),
        section("Thumbnails", gallery(facts, remedy=remedy)) if has_gallery else "",
        section("Identity", _identity(dataset, is_inside=is_inside)),
    ]  # fmt: skip
    title = (
        f"Dataset, version {dataset.manifest_version}" if is_inside else f"Dataset {dataset.dataset_id[:12]}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself keeps the page from asking for anything.
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">\n"
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _head(dataset: Dataset, facts: DatasetFacts, *, is_inside: bool) -> str:
    manifest = dataset.manifest
    num_bytes = sum(file.num_bytes for file in manifest.files() if file != manifest.page)
    numbers = [
        (f"{dataset.samples.num_samples:,}", "samples"),
        (f"{int(dataset.samples.column('num_slices').sum(dtype='int64')):,}", "slices"),
        (f"{len(manifest.shards):,}", "shards"),
        (human_size(num_bytes), "on disk"),
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
        f"<p>version {dataset.manifest_version}, format {FORMAT_VERSION}</p>{mark}</header>"
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
