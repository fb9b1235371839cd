"""Packing processes that fail on purpose: a task handler around the real one.

Passed to `pack` as ``handlers``; reads what to do from ``faults.json`` beside the dataset's folder, so that
the library needs no switch for it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardflow.errors import naming_os_errors
from shardflow.packing.engines.worker import Handler
from shardflow.packing.handlers import make_handler as make_real_handler
from shardflow.packing.studies import assembly
from shardflow.packing.workspace import write_plainly

HANDLERS = "tests.pack_faults:make_handler"
HELD = "held"
"""Name of the file that a process writes before it holds."""
FAULTY_COMMAND = f"""
import functools, sys
from shardflow.packing.engines.forking import prepare_to_fork
prepare_to_fork()
import shardflow.packing
from shardflow.cli.main import main
shardflow.packing.pack = functools.partial(shardflow.packing.pack, handlers="{HANDLERS}")
sys.exit(main(["pack", *sys.argv[1:]]))
"""
"""``shardflow pack`` with the faults of ``faults.json``, for ``python -c``; it packs by forks, as there."""


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the handler.

    ``faults.json``: ``{"study": {sample_key: fault}, "header": {relative_path: fault}, "document":
    {name of the file: fault}, "kill_group": point}``; the key ``*`` stands for every study; a fault is
    ``hang``, ``hold``, ``eat``, ``segfault``, ``kill``, ``raise``, with ``_once`` for the first try only,
    ``count``, which writes a letter to the file ``counted`` and fails nothing, or ``counted_kill``, which
    does both. ``hold`` hangs too, after it has written its process id to the file ``held``: a state that
    lasts until the test ends it. A point is ``tar``, ``index``, ``record`` or ``fragment`` with the number of
    the write after which the whole process group is killed, such as ``["tar", 1]``. ``os_error``: ``[errno,
    number]``, the write, sync or rename of a process that fails.
    """
    folder = Path(setup["workspace"]["output"]).parent
    faults: dict[str, Any] = json.loads((folder / "faults.json").read_text(encoding="utf-8"))
    real = make_real_handler(setup)
    if "kill_group" in faults:
        _arm(*faults["kill_group"])
    if "os_error" in faults:
        _break_disk(*faults["os_error"])

    def handle(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        if kind == "study":
            studies = faults.get("study", {})
            _fail(studies.get(payload["sample_key"], studies.get("*")), folder)
        elif kind == "document":
            name = Path(payload["document"]["path"] or "").name
            _fail(faults.get("document", {}).get(name), folder)
        elif kind in {"scan", "probe"}:
            files = payload["files"] if kind == "scan" else [payload["file"]]
            for file in files:
                if file["reason"] is None:
                    _fail(faults.get("header", {}).get(file["relative_path"]), folder)
        return real(kind, payload)

    return handle


def _fail(fault: str | None, folder: Path) -> None:
    if fault is None:
        return
    if fault.endswith("_once"):
        try:
            (folder / f"{fault}.done").touch(exist_ok=False)
        except FileExistsError:
            return
    match fault.removesuffix("_once"):
        case "hang":
            time.sleep(3600)
        case "hold":
            write_plainly(folder / HELD, str(os.getpid()).encode("ascii"))
            time.sleep(3600)
        case "eat":
            hoard = [bytearray(1 << 26) for _ in range(1 << 10)]
            raise AssertionError(len(hoard))
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "count" | "counted_kill":
            with (folder / "counted").open("a", encoding="ascii") as file:
                file.write("x")
            if fault == "counted_kill":
                os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("DOE^JANE 19700101")


def _arm(point: str, number: int) -> None:
    """Kill the process group right after a named write."""
    seen = 0

    def count(matches: bool) -> None:
        nonlocal seen
        seen += matches
        if matches and seen == number:
            os.killpg(0, signal.SIGKILL)

    def after(write: Callable[..., Any], suffix: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = write(*args, **kwargs)
            count(any(str(place).endswith(suffix) for place in args[:2]))
            return result

        return wrapper

    def counted(commit: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            result = commit(*args)
            count(True)
            return result

        return wrapper

    match point:
        case "tar" | "index":
            suffix = {"tar": ".tar", "index": ".idx"}[point]
            _wrap(assembly, "write_file", lambda write: after(write, suffix))
        case "record":
            _wrap(assembly, "write_plainly", lambda write: after(write, ".json"))
        case "fragment":
            _wrap(assembly.FragmentWriter, "commit", counted)


def _break_disk(code: int, number: int) -> None:
    """Let the n-th call of this process that changes the disk fail, and every one after it."""
    seen = 0

    def broken(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen >= number:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        return wrapper

    for name in ("write", "fsync", "replace"):
        _wrap(os, name, broken)
    # Fragments are written through a file object, whose write is no function of `os`.
    _wrap(assembly.FragmentWriter, "add", _translated(broken))


def _translated(broken: Callable[..., Any]) -> Callable[..., Any]:
    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        failing = broken(real)

        def wrapper(*args: Any) -> Any:
            with naming_os_errors("writing a fragment"):
                return failing(*args)

        return wrapper

    return make


def _wrap(owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))
