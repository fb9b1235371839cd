"""``shardflow pack``: what it says of folders that it cannot read or create."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Call


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_missing_input_folder_is_named_on_a_terminal_only(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    recipe = tmp_path / "pack.toml"
    recipe.write_text(
        'output = "out"\nprivate_dir = "private"\n[inputs]\ndicom = ["SENTINEL"]\n[splits]\ntrain = 1\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    called = call("pack", "--config", recipe)
    assert called.code == 2
    assert "input folder 1 of 1 must exist and be readable, got No such file or directory;" in called.err
    assert ("SENTINEL" in called.err) is is_terminal
    assert "SENTINEL" not in called.out


@pytest.mark.parametrize("wrong", ["output", "private_dir"])
def test_a_folder_that_cannot_be_created_is_a_setting(call: Call, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "dicom").mkdir()
    (tmp_path / "dicom" / "a").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    folders = {"output": tmp_path / "out", "private_dir": tmp_path / "private"} | {
        wrong: tmp_path / "file" / "SENTINEL"
    }
    recipe = tmp_path / "pack.toml"
    lines = [f"{name} = {str(folder)!r}" for name, folder in folders.items()]
    recipe.write_text(
        "\n".join([*lines, "[inputs]", f"dicom = [{str(tmp_path / 'dicom')!r}]", "[splits]", "train = 1"])
    )
    called = call("pack", "--config", recipe)
    assert called.code == 2
    assert "must be folders that this job can create, got: Not a directory; correct their paths" in called.err
    assert "kept" not in called.err  # nothing has been packed
    assert "SENTINEL" not in called.err + called.out
