"""Tables and indexes that are attacked under a running loader: exact data or an error by name, no SIGBUS."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.errors import ShardflowError
from shardflow.sampling import BatchSpec
from shardflow.storage.node_files import MAX_IN_MEMORY_BYTES
from tests.attacks.table_attacks import ATTACKS, TARGETS, make
from tests.forks import run
from tests.integration.loader_support import open_loader

EXECUTIONS = ("threads", "process", "workers")
NAMED = {
    "exact",
    "same file",
    "ChecksumError",
    "FormatError",
    "NotFoundError",
    "ConfigError",
    "SampleError",
    "LoaderProcessError",
}
SAMPLED = {
    "threads": [
        "truncated:samples",
        "halved:index",
        "swapped in place:series",
        "written over:studies",
        "re-encoded:attached",
        "removed:counts",
        "truncated:ids",
    ],
    "process": ["truncated:attached", "swapped in place:samples"],
    "workers": ["truncated:series"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("attacked")
    make(made)
    return made


def _attack(folder: Path, execution: str, num_bytes_in_memory: int, attacks: list[str]) -> None:
    command = ["-m", "tests.attacks.table_attacks", folder, execution, num_bytes_in_memory, *attacks]
    done = run(command)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert list(outcomes) == attacks
    assert {one: found for one, found in outcomes.items() if not set(found) <= NAMED} == {}
    # A loader whose process could not open the dataset says so once, and then that it has lost it.
    assert all(one[0] != "exact" for one in outcomes.values() if "LoaderProcessError" in one)
    tables = [one for one in attacks if one.partition(":")[2] in ("samples", "series", "studies", "attached")]
    if execution == "threads":  # what is open already cannot change any more
        assert [outcomes[one][:2] for one in tables] == [["exact", "exact"]] * len(tables)
    if num_bytes_in_memory:  # else a node file may have it
        assert not [one for one in tables if outcomes[one][2] == "exact"]


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_an_attacked_table_is_an_error_by_name_or_exact_data(folder: Path, execution: str) -> None:
    _attack(folder, execution, 0 if execution == "threads" else MAX_IN_MEMORY_BYTES, SAMPLED[execution])


@pytest.mark.parametrize("attack", ["re-encoded", "removed"])
def test_a_process_that_opens_a_changed_table_says_which(folder: Path, tmp_path: Path, attack: str) -> None:
    """It opens the dataset when the first batch is asked for, and the table was sound before."""
    url = shutil.copytree(folder / "data", tmp_path / "data")
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)
    with open_loader(str(url), spec, {"report": sf.Text()}, execution="process") as loader:
        (path,) = url.glob(TARGETS["samples"])
        ATTACKS[attack](path, path)
        with pytest.raises(
            ShardflowError, match=r"samples/samples-000001\.tbl (must have the|does not exist)"
        ):
            next(iter(loader))


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("execution", "num_bytes_in_memory"),
    [("threads", 0), *((execution, MAX_IN_MEMORY_BYTES) for execution in EXECUTIONS)],
)
def test_every_attack_on_every_table(
    folder: Path, execution: str, num_bytes_in_memory: int, target: str
) -> None:
    _attack(folder, execution, num_bytes_in_memory, [f"{attack}:{target}" for attack in ATTACKS])
