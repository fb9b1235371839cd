"""The corpus job: every line has an outcome, the dataset is whole, and what changed is noticed."""

from __future__ import annotations

import gzip
import json
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from shardflow.errors import ConfigError, StorageError
from shardflow.format import Dataset
from shardflow.format.checks.verification import verify
from shardflow.format.facts.columns import open_columns
from shardflow.format.manifest import Manifest, load
from shardflow.format.tables import StoredColumn, write_table
from shardflow.packing.corpora.inputs import read_list
from shardflow.storage import LocalStore
from tests.corpora_case import FAULTY, CorpusCase, make_lines
from tests.factories import sample_entries
from tests.pack_case import tree_digests
from tests.sweeps import sampled

pytestmark = pytest.mark.usefixtures("packs_inline")


@pytest.fixture
def case(tmp_path: Path) -> CorpusCase:
    case = CorpusCase(tmp_path / "job")
    case.prepare()
    return case


def write_parquet(path: Path, rows: list[dict[str, Any]], rows_a_group: int, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=rows_a_group, **options)


def counted(case: CorpusCase) -> dict[str, list[str]]:
    """Names of the outcomes of each file's lines, by the end of its path."""
    outcomes = case.outcomes()
    found = {}
    manifest = load(LocalStore(case.output))
    name = f"corpus-{str(manifest.extra['plan_digest'])[:16]}.jsonl"
    for file in read_list(case.private / name):
        lines = outcomes.of_file(file.file)
        assert len(lines) == file.num_lines
        found[Path(file.path).relative_to(case.texts.absolute()).as_posix()] = [
            outcomes.names[number] for number in lines.tolist()
        ]
    return found


def test_every_line_of_every_file_has_an_outcome(case: CorpusCase) -> None:
    good = make_lines(30, 1)
    case.write("a.jsonl", [good[0], b"", b"{", b'{"text":""}', b'{"x":1}', b'{"text":1}', b"\xff", *good[1:]])
    case.write(
        "long.jsonl", [b'{"text":"' + b"x" * 5000 + b'"}', good[5][:-1] + b',"a":"' + b"y" * 7000 + b'"}']
    )
    case.write("notes.txt", [b"no corpus"])
    packed = gzip.compress(b"\n".join(make_lines(20, 2)) + b"\n")
    (case.texts / "cut.jsonl.gz").write_bytes(packed[:-9])
    (case.texts / "z.jsonl.zst").write_bytes(
        pa.Codec("zstd").compress(b"\n".join(make_lines(9, 3))).to_pybytes()
    )
    write_parquet(case.texts / "p.parquet", [json.loads(line) for line in make_lines(25, 4)], 7)
    (case.texts / "no.parquet").write_bytes(b"PAR1 no such thing")
    summary = case.pack("limits.max_line_bytes=6000", "limits.max_text_bytes=4000")
    found = counted(case)
    assert found["a.jsonl"][:8] == [
        "PACKED", "EMPTY_LINE", "INVALID_JSON", "EMPTY_TEXT", "MISSING_FIELD", "WRONG_TYPE", "INVALID_UTF8",
        "PACKED",
    ]  # fmt: skip
    assert found["long.jsonl"] == ["TEXT_TOO_LONG", "LINE_TOO_LONG"]
    assert found["notes.txt"] == ["NOT_A_CORPUS_FILE"]
    assert found["cut.jsonl.gz"] == ["PACKED"] * 20 + ["FILE_DAMAGED"]
    assert found["z.jsonl.zst"] == ["PACKED"] * 9
    assert found["p.parquet"] == ["PACKED"] * 25
    assert found["no.parquet"] == ["FILE_DAMAGED"]
    names = [name for lines in found.values() for name in lines]
    assert summary.inputs == {"total": len(names), "packed": 114 - 30, "skipped": 3, "quarantined": 8}
    assert verify(str(case.output)).is_whole


def test_the_dataset_holds_the_texts_and_nothing_of_names_or_places(case: CorpusCase) -> None:
    lines = make_lines(200, 1, patient="OKONKWO-4711")
    case.write("OKONKWO/ward-7.jsonl", lines)
    summary = case.pack("shards.part_bytes=1MiB", "shards.target_bytes=32KiB", "splits.group=patient")
    assert case.texts_of() == sorted(json.loads(line)["text"] for line in lines)
    assert len(summary.splits) == 1  # one patient
    assert max(shard.num_bytes for shard in load(LocalStore(case.output)).shards) <= 33 << 10
    for path in case.output.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for secret in (b"OKONKWO", b"4711", b"ward-7"):
            assert secret not in content
            assert secret.decode() not in path.name
    private = next(case.private.glob("corpus-*.jsonl"))
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert "ward-7" in private.read_text()


def test_texts_are_scrubbed_by_default(case: CorpusCase) -> None:
    case.write("a.jsonl", [b'{"text":"Mrs. Okonkwo, MRN: 4711-0815, seen on 2019-03-14. Lungs are clear."}'])
    case.pack("deid.text=scrub")
    (text,) = case.texts_of()
    assert "Lungs are clear." in text
    assert not any(word in text for word in ("Okonkwo", "4711", "2019"))
    extra: Any = load(LocalStore(case.output)).extra
    assert extra["deidentification"]["report_text"] == "scrub"
    assert extra["deidentification"]["counts"]["name"] == 1


def test_names_inside_of_kept_fields_are_scrubbed_too(case: CorpusCase) -> None:
    marks = {"Mrs. Okonkwo": 1, "Mrs. Okonjo": {"MRN: 4711-0815": "ok"}, "score": 3}
    case.write("a.jsonl", [json.dumps({"text": "Lungs are clear.", "marks": marks}).encode()])
    case.pack("deid.text=scrub", "fields.keep=['marks']")
    about = json.loads(Dataset.open(case.output).read_fields(0)["corpus.json"])
    assert not any(word in json.dumps(about) for word in ("Okonkwo", "Okonjo", "4711"))
    (first, second, third) = about["fields"]["marks"].values()
    assert (first, list(second.values()), third) == (1, ["ok"], 3)


def test_a_line_as_deep_as_lines_may_be_harms_no_other(case: CorpusCase) -> None:
    deep = [
        b'{"text":"deep","marks":' + b"[" * depth + b"1" + b"]" * depth + b"}" for depth in (60, 900, 5000)
    ]
    case.write("a.jsonl", [*deep, b'{"text":"plain","marks":1}'])
    case.pack("deid.text=scrub", "fields.keep=['marks']", "policy.max_quarantined_share=1.0")
    assert case.texts_of() == ["deep", "plain"]
    extra: Any = load(LocalStore(case.output)).extra
    assert extra["reasons"] == {"INVALID_JSON": 2}


def test_a_field_with_a_key_names_the_sample_and_must_be_unique(case: CorpusCase) -> None:
    def lines(numbers: range) -> list[bytes]:
        return [json.dumps({"text": f"text {n}", "id": f"P{n % 20}"}).encode() for n in numbers]

    case.write("a.jsonl", lines(range(20)))
    case.pack("fields.key=id")
    first = Dataset.open(case.output)
    keys = {first.samples.sample_key(row) for row in range(20)}
    # The same lines in another file, in another order, have the same names.
    other = CorpusCase(case.folder.parent / "other")
    other.prepare()
    other.write("z.jsonl", lines(range(20))[::-1])
    other.pack("fields.key=id")
    dataset = Dataset.open(other.output)
    assert {dataset.samples.sample_key(row) for row in range(20)} == keys
    # A key that an earlier version has is taken.
    case.write("b.jsonl", [*lines(range(40, 42)), b'{"text":"new","id":"new"}'])
    summary = case.pack("fields.key=id", "policy.max_quarantined_share=1.0", mode="append")
    assert summary.reasons == {"DUPLICATE_KEY": 2}
    assert sum(summary.splits.values()) == 21
    assert verify(str(case.output)).is_whole


def test_append_carries_attached_tables_over(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(20, 1))
    case.pack()
    first = Dataset.open(case.output)
    number = np.arange(20)
    column = StoredColumn(name="n", kind="int", values=number, is_missing=number < 0)
    write_table(first.store, first.dataset_id, "labels", "study", [column])
    case.write("b.jsonl", make_lines(10, 2))
    assert case.pack(mode="append").manifest_version == 2
    second = Dataset.open(case.output)
    found = open_columns(second).column("labels.n")
    assert found.is_missing is not None
    keys = second.studies.column("sample_key").tolist()
    values = {
        key: value
        for key, value, gone in zip(keys, found.values.tolist(), found.is_missing.tolist(), strict=True)
        if not gone
    }
    assert values == dict(zip(first.studies.column("sample_key").tolist(), range(20), strict=True))
    assert verify(str(case.output)).is_whole


def test_append_takes_new_files_and_leaves_the_rest(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(300, 1))
    case.pack()
    before, texts = tree_digests(case.output), case.texts_of()
    case.write("b.jsonl", [*make_lines(100, 2), b"{"])
    case.write("0.jsonl", make_lines(10, 3))
    with pytest.raises(ConfigError, match="2 files that the dataset in output does not know; add --append"):
        case.pack()
    summary = case.pack(mode="append")
    after = tree_digests(case.output)
    assert {name: digest for name, digest in after.items() if name in before} == before
    assert summary.manifest_version == 2
    assert summary.inputs == {"total": 411, "packed": 410, "skipped": 0, "quarantined": 1}
    assert case.outcomes().num_lines == 411
    assert verify(str(case.output)).is_whole
    dataset = Dataset.open(case.output)
    assert dataset.samples.num_samples == 410
    assert set(texts) < set(case.texts_of())
    assert Dataset.open(case.output, version=1).samples.num_samples == 300
    # The order of what was known before and what is new lies in the names of shards, not in processes.
    assert case.pack(mode="append").status == "nothing_new"
    assert case.pack().status == "already_packed"
    assert tree_digests(case.output) == after
    # Whoever packs the same two versions elsewhere comes to the same bytes.
    other = CorpusCase(case.folder.parent / "other")
    other.prepare()
    other.write("a.jsonl", make_lines(300, 1))
    other.pack("execution.num_processes=2")
    other.write("b.jsonl", [*make_lines(100, 2), b"{"])
    other.write("0.jsonl", make_lines(10, 3))
    other.pack("execution.num_processes=2", mode="append")
    assert tree_digests(other.output) == after


def test_an_append_that_was_killed_goes_on(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(50, 1))
    case.pack()
    case.write("b.jsonl", make_lines(300, 2))
    assert case.drive("advance:parts:1", "append").returncode < 0
    with pytest.raises(ConfigError, match="add --append"):
        case.pack()
    summary = case.pack(mode="append")
    assert (summary.status, summary.manifest_version) == ("packed", 2)
    assert summary.num_parts_kept >= 1
    assert verify(str(case.output)).is_whole


@pytest.mark.parametrize("change", ["content", "size"])
def test_a_file_that_changed_is_refused(case: CorpusCase, change: str) -> None:
    path = case.write("a.jsonl", make_lines(20, 1))
    case.pack()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"clear", b"blurr") if change == "content" else data + b"{}\n")
    with pytest.raises(ConfigError, match="1 files of the corpus have changed since"):
        case.pack()
    with pytest.raises(ConfigError, match="1 files of the corpus have changed since"):
        case.pack(mode="append")


def test_a_file_that_changed_while_the_job_was_stopped_is_packed_as_it_is(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(200, 1))
    assert case.drive("advance:parts:2").returncode < 0
    changed = [line.replace(b"clear", b"blurr") for line in make_lines(200, 1)]
    case.write("a.jsonl", changed)
    assert case.pack().num_parts_kept == 0
    assert case.texts_of() == sorted(json.loads(line)["text"] for line in changed)
    assert verify(str(case.output)).is_whole


def test_other_settings_are_refused_and_other_processes_are_not(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(20, 1))
    case.pack()
    with pytest.raises(ConfigError, match="with other settings"):
        case.pack("splits.seed=1")
    assert case.pack("execution.num_processes=2").status == "already_packed"
    key = case.private / "secret.key"
    (case.folder / "else").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=r"list of the corpus' files \(corpus-\*.jsonl\)"):
        case.pack(f"private_dir={case.folder / 'else'}", f"identity.key_file={key}")


def test_too_much_quarantine_publishes_nothing_and_is_gone_on_with(case: CorpusCase) -> None:
    case.write("a.jsonl", [*make_lines(9, 1), b"{"])
    summary = case.pack("policy.max_quarantined_share=0.09")
    assert (summary.status, summary.exit_code) == ("quarantine_limit", 3)
    assert summary.inputs == {"total": 10, "packed": 9, "skipped": 0, "quarantined": 1}
    assert not list(case.output.glob("manifest*"))
    assert case.pack("policy.max_quarantined_share=0.1").num_parts_kept == summary.num_parts


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], "no .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, only 1 others"),
        ([b"{", b"{"], r"hold no line that can be packed \(\{'INVALID_JSON': 2\}\)"),
    ],
)
def test_nothing_to_pack_is_said(case: CorpusCase, lines: list[bytes], match: str) -> None:
    case.write("a.jsonl" if lines else "a.txt", lines)
    with pytest.raises(ConfigError, match=match):
        case.pack("policy.max_quarantined_share=1.0")


def test_parquet_and_lines_make_the_same_samples(case: CorpusCase) -> None:
    rows = [
        {
            "id": f"{n}",
            "messages": [
                {"role": "user", "content": f"q {n} {'x' * 100}"},
                {"role": "assistant", "content": "a"},
            ],
        }
        for n in range(60)
    ]
    settings = ("fields.kind=conversations", "fields.key=id", "shards.part_bytes=4KiB")
    write_parquet(case.texts / "a.parquet", rows, 8, compression="zstd")
    summary = case.pack(*settings)
    assert summary.num_parts > 1
    other = CorpusCase(case.folder.parent / "lines")
    other.prepare()
    other.write("a.jsonl", [json.dumps(row).encode() for row in rows])
    other.pack(*settings)

    def samples(case: CorpusCase) -> dict[str, dict[str, bytes]]:
        dataset = Dataset.open(case.output)
        return {
            dataset.samples.sample_key(row): dataset.read_fields(row)
            for row in range(dataset.samples.num_samples)
        }

    assert samples(case) == samples(other)


def test_a_damaged_row_group_leaves_what_was_before_it(case: CorpusCase) -> None:
    rows = [json.loads(line) for line in make_lines(200, 1)]
    path = case.texts / "a.parquet"
    write_parquet(path, rows, 50, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    offset = parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[offset : offset + 40] = bytes(40)
    path.write_bytes(bytes(data))
    case.pack("shards.part_bytes=1MiB", "policy.max_quarantined_share=0.5")
    assert counted(case)["a.parquet"] == ["PACKED"] * 100 + ["FILE_DAMAGED"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    sampled([("kill", "WORKER_KILLED"), ("eat", "WORKER_OUT_OF_MEMORY")], {("kill", "WORKER_KILLED")}),
)
def test_a_part_that_ends_its_process_twice_is_left_out_for_good(
    case: CorpusCase, fault: str, reason: str
) -> None:
    case.write("a.jsonl", [*make_lines(150, 1), b"", b"{", *make_lines(150, 2)])
    case.write_faults(pack={"2": fault})
    settings = ("execution.memory_bytes=1GiB", "policy.max_quarantined_share=0.5")
    stopped = case.pack(settings[0], "policy.max_quarantined_share=0.05", handlers=FAULTY)
    assert (stopped.status, stopped.exit_code) == ("quarantine_limit", 3)
    summary = case.pack(*settings)
    assert summary.reasons == stopped.reasons
    # All lines of the part count, so that the others keep their numbers.
    assert summary.inputs["total"] == 302
    assert 30 < summary.reasons[reason] < 300 - summary.inputs["packed"] + 3
    places = [number for number, name in enumerate(counted(case)["a.jsonl"]) if name == reason]
    assert places == [*range(places[0], places[0] + summary.reasons[reason])]
    digests = tree_digests(case.output)
    # Where nothing fails any more the outcome is still the recorded one.
    other = CorpusCase(case.folder.parent / "again")
    case.folder.rename(other.folder)
    for path in other.output.rglob("*"):
        if path.is_file():
            path.unlink()
    other.pack(*settings)
    assert tree_digests(other.output) == digests


def test_a_part_whose_lines_cannot_be_counted_counts_as_one_for_each_file(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(300, 1))
    case.write_faults(pack={"2": "kill_even_counts"})
    settings = ("policy.max_quarantined_share=0.5", "execution.num_processes=2")
    summary = case.pack(*settings, handlers=FAULTY)
    assert summary.reasons == {"WORKER_KILLED": 1}
    assert 200 < summary.inputs["packed"] < 300
    case.write_faults()
    shutil.rmtree(case.output)
    assert case.pack(*settings).dataset_id == summary.dataset_id


def test_a_part_that_ends_its_process_once_is_packed(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(300, 1))
    case.write_faults(pack={"2": "kill_once"}, scan={"1": "raise_once"})
    summary = case.pack('policy.duplicates="skip"', handlers=FAULTY)
    assert (summary.reasons, summary.inputs["packed"]) == ({}, 300)


def test_outcomes_that_were_damaged_on_the_way_are_made_again(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(200, 1))
    assert case.drive("phase:index").returncode < 0
    path = case.output / ".work" / "parts" / "000002" / "outcomes"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(StorageError, match="run the job again"):
        case.pack()
    assert case.pack().inputs["packed"] == 200
    assert verify(str(case.output)).is_whole


def test_verify_finds_a_changed_outcome_and_another_count(case: CorpusCase) -> None:
    case.write("a.jsonl", make_lines(20, 1))
    case.pack()
    manifest = load(LocalStore(case.output))
    entry = manifest.line_outcomes
    assert entry is not None
    path = case.output / entry.path
    data = bytearray(path.read_bytes())
    at = len(data) - 64
    data[at] ^= 1
    path.write_bytes(bytes(data))
    (damage,) = verify(str(case.output)).damages
    assert damage.path == entry.path
    data[at] ^= 1
    path.write_bytes(bytes(data))
    body = manifest.encode().replace(b'"packed":20', b'"packed":19')
    with pytest.raises(Exception, match="digest"):
        Manifest.parse(body)


def test_the_table_of_samples_is_the_one_that_is_encoded_at_once(case: CorpusCase) -> None:
    from shardflow.format.samples import SamplesTable

    case.write("a.jsonl", make_lines(300, 1))
    case.pack()
    dataset = Dataset.open(case.output)
    shards = dataset.manifest.shards
    entries = sample_entries(dataset.samples)
    encoded = SamplesTable.encode(entries, shard_splits=[shard.split for shard in shards])
    assert encoded == (case.output / dataset.manifest.samples.path).read_bytes()
    assert np.array_equal(dataset.samples.column("text_bytes") > 0, np.ones(300, bool))
