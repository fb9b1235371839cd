"""The job, whose rank 1 is killed amid its part of the second checkpoint of the first start.

``python -m tests.distributed.forked 2 tests.distributed.killed_writer MARK ARGUMENTS``: MARK is a file that
says it has happened.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from shardflow.training.checkpoint import files, tensors

__all__: list[str] = []


def main() -> None:
    mark = Path(sys.argv.pop(1))
    write, count = tensors.write_tensors, 0

    def written(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(*arguments)

    with mock.patch.object(files, "write_tensors", written):
        runpy.run_module("shardflow.training", run_name="__main__")


if __name__ == "__main__":
    main()
