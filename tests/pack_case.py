"""A packing job in a test's folder: inputs, settings, and ways to run it."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardflow.config import load_config
from shardflow.format.checks.verification import verify
from shardflow.format.dataset import Dataset
from shardflow.packing import ArrayTask, PackConfig, PackSummary, pack
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.job import PackMode
from shardflow.packing.versions.files import ledger_path
from tests.forks import PATIENCE_S, REPOSITORY, run
from tests.inline_engine import is_packing_inline
from tests.pack_faults import HELD

__all__ = ["IN_PROCESSES", "PATIENCE_S", "REPOSITORY", "PackCase", "read_ledger", "tree_digests"]

IN_PROCESSES = "shardflow.packing.handlers:make_handler"
"""Handlers of studies by their place: never inline, see `tests.inline_engine`."""

_TOML = """
output = "out"
private_dir = "private"
[inputs]
dicom = ["dicom"]
{reports}
[splits]
train = 60
val = 40
[shards]
target_bytes = "10KiB"
[execution]
num_processes = 1
memory_bytes = "1GiB"
task_timeout_s = 600
"""


@dataclass(frozen=True, slots=True)
class PackCase:
    """Folders of one test: ``dicom`` (inputs), ``out`` (dataset), ``private``, ``pack.toml``."""

    folder: Path

    @property
    def dicom(self) -> Path:
        return self.folder / "dicom"

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def config_path(self) -> Path:
        return self.folder / "pack.toml"

    @property
    def key(self) -> SecretKey:
        return SecretKey.load(self.private / "secret.key")

    def prepare(self, *, has_reports: bool = False) -> None:
        """Write the settings and a key that is the same in every test."""
        self.dicom.mkdir(exist_ok=True)
        self.private.mkdir(mode=0o700, exist_ok=True)
        key = self.private / "secret.key"
        key.touch(mode=0o600)
        key.write_bytes(hashlib.sha256(b"a key for tests").digest())
        self.config_path.write_text(
            _TOML.format(reports='reports = "reports.csv"' if has_reports else ""), encoding="utf-8"
        )

    def write_reports(self, texts: Mapping[str, str] | list[tuple[str, str]]) -> None:
        """Write the table of reports: study instance UID and text."""
        rows = texts.items() if isinstance(texts, Mapping) else texts
        with (self.folder / "reports.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["study_instance_uid", "text"])
            writer.writerows(rows)

    def write_faults(self, **faults: Any) -> None:
        """Tell `tests.pack_faults` what to do."""
        (self.folder / "faults.json").write_text(json.dumps(faults), encoding="utf-8")

    def config(self, *overrides: str) -> PackConfig:
        return load_config(PackConfig, self.config_path, overrides)

    def pack(
        self,
        *overrides: str,
        mode: PackMode = "pack",
        is_dry_run: bool = False,
        array_task: ArrayTask | None = None,
        is_merge: bool = False,
        handlers: str = "studies",
    ) -> PackSummary:
        """Run the job in this process."""
        return pack(
            self.config(*overrides),
            mode=mode,
            is_dry_run=is_dry_run,
            array_task=array_task,
            is_merge=is_merge,
            handlers=handlers,
        )

    def drive(
        self, point: str, handlers: str = "studies", mode: PackMode = "pack"
    ) -> subprocess.CompletedProcess[str]:
        """Run the job in a process group of its own that is killed at a named point."""
        inline = ["inline"] if is_packing_inline() else []
        return run(["-m", "tests.pack_driver", self.config_path, point, handlers, mode, *inline])

    def kill_at_random(self, times: int, *, num_processes: int, mode: PackMode = "pack") -> None:
        """Start the command again and again, and kill its whole process group after a random time."""
        waits = random.Random(num_processes)
        arguments = ["--config", str(self.config_path), "--set", f"execution.num_processes={num_processes}"]
        arguments += [] if mode == "pack" else [f"--{mode}"]
        for _ in range(times):
            with subprocess.Popen(
                [sys.executable, "-m", "pipelines.pack", *arguments],
                cwd=REPOSITORY,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as job:
                until = time.monotonic() + waits.uniform(0.3, 4.0)
                while job.poll() is None and time.monotonic() < until:
                    time.sleep(0.01)
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)

    def wait_until_held(self, job: subprocess.Popen[Any]) -> int:
        """Wait until a process holds, see `tests.pack_faults`; return its process id."""
        until = time.monotonic() + PATIENCE_S
        while not (self.folder / HELD).exists():
            if job.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"no process held, the job has ended with {job.poll()}")
            time.sleep(0.05)
        return int((self.folder / HELD).read_text(encoding="ascii"))

    def command(self, *arguments: str, cwd: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
        """Run ``shardflow pack``, inline where jobs of this process are."""
        module = "tests.inline_engine" if is_packing_inline() else "shardflow.cli.main"
        return run(["-m", module, "pack", "--config", self.config_path, *arguments], cwd=cwd)

    def sample_key(self, study_instance_uid: str) -> str:
        return self.key.surrogate("study", study_instance_uid)

    def open(self) -> Dataset:
        """Open the dataset after every byte of it was verified."""
        report = verify(str(self.output))
        assert not report.damages, report.damages
        return Dataset.open(self.output)


def read_ledger(output: Path, version: int = 1) -> list[dict[str, Any]]:
    """Read the inputs of a version's ledger, without its closing line."""
    lines = (output / ledger_path(version)).read_text(encoding="ascii").splitlines()
    return [row for row in map(json.loads, lines) if "outcome" in row]


def tree_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
