"""Links of the pages lead somewhere, and every block says in which language it is."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from shardflow.format.reasons import REASONS
from tests.docs.blocks import REPOSITORY, all_blocks, find_blocks

pytestmark = pytest.mark.fast

LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def test_links_lead_to_files() -> None:
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    broken = [
        f"{page.relative_to(REPOSITORY)}: {link}"
        for page in pages
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert not broken


# What a reader runs, and what a reader looks at; the former is run by test_commands and test_scripts.
RUN = {"python", "sh"}
LOOKED_AT = {"", "hex", "json", "text", "toml", "yaml"}


def test_every_block_is_of_a_kind_that_is_run_or_looked_at() -> None:
    unknown = [
        f"{block}: {block.language}" for block in all_blocks() if block.language not in RUN | LOOKED_AT
    ]
    assert not unknown, f"no test would run these; mark them sh or python: {unknown}"


def test_a_block_that_is_not_run_says_why() -> None:
    silent = [
        str(block)
        for block in all_blocks()
        if block.language in RUN and block.note and not re.fullmatch(r"no-test: .{10,}", block.note)
    ]
    assert not silent, f"write 'no-test: reason' after the language: {silent}"


def test_blocks_of_settings_can_be_read() -> None:
    for block in find_blocks("toml"):
        assert tomllib.loads(block.text), block
    for block in find_blocks("json"):
        assert json.loads(block.text), block


def test_no_command_hides_in_an_indented_block() -> None:
    """Four spaces make a block too, which no test finds."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    hidden = [
        f"{page.relative_to(REPOSITORY)}: {match[0].strip()}"
        for page in pages
        for match in re.finditer(
            r"^\n {4,}(?:\$ |make |shardflow |torchrun |python |import |from ).*$",
            re.sub(
                r"^( *)```.*?^\1```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
            ),
            re.MULTILINE,
        )
    ]
    assert not hidden, f"put these into blocks marked sh or python: {hidden}"


def test_every_reason_has_its_remedy() -> None:
    page = (REPOSITORY / "docs" / "howto" / "quarantine.md").read_text(encoding="utf-8")
    assert [reason for reason in REASONS if f"`{reason}`" not in page] == []


def test_blocks_with_commands_or_code_are_marked() -> None:
    unmarked = [
        str(block)
        for block in all_blocks()
        if block.language in {"", "text"}
        and re.search(
            r"^(?:\$ |make |shardflow |torchrun |python |\.venv/|import \w|from \w+ import|>>> )",
            block.text,
            re.MULTILINE,
        )
    ]
    assert not unmarked, f"mark these blocks sh or python, so that they are run: {unmarked}"


def test_paths_that_pages_name_exist() -> None:
    """The front pages name folders and files of the tree; each is there."""
    named = re.compile(r"(?<![\w/<.])((?:tests|docs|pipelines|shardflow)/[\w/.-]*[\w/])")
    missing = {
        f"{page}: {path}"
        for page in ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")
        for path in named.findall((REPOSITORY / page).read_text(encoding="utf-8"))
        if not Path(REPOSITORY, path).exists()
    }
    assert not missing


def test_every_invariant_names_tests_that_exist() -> None:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\d) \| .* \| (.*) \|$", page, re.MULTILINE)
    contracts = {number for number, _ in rows}
    assert contracts >= {f"P{number}" for number in range(1, 8)} | {f"S{number}" for number in range(1, 10)}
    missing = [
        f"{number}: {name}"
        for number, tests in rows
        for name in tests.split(", ")
        if not (REPOSITORY / "tests" / f"{name}.py").is_file() and not (REPOSITORY / "tests" / name).is_dir()
    ]
    assert not missing
