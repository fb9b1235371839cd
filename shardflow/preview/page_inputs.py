"""Sections of the page about inputs: what became of each, why, and what to do; and de-identification."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from shardflow.preview.deidentification import DeidSummary, Statement, Treatment
from shardflow.preview.facts import DatasetFacts
from shardflow.preview.html import note, share, table
from shardflow.shards import Dataset
from shardflow.sources.reasons import REASONS, Reason
from shardflow.sources.remedies import remedy_of

__all__ = ["deidentification", "inputs"]

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
        return "<p class=none>No ledger says what the samples were made of.</p>"
    what = "1 input, with one outcome" if total == 1 else f"{total:,} inputs, each with one outcome"
    return (
        f"<p>{what}.</p><div class=strip>{strip}</div><ul class=legend>{legend}</ul>"
        f"<h3>Quarantined: should have been packed, and could not be</h3>{_quarantined(facts)}"
        f"<h3>Skipped: were never to be packed</h3>{_skipped(facts)}"
    )


def _quarantined(facts: DatasetFacts) -> str:
    rows = [
        (f"<code>{escape(reason)}</code>", escape(kind), f"{count:,}", escape(_sentence(reason)),
         escape(remedy_of(reason)))
        for reason, kind, count in _of_outcome(facts, "quarantined")
    ]  # fmt: skip
    if not rows:
        return "<p class=none>Nothing is quarantined.</p>"
    return table(("reason", "kind", "#inputs", "what it means", "what to do"), rows) + note(
        "The private folder of the job holds <code>inputs-*.jsonl</code>, the way from the surrogates of the "
        "ledger back to the files."
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
    """Reasons of an outcome, the most frequent first."""
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
