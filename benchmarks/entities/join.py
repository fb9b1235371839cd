"""What joining the parts of an entity view takes: its table is put together in memory.

    python -m benchmarks.entities.join --rows 1000000 --output benchmarks/results/entities_join.json

Parts are made in another process, in a temporary folder, one for 1,000 rows, as one for each shard;
the rest is what `shardflow.reports.entity_views.build_view` does when all parts exist. Memory is the peak of
this process (VmHWM) above what it had before, everything imported.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.about import about_run
from shardflow.format.entities import EntityRules
from shardflow.format.keys import sha256_hex
from shardflow.packing.engines.worker import peak_memory_bytes
from shardflow.reports.entity_views import EntityRow, LocatedRow, encode_part, encode_view, open_part
from shardflow.storage import write_atomic

DATASET_ID = "0123456789abcdef" * 4
ROWS_PER_PART = 1000
ROWS_PER_STUDY = 3
NUM_LABELS = 150


def make_parts(folder: Path, num_rows: int, mean_slices: int) -> None:
    """Write the parts: three rows a study, of 1 to twice ``mean_slices`` slices less one each."""
    rng = np.random.default_rng(0)
    for number, first in enumerate(range(0, num_rows, ROWS_PER_PART)):
        rows = range(first, min(first + ROWS_PER_PART, num_rows))
        found = [_row(rng, number, row, mean_slices) for row in rows]
        (folder / f"{number:06d}").write_bytes(encode_part(found, num_aligned=len(found), job={}))


def _row(rng: np.random.Generator, shard: int, row: int, mean_slices: int) -> LocatedRow:
    num_slices = int(rng.integers(1, 2 * mean_slices))
    study, entity = divmod(row, ROWS_PER_STUDY)
    return LocatedRow(
        row=EntityRow(
            entity=entity,
            series=0,
            slices=list(range(40, 40 + num_slices)),
            weights=[1.0] * num_slices,
            centre=num_slices // 2,
            text=(100, 180),
            span=(110, 120),
            label=f"finding {rng.integers(NUM_LABELS)}",
            anatomy=f"part {rng.integers(NUM_LABELS)}",
            assertion="present",
            laterality="",
            confidence=0.9,
            rows=512,
            columns=512,
            modality="CT",
        ),
        study=study,
        study_key=f"{study:026d}",
        shard=shard,
        row_in_shard=study % ROWS_PER_PART,
        num_bytes=250_000 * num_slices,
    )


def join(folder: Path, num_rows: int) -> dict[str, object]:
    """Join the parts, and say what it took."""
    before, start = peak_memory_bytes(), time.perf_counter()
    parts = []
    for path in sorted(folder.iterdir()):
        part = open_part(path.read_bytes(), name=path.name, job={})
        if part is None:
            raise SystemExit("parts must be this job's, got another's")
        parts.append(part)
    splits = {"train": range(-(-num_rows // ROWS_PER_STUDY))}
    table = encode_view(parts, dataset_id=DATASET_ID, rules=EntityRules(), splits=splits)
    sha256_hex(table)
    write_atomic(folder / "entities.tbl", [table], replace=True)
    return {
        "num_rows": num_rows,
        "num_parts": len(parts),
        "table_bytes": len(table),
        "peak_bytes": peak_memory_bytes() - before,
        "seconds": round(time.perf_counter() - start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--mean-slices", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        making = get_context("spawn").Process(
            target=make_parts, args=(Path(name), arguments.rows, arguments.mean_slices)
        )
        making.start()
        making.join()
        result = {"about": about_run(["numpy"]), "mean_slices": arguments.mean_slices}
        result |= join(Path(name), arguments.rows)
    text = json.dumps(result, indent=1)
    if arguments.output:
        arguments.output.write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
