"""``shardflow pack-text``: the recipe packs, mistakes are said, and nothing of a text or a path is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.format import Dataset
from tests.cli.conftest import Call

RECIPE = Path(__file__).resolve().parents[2] / "pipelines" / "recipes" / "pack_corpus.toml"


@pytest.fixture
def arguments(tmp_path: Path) -> list[object]:
    """The recipe, with inputs of ours."""
    notes = tmp_path / "OKONKWO"
    notes.mkdir()
    lines = [json.dumps({"text": f"Note {n}: lungs are clear."}) for n in range(9)]
    (notes / "a.jsonl").write_text("\n".join([*lines, '{"text":"OKONKWO']), encoding="utf-8")
    places = {
        "inputs.files": [str(notes)],
        "output": str(tmp_path / "out"),
        "private_dir": str(tmp_path / "p"),
    }
    settings = [f"--set={name}={json.dumps(value)}" for name, value in places.items()]
    return ["pack-text", "--config", RECIPE, *settings]


def test_the_recipe_packs_and_says_so(call: Call, arguments: list[object], tmp_path: Path) -> None:
    called = call(*arguments, "--set=policy.max_quarantined_share=0.5")
    assert called.code == 0
    assert called.last_line["inputs"] == {"total": 10, "packed": 9, "skipped": 0, "quarantined": 1}
    assert called.out.startswith(
        "10 lines: 9 packed, 0 skipped, 1 quarantined.\nNot packed: 1 INVALID_JSON.\n"
    )
    assert "OKONKWO" not in called.out + called.err
    assert Dataset.open(tmp_path / "out").samples.num_samples == 9
    again = call(*arguments, "--set=policy.max_quarantined_share=0.5", "--json")
    assert (again.code, again.lines[0]["status"]) == (0, "already_packed")
    assert call(*arguments, "--append", "--json").lines[0]["status"] == "nothing_new"
    # Other commands know what to do with it, or say that they do not.
    assert call("info", tmp_path / "out", "--json").lines[0]["inputs"]["quarantined"] == 1
    assert call("verify", tmp_path / "out").code == 0
    assert call("copy", tmp_path / "out", tmp_path / "copy").code == 0
    assert call("verify", tmp_path / "copy").code == 0
    refused = call("preview", tmp_path / "out", "train:0", "-o", tmp_path / "a.png")
    assert (refused.code, "a sample of text alone" in refused.err) == (2, True)
    refused = call("remove", tmp_path / "out", "--private-dir", tmp_path / "p", "--sample-key", "a" * 26)
    assert (refused.code, "got a text corpus; pack it again" in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("fields.text=note", "lines must have [fields] text = 'note'."),
        ("fields.kind=conversations", "(role = 'role', content = 'content')"),
    ],
)
def test_a_field_that_no_line_has_is_named(
    call: Call, arguments: list[object], setting: str, named: str
) -> None:
    called = call(*arguments, f"--set={setting}", "--set=conversations.form=messages")
    assert called.code == 3
    assert "9 MISSING_FIELD" in called.out
    assert named in called.out.replace("\n", " ")


def test_too_much_quarantine_is_exit_code_3(call: Call, arguments: list[object]) -> None:
    called = call(*arguments)
    assert called.code == 3
    assert "Too many lines are quarantined" in called.out
    assert "OKONKWO" not in called.out + called.err


def test_a_mistyped_setting_is_named(call: Call, arguments: list[object]) -> None:
    called = call(*arguments, "--set=fields.txt=a")
    assert called.code == 2
    assert "fields" in called.err


def test_every_setting_is_shown(call: Call, arguments: list[object], tmp_path: Path) -> None:
    called = call(*arguments, "--print-config")
    assert called.code == 0
    assert 'text = "scrub"' in called.out
    assert not (tmp_path / "out").exists()


def test_pack_takes_a_recipe_of_lines(call: Call, arguments: list[object], tmp_path: Path) -> None:
    rest = [*arguments[1:], "--set=policy.max_quarantined_share=0.5"]
    refused = call("pack", *rest, "--dry-run")
    assert (refused.code, "this file has [fields]" in refused.err) == (2, True)
    called = call("pack", *rest, "--set=fields.kind=conversations")
    assert called.code == 0
    assert "Conversations by form: 9 document.\n" in called.out
    assert Dataset.open(tmp_path / "out").samples.num_samples == 9
