"""Inputs of the ledger, and samples of one training step, as JSON for the viewer."""

from __future__ import annotations

import json
from collections import Counter
from functools import cached_property
from typing import Any, Final

import numpy as np

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.ledger import LineOutcomes
from shardflow.format.table import Table
from shardflow.sampling import BatchSpec, EpochPlan

_MAX_BYTES: Final = 1 << 28
"""A ledger of a million inputs; larger ones are for tools."""


class Inputs:
    """Outcomes of all inputs, read once on first use."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def summary(self) -> list[dict[str, Any]]:
        """Return counts by kind, outcome and reason, the most frequent first."""
        if self._corpus is not None:
            return self._corpus_summary(self._corpus)
        counts = Counter((line["kind"], line["outcome"], line["reason"]) for line in self._lines)
        return [
            {"kind": kind, "outcome": outcome, "reason": reason, "num_inputs": number}
            for (kind, outcome, reason), number in sorted(
                counts.items(), key=lambda item: (-item[1], str(item[0]))
            )
        ]

    def find(self, outcome: str, reason: str, start: int, count: int) -> dict[str, Any]:
        """Return inputs with an outcome and a reason, empty strings for any, by the ledger's order."""
        if self._corpus is not None:
            return _lines_of_corpus(self._corpus, outcome, reason, start, count)
        rows = [
            line
            for line in self._lines
            if outcome in ("", line["outcome"]) and reason in ("", line["reason"])
        ]
        shown = [
            {name: line[name] for name in ("input", "kind", "outcome", "reason", "sample_key")}
            for line in rows[start : start + count]
        ]
        return {"total": len(rows), "inputs": shown}

    @cached_property
    def _corpus(self) -> LineOutcomes | None:
        """Outcomes of the lines of a text corpus, which has no ledger; None of any other dataset."""
        entry = self._dataset.manifest.line_outcomes
        if entry is None:
            return None
        return LineOutcomes(Table(self._dataset.store.map(entry.path), name=entry.path))

    @staticmethod
    def _corpus_summary(lines: LineOutcomes) -> list[dict[str, Any]]:
        classes = dict(zip(lines.names, lines.outcomes, strict=True))
        counts = sorted(lines.reasons().items(), key=lambda item: (-item[1], item[0]))
        return [
            {
                "kind": "line",
                "outcome": classes[name],
                "reason": None if classes[name] == "packed" else name,
                "num_inputs": number,
            }
            for name, number in counts
        ]

    @cached_property
    def _lines(self) -> list[dict[str, Any]]:
        ledger = self._dataset.manifest.ledger
        if ledger is None:
            return []
        entry = ledger.file
        if entry.num_bytes > _MAX_BYTES:
            raise ConfigError(
                f"the ledger must have at most {_MAX_BYTES} bytes to be shown, got {entry.num_bytes}; "
                "read ledger.jsonl with a tool for tables."
            )
        data = self._dataset.store.read(entry.path)
        return [line for line in map(json.loads, data.splitlines()) if "input" in line]


def _lines_of_corpus(
    lines: LineOutcomes, outcome: str, reason: str, start: int, count: int
) -> dict[str, Any]:
    """Return lines with an outcome and a reason; an input is its file's surrogate and its number, from 1."""
    wanted = [
        code
        for code, (name, kind) in enumerate(zip(lines.names, lines.outcomes, strict=True))
        if outcome in ("", kind) and reason in ("", name)
    ]
    counts = lines.reasons()
    total = sum(counts.get(lines.names[code], 0) for code in wanted)
    shown: list[dict[str, Any]] = []
    passed = 0
    for file in lines.files:
        if passed >= min(start + count, total):
            break
        codes = lines.of_file(file)
        found = np.flatnonzero(np.isin(codes, wanted))
        for place in found[max(start - passed, 0) : max(start + count - passed, 0)].tolist():
            name, kind = lines.names[codes[place]], lines.outcomes[codes[place]]
            shown.append(
                {
                    "input": f"{file}:{place + 1}",
                    "kind": "line",
                    "outcome": kind,
                    "reason": None if kind == "packed" else name,
                    "sample_key": None,
                }
            )
        passed += len(found)
    return {"total": total, "inputs": shown}


def step_samples(
    dataset: Dataset,
    *,
    split: str,
    seed: int,
    epoch: int,
    step: int,
    micro_batch_size: int,
    micro_batches_per_step: int,
) -> dict[str, Any]:
    """Return the samples of a step: the same for any number of GPUs.

    Raises:
        ConfigError: There is no such split.
        PlanError: The settings make no plan, or it has no such step.
    """
    rows = dataset.splits.get(split)
    if rows is None:
        raise ConfigError("split must be one of the dataset, got another one.")
    spec = BatchSpec(micro_batch_size=micro_batch_size, micro_batches_per_step=micro_batches_per_step)
    plan = EpochPlan(rows, spec, seed=seed, epoch=epoch)
    found, weights = plan.step(step)
    return {
        "num_steps": plan.num_steps,
        "micro_batches": [
            [
                {"row": int(row), "key": dataset.samples.sample_key(int(row)), "weight": int(weight)}
                if row >= 0
                else None
                for row, weight in zip(micro, row_weights, strict=True)
            ]
            for micro, row_weights in zip(found, weights, strict=True)
        ],
    }
