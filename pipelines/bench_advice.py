"""From measured rates to plain sentences: what limits a dataset on a machine, and what would help.

Every rule names the numbers that it rests on. Pure: facts in, sentences out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipelines.common import human_bytes

__all__ = ["advise"]

_FASTEST_CODEC = "b2nd"
# Below this share of the slower limit something else than the two limits is in the way.
_NEAR_LIMIT = 0.7
# Two threads that bring less than this share of twice as much are bound by something they share.
_GOOD_SCALING = 0.65
_WIDE_SPREAD = 0.25
_MUCH_FETCHED = 0.5
_WORTH = 1.2


def advise(facts: Mapping[str, Any]) -> list[str]:
    """Say what limits, and what to buy or change.

    Args:
        facts: What ``shardflow bench --json`` prints, without its ``advice``.
    """
    if not facts["slices"]:
        return [
            *_about_trust(facts),
            *_about_texts(facts),
            *_about_disk(facts),
            *_about_cache(facts["cache"]),
            *_about_need(facts),
        ]
    return [
        *_about_trust(facts),
        *(_about_decoding(facts) if facts["limit"] == "decode" else _about_storage(facts)),
        *_about_loader(facts),
        *_about_disk(facts),
        *_about_cache(facts["cache"]),
        *_about_threads(facts["scaling"]),
        *_about_need(facts),
    ]


def _rate(facts: Mapping[str, Any], name: str) -> float:
    return float(facts["results"][name]["samples_per_s"])


def _about_trust(facts: Mapping[str, Any]) -> Iterator[str]:
    if max(one["spread"] for one in facts["results"].values()) > _WIDE_SPREAD:
        yield "The rounds differ widely: something else used this machine; measure again when it is idle."
    elif facts["load_before"] > (facts["processors"] or 1) / 2:
        yield "The machine was busy before the first round; measure again when it is idle."


def _about_decoding(facts: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"Decode-bound: {facts['threads']} threads decode {_rate(facts, 'decode'):,.0f} samples/s; the "
        f"{facts['tier']} store gives bytes for {_rate(facts, 'cat'):,.0f}. Faster storage changes nothing. "
        "More or faster processors do; so do small versions of the slices (pack with [variants]) where the "
        "model sees less than full size, and fewer slices of a study (ImageView.num_slices)."
    )
    slow = sorted(set(facts["codecs"]) - {_FASTEST_CODEC, "image"})
    if slow:
        yield (
            f"Slices are stored as {', '.join(slow)}; {_FASTEST_CODEC} decodes several times as fast: pack "
            "again with it if this data is trained on often."
        )


def _about_texts(facts: Mapping[str, Any]) -> Iterator[str]:
    rate = _rate(facts, "batches")
    yield (
        f"Texts alone: the loader delivers {rate:,.0f} samples/s in micro-batches of "
        f"{facts['micro_batch_size']}; the {facts['tier']} store gives bytes for {_rate(facts, 'cat'):,.0f}. "
        "Nothing is decoded, so what limits is the number of texts and not their bytes: larger micro-batches."
    )
    tokens = facts["tokens"]
    if tokens is None:
        yield (
            "No tokens are stored, so whoever trains on these texts tokenizes them each epoch; once is "
            "enough: shardflow tokenize DATASET --tokenizer FILE"
        )
        return
    yield (
        f"Stored tokens come at {tokens['tokens_per_s']:,.0f} tokens/s, {_rate(facts, 'tokens'):,.0f} "
        "samples/s; with them nothing is tokenized while one trains."
    )


def _about_storage(facts: Mapping[str, Any]) -> Iterator[str]:
    tier, results = facts["tier"], facts["results"]
    text = f"the {tier} store gives {results['cat']['stored_mb_per_s']:,.0f} MB/s"
    if "decode" in results:
        text = (
            f"Storage-bound: {text}, bytes for {_rate(facts, 'cat'):,.0f} samples/s; {facts['threads']} "
            f"threads decode {_rate(facts, 'decode'):,.0f}"
        )
    else:
        text = f"Nothing is decoded here: {text}"
    if tier == "local":
        yield f"{text}. More memory for the page cache or a faster disk helps, more processors do not."
        return
    size = human_bytes(facts["dataset_bytes"])
    text += f". A cache of {size} on a local disk holds the whole dataset from the second epoch on"
    if "disk" in results:
        text += f"; the disk here gives bytes for {_rate(facts, 'disk'):,.0f} samples/s"
    yield f"{text}. The first epoch needs a wider link, or a store that is nearer."


def _about_loader(facts: Mapping[str, Any]) -> Iterator[str]:
    share, stages = facts["share_of_limit"], facts["stages"]
    if share >= _NEAR_LIMIT:
        return
    slowest = max(stages, key=lambda name: float(stages[name]))
    yield (
        f"Batches come at {share:.0%} of the slower limit, so the limits do not explain all of it. The "
        f"loader's threads spent most of their time in the stage {slowest}. Try --threads above and below "
        "the number of processors; small samples need larger micro-batches."
    )


def _about_disk(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["tier"] != "local" or "disk" not in facts["results"]:
        return
    disk, batches = _rate(facts, "disk"), _rate(facts, "batches")
    if disk >= batches:
        return
    size, memory = human_bytes(facts["dataset_bytes"]), human_bytes(facts["memory_bytes"])
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


def _about_cache(cache: Mapping[str, Any] | None) -> Iterator[str]:
    if cache is None:
        return
    first, second = cache["epochs"]
    size = human_bytes(cache["directory_bytes"] + cache["ram_bytes"])
    scaled = ""
    if cache["share_of_split"] < 1:
        scaled = f" (measured on {cache['share_of_split']:.0%} of the split, with as much less of a cache)"
    times = second["samples_per_s"] / first["samples_per_s"]
    yield (
        f"A cache of {size}{scaled}: {first['samples_per_s']:,.0f} samples/s in the first epoch, "
        f"{second['samples_per_s']:,.0f} in the second, {times:.2f} times as many; "
        f"{1 - second['tiers']['origin']:.0%} of its bytes come from the cache."
    )
    if second["tiers"]["origin"] > _MUCH_FETCHED and times < _WORTH:
        yield (
            f"It holds too little to be worth it: {second['tiers']['origin']:.0%} of the bytes are fetched "
            "again in each epoch."
        )


def _about_threads(scaling: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for before, after in pairwise(scaling):
        more = after["threads"] / before["threads"]
        if after["samples_per_s"] < _GOOD_SCALING * more * before["samples_per_s"]:
            times = after["samples_per_s"] / before["samples_per_s"]
            yield (
                f"{after['threads']} threads bring {times:.2f} times what {before['threads']} bring: more of "
                "them help little here (shared memory bandwidth, two threads of one core, or a quota of "
                "processors)."
            )
            return


def _about_need(facts: Mapping[str, Any]) -> Iterator[str]:
    need, got = facts["need_samples_per_s"], _rate(facts, "batches")
    if not need:
        return
    if got >= need:
        yield f"{need:,.0f} samples/s are needed, and {got:,.0f} come: the GPUs need not wait for data."
    elif facts["limit"] == "decode":
        threads = math.ceil(facts["threads"] * need / got)
        yield (
            f"{need:,.0f} samples/s are needed, and {got:,.0f} come: at this rate a thread it takes about "
            f"{threads} processors a node, or {need / got:.1f} times less to decode."
        )
    else:
        rate = facts["results"]["cat"]["stored_mb_per_s"] * need / _rate(facts, "cat")
        yield (
            f"{need:,.0f} samples/s are needed, and {got:,.0f} come: it takes storage of about "
            f"{rate:,.0f} MB/s."
        )
