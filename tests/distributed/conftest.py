"""One start of ranks for all scenarios, whichever pytest worker asks first."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import job
from tests.tiny_runs import TinyInput, make_tiny_input

SCENARIOS_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Scenarios:
    """What the four ranks of ``scenarios.py`` left behind."""

    tiny: TinyInput
    output: Path
    by_rank: list[dict[str, Any]]

    def of(self, name: str) -> list[dict[str, Any]]:
        """Results of one scenario in rank order."""
        return [results[name] for results in self.by_rank]


@pytest.fixture(scope="session")
def scenarios(shared_folder: Path) -> Scenarios:
    """Run the scenarios once a session; the other worker waits for them."""
    folder = shared_folder / "scenarios"
    folder.mkdir(exist_ok=True)
    source, output, done = folder / "input", folder / "output", folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            source.mkdir()
            output.mkdir()
            make_tiny_input(source)
            arguments = [str(source), str(output)]
            with job(
                folder, "tests.distributed.scenarios", arguments, num_ranks=4, is_forked=True
            ) as running:
                finished = running.wait(SCENARIOS_TIMEOUT_S)
            assert finished.exit_code == 0, finished.text
            done.touch()
    results = [json.loads((output / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    return Scenarios(TinyInput(source), output, results)
