"""What the documentation site holds beside the pages of docs/.

Pages link to files of the repository, which a site does not have: each of them becomes a page that shows it.
Markdown is shown as in docs/. The pages at the root (ARCHITECTURE.md, ...) get a place of their own, the
commands are described by their own ``--help``, reasons and flags by the tables of the code, and the
navigation lists the decisions by number.
mkdocs calls the functions by their names.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_config", "on_files", "on_page_markdown"]

_REPOSITORY: Final = Path(__file__).resolve().parents[2]
_DOCS: Final = "docs"
_AT_ROOT: Final = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
}
"""Pages of the root and their names in the site."""
_COMMANDS: Final = "commands.md"
_DECISIONS: Final = "adr/README.md"
_SHOWN: Final = "files"
"""Folder of the site for pages that show files of the repository."""
_LANGUAGES: Final = {
    ".json": "json",
    ".py": "python",
    ".sbatch": "bash",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
}
_LINK: Final = re.compile(r"(?P<before>\]\()(?P<target>(?!https?:|#|mailto:)[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_NOTE: Final = re.compile(r"^(?P<fence> *```[a-z]+) +no-test: .*$", re.MULTILINE)
_TABLE: Final = re.compile(r"^<!-- (?P<name>flags|reasons|line-reasons) -->$", re.MULTILINE)
_HELP_COLUMNS: Final = "88"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the decisions to the navigation, so that a new one needs no line there."""
    for part in config.nav or []:
        if isinstance(part, dict) and "Decisions" in part:
            part["Decisions"] += [f"adr/{path.name}" for path in _decisions()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ holds."""
    for name, place in _AT_ROOT.items():
        files.append(File.generated(config, place, content=(_REPOSITORY / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, _COMMANDS, content=_describe_commands()))
    shown: set[str] = set()
    pages = list(files.documentation_pages())
    while pages:
        page = pages.pop()
        for target in _LINK.finditer(page.content_string):
            path = _repository_path(page.src_uri, target["target"])
            if path is not None and _is_shown(path) and path not in shown:
                shown.add(path)
                # A page of Markdown may lead to further files.
                pages.append(File.generated(config, _place(path), content=_show(path)))
                files.append(pages[-1])
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links to pages of the site, insert generated tables, and drop what only the tests read."""
    here = page.file.src_uri
    markdown = _TABLE.sub(lambda place: _tables()[place["name"]], markdown)

    def lead(link: re.Match[str]) -> str:
        path = _repository_path(here, link["target"])
        if path is None:
            return link[0]
        target = posixpath.relpath(_place(path), posixpath.dirname(here) or ".")
        return f"{link['before']}{target}{link['anchor'] or ''})"

    return _NOTE.sub(r"\g<fence>", _LINK.sub(lead, markdown))


def _tables() -> dict[str, str]:
    """The tables that pages leave to the site, by the name in their comment."""
    from shardflow.format.reasons import FLAGS, REASONS, remedy_of
    from shardflow.packing.corpora.config import REASONS as LINE_REASONS

    reasons = [(code, info.outcome, info.sentence, remedy_of(code)) for code, info in REASONS.items()]
    lines = [(code, info.outcome, info.meaning, info.remedy) for code, info in LINE_REASONS.items()]
    return {
        "flags": _table(("flag", "meaning"), FLAGS.items()),
        "reasons": _table(("reason", "outcome", "meaning", "what to do"), reasons),
        "line-reasons": _table(("reason", "outcome", "what it is", "what to do"), lines),
    }


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [heads, ["---"] * len(heads), *((f"`{row[0]}`", *row[1:]) for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _decisions() -> list[Path]:
    return sorted((_REPOSITORY / _DOCS / "adr").glob("[0-9]*.md"))


def _repository_path(page: str, target: str) -> str | None:
    """The path in the repository that a link of a page leads to, or None for a page that the site makes."""
    origin = {place: name for name, place in _AT_ROOT.items()}.get(page, f"{_DOCS}/{page}")
    if page.startswith(f"{_SHOWN}/"):
        origin = page.removeprefix(f"{_SHOWN}/").removesuffix(".md")
    if page == _COMMANDS or not origin.endswith(".md"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _is_shown(path: str) -> bool:
    """Whether a file or folder gets a page that shows it, because the site has none of its own for it."""
    if path in _AT_ROOT or path == f"{_DOCS}/adr":
        return False
    source = _REPOSITORY / path
    return source.is_dir() or (source.is_file() and not path.startswith(f"{_DOCS}/"))


def _place(path: str) -> str:
    """Where the site has a file of the repository."""
    if path in _AT_ROOT:
        return _AT_ROOT[path]
    if path == f"{_DOCS}/adr":
        return _DECISIONS
    if _is_shown(path):
        return f"{_SHOWN}/{path}.md"
    return path.removeprefix(f"{_DOCS}/")


def _show(path: str) -> str:
    """A page of Markdown as it is; else one with the text of a file, or of a folder's files, not searched."""
    source = _REPOSITORY / path
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n"
    if not source.is_dir():
        return head + _block(source)
    files = sorted(each for each in source.iterdir() if each.is_file() and each.name[0] not in "._")
    return head + "\n".join(f"## {each.name}\n\n{_block(each)}" for each in files)


def _block(file: Path) -> str:
    language = _LANGUAGES.get(file.suffix, "text")
    return f"~~~~~{language}\n{file.read_text(encoding='utf-8')}\n~~~~~\n"


def _describe_commands() -> str:
    """A page with the ``--help`` of every command and job, written by their own parsers."""
    os.environ["COLUMNS"] = _HELP_COLUMNS
    lines = ["# Commands\n", "What each command says with `--help`.\n"]
    for title, parser in _parsers():
        lines += [f"## {title}\n", "```text", parser.format_help().rstrip(), "```\n"]
    return "\n".join(lines)


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    from pipelines.demo import __main__ as demo
    from shardflow.cli import main as cli

    yield "shardflow", cli.build_parser()
    for name, parser in cli.command_parsers().items():
        yield f"shardflow {name}", parser
    yield "pipelines.demo", demo.build_parser()
