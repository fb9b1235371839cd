"""The command ``shardflow bench``: how fast this machine reads a dataset, and what limits it."""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.cli.common import (
    add_json,
    add_unit,
    add_where,
    named_fields,
    open_dataset,
    positive_number,
    show_facts,
    show_lines,
    show_table,
    step_progress,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.logs import human_bytes

if TYPE_CHECKING:
    from shardflow.training.config import TrainConfig
    from shardflow.training.jobs.headroom import Headroom, HeadroomRound

DESCRIPTION: Final = """\
Handles the same samples in several ways, in turns:

  cat      the bytes alone from the store, in order, nothing checked: the limit of the storage
  disk     the same from this machine's disk, where the kernel forgets the bytes on request
  decode   slices from memory, in threads, nothing else: the limit of the codec
  batches  the loader: read, check, decode, order, deliver; also with fewer threads

The loader delivers the default fields (all images, the first volume, the report), or with --fields FILE those
of a file; cat and decode handle what they read.

One round before the measured ones fills the page cache, so cat of a folder measures memory where the samples
fit there. Medians are shown with the lowest and highest round, and then what limits and what would help.

With --with-model FILE, the configuration of a training job, three others take turns: data alone, the model
alone on batches that stay on the device, and both together, as training runs them. That gives the two
ceilings of the job in steps/s, and how far it is from each. Nothing of it is kept. Under torchrun the ranks
of the job measure together. docs/howto/bench.md explains how to read it all.
"""
EXAMPLES: Final = """\
examples:
  shardflow bench my-dataset
  shardflow bench my-dataset --split train --threads 4 --repeats 3 --json
  shardflow bench my-dataset --need 400
  shardflow bench my-dataset --fields my-fields.toml
  shardflow bench s3://bucket/chest-ct --mib 64
  shardflow bench --with-model my-training.toml
  shardflow bench --with-model my-training.toml --set loader.num_threads=4 --repeats 3 --json
  torchrun --standalone --nproc-per-node 8 -m shardflow.cli.main bench --with-model my-training.toml
"""
_MIB: Final = 256
_FASTEST_CODEC: Final = "b2nd"
# Below this share of the slower limit something else than the two limits is in the way.
_NEAR_LIMIT: Final = 0.7
# Two threads that bring less than this share of twice as much are bound by something they share.
_GOOD_SCALING: Final = 0.65
_WIDE_SPREAD: Final = 0.25
# Ceilings closer to each other than this are equal: after the next gain on one side the other one limits.
_EQUAL: Final = 1.15
# Below this share of the lower ceiling the two are in each other's way.
_GOOD_OVERLAP: Final = 0.85
_MUCH_WAITING: Final = 0.1
_LEAST_GAIN: Final = 0.01
_WHOLE_FROM: Final = 100
_CONTESTANTS: Final = {"loader": "data alone", "compute": "model alone", "together": "together"}
_REMEDIES: Final = {
    "read": "more of them, or a cache on the node's disk, where the store is behind a network",
    "cache_origin": "a store that is nearer, or more cache.read_ahead_bytes",
    "decode": "more of them up to the processors, or small versions of the slices ([variants] of pack)",
    "transform": "more of them up to the processors, or less work in data.transform",
    "user_transform": "less work in data.transform, or more of them up to the processors",
}
_OTHER_REMEDY: Final = "more of them, up to the processors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow bench``."""
    add = parser.add_argument
    add(
        "dataset",
        metavar="DATASET",
        nargs="?",
        help="folder of a packed dataset, or its address: s3:// gs:// az:// http(s):// file://; with "
        "--with-model that of the configuration",
    )
    add("--split", metavar="NAME", help="split to read (the largest)")
    add_where(parser)
    add("--fields", metavar="FILE", help="batches of the fields of this TOML file (those of a loader)")
    add_unit(parser)
    add("--threads", metavar="N", type=positive_number, help="threads (all processors)")
    add("--repeats", metavar="R", type=positive_number, default=5, help="measured rounds (5)")
    add("--mib", metavar="N", type=positive_number, help="stored bytes to handle in a round, in MiB (256)")
    add(
        "--need",
        metavar="S",
        type=positive_number,
        default=0,
        help="samples/s that the GPUs of this node take, to say what is missing",
    )
    add("--with-model", metavar="FILE", type=Path, help="measure the training job of this configuration")
    add(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="with --with-model: replace one setting; repeatable",
    )
    add(
        "--steps",
        metavar="N",
        type=positive_number,
        help="with --with-model: steps of each in a round (as many as take two seconds)",
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    measured = _measure_job if arguments.with_model is not None else _measure_dataset
    facts = measured(arguments)
    if facts is None:  # of a rank other than 0
        return 0
    if arguments.json:
        write_json(facts)
    elif arguments.with_model is not None:
        _show_job(facts)
    else:
        _show_dataset(facts)
    return 0


def _measure_dataset(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.dataset is None:
        raise ConfigError("DATASET must be given, got none; name a dataset, or a job: --with-model FILE.")
    if arguments.overrides or arguments.steps:
        raise ConfigError("--set and --steps need --with-model FILE; add it, or leave them out.")
    # The loader and its codecs take a moment to import; --help does not wait for them.
    from shardflow.cli.bench_measure import BenchOptions, describe_dataset, measure

    dataset = open_dataset(arguments.dataset)
    splits = dataset.splits
    if not splits:
        raise ConfigError("DATASET must hold samples, got none.")
    options = BenchOptions(
        split=arguments.split or max(sorted(splits), key=lambda split: len(splits[split])),
        where=arguments.where,
        keys=arguments.keys,
        num_threads=arguments.threads or os.cpu_count() or 1,
        num_repeats=arguments.repeats,
        max_bytes=(arguments.mib or _MIB) << 20,
        fields=named_fields(arguments.fields or "default"),
        unit=arguments.unit or "study",
    )
    busy = os.getloadavg()[0]
    with step_progress("measuring") as progress:
        measured = measure(dataset, options, progress)
    facts = describe_dataset(dataset, options, measured, busy, arguments.need)
    return {**facts, "advice": advise(facts)}


def _measure_job(arguments: argparse.Namespace) -> dict[str, Any] | None:
    for name in ("split", "where", "keys", "fields", "unit", "threads", "mib", "need"):
        if getattr(arguments, name):
            raise ConfigError(
                f"--{name} cannot be combined with --with-model, whose configuration defines what is read; "
                "change that with --set."
            )
    from shardflow.config import load_config
    from shardflow.training.config import TrainConfig

    config = load_config(TrainConfig, arguments.with_model, arguments.overrides)
    named, configured = arguments.dataset, config.data.dataset
    is_other = named not in {None, configured} and (
        "://" in named or "://" in configured or os.path.realpath(named) != os.path.realpath(configured)
    )
    if is_other:
        raise ConfigError(
            "DATASET must be the configuration's data.dataset, got another one; leave it out, or add --set "
            "data.dataset=DATASET."
        )
    # Torch takes seconds to import; a wrong setting is reported before that.
    from shardflow.training.jobs.headroom import HeadroomOptions, measure_headroom

    options = HeadroomOptions(num_rounds=arguments.repeats, num_steps=arguments.steps)
    busy = os.getloadavg()[0]
    is_first = os.environ.get("RANK", "0") == "0"
    with step_progress("measuring") if is_first else nullcontext() as progress:
        headroom = measure_headroom(config, options, progress)
    if headroom is None:
        return None
    facts = describe_job(headroom, config, busy)
    return {**facts, "advice": advise_job(facts)}


def describe_job(headroom: Headroom, config: TrainConfig, busy: float) -> dict[str, Any]:
    """Convert the rounds of a job's ceilings into rates and shares."""
    results = {name: _steps(rounds) for name, rounds in headroom.rounds.items()}
    rates: dict[str, float] = {name: one["steps_per_s"] for name, one in results.items()}
    lower = "loader" if rates["loader"] < rates["compute"] else "compute"
    together = headroom.rounds["together"]
    waited = sum(one.data_wait_s for one in together) / sum(one.seconds for one in together)
    return {
        "device": headroom.device,
        "ranks": headroom.world_size,
        "precision": config.run.precision,
        "micro_batches_per_step": config.batch.micro_batches_per_step,
        "execution": config.loader.execution,
        "threads": config.loader.num_threads,
        "has_cache": config.cache.is_on,
        "processors": os.cpu_count(),
        "load_before": round(busy, 2),
        "repeats": len(together),
        "replayed_micro_batches": headroom.num_replayed,
        "replayed_bytes": headroom.replayed_bytes,
        "stages": {name: round(seconds, 6) for name, seconds in headroom.stages.items() if seconds},
        "tiers": _tier_shares(headroom.tier_bytes) if config.cache.is_on else {},
        "results": results,
        "lower_ceiling": lower,
        "share_of_lower": round(rates["together"] / rates[lower], 4),
        "share_of_loader": round(rates["together"] / rates["loader"], 4),
        "share_of_compute": round(rates["together"] / rates["compute"], 4),
        "data_wait_share": round(min(1.0, waited), 4),
        "headspace": {
            "with_free_data": round(max(1.0, rates["compute"] / rates["together"]), 4),
            "with_free_compute": round(max(1.0, rates["loader"] / rates["together"]), 4),
        },
    }


def _steps(rounds: Sequence[HeadroomRound]) -> dict[str, Any]:
    step_s = [one.seconds / one.num_steps for one in rounds]
    median = statistics.median(step_s)
    samples = sum(one.num_samples for one in rounds) / sum(one.num_steps for one in rounds)
    return {
        "steps": [one.num_steps for one in rounds],
        "step_seconds": [round(value, 7) for value in step_s],
        "median_step_seconds": round(median, 7),
        "spread": round((max(step_s) - min(step_s)) / median, 4),
        "steps_per_s": 1 / median,
        "steps_per_s_range": [1 / max(step_s), 1 / min(step_s)],
        "samples_per_step": round(samples, 3),
        "samples_per_s": round(samples / median, 3),
    }


def _tier_shares(num_bytes: Mapping[str, float]) -> dict[str, float]:
    """Return the sources of a loader's bytes: its caches, or the origin, prefetched or not.

    A prefetched block is found in a cache when it is read; it counts as fetched.
    """
    found = num_bytes["ram"] + num_bytes["disk"]
    total = max(num_bytes["read"], num_bytes["origin"])
    if not total:
        return {}
    origin = num_bytes["origin"] / total
    kept = {tier: (1 - origin) * (num_bytes[tier] / found if found else 0.0) for tier in ("ram", "disk")}
    return {**{tier: round(share, 4) for tier, share in kept.items()}, "origin": round(origin, 4)}


def _show_dataset(facts: dict[str, Any]) -> None:
    part = ", a part of it" if facts["where"] or facts["keys"] else ""
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
        ("", "samples/s", "lowest", "highest", "MB/s stored"),
        [
            (
                name,
                *(f"{rate:,.1f}" for rate in (one["samples_per_s"], *one["samples_per_s_range"])),
                f"{one['stored_mb_per_s']:,.0f}",
            )
            for name, one in facts["results"].items()
        ],
    )
    if len(facts["scaling"]) > 1:
        single = facts["scaling"][0]["samples_per_s"]
        show_table(
            "batches by threads",
            ("threads", "samples/s", "times one"),
            [
                (one["threads"], f"{one['samples_per_s']:,.1f}", f"{one['samples_per_s'] / single:.2f}")
                for one in facts["scaling"]
            ],
        )
    used = {name: seconds for name, seconds in facts["stages"].items() if seconds}
    shares = ", ".join(f"{name} {seconds / sum(used.values()):.0%}" for name, seconds in used.items())
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


def _show_job(facts: dict[str, Any]) -> None:
    ranks = f"{facts['ranks']} {'rank' if facts['ranks'] == 1 else 'ranks'}"
    held = human_bytes(facts["replayed_bytes"])
    show_facts(
        [
            ("run", f"{ranks} on {facts['device']}, {facts['precision']}, {facts['repeats']} rounds"),
            ("data", f"{facts['threads']} threads, execution {facts['execution']}"),
            ("replayed", f"{facts['replayed_micro_batches']} micro-batches, {held}"),
        ]
    )
    show_table(
        "medians of the rounds",
        ("", "steps/s", "lowest", "highest", "samples/s", "ms a step", "together reaches"),
        [
            (
                _CONTESTANTS[name],
                *(_short(rate) for rate in (one["steps_per_s"], *one["steps_per_s_range"])),
                _short(one["samples_per_s"]),
                f"{one['median_step_seconds'] * 1e3:,.1f}",
                "" if name == "together" else f"{facts[f'share_of_{name}']:.0%}",
            )
            for name, one in facts["results"].items()
        ],
    )
    if tiers := {name: share for name, share in facts["tiers"].items() if share}:
        found = ", ".join(f"{share:.0%} {name}" for name, share in tiers.items())
        show_lines(["", f"Data alone read its bytes from: {found}."])
    show_lines(["", *(f"- {line}" for line in facts["advice"])])


# ---- advice: from facts to sentences, each of which names the numbers that it rests on ---------------


def advise(facts: Mapping[str, Any]) -> list[str]:
    """Name what limits the reading of a dataset, and what to buy or change."""
    if not facts["slices"]:
        middle = [_about_texts(facts), *_about_disk(facts)]
    else:
        limit = _about_decoding(facts) if facts["limit"] == "decode" else _about_storage(facts)
        middle = [*limit, *_about_loader(facts), *_about_disk(facts), *_about_threads(facts)]
    return [*_about_trust(facts), *middle, *_about_need(facts)]


def _samples_per_s(facts: Mapping[str, Any], name: str) -> float:
    return float(facts["results"][name]["samples_per_s"])


def _about_trust(facts: Mapping[str, Any]) -> Iterator[str]:
    if max(one["spread"] for one in facts["results"].values()) > _WIDE_SPREAD:
        yield "The rounds differ widely: something else used this machine; measure again when it is idle."
    elif facts["load_before"] > (facts["processors"] or 1) / 2:
        yield "The machine was busy before the first round; measure again when it is idle."


def _about_decoding(facts: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Decode-bound: {facts['threads']} threads decode {_samples_per_s(facts, 'decode'):,.0f} samples/s; "
        f"the {facts['tier']} store gives bytes for {_samples_per_s(facts, 'cat'):,.0f}. Faster storage "
        "changes nothing. More or faster processors do; so do small versions of the slices (pack with "
        "[variants]) where the model sees less than full size, and fewer slices of a series "
        "(num_slices of a field)."
    )
    slow = sorted(set(facts["codecs"]) - {_FASTEST_CODEC, "image"})
    if slow:
        yield (
            f"Slices are stored as {', '.join(slow)}; {_FASTEST_CODEC} decodes several times as fast: pack "
            "again with it if this data is trained on often."
        )


def _about_texts(facts: Mapping[str, Any]) -> str:
    return (
        f"Texts alone: the loader delivers {_samples_per_s(facts, 'batches'):,.0f} samples/s in "
        f"micro-batches of {facts['micro_batch_size']}; the {facts['tier']} store gives bytes for "
        f"{_samples_per_s(facts, 'cat'):,.0f}. Nothing is decoded, so what limits is the number of texts and "
        "not their bytes: larger micro-batches, and stored tokens (shardflow tokenize DATASET --tokenizer "
        "FILE) in place of tokenizing in each epoch."
    )


def _about_storage(facts: Mapping[str, Any]) -> Iterator[str]:
    text = f"the {facts['tier']} store gives {facts['results']['cat']['stored_mb_per_s']:,.0f} MB/s"
    if "decode" in facts["results"]:
        text = (
            f"Storage-bound: {text}, bytes for {_samples_per_s(facts, 'cat'):,.0f} samples/s; "
            f"{facts['threads']} threads decode {_samples_per_s(facts, 'decode'):,.0f}"
        )
    else:
        text = f"Nothing is decoded here: {text}"
    if facts["tier"] == "local":
        yield f"{text}. More memory for the page cache or a faster disk helps, more processors do not."
    else:
        yield (
            f"{text}. A cache of {human_bytes(facts['dataset_bytes'])} on a local disk holds the whole "
            "dataset from the second epoch on. The first epoch needs a wider link, or a store that is nearer."
        )


def _about_loader(facts: Mapping[str, Any]) -> Iterator[str]:
    share, stages = facts["share_of_limit"], facts["stages"]
    if share < _NEAR_LIMIT:
        slowest = max(stages, key=lambda name: float(stages[name]))
        yield (
            f"Batches come at {share:.0%} of the slower limit, so the limits do not explain all of it. The "
            f"loader's threads spent most of their time in the stage {slowest}. Try --threads above and "
            "below the number of processors; small samples need larger micro-batches."
        )


def _about_disk(facts: Mapping[str, Any]) -> Iterator[str]:
    if "disk" not in facts["results"]:
        return
    disk, batches = _samples_per_s(facts, "disk"), _samples_per_s(facts, "batches")
    size, memory = human_bytes(facts["dataset_bytes"]), human_bytes(facts["memory_bytes"])
    if disk >= batches:
        return
    if facts["dataset_bytes"] < facts["memory_bytes"] // 2:
        yield (
            f"The first epoch is bound by the disk ({disk:,.0f} samples/s); later ones come from the page "
            f"cache, which the dataset ({size}) fits into ({memory} of memory)."
        )
    else:
        yield (
            f"The dataset ({size}) does not fit into memory ({memory}), and the disk gives bytes for "
            f"{disk:,.0f} samples/s where batches could come at {batches:,.0f}: an NVMe disk, or more memory."
        )


def _about_threads(facts: Mapping[str, Any]) -> Iterator[str]:
    for before, after in pairwise(facts["scaling"]):
        times = after["samples_per_s"] / before["samples_per_s"]
        if times < _GOOD_SCALING * after["threads"] / before["threads"]:
            yield (
                f"{after['threads']} threads bring {times:.2f} times what {before['threads']} bring: more of "
                "them help little here (shared memory bandwidth, two threads of one core, or a quota of "
                "processors)."
            )
            return


def _about_need(facts: Mapping[str, Any]) -> Iterator[str]:
    need, got = facts["need_samples_per_s"], _samples_per_s(facts, "batches")
    if not need:
        return
    text = f"{need:,.0f} samples/s are needed, and {got:,.0f} come"
    if got >= need:
        yield f"{text}: the GPUs need not wait for data."
    elif facts["limit"] == "decode":
        threads = math.ceil(facts["threads"] * need / got)
        yield (
            f"{text}: at this rate a thread it takes about {threads} processors a node, or "
            f"{need / got:.1f} times less to decode."
        )
    else:
        rate = facts["results"]["cat"]["stored_mb_per_s"] * need / _samples_per_s(facts, "cat")
        yield f"{text}: it takes storage of about {rate:,.0f} MB/s."


def advise_job(facts: Mapping[str, Any]) -> list[str]:
    """Name what limits a job, and how much faster it could be at most."""
    limit = _about_data(facts) if facts["lower_ceiling"] == "loader" else [_about_compute(facts)]
    rates = [facts["results"][name]["steps_per_s"] for name in ("loader", "compute")]
    equal = []
    if max(rates) < _EQUAL * min(rates):
        equal = ["The two ceilings are nearly equal: after any gain on one side, the other side limits."]
    return [*_about_trust(facts), *limit, *equal, *_about_overlap(facts)]


def _steps_per_s(facts: Mapping[str, Any], name: str) -> str:
    one = facts["results"][name]
    return f"{_short(one['steps_per_s'])} steps/s ({_short(one['samples_per_s'])} samples/s)"


def _short(number: float) -> str:
    """Render a rate or a factor with at least three digits: ``0.0123``, ``1,234``."""
    return f"{number:,.3g}" if number < _WHOLE_FROM else f"{number:,.0f}"


def _reached(facts: Mapping[str, Any]) -> str:
    share = min(1.0, facts["share_of_lower"])  # above it is noise
    return (
        f"Together they make {_steps_per_s(facts, 'together')}, {share:.0%} of the lower ceiling, and wait "
        f"for data {facts['data_wait_share']:.0%} of the time."
    )


def _about_data(facts: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Data limits this job: without the model, data comes at {_steps_per_s(facts, 'loader')}; with data "
        f"at hand, the model makes {_steps_per_s(facts, 'compute')}. {_reached(facts)} If data cost nothing, "
        f"the job would be {_short(facts['headspace']['with_free_data'])} times as fast; no change to the "
        "loader brings more."
    )
    stages = facts["stages"]
    if total := sum(stages.values()):
        slowest = max(stages, key=lambda name: float(stages[name]))
        yield (
            f"Without the model the loader's {facts['threads']} threads were at work in {slowest} for "
            f"{stages[slowest] / total:.0%} of their time: {_REMEDIES.get(slowest, _OTHER_REMEDY)}."
        )
    need = max(1, round(facts["results"]["compute"]["samples_per_s"]))
    yield f"What storage and processors give at most, and what to buy: shardflow bench DATASET --need {need}"


def _about_compute(facts: Mapping[str, Any]) -> str:
    gain = facts["headspace"]["with_free_data"] - 1
    spare = facts["results"]["loader"]["steps_per_s"] / facts["results"]["compute"]["steps_per_s"]
    most = f"at most {gain:.0%}" if gain >= _LEAST_GAIN else f"less than {_LEAST_GAIN:.0%}"
    return (
        f"The model limits this job: with data at hand, it makes {_steps_per_s(facts, 'compute')}; without "
        f"the model, data comes at {_steps_per_s(facts, 'loader')}, {_short(spare)} times as much. "
        f"{_reached(facts)} If data cost nothing, the job would be {most} faster. What makes it faster is in "
        "the model: precision, compile, larger micro-batches, more devices."
    )


def _about_overlap(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["share_of_lower"] >= _GOOD_OVERLAP:
        return
    if facts["device"] == "cpu":
        remedy = (
            f", for they share {facts['processors']} processors. Fewer loader.num_threads may be faster "
            "here; with the model on a GPU they share less."
        )
    elif facts["execution"] == "threads":
        remedy = (
            ", for the loader's threads and the loop share one interpreter. Try --set "
            "loader.execution=process."
        )
    else:
        remedy = (
            ". Try fewer loader.num_threads, so that the loop and the driver have processors to themselves."
        )
    yield (
        f"The job reaches {facts['share_of_lower']:.0%} of the lower ceiling: loading and computing are in "
        f"each other's way{remedy}"
    )
    if facts["data_wait_share"] > _MUCH_WAITING and facts["lower_ceiling"] == "compute":
        yield (
            f"The loop waits for data {facts['data_wait_share']:.0%} of the time, though data alone comes "
            "fast enough: it comes unevenly. Raise loader.prefetch_bytes."
        )
