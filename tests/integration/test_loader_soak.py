"""Two hundred thousand samples: memory, descriptors and threads stand still; a short run of it always."""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import shardflow as sf
from shardflow.format import Dataset
from shardflow.sampling import BatchSpec
from tests.factories import make_dataset
from tests.forks import ForkedChildren
from tests.integration.loader_support import open_loader

_MIB = 1 << 20


@pytest.fixture(autouse=True)
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the loader process as users do: pages of a fork count as its own once they are written."""
    monkeypatch.setattr(ForkedChildren, "are_forked", False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    url = make_dataset(
        tmp_path_factory.mktemp("dataset") / "a", num_samples=400, samples_per_shard=50, facts=True
    )
    return Dataset.open(url)


def _memory_bytes(pids: list[int | str]) -> int:
    """Memory that belongs to no file: pages of libraries count for more when others let go of them."""
    found = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return found * 1024


def _open_files(pids: list[int | str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # the listing itself
                found[str(link.readlink())] += 1
    return found


def _soak(dataset: Dataset, num_samples: int, **settings: Any) -> None:
    """Iterate; compare what the first and the last fifth of the run take, after a warm-up."""
    spec = BatchSpec(micro_batch_size=16, micro_batches_per_step=2, tail="mask")
    fields = {"image": sf.Slices(num_slices=2, size=(16, 16), sampling="random"), "report": sf.Text()}
    with open_loader(dataset, spec, fields, prefetch_bytes=2 * _MIB, **settings) as loader:
        per_epoch = 400
        for _ in range(4):
            for batch in loader:
                assert batch.num_slots
        processes = loader._runtime.processes
        pids: list[int | str] = ["self", *(processes.pids if processes is not None else ())]
        memory: list[int] = []
        descriptors: list[Counter[str]] = []
        num_done = 0
        while num_done < num_samples:
            for batch in loader:
                assert batch.num_slots
            num_done += per_epoch
            gc.collect()
            memory.append(_memory_bytes(pids))
            descriptors.append(_open_files(pids))
        # As many as may be under way, those in the pool, and what the loop holds.
        assert loader.num_buffers_allocated <= 3 * loader.config.prefetch_bytes // (64 << 10)
    fifth = max(len(memory) // 5, 1)
    # Only what grows counts: stores of earlier tests in this process may be collected at any time.
    assert descriptors[-1].total() <= max(each.total() for each in descriptors[:fifth]) + 2, (
        descriptors[-1] - descriptors[0]
    )
    growth = statistics.median(memory[-fifth:]) - statistics.median(memory[:fifth])
    # What an allocator holds on to settles in the first ten thousand samples. One buffer of 64 KiB kept in
    # every fourth batch would be 8 MiB in the short run.
    assert growth < _MIB * max(num_samples / 10_000, 8.0)


@pytest.mark.parametrize("execution", ["threads", "process"])
def test_memory_and_descriptors_stand_still(dataset: Dataset, execution: str) -> None:
    _soak(dataset, 8_000, execution=execution)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["threads", "process"])
def test_memory_and_descriptors_stand_still_for_long(dataset: Dataset, execution: str) -> None:
    _soak(dataset, 200_000, execution=execution)
