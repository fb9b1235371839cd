"""One target under libFuzzer: ``python -m fuzz.engine TARGET [libFuzzer options] [INPUT]``.

An input that was found is given as the only argument behind the target, and is read once more.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

import atheris

from fuzz.target import MAX_BYTES
from fuzz.targets import ROOMS, TARGETS, found_inputs, make_target

_OPTIONS: Final = ("-timeout=60", "-rss_limit_mb=3072", f"-max_len={MAX_BYTES}", "-print_final_stats=1")
_CORPUS: Final = Path(".fuzz-corpus")


def main() -> None:
    """Run libFuzzer with the arguments of the process."""
    name, *given = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="shardflow-fuzz-") as work:
        folder, seeds = Path(work) / "work", Path(work) / "seeds"
        folder.mkdir()
        seeds.mkdir()
        with atheris.instrument_imports(include=ROOMS[TARGETS[name].partition(":")[0]]):
            target = make_target(name, folder)
        if given and Path(given[0]).is_file():
            target.run(Path(given[0]).read_bytes())
            return
        for number, data in enumerate([*target.seeds(), *found_inputs(name)]):
            (seeds / str(number)).write_bytes(data)
        corpus = _CORPUS / name
        corpus.mkdir(parents=True, exist_ok=True)
        atheris.Setup([sys.argv[0], *_OPTIONS, *given, str(corpus), str(seeds)], target.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
