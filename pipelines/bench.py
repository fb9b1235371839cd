"""``shardflow bench``: how fast this machine reads a dataset, beside what limits it."""

from __future__ import annotations

import argparse
import os
import statistics
from typing import TYPE_CHECKING, Any

from pipelines.surface import (
    add_dataset,
    add_json,
    human_bytes,
    open_dataset,
    positive_number,
    show_facts,
    show_lines,
    show_table,
    step_progress,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.shards import Dataset

if TYPE_CHECKING:
    from pipelines.bench_measure import BenchOptions, Content

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "measure reading, decoding and whole batches beside their limits"
DESCRIPTION = """\
Handles the same samples (primary series and report) in four ways, in turns:

  cat      the bytes alone, one thread, in order, nothing checked: the limit of the storage
  read     as the loader reads: by ranges, every field checked, in threads
  decode   slices from memory, in threads, nothing else: the limit of the codec
  batches  the loader: read, check, decode, order, deliver

One round before the measured ones fills the page cache, so cat and read measure memory, and not disks, where
the samples fit there. Medians are shown with the lowest and highest round.
"""
_WIDE_SPREAD = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow bench``."""
    parser.description = DESCRIPTION
    add_dataset(parser)
    parser.add_argument("--split", metavar="NAME", help="split to read (the largest)")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive_number,
        default=os.cpu_count() or 1,
        help="threads (all processors)",
    )
    parser.add_argument("--repeats", metavar="R", type=positive_number, default=5, help="measured rounds (5)")
    parser.add_argument(
        "--mib",
        metavar="N",
        type=positive_number,
        default=256,
        help="stored bytes to handle in a round, in MiB (256)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    # The loader and its codecs take a moment to import; no other command shall wait for them.
    from pipelines.bench_measure import BenchOptions, measure

    dataset = open_dataset(arguments.dataset)
    options = BenchOptions(
        split=arguments.split or _largest_split(dataset),
        num_threads=arguments.threads,
        num_repeats=arguments.repeats,
        max_bytes=arguments.mib << 20,
    )
    busy = os.getloadavg()[0]
    with step_progress("measuring") as progress:
        content, seconds = measure(dataset, options, progress)
    facts = _describe(dataset, options, content, seconds, busy)
    if arguments.json:
        write_json(facts)
    else:
        _show(facts)
    return 0


def _largest_split(dataset: Dataset) -> str:
    splits = dataset.splits
    if not splits:
        raise ConfigError("DATASET must hold samples, got none.")
    return max(sorted(splits), key=lambda split: len(splits[split]))


def _describe(
    dataset: Dataset, options: BenchOptions, content: Content, seconds: dict[str, list[float]], busy: float
) -> dict[str, Any]:
    """Turn seconds into rates; sizes in bytes, MB are 1,000,000 of them."""
    results = {}
    for name, rounds in seconds.items():
        median = statistics.median(rounds)
        results[name] = {
            "seconds": [round(value, 6) for value in rounds],
            "median_seconds": round(median, 6),
            "spread": round((max(rounds) - min(rounds)) / median, 4),
            "samples_per_s": _rate(content.num_samples, median),
            "samples_per_s_range": [_rate(content.num_samples, each) for each in (max(rounds), min(rounds))],
            "stored_mb_per_s": _rate(content.stored_bytes / 1e6, median),
            "decoded_mb_per_s": (
                _rate(content.decoded_bytes / 1e6, median) if name in {"decode", "batches"} else None
            ),
        }
    limit = max(("cat", "decode"), key=lambda name: statistics.median(seconds[name]))
    share = statistics.median(seconds[limit]) / statistics.median(seconds["batches"])
    return {
        "dataset_id": dataset.dataset_id,
        "split": options.split,
        "threads": options.num_threads,
        "processors": os.cpu_count(),
        "load_before": round(busy, 2),
        "repeats": options.num_repeats,
        "samples": content.num_samples,
        "slices": content.num_slices,
        "stored_bytes": content.stored_bytes,
        "decoded_bytes": content.decoded_bytes,
        "results": results,
        "limit": limit,
        "share_of_limit": round(share, 4),
    }


def _rate(amount: float, seconds: float) -> float:
    return round(amount / max(seconds, 1e-9), 2)


def _show(facts: dict[str, Any]) -> None:
    stored, decoded = human_bytes(facts["stored_bytes"]), human_bytes(facts["decoded_bytes"])
    show_facts(
        [
            ("samples", f"{facts['samples']:,} of {facts['split']}, {facts['slices']:,} slices"),
            ("bytes", f"{stored} stored, {decoded} decoded"),
            ("run", f"{facts['threads']} threads, {facts['repeats']} rounds"),
        ]
    )
    results = facts["results"]
    show_table(
        "medians of the rounds",
        ("", "samples/s", "lowest", "highest", "MB/s stored", "MB/s decoded"),
        [
            (
                name,
                f"{one['samples_per_s']:,.1f}",
                *(f"{value:,.1f}" for value in one["samples_per_s_range"]),
                f"{one['stored_mb_per_s']:,.0f}",
                "" if one["decoded_mb_per_s"] is None else f"{one['decoded_mb_per_s']:,.0f}",
            )
            for name, one in results.items()
        ],
    )
    limit = {"cat": "reading the bytes", "decode": "decoding"}[facts["limit"]]
    lines = ["", f"Batches come at {facts['share_of_limit']:.0%} of the slower limit, {limit} alone."]
    if max(one["spread"] for one in results.values()) > _WIDE_SPREAD:
        lines.append(
            "The rounds differ widely: something else used this machine; measure again when it is idle."
        )
    elif facts["load_before"] > (facts["processors"] or 1) / 2:
        lines.append("The machine was busy before the first round; measure again when it is idle.")
    show_lines(lines)
