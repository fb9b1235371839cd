"""Datasets of many shards: indexes and tokens are collected once on a node, and the batches are the same."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

import shardflow as sf
from benchmarks.stream.many_shards import few_open, make, read
from shardflow.errors import StorageError
from shardflow.format import Dataset, dataset_index, manifest_table, tokens
from shardflow.format.manifest_table import SharedShards
from shardflow.format.token_manifest import TokenFiles
from shardflow.format.tokens import TokenIds
from shardflow.sampling import BatchSpec
from shardflow.storage import node_files
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.factories import make_dataset
from tests.forks import run
from tests.integration.loader_support import digest_of, open_loader

SPEC = BatchSpec(micro_batch_size=8, micro_batches_per_step=1, tail="mask")
NUM_SHARDS = 70
KILLED = """
import os, signal, sys, tempfile
from pathlib import Path
from shardflow.storage import node_files
tempfile.tempdir = sys.argv[1]
def make(folder):
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
node_files.node_file("a", make)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("many")
    url = make_dataset(folder / "data", num_samples=NUM_SHARDS * 2, samples_per_shard=2, facts=True)
    train_tokenizer(Dataset.open(url), "train", 300, folder / "bpe")
    tokenizer = TextTokenizer(folder / "bpe")
    tokenize_dataset(Dataset.open(url), tokenizer)
    return folder / "data", tokenizer.digest


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without node files."""
    folder = tmp_path / "node"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder / f"shardflow-{os.getuid()}"


def _contents(digest: str) -> dict[str, Mapping[str, sf.Field]]:
    return {
        "texts": {"report": sf.Text()},
        "tokens": {"tokens": sf.Tokens(tokenizer=digest, flat=True)},
        "images": {"image": sf.Slices(missing="pad"), "study": sf.Json(member="study.json")},
    }


def _epoch(url: Path, fields: Mapping[str, sf.Field]) -> list[str]:
    with open_loader(str(url), SPEC, fields) as loader:
        return [digest_of(batch) for batch in loader]


def _collect_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dataset_index, tokens):
        monkeypatch.setattr(module, "MIN_COLLECTED_SHARDS", NUM_SHARDS + 1)
    monkeypatch.setattr(tokens, "MAX_JOINED_BYTES", 0)


@pytest.mark.parametrize("content", ["texts", "tokens", "images"])
def test_batches_are_those_of_indexes_read_one_by_one(
    source: tuple[Path, str], content: str, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, digest = source
    fields = _contents(digest)[content]
    collected = _epoch(url, fields)
    assert [path.name[:6] for path in node.glob("*.tbl")] == ["tokens" if content == "tokens" else "index-"]
    _collect_nothing(monkeypatch)
    assert _epoch(url, fields) == collected


@pytest.mark.parametrize("content", ["texts", "tokens", "images"])
def test_no_index_or_table_is_opened_again(
    source: tuple[Path, str], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is opened for each batch makes the cost of a sample grow with the number of shards."""
    url, digest = source
    opened: list[str] = []
    real = os.open

    def count(path: object, *rest: int, **named: object) -> int:
        opened.append(str(path))
        return real(path, *rest, **named)  # type: ignore[arg-type]

    _epoch(url, _contents(digest)[content])  # the first process on the node
    monkeypatch.setattr(os, "open", count)
    with open_loader(str(url), SPEC, _contents(digest)[content]) as loader:
        for epoch in range(3):
            for _ in loader:
                pass
            if not epoch:
                assert not [path for path in opened if path.endswith(".idx") or "ids-" in path]
                opened.clear()
    assert opened == []


@pytest.mark.parametrize("content", ["texts", "tokens", "images"])
def test_no_entry_of_the_manifest_is_made_for_a_sample(
    source: tuple[Path, str], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample of 100,000 shards is in another one, and an entry costs as much as a text."""
    monkeypatch.setattr(manifest_table, "MIN_SHARED_BYTES", 1)
    fields = _contents(source[1])[content]
    right = _epoch(source[0], fields)
    with open_loader(str(source[0]), SPEC, fields) as loader:
        monkeypatch.setattr(SharedShards, "_entries", lambda *_: pytest.fail("an entry was made"))
        monkeypatch.setattr(TokenFiles, "__getitem__", lambda *_: pytest.fail("an entry was made"))
        assert [digest_of(batch) for batch in loader] == right


def test_few_views_of_collected_indexes_are_kept(
    source: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 100,000 shards would take 200 MB in each process."""
    found = Dataset.open(source[0])
    found.collect_indexes()
    monkeypatch.setattr(dataset_index, "_MAX_OPEN_NUM_BYTES", 8 * dataset_index._VIEW_NUM_BYTES)
    for position in [*range(NUM_SHARDS), *range(NUM_SHARDS)]:
        own, view = found._indexes.open(position), found.shard_index(position)
        assert own.fields(0) == view.fields(0)
    assert list(found._indexes._open) == list(range(NUM_SHARDS - 8, NUM_SHARDS))


def test_every_index_and_text_is_the_shard_s_own(source: tuple[Path, str]) -> None:
    found = Dataset.open(source[0])
    found.collect_indexes()
    assert found.index is not None
    rows = np.arange(len(found.splits["train"]))
    shards, inside = (found.studies.gather(name, rows).astype(np.int64) for name in ("shard", "row_in_shard"))
    texts = found.index.texts(shards, inside)
    for position in range(NUM_SHARDS):
        own, view = found._indexes.open(position), found.shard_index(position)
        assert [own.fields(row) for row in range(own.num_samples)] == [
            view.fields(row) for row in range(view.num_samples)
        ]
        assert (own.shard, own.shard_num_bytes) == (view.shard, view.shard_num_bytes)
        here, one = shards == position, own.texts(inside[shards == position])
        for name in ("keys", "offsets", "num_bytes", "crc32c"):
            assert (getattr(texts, name)[here] == getattr(one, name)).all()
    with pytest.raises(IndexError):
        found.index.texts(np.array([0]), np.array([2]))


@pytest.mark.parametrize("content", ["texts", "images"])
@pytest.mark.parametrize("damage", ["flip", "cut", "another dataset's"])
def test_a_damaged_node_file_costs_time_and_no_sample(
    source: tuple[Path, str],
    content: str,
    damage: str,
    node: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, digest = source
    fields = _contents(digest)[content]
    right = _epoch(url, fields)
    (path,) = node.glob("index-*.tbl")
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "another dataset's":
        other = make_dataset(
            tmp_path / "b", num_samples=NUM_SHARDS * 2, samples_per_shard=2, seed=1, facts=True
        )
        _epoch(Path(other), fields)
        (foreign,) = node.glob("index-*.tbl")
        foreign.rename(path)
    else:
        for place in range(2000, len(data), 4096):
            data[place] ^= 1
        path.write_bytes(data if damage == "flip" else data[: len(data) // 2])
    assert _epoch(url, fields) == right
    assert "read one by one, which is slower" in caplog.text
    caplog.clear()
    assert _epoch(url, fields) == right  # made again
    assert "slower" not in caplog.text


def test_a_damaged_shard_index_masks_its_samples_alone(source: tuple[Path, str], tmp_path: Path) -> None:
    url = shutil.copytree(source[0], tmp_path / "data")
    path = sorted((url / "shards").glob("*.idx"))[7]
    path.write_bytes(path.read_bytes()[:-9])
    with open_loader(str(url), SPEC, {"report": sf.Text()}, max_bad_share=1.0) as loader:
        for _ in loader:
            pass
        assert [row["reason"] for row in loader.masks()] == ["INDEX_DAMAGED"] * 2


def test_without_a_place_for_node_files_indexes_are_read_one_by_one(
    source: tuple[Path, str], node: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, digest = source
    node.symlink_to(node.parent)  # someone's trap in a folder that all may write
    with pytest.raises(StorageError, match="is a link, or belongs to or is open to other users"):
        node_files.node_folder()
    blocked = [_epoch(url, fields) for fields in _contents(digest).values()]
    assert caplog.text.count("which is slower") == 3
    node.unlink()
    assert [_epoch(url, fields) for fields in _contents(digest).values()] == blocked


def test_a_killed_maker_leaves_nothing_that_is_read(node: Path) -> None:
    script = run(["-c", KILLED, node.parent])
    assert script.returncode == -signal.SIGKILL
    assert not (node / "a").exists()
    assert node_files.node_file("a", lambda _: [b"whole"]).read_bytes() == b"whole"
    assert node_files.node_file("a", lambda _: [b"again"]).read_bytes() == b"whole"


def test_a_wait_for_another_maker_has_a_deadline() -> None:
    def make(_: Path) -> Iterator[bytes]:
        with pytest.raises(StorageError, match="Another process has been making a for 0 s"):
            node_files.node_file("a", lambda _: [b""], max_wait_s=0.0)
        yield b"x"

    assert node_files.node_file("a", make).read_bytes() == b"x"


def test_tokens_of_joined_tables_are_those_of_each(
    source: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.random.default_rng(0).permutation(NUM_SHARDS * 2)
    joined = TokenIds(Dataset.open(source[0]), source[1]).gather(rows)
    _collect_nothing(monkeypatch)
    each = TokenIds(Dataset.open(source[0]), source[1]).gather(rows)
    assert [one.tolist() for one in joined] == [one.tolist() for one in each]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # writing 2,000 shards, and the tables of their images
@pytest.mark.parametrize("content", ["texts", "tokens", "radiographs", "entities"])
def test_a_sample_costs_no_more_in_2000_shards_than_in_40(tmp_path: Path, content: str) -> None:
    folders = [tmp_path / f"{content}-{count}" for count in (40, 2000)]
    num_samples = 2_000 if content == "entities" else 4_000  # a study has two findings, which cost most
    for folder, count in zip(folders, (40, 2000), strict=True):
        make(folder, content, num_samples, count)

    def costs() -> list[float]:
        """CPU time in few and in many shards, the least of alternating rounds."""
        rounds = [[read(folder, content, 1.5)["us_per_sample"] for folder in folders] for _ in range(3)]
        return [min(costs) for costs in zip(*rounds, strict=True)]

    # With indexes opened one by one it was 1.45 times as much.
    few, many = costs()
    assert many <= 1.2 * few
    # As in 100,000 shards, hardly one of those of a batch is open: up to 1.7 times as much on a busy machine.
    with few_open(40):
        few, many = costs()
    assert many <= 2 * few
