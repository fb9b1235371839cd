"""``shardflow bench``: how fast this machine reads a dataset, what limits it, and what would help."""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.bench_advice import advise
from pipelines.common import (
    add_json,
    add_subset,
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
from shardflow.storage import CacheConfig

if TYPE_CHECKING:
    from pipelines.bench_measure import BenchOptions, Measured

__all__ = ["add_arguments", "run"]

DESCRIPTION = """\
Handles the same samples (primary series and report) in several ways, in turns:

  cat      the bytes alone from the store, in order, nothing checked: the limit of the storage
  read     as the loader reads: by ranges, every field checked, in threads
  check    checksums of fields in memory, in threads
  decode   slices from memory, in threads, nothing else: the limit of the codec
  batches  the loader: read, check, decode, order, deliver; also with fewer threads
  tokens   the same with stored token ids in place of the texts, where `shardflow tokenize` has made some
  memory   only for an object store: the bytes from this machine's page cache
  disk     the bytes from this machine's disk, where the kernel forgets them on request

One round before the measured ones fills the page cache, so cat and read of a folder measure memory, and not
disks, where the samples fit there. Medians are shown with the lowest and highest round, and then what limits
and what would help.

With --with-model FILE, the configuration of a training job, three others take turns: data alone, the model
alone on batches that stay on the device, and both together, as training runs them. That gives the two
ceilings of the job in steps/s, and how far it is from each. Nothing of it is kept. Under torchrun the ranks
of the job measure together. docs/howto/bench.md explains how to read it all.
"""
EXAMPLES = """\
examples:
  shardflow bench my-dataset
  shardflow bench my-dataset --split train --threads 4 --repeats 3 --json
  shardflow bench my-dataset --need 400
  shardflow bench s3://bucket/chest-ct --mib 64 --scratch /local/nvme
  shardflow bench s3://bucket/chest-ct --mib 64 --cache-dir /local/nvme --cache-mib 500000
  shardflow bench --with-model my-training.toml
  shardflow bench --with-model my-training.toml --set loader.num_threads=4 --repeats 3 --json
  torchrun --standalone --nproc-per-node 8 -m pipelines.cli bench --with-model my-training.toml
"""
_LIMITS = ("cat", "decode")
_MIB = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow bench``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        nargs="?",
        help="folder of a packed dataset, or its address: s3:// gs:// az:// http(s):// file://; with "
        "--with-model that of the configuration",
    )
    parser.add_argument("--split", metavar="NAME", help="split to read (the largest)")
    add_subset(parser)
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive_number,
        help="threads (all processors)",
    )
    parser.add_argument("--repeats", metavar="R", type=positive_number, default=5, help="measured rounds (5)")
    parser.add_argument(
        "--mib",
        metavar="N",
        type=positive_number,
        help="stored bytes to handle in a round, in MiB (256)",
    )
    parser.add_argument(
        "--need",
        metavar="S",
        type=positive_number,
        default=0,
        help="samples/s that the GPUs of this node take, to say what is missing",
    )
    parser.add_argument(
        "--scratch",
        metavar="FOLDER",
        type=Path,
        help="on the disk that a cache would lie on, for a dataset in an object store (the temporary folder)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="FOLDER",
        type=Path,
        help="measure two epochs through a cache on this disk as well; a folder of its own in it, removed",
    )
    parser.add_argument(
        "--cache-mib", metavar="N", type=positive_number, help="size of the cache in --cache-dir, in MiB"
    )
    parser.add_argument(
        "--cache-ram-mib", metavar="N", type=positive_number, help="size of a cache in memory, in MiB"
    )
    parser.add_argument(
        "--with-model",
        metavar="FILE",
        type=Path,
        help="measure the training job of this configuration, as python -m pipelines.train takes it",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="with --with-model: replace one setting; repeatable",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=positive_number,
        help="with --with-model: steps of each in a round (as many as take two seconds)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if arguments.with_model is not None:
        from pipelines.bench_model import run_with_model

        return run_with_model(arguments)
    if arguments.dataset is None:
        raise ConfigError("DATASET must be given, got none; name a dataset, or a job: --with-model FILE.")
    if arguments.overrides or arguments.steps:
        raise ConfigError("--set and --steps must come with --with-model, got one without; leave it out.")
    # The loader and its codecs take a moment to import; no other command shall wait for them.
    from pipelines.bench_cache import describe_cache, measure_cache
    from pipelines.bench_measure import BenchOptions, measure

    dataset = open_dataset(arguments.dataset)
    cache = _cache(arguments)
    options = BenchOptions(
        split=arguments.split or _largest_split(dataset),
        subset=tuple(arguments.subset),
        num_threads=arguments.threads or os.cpu_count() or 1,
        num_repeats=arguments.repeats,
        max_bytes=(arguments.mib or _MIB) << 20,
        scratch=arguments.scratch,
    )
    busy = os.getloadavg()[0]
    with step_progress("measuring") as progress:
        measured = measure(dataset, options, progress)
    facts = _describe(dataset, options, measured, busy, arguments.need)
    if cache is not None:
        with step_progress("epochs through the cache") as progress:
            epochs = measure_cache(dataset, options, measured, cache, progress)
        facts["cache"] = describe_cache(epochs, measured.content.num_samples, cache)
    facts["advice"] = advise(facts)
    if arguments.json:
        write_json(facts)
    else:
        _show(facts)
    return 0


def _cache(arguments: argparse.Namespace) -> CacheConfig | None:
    """The cache that is asked for; None for none."""
    directory, mib, ram_mib = arguments.cache_dir, arguments.cache_mib, arguments.cache_ram_mib
    if (directory is None) != (mib is None):
        raise ConfigError("--cache-dir and --cache-mib must come together, got one of them; add the other.")
    if directory is None and ram_mib is None:
        return None
    if directory is not None and not directory.is_dir():
        raise ConfigError("--cache-dir must be an existing folder, got none; make it on the disk to measure.")
    return CacheConfig(directory=directory, max_bytes=(mib or 0) << 20, ram_bytes=(ram_mib or 0) << 20)


def _largest_split(dataset: Dataset) -> str:
    splits = dataset.splits
    if not splits:
        raise ConfigError("DATASET must hold samples, got none.")
    return max(sorted(splits), key=lambda split: len(splits[split]))


def _describe(
    dataset: Dataset, options: BenchOptions, measured: Measured, busy: float, need: int
) -> dict[str, Any]:
    """Turn seconds into rates; sizes in bytes, MB are 1,000,000 of them."""
    content, seconds = measured.content, measured.seconds
    results: dict[str, dict[str, Any]] = {}
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
    limit = max(
        (name for name in _LIMITS if name in seconds), key=lambda name: results[name]["median_seconds"]
    )
    return {
        "dataset_id": dataset.dataset_id,
        "split": options.split,
        "subset": list(options.subset),
        "tier": _tier(dataset),
        "threads": options.num_threads,
        "processors": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load_before": round(busy, 2),
        "repeats": options.num_repeats,
        "need_samples_per_s": need,
        "cache": None,
        "samples": content.num_samples,
        "slices": content.num_slices,
        "codecs": list(content.codecs),
        "micro_batch_size": content.micro_batch_size,
        "tokens": _tokens(measured),
        "stored_bytes": content.stored_bytes,
        "decoded_bytes": content.decoded_bytes,
        "dataset_bytes": sum(shard.num_bytes for shard in dataset.manifest.shards),
        "results": results,
        "scaling": [
            {"threads": number, "samples_per_s": _rate(content.num_samples, statistics.median(rounds))}
            for number, rounds in measured.scaling.items()
        ],
        "stages": {name: round(value, 6) for name, value in measured.stages.items()},
        "limit": limit,
        "share_of_limit": round(results[limit]["median_seconds"] / results["batches"]["median_seconds"], 4),
    }


def _tokens(measured: Measured) -> dict[str, Any] | None:
    content = measured.content
    if not content.tokenizer:
        return None
    return {
        "tokenizer": content.tokenizer,
        "num_tokens": content.num_tokens,
        "tokens_per_s": _rate(content.num_tokens, statistics.median(measured.seconds["tokens"])),
    }


def _tier(dataset: Dataset) -> str:
    scheme, separator, _ = dataset.store.url.partition("://")
    return scheme if separator else "local"


def _rate(amount: float, seconds: float) -> float:
    return round(amount / max(seconds, 1e-9), 2)


def _show(facts: dict[str, Any]) -> None:
    part = ", of a subset" if facts["subset"] else ""
    stored, decoded = human_bytes(facts["stored_bytes"]), human_bytes(facts["decoded_bytes"])
    show_facts(
        [
            ("samples", f"{facts['samples']:,} of {facts['split']}{part}, {facts['slices']:,} slices"),
            ("bytes", f"{stored} stored, {decoded} decoded, {human_bytes(facts['dataset_bytes'])} in all"),
            ("store", facts["tier"]),
            ("run", f"{facts['threads']} threads, {facts['repeats']} rounds"),
        ]
    )
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
            for name, one in facts["results"].items()
        ],
    )
    if len(facts["scaling"]) > 1:
        first = facts["scaling"][0]
        show_table(
            "batches by threads",
            ("threads", "samples/s", "times one"),
            [
                (
                    one["threads"],
                    f"{one['samples_per_s']:,.1f}",
                    f"{one['samples_per_s'] / first['samples_per_s']:.2f}",
                )
                for one in facts["scaling"]
            ],
        )
    used = {name: seconds for name, seconds in facts["stages"].items() if seconds}
    shares = ", ".join(f"{name} {seconds / sum(used.values()):.0%}" for name, seconds in used.items())
    if cache := facts["cache"]:
        show_table(
            "epochs through the cache",
            ("", "samples/s", "from memory", "from disk", "fetched"),
            [
                (
                    name,
                    f"{epoch['samples_per_s']:,.1f}",
                    *(f"{epoch['tiers'][tier]:.0%}" for tier in ("ram", "disk", "origin")),
                )
                for name, epoch in zip(("first", "second"), cache["epochs"], strict=True)
            ],
        )
    if tokens := facts["tokens"]:
        amount = f"{tokens['num_tokens']:,} of tokenizer {tokens['tokenizer'][:12]}"
        show_lines(["", f"Stored tokens come at {tokens['tokens_per_s']:,.0f}/s ({amount})."])
    limit = {"cat": "reading the bytes", "decode": "decoding"}[facts["limit"]]
    show_lines(
        [
            "",
            f"Batches come at {facts['share_of_limit']:.0%} of the slower limit, {limit} alone.",
            *([f"The loader's threads were at work in: {shares}."] if used else []),
            "",
            *(f"- {line}" for line in facts["advice"]),
        ]
    )
