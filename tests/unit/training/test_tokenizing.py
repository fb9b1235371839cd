"""Tokens beside a dataset: right, resumable, checked, and what a plan fills budgets by."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardflow.errors import ChecksumError, ConfigError, FormatError
from shardflow.format import Dataset
from shardflow.format import tokens as tokens_module
from shardflow.format.checks.verification import verify
from shardflow.format.table import Table, encode_table
from shardflow.format.token_manifest import tokens_folder
from shardflow.format.tokens import TokenIds, open_counts
from shardflow.loading import Loader, select
from shardflow.sampling import BatchSpec, CostRule, LoaderState, TokenBudget
from shardflow.training.text import ReportTokenizer, train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset, tokenizer_digest
from tests.factories import make_dataset

BUDGET = TokenBudget(max_tokens=50, max_samples=8)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_dataset(folder / "data", num_samples=20)
    train_tokenizer(Dataset.open(folder / "data"), "train", 300, folder / "bpe")
    return folder / "bpe"


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    make_dataset(tmp_path / "data", splits={"train": 23, "val": 4}, samples_per_shard=5)
    return Dataset.open(tmp_path / "data")


def rule_of(tokenizer: Path) -> CostRule:
    return CostRule(tokenizer=tokenizer_digest(tokenizer))


def place_of(dataset: Dataset, tokenizer: Path) -> Path:
    return Path(dataset.store.url) / tokens_folder(tokenizer_digest(tokenizer), dataset.dataset_id)


def by_hand(dataset: Dataset, tokenizer: Path) -> list[int]:
    """What training makes of each report, without the begin and the end."""
    report_tokenizer = ReportTokenizer.load(tokenizer)
    counts = []
    for row in range(dataset.samples.num_samples):
        text = dataset.read_fields(row, ["report.txt"])["report.txt"].decode()
        counts.append(int(report_tokenizer.encode([text], 10**6).token_mask.sum()) - 2)
    return counts


def test_counts_are_what_training_sees(dataset: Dataset, tokenizer: Path) -> None:
    seen: list[tuple[int, int]] = []
    done = tokenize_dataset(dataset, TextTokenizer(tokenizer), on_shard=lambda *at: seen.append(at))
    expected = by_hand(dataset, tokenizer)
    assert open_counts(dataset, done.tokenizer).tolist() == expected
    assert (done.num_samples, done.num_tokens, done.num_shards_kept) == (27, sum(expected), 0)
    assert seen == [(number, 6) for number in range(1, 7)]
    assert done.tokenizer == ReportTokenizer.load(tokenizer).digest
    assert TextTokenizer(tokenizer / "tokenizer.json").digest == done.tokenizer
    assert sorted(path.name for path in place_of(dataset, tokenizer).iterdir()) == [
        "counts.tbl",
        *(f"ids-{number:06d}.tbl" for number in range(6)),
        "manifest.json",
    ]
    assert verify(dataset.store.url).is_whole


def test_special_tokens_in_a_report_are_text(tokenizer: Path) -> None:
    report_tokenizer = ReportTokenizer.load(tokenizer)
    texts = ["", "clear", "ends </s> here <s><pad>", "Grüße, 肺 und \n\n Lunge" * 40]
    for text, ids in zip(texts, TextTokenizer(tokenizer).encode(texts), strict=True):
        row = report_tokenizer.encode([text], 10**6)
        assert ids == row.token_ids[row.token_mask].tolist()[1:-1]


def test_a_job_that_was_stopped_goes_on(dataset: Dataset, tokenizer: Path) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, _of: int) -> None:
        if done == 4:
            raise StopError

    counter = TextTokenizer(tokenizer)
    with pytest.raises(StopError):
        tokenize_dataset(dataset, counter, on_shard=stop)
    with pytest.raises(ConfigError, match="run: shardflow tokenize"):
        open_counts(dataset, counter.digest)
    # A table that a crash of the machine left torn is made again.
    part = place_of(dataset, tokenizer) / "ids-000001.tbl"
    part.chmod(0o644)
    part.write_bytes(part.read_bytes()[:-3])
    # Others may have been under way when the job was stopped.
    assert 3 <= tokenize_dataset(dataset, counter).num_shards_kept < 6
    assert open_counts(dataset, counter.digest).tolist() == by_hand(dataset, tokenizer)
    assert tokenize_dataset(dataset, counter).num_shards_kept == 6


def test_ids_are_what_training_would_make_of_the_texts(dataset: Dataset, tokenizer: Path) -> None:
    digest = tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer
    report_tokenizer = ReportTokenizer.load(tokenizer)
    tokens = TokenIds(dataset, digest)
    # Rows of several shards, out of order, one twice, and a padding slot.
    rows = np.array([20, 3, -1, 26, 4, 3, 0])
    for max_tokens in (None, 5):
        ids, offsets = tokens.gather(rows, max_tokens)
        assert ids.dtype == np.uint32
        for place, row in enumerate(rows.tolist()):
            found = ids[offsets[place] : offsets[place + 1]].tolist()
            text = "" if row < 0 else dataset.read_fields(row, ["report.txt"])["report.txt"].decode()
            whole = report_tokenizer.encode([text], 10**6)
            assert found == whole.token_ids[whole.token_mask].tolist()[1:-1][:max_tokens]
    ids, offsets = tokens.gather(np.array([-1, -1]))
    assert (len(ids), offsets.tolist()) == (0, [0, 0, 0])
    with pytest.raises(IndexError):
        tokens.gather(np.array([27]))
    again, _ = pickle.loads(pickle.dumps(tokens)).gather(rows)
    assert again.tolist() == tokens.gather(rows)[0].tolist()


def test_places_out_of_order_are_refused_though_their_checksum_is_right(
    dataset: Dataset, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = TokenIds(dataset, tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer)
    tokens.gather(np.arange(5))  # checks the only block of places
    whole = Table.whole
    for wrong in (lambda first: first[::-1], lambda first: first + 1):
        again = pickle.loads(pickle.dumps(tokens))
        again.gather(np.arange(2))
        monkeypatch.setattr(Table, "whole", lambda table, name, wrong=wrong: wrong(whole(table, name)))
        with pytest.raises(FormatError, match="one behind another"):
            again.gather(np.arange(5))
        monkeypatch.setattr(Table, "whole", whole)


def _ids_file(first_token: object, ids: object) -> tokens_module._IdsFile:
    """Return an open table of three texts, whose manifest names these columns."""
    meta: dict[str, Any] = {"kind": "token-ids", "format_version": 1, "first_row": 0}
    owner = {"dataset_id": "d", "tokenizer": "t"}
    data = encode_table({"first_token": np.array(first_token), "token_ids": np.array(ids)}, {**meta, **owner})
    table = Table(memoryview(data), name="ids")
    return tokens_module._IdsFile(tokens_module.ids_table(table, first_row=0, num_rows=3, **owner))


@pytest.mark.parametrize("places", [[0, 2, 1, 4], [0, 2, 4, 9], [0, 2, 4, 1 << 63], [1 << 63, 2, 3, 4]])
def test_wrong_places_of_a_text_are_refused_before_all_of_them_are_known(places: list[int]) -> None:
    file = _ids_file(np.array(places, "<u8"), np.arange(4, dtype="<u2"))
    with pytest.raises(FormatError, match="one behind another in 4 tokens"):
        file.bounds(np.arange(3))


@pytest.mark.parametrize(
    ("places", "ids"),
    [
        (np.arange(4, dtype="<u4"), np.arange(4, dtype="<u2")),
        (np.arange(4, dtype="<f8"), np.arange(4, dtype="<u2")),
        (np.zeros((4, 2), "<u8"), np.arange(4, dtype="<u2")),
        (np.arange(4, dtype="<u8"), np.arange(4, dtype="<f4")),
        (np.arange(4, dtype="<u8"), np.zeros((4, 2), "<u2")),
    ],
)
def test_columns_of_other_numbers_are_no_table_of_ids(places: object, ids: object) -> None:
    with pytest.raises(FormatError, match="must hold the ids of its shard's 3 texts, got another table"):
        _ids_file(places, ids)


def test_a_wrong_byte_of_the_ids_is_found_before_it_is_used(
    dataset: Dataset, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "MAX_JOINED_BYTES", 0)  # a node file of whole tables would be read
    digest = tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer
    path = place_of(dataset, tokenizer) / "ids-000000.tbl"
    content = path.read_bytes()
    path.chmod(0o644)
    for at in range(0, len(content), max(1, len(content) // 97)):
        changed = bytearray(content)
        changed[at] ^= 4
        path.write_bytes(changed)
        with pytest.raises((ChecksumError, FormatError)):
            TokenIds(dataset, digest).gather(np.arange(5))
    path.write_bytes(content[:-1])
    with pytest.raises(FormatError, match="must have the manifest's size and sha256"):
        TokenIds(dataset, digest).gather(np.arange(5))


def test_few_tables_are_joined_and_the_ids_are_the_same(
    dataset: Dataset, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that visits each of a few tables takes half as long again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    digest = tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer
    rows = np.array([20, 3, -1, 26, 4, 3, 0])
    joined = TokenIds(dataset, digest)
    assert [path.name[:7] for path in tmp_path.glob("shardflow-*/*.tbl")] == ["tokens-"]
    assert joined.find(rows).files == [(0, slice(0, 6))]
    monkeypatch.setattr(tokens_module, "MAX_JOINED_BYTES", 0)
    each = TokenIds(dataset, digest)
    assert len(each.find(rows).files) > 1
    found, expected = joined.gather(rows, 5), each.gather(rows, 5)
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]
    with pytest.raises(IndexError):
        each.gather(np.array([27]))


@pytest.mark.parametrize("max_joined_bytes", [0, 1 << 30])
@pytest.mark.parametrize("max_spread", [0, 4])
@pytest.mark.parametrize("max_tokens", [None, 5])
def test_rows_hold_the_tokens_of_their_text_and_zeros(
    dataset: Dataset,
    tokenizer: Path,
    max_joined_bytes: int,
    max_spread: int,
    max_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last text ends where the table does, and few texts of a table make it look uneven."""
    monkeypatch.setattr(tokens_module, "MAX_JOINED_BYTES", max_joined_bytes)
    monkeypatch.setattr(tokens_module, "_MAX_SPREAD", max_spread)
    tokens = TokenIds(dataset, tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer)
    rows = np.append(np.random.default_rng(0).permutation(27), -1)
    expected, offsets = tokens.gather(rows, max_tokens)
    lengths, order = np.diff(offsets), np.random.default_rng(1).permutation(28)
    out = np.full((28, int(lengths.max()) + 3), -9)
    mask = np.zeros(out.shape, np.uint8)
    mask[order] = np.arange(out.shape[1]) < lengths[:, None]
    tokens.read_rows(tokens.find(rows, max_tokens), order, mask, out)
    assert out[order[-1]].tolist() == [-9] * out.shape[1]  # no text
    for text, row in enumerate(order[:-1].tolist()):
        own = expected[offsets[text] : offsets[text + 1]].tolist()
        assert out[row].tolist() == own + [0] * (out.shape[1] - len(own))


def test_two_tokenizers_stand_side_by_side(dataset: Dataset, tokenizer: Path, tmp_path: Path) -> None:
    train_tokenizer(dataset, "train", 280, tmp_path / "other")
    digests = [
        tokenize_dataset(dataset, TextTokenizer(path)).tokenizer for path in (tokenizer, tmp_path / "other")
    ]
    lengths = [len(TokenIds(dataset, digest).gather(np.arange(27))[0]) for digest in digests]
    assert lengths[0] < lengths[1]  # the smaller vocabulary cuts finer
    assert Dataset.open(dataset.store.url).dataset_id == dataset.dataset_id


def test_the_number_of_threads_does_not_show(dataset: Dataset, tokenizer: Path) -> None:
    contents = []
    for num_threads in (1, 4):
        tokenize_dataset(dataset, TextTokenizer(tokenizer), num_threads=num_threads)
        folder = place_of(dataset, tokenizer)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
        shutil.rmtree(folder)
    assert contents[0] == contents[1]


@pytest.mark.parametrize("file", ["counts.tbl", "manifest.json"])
def test_a_flipped_byte_is_found_on_open(dataset: Dataset, tokenizer: Path, file: str) -> None:
    digest = tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer
    path = place_of(dataset, tokenizer) / file
    content = path.read_bytes()
    path.chmod(0o644)
    for at in range(0, len(content), max(1, len(content) // 97)):
        changed = bytearray(content)
        changed[at] ^= 4
        path.write_bytes(changed)
        with pytest.raises((ChecksumError, FormatError)):
            open_counts(dataset, digest)


def test_counts_of_another_dataset_or_version_are_not_used(
    dataset: Dataset, tokenizer: Path, tmp_path: Path
) -> None:
    digest = tokenize_dataset(dataset, TextTokenizer(tokenizer)).tokenizer
    make_dataset(tmp_path / "other", splits={"train": 23, "val": 4}, samples_per_shard=5, seed=1)
    other = Dataset.open(tmp_path / "other")
    with pytest.raises(ConfigError, match="got no tokens of it beside version 1"):
        open_counts(other, digest)
    # Copied by hand into the other dataset's place.
    target = place_of(other, tokenizer)
    target.mkdir(parents=True)
    for file in place_of(dataset, tokenizer).iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FormatError, match="must name the version and tokenizer"):
        open_counts(other, digest)


@pytest.mark.parametrize("content", [None, b"{}", b"\xff"])
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer"):
        TextTokenizer(tmp_path)


def test_a_plan_fills_budgets_by_the_counts(dataset: Dataset, tokenizer: Path) -> None:
    spec = BatchSpec(
        budget=replace(BUDGET, cost=rule_of(tokenizer)), micro_batches_per_step=2, tail="mask", lanes=2
    )
    with pytest.raises(ConfigError, match="run: shardflow tokenize"):
        select(dataset, "train").plan(spec, seed=3, epoch=0)
    tokenize_dataset(dataset, TextTokenizer(tokenizer))
    counts = by_hand(dataset, tokenizer)
    plan = select(dataset, "train").plan(spec, seed=3, epoch=0)
    rows_seen = []
    for step in range(plan.num_steps):
        for micro in range(2):
            rows = [row for row in plan.micro_batch(step, micro).rows.tolist() if row >= 0]
            rows_seen += rows
            lengths = [counts[row] + 2 for row in rows]
            assert len(rows) <= 1 or len(rows) * max(lengths) <= 50
    assert sorted(rows_seen) == list(dataset.splits["train"])
    estimated = replace(spec, budget=replace(BUDGET, cost=CostRule()))
    num_steps = [
        sum(select(dataset, "train").plan(one, seed=seed, epoch=0).num_steps for seed in range(8))
        for one in (spec, estimated)
    ]
    # A tokenizer of 300 tokens makes more of a report than one in four bytes.
    assert num_steps[0] > num_steps[1]
    loader = Loader(dataset, split="train", batch=spec, seed=3, fields={})
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1024
    kept = json.loads(json.dumps(state))
    plain = {name: kept[name] for name in kept if name not in ("lock", "content_id")}
    assert LoaderState.from_json(plain).spec == spec


def test_the_rule_names_its_tokenizer() -> None:
    rule = CostRule(tokenizer="ab" * 32, text_tokens_per_1000_bytes=7, max_text_tokens=100)
    assert rule.used_facts() == ("text_tokens",)
    assert rule == CostRule(tokenizer="ab" * 32, max_text_tokens=100)
    assert CostRule.from_json(rule.to_json()) == rule
    assert "tokenizer" not in CostRule().to_json()
    facts = {"text_tokens": np.array([0, 99, 100, 101], np.uint32)}
    assert rule.lengths(facts).tolist() == [2, 101, 102, 102]
    for wrong in ("AB" * 32, "ab", 7, None):
        with pytest.raises(ConfigError, match="tokenizer must be 64 hexadecimal digits"):
            CostRule(tokenizer=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keys"):
        CostRule.from_json({**CostRule().to_json(), "tokenizer": ""})
