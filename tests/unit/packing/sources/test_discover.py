"""Discovery: every entry comes back, in one order, with a problem where it is no file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.format.reasons import Reason
from shardflow.packing.sources.placement import discover

pytestmark = pytest.mark.fast


def test_every_entry_comes_back_sorted_by_path(tmp_path: Path) -> None:
    for name in ("b/2.dcm", "b/10.dcm", "a.dcm", "b.dcm", ".hidden", "z/deep/er/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * len(name))
    found = discover([tmp_path])
    assert [one.relative_path for one in found] == [
        ".hidden",
        "a.dcm",
        "b.dcm",
        "b/10.dcm",
        "b/2.dcm",
        "z/deep/er/x",
    ]
    assert all(one.problem is None and one.num_bytes == len(one.relative_path) for one in found)
    assert all(one.path([tmp_path]).read_bytes() for one in found)


def test_what_is_no_file_comes_back_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "circle").symlink_to(".", target_is_directory=True)
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert {one.relative_path: (one.num_bytes, one.problem) for one in discover([tmp_path])} == {
        "broken": (0, Reason.FILE_UNREADABLE),
        "circle": (0, Reason.NOT_REGULAR_FILE),
        "file": (3, None),
        "link": (3, None),
        "pipe": (0, Reason.NOT_REGULAR_FILE),
    }


def test_a_folder_that_cannot_be_listed_comes_back_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "open").write_bytes(b"")
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "locked":
            raise PermissionError
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert [(one.relative_path, one.problem) for one in discover([tmp_path])] == [
        ("locked", Reason.FILE_UNREADABLE),
        ("open", None),
    ]


def test_names_that_are_no_unicode_are_found(tmp_path: Path) -> None:
    name = os.fsdecode(b"na\xefve.dcm")
    (tmp_path / name).write_bytes(b"x")
    (only,) = discover([tmp_path])
    assert only.path([tmp_path]).read_bytes() == b"x"


def test_a_root_may_be_a_file_and_roots_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_bytes(b"x")
    (tmp_path / "a").write_bytes(b"a")
    roots = [tmp_path / "b", tmp_path / "a"]
    assert [(one.root_index, one.relative_path, one.path(roots)) for one in discover(roots)] == [
        (0, "x", tmp_path / "b" / "x"),
        (1, ".", tmp_path / "a"),
    ]


def test_roots_must_exist_and_not_overlap(tmp_path: Path) -> None:
    (tmp_path / "SENTINEL" / "inner").mkdir(parents=True)
    for roots, message in (
        ([], "at least one folder"),
        ([tmp_path / "absent"], "input folder 1 of 1 must exist and be readable"),
        ([tmp_path / "SENTINEL", tmp_path / "SENTINEL" / "inner"], "number 2 inside number 1"),
        ([tmp_path / "SENTINEL", tmp_path / "SENTINEL"], "number 1 inside number 2"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            discover(roots)
        assert "SENTINEL" not in str(caught.value)


def test_a_missing_root_is_named_beside_the_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        discover([tmp_path / "SENTINEL"])
    assert caught.value.path == str(tmp_path / "SENTINEL")
    assert "SENTINEL" not in str(caught.value)
