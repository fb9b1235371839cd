"""A folder with texts, a recipe and a key, for tests of the corpus job; also its driver and its faults.

Run as ``python -m tests.corpora_case CONFIG POINT MODE [inline]`` it packs, and kills its own process group
at the point, see `tests.pack_driver`. `make_handler` makes packing processes fail as ``faults.json`` says:
``pack`` or ``scan``, then the number of a part, then ``kill``, ``kill_once``, ``kill_even_counts`` (also
where its lines are only counted), ``raise``, ``eat`` or ``group`` (kill -9 of the whole job when the part is
done, before the job knows).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from shardflow.config import load_config
from shardflow.format import Dataset
from shardflow.format.ledger import LineOutcomes
from shardflow.format.table import Table
from shardflow.packing.corpora.config import CorpusConfig
from shardflow.packing.corpora.job import CorpusMode, CorpusSummary, pack_corpus
from shardflow.packing.corpora.parts import HANDLERS
from shardflow.packing.corpora.parts import make_handler as make_real_handler
from shardflow.packing.engines.worker import Handler
from tests.forks import run
from tests.inline_engine import is_packing_inline, packing_inline

__all__ = ["FAULTY", "CorpusCase", "make_handler", "make_lines"]

FAULTY = "tests.corpora_case:make_handler"

_TOML = """
output = "out"
private_dir = "private"
[inputs]
files = ["texts"]
[splits]
parts = { train = 8, val = 1, test = 1 }
[shards]
target_bytes = "64KiB"
part_bytes = "12KiB"
[policy]
max_quarantined_share = 0.2
[deid]
text = "keep"
[execution]
num_processes = 1
task_timeout_s = 600
"""


def make_lines(count: int, seed: int, **others: Any) -> list[bytes]:
    """Make lines of JSON with texts that differ."""
    rng = random.Random(seed)
    return [
        json.dumps({"text": f"{seed}.{n} " + "clear " * rng.randrange(1, 30), **others}).encode()
        for n in range(count)
    ]


class CorpusCase:
    """The folder of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def texts(self) -> Path:
        return self.folder / "texts"

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def config_path(self) -> Path:
        return self.folder / "corpus.toml"

    def prepare(self) -> None:
        """Write the settings and a key that is the same in every test."""
        self.texts.mkdir(parents=True)
        self.private.mkdir(mode=0o700)
        key = self.private / "secret.key"
        key.touch(mode=0o600)
        key.write_bytes(hashlib.sha256(b"a key for tests").digest())
        self.config_path.write_text(_TOML, encoding="utf-8")

    def write(self, name: str, lines: list[bytes], end: bytes = b"\n") -> Path:
        """Write lines to a file of the inputs."""
        path = self.texts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(line + end for line in lines))
        return path

    def write_faults(self, **faults: dict[str, str]) -> None:
        """Tell `make_handler` what to do."""
        (self.folder / "faults.json").write_text(json.dumps(faults), encoding="utf-8")

    def config(self, *overrides: str) -> CorpusConfig:
        return load_config(CorpusConfig, self.config_path, overrides)

    def pack(self, *overrides: str, mode: CorpusMode = "pack", handlers: str = HANDLERS) -> CorpusSummary:
        """Run the job in this process."""
        return pack_corpus(self.config(*overrides), mode=mode, handlers=handlers)

    def command(self, point: str, mode: CorpusMode = "pack") -> list[str]:
        """Return the command that runs the job in a process of its own."""
        return [sys.executable, "-m", "tests.corpora_case", str(self.config_path), point, mode]

    def drive(self, point: str, mode: CorpusMode = "pack") -> subprocess.CompletedProcess[str]:
        """Run the job in a process group of its own that is killed at a named point."""
        inline = ["inline"] if is_packing_inline() else []
        return run([*self.command(point, mode)[1:], *inline])

    def outcomes(self) -> LineOutcomes:
        """Open the outcomes of the newest version."""
        entry = Dataset.open(self.output).manifest.line_outcomes
        assert entry is not None
        return LineOutcomes(Table(memoryview((self.output / entry.path).read_bytes()), name=entry.path))

    def texts_of(self, split: str | None = None) -> list[str]:
        """Return the texts of the dataset, sorted."""
        dataset = Dataset.open(self.output)
        rows = range(dataset.samples.num_samples) if split is None else dataset.splits[split]
        return sorted(dataset.read_fields(row)["report.txt"].decode() for row in rows)


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the handler of a packing process that fails on purpose."""
    folder = Path(setup["output"]).parent
    faults: dict[str, dict[str, str]] = json.loads((folder / "faults.json").read_text(encoding="utf-8"))
    real = make_real_handler(setup)

    def handle(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        fault = faults.get(kind, {}).get(str(payload.get("number")), "")
        if payload.get("failed"):  # nothing of the input is parsed then, and at last nothing is touched
            fault = "kill" if fault == "kill_even_counts" and payload["is_counted"] else ""
        if fault.endswith("_once"):
            mark = folder / f"{kind}.{fault}.done"
            fault = "" if mark.exists() else fault.removesuffix("_once")
            mark.touch()
        if fault in {"kill", "kill_even_counts"}:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("DOE^JANE 19700101")
        if fault == "eat":
            hoard = [bytearray(1 << 26) for _ in range(1 << 10)]
            raise AssertionError(len(hoard))
        result = real(kind, payload)
        if fault == "group":
            os.killpg(0, signal.SIGKILL)
        return result

    return handle


def main() -> None:
    """Run the job."""
    from shardflow.packing.workspace import Workspace
    from tests.pack_driver import KillingProgress, kill_group

    config, point, mode, *inline = sys.argv[1:]
    if point == "cleaning":
        setattr(Workspace, "remove_work", lambda _: kill_group())  # noqa: B010
    handlers = FAULTY if (Path(config).parent / "faults.json").exists() else HANDLERS
    with packing_inline() if inline else nullcontext():
        pack_corpus(
            load_config(CorpusConfig, config),
            KillingProgress(point),
            mode=cast(CorpusMode, mode),
            handlers=handlers,
        )


if __name__ == "__main__":
    main()
