"""The console script as a whole: help, versions, exit codes, one clear line for every error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shardflow.cli import info
from tests.cli.conftest import Call

pytestmark = pytest.mark.fast


def _damage_manifest(dataset: Path) -> None:
    manifest = dataset / "manifest-000001.json"
    manifest.chmod(0o644)
    manifest.write_bytes(manifest.read_bytes().replace(b'"packed":16', b'"packed":61'))


@pytest.mark.parametrize("command", ["info", "plan", "verify"])
def test_help_of_every_command(call: Call, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call(command, "--help")
    assert left.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_options_are_frozen(golden: Callable[[str, object], None]) -> None:
    """A new option is a decision: it shows in a diff of the golden file."""
    from shardflow.cli.main import command_parsers

    options = {
        name: sorted(
            option for action in parser._actions for option in action.option_strings or [action.dest]
        )
        for name, parser in command_parsers().items()
    }
    golden("cli-options", options)


def test_version_names_what_decides_the_bytes(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        call("--version")
    assert left.value.code == 0
    printed = capsys.readouterr().out
    for part in ("shardflow 0.", "format 1", "numpy", "blosc2", "torch", "pydicom"):
        assert part in printed


@pytest.mark.parametrize(
    "arguments", [(), ("inform",), ("info",), ("info", "x", "y"), ("info", "x", "--yaml")]
)
def test_wrong_command_line_is_one_line_and_code_2(call: Call, arguments: tuple[str, ...]) -> None:
    called = call(*arguments)
    assert called.code == 2
    assert called.out == ""
    assert called.err.startswith("shardflow: ")
    assert called.err.count("\n") == 1


def test_an_unknown_option_points_to_the_help_of_its_command(call: Call) -> None:
    assert call("info", "x", "--yaml").err.endswith("see: shardflow info --help\n")
    assert call("--yaml").err.endswith("see: shardflow --help\n")


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(("verfy", "x"), "verify"), (("--json", "inof"), "info"), (("tok",), "tokenize")],
)
def test_unknown_command_is_answered_with_the_nearest_one(
    call: Call, arguments: tuple[str, ...], nearest: str
) -> None:
    called = call(*arguments)
    assert called.code == 2
    assert f"did you mean {nearest}?" in called.err
    assert "train-tokenizer" not in called.err


@pytest.mark.parametrize("command", ["info", "verify"])
def test_missing_folder(call: Call, tmp_path: Path, command: str) -> None:
    called = call(command, tmp_path / "nothing", "--json")
    assert called.code == 2
    assert "existing folder" in called.lines[0]["error"]
    assert "existing folder" in called.err


@pytest.mark.parametrize("command", ["info", "verify"])
def test_folder_without_a_dataset_ends_like_a_missing_one(call: Call, tmp_path: Path, command: str) -> None:
    called = call(command, tmp_path)
    assert called.code == call(command, tmp_path / "nothing").code == 2
    assert "did packing finish" in called.err


@pytest.mark.parametrize("command", ["info", "verify"])
def test_empty_address_is_not_the_current_folder(
    call: Call, dataset: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(dataset)
    assert call(command, "").code == 2
    assert call(command, ".").code == 0


def test_unknown_scheme(call: Call) -> None:
    called = call("info", "gopher://somewhere/dataset")
    assert called.code == 2
    assert "file" in called.err
    assert called.err.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"format":"shardflow"}\n', b"\xff\xfe\n", b"[1]\n"])
def test_unreadable_manifest(call: Call, dataset: Path, content: bytes | None) -> None:
    manifest = dataset / "manifest-000001.json"
    if content is None:
        _damage_manifest(dataset)
    else:
        manifest.chmod(0o644)
        manifest.write_bytes(content)
    called = call("info", dataset, "--json")
    assert called.code == 1
    assert "manifest" in called.lines[0]["error"]
    assert called.err.count("\n") == 1


def test_mistake_of_ours_shows_no_text_that_others_wrote(
    call: Call, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("DOE^JOHN")

    monkeypatch.setattr(info, "describe", fail)
    called = call("info", dataset, "--json")
    assert called.code == 1
    assert "internal error: KeyError at" in called.err
    assert "DOE" not in called.err + called.out
