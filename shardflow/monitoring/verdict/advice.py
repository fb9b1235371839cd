"""Advice of the rules: the setting to change, its old and new value, and the estimated gain.

Gains follow from shares of the step by Amdahl's law. Only settings that the run has are named. Each function
returns the best advice first.
"""

from __future__ import annotations

import math
from typing import Final

from shardflow.logs import counted
from shardflow.monitoring.verdict.intervals import IntervalSummary
from shardflow.telemetry import Advice
from shardflow.telemetry.intervals import setting_text

_MOST_GAIN: Final = 20.0
_READS_PER_CPU: Final = 4
"""Threads that wait for reads need hardly any processor, but each holds what it reads."""
_MOST_READ_AHEAD_THREADS: Final = 64
_FULL_CACHE: Final = 0.9
_BATCHES_AHEAD: Final = 4
"""Micro-batches for each thread: bursts of costly samples last that long."""
_MOSTLY_IDLE: Final = 0.5
"""Loader threads that are idle for more of their time take no processors from anybody."""
_QUEUED: Final = 0.25
"""Share of the time of requests in a server's queue from which the server is busy all the time."""
_MIB: Final = 1 << 20


def faster(share: float, factor: float = math.inf) -> float:
    """Return the rate of steps over the present one, less 1, if this share of the step took ``1 / factor``.

    Example:
        >>> faster(0.5, 2.0)
        0.33
    """
    left = 1.0 - share + share / factor
    return round(min(_MOST_GAIN, 1.0 / left - 1.0), 2) if left > 0 else _MOST_GAIN


def _change(why: str, setting: str, old: int | str, new: int | str, gain: float, remark: str = "") -> Advice:
    """Advise another value of a setting; the remark follows the values in the sentence."""
    was, now = setting_text(setting, old), setting_text(setting, new)
    text = f"{why}: {setting} {was} -> {now}{remark}."
    return Advice(text=text, setting=setting, old=was, new=now, gain=gain)


def for_storage(summary: IntervalSummary) -> list[Advice]:
    """Advise on slow reads: keep what was read, read more at once, read less."""
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
        found += _more_cache(summary, share)
    old = summary.number("loader.num_threads")
    most = _READS_PER_CPU * summary.num_cpus // max(1, summary.ranks_per_node)
    if old and 2 * old <= max(most, 2):
        why = "Reads wait more than they work"
        found.append(_change(why, "loader.num_threads", old, 2 * old, _paced(share, 2.0)))
    found += _fewer_pixels(summary, share)
    if summary.tier == "local" and not found:
        found.append(Advice(text="Move the dataset to a faster disk of the node.", gain=faster(share)))
    return found


def _more_cache(summary: IntervalSummary, share: float) -> list[Advice]:
    """Read further ahead, more at once, and keep more, where there is a cache."""
    found = []
    gain = faster(share, 2.0)
    if old := summary.number("cache.read_ahead_bytes"):
        found.append(_change("Read further ahead", "cache.read_ahead_bytes", old, 2 * old, gain))
    threads = summary.number("cache.read_ahead_threads")
    if threads and 2 * threads <= _MOST_READ_AHEAD_THREADS:
        why = "Ask the store for more at once"
        found.append(_change(why, "cache.read_ahead_threads", threads, 2 * threads, gain))
    bound = summary.number("cache.max_bytes")
    if bound and summary.cache_disk_bytes >= _FULL_CACHE * bound:
        why = "The cache on disk is full; give it more"
        found.append(_change(why, "cache.max_bytes", bound, 2 * bound, gain))
    return found


def for_decode(summary: IntervalSummary) -> list[Advice]:
    """Advise on slow decoding: more threads if processors are free, fewer pixels, another codec."""
    share = summary.parts["decode"]
    return [
        *_more_working_threads(summary, share),
        *_fewer_pixels(summary, share),
        Advice(
            text="Or pack the dataset again with shards.codec = 'fast', which decodes about twice as fast as "
            "b2nd and is larger (for volumes in slices: shardflow copy --volumes bricks --codec fast).",
            gain=faster(share, 2.0),
        ),
    ]


def _more_working_threads(summary: IntervalSummary, share: float) -> list[Advice]:
    """Add threads that need a processor each."""
    old = summary.number("loader.num_threads")
    if not old or summary.wait >= 1.0:
        return []
    num_ranks = max(1, summary.ranks_per_node)
    # So many keep up with a loop that never waits.
    wanted = math.ceil(old / (1.0 - share)) if share < 1.0 else 2 * old
    new = min(wanted, old + int(summary.cpus_free / num_ranks), 2 * old)
    if new > old:
        return [_change("Processors are free", "loader.num_threads", old, new, _paced(share, new / old))]
    return [
        Advice(
            text=f"All {summary.num_cpus} processors of the node are in use: about "
            f"{(wanted - old) * num_ranks} more are wanted for loader.num_threads {old} -> {wanted}.",
            gain=_paced(share, wanted / old),
        )
    ]


def _paced(share: float, factor: float) -> float:
    """Return the gain of faster threads: at most all waits that they explain, at most their factor."""
    left = max(1.0 - share, 1.0 / factor)
    return round(1.0 / left - 1.0, 2)


def _fewer_pixels(summary: IntervalSummary, share: float) -> list[Advice]:
    """Read small versions of slices, where large ones are read to be made small."""
    if summary.word("fields.image.resolution") != "full":
        return []
    rows = summary.number("image.rows") or 0
    remark = (
        f", of a dataset packed with [variants] small_px (at least {rows} here); the model then sees other "
        "pixels"
    )
    why = "Read small versions of the slices"
    return [_change(why, "fields.image.resolution", "full", "small", faster(share, 4.0), remark)]


def for_transform(summary: IntervalSummary) -> list[Advice]:
    """Advise on slow resizing, or a slow transform of the user."""
    share = summary.parts["transform"]
    own, user = summary.seconds.get("transform", 0.0), summary.seconds.get("user_transform", 0.0)
    found = []
    execution = summary.word("loader.execution")
    if user > own and execution is not None and execution != "workers":
        why = "If the transform is Python, run it in processes"
        gain = faster(share, float(max(1, summary.number("loader.num_threads") or 1)))
        remark = "; in threads, only one at a time holds the interpreter"
        found.append(_change(why, "loader.execution", execution, "workers", gain, remark))
    found += _more_working_threads(summary, share)
    rows, sent = summary.number("image.rows"), summary.numbers("fields.image.size")
    if own >= user and sent and sent[0] == rows:
        found.append(
            Advice(
                text="Let the device resize: set fields.image.size (now that of the model) to the size of "
                "the stored slices.",
                setting="fields.image.size",
                old=str(sent),
                new="as stored",
                gain=faster(share),
            )
        )
    return found


def queued_share(summary: IntervalSummary) -> float:
    """Return the share of the requests' time in which data servers had not begun with them."""
    seconds = summary.seconds.get("service", 0.0)
    return min(1.0, summary.seconds.get("service_queue", 0.0) / seconds) if seconds else 0.0


def for_service(summary: IntervalSummary) -> list[Advice]:
    """Advise on slow data servers: more of them where requests queue, else more requests under way."""
    share = summary.parts["service"]
    add = Advice(
        text="Add servers: start shardflow serve on more machines, and list them in loader.servers.",
        setting="loader.servers",
        gain=_paced(share, 2.0),
    )
    old = summary.number("loader.num_threads")
    if not old or queued_share(summary) >= _QUEUED:
        return [add]
    why = "Ask each server for more at once"
    return [_change(why, "loader.num_threads", old, 2 * old, _paced(share, 2.0)), add]


def for_prefetch(summary: IntervalSummary) -> list[Advice]:
    """Advise on loader threads that are idle at the prefetch bound while the loop waits."""
    old = summary.number("loader.prefetch_bytes")
    if not old:
        return []
    threads = max(1, summary.number("loader.num_threads") or 1)
    new = max(2 * old, math.ceil(summary.batch_bytes) * threads * _BATCHES_AHEAD)
    why, gain = "Let the loader work further ahead", faster(summary.parts["prefetch"])
    return [_change(why, "loader.prefetch_bytes", old, new, gain)]


def for_transfer(summary: IntervalSummary) -> list[Advice]:
    """Advise on slow copies to the device."""
    share = summary.parts["transfer"]
    found = []
    if summary.word("fields.image.dtype") == "float32":
        remark = " (CT) or uint8, a half or a quarter of the bytes"
        why = "Send pixels as they are stored"
        found.append(_change(why, "fields.image.dtype", "float32", "int16", faster(share, 2.0), remark))
    size = [summary.number("image.rows") or 0, summary.number("image.columns") or 0]
    sent = summary.numbers("fields.image.size")
    if sent and all(size) and sent > size:
        gain = faster(share, math.prod(sent) / math.prod(size))
        found.append(_change("Send smaller images", "fields.image.size", str(sent), str(size), gain))
    if old := summary.number("loader.pinned_bytes"):
        why = "Give copies more pinned memory"
        found.append(_change(why, "loader.pinned_bytes", old, 2 * old, faster(share, 1.5)))
    return found


def for_tokens(summary: IntervalSummary) -> list[Advice]:
    """Advise on a loop that tokenizes reports itself."""
    if summary.word("fields.report.type") != "text":
        return []
    why, gain = "Store the tokens once with shardflow tokenize", faster(summary.parts["tokenize"], 10.0)
    return [_change(why, "fields.report.type", "text", "tokens", gain)]


def for_exchange(summary: IntervalSummary) -> list[Advice]:
    """Advise on gradients that take long from rank to rank."""
    gain = faster(summary.exchange, 2.0)
    found = []
    if summary.word("parallel.accumulation") == "sharded":
        why, remark = "Exchange once a step", ", where memory allows"
        found.append(_change(why, "parallel.accumulation", "sharded", "whole", gain, remark))
    if old := summary.number("batch.micro_batches_per_step"):
        why, remark = "Exchange less often", "; this doubles the batch of a step, and so changes the training"
        found.append(_change(why, "batch.micro_batches_per_step", old, 2 * old, gain, remark))
    device = summary.word("run.device")
    if device == "cpu" or (device == "auto" and not summary.seconds.get("copy")):
        text = (
            "Ranks on processors exchange through sockets: fewer ranks of more threads exchange less; "
            "between nodes GLOO_SOCKET_IFNAME chooses the interface (shardflow doctor measures it)."
        )
    else:
        text = (
            "Look at the network of the ranks: NCCL_DEBUG=INFO names the transport, which should be NVLink "
            "or RDMA, not sockets (shardflow doctor measures it)."
        )
    return [*found, Advice(text=text, gain=faster(summary.exchange, 4.0))]


def for_straggler(summary: IntervalSummary) -> list[Advice]:
    """Advise on one rank that all others wait for."""
    where = f"rank {summary.slow.rank}" + (f" on host {summary.slow.host}" if summary.slow.host else "")
    look = (
        "its disk, its network and its cache"
        if summary.is_slow_by_waiting
        else "clocks and temperature of its device, and other jobs on its processors"
    )
    text = f"Look at {where}: {look}; leave the host out if it stays slow."
    return [Advice(text=text, gain=faster(summary.skew))]


def for_trainer(summary: IntervalSummary) -> list[Advice]:
    """Advise on a trainer whose Python holds the interpreter."""
    found = []
    if summary.word("loader.execution") == "threads":
        why, remark = "Make micro-batches in a process of their own", "; the loop then waits for none of them"
        gain = faster(summary.wait)
        found.append(_change(why, "loader.execution", "threads", "process", gain, remark))
    found.append(
        Advice(
            text="Find the Python in the step that takes so long (py-spy top): logging, metrics, loops over "
            "tensors, .item() on each of them.",
            gain=faster(summary.held, 2.0),
        )
    )
    return found


def for_delay(summary: IntervalSummary) -> list[Advice]:
    """Advise on threads that find no processor."""
    found = []
    threads = summary.number("loader.num_threads")
    wanted = max(1, summary.num_cpus // max(1, summary.ranks_per_node) - 1)
    if threads and threads > wanted and summary.idle_threads <= _MOSTLY_IDLE:
        ranks, gain = counted(summary.ranks_per_node, "rank"), faster(summary.delay, 1.5)
        shares = "has" if summary.ranks_per_node == 1 else "share"
        remark = f"; {ranks} {shares} {counted(summary.num_cpus, 'processor')}"
        found.append(_change("Use fewer threads", "loader.num_threads", threads, wanted, gain, remark))
    if summary.num_cpus - summary.cpus_used > summary.num_cpus / 4:
        text = (
            f"Find who else uses the node (top): this run gets {summary.cpus_used:.1f} of its "
            f"{counted(summary.num_cpus, 'processor')}, and waits for more."
        )
    else:
        missing = summary.cpus_used * summary.delayed_threads / (1 - summary.delayed_threads)
        text = (
            f"The node lacks about {counted(max(1, math.ceil(missing)), 'processor')}; to make do with those "
            "it has, set OMP_NUM_THREADS to the processors of a rank less those of its loader."
        )
    return [*found, Advice(text=text, gain=faster(summary.delay))]


def for_memory(summary: IntervalSummary) -> list[Advice]:
    """Advise on a node whose memory runs out."""
    found = [
        _change("Hold less", setting, old, old // 2, 0.0)
        for setting in ("cache.ram_bytes", "loader.prefetch_bytes", "cache.read_ahead_bytes")
        if (old := summary.number(setting)) and old >= 2 * _MIB
    ]
    return found or [Advice(text="Give the node more memory, or run fewer ranks on it.")]


def for_checkpoints(summary: IntervalSummary) -> list[Advice]:
    """Advise on training that is paused for long."""
    checkpoints, evaluations = summary.seconds.get("checkpoint", 0.0), summary.seconds.get("evaluate", 0.0)
    name = "run.checkpoint_every_steps" if checkpoints >= evaluations else "run.evaluate_every_steps"
    old = summary.number(name)
    return [_change("Do it half as often", name, old, 2 * old, faster(summary.paused, 2.0))] if old else []


def for_compute(summary: IntervalSummary) -> list[Advice]:
    """Advise on a run that computes: only a faster model or more devices would help."""
    if summary.word("run.precision") != "fp32" or summary.word("run.device") not in {"cuda", "npu"}:
        return []
    why, gain = "Compute in half precision", faster(summary.busy, 2.0)
    return [_change(why, "run.precision", "fp32", "bf16", gain)]
