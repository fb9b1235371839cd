"""The site of `make docs`: built strictly, complete, and readable without a server or a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from shardflow.cli.main import command_parsers
from shardflow.format.reasons import FLAGS, REASONS
from shardflow.packing.corpora.config import REASONS as LINE_REASONS
from tests.docs.blocks import REPOSITORY

pytestmark = pytest.mark.timeout(1200)  # four minutes were too few beside other work

# What makes a browser ask for something by itself; a link (`a`) is only followed by a reader.
_LOADS = {"audio", "embed", "iframe", "img", "link", "object", "script", "source", "video"}
_ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1100,
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return folder


class _References(HTMLParser):
    """Collects what a page loads, where it leads, and the places in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.led: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given.get("id", ""), given.get("name", "")}
        for name in ("src", "href", "data"):
            if name in given:
                canonical = tag == "link" and given.get("rel") == "canonical"
                target = self.loaded if tag in _LOADS and not canonical else self.led
                target.append(given[name])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _References]:
    return {page: _References(page) for page in site.rglob("*.html")}


def test_no_page_asks_for_anything_outside_the_site(site: Path, pages: dict[Path, _References]) -> None:
    asked = [
        f"{page.relative_to(site)}: {address}"
        for page, found in pages.items()
        for address in found.loaded
        if _ELSEWHERE.match(address)
    ]
    asked += [
        f"{sheet.relative_to(site)}: {address}"
        for sheet in site.rglob("*.css")
        for address in re.findall(
            r"(?:url\(|@import )['\"]?((?:https?:)?//[^)'\"]+)", sheet.read_text("utf-8")
        )
    ]
    assert len(pages) > 20
    assert not asked


def test_everything_that_pages_name_is_in_the_site(site: Path, pages: dict[Path, _References]) -> None:
    """A page opened from the disk finds its style, its pictures, and the pages that it leads to."""
    missing = set()
    for page, found in pages.items():
        if page.name == "404.html":  # is served at any depth, so its addresses are absolute
            continue
        for address in found.loaded + found.led:
            path, _, place = address.partition("#")
            if _ELSEWHERE.match(address) or address.startswith(("data:", "mailto:", "javascript:")):
                continue
            target = (page.parent / path).resolve() if path else page
            if target.is_dir():
                target = target / "index.html"
            known = (
                pages[page if not path else site / target.relative_to(site.resolve())].places
                if (target.suffix == ".html" and target.exists())
                else {place}
            )
            if not target.exists() or (place and place not in known):
                missing.add(f"{page.relative_to(site)}: {address}")
    assert not missing


def test_every_command_and_decision_has_its_place(site: Path) -> None:
    commands = (site / "commands.html").read_text(encoding="utf-8")
    for name in command_parsers():
        assert f"usage: shardflow {name} " in commands
    assert "usage: python -m pipelines.demo " in commands
    decisions = (site / "adr" / "index.html").read_text(encoding="utf-8")
    for record in (REPOSITORY / "docs" / "adr").glob("0*.md"):
        assert f'href="{record.stem}.html"' in decisions


@pytest.mark.parametrize("page", ["dicom", "corpora"])
def test_pages_list_the_reasons_and_flags_of_the_code(site: Path, page: str) -> None:
    text = (site / f"{page}.html").read_text(encoding="utf-8")
    codes = [*REASONS, *FLAGS] if page == "dicom" else LINE_REASONS
    assert [code for code in codes if f"<td><code>{code}</code></td>" not in text] == []


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", REPOSITORY / "docs/hooks/site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_only_tests_read_is_not_shown(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "no-test:" not in re.sub(r"<code>.*?</code>", "", page.read_text("utf-8"), flags=re.DOTALL)


def test_a_linked_source_file_is_a_page_that_shows_it(site: Path) -> None:
    shown = (site / "files/pipelines/recipes/pack_folders.toml.html").read_text(encoding="utf-8")
    assert "max_quarantined_share" in shown
    assert "../files/pipelines/recipes" not in (site / "packing.html").read_text(encoding="utf-8")


def test_a_linked_page_beside_its_tests_is_a_page_too(site: Path) -> None:
    """The order, say, which is normative, and leads on to a module."""
    shown = (site / "files/tests/golden/order.md.html").read_text(encoding="utf-8")
    assert "<strong>Keys.</strong>" in shown
    assert 'href="../../../determinism.html#state"' in shown
    assert 'href="../../shardflow/sampling/budget_batches.py.html"' in shown


def test_pages_of_the_root_lead_into_the_site(site: Path, hooks: ModuleType) -> None:
    assert (site / "architecture.html").exists()
    assert hooks._place("README.md") == "readme.md"
    assert hooks._place("docs/adr/README.md") == "adr/README.md"
    assert hooks._place("shardflow/seeds.py") == "files/shardflow/seeds.py.md"
    assert 'href="architecture.html"' in (site / "contributing.html").read_text(encoding="utf-8")
