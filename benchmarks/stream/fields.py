"""Fields against the views of version 0.1.0, which they replaced: one run, alternating, on equal output.

    git worktree add views 5e31f6c    # the last commit that had both
    python -m benchmarks.stream.fields --views views --content folder --out benchmarks/results/fields.json

Each cell runs in a process of its own, on either checkout in turn, the order turned each round. CPU time
counts more than wall time where the machine is busy; the load is recorded with each run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

CELLS: Final = ("ct", "ct_native", "radiograph", "radiograph_native", "report", "tokens", "ct_and_report")
_CONTENT: Final = {
    "report": "texts",
    "tokens": "texts",
    "radiograph": "images",
    "radiograph_native": "images",
}
_BATCH: Final = {"report": 64, "tokens": 64, "radiograph": 8, "radiograph_native": 8}
_TOKENIZER: Final = "0" * 64
_TREES: Final = ("views", "fields")


def main() -> None:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--views", type=Path, help="checkout of the commit that had views")
    parser.add_argument(
        "--content", type=Path, required=True, help="folder for the datasets, made where missing"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cells", nargs="+", choices=CELLS, default=CELLS, help="further rounds of these, added to --out"
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--cell", choices=CELLS)
    parser.add_argument("--tree", choices=_TREES)
    arguments = parser.parse_args()
    if arguments.cell is not None:
        print(json.dumps(measure(arguments)))
        return
    make_datasets(arguments.content)
    rows = []
    if len(arguments.cells) < len(CELLS) and arguments.out.is_file():
        rows = json.loads(arguments.out.read_text())["rows"]
    first = max((row["round"] for row in rows), default=-1) + 1
    for turn in range(first, first + arguments.rounds):
        for cell in arguments.cells:
            for tree in _TREES if turn % 2 == 0 else _TREES[::-1]:
                rows.append({**run(arguments, cell, tree), "round": turn})
    write(arguments, rows)


def make_datasets(folder: Path) -> None:
    """Write 16 CT studies of 40 slices, 256 single images of 512 x 512, and 40,000 texts with tokens."""
    from benchmarks.stream.content import make_content, make_texts

    for name, make in {
        "ct": lambda path: make_content(path, 16, with_png=False),
        "images": lambda path: make_content(path, 256, num_slices=1, with_png=False),
        "texts": lambda path: make_texts(path, 40_000),
    }.items():
        if not (folder / name).is_dir():
            make(folder / name)


def run(arguments: argparse.Namespace, cell: str, tree: str) -> dict[str, Any]:
    """Measure a cell on a checkout, in a process of its own."""
    root = arguments.views.resolve() if tree == "views" else Path(__file__).resolve().parents[2]
    command = [sys.executable, __file__, "--content", str(arguments.content.resolve()), "--cell", cell]
    command += ["--tree", tree, "--seconds", str(arguments.seconds)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"cell": cell, "tree": tree, **found}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read epochs for some seconds; the first one also gives a checksum of its output."""
    load = os.getloadavg()[0]
    with open_loader(arguments.content, arguments.cell, arguments.tree) as loader:
        crc = 0
        entries = CONTENTS[arguments.tree][arguments.cell]
        for batch in loader:
            for piece in entries(batch):
                crc = zlib.crc32(piece, crc)
        num_samples = num_epochs = 0
        start, start_cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - start < arguments.seconds:
            for batch in loader:
                num_samples += len(batch.info.weight)
                for _ in entries(batch):
                    pass
            num_epochs += 1
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return {
        "samples_per_s": round(num_samples / seconds, 2),
        "cpu_ms_per_sample": round(1000 * cpu / num_samples, 5),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "crc32": crc,
        "epochs": num_epochs,
        "load": round(load, 2),
    }


def open_loader(content: Path, cell: str, tree: str) -> Any:
    """Open the loader of a cell."""
    import shardflow as sf

    dataset = sf.open(content / _CONTENT.get(cell, "ct") / "ours")
    spec = sf.BatchSpec(micro_batch_size=_BATCH.get(cell, 2), micro_batches_per_step=1)
    settings: dict[str, Any] = {"num_threads": 2, "prefetch_bytes": 96 << 20}
    if tree == "views":
        config, fields = sf.LoaderConfig(**settings, **_view(cell)), {}
    else:
        config, fields = sf.LoaderConfig(**settings), {"fields": _fields(cell)}
    return sf.Loader(dataset, split="train", batch=spec, seed=7, world="single", config=config, **fields)


def _view(cell: str) -> dict[str, Any]:
    from shardflow.fields.tokens import StoredTokens
    from shardflow.fields.views import ImageView, NativeView

    sliced = ImageView(num_slices=16, rows=256, columns=256)
    return {
        "ct": {"view": sliced, "text": False},
        "ct_native": {"view": NativeView(), "text": False},
        "radiograph": {"view": ImageView(num_slices=1, rows=256, columns=256), "text": False},
        "radiograph_native": {"view": NativeView(), "text": False},
        "report": {"text": True},
        "tokens": {"text": False, "tokens": StoredTokens(tokenizer=_TOKENIZER)},
        "ct_and_report": {"view": sliced, "text": True},
    }[cell]


def _fields(cell: str) -> Mapping[str, Any]:
    import shardflow as sf

    sliced = sf.Slices(num_slices=16, size=(256, 256))
    return {
        "ct": {"image": sliced},
        "ct_native": {"image": sf.Slices()},
        "radiograph": {"image": sf.Image(size=(256, 256))},
        "radiograph_native": {"image": sf.Image()},
        "report": {"report": sf.Text()},
        "tokens": {"tokens": sf.Tokens(tokenizer=_TOKENIZER, flat=True)},
        "ct_and_report": {"image": sliced, "report": sf.Text()},
    }[cell]


def _array(batch: Any) -> Iterator[Any]:
    yield batch["image"]


def _of_slots(read: Callable[[Any, int], Any]) -> Callable[[Any], Iterator[Any]]:
    def pieces(batch: Any) -> Iterator[Any]:
        for slot in range(len(batch.info.weight)):
            yield read(batch, slot)

    return pieces


def _joined(*parts: Callable[[Any], Iterator[Any]]) -> Callable[[Any], Iterator[Any]]:
    def pieces(batch: Any) -> Iterator[Any]:
        for part in parts:
            yield from part(batch)

    return pieces


_view_text = _of_slots(lambda batch, slot: batch.text(slot).encode())
_field_text = _of_slots(lambda batch, slot: batch["report"][slot].encode())
_view_image = _of_slots(lambda batch, slot: batch.image(slot))
_field_image = _of_slots(lambda batch, slot: batch["image"][slot])
CONTENTS: Final[Mapping[str, Mapping[str, Callable[[Any], Iterator[Any]]]]] = {
    "views": {
        **dict.fromkeys(("ct", "ct_native", "radiograph", "radiograph_native"), _view_image),
        "report": _view_text,
        "tokens": _of_slots(lambda batch, slot: batch.tokens(slot)),
        "ct_and_report": _joined(_view_image, _view_text),
    },
    "fields": {
        **dict.fromkeys(("ct", "ct_native", "radiograph", "radiograph_native"), _field_image),
        "report": _field_text,
        "tokens": _of_slots(
            lambda batch, slot: batch["tokens"][slice(*batch["tokens_offsets"][slot : slot + 2])]
        ),
        "ct_and_report": _joined(_field_image, _field_text),
    },
}
"""What the first epoch of a cell is compared by, and what a training loop would touch of each batch."""


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write the rows, and the medians of the ratios of each round."""
    from benchmarks.about import about_run

    commits = {
        tree: subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        for tree, root in zip(_TREES, (arguments.views, Path(__file__).parent), strict=True)
    }
    summary = {}
    for cell in sorted({row["cell"] for row in rows}, key=CELLS.index):
        mine = [row for row in rows if row["cell"] == cell]
        pairs = [
            [next(row for row in mine if (row["tree"], row["round"]) == (tree, turn)) for tree in _TREES]
            for turn in sorted({row["round"] for row in mine})
        ]
        ratios = {
            "throughput": [after["samples_per_s"] / before["samples_per_s"] for before, after in pairs],
            "cpu": [after["cpu_ms_per_sample"] / before["cpu_ms_per_sample"] for before, after in pairs],
            "memory": [after["peak_mib"] / before["peak_mib"] for before, after in pairs],
        }
        summary[cell] = {
            "equal_output": len({row["crc32"] for row in mine}) == 1,
            "rounds": len(pairs),
            **{
                name: {
                    "median": round(statistics.median(found), 3),
                    "range": [round(min(found), 3), round(max(found), 3)],
                }
                for name, found in ratios.items()
            },
        }
    about = {**about_run(["numpy", "blosc2", "opencv-python-headless"]), "commit": commits}
    method = (
        f"Alternating, each run in a process of its own, {arguments.seconds:g} s a cell, two threads; "
        "datasets of 16 CT studies (16 of 40 slices resized to 256 x 256; all slices), 256 single images of "
        "512 x 512 and 40,000 texts. Ratios are fields divided by views, of the two runs of a round; where "
        "the machine was busy with other work (load of a run), CPU time says more than throughput."
    )
    arguments.out.write_text(
        json.dumps({"about": about, "method": method, "summary": summary, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
