"""Many processes on one cold cache, some of them killed: every block is published once, and is right (N3)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from shardflow.storage import CacheConfig
from shardflow.storage.cache.store import Cache
from tests.unit.storage.cache.processes import MODES, NUM_PIECES, blocks_of, make_origin, spans, start


def _storm(folder: Path, num_processes: int, num_killed: int) -> None:
    content = make_origin(folder)
    modes = [MODES[1 + n % 3] if n < num_killed else "read" for n in range(num_processes)]
    processes = start(folder, range(num_processes), modes)
    ended = [(process.communicate(timeout=300)[0], process.returncode) for process in processes]
    results = [json.loads(out) for out, code in ended if code == 0]
    assert all(code == 0 for (_, code), mode in zip(ended, modes, strict=True) if mode == "read")
    # One that was to die may have found everything fetched by others.
    num_died = sum(code == -9 for _, code in ended)
    assert [result["wrong"] for result in results] == [0] * len(results)
    assert all(result.get("cache_fault", 0) == 0 for result in results)
    blocks = blocks_of(content)
    folders = list((folder / "cache" / "blocks").iterdir())
    assert [path.name for path in folders] == [blocks.name]
    files = sorted(folders[0].iterdir())
    assert [path.name for path in files] == [f"{number:08x}" for number in range(NUM_PIECES)]
    for path, span in zip(files, spans(), strict=True):
        assert path.read_bytes() == content[span.offset : span.offset + span.num_bytes]
    fetched = Counter(line for note in (folder / "notes").iterdir() for line in note.read_text().splitlines())
    # Each block once, and again only where its fetcher was killed: at most the three of a read.
    assert len(fetched) == NUM_PIECES
    assert sum(fetched.values()) - NUM_PIECES <= 3 * num_died
    # Nothing of the dead is left once someone takes their slots.
    caches = [
        Cache(CacheConfig(directory=folder / "cache", max_bytes=1 << 26, min_free_bytes=0, block_bytes=4096))
        for _ in range(num_died + 1)
    ]
    disk = caches[0].disk
    assert disk is not None
    assert disk.num_bytes == NUM_PIECES * 8192
    for cache in caches:
        cache.close()


def test_eight_processes_two_killed(tmp_path: Path) -> None:
    _storm(tmp_path, 8, 2)


@pytest.mark.slow
def test_sixty_four_processes_sixteen_killed(tmp_path: Path) -> None:
    _storm(tmp_path, 64, 16)


def test_two_processes_fetch_each_block_once(tmp_path: Path) -> None:
    make_origin(tmp_path)
    processes = start(tmp_path, range(2), ["read", "read"])
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    notes = [path.read_text().splitlines() for path in sorted((tmp_path / "notes").iterdir())]
    assert sorted(line for note in notes for line in note) == sorted(
        f"{span.offset} {span.num_bytes}" for span in spans()
    )


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_kill_in_the_middle_of_a_publication_leaves_no_trace(tmp_path: Path, mode: str) -> None:
    content = make_origin(tmp_path)
    (dead,) = start(tmp_path, [3], [mode])
    dead.communicate(timeout=300)
    assert dead.returncode == -9
    (alive,) = start(tmp_path, [4], ["read"])
    out, _ = alive.communicate(timeout=300)
    assert alive.returncode == 0
    assert json.loads(out)["wrong"] == 0
    folder = tmp_path / "cache" / "blocks" / blocks_of(content).name
    assert len(list(folder.iterdir())) == NUM_PIECES
    assert list((tmp_path / "cache" / "incoming").iterdir()) == []
