"""The folder that a reader has after step 4 of the tutorial, made from the tutorial's own recipe."""

from __future__ import annotations

from pathlib import Path

from shardflow.cli import main as cli
from tests.docs.blocks import all_blocks

__all__ = ["make_reader_folder"]

_NUM_STUDIES = 12
# A drawn key would deal patients to the splits anew in each run, and leave one empty at times.
_KEY = bytes(range(32))


def make_reader_folder(folder: Path) -> Path:
    """Fill a folder with generated studies, the recipe and the dataset packed from it; return the folder."""
    (recipe,) = (block for block in all_blocks() if block.note == 'title="my-recipe.toml"')
    (folder / "my-recipe.toml").write_text(recipe.text, encoding="utf-8")
    private = folder / "my-private"
    private.mkdir(mode=0o700)
    (private / "secret.key").write_bytes(_KEY)
    (private / "secret.key").chmod(0o600)
    size = ["--studies", str(_NUM_STUDIES), "--seed", "7", "--size", "64", "--slices", "4:6"]
    for arguments in (
        ["synth", str(folder / "generated"), *size],
        ["pack", "--config", str(folder / "my-recipe.toml"), "--json"],
    ):
        code = cli.main(arguments)
        if code:
            raise RuntimeError(f"the reader's folder must be made, got exit code {code} of {arguments[0]}")
    return folder
