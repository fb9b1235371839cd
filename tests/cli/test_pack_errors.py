"""``shardflow pack``: the terminal shows the path of a missing input, a redirected stream does not."""

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
