"""Counter of the repository's size: ``python -m tests.architecture.size [FOLDER]``, or ``make size``.

A code line is a line with a token of code on it: blank lines, comments, docstrings and attribute docstrings do
not count. The core is what a reader would compare with other loaders: format, storage, sampling, fields, loading.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_LIBRARY: Final = ("shardflow", "pipelines")
_CORE: Final = ("format", "storage", "sampling", "fields", "loading", "shards", "epochs", "augmentation")
"""Rooms of the core; ``shards``, ``epochs`` and ``augmentation`` are their names up to 0.1.0."""
_LAYOUT_TOKENS: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


def code_lines(source: str) -> int:
    """Count the lines of ``source`` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _modules(root: Path) -> Iterator[Path]:
    for top in _LIBRARY:
        yield from sorted((root / top).rglob("*.py"))


def _num_words(paths: Iterator[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def _public_names(path: Path) -> int:
    """Count the names that a module lists in ``__all__``."""
    names = 0
    for node in ast.parse(path.read_text()).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            value = getattr(node, "value", None)
            names += len(value.elts) if isinstance(value, ast.List | ast.Tuple) else 0
    return names


def measure(root: Path) -> dict[str, int]:
    """Measure the checkout at ``root``: the rows of the table, by name."""
    sizes = {path: code_lines(path.read_text()) for path in _modules(root)}
    core = {path: size for path, size in sizes.items() if path.relative_to(root).parts[1] in _CORE}
    pages = [root / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    pages += [path for path in (root / "docs").rglob("*.md") if "adr" not in path.parts]
    decisions = [path for path in (root / "docs/adr").glob("*.md") if re.match(r"\d{4}-", path.name)]
    return {
        "modules": len(sizes),
        "packages of shardflow": sum(
            1 for path in (root / "shardflow").iterdir() if (path / "__init__.py").exists()
        ),
        "code lines": sum(sizes.values()),
        "code lines of the core": sum(core.values()),
        "names in __all__": sum(_public_names(path) for path in sizes),
        "words of documents": _num_words(iter(pages)),
        "words of decision records": _num_words(iter(decisions)),
        "decision records": len(decisions),
    }


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2]
    for name, count in measure(root).items():
        sys.stdout.write(f"{name:28}{count:>10,}\n")


if __name__ == "__main__":
    main()
