"""Links of the pages lead somewhere, and every block says in which language it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import REPOSITORY, find_blocks

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


def test_a_block_that_is_not_run_says_why() -> None:
    silent = [
        str(block)
        for language in ("python", "sh", "bash", "console")
        for block in find_blocks(language)
        if block.note and not re.fullmatch(r"no-test: .{10,}", block.note)
    ]
    assert not silent, f"write 'no-test: reason' after the language: {silent}"


def test_blocks_with_commands_are_marked_sh() -> None:
    unmarked = [
        str(block)
        for language in ("", "bash", "console", "shell", "text")
        for block in find_blocks(language)
        if re.search(r"^(?:\$ |make |shardflow |torchrun |python |\.venv/)", block.text, re.MULTILINE)
    ]
    assert not unmarked, f"mark these blocks sh, so that they are run: {unmarked}"


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
