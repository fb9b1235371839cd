"""Every command and every Python block of README and of the pages that explain runs.

A folder holds what the pages speak of: datasets, input, recipes. Training is started up to the point where
all its settings are checked; the tutorial, which runs whole (test_scripts), trains, stops and resumes for it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from shardflow.cli import main as cli
from shardflow.errors import AlreadyExistsError
from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from shardflow.storage import LocalStore, open_store
from tests.docs.blocks import REPOSITORY, Block, all_blocks, commands, find_blocks, is_script_page
from tests.factories import make_dataset
from tests.field_cases import make_case_dataset
from tests.forks import command_server, rank_server, run
from tests.object_stores import s3_bucket
from tests.run_factory import write_run

TARGETS = set(
    re.findall(r"^([a-z-]+):.*## ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)
# What prepares a reader's shell; nothing of ours is in it.
PREPARATION = {"cd", "export", "git", "source", "mkdir"}


def _takes_input(block: Block) -> bool:
    """Whether a block packs, or learns from reports: that takes seconds, and needs what the others do not."""
    return re.search(r"shardflow (?:pack|train-tokenizer) ", block.text) is not None


def _is_light(block: Block) -> bool:
    return not _takes_input(block) and "s3://" not in block.text


SHELL_BLOCKS = [block for block in find_blocks("sh") if not block.note and not is_script_page(block.page)]
PYTHON_PAGES = [
    (str(page), list(blocks))
    for page, blocks in groupby(
        (b for b in find_blocks("python") if not b.note and not is_script_page(b.page)),
        key=lambda block: block.page,
    )
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder, with small datasets that were never packed from anything."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("dataset", "my-dataset", "DATASET"):
        attach_facts(Dataset.open(make_dataset(folder / name, splits={"train": 13, "val": 3})))
    make_case_dataset(folder / "chest")
    (fields,) = (block for block in all_blocks() if block.note == 'title="my-fields.toml"')
    (folder / "my-fields.toml").write_text(fields.text, encoding="utf-8")
    (folder / "blend.toml").write_text('[[component]]\ndataset = "dataset"\nrepeat = 2.5\n', encoding="utf-8")
    write_run(folder / "my-run")
    _add_recipes(folder)
    return folder


@pytest.fixture(scope="module")
def packed_world(reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder with input, and the dataset that was packed from it."""
    folder = shutil.copytree(reader, tmp_path_factory.mktemp("packed") / "reader")
    shutil.copytree(folder / "my-dataset", folder / "dataset")
    (folder / "input").symlink_to("generated")
    _add_recipes(folder)
    return folder


def _add_recipes(folder: Path) -> None:
    # Copied, because their paths are relative to where they lie.
    shutil.copytree(REPOSITORY / "pipelines" / "recipes", folder / "pipelines" / "recipes")
    shutil.copy(REPOSITORY / "pipelines" / "recipes" / "train_reports_cpu.toml", folder / "my-training.toml")


@pytest.mark.fast
@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if _is_light(block)], ids=str)
def test_commands_run(block: Block, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    _run_all(block)


@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if "s3://" in block.text], ids=str)
def test_commands_that_name_a_bucket_run(
    block: Block, world: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world)
    _fill_bucket(s3, world)
    _run_all(block)


def _fill_bucket(s3: str, world: Path) -> None:
    """Put the dataset where the pages say that it lies."""
    source, target = LocalStore(world / "dataset"), open_store(f"{s3_bucket(s3, 'bucket')}/chest-ct")
    for path in source.list(""):
        with contextlib.suppress(AlreadyExistsError):
            target.put_new(path, source.read(path))


@pytest.mark.parametrize("block", [block for block in SHELL_BLOCKS if _takes_input(block)], ids=str)
def test_commands_that_take_input_run(
    block: Block, packed_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(packed_world)
    _run_all(block)


def _run_all(block: Block) -> None:
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
        case "shardflow":
            shown = ["--print-config"] if arguments[0] == "train" else []
            return _code(cli.main([*arguments, *shown]))
        case "torchrun" if "shardflow.training" in arguments:
            return _code(cli.main(["train", *_after("shardflow.training", arguments), "--print-config"]))
        case "sbatch":
            place = next(number for number, word in enumerate(arguments) if word.endswith(".sbatch"))
            job = Path(arguments[place]).stem
            if not (REPOSITORY / arguments[place]).is_file():
                return "there is no such script"
            return _code(cli.main([job, *arguments[place + 1 :], "--print-config"]))
    return (
        None
        if program in PREPARATION
        else "no test knows how to run this; teach tests/docs, or mark it no-test"
    )


def _after(module: str, arguments: list[str]) -> Iterator[str]:
    yield from arguments[arguments.index(module) + 1 :]


def _code(code: int) -> str | None:
    return f"exit code {code}" if code else None


def _needs_bucket(blocks: list[Block]) -> bool:
    return any("s3://" in block.text for block in blocks)


@pytest.mark.parametrize(
    ("page", "blocks"),
    [pytest.param(page, blocks, id=page) for page, blocks in PYTHON_PAGES if not _needs_bucket(blocks)],
)
def test_python_blocks_of_a_page_run_in_order(page: str, blocks: list[Block], world: Path) -> None:
    _run_blocks(page, blocks, world)


@pytest.mark.parametrize(
    ("page", "blocks"),
    [pytest.param(page, blocks, id=page) for page, blocks in PYTHON_PAGES if _needs_bucket(blocks)],
)
def test_python_blocks_about_object_stores_run_in_order(
    page: str, blocks: list[Block], world: Path, s3: str
) -> None:
    _fill_bucket(s3, world)
    _run_blocks(page, blocks, world)


def _run_blocks(page: str, blocks: list[Block], world: Path) -> None:
    script = world / f"{page.replace('/', '_')}.py"
    # Blank lines keep the line numbers of the page in a traceback.
    lines: list[str] = []
    for block in blocks:
        lines += [""] * (block.line - len(lines))
        lines += block.text.splitlines()
    script.write_text("\n".join(lines), encoding="utf-8")
    server = rank_server if any("torch" in block.text for block in blocks) else command_server
    done = run(["-W", "error", script.name], cwd=world, is_fresh=True, server=server)
    assert done.returncode == 0, f"{page}:\n{done.stderr[-3000:]}"
