"""torchrun with an exit code schedulers can act on: ``python -m pipelines.launch ... -m pipelines.train``.

Takes torchrun's arguments and is torchrun, but for three things. torchrun makes 1 of every code of a rank;
this leaves with the code that the failed ranks of this machine share (2, 75: see `pipelines.train`), so that
Kubernetes and SLURM can tell "start me again" from "do not". It hands the first stop signal to the ranks,
SIGUSR1 as well as SIGTERM, and no later one: SLURM may send several, and torchrun abandons its ranks at the
third. And it listens from its start, with 75 as the answer, even where it is process 1 of a container,
which the kernel protects from signals that nobody handles.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

__all__ = [
    "EXIT_FAILED",
    "EXIT_STOPPED",
    "code_after_stop",
    "code_of_failures",
    "folder_of_codes",
    "main",
    "report_code",
]

EXIT_FAILED: Final = 1
EXIT_STOPPED: Final = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, start again later."""

_FOLDER: Final = "SHARDFLOW_EXIT_CODES"
_PREFIX, _HELD, _RANK = "shardflow-launch-", "held", "-rank-"
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_DEFAULTS: Final = {
    # Else the first restart after a kill fails on stale addresses in the shared store (pytorch #135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Those that are not ours: a handler of torchrun's own would take the place of ours when the ranks start.
    "PET_SIGNALS_TO_HANDLE": "SIGQUIT",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun.

    Args:
        argv: torchrun's arguments; those of the process by default.

    Returns:
        0 if the ranks finished, their common code if they have one, 75 after a stop signal that no rank
        answered with a failure, else 1.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    with _stoppable() as stop:
        # Torch takes seconds to import; a signal that comes meanwhile must not be lost.
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        stop.make_error = lambda number: SignalException(f"asked to stop by {number.name}", number)
        with folder_of_codes() as folder:
            os.environ[_FOLDER] = str(folder)
            try:
                torchrun.main(list(sys.argv[1:] if argv is None else argv))
            except ChildFailedError as error:
                return code_of_failures([failure.exitcode for failure in error.failures.values()])
            except SignalException:
                return code_after_stop(folder)
    return 0


def report_code(code: int) -> None:
    """Tell the launcher of this machine, if there is one, the code that this rank is about to leave with."""
    folder = os.environ.get(_FOLDER)
    if folder is None:
        return
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{attempt}{_RANK}{os.environ['LOCAL_RANK']}"
    with suppress(FileNotFoundError):  # of a launcher that was killed, and another one has tidied up
        Path(folder, name).write_text(str(code), encoding="ascii")


def code_of_failures(codes: Collection[int]) -> int:
    """Make one exit code of those that torchrun saw when a rank of this machine had failed.

    torchrun ends the other ranks then. One that had not begun leaves by SIGTERM, one that had with 75:
    neither says why the job failed.

    Args:
        codes: Of every rank that did not finish; -N for one that signal N ended.

    Returns:
        The code that the causes share; 1 if they differ or a signal is among them.
    """
    answers = {EXIT_STOPPED, -signal.SIGTERM}
    return _only(set(codes) - answers or set(codes) - {-signal.SIGTERM})


def code_after_stop(folder: Path) -> int:
    """Make one exit code of those that the ranks of this machine reported, after a stop signal to us.

    Only the last attempt counts. A rank may be missing: it had not begun, or was too slow and has been
    killed. To start again is right either way.

    Args:
        folder: Where they reported.

    Returns:
        75, or where a rank failed the code that all share, else 1.
    """
    attempts: dict[int, set[int]] = {}
    for path in folder.glob(f"*{_RANK}*"):
        attempts.setdefault(int(path.name.split("-")[0]), set()).add(int(path.read_text(encoding="ascii")))
    codes = attempts[max(attempts)] if attempts else set()
    return EXIT_STOPPED if codes <= {0, EXIT_STOPPED} else _only(codes)


def _only(codes: set[int]) -> int:
    """The single code of a set, if it is one that a failed rank left with; 1 for anything else."""
    return next(iter(codes)) if len(codes) == 1 and min(codes) > 0 else EXIT_FAILED


@contextmanager
def folder_of_codes() -> Iterator[Path]:
    """A folder for the codes of the ranks; those that killed launchers left behind are removed.

    The lock of a launcher ends with it, however it ends.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_HELD}"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left.parent)
            finally:
                os.close(descriptor)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name:
        folder = Path(name)
        new = folder / "new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            new.rename(folder / _HELD)  # held from its first moment under this name
            yield folder
        finally:
            os.close(descriptor)


class _Stop:
    """The answer to the first stop signal, an exception in the main thread; later ones are not heard."""

    def __init__(self) -> None:
        self.make_error: Callable[[signal.Signals], BaseException] = lambda _: SystemExit(EXIT_STOPPED)

    def __call__(self, number: int, _frame: FrameType | None) -> NoReturn:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise self.make_error(signal.Signals(number))


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    stop = _Stop()
    former = {number: signal.signal(number, stop) for number in _STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
