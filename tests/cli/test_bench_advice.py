"""``shardflow bench``: what it says of measured rates, and how it tells a disk from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import bench_limits
from pipelines.bench_advice import advise
from pipelines.bench_limits import Extent, drop_from_memory, read_extents, scratch_extent

pytestmark = pytest.mark.fast


def _facts(**rates: float) -> dict[str, Any]:
    """Facts of a quiet machine of four processors, 100 MB stored for 100 samples."""
    results = {
        name: {"samples_per_s": rate, "stored_mb_per_s": rate, "spread": 0.01} for name, rate in rates.items()
    }
    return {
        "results": results,
        "limit": min((name for name in ("cat", "decode") if name in rates), key=lambda name: rates[name]),
        "share_of_limit": rates["batches"] / min(rates["cat"], rates.get("decode", rates["cat"])),
        "tier": "local",
        "threads": 4,
        "processors": 4,
        "load_before": 0.1,
        "codecs": ["b2nd"],
        "slices": 1000,
        "cache": None,
        "dataset_bytes": 10 << 30,
        "memory_bytes": 64 << 30,
        "scaling": [{"threads": 1, "samples_per_s": 25.0}, {"threads": 4, "samples_per_s": 95.0}],
        "stages": {"read": 1.0, "decode": 5.0},
        "need_samples_per_s": 0,
    }


def test_what_decoding_limits_needs_processors() -> None:
    (only,) = advise(_facts(cat=900, decode=100, batches=95))
    assert only.startswith(
        "Decode-bound: 4 threads decode 100 samples/s; the local store gives bytes for 900"
    )
    assert "More or faster processors" in only


def test_a_slow_codec_is_named() -> None:
    facts = _facts(cat=900, decode=100, batches=95)
    assert any("stored as htj2k;" in line for line in advise({**facts, "codecs": ["b2nd", "htj2k"]}))


def test_what_a_remote_store_limits_needs_a_cache_of_its_size() -> None:
    facts = _facts(cat=50, decode=100, batches=48, disk=400)
    (only,) = advise({**facts, "tier": "s3"})
    assert only.startswith("Storage-bound: the s3 store gives 50 MB/s")
    assert "A cache of 10.0 GiB" in only
    assert "the disk here gives bytes for 400 samples/s" in only


def test_a_local_store_that_limits_needs_no_cache() -> None:
    (only,) = advise(_facts(cat=50, decode=100, batches=48))
    assert "more processors do not" in only
    assert "cache of" not in only


def test_data_without_slices_is_not_called_storage_bound_by_decoding() -> None:
    (only,) = advise(_facts(cat=50, batches=48))
    assert only.startswith("Nothing is decoded here")


def test_batches_far_below_both_limits_name_the_stage() -> None:
    assert any("stage decode" in line for line in advise(_facts(cat=900, decode=100, batches=40)))


@pytest.mark.parametrize(("memory_gib", "expected"), [(64, "later ones come from the page"), (8, "NVMe")])
def test_a_slow_disk_matters_by_the_memory_there_is(memory_gib: int, expected: str) -> None:
    facts = _facts(cat=900, decode=100, batches=95, disk=30) | {"memory_bytes": memory_gib << 30}
    assert any(expected in line for line in advise(facts))


def test_threads_that_bring_little_are_told() -> None:
    scaling = [{"threads": 2, "samples_per_s": 50.0}, {"threads": 4, "samples_per_s": 55.0}]
    facts = _facts(cat=900, decode=100, batches=95) | {"scaling": scaling}
    assert any("4 threads bring 1.10 times what 2 bring" in line for line in advise(facts))


@pytest.mark.parametrize(
    ("need", "cat", "expected"),
    [(90, 900, "need not wait"), (380, 900, "about 16 processors"), (190, 50, "storage of about 190 MB/s")],
)
def test_what_is_needed_becomes_what_to_buy(need: int, cat: float, expected: str) -> None:
    facts = _facts(cat=cat, decode=100, batches=min(95, cat)) | {"need_samples_per_s": need}
    assert any(expected in line for line in advise(facts))


def test_an_uneven_run_is_not_trusted() -> None:
    facts = _facts(cat=900, decode=100, batches=95)
    facts["results"]["cat"]["spread"] = 0.5
    assert advise(facts)[0].startswith("The rounds differ widely")
    facts["results"]["cat"]["spread"] = 0.0
    assert advise(facts | {"load_before": 3.5})[0].startswith("The machine was busy")


def test_extents_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_limits, "READ_BYTES", 64)
    payloads = [np.arange(100, dtype=np.uint8), np.arange(200, dtype=np.uint8)]
    with scratch_extent(iter(payloads), tmp_path) as extents:
        (extent,) = extents
        assert (extent.start, extent.stop) == (0, 300)
        buffer = np.zeros(64, np.uint8)
        read_extents(extents, buffer)
        assert buffer[:44].tolist() == list(range(156, 200))  # the last 44 of 64 x 4 + 44
    assert not extent.path.exists()


def test_what_lies_in_memory_is_not_called_a_disk(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.fail("Linux without /dev/shm")
    with scratch_extent(iter([np.ones(1 << 20, np.uint8)]), shared) as extents:
        assert not drop_from_memory(extents)
    path = tmp_path / "a"
    path.write_bytes(b"1" * 8192)
    drop_from_memory([Extent(path, 0, 8192)])  # whatever it finds, the bytes stay
    assert path.read_bytes() == b"1" * 8192


def test_texts_alone_need_larger_micro_batches_and_stored_tokens() -> None:
    facts = {**_facts(cat=90_000, batches=8_000), "slices": 0, "micro_batch_size": 64}
    first, second = advise({**facts, "tokens": None})
    assert first.startswith("Texts alone: the loader delivers 8,000 samples/s in micro-batches of 64")
    assert "shardflow tokenize DATASET" in second
    facts["results"]["tokens"] = {"samples_per_s": 50_000, "stored_mb_per_s": 1, "spread": 0.01}
    _, second = advise({**facts, "tokens": {"tokens_per_s": 9e6}})
    assert second.startswith("Stored tokens come at 9,000,000 tokens/s, 50,000 samples/s")


def test_a_cache_is_judged_by_its_second_epoch() -> None:
    cache = {
        "directory_bytes": 6 << 30,
        "ram_bytes": 0,
        "share_of_split": 0.25,
        "epochs": [
            {"samples_per_s": 40.0, "tiers": {"ram": 0.0, "disk": 0.0, "origin": 1.0}},
            {"samples_per_s": 100.0, "tiers": {"ram": 0.0, "disk": 0.6, "origin": 0.4}},
        ],
    }
    facts = {**_facts(cat=50, decode=100, batches=48, disk=400), "tier": "s3"}
    assert any(
        line.startswith("A cache of 6.0 GiB (measured on 25% of the split, with as much less of a cache): 40")
        and "100 in the second, 2.50 times as many; 60% of its bytes come from the cache" in line
        for line in advise({**facts, "cache": cache})
    )
    small = [cache["epochs"][0], {"samples_per_s": 44.0, "tiers": {"ram": 0.0, "disk": 0.1, "origin": 0.9}}]  # type: ignore[index]
    lines = advise({**facts, "cache": {**cache, "epochs": small}})
    assert any("too little to be worth it: 90%" in line for line in lines)
