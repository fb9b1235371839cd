"""The loaders of a node stay within one cap, and are refused at the start where they might not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardflow.errors import ConfigError
from shardflow.fields.types.pictures import Slices
from shardflow.fields.types.text import Text
from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig, World
from shardflow.loading.config import rank_num_bytes
from shardflow.sampling import BatchSpec
from shardflow.storage import CacheConfig, RemoteStore
from shardflow.telemetry.process import machine_bytes
from tests.factories import make_dataset
from tests.forks import command_server, run

NUM_RANKS = 2
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4)
FIELDS = {"image": Slices(num_slices=2, size=(16, 16)), "report": Text(missing="pad")}
CACHE = CacheConfig(ram_bytes=60_000, read_ahead_bytes=20_000, block_bytes=4096)
_RANK = """
import json, sys
from tests.integration.test_node_memory import open_loader
with open_loader(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) as loader:
    kept = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        for batch in loader:
            kept.append(loader.dataset.cache.memory.num_bytes)
    seen = loader.counters.snapshot()
    print(json.dumps({
        "num_batches": len(kept),
        "buffered": seen["buffered_bytes"]["most"],
        "fetching": seen["fetching_bytes"]["most"],
        "kept": max(kept),
    }))
"""


def config(max_node_bytes: int) -> LoaderConfig:
    return LoaderConfig(
        prefetch_bytes=300_000, read_bytes=10_000, max_node_bytes=max_node_bytes, num_threads=2
    )


def open_loader(url: str, rank: int, max_node_bytes: int) -> Loader:
    world = World(rank=rank, world_size=NUM_RANKS, ranks_per_node=NUM_RANKS)
    dataset = Dataset.open(url, cache=CACHE)
    return Loader(
        dataset,
        split="train",
        batch=SPEC,
        seed=3,
        fields=FIELDS,
        world=world,
        config=config(max_node_bytes),
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(
        tmp_path_factory.mktemp("dataset") / "a", num_samples=40, samples_per_shard=6, facts=True
    )


# Of a rank: batches twice, two threads, the cache's memory and what it fetches.
RANK_BYTES = 2 * 300_000 + 2 * 10_000 + 60_000 + 20_000


def test_the_ranks_of_a_node_stay_within_its_cap(url: str) -> None:
    arguments = [["-c", _RANK, url, rank, NUM_RANKS * RANK_BYTES] for rank in range(NUM_RANKS)]
    total = 0
    command_server()  # before two threads ask for it
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for process in pool.map(run, arguments):
            assert process.returncode == 0, process.stderr
            found = json.loads(process.stdout)
            assert found["num_batches"] == 2 * 10  # of the 20 in each of two epochs
            assert 0 < found["buffered"] <= 300_000
            assert 0 < found["fetching"] <= CACHE.read_ahead_bytes
            assert 0 < found["kept"] <= CACHE.ram_bytes
            total += 2 * found["buffered"] + found["fetching"] + found["kept"]
    assert total <= NUM_RANKS * RANK_BYTES


@pytest.mark.fast
def test_settings_that_could_pass_the_cap_are_refused_before_a_byte_is_read(url: str) -> None:
    open_loader(url, 0, NUM_RANKS * RANK_BYTES).close()
    refusal = r"at most 0\.0014 GB \(max_node_bytes\), got 0\.0014 GB: 2 rank.*prefetch_bytes, twice"
    with pytest.raises(ConfigError, match=refusal):
        open_loader(url, 0, NUM_RANKS * RANK_BYTES - 1)
    # One rank of the same settings fits.
    one = config(RANK_BYTES)
    Loader(Dataset.open(url, cache=CACHE), split="train", batch=SPEC, seed=3, fields={}, config=one).close()


@pytest.mark.fast
def test_without_a_cap_the_memory_of_the_machine_is_the_cap(url: str) -> None:
    dataset, half = Dataset.open(url), machine_bytes() // 2
    with pytest.raises(ConfigError, match=r"memory of this machine or its cgroup\), got"):
        Loader(
            dataset,
            split="train",
            batch=SPEC,
            seed=3,
            fields={},
            config=LoaderConfig(prefetch_bytes=half + 1),
        )
    with pytest.raises(ConfigError, match=r"max_node_bytes must be at most the .* GB of memory"):
        Loader(
            dataset,
            split="train",
            batch=SPEC,
            seed=3,
            fields={},
            config=LoaderConfig(max_node_bytes=machine_bytes() + 1),
        )
    with pytest.raises(ConfigError, match="max_node_bytes must be at least 0 bytes, got -1"):
        LoaderConfig(max_node_bytes=-1)


@pytest.mark.fast
def test_workers_have_a_cache_each_and_a_store_its_answers(url: str) -> None:
    cached = Dataset.open(url, cache=CACHE)
    parts = rank_num_bytes(LoaderConfig(execution="workers", num_threads=3), [cached, cached])
    assert parts["ram_bytes of the cache"] == 3 * CACHE.ram_bytes
    assert parts["read_ahead_bytes of the cache"] == 3 * CACHE.read_ahead_bytes
    assert parts["answers of the store"] == 0
    assert RemoteStore("http://127.0.0.1:9/a").answer_bytes() == 16 * (8 << 20)
