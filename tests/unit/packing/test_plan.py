"""The plan: a pure function of headers, reports and settings; splits that never move a patient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.packing.config import InputsConfig, LimitsConfig, PackConfig, ShardsConfig
from shardflow.packing.inventory import UNDECIDED, FileTable, ScannedFile, reason_name
from shardflow.packing.linking import ReportTable
from shardflow.packing.plan import PackPlan, PlanRules, build_plan, split_of_bucket
from shardflow.packing.scan import NUM_BUCKETS
from shardflow.packing.settings import PolicyConfig

pytestmark = pytest.mark.fast


def _config(**changes: Any) -> PackConfig:
    return PackConfig(
        output=Path("/o"),
        private_dir=Path("/p"),
        inputs=InputsConfig(dicom=(Path("/i"),)),
        splits=changes.pop("splits", {"train": 80, "val": 20}),
        **changes,
    )


def _row(
    number: int, study: str, *, bucket: int, size: int = 1000, reason: str | None = None, instance: int = 0
) -> ScannedFile:
    return ScannedFile(
        surrogate=f"i{number:025d}",
        reason=reason,
        study=study,
        patient=f"p{study}",
        bucket=bucket,
        decoded_bytes=size,
        num_slices=1,
        instance=instance or number + 1,
        series=0,
        digest=number,
        modified_ns=0,
        row_offset=0,
        row_num_bytes=0,
    )


def _rules(config: PackConfig) -> PlanRules:
    return PlanRules(
        splits=config.splits,
        shards=config.shards,
        policy=config.policy,
        max_study_bytes=config.limits.max_study_bytes,
        config_digest=config.content_digest(),
        key_id="key",
    )


def _files(*rows: ScannedFile) -> FileTable:
    table = FileTable(len(rows))
    table.add(0, rows)
    return table


def _many(count: int = 40, **arguments: Any) -> FileTable:
    rows = [
        _row(n, f"k{n * 7919 % 1000:03d}", bucket=n * 250 % NUM_BUCKETS, **arguments) for n in range(count)
    ]
    return _files(*rows)


def _names(plan: PackPlan, files: FileTable) -> list[tuple[str, list[str]]]:
    return [(shard.name, [files.studies.keys[study] for study in shard.studies]) for shard in plan.shards]


def test_shards_are_split_sorted_and_cut_by_count() -> None:
    files = _many()
    plan = build_plan(_rules(_config(shards=ShardsConfig(max_samples=10))), files, ReportTable())
    names = _names(plan, files)
    assert [name for name, _ in names] == [
        "train-000000",
        "train-000001",
        "train-000002",
        "train-000003",
        "val-000000",
    ]
    assert [len(keys) for _, keys in names] == [10, 10, 10, 2, 8]
    train = [key for name, keys in names for key in keys if name.startswith("train")]
    assert train == sorted(train)
    assert plan.num_studies == 40


def test_the_order_in_which_files_come_does_not_show() -> None:
    rows = [_row(n, f"k{n % 9}", bucket=n % 9 * 1000) for n in range(30)]
    config = _config(shards=ShardsConfig(max_samples=4))
    forwards, backwards = _files(*rows), FileTable(30)
    # Batches may come back in any order.
    backwards.add(15, rows[15:])
    backwards.add(0, rows[:15])
    one = build_plan(_rules(config), forwards, ReportTable())
    other = build_plan(_rules(config), backwards, ReportTable())
    assert _names(one, forwards) == _names(other, backwards)
    assert one.digest == other.digest


def test_bytes_cut_a_shard_before_it_is_too_large() -> None:
    files = _many(size=100_000)
    plan = build_plan(_rules(_config(shards=ShardsConfig(target_bytes=220_000))), files, ReportTable())
    assert all(shard.estimated_bytes <= 220_000 for shard in plan.shards)
    assert {len(shard.studies) for shard in plan.shards} == {4}
    # One that is larger than the target has a shard of its own.
    files = _files(_row(0, "a", bucket=0), _row(1, "b", bucket=0, size=10**7), _row(2, "c", bucket=0))
    plan = build_plan(_rules(_config(shards=ShardsConfig(target_bytes=220_000))), files, ReportTable())
    assert [len(shard.studies) for shard in plan.shards] == [1, 1, 1]


def test_the_digest_depends_on_all_that_decides_the_dataset() -> None:
    def digest(config: PackConfig | None = None, key: str = "key", **arguments: Any) -> str:
        return build_plan(
            replace(_rules(config or _config()), key_id=key), _many(**arguments), ReportTable()
        ).digest

    digests = {
        digest(),
        digest(key="other"),
        digest(_config(shards=ShardsConfig(max_samples=7))),
        digest(_config(splits={"train": 1})),
        digest(count=41),
    }
    assert len(digests) == 5
    assert digest() == digest()
    assert digest() == digest(_config(policy=PolicyConfig(max_quarantined_share=1.0)))


def test_studies_that_cannot_be_packed_are_not_planned() -> None:
    files = _files(
        _row(0, "good", bucket=0),
        _row(1, "cut", bucket=0),
        _row(2, "cut", bucket=0, reason="PIXEL_DATA_TRUNCATED"),
        _row(3, "large", bucket=0, size=5000),
        _row(4, "none", bucket=0, reason="INVALID_IMAGE_DESCRIPTION"),
    )
    config = _config(limits=LimitsConfig(max_study_bytes=4000))
    plan = build_plan(_rules(config), files, ReportTable())
    assert _names(plan, files) == [("train-000000", ["good"])]
    reasons = {
        key: None if plan.study_reason[n] == UNDECIDED else reason_name(int(plan.study_reason[n]))
        for n, key in enumerate(files.studies.keys)
    }
    assert reasons == {
        "good": None,
        "cut": "STUDY_QUARANTINED",
        "large": "LIMIT_EXCEEDED",
        "none": "STUDY_QUARANTINED",
    }
    assert files.reason[0] == UNDECIDED
    assert [reason_name(int(code)) for code in files.reason[1:]] == [
        "STUDY_QUARANTINED",
        "PIXEL_DATA_TRUNCATED",
        "LIMIT_EXCEEDED",
        "INVALID_IMAGE_DESCRIPTION",
    ]


def test_a_damaged_copy_of_a_whole_image_takes_nothing_with_it() -> None:
    files = _files(
        _row(1, "a", bucket=0, instance=77),
        _row(2, "a", bucket=0, instance=77, reason="PIXEL_DATA_TRUNCATED"),
        _row(3, "b", bucket=0, instance=88),
        _row(4, "b", bucket=0, instance=89, reason="PIXEL_DATA_TRUNCATED"),
    )
    plan = build_plan(_rules(_config()), files, ReportTable())
    assert _names(plan, files) == [("train-000000", ["a"])]
    assert reason_name(int(files.reason[1])) == "PIXEL_DATA_TRUNCATED"


def test_bad_files_can_be_left_out() -> None:
    files = _files(
        _row(1, "cut", bucket=0),
        _row(2, "cut", bucket=0, reason="PIXEL_DATA_TRUNCATED"),
        _row(4, "none", bucket=0, reason="INVALID_IMAGE_DESCRIPTION"),
    )
    plan = build_plan(
        _rules(_config(policy=PolicyConfig(on_bad_instance="drop_instance"))), files, ReportTable()
    )
    assert _names(plan, files) == [("train-000000", ["cut"])]
    assert reason_name(int(plan.study_reason[files.studies.find("none")])) == "INVALID_IMAGE_DESCRIPTION"


def test_images_in_an_encoding_that_nothing_reads_are_left_out_alone() -> None:
    rows = (
        _row(1, "video", bucket=0),
        _row(2, "video", bucket=0, reason="UNSUPPORTED_TRANSFER_SYNTAX"),
        _row(3, "cut", bucket=0),
        _row(4, "cut", bucket=0, reason="PIXEL_DATA_TRUNCATED"),
    )
    files = _files(*rows)
    assert _names(build_plan(_rules(_config()), files, ReportTable()), files) == [("train-000000", ["video"])]
    both = PolicyConfig(drop_reasons=("PIXEL_DATA_TRUNCATED", "UNSUPPORTED_TRANSFER_SYNTAX"))
    files = _files(*rows)
    plan = build_plan(_rules(_config(policy=both)), files, ReportTable())
    assert sorted(_names(plan, files)[0][1]) == ["cut", "video"]
    with pytest.raises(ConfigError, match=r"policy\.drop_reasons .* 'NOT_DICOM'"):
        PolicyConfig(drop_reasons=("NOT_DICOM",))


def test_splits_without_a_study_are_reported() -> None:
    files = _files(_row(0, "a", bucket=0))
    config = _config(splits={"train": 60, "val": 40, "test": 0})
    assert build_plan(_rules(config), files, ReportTable()).empty_splits == ("val",)


@given(
    st.dictionaries(st.sampled_from(["train", "val", "test", "x"]), st.integers(0, 1000), min_size=1).filter(
        lambda parts: sum(parts.values()) > 0
    ),
    st.integers(0, NUM_BUCKETS - 1),
)
def test_every_bucket_has_one_split(parts: dict[str, int], bucket: int) -> None:
    split = split_of_bucket(parts, bucket)
    assert parts[split] > 0


def test_splits_have_their_shares_of_the_buckets() -> None:
    parts = {"train": 90, "val": 7, "test": 3}
    names = [split_of_bucket(parts, bucket) for bucket in range(NUM_BUCKETS)]
    assert {name: names.count(name) for name in parts} == {"train": 9000, "val": 700, "test": 300}
    with pytest.raises(ValueError, match="NUM_BUCKETS"):
        split_of_bucket(parts, NUM_BUCKETS)


def test_reports_share_the_fate_of_their_study() -> None:
    files = _files(_row(0, "a", bucket=0), _row(1, "b", bucket=0, reason="PIXEL_DATA_TRUNCATED"))
    reports = ReportTable()
    reports.surrogate = np.array([b"r" * 26, b"q" * 26], "S26")
    reports.reason = np.full(2, UNDECIDED, np.uint8)
    reports.study = np.array([0, 1], np.int32)
    reports.digest = np.array([1, 2], np.uint64)
    build_plan(_rules(_config()), files, reports)
    assert reports.reason[0] == UNDECIDED
    assert reason_name(int(reports.reason[1])) == "STUDY_QUARANTINED"
