"""Attacks on the tables and indexes of a dataset, each under a loader that runs, in a process of their own.

A process that maps a file is ended by SIGBUS when somebody cuts it, which no test survives; so the attacks of
an execution run in a child, which prints what became of each::

    python -m tests.attacks.table_attacks FOLDER EXECUTION BYTES_IN_MEMORY ATTACK:TARGET...

A loader of a copy of ``FOLDER/data`` yields its first batch, a table is attacked, and the loader yields the
rest and another epoch. It may yield what the whole dataset holds (``exact``) or raise an error by name; any
other batch is ``wrong``. Then a new loader is opened, which may do the same.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

import shardflow as sf
from shardflow.errors import ShardflowError
from shardflow.format import Dataset
from shardflow.format.table import Table, encode_table
from shardflow.loading import Loader
from shardflow.packing.tables.joining import TableSettings, attach_table
from shardflow.sampling import BatchSpec
from shardflow.storage import node_files
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.factories import make_dataset
from tests.integration.loader_support import digest_of, open_loader

NUM_SAMPLES: Final = 24
TARGETS: Final = {
    "samples": "samples/*.tbl",
    "index": "shards/*.idx",
    "series": "facts/series/*/series.tbl",
    "studies": "facts/study/*/studies.tbl",
    "attached": "tables/*/*/rows.tbl",
    "counts": "tokens/*/*/counts.tbl",
    "ids": "tokens/*/*/ids-*.tbl",
}
_SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=1, tail="mask")


def make(folder: Path) -> None:
    """Write ``data`` and ``other``, datasets of the same shape, with series, tokens and an attached table."""
    for name, seed in (("data", 0), ("other", 1)):
        place = folder / name
        made = make_dataset(place, num_samples=NUM_SAMPLES, samples_per_shard=2, seed=seed, facts=True)
        dataset = Dataset.open(made)
        if not (folder / "bpe").exists():
            train_tokenizer(dataset, "train", 300, folder / "bpe")
        tokenize_dataset(dataset, TextTokenizer(folder / "bpe"))
        rows = [f"{dataset.studies.sample_key(row)},{row * 7 % 5 + seed}" for row in range(NUM_SAMPLES)]
        (folder / "labels.csv").write_text("\n".join(("sample_key,grade", *rows)) + "\n", encoding="utf-8")
        settings = TableSettings(name="labels", on="sample_key")
        attach_table(dataset, folder / "labels.csv", settings, private=None)


def _truncate(path: Path, _: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(0)


def _halve(path: Path, _: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _reversed(path: Path) -> bytes:
    """Return a sound table of the same size with rows in another order, or with other numbers."""
    data = path.read_bytes()
    table = Table(memoryview(data), name=path.name)
    columns = {name: table.column(name)[::-1] for name in table.column_names}
    found = encode_table(columns, table.meta)
    if found == data:  # all rows are alike
        name = next(name for name, values in columns.items() if values.dtype.kind in "iu" and len(values))
        found = encode_table(columns | {name: columns[name] + columns[name].dtype.type(1)}, table.meta)
    return found


def _swap_in_place(path: Path, _: Path) -> None:
    data = _reversed(path)
    with path.open("r+b") as file:
        file.write(data)


def _reencode(path: Path, _: Path) -> None:
    (path.parent / ".new").write_bytes(_reversed(path))
    (path.parent / ".new").replace(path)


def _replace(path: Path, other: Path) -> None:
    shutil.copyfile(other, path.parent / ".new")
    (path.parent / ".new").replace(path)


def _write_over(path: Path, other: Path) -> None:
    with path.open("r+b") as file:
        file.write(other.read_bytes())


def _remove(path: Path, _: Path) -> None:
    path.unlink()


ATTACKS: Final[dict[str, Callable[[Path, Path], None]]] = {
    "truncated": _truncate,
    "halved": _halve,
    "swapped in place": _swap_in_place,
    "re-encoded": _reencode,
    "replaced": _replace,
    "written over": _write_over,
    "removed": _remove,
}


def attack(folder: Path, name: str, target: str) -> int:
    """Attack every file of a target, and return the number of those that are others now."""
    files = sorted((folder / "victim").glob(TARGETS[target]))
    others = sorted((folder / "other").glob(TARGETS[target]))
    before = [path.read_bytes() for path in files]
    for path, other in zip(files, others, strict=True):
        ATTACKS[name](path, other)
    return sum(
        not path.exists() or path.read_bytes() != data for path, data in zip(files, before, strict=True)
    )


def _loader(url: Path, tokenizer: str, execution: str) -> Loader:
    fields = {
        "report": sf.Text(),
        "tokens": sf.Tokens(tokenizer=tokenizer, flat=True),
        "image": sf.Slices(missing="pad"),
        "grade": sf.Column("labels.grade"),
    }
    settings = {"execution": execution, "num_threads": 2, "on_bad_sample": "raise"}
    return open_loader(str(url), _SPEC, fields, where="labels.grade < 9", **settings)


def _digests(batches: Iterator[sf.Batch]) -> list[str]:
    return [digest_of(batch) for batch in batches]


def _outcome(read: Callable[[], list[str]], right: list[str]) -> str:
    try:
        found = read()
    except ShardflowError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return type(error).__name__
    return "exact" if found == right else "wrong"


def main(folder: Path, execution: str, attacks: list[str]) -> None:
    """Run attacks, and print their outcomes as JSON: under the running loader, and of a new one."""
    tokenizer = TextTokenizer(folder / "bpe").digest
    with _loader(folder / "data", tokenizer, "threads") as loader:
        epochs = [_digests(iter(loader)) for _ in range(2)]
    outcomes = {}
    for one in attacks:
        name, target = one.split(":")
        victim = shutil.copytree(folder / "data", folder / "victim")
        with tempfile.TemporaryDirectory() as node:
            tempfile.tempdir = node
            with _loader(victim, tokenizer, execution) as loader:
                batches = iter(loader)
                first = digest_of(next(batches))
                num_changed = attack(folder, name, target)
                rest = epochs[0][1:]
                running = [_outcome(lambda: _digests(batches), rest)]  # noqa: B023 - called at once
                running.append(_outcome(lambda: _digests(iter(loader)), epochs[1]))
            assert first == epochs[0][0]

            def read_again() -> list[str]:
                with _loader(victim, tokenizer, execution) as loader:  # noqa: B023
                    return _digests(iter(loader))

            outcomes[one] = [*running, _outcome(read_again, epochs[0]) if num_changed else "same file"]
            tempfile.tempdir = None
        shutil.rmtree(victim)
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    node_files.MAX_IN_MEMORY_BYTES = int(sys.argv[3])
    np.seterr(all="raise")
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[4:])
