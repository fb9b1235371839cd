"""The code blocks of README and docs, found and split into commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

__all__ = ["REPOSITORY", "Block", "all_blocks", "commands", "find_blocks", "is_script_page", "write_script"]

REPOSITORY = Path(__file__).resolve().parents[2]
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL
)
_TITLE = re.compile(r'title="([\w.-]+)"')
_QUIET = """
import warnings as _warnings
_warnings.filterwarnings("ignore", "NvImgCodecPydicomReader", UserWarning)
"""
_RUN = """
import json as _json, sys as _sys
def _run(blocks):
    own = {*globals()}
    for block, text in blocks:
        for name in {*globals()} - own:
            del globals()[name]
        print("@", block, file=_sys.stderr)
        exec(compile(text, block, "exec"), globals())
_run(_json.load(_sys.stdin))
"""


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

    A ``toml`` block with a title becomes a file of that name. ``python`` blocks are run as those of a
    notebook, in one process until something else comes between, but each without the names of those before.
    """
    lines = ["set -euo pipefail"]
    blocks = [block for block in all_blocks() if block.page == page and _is_run(block)]
    for is_python, found in groupby(blocks, lambda block: block.language == "python"):
        together = list(found)
        if is_python:
            lines.append(_python(together))
            continue
        for block in together:
            title = _TITLE.fullmatch(block.note)
            body = f"cat > {title[1]} <<'END OF BLOCK'\n{block.text}END OF BLOCK\n" if title else block.text
            lines += [f"echo '@ {block}' >&2", body]
    return "\n".join(lines)


def _is_run(block: Block) -> bool:
    is_file = _TITLE.fullmatch(block.note) is not None
    return (block.language in {"sh", "python"} or is_file) and not block.note.startswith("no-test")


def _python(blocks: Sequence[Block]) -> str:
    # MONAI says on every LoadImage which readers of its own cannot be had.
    is_loud = any("monai" in block.text for block in blocks)
    quiet = _QUIET if is_loud else ""
    texts = json.dumps([(str(block), block.text) for block in blocks])
    return f"python -W error -c '{quiet}{_RUN}' <<'END OF BLOCKS'\n{texts}\nEND OF BLOCKS\n"


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
