"""A cache folder that another user of the machine prepared, or can write in; the other user is a real one."""

from __future__ import annotations

import os
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.storage.cache.config import CacheConfig
from tests.factories import make_dataset

OTHER = 64_321
"""A user that no machine has."""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder that everybody writes in, as /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)  # the other user gets to it
    return folder


def _as_other(act: str, folder: Path) -> None:
    """Run shell commands as the other user."""
    child = os.fork()
    if not child:
        os.setgroups([])
        os.setresgid(OTHER, OTHER, OTHER)
        os.setresuid(OTHER, OTHER, OTHER)
        os.chdir(folder)
        os.execv("/bin/sh", ["sh", "-ec", act])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _open(tmp_path: Path, directory: Path) -> Dataset:
    url = tmp_path / "data"
    if not url.exists():
        make_dataset(url, num_samples=4)
    return Dataset.open(url, cache=CacheConfig(directory=directory, max_bytes=1 << 22, min_free_bytes=0))


def _read(dataset: Dataset) -> list[dict[str, bytes]]:
    return [dataset.read_fields(row) for row in range(len(dataset))]


@pytest.mark.parametrize(
    ("act", "name", "message"),
    [
        ("mkdir -m 755 cache", "cache", "belongs to another user"),
        ("mkdir -m 777 cache", "cache/below/it", ""),  # what is made below is ours
        ("mkdir mine && ln -s mine cache", "cache", "a link that another user made"),
        ("mkdir mine && ln -s mine up", "up/cache", "a link that another user made"),
        ("ln -s ../victim cache", "cache", "a link that another user made"),
        ("mkdir -m 777 a && ln -s ../../victim a/up", "a/up/x/../cache", "a link that another user made"),
    ],
)
def test_what_another_user_planted(tmp_path: Path, shared: Path, act: str, name: str, message: str) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    _as_other(act, shared)
    if message:
        with pytest.raises(ConfigError, match=message) as refused:
            _open(tmp_path, shared / name)
        assert "name a" in refused.value.message
        assert not list((tmp_path / "victim").iterdir())
    else:
        _read(_open(tmp_path, shared / name))
        assert len(list((shared / name).iterdir())) > 1


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_can_write_in(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="others may write in the cache directory"):
        _open(tmp_path, folder)
    assert not list(folder.iterdir())
    folder.chmod(mode & 0o755)
    assert _read(_open(tmp_path, folder))


def test_links_of_our_own_are_followed(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (shared / "link").symlink_to("../nvme")
    _read(_open(tmp_path, shared / "link" / "cache"))
    assert (tmp_path / "nvme" / "cache" / "blocks").is_dir()


def test_parts_and_blocks_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    exact = _read(_open(tmp_path, folder))
    blocks = [path for path in folder.glob("blocks/*/*") if path.is_file()]
    assert blocks
    for path in blocks:  # put there while the folder was open to others
        os.chown(path, OTHER, OTHER)
    dataset = _open(tmp_path, folder)
    assert _read(dataset) == exact
    assert dataset.cache is not None
    assert dataset.cache.counters.snapshot()["cache_poisoned"]["num_items"] == len(blocks)
    assert {path.stat().st_uid for path in folder.glob("blocks/*/*")} == {0}
    os.chown(folder / "blocks", OTHER, OTHER)
    with pytest.raises(ConfigError, match="belongs to another user"):
        _open(tmp_path, folder)


def test_another_user_cannot_reach_a_folder_that_we_made(tmp_path: Path, shared: Path) -> None:
    _read(_open(tmp_path, shared / "cache"))
    _as_other("! ls cache && ! mv cache elsewhere && ! touch cache/lock && ! ln -s x cache/y", shared)


def test_a_forged_block_is_found_by_its_checksum(tmp_path: Path) -> None:
    """Not one that is made to have the same crc32c, which is why nobody else may write there."""
    folder = tmp_path / "cache"
    exact = _read(_open(tmp_path, folder))
    for path in folder.glob("blocks/*/*"):
        content = np.frombuffer(path.read_bytes(), np.uint8).copy()
        before = google_crc32c.value(content.tobytes())
        content ^= 1
        assert google_crc32c.value(content.tobytes()) != before
        path.chmod(0o600)
        path.write_bytes(content.tobytes())
    assert _read(_open(tmp_path, folder)) == exact
