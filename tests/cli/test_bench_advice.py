"""``shardflow bench``: what it says of measured rates."""

from __future__ import annotations

from typing import Any

import pytest

from shardflow.cli.bench import advise

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
    facts = _facts(cat=50, decode=100, batches=48)
    (only,) = advise({**facts, "tier": "s3"})
    assert only.startswith("Storage-bound: the s3 store gives 50 MB/s")
    assert "A cache of 10.0 GiB" in only


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


def test_texts_alone_need_larger_micro_batches_and_stored_tokens() -> None:
    facts = {**_facts(cat=90_000, batches=8_000), "slices": 0, "micro_batch_size": 64}
    (only,) = advise(facts)
    assert only.startswith("Texts alone: the loader delivers 8,000 samples/s in micro-batches of 64")
    assert "shardflow tokenize DATASET" in only
