"""Kills a writer at named points and lets it go on: ``python -m tests.writer_killed FOLDER``.

Prints each point that was reached; whatever is not as it must be is an exception. Each run is a fork of this
process, which has no threads: a fork takes milliseconds, a new interpreter seconds.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from shardflow.format import shard_files, writer
from shardflow.format.checks.verification import verify
from shardflow.format.index import ShardIndex
from shardflow.format.manifest import versions
from shardflow.storage import LocalStore
from tests.pack_case import tree_digests

# The module and the function after whose n-th call the writer dies.
POINTS: Final[dict[str, tuple[Any, str, int]]] = {
    "a-tar-without-its-index": (ShardIndex, "encode_columns", 2),
    "an-index-without-its-columns": (shard_files, "write_file", 2),
    "columns-without-facts": (writer, "write_file", 1),
    "a-finished-shard": (writer, "write_file", 4),
    "a-part-before-it-is-done": (writer, "write_file", 10),
    "a-part-that-is-done": (writer, "write_atomic", 2),
    "some-linked-shards": (writer, "link_shard", 2),
    "the-samples-table": (writer, "write_samples", 1),
    "the-attached-table": (writer, "write_table", 1),
    "the-manifest": (writer, "commit", 1),
}


def write(path: Path) -> None:
    """Write ten samples in shards of two, of two splits."""
    with writer.ShardWriter(path, max_samples=2, resume=True) as out:
        for number in range(10):
            sample = {"__key__": f"k{number}", "report.txt": f"text {number}"}
            out.write(sample, split=("train", "val")[number % 3 == 0], columns={"label": number})


def forked(action: Callable[[], object]) -> int:
    """Run an action in a fork; return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - a fork must never go on in the parent's code
            sys.stderr.write(f"{error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed(path: Path, point: str) -> None:
    """Write, and die at a point."""
    module, name, number = POINTS[point]
    real, count = getattr(module, name), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        result = real(*args, **kwargs)
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, wrapper)
    write(path)


def main(folder: Path) -> None:
    """Try every point."""
    write(folder / "whole")
    expected = tree_digests(folder / "whole")
    for point in POINTS:
        path = folder / point
        status = forked(lambda path=path, point=point: killed(path, point))  # type: ignore[misc]
        check(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"{point}: ended otherwise")
        is_there = bool(versions(LocalStore(path)))
        check(is_there == (point == "the-manifest"), f"{point}: a dataset too early or too late")
        check(not is_there or verify(path).is_whole, f"{point}: a torn dataset")
        check(forked(lambda path=path: write(path)) == 0, f"{point}: does not go on")  # type: ignore[misc]
        check(tree_digests(path) == expected, f"{point}: other bytes")
        sys.stdout.write(f"{point}\n")


def check(is_so: bool, text: str) -> None:
    """Stop where something is not as it must be."""
    if not is_so:
        raise AssertionError(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
