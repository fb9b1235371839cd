"""Every command and every Python block of README and docs runs.

A folder holds what the pages speak of: a dataset and its recipes. Commands that would take long or need
input of the reader's own (packing, training) run up to the point where all their settings are checked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from pipelines import cli, pack, train
from tests.docs.blocks import REPOSITORY, Block, commands, find_blocks
from tests.factories import make_dataset

TARGETS = set(
    re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)
# What prepares a reader's shell; nothing of ours is in it.
PREPARATION = {"cd", "export", "git", "source", "mkdir"}
RECIPES = {"my-recipe.toml": "pack_folders.toml", "my-training.toml": "train_reports_cpu.toml"}

SHELL_BLOCKS = [block for block in find_blocks("sh") if not block.note]
PYTHON_PAGES = [
    (str(page), list(blocks))
    for page, blocks in groupby(
        (b for b in find_blocks("python") if not b.note), key=lambda block: block.page
    )
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("dataset", "my-dataset", "DATASET"):
        make_dataset(folder / name, splits={"train": 13, "val": 3})
    for name, recipe in RECIPES.items():
        shutil.copy(REPOSITORY / "pipelines" / "recipes" / recipe, folder / name)
    (folder / "pipelines").symlink_to(REPOSITORY / "pipelines")
    return folder


@pytest.fixture
def inside(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(world)
    return world


@pytest.mark.fast
@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=str)
def test_commands_run(block: Block) -> None:
    for command in commands(block):
        problem = _problem_of(command)
        assert not problem, f"{block}: {' '.join(command)}: {problem}"


def _problem_of(command: list[str]) -> str | None:
    """Run a command as far as a test can; what is wrong with it, or None."""
    while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
        command = command[1:]
    program, *arguments = [part.removeprefix(".venv/bin/") for part in command]
    match program:
        case "make":
            unknown = {word for word in arguments if "=" not in word} - TARGETS
            return f"make has no target {sorted(unknown)}" if unknown else None
        case "shardflow" if "--help" in arguments or "--version" in arguments:
            return None
        case "shardflow" if arguments[:1] == ["pack"]:
            return _code(pack.main([*arguments[1:], "--print-config"]))
        case "shardflow":
            return _code(cli.main(arguments))
        case "torchrun" | "python" if "pipelines.train" in arguments:
            return _code(train.main([*_after("pipelines.train", arguments), "--print-config"]))
        case "python" if "pipelines.pack" in arguments:
            return _code(pack.main([*_after("pipelines.pack", arguments), "--print-config"]))
        case "python" if "pipelines.demo" in arguments or "pipelines.train_tokenizer" in arguments:
            return None
    return (
        None
        if program in PREPARATION
        else "no test knows how to run this; teach tests/docs, or mark it no-test"
    )


def _after(module: str, arguments: list[str]) -> Iterator[str]:
    yield from arguments[arguments.index(module) + 1 :]


def _code(code: int) -> str | None:
    return f"exit code {code}" if code else None


@pytest.mark.parametrize(("page", "blocks"), PYTHON_PAGES, ids=[page for page, _ in PYTHON_PAGES])
def test_python_blocks_of_a_page_run_in_order(page: str, blocks: list[Block], world: Path) -> None:
    script = world / f"{page.replace('/', '_')}.py"
    # Blank lines keep the line numbers of the page in a traceback.
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - len(lines))
        lines += block.text.splitlines()
    script.write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=world,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, f"{page}:\n{done.stderr[-3000:]}"
