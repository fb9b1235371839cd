"""Surrogates: stable for ever, unrelated without the key, and the key stays where it is."""

from __future__ import annotations

import copy
import os
import pickle
import re
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError
from shardflow.packing.deid.pseudonyms import SecretKey

pytestmark = pytest.mark.fast

KEY = bytes(range(32))


def test_surrogates_are_frozen(golden: Callable[[str, object], None]) -> None:
    key = SecretKey(KEY)
    kinds = ("study", "series", "patient", "input")
    values = ("1.2.840.1", "", "\u00fcml\u00e4ut", "a" * 300)
    golden(
        "surrogates",
        {
            "key_id": key.key_id,
            "surrogates": {
                f"{kind}|{value[:9]}": key.surrogate(kind, value) for kind in kinds for value in values
            },
            "buckets": [key.bucket("patient", f"p{number}", 10_000) for number in range(20)],
        },
    )


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="\0")))
def test_a_surrogate_is_a_sample_key(value: str, kind: str) -> None:
    assert re.fullmatch(r"[a-z2-7]{26}", SecretKey(KEY).surrogate(kind, value))


def test_kind_and_value_cannot_be_shifted_into_one_another() -> None:
    key = SecretKey(KEY)
    assert key.surrogate("ab", "c") != key.surrogate("a", "bc")
    with pytest.raises(ConfigError, match="zero byte"):
        key.surrogate("a\0b", "c")


def test_another_key_gives_other_surrogates_and_another_key_id() -> None:
    one, other = SecretKey(KEY), SecretKey(KEY[::-1])
    assert one.surrogate("study", "1.2") != other.surrogate("study", "1.2")
    assert one.key_id != other.key_id
    assert re.fullmatch(r"[0-9a-f]{8}", one.key_id)


def test_buckets_are_even_and_do_not_depend_on_other_values() -> None:
    key = SecretKey(KEY)
    counts = [0] * 10
    for number in range(5000):
        counts[key.bucket("patient", str(number), 10)] += 1
    assert min(counts) > 400
    assert max(counts) < 600
    with pytest.raises(ConfigError, match="at least 1"):
        key.bucket("patient", "p", 0)


def test_create_makes_a_private_random_key_once(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = SecretKey.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(path.read_bytes()) == 32
    assert SecretKey.load(path).key_id == first.key_id
    assert SecretKey.create(tmp_path / "other").key_id != first.key_id
    with pytest.raises(ConfigError, match="must not exist"):
        SecretKey.create(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="closed to group and others"):
        SecretKey.load(path)


def test_a_full_disk_leaves_no_half_key(tmp_path: Path) -> None:
    """An empty key file would be refused by every later run of the job."""
    path = tmp_path / "secret.key"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(ConfigError, match="make room"):
            SecretKey.create(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    SecretKey.create(path)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)


def test_bad_key_files_are_refused_without_naming_them(tmp_path: Path) -> None:
    _write(tmp_path / "short", b"SENTINEL")
    _write(tmp_path / "long", b"x" * 5000)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, message in {
        "short": "at least 32 bytes, got 8",
        "long": "at most 4096",
        "folder": "regular file",
        "absent": "No such file or directory; give its path, or for a new dataset make one with",
    }.items():
        with pytest.raises(ConfigError, match=message) as caught:
            SecretKey.load(tmp_path / name)
        shown = "".join(traceback.format_exception(caught.value))
        assert "SENTINEL" not in shown
        assert str(tmp_path) not in str(caught.value)


def test_a_fifo_does_not_hang_the_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="regular file"):
        SecretKey.load(tmp_path / "fifo")


def test_the_key_shows_nowhere_and_is_never_serialized() -> None:
    key = SecretKey(b"SENTINEL" * 4)
    assert "SENTINEL" not in f"{key!r} {key}"
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="never serialized"):
            attempt(key)
