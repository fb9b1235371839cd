"""Advice of the rules: the setting to change, its old and new value, and the estimated gain.

Gains follow from shares of the step by Amdahl's law. Only settings that the run has are named. Each function
returns the best advice first.
"""

from __future__ import annotations

import math
from typing import Final

from shardflow.monitoring.verdict.intervals import IntervalSummary
from shardflow.telemetry import Advice
from shardflow.telemetry.intervals import size_text

_MOST_GAIN: Final = 20.0
_READS_PER_CPU: Final = 4
"""Threads that wait for reads need hardly any processor, but each holds what it reads."""
_MOST_READ_AHEAD_THREADS: Final = 64
_FULL_CACHE: Final = 0.9


def faster(share: float, factor: float = math.inf) -> float:
    """Return the rate of steps over the present one, less 1, if this share of the step took ``1 / factor``.

    Example:
        >>> faster(0.5, 2.0)
        0.33
    """
    left = 1.0 - share + share / factor
    return round(min(_MOST_GAIN, 1.0 / left - 1.0), 2) if left > 0 else _MOST_GAIN


def more_working_threads(summary: IntervalSummary, share: float) -> list[Advice]:
    """Threads that need a processor each."""
    old = summary.number("loader.num_threads")
    if not old or summary.wait >= 1.0:
        return []
    per_rank = int(summary.cpus_free / max(1, summary.ranks_per_node))
    # So many keep up with a loop that never waits.
    wanted = math.ceil(old / (1.0 - share)) if share < 1.0 else 2 * old
    new = min(wanted, old + per_rank, 2 * old)
    if new > old:
        return [_threads("Processors are free", old, new, _paced(share, new / old))]
    missing = (wanted - old) * max(1, summary.ranks_per_node)
    return [
        Advice(
            text=f"All {summary.num_cpus} processors of the node are in use: about {missing} more are wanted "
            f"for loader.num_threads {old} -> {wanted}.",
            gain=_paced(share, wanted / old),
        )
    ]


def more_reading_threads(summary: IntervalSummary, share: float) -> list[Advice]:
    """Threads that mostly wait for a store or a disk."""
    old = summary.number("loader.num_threads")
    most = _READS_PER_CPU * summary.num_cpus // max(1, summary.ranks_per_node)
    if not old or 2 * old > max(most, 2):
        return []
    return [_threads("Reads wait more than they work", old, 2 * old, _paced(share, 2.0))]


def _paced(share: float, factor: float) -> float:
    """What faster threads gain: at most all waits that they explain, at most their factor."""
    left = max(1.0 - share, 1.0 / factor)
    return round(1.0 / left - 1.0, 2)


def more_cache(summary: IntervalSummary, share: float) -> list[Advice]:
    """Read further ahead, more at once, and keep more, where there is a cache."""
    found = []
    if old := summary.number("cache.read_ahead_bytes"):
        found.append(
            byte_size_advice("Read further ahead", "cache.read_ahead_bytes", old, 2 * old, faster(share, 2.0))
        )
    threads = summary.number("cache.read_ahead_threads")
    if threads and 2 * threads <= _MOST_READ_AHEAD_THREADS:
        found.append(
            Advice(
                text=f"Ask the store for more at once: cache.read_ahead_threads {threads} -> {2 * threads}.",
                setting="cache.read_ahead_threads",
                old=str(threads),
                new=str(2 * threads),
                gain=faster(share, 2.0),
            )
        )
    bound = summary.number("cache.max_bytes")
    if bound and summary.cache_disk_bytes >= _FULL_CACHE * bound:
        found.append(
            byte_size_advice(
                "The cache on disk is full; give it more",
                "cache.max_bytes",
                bound,
                2 * bound,
                faster(share, 2.0),
            )
        )
    return found


def fewer_pixels(summary: IntervalSummary, share: float) -> list[Advice]:
    """Small versions of slices, where large ones are read to be made small."""
    if summary.word("image.resolution") != "full":
        return []
    rows = summary.number("image.rows") or 0
    return [
        Advice(
            text="Read small versions of the slices: image.resolution full -> small, of a dataset packed "
            f"with [variants] small_px (at least {rows} here); the model then sees other pixels.",
            setting="image.resolution",
            old="full",
            new="small",
            gain=faster(share, 4.0),
        )
    ]


def _threads(why: str, old: int, new: int, gain: float) -> Advice:
    return Advice(
        text=f"{why}: loader.num_threads {old} -> {new}.",
        setting="loader.num_threads",
        old=str(old),
        new=str(new),
        gain=gain,
    )


def byte_size_advice(why: str, setting: str, old: int, new: int, gain: float) -> Advice:
    """Advise another size."""
    return Advice(
        text=f"{why}: {setting} {size_text(old)} -> {size_text(new)}.",
        setting=setting,
        old=size_text(old),
        new=size_text(new),
        gain=gain,
    )


_BATCHES_AHEAD: Final = 4
"""Micro-batches for each thread: bursts of costly samples last that long."""
_MIB: Final = 1 << 20


def for_storage(summary: IntervalSummary) -> list[Advice]:
    """Reads take too long: keep what was read, read more at once, read less."""
    share = summary.parts["storage"]
    found = []
    if summary.number("cache.max_bytes") == 0 and summary.number("cache.ram_bytes") == 0:
        if summary.tier != "local":
            found.append(
                Advice(
                    text=f"Keep what was read from {summary.tier} on a disk of the node (NVMe): set "
                    "cache.directory (now none) and cache.max_bytes; from the second epoch on nothing is "
                    "read twice.",
                    setting="cache.directory",
                    new="a folder on a local disk",
                    gain=faster(share),
                )
            )
    else:
        found += more_cache(summary, share)
    found += more_reading_threads(summary, share)
    found += fewer_pixels(summary, share)
    if summary.tier == "local" and not found:
        found.append(Advice(text="Move the dataset to a faster disk of the node.", gain=faster(share)))
    return found


def for_decode(summary: IntervalSummary) -> list[Advice]:
    """Decoding takes too long: more threads where processors are free, fewer pixels, another codec."""
    share = summary.parts["decode"]
    return [
        *more_working_threads(summary, share),
        *fewer_pixels(summary, share),
        Advice(
            text="Or pack once more with a codec that decodes faster (codec of pack: b2nd is quick, npy "
            "needs no decoding and more bytes).",
            gain=faster(share, 2.0),
        ),
    ]


def for_transform(summary: IntervalSummary) -> list[Advice]:
    """Resizing or the user's transform takes too long."""
    share = summary.parts["transform"]
    own, user = summary.seconds.get("transform", 0.0), summary.seconds.get("user_transform", 0.0)
    found = []
    execution = summary.word("loader.execution")
    if user > own and execution is not None and execution != "workers":
        found.append(
            Advice(
                text=f"If the transform is Python, run it in processes: loader.execution {execution} -> "
                "workers; else it has the interpreter for itself only one thread at a time.",
                setting="loader.execution",
                old=execution,
                new="workers",
                gain=faster(share, float(max(1, summary.number("loader.num_threads") or 1))),
            )
        )
    found += more_working_threads(summary, share)
    if own >= user and summary.number("image.transfer_rows") == 0:
        found.append(
            Advice(
                text="Let the device resize: set image.transfer_rows and image.transfer_columns (now 0, the "
                "size of the model) to the size of the stored slices.",
                setting="image.transfer_rows",
                old="0",
                new="rows as stored",
                gain=faster(share),
            )
        )
    return found


def for_prefetch(summary: IntervalSummary) -> list[Advice]:
    """The loader's threads rest for lack of room while the loop waits."""
    old = summary.number("loader.prefetch_bytes")
    if not old:
        return []
    threads = max(1, summary.number("loader.num_threads") or 1)
    new = max(2 * old, math.ceil(summary.batch_bytes) * threads * _BATCHES_AHEAD)
    return [
        byte_size_advice(
            "Give the loader room to work ahead",
            "loader.prefetch_bytes",
            old,
            new,
            faster(summary.parts["prefetch"]),
        )
    ]


def for_transfer(summary: IntervalSummary) -> list[Advice]:
    """Copies to the device take too long."""
    share = summary.parts["transfer"]
    found = []
    if summary.word("image.dtype") == "float32":
        found.append(
            Advice(
                text="Send pixels as they are stored: image.dtype float32 -> int16 (CT) or uint8, a half or "
                "a quarter of the bytes.",
                setting="image.dtype",
                old="float32",
                new="int16",
                gain=faster(share, 2.0),
            )
        )
    rows, sent = summary.number("image.rows"), summary.number("image.transfer_rows")
    if rows and sent and sent > rows:
        found.append(
            Advice(
                text=f"Send smaller images: image.transfer_rows {sent} -> {rows}.",
                setting="image.transfer_rows",
                old=str(sent),
                new=str(rows),
                gain=faster(share, (sent / rows) ** 2),
            )
        )
    if old := summary.number("loader.pinned_bytes"):
        found.append(
            byte_size_advice("Give copies more room", "loader.pinned_bytes", old, 2 * old, faster(share, 1.5))
        )
    return found


def for_tokens(summary: IntervalSummary) -> list[Advice]:
    """Making tokens of reports takes the loop's time."""
    if summary.word("text.tokens") != "online":
        return []
    return [
        Advice(
            text="Store the tokens once with shardflow tokenize: text.tokens online -> stored.",
            setting="text.tokens",
            old="online",
            new="stored",
            gain=faster(summary.parts["tokenize"], 10.0),
        )
    ]


def for_exchange(summary: IntervalSummary) -> list[Advice]:
    """Gradients take too long from rank to rank."""
    share = summary.exchange
    found = []
    if summary.word("parallel.accumulation") == "sharded":
        found.append(
            Advice(
                text="Exchange once a step: parallel.accumulation sharded -> whole, where memory allows.",
                setting="parallel.accumulation",
                old="sharded",
                new="whole",
                gain=faster(share, 2.0),
            )
        )
    if old := summary.number("batch.micro_batches_per_step"):
        found.append(
            Advice(
                text=f"Exchange less often: batch.micro_batches_per_step {old} -> {2 * old}; this doubles "
                "the batch of a step, so the training is another one.",
                setting="batch.micro_batches_per_step",
                old=str(old),
                new=str(2 * old),
                gain=faster(share, 2.0),
            )
        )
    device = summary.word("run.device")
    if device == "cpu" or (device == "auto" and not summary.seconds.get("copy")):
        text = (
            "Ranks on processors exchange through sockets: fewer ranks of more threads exchange less; "
            "between nodes GLOO_SOCKET_IFNAME chooses the interface (shardflow doctor measures it)."
        )
    else:
        text = (
            "Look at the network of the ranks: NCCL_DEBUG=INFO names the transport; NVLink or RDMA is "
            "wanted, not sockets (shardflow doctor measures it)."
        )
    found.append(Advice(text=text, gain=faster(share, 4.0)))
    return found


def for_straggler(summary: IntervalSummary) -> list[Advice]:
    """One rank holds all others up."""
    where = f"rank {summary.slow.rank}" + (f" on host {summary.slow.host}" if summary.slow.host else "")
    waits = summary.slow.wait - summary.typical.wait > summary.slow.compute - summary.typical.compute
    look = (
        "its disk, its network and its cache"
        if waits
        else "clocks and temperature of its device, and other jobs on its processors"
    )
    return [
        Advice(
            text=f"Look at {where}: {look}; leave the host out if it stays slow.", gain=faster(summary.skew)
        )
    ]


def for_trainer(summary: IntervalSummary) -> list[Advice]:
    """The trainer's Python holds the interpreter."""
    found = []
    lost = summary.wait
    if summary.word("loader.execution") == "threads":
        found.append(
            Advice(
                text="Let a process of its own make micro-batches: loader.execution threads -> process; the "
                "loop then waits for none of them.",
                setting="loader.execution",
                old="threads",
                new="process",
                gain=faster(lost),
            )
        )
    found.append(
        Advice(
            text="Find the Python in the step that takes so long (py-spy top): logging, metrics, loops over "
            "tensors, .item() on each of them.",
            gain=faster(summary.held, 2.0),
        )
    )
    return found


def for_delay(summary: IntervalSummary) -> list[Advice]:
    """Threads find no processor."""
    found = []
    threads = summary.number("loader.num_threads")
    spare = summary.num_cpus // max(1, summary.ranks_per_node) - 1
    if threads and threads > max(1, spare):
        found.append(
            Advice(
                text=f"Use fewer threads: loader.num_threads {threads} -> {max(1, spare)}; "
                f"{summary.ranks_per_node} ranks share {summary.num_cpus} processors.",
                setting="loader.num_threads",
                old=str(threads),
                new=str(max(1, spare)),
                gain=faster(summary.delay, 1.5),
            )
        )
    others = summary.num_cpus - summary.cpus_used
    if others > summary.num_cpus / 4:
        text = (
            f"Find who else uses the node (top): this run gets {summary.cpus_used:.1f} of its "
            f"{summary.num_cpus} processors, and waits for more."
        )
    else:
        missing = max(
            1, math.ceil(summary.cpus_used * summary.delayed_threads / (1 - summary.delayed_threads))
        )
        text = (
            f"About {missing} more processors are wanted on the node; with as many as there are, set "
            "OMP_NUM_THREADS to the processors of a rank less those of its loader."
        )
    return [*found, Advice(text=text, gain=faster(summary.delay))]


def for_memory(summary: IntervalSummary) -> list[Advice]:
    """Memory runs out."""
    found = []
    for setting in ("cache.ram_bytes", "loader.prefetch_bytes", "cache.read_ahead_bytes"):
        old = summary.number(setting)
        if old and old >= 2 * _MIB:
            found.append(byte_size_advice("Hold less", setting, old, old // 2, 0.0))
    return found or [Advice(text="Give the node more memory, or run fewer ranks on it.")]


def for_checkpoints(summary: IntervalSummary) -> list[Advice]:
    """Steps stand still."""
    found = []
    checkpoints, evaluations = summary.seconds.get("checkpoint", 0.0), summary.seconds.get("evaluate", 0.0)
    name = "run.checkpoint_every_steps" if checkpoints >= evaluations else "run.evaluate_every_steps"
    if old := summary.number(name):
        found.append(
            Advice(
                text=f"Do it half as often: {name} {old} -> {2 * old}.",
                setting=name,
                old=str(old),
                new=str(2 * old),
                gain=faster(summary.paused, 2.0),
            )
        )
    return found


def for_compute(summary: IntervalSummary) -> list[Advice]:
    """The model computes; only a faster model or more devices would help."""
    found = []
    if summary.word("run.precision") == "fp32" and summary.word("run.device") in {"cuda", "npu"}:
        found.append(
            Advice(
                text="Compute in half precision: run.precision fp32 -> bf16.",
                setting="run.precision",
                old="fp32",
                new="bf16",
                gain=faster(summary.busy, 2.0),
            )
        )
    return found
