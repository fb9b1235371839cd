"""Runs a packing job that kills its own process group at a named point: ``python -m tests.pack_driver``.

Arguments: the configuration file, and the point: ``phase:NAME`` (when the phase begins),
``advance:NAME:COUNT`` (after so many units of a phase), ``cleaning`` (after the manifest, before the work
folder is removed), ``half`` (half of the work folder removed), or ``none``; the handlers; the mode;
``inline`` to pack without processes where one is enough.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from typing import NoReturn, cast, get_args

from shardflow.config import load_config
from shardflow.packing import PackConfig, pack
from shardflow.packing.job import PackMode
from shardflow.packing.workspace import Workspace
from tests.inline_engine import packing_inline


def kill_group() -> NoReturn:
    """Die as on a power cut of the process: nothing of Python runs any more."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError


class KillingProgress:
    """Kills at its point."""

    def __init__(self, point: str) -> None:
        self._kind, _, self._rest = point.partition(":")
        self._phase = ""
        self._count = 0

    def phase(self, name: str, total: int) -> None:
        self._phase, self._count = name, 0
        if self._kind == "phase" and self._rest == name:
            kill_group()

    def advance(self, count: int = 1, *, has_late: bool = False) -> None:
        self._count += count
        name, _, number = self._rest.partition(":")
        if self._kind == "advance" and name == self._phase and self._count >= int(number):
            kill_group()

    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


def main() -> None:
    """Run the job."""
    config, point, handlers, mode, *inline = sys.argv[1:]
    if point == "cleaning":
        setattr(Workspace, "remove_work", lambda _: kill_group())  # noqa: B010
    if point == "half":

        def remove_half(place: Workspace) -> None:
            for path in sorted(place.records.iterdir()):
                path.unlink()
            kill_group()

        setattr(Workspace, "remove_work", remove_half)  # noqa: B010
    if mode not in get_args(PackMode):
        raise ValueError(mode)
    with packing_inline() if inline else nullcontext():
        pack(
            load_config(PackConfig, config),
            KillingProgress(point),
            mode=cast(PackMode, mode),
            handlers=handlers,
        )


if __name__ == "__main__":
    main()
