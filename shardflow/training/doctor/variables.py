"""Rules about the variables of NCCL and of torch's process groups."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping

from shardflow.errors import ConfigError
from shardflow.training.doctor.finding import Finding, error, warning
from shardflow.training.doctor.names import DEBUGGING, INVENTED, KNOWN, OLD_NAMES, RANGES
from shardflow.training.doctor.surroundings import Surroundings

__all__ = ["check_variables", "refuse_unknown_names", "unknown_names"]

_MOST_SOCKETS = 64
"""Of NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD."""
_IB_UNIT_S = 4.096e-6
_IB_TIMEOUT, _IB_RETRIES = 20, 7
"""NCCL's defaults since 2.23."""
_BUFFER_NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def unknown_names(environment: Iterable[str], allowed: Iterable[str] = ()) -> Iterator[Finding]:
    """Find names that nothing reads.

    Args:
        environment: Names of all variables.
        allowed: Names that are left alone, such as a plugin's.
    """
    skipped = set(allowed)
    for name in sorted(environment):
        if not name.startswith(("NCCL_", "TORCH_NCCL_")) or name in skipped | KNOWN | OLD_NAMES.keys():
            continue
        if name in INVENTED:
            yield error(name, "be unset: nothing reads it", "it set", f"use {INVENTED[name]}")
            continue
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.6)
        yield error(
            name,
            "be a variable that NCCL or torch reads",
            "a name that neither knows",
            f"unset it{f', or say {near[0]}' if near else ''}; --allow {name} where a plugin reads it",
        )


def refuse_unknown_names(environment: Mapping[str, str]) -> None:
    """Refuse to start with a variable that nothing reads.

    Raises:
        ConfigError: There is one; the message names the nearest real one. ``SHARDFLOW_ALLOW_VARIABLES`` lists
            names, by commas, that are left alone.
    """
    allowed = environment.get("SHARDFLOW_ALLOW_VARIABLES", "").split(",")
    for finding in unknown_names(environment, allowed):
        raise ConfigError(f"{finding.topic} must {finding.must}, got {finding.found}; {finding.fix}.")


def check_variables(around: Surroundings, allowed: Iterable[str] = ()) -> Iterator[Finding]:
    """Check names, ranges, and what variables do together."""
    environment = around.environment
    yield from unknown_names(environment, allowed)
    yield from _old_names(environment)
    yield from _ranges(environment)
    yield from _left_from_debugging(environment)
    yield from _torch_modes(environment)
    yield from _sockets(environment)
    yield from _patience_of_links(around)


def _old_names(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(OLD_NAMES.keys() & environment.keys()):
        new = OLD_NAMES[name]
        fix = f"say {new}" if new else "unset it"
        yield warning(name, "have the name of today", "an old name, or one that is ignored", fix)


def _ranges(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in sorted(RANGES.keys() & environment.keys()):
        allowed, value = RANGES[name], environment[name]
        if not allowed.holds(value):
            yield error(name, f"be {allowed.describe()}", repr(value), "correct or unset it")


def _left_from_debugging(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, effect in DEBUGGING.items():
        if environment.get(name) == "1":
            yield warning(name, "be 0 or unset in production", f"1: {effect}", "unset it")
    if environment.get("NCCL_DEBUG", "").upper() in {"INFO", "TRACE"}:
        yield warning(
            "NCCL_DEBUG",
            "be WARN in production",
            environment["NCCL_DEBUG"],
            "set it to WARN: every rank writes",
        )
    file = environment.get("NCCL_DEBUG_FILE", "")
    if file and not file.startswith("/dev/") and not ("%p" in file and "%h" in file):
        yield warning(
            "NCCL_DEBUG_FILE",
            "differ for each process",
            "a name without %h and %p: ranks overwrite each other",
            "put %h.%p into the name",
        )


def _torch_modes(environment: Mapping[str, str]) -> Iterator[Finding]:
    mode = environment.get(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", environment.get("NCCL_ASYNC_ERROR_HANDLING", "3")
    )
    records = [environment[name] for name in _BUFFER_NAMES if name in environment]
    if mode == "0":
        yield error(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "end a rank whose collective failed",
            "0: it waits for ever",
            "unset it (3 is the default)",
        )
    elif mode == "1" and records and records[0] != "0":
        yield warning(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
            "be 3 beside the flight recorder",
            "1, which aborts before the record is written",
            "unset it (3 is the default)",
        )
    if environment.get("TORCH_NCCL_BLOCKING_WAIT", environment.get("NCCL_BLOCKING_WAIT", "0")) == "1":
        yield error(
            "TORCH_NCCL_BLOCKING_WAIT",
            "be unset in production",
            "1: the processor waits in every collective",
            "unset it; timeouts.steady_s bounds an exchange",
        )
    if environment.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and records and records[0] == "0":
        yield warning(
            "TORCH_NCCL_DUMP_ON_TIMEOUT",
            "have a buffer to write out",
            "a flight recorder of size 0",
            "set TORCH_FR_BUFFER_SIZE=2000, or unset both: training sets them",
        )
    if environment.get("TORCH_NCCL_ENABLE_MONITORING") == "0":
        yield warning(
            "TORCH_NCCL_ENABLE_MONITORING",
            "be 1: it ends a process whose NCCL thread hangs",
            "0",
            "unset it",
        )


def _sockets(environment: Mapping[str, str]) -> Iterator[Finding]:
    try:
        threads = int(environment.get("NCCL_SOCKET_NTHREADS", "1"))
        each = int(environment.get("NCCL_NSOCKS_PERTHREAD", "1"))
    except ValueError:
        return  # told by its range
    if threads * each > _MOST_SOCKETS:
        yield error(
            "NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD",
            f"be at most {_MOST_SOCKETS}",
            str(threads * each),
            "lower one of them",
        )


def _patience_of_links(around: Surroundings) -> Iterator[Finding]:
    environment = around.environment
    try:
        exponent = int(environment.get("NCCL_IB_TIMEOUT", _IB_TIMEOUT))
        retries = int(environment.get("NCCL_IB_RETRY_CNT", _IB_RETRIES))
    except ValueError:
        return
    steady_s = around.config.timeouts.steady_s if around.config else 100.0
    patience_s = _IB_UNIT_S * 2 ** min(exponent, 31) * retries
    if patience_s > steady_s and {"NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT"} & environment.keys():
        yield warning(
            "NCCL_IB_TIMEOUT",
            f"give a link up before timeouts.steady_s ({steady_s:g} s)",
            f"{patience_s:.0f} s with NCCL_IB_RETRY_CNT={retries}: the exchange ends first",
            f"use {_IB_TIMEOUT} and {_IB_RETRIES} (30 s), or raise timeouts.steady_s",
        )
