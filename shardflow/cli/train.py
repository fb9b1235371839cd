"""``shardflow train``: torchrun, with an exit code that schedulers can act on; ``doctor``: a check before it.

torchrun turns every exit code of a rank into 1; this launcher exits with the code that the failed ranks of
this machine share (2, 75), so that Kubernetes and SLURM can tell whether to restart the job. It passes
the first stop signal on to the ranks, SIGUSR1 as well as SIGTERM, and no later one: SLURM may send several,
and torchrun abandons its ranks at the third. It handles signals from its start, with 75 as the answer, even
as process 1 of a container, which the kernel shields from signals that nobody handles.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from shardflow.cli.common import add_json, positive_number, show_lines, write_json
from shardflow.logs import counted
from shardflow.training import __main__ as job
from shardflow.training.__main__ import CODES_VARIABLE, EXIT_FAILED, EXIT_STOPPED, RANK_MARK

if TYPE_CHECKING:
    from shardflow.training.doctor import Finding


DESCRIPTION: Final = """\
Trains a vision encoder and a language model on the studies and reports of a dataset. With --nproc-per-node
or another option of torchrun, torchrun starts the processes of this machine, one a GPU (or a share of the
CPUs); without, the job runs as one process. Copy pipelines/recipes/train_reports_cpu.toml or
train_reports_gpus.toml to begin a FILE.

Start the same command again to resume from the newest checkpoint, with any number of processes up to
batch.micro_batches_per_step. Progress goes to standard error; the last line of standard output is one JSON
object, written by rank 0.
"""
EXAMPLES: Final = """\
examples:
  shardflow train --config my-training.toml --print-config
  shardflow train --config my-training.toml --nproc-per-node 2
  shardflow train --config my-training.toml --nproc-per-node 8 --set run.num_epochs=8
  shardflow train --config my-training.toml --nproc-per-node 8 --tune on
  shardflow train --config my-training.toml --nnodes 4 --nproc-per-node 8 --rdzv-endpoint node-0:29400
  shardflow train --config my-training.toml --propose-micro-batch
  shardflow train --config my-training.toml --plan-memory 8,64
  shardflow train --config my-preferences.toml --nproc-per-node 8 --store-reference

exit codes: 0 finished; 1 failed, the log says why; 2 a setting is wrong, the checkpoint is of another run, or
three starts in a row made no progress; 75 stopped by SIGTERM or SIGUSR1 with a checkpoint: start again to
resume.

Under another launcher each rank is: python -m shardflow.training --config FILE
"""

_NODES: Final = (
    ("--nnodes", "N", "machines of the job (1)"),
    ("--node-rank", "I", "number of this machine, for a static rendezvous"),
    ("--rdzv-backend", "NAME", "how the machines find each other (c10d)"),
    ("--rdzv-endpoint", "HOST:PORT", "where they do: a machine of the job"),
    ("--rdzv-id", "ID", "name of the job, the same on all machines"),
    ("--rdzv-conf", "K=V,...", "more settings of it, such as join_timeout=600"),
    ("--local-addr", "ADDRESS", "address of this machine for the others"),
    ("--master-addr", "HOST", "machine of rank 0, for a static rendezvous"),
    ("--master-port", "PORT", "its port"),
)
_PROCESSES: Final = (
    ("--nproc-per-node", "N", "processes on this machine, or auto: one a GPU (1)"),
    ("--max-restarts", "N", "how often torchrun restarts all ranks after one failed (0)"),
    ("--monitor-interval", "S", "seconds between its looks at the ranks"),
    ("--shutdown-timeout", "S", "seconds that stopped ranks have before SIGKILL"),
    ("--log-dir", "FOLDER", "where the output of each rank goes, with --redirects or --tee"),
    ("--redirects", "WHAT", "write the output of ranks to files: 1 standard output, 2 error, 3 both"),
    ("--tee", "WHAT", "the same, and show it"),
)
_PREFIX, _HELD = "shardflow-launch-", "held"
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_DEFAULTS: Final = {
    # torchrun's agents share a store that the first round's rank 0 holds; without this machine no other round
    # would begin, and a machine that joins later would not find it.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # Those that are not ours: a handler of torchrun's own would take the place of ours when the ranks start.
    "PET_SIGNALS_TO_HANDLE": "SIGQUIT",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow train``."""
    job.add_arguments(parser)
    add_torchrun_arguments(parser)


def add_torchrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that are passed to torchrun."""
    group = parser.add_argument_group("options of torchrun")
    for option, metavar, meaning in (*_PROCESSES, *_NODES):
        group.add_argument(option, metavar=metavar, help=meaning)
    group.add_argument(
        "--standalone",
        action="store_true",
        help="this machine alone; so by default without the options of several",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the job, under torchrun where one of its options is given; returns the exit code."""
    options = torchrun_options(arguments)
    is_asked = arguments.print_config or arguments.propose_micro_batch or arguments.plan_memory
    if not options or is_asked:
        return job.run(arguments)
    return launch([*options, "-m", "shardflow.training", *_job_options(arguments)])


def torchrun_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options of torchrun that were given; none for a job of one process."""

    def given(options: Sequence[tuple[str, str, str]]) -> list[str]:
        values = (
            (name, getattr(arguments, name.removeprefix("--").replace("-", "_"))) for name, _, _ in options
        )
        return [f"{name}={value}" for name, value in values if value is not None]

    processes, nodes = given(_PROCESSES), given(_NODES)
    # Without a rendezvous of its own, two jobs on a machine would meet at torchrun's port.
    is_alone = arguments.standalone or (processes and not nodes)
    return [*(["--standalone"] if is_alone else []), *nodes, *processes]


def _job_options(arguments: argparse.Namespace) -> list[str]:
    options = [f"--config={arguments.config}", *(f"--set={override}" for override in arguments.overrides)]
    adopts = arguments.adopt_new_versions
    options += [f"--adopt-new-versions={adopts}"] if adopts else []
    options += ["--store-reference"] if arguments.store_reference else []
    return [*options, *([f"--tune={arguments.tune}"] if arguments.tune else [])]


def launch(argv: Sequence[str]) -> int:
    """Run torchrun in this process.

    Args:
        argv: torchrun's arguments.

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
            os.environ[CODES_VARIABLE] = str(folder)
            try:
                torchrun.main([*_log_options(argv, folder), *argv])
            except ChildFailedError as error:
                return code_of_failures([failure.exitcode for failure in error.failures.values()])
            except SignalException:
                return code_after_stop(folder)
    return 0


def _log_options(argv: Sequence[str], folder: Path) -> list[str]:
    """Name a folder for torchrun's log folders, which it never removes, unless output is redirected there."""
    options = takewhile(lambda word: word.startswith("--"), argv)
    are_wanted = any(word.startswith(("--log-dir", "--redirects", "--tee")) for word in options)
    are_wanted |= any(f"PET_{name}" in os.environ for name in ("LOG_DIR", "REDIRECTS", "TEE"))
    return [] if are_wanted else [f"--log-dir={folder / 'logs'}"]


def code_of_failures(codes: Collection[int]) -> int:
    """Reduce the exit codes that torchrun saw after a rank of this machine failed to one.

    torchrun then ends the other ranks: by SIGTERM one that had not begun, with 75 one that had. Neither
    code tells why the job failed.

    Args:
        codes: Of every rank that did not finish; -N for one that signal N ended.

    Returns:
        The code that the causes share; 1 if they differ or a signal is among them.
    """
    answers = {EXIT_STOPPED, -signal.SIGTERM}
    return _only(set(codes) - answers or set(codes) - {-signal.SIGTERM})


def code_after_stop(folder: Path) -> int:
    """Reduce the exit codes that the ranks of this machine reported after a stop signal to one.

    Only the last attempt counts. A rank without a code had not begun, or was killed as too slow; a restart
    is right either way.

    Args:
        folder: Folder of the reported codes.

    Returns:
        75 if no rank failed, else the code that all failures share, else 1.
    """
    attempts: dict[int, set[int]] = {}
    for path in folder.glob(f"*{RANK_MARK}*"):
        attempts.setdefault(int(path.name.split("-")[0]), set()).add(int(path.read_text(encoding="ascii")))
    codes = attempts[max(attempts)] if attempts else set()
    return EXIT_STOPPED if codes <= {0, EXIT_STOPPED} else _only(codes)


def _only(codes: set[int]) -> int:
    """The single code of a set, if it is one that a failed rank left with; 1 for anything else."""
    return next(iter(codes)) if len(codes) == 1 and min(codes) > 0 else EXIT_FAILED


@contextmanager
def folder_of_codes() -> Iterator[Path]:
    """A folder for the codes of the ranks; those that killed launchers left behind are removed.

    A launcher's lock is released however it ends.
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
    """Raised in the main thread by the first stop signal; later ones are ignored."""

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


DOCTOR_DESCRIPTION = """\
Looks at the environment of a training job, on the machine and in the container where it will run: variables
of NCCL and torch that nothing reads or that have old names or wrong values, network interfaces and adapters,
ulimits, /dev/shm, cores for each rank, memory for pinned buffers, free disk, versions with known holes,
torchrun's settings. With --config, also what the run's own settings ask of the machine.

Each line says what must hold, what was found, and the fix. Exit code 0: nothing is wrong, apart from
warnings. 1: something is, marked "error".
"""
DOCTOR_EXAMPLES = """\
examples:
  shardflow doctor
  shardflow doctor --config my-training.toml --nodes 4 --ranks-per-node 8
  shardflow doctor --json --allow NCCL_MY_PLUGIN_MODE
"""
_MARKS = {"error": "error  ", "warning": "warning", "ok": "ok     "}


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow doctor``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings of the run, TOML")
    parser.add_argument(
        "--nodes", type=positive_number, default=1, metavar="N", help="machines of the job (1)"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=positive_number,
        metavar="R",
        help="ranks on each (a rank a GPU of this machine)",
    )
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable that only a plugin reads, and is left alone (repeatable)",
    )
    parser.add_argument("--quiet", action="store_true", help="leave out what is as it must be")
    add_json(parser)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or 1 if a check fails."""
    from shardflow.config import load_config
    from shardflow.training.config import TrainConfig
    from shardflow.training.doctor import examine, inspect_environment

    config = load_config(TrainConfig, arguments.config) if arguments.config else None
    environment = inspect_environment(
        config, num_nodes=arguments.nodes, ranks_per_node=arguments.ranks_per_node
    )
    findings = examine(environment, allowed=arguments.allow)
    counts = Counter(finding.level for finding in findings)
    if arguments.json:
        for finding in findings:
            write_json(asdict(finding))
    else:
        shown = [finding for finding in findings if finding.level != "ok" or not arguments.quiet]
        show_lines(map(_describe, sorted(shown, key=lambda finding: list(_MARKS).index(finding.level))))
        wrong = f"{counted(counts['error'], 'error')}, {counted(counts['warning'], 'warning')}"
        show_lines([f"{wrong}, {counts['ok']} as they must be"])
    return EXIT_FAILED if counts["error"] else 0


def _describe(finding: Finding) -> str:
    line = f"{_MARKS[finding.level]} {finding.topic} must {finding.must}, got {finding.found}"
    return f"{line}; {finding.fix}" if finding.fix else line
