"""The code blocks of README and docs, found and split into commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["REPOSITORY", "Block", "all_blocks", "commands", "find_blocks", "is_script_page", "write_script"]

REPOSITORY = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    note: str
    """What follows the language; ``no-test: reason`` keeps a block from being run."""
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def all_blocks() -> list[Block]:
    """All blocks, in the order of pages and lines."""
    pages = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]
    return [block for page in sorted(pages) for block in _blocks(page)]


def find_blocks(language: str) -> list[Block]:
    """All blocks of a language, in the order of pages and lines."""
    return [block for block in all_blocks() if block.language == language]


def is_script_page(page: Path) -> bool:
    """Whether a reader follows the page from its first line to its last: tutorial and how-to pages."""
    return page == Path("docs/tutorial.md") or page.parent == Path("docs/howto")


def write_script(page: Path) -> str:
    """All that a reader of a page does, as one bash script, which says on standard error where it is.

    A ``toml`` block with a title becomes a file of that name, a ``python`` block a process of its own.
    """
    lines = ["set -euo pipefail"]
    for block in all_blocks():
        if block.page != page or block.note.startswith("no-test"):
            continue
        title = re.fullmatch(r'title="([\w.-]+)"', block.note)
        match block.language:
            case "sh":
                body = block.text
            case "python":
                # MONAI says on every LoadImage which readers of its own cannot be had.
                quiet = "-W ignore:NvImgCodecPydicomReader:UserWarning" if "monai" in block.text else ""
                body = f"python -W error {quiet} - <<'END OF BLOCK'\n{block.text}END OF BLOCK\n"
            case _ if title:
                body = f"cat > {title[1]} <<'END OF BLOCK'\n{block.text}END OF BLOCK\n"
            case _:
                continue
        lines += [f"echo '@ {block}' >&2", body]
    return "\n".join(lines)


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        language, _, note = match["info"].strip().partition(" ")
        yield Block(
            page=page.relative_to(REPOSITORY),
            line=text.count("\n", 0, match.start()) + 1,
            language=language,
            note=note.strip(),
            text=match["text"],
        )


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block as argument lists, without comments and prompts."""
    joined = block.text.replace("\\\n", " ")
    found = (shlex.split(line.strip().removeprefix("$ "), comments=True) for line in joined.splitlines())
    return [command for command in found if command]
