"""Story of the demo: one method a chapter, every job started by the command that a user would type.

The jobs are started and watched, one rank of one is killed, and the committed samples of both runs, the plan
and the losses are compared.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pipelines.demo import studies as settings
from pipelines.demo.picture import Resumption, draw, losses
from pipelines.demo.studies import find_studies, input_folders, write_reports
from shardflow.format import Dataset
from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics

_POLL_S = 0.03


def run_command(command: list[str], *, show_errors: bool, folder: Path) -> str:
    """Run one command to its end and return its standard output.

    Args:
        command: Program of the virtual environment and its arguments.
        show_errors: Let it draw on standard error (its progress bar); else that is shown on failure only.
        folder: Where it runs.

    Raises:
        RuntimeError: It failed; the message ends with what it said.
    """
    done = subprocess.run(
        _with_program(command),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if show_errors else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join(((done.stdout or "") + (done.stderr or "")).splitlines()[-12:])
        raise RuntimeError(f"{' '.join(command)} ended with code {done.returncode}:\n{said}")
    return done.stdout


def _with_program(command: list[str]) -> list[str]:
    """Replace the program by the one beside this interpreter, so that no activated environment is needed."""
    return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


class TrainingJob:
    """One start of ``shardflow train``, in its own process group, its text in a log file."""

    def __init__(self, command: list[str], *, run: Path, log: Path, folder: Path) -> None:
        self.run = run
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                _with_program(command),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Two ranks on two cores: more threads each would only wait for each other.
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )

    @classmethod
    @contextmanager
    def start(cls, command: list[str], *, run: Path, log: Path, folder: Path) -> Iterator[TrainingJob]:
        """Start a job; whatever of it still runs when the body ends is killed."""
        job = cls(command, run=run, log=log, folder=folder)
        try:
            yield job
        finally:
            # Looked up first: once torchrun is gone, nothing says whose its ranks were.
            for pid in (*job._descendants(), job._process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            job._process.wait()

    def wait(self, on_step: Callable[[int, float | None], None]) -> int:
        """Wait for the end of the job and report its steps on the way.

        Args:
            on_step: Called with the number of steps done over all starts of the run, and the last loss.

        Returns:
            The exit code of torchrun.
        """
        while (code := self._process.poll()) is None:
            self._report(on_step)
            time.sleep(_POLL_S)
        self._report(on_step)
        return code

    def wait_until(
        self, is_time: Callable[[int], bool], on_step: Callable[[int, float | None], None]
    ) -> bool:
        """Wait until the number of steps done is right; False if the job ended before."""
        while self._process.poll() is None:
            if is_time(self._report(on_step)):
                return True
            time.sleep(_POLL_S)
        return False

    def kill_rank(self, rank: int) -> int:
        """Kill one rank with SIGKILL, as the kernel kills a process that takes too much memory.

        Returns:
            Its process id.

        Raises:
            RuntimeError: No process of the job says that it is this rank.
        """
        for pid in self._descendants():
            with suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment and b"shardflow.training" in _command_line(pid):
                    os.kill(pid, signal.SIGKILL)
                    return pid
        raise RuntimeError(f"no process of the training job is rank {rank}; see {self.log}")

    def tail(self) -> str:
        """The last lines that the job wrote."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])

    def _report(self, on_step: Callable[[int, float | None], None]) -> int:
        steps = read_metrics(self.run)
        if not steps:
            return 0
        done = int(steps[-1]["global_step"]) + 1
        on_step(done, steps[-1]["loss"])
        return done

    def _descendants(self) -> list[int]:
        """Process ids below torchrun: torchrun gives each rank a session of its own."""
        found: list[int] = []
        pending = [self._process.pid]
        while pending:
            with suppress(OSError):
                for listing in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
                    children = [int(pid) for pid in listing.read_text().split()]
                    found += children
                    pending += children
        return found


def _command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


Slot = tuple[int, int, int, int, str | None]
"""Epoch, step, micro-batch, slot in it, and the sample's key; None for padding."""
SlotSequence = list[Slot]


def committed_sequence(run: Path) -> SlotSequence:
    """Every slot of every step that a checkpoint of the run counts, from the run's ledger."""
    return [
        (step.epoch, step.step, batch.micro, slot, key)
        for step in read_ledger(run)
        for batch in step.micro_batches
        for slot, key in enumerate(batch.keys)
    ]


def planned_sequence(plans: Iterable[tuple[int, str]], *, micro_batches_per_step: int) -> SlotSequence:
    """The same, from what ``shardflow plan --json`` printed for each epoch; fillers are nobody's samples."""
    found: SlotSequence = []
    for epoch, printed in plans:
        lines: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines()]
        found += [
            (epoch, line["step"], line["micro"], slot, key)
            for line in sorted(lines, key=lambda line: (line["step"], line["micro"]))
            if line["micro"] < micro_batches_per_step
            for slot, key in enumerate(line["keys"])
        ]
    return found


def first_difference(found: Sequence[Slot], expected: Sequence[Slot]) -> str | None:
    """Where two sequences part, in words; None where they are equal."""
    for number, (left, right) in enumerate(zip(found, expected, strict=False)):
        if left != right:
            return f"slot {number}: {left} instead of {right}"
    if len(found) != len(expected):
        return f"{len(found)} slots instead of {len(expected)}"
    return None


_REPOSITORY = Path(__file__).resolve().parents[2]
_CHAPTERS = 9
# The loss must fall to this share of its first value, or the demo fails.
_LOSS_SHARE = 0.6
_NUM_STEPS_WANTED = 64


@dataclass(frozen=True, slots=True)
class _Course:
    """How long the runs are, and when one is killed."""

    num_steps: int
    """Steps of an epoch."""

    @property
    def num_epochs(self) -> int:
        """Enough epochs for a curve that one can look at."""
        return max(8, -(-_NUM_STEPS_WANTED // self.num_steps))

    @property
    def total_steps(self) -> int:
        """Steps of a whole run."""
        return self.num_steps * self.num_epochs

    @property
    def checkpoint_after(self) -> int:
        """The only checkpoint before the end: inside the middle epoch, early in it."""
        return self.num_steps * (self.num_epochs // 2) + max(1, self.num_steps // 4)

    def is_time_to_kill(self, done: int) -> bool:
        """A little work behind the checkpoint is lost, and the kill falls inside an epoch."""
        return done >= self.checkpoint_after + 2 and done % self.num_steps != 0


class Story:
    """The demo.

    Args:
        output: Folder that all files go to; emptied first.
        console: Where the demo speaks.
        keep: Name of the one file in the folder that stays.
    """

    def __init__(self, output: Path, console: Console, *, keep: str) -> None:
        self._output = output
        self._console = console
        self._started = time.monotonic()
        self._chapter = 0
        for entry in output.iterdir():
            if entry.name != keep:
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def tell(self) -> int:
        """Run all of it.

        Returns:
            0 if everything that the demo claims holds, else 1.

        Raises:
            RuntimeError: A job failed.
        """
        self._say(f"Everything goes to {self._output}; commands below run in that folder.")
        self._write_reports()
        self._pack()
        self._verify()
        course = self._plan()
        self._prepare_training(course)
        self._train(course)
        resumption = self._train_and_kill(course)
        return self._compare(course, resumption)

    def _write_reports(self) -> None:
        self._open("Reports for studies that have none")
        folders = input_folders(_REPOSITORY)
        studies = find_studies(folders)
        kinds = Counter(study.modality for study in studies.values())
        write_reports(studies, self._output / "reports.csv")
        settings.write_pack_config(self._output / "pack.toml", folders)
        settings.write_key(self._output / "private" / "secret.key")
        self._say(
            f"Real DICOM files in {len(folders)} folders: those of pydicom's wheel"
            + (
                f" and {len(folders) - 2} of ../shared/data."
                if len(folders) > 2
                else "; ../shared/data is not here."
            )
        )
        self._say(
            "They come without reports, so the demo writes generated ones: "
            + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            + " studies."
        )

    def _pack(self) -> None:
        self._open("Pack them into WebDataset shards")
        printed = self._run("shardflow", "pack", "--config", "pack.toml", show_errors=True)
        summary: dict[str, Any] = json.loads(printed.splitlines()[-1])
        ledger = (self._output / "dataset" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, ledger) if "outcome" in row]
        outcomes = Counter(row["outcome"] for row in rows)
        reasons = Counter(row["reason"] for row in rows if row["reason"])
        self._say(
            f"{len(rows)} inputs: "
            + ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
            + "."
        )
        self._say(
            "Why not packed (every input is in the ledger with its reason): "
            + ", ".join(f"{count} {name}" for name, count in reasons.most_common())
            + "."
        )
        self._say(f"dataset_id {summary['dataset_id']}")

    def _verify(self) -> None:
        self._open("Verify every byte")
        self._say(self._run("shardflow", "verify", "dataset"))

    def _plan(self) -> _Course:
        self._open("Plan an epoch before its first step")
        command = self._plan_command(0)
        self._say(self._run(*command))
        lines = self._run(*command, "--json", show_command=False).splitlines()
        num_steps: int = json.loads(lines[-1])["step"] + 1
        if num_steps < 2:
            raise RuntimeError("an epoch has one step only, so no rank can be killed inside one")
        return _Course(num_steps)

    def _prepare_training(self, course: _Course) -> None:
        self._open("Train a tokenizer on the reports")
        command = ["shardflow", "train-tokenizer", "--dataset", "dataset"]
        self._run(*command, "--vocab-size", "384", "--output", "tokenizer")
        settings.write_train_config(
            self._output / "train.toml",
            num_epochs=course.num_epochs,
            checkpoint_every_steps=course.checkpoint_after,
        )
        self._say(
            "The model: a small vision encoder and a causal language model, from numbers in train.toml."
        )

    def _train(self, course: _Course) -> None:
        self._open("Train on 2 processes, undisturbed: the run to compare with")
        with self._job("undisturbed", 2, 1) as job, _StepBar(self._console, course.total_steps) as show:
            _finish(job, show)

    def _train_and_kill(self, course: _Course) -> Resumption:
        self._open("The same again, but one rank is killed in the middle of an epoch")
        with self._job("killed", 2, 1) as job, _StepBar(self._console, course.total_steps) as show:
            # It is written beside the steps: on a busy disk it stands some steps later.
            stands = self._output / "killed" / "checkpoints" / "latest"
            if not job.wait_until(lambda done: course.is_time_to_kill(done) and stands.is_file(), show):
                raise RuntimeError(f"the training job ended too early; see {job.log}\n{job.tail()}")
            pid = job.kill_rank(1)
            code = job.wait(show)
        done = len(read_metrics(self._output / "killed"))
        epoch, step = divmod(done, course.num_steps)
        self._say(
            f"Rank 1 (process {pid}) got SIGKILL after step {step} of {course.num_steps} in epoch {epoch}; "
            f"torchrun ended with code {code}."
        )
        self._open("Go on, on one process")
        with self._job("killed", 1, 2) as job, _StepBar(self._console, course.total_steps) as show:
            _finish(job, show)
        resumed = sum(attempt == 1 for attempt in losses(self._output / "killed").attempts)
        self._say(
            f"It went on after step {resumed}, the newest checkpoint; "
            f"{done - resumed} steps behind it were done again."
        )
        return Resumption(killed_after=done, resumed_after=resumed)

    def _compare(self, course: _Course, resumption: Resumption) -> int:
        self._open("Compare")
        killed = committed_sequence(self._output / "killed")
        undisturbed = committed_sequence(self._output / "undisturbed")
        epochs = (0, resumption.killed_after // course.num_steps, course.num_epochs - 1)
        plans = [
            (epoch, self._run(*self._plan_command(epoch), "--json", show_command=False)) for epoch in epochs
        ]
        planned = planned_sequence(plans, micro_batches_per_step=settings.MICRO_BATCHES_PER_STEP)
        of_these_epochs = [slot for slot in undisturbed if slot[0] in epochs]
        first, second = losses(self._output / "undisturbed"), losses(self._output / "killed")
        apart = max((abs(a - b) for a, b in zip(first.values, second.values, strict=False)), default=0.0)
        claims = [
            ("sequence of samples equals the undisturbed run's", first_difference(killed, undisturbed)),
            (
                "both equal what shardflow plan prints (epochs {}, {} and {})".format(*epochs),
                first_difference(of_these_epochs, planned),
            ),
            (
                f"loss falls: {second.first:.2f} -> {second.last:.2f} nats a token",
                None if second.last < _LOSS_SHARE * second.first else f"by less than {1 - _LOSS_SHARE:.0%}",
            ),
        ]
        picture = self._output / "demo.png"
        draw(Dataset.open(self._output / "dataset"), first, second, resumption, picture)
        num_samples = sum(key is not None for *_, key in killed)
        self._say(
            f"{num_samples:,} samples in {len(second.steps):,} steps of {course.num_epochs} epochs; "
            f"the losses of the two runs differ by {apart:.1e} at most."
        )
        for claim, problem in claims:
            if problem:
                self._console.print(f"  [bold red]FAILED[/]  {claim}: {problem}")
            else:
                self._console.print(f"  [bold green]holds[/]   {claim}")
        self._say(f"Look at {picture}")
        self._say(f"{time.monotonic() - self._started:.0f} seconds in all.")
        return 1 if any(problem for _, problem in claims) else 0

    # How it speaks and starts things.

    def _open(self, title: str) -> None:
        self._chapter += 1
        self._console.print(f"\n[bold]{self._chapter}/{_CHAPTERS}  {title}[/]")

    def _say(self, text: str) -> None:
        for line in text.splitlines():
            self._console.print(f"  {line}", markup=False)

    def _run(self, *command: str, show_errors: bool = False, show_command: bool = True) -> str:
        if show_command:
            self._console.print(f"  [dim]$ {' '.join(command)}[/]")
        return run_command(list(command), show_errors=show_errors, folder=self._output)

    def _plan_command(self, epoch: int) -> list[str]:
        options = {
            "split": "train",
            "seed": settings.SEED,
            "epoch": epoch,
            "micro-batch-size": settings.MICRO_BATCH_SIZE,
            "micro-batches-per-step": settings.MICRO_BATCHES_PER_STEP,
            "world-size": 2,
            "tail": settings.TAIL,
        }
        return [
            "shardflow",
            "plan",
            "dataset",
            *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        ]

    def _job(self, run: str, num_processes: int, attempt: int) -> AbstractContextManager[TrainingJob]:
        command = ["shardflow", "train", "--config", "train.toml", "--set", f"run.output={run}"]
        command += ["--nproc-per-node", str(num_processes)]
        self._console.print(f"  [dim]$ {' '.join(command)}[/]")
        log = self._output / "logs" / f"{run}-{attempt}.log"
        return TrainingJob.start(command, run=self._output / run, log=log, folder=self._output)


def _finish(job: TrainingJob, show: Callable[[int, float | None], None]) -> None:
    code = job.wait(show)
    if code:
        raise RuntimeError(f"the training job ended with code {code}; see {job.log}\n{job.tail()}")


class _StepBar:
    """A bar of the run's steps with the loss beside it; where there is no terminal, one line at the end."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._last: tuple[int, float | None] = (0, None)
        columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._progress = Progress(
            *columns,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=self._total)

    def __enter__(self) -> _StepBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        done, loss = self._last
        self._console.print(f"  {done} of {self._total} steps, {_loss_text(loss)}")

    def __call__(self, done: int, loss: float | None) -> None:
        self._last = (done, loss)
        self._progress.update(self._task, completed=done, description=_loss_text(loss))


def _loss_text(loss: float | None) -> str:
    return "no loss yet" if loss is None else f"loss {loss:.3f}"
