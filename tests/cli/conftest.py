"""A small dataset, and the console script called in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli.main import main
from tests.factories import make_dataset


@dataclass(frozen=True, slots=True)
class Called:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Standard output as JSON, one object a line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def last_line(self) -> dict[str, Any]:
        """The JSON object in the last line of standard output."""
        last: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return last


Call = Callable[..., Called]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """``call("info", dataset, "--json")`` runs the console script."""

    def run(*arguments: object) -> Called:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Called(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "dataset"
    make_dataset(path, splits={"train": 13, "val": 3}, samples_per_shard=5)
    return path


@pytest.fixture
def dataset(_made: Path, tmp_path: Path) -> Path:
    """13 samples in ``train``, 3 in ``val``; the test may damage it."""
    return shutil.copytree(_made, tmp_path / "dataset")
