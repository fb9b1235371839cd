"""Manifests of stored tokens: read by a pattern, shared by the processes of a node, and never another one."""

from __future__ import annotations

import os
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.errors import FormatError
from shardflow.format import Dataset, manifest_table
from shardflow.format.keys import sha256_hex
from shardflow.format.token_manifest import (
    TokenFile,
    TokenFiles,
    TokensManifest,
    _load,
    open_manifest,
    tokens_folder,
)
from shardflow.storage import LocalStore
from tests.factories import make_dataset

pytestmark = pytest.mark.fast
TOKENIZER = "ab" * 32


def _files(num_rows: list[int]) -> TokenFiles:
    return TokenFiles.of(
        TokenFile(num_rows=rows, num_bytes=1000 + number, sha256=sha256_hex(b"%d" % number))
        for number, rows in enumerate(num_rows)
    )


def _manifest(dataset_id: str, num_rows: list[int]) -> TokensManifest:
    return TokensManifest(
        dataset_id=dataset_id,
        tokenizer=TOKENIZER,
        num_samples=sum(num_rows),
        counts_sha256="cd" * 32,
        files=_files(num_rows),
    )


def _told(manifest: TokensManifest) -> tuple[object, ...]:
    return manifest.digest, manifest.encode(), list(manifest.files), manifest.tables()


@pytest.mark.parametrize("num_rows", [[], [3], [3, 0, 12]])
def test_the_pattern_reads_what_parsing_the_whole_reads(num_rows: list[int]) -> None:
    data = _manifest("ef" * 32, num_rows).encode()
    matched = TokensManifest._matched(data)
    parsed = super(TokensManifest, TokensManifest).decode(data, name="it")
    assert isinstance(parsed, TokensManifest)
    assert matched is not None
    assert _told(matched) == _told(parsed) == _told(_manifest("ef" * 32, num_rows))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"num_rows":3', b'"num_rows":4'),
        (b'"num_rows":3', b'"num_rows":03'),
        (b'"num_rows":3', b'"num_rows":3.0'),
        (b'"num_rows":3', b'"num_rows":true'),
        (b'"num_rows":3', b'"num_rows":' + b"9" * 30),
        (b'"files":[{', b'"files":[,{'),
        (b'"},{"', b'"}{"'),
        (b'"}],', b'"},],'),
        (b'"},{"', b'"}, {"'),
        (b'"num_samples":15', b'"num_samples":"15"'),
        (b'"format_version":1', b'"format_version":true'),
        (b'"num_samples"', b'"num_texts"'),
        (b',"digest":"', b',"digest":"0'),
        (b',"digest":"', b',"digest":"\\ud800'),
        (b"\n", b""),
        (b"\n", b"\n\n"),
        (b"{", b"[{"),
    ],
)
def test_other_bytes_are_refused_whether_or_not_they_match(old: bytes, new: bytes) -> None:
    data = _manifest("ef" * 32, [3, 12]).encode()
    assert old in data
    with pytest.raises(FormatError, match=r"it is damaged, or is no manifest .* and tokenize again"):
        TokensManifest.decode(data.replace(old, new, 1), name="it")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without node files, on which every manifest is large."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    monkeypatch.setattr(manifest_table, "MIN_SHARED_BYTES", 1)
    return tmp_path / "node" / f"shardflow-{os.getuid()}"


@pytest.fixture
def dataset(tmp_path: Path, node: Path) -> Dataset:
    dataset = Dataset.open(make_dataset(tmp_path / "data", num_samples=7, samples_per_shard=3))
    _write(dataset, dataset.dataset_id, [3, 3, 1])
    return dataset


def _write(dataset: Dataset, owner: str, num_rows: list[int]) -> None:
    path = Path(dataset.store.url) / tokens_folder(TOKENIZER, dataset.dataset_id) / "manifest.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_manifest(owner, num_rows).encode())


def test_it_is_parsed_once_on_a_node(dataset: Dataset, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _told(_manifest(dataset.dataset_id, [3, 3, 1]))
    assert _told(open_manifest(dataset, TOKENIZER)) == expected
    assert len([*node.glob("token-files-*.tbl")]) == 1
    monkeypatch.setattr(TokensManifest, "decode", lambda *_, **__: pytest.fail("parsed again"))
    monkeypatch.setattr(TokenFile, "__post_init__", lambda _: pytest.fail("an entry was made"))
    shared = open_manifest(dataset, TOKENIZER)
    monkeypatch.undo()
    assert _told(shared) == expected
    assert not any(column.flags.writeable for column in (shared.files.num_rows, shared.files.sha256))


def test_a_process_holds_no_more_than_a_piece_of_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    large = _manifest("ef" * 32, [1] * 40_000)
    store = LocalStore(tmp_path / "data")
    store.put_new(f"{tokens_folder(TOKENIZER, large.dataset_id)}/manifest.json", large.encode())
    assert _load(store, TOKENIZER, large.dataset_id).digest == large.digest
    tracemalloc.start()
    try:
        found = _load(store, TOKENIZER, large.dataset_id)
        assert found.digest == large.digest
        assert tracemalloc.get_traced_memory()[1] < 2 << 20  # its bytes are 4.4 MB, its entries 12 MB
    finally:
        tracemalloc.stop()


def test_other_bytes_are_another_manifest(dataset: Dataset) -> None:
    open_manifest(dataset, TOKENIZER)
    _write(dataset, dataset.dataset_id, [1, 3, 3])
    assert open_manifest(dataset, TOKENIZER).files.num_rows.tolist() == [1, 3, 3]
    _write(dataset, dataset.dataset_id, [1, 3])
    with pytest.raises(FormatError, match="names 4 samples, but this dataset has 7"):
        open_manifest(dataset, TOKENIZER)
    _write(dataset, "ef" * 32, [3, 3, 1])
    with pytest.raises(FormatError, match="must name the version and tokenizer that its folder"):
        open_manifest(dataset, TOKENIZER)


def test_rows_whose_sum_exceeds_64_bits_are_refused(dataset: Dataset) -> None:
    most = 10**18 - 1
    manifest = _manifest(dataset.dataset_id, [*[most] * 18, (1 << 64) + 7 - 18 * most])
    path = Path(dataset.store.url) / tokens_folder(TOKENIZER, dataset.dataset_id) / "manifest.json"
    path.write_bytes(replace(manifest, num_samples=7).encode())
    with pytest.raises(FormatError, match="but this dataset has 7"):
        open_manifest(dataset, TOKENIZER)


def _flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _other(data: bytes) -> bytes:
    return _manifest("ef" * 32, [3, 3, 1]).encode_shared("0" * 64)


@pytest.mark.parametrize("damage", [_flip, _cut, _other])
def test_a_damaged_node_file_costs_time_alone(
    dataset: Dataset, node: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    right = _told(open_manifest(dataset, TOKENIZER))
    (path,) = node.glob("token-files-*.tbl")
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(data))
    assert _told(open_manifest(dataset, TOKENIZER)) == right
    assert "parsed by each process" in caplog.text
    caplog.clear()
    assert _told(open_manifest(dataset, TOKENIZER)) == right  # made again
    assert not caplog.text


def test_a_damaged_manifest_is_named(dataset: Dataset) -> None:
    path = Path(dataset.store.url) / tokens_folder(TOKENIZER, dataset.dataset_id) / "manifest.json"
    path.write_bytes(_flip(path.read_bytes()))
    with pytest.raises(FormatError, match=r"manifest.json is damaged, .* and tokenize again"):
        open_manifest(dataset, TOKENIZER)
