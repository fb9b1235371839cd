"""Kills a job after each of its writes, and runs it again: ``kill_driver.py BEFORE WORK JOB NUMBERS``.

Arguments: a prepared folder of `tests.pack_case.PackCase`; a folder to work in; ``append`` or ``withdraw``
(remove a patient, then compact and delete earlier versions); the numbers of the writes as JSON, or ``null``
for all. A write is a call of the system that changes a file or a folder: a rename, a piece of a file, a
removal. Prints the number of kills as JSON; whatever is not as it must be is an exception.

One process without threads, so that each job can be a fork of it: a fork takes milliseconds, a new
interpreter seconds. It packs by itself, so that writes of packing processes are among those counted.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from shardflow.format.checks.verification import verify
from shardflow.format.manifest import load, versions
from shardflow.packing.versions.removal import Withdrawn, compact, remove
from shardflow.storage import LocalStore
from tests.inline_engine import packing_inline
from tests.pack_case import PackCase, tree_digests

CALLS: Final = ("write", "fsync", "link", "replace", "unlink", "rmdir")
SETTINGS: Final = ("page.enabled=false", "shards.target_bytes=64KiB")
PATIENT: Final = "P1"


def withdraw(case: PackCase, seen: Callable[[str], object]) -> None:
    """Take a patient out for good, version by version."""
    seen(remove(case.output, case.private, Withdrawn(patients=[PATIENT])).dataset_id)
    seen(compact(case.output, case.private, deletes_old=True).dataset_id)


def append(case: PackCase, seen: Callable[[str], object]) -> None:
    """Take in what is new."""
    seen(str(case.pack(*SETTINGS, mode="append").dataset_id))


JOBS: Final[dict[str, Callable[[PackCase, Callable[[str], object]], None]]] = {
    "append": append,
    "withdraw": withdraw,
}


def main() -> None:
    """Run the job whole, and then once for each write."""
    before, work, name, wanted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    job = JOBS[name]
    whole = copy_case(before, work / "whole")
    readable = [load(LocalStore(whole.output)).dataset_id]
    job(whole, readable.append)
    expected = tree_digests(whole.output)
    private = private_digests(whole)
    killed = 0
    numbers: Iterable[int] = itertools.count(1) if wanted is None else wanted
    for number in numbers:
        case = copy_case(before, work / "case")
        status = run_killed(job, case, number)
        if status == 0:
            break  # the job has fewer writes
        check(os.WTERMSIG(status) == signal.SIGKILL, f"write {number}: ended otherwise, {status}")
        killed += 1
        store = LocalStore(case.output)
        found = {load(store, version).dataset_id for version in versions(store)}
        check(bool(found) and found <= set(readable), f"write {number}: readers see another version")
        check(verify(str(case.output)).is_whole, f"write {number}: readers see a torn version")
        job(case, id)
        check(tree_digests(case.output) == expected, f"write {number}: other bytes after the second run")
        check(private_digests(case) == private, f"write {number}: another private folder")
    sys.stdout.write(json.dumps({"killed": killed}) + "\n")


def check(is_so: bool, text: str) -> None:
    """Stop where something is not as it must be."""
    if not is_so:
        raise AssertionError(text)


def copy_case(before: Path, folder: Path) -> PackCase:
    """Copy the prepared folder to where the job runs."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(before, folder)
    return PackCase(folder)


def private_digests(case: PackCase) -> dict[str, str]:
    """Digests of what the private folder keeps; ledgers of inputs hold the folder's own name."""
    lines = {
        path.name: sorted(path.read_text(encoding="ascii").replace(str(case.folder), "").splitlines())
        for path in case.private.glob("inputs-*.jsonl")
    }
    names = sorted(path.name for path in case.private.iterdir() if path.name != "packing-processes.log")
    return {"ledgers": json.dumps(lines, sort_keys=True), "names": json.dumps(names)}


def run_killed(job: Callable[[PackCase, Callable[[str], object]], None], case: PackCase, number: int) -> int:
    """Run a job in a fork that dies right after its n-th write; return how it ended."""
    child = os.fork()
    if child == 0:
        arm(number)
        try:
            job(case, id)
        except BaseException:  # noqa: BLE001 - a fork must never go on in the parent's code
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def arm(number: int) -> None:
    """Let this process die after the n-th of its writes."""
    count = itertools.count(1)

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapper

    for name in CALLS:
        setattr(os, name, wrap(getattr(os, name)))


if __name__ == "__main__":
    with packing_inline():
        main()
