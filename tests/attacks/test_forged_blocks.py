"""Bytes that were made to have the checksum of others, in a cache folder and in the store itself.

The forger writes as the user who trains, so the modes of the folder stop nothing. Without digests the attack
succeeds, which is tried too; with them (``shardflow sign --fields``) what is read is proven.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import shardflow as sf
from shardflow.cli.main import main
from shardflow.errors import ChecksumError, ProofError, SignatureError
from shardflow.format import Dataset, verify
from shardflow.format.copies.signing import sign_dataset
from shardflow.sampling import BatchSpec
from shardflow.storage import ByteRange, CacheConfig, LocalStore
from tests.factories import make_dataset
from tests.packages import install_programs

Fields = list[dict[str, bytes]]
_SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)


def forged(payload: bytes) -> bytes:
    """Other bytes of the same size and crc32c: the first one is changed, the last four make up for it."""
    wanted, changed = google_crc32c.value(payload), bytearray(payload)
    changed[0] ^= 0x01
    # The checksum is linear: each bit of the last four bytes flips fixed bits of it.
    now = google_crc32c.value(bytes(changed))
    rows = []
    for bit in range(32):
        other = bytearray(changed)
        other[-4 + bit // 8] ^= 1 << bit % 8
        rows.append((google_crc32c.value(bytes(other)) ^ now, 1 << bit))
    basis: dict[int, tuple[int, int]] = {}
    for effect, flips in rows:
        while effect and (top := effect.bit_length()) in basis:
            effect, flips = effect ^ basis[top][0], flips ^ basis[top][1]
        basis[effect.bit_length()] = effect, flips
    left, chosen = now ^ wanted, 0
    while left:
        effect, flips = basis[left.bit_length()]
        left, chosen = left ^ effect, chosen ^ flips
    changed[-4:] = (int.from_bytes(changed[-4:], "little") ^ chosen).to_bytes(4, "little")
    assert google_crc32c.value(bytes(changed)) == wanted
    assert bytes(changed) != payload
    return bytes(changed)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    install_programs(["ssh-keygen"], ["openssh-client"], otherwise="OpenSSH's client cannot be installed")
    path = tmp_path_factory.mktemp("keys") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


@pytest.fixture
def data(tmp_path: Path, key: Path) -> Path:
    path = tmp_path / "data"
    make_dataset(path, num_samples=8, facts=True)
    assert sign_dataset(LocalStore(path), key, with_digests=True).has_digests
    return path


def _open(data: Path, key: Path | None, *, ram_bytes: int = 0) -> Dataset:
    config = CacheConfig(
        directory=data.parent / "cache",
        max_bytes=1 << 24,
        min_free_bytes=0,
        ram_bytes=ram_bytes,
        block_bytes=1 << 12,
    )
    return Dataset.open(data, cache=config, signed_by=None if key is None else key.with_suffix(".pub"))


def _read(dataset: Dataset) -> Fields:
    return [dataset.read_fields(row) for row in range(len(dataset))]


def _poisoned(dataset: Dataset) -> int:
    assert dataset.cache is not None
    counts = dataset.cache.counters.snapshot().get("cache_poisoned", {"num_items": 0})
    return int(counts["num_items"])


def _replace(paths: list[Path], exact: Fields, change: Callable[[bytes], bytes]) -> int:
    """Change each field where a file holds it; returns how many files were changed."""
    num_changed = 0
    payloads = {payload for fields in exact for payload in fields.values() if len(payload) > 4}
    for path in paths:
        content = before = path.read_bytes()
        for payload in payloads:
            content = content.replace(payload, change(payload))
        if content != before:
            path.chmod(0o600)
            path.write_bytes(content)
            num_changed += 1
    return num_changed


def _blocks(data: Path) -> list[Path]:
    return [path for path in (data.parent / "cache").glob("blocks/*/*") if path.is_file()]


def test_a_forged_block_is_fetched_again(data: Path, key: Path) -> None:
    exact = _read(_open(data, key))
    num_forged = _replace(_blocks(data), exact, forged)
    assert num_forged > 1
    blind = _open(data, None)
    assert _read(blind) != exact  # nothing but the digests finds it
    assert not _poisoned(blind)
    dataset = _open(data, key)
    assert _read(dataset) == exact
    assert _poisoned(dataset) == num_forged
    assert _read(_open(data, None)) == exact  # what was fetched took their places


@pytest.mark.parametrize("execution", ["threads", "process"])
def test_a_loader_trains_on_no_forged_block(data: Path, key: Path, execution: str) -> None:
    def texts(dataset: Dataset) -> list[str]:
        config = sf.LoaderConfig(execution=execution, num_threads=2)  # type: ignore[arg-type]
        with sf.Loader(
            dataset,
            split="train",
            batch=_SPEC,
            seed=3,
            fields={"text": sf.Text(missing="pad")},
            config=config,
        ) as loader:
            return [text for batch in loader for text in batch["text"]]

    exact = texts(_open(data, key))
    assert len(set(exact)) > 2
    fields = _read(_open(data, key))
    assert _replace(_blocks(data), fields, forged)
    assert texts(_open(data, key)) == exact


def test_memory_and_parts_of_fields_are_proven_too(data: Path, key: Path) -> None:
    exact = _read(_open(data, key))
    assert _replace(_blocks(data), exact, forged)
    dataset = _open(data, key, ram_bytes=1 << 22)
    path, fields = dataset.sample_fields(0)
    field = max(fields, key=lambda one: one.num_bytes)
    part = np.zeros(3, np.uint8)
    for _ in range(2):  # from the folder, and then from memory
        dataset.store.read_ranges(path, [ByteRange(field.offset, 3)], [part.data])
        assert part.tobytes() == exact[0][field.name][:3]
    assert _read(dataset) == exact
    assert _read(dataset) == exact


def test_a_forged_shard_is_an_error_by_name(
    data: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = _read(Dataset.open(data))
    assert _replace(sorted(data.glob("shards/*.tar")), exact, forged)
    with pytest.raises(ProofError, match=r"shards/\S+\.tar must hold the signed bytes at offset \d+"):
        _read(_open(data, key))
    assert ProofError("").exit_code == 2
    # Signing again vouches for nothing that the manifest does not name.
    for path in data.glob("digests/*/*/*"):
        path.unlink()
    with pytest.raises(ChecksumError, match="must be the shard that the manifest names"):
        sign_dataset(LocalStore(data), key, with_digests=True)


def test_plain_damage_is_still_the_readers_to_judge(data: Path, key: Path) -> None:
    exact = _read(Dataset.open(data))
    (first, *_) = sorted(data.glob("shards/*.tar"))
    assert _replace([first], exact, lambda payload: bytes([payload[0] ^ 1]) + payload[1:])
    with pytest.raises(ChecksumError, match="must hold crc32c"):
        _read(_open(data, key))


def test_forged_and_missing_digests(data: Path, key: Path) -> None:
    tables = sorted(data.glob("digests/fields/*/shard-*.tbl"))
    assert len(tables) > 1
    whole = tables[0].read_bytes()
    tables[0].chmod(0o600)
    tables[0].write_bytes(tables[1].read_bytes())
    assert [damage.path for damage in verify(data).damages] == [str(tables[0].relative_to(data))]
    with pytest.raises(ProofError, match=tables[0].name):
        _read(_open(data, key))
    tables[0].write_bytes(whole)
    assert verify(data).is_whole
    _read(_open(data, key))
    (manifest,) = data.glob("digests/fields/*/manifest.json")
    manifest.unlink()
    with pytest.raises(SignatureError):  # it is on the signed list
        _open(data, key)


def test_the_command_signs_and_copies_them(data: Path, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sign", str(data), "--key", str(key), "--fields"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["copy", str(data), str(data.parent / "copy")]) == 0
    copied = data.parent / "copy"
    assert _read(_open(copied, key)) == _read(Dataset.open(data))
    assert list(copied.glob("digests/fields/*/manifest.json"))
