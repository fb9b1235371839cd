"""How long ``shardflow attach`` takes for a million rows, and how much memory.

    python -m benchmarks.tables.attach --output benchmarks/results/tables_attach.json

A generated CSV: 14 labels with gaps, an age, two scores and a class for each of a million studies, by Study
Instance UID, a tenth of them doubled or of no sample. The dataset has the samples table of a million studies;
its shard is a name only, because none is read. The join runs in a process of its own, as the command does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.about import about_run
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import FileEntry, LedgerEntry, Manifest, ShardEntry, commit
from shardflow.format.reasons import OutcomeCounts
from shardflow.format.samples import FACT_COLUMNS, FORMAT_VERSION, KIND
from shardflow.format.table import encode_table
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.storage import LocalStore

NUM_ROWS = 1_000_000
NUM_LABELS = 14
GOAL_S, GOAL_BYTES = 30, 500_000_000


def uid_of(number: int) -> str:
    return f"1.2.826.0.1.3680043.8.498.{10**20 + number * 7919}"


def make_samples(folder: Path) -> Path:
    """Write a manifest and a samples table of studies with those UIDs, and the secret key."""
    private = folder / "private"
    private.mkdir(mode=0o700)
    key = SecretKey.create(private / "secret.key")
    keys = np.sort(np.array([key.surrogate("study", uid_of(number)) for number in range(NUM_ROWS)], "S26"))
    numbers = np.arange(NUM_ROWS)
    zeros = np.zeros(NUM_ROWS, "<u4")
    table = encode_table(
        {
            "sample_key": keys,
            "shard": zeros,
            "row_in_shard": numbers.astype("<u4"),
            "offset_bytes": (numbers * 1024).astype("<u8"),
            "num_bytes": np.full(NUM_ROWS, 1024, "<u8"),
            **dict.fromkeys(FACT_COLUMNS, zeros),
            "modality": zeros.astype("u1"),
        },
        {
            "kind": KIND,
            "format_version": FORMAT_VERSION,
            "splits": {"train": [0, NUM_ROWS]},
            "modalities": ["CR"],
        },
    )
    store = LocalStore(folder / "dataset")
    store.put_new("samples/samples-000001.tbl", table)
    absent = FileEntry(path="shards/train-000000.idx", num_bytes=1, sha256=sha256_hex(b""))
    shard = ShardEntry(
        name="train-000000",
        split="train",
        path="shards/train-000000.tar",
        num_bytes=1024 * NUM_ROWS + 1024,
        sha256=sha256_hex(b""),
        index=absent,
        num_samples=NUM_ROWS,
        num_fields=NUM_ROWS,
    )
    manifest = Manifest(
        manifest_version=1,
        shards=(shard,),
        samples=FileEntry(path="samples/samples-000001.tbl", num_bytes=len(table), sha256=sha256_hex(table)),
        ledger=LedgerEntry(path="ledger.jsonl", num_bytes=1, sha256=sha256_hex(b""), head=sha256_hex(b"")),
        counts=OutcomeCounts(packed=NUM_ROWS, skipped=0, quarantined=0),
        created_with={"benchmark": "1"},
        config_digest=sha256_hex(b""),
        key_id=key.key_id,
    )
    commit(store, manifest)
    return private


def make_csv(path: Path) -> None:
    """Write the labels in random order."""
    rng = np.random.default_rng(0)
    order = rng.permutation(NUM_ROWS)
    order[: NUM_ROWS // 20] = order[-NUM_ROWS // 20 :]  # doubled, with equal values
    labels = rng.choice(["1.0", "0.0", "-1.0", ""], (NUM_ROWS, NUM_LABELS), p=[0.15, 0.35, 0.05, 0.45])
    ages = rng.integers(18, 95, NUM_ROWS)
    scores = rng.random((NUM_ROWS, 2))
    kinds = rng.choice(["inpatient", "outpatient", "emergency"], NUM_ROWS)
    with path.open("w", encoding="ascii") as file:
        names = [f"Label {number}" for number in range(NUM_LABELS)]
        file.write(",".join(["StudyInstanceUID", *names, "Age", "Risk", "Quality", "Ward"]) + "\n")
        for place, number in enumerate(order.tolist()):
            uid = uid_of(number + (NUM_ROWS if place % 20 == 1 and place > NUM_ROWS // 10 else 0))
            risk, quality = scores[number]
            values = (*labels[number].tolist(), ages[number], f"{risk:.6f}", f"{quality:.6f}", kinds[number])
            file.write(f"{uid},{','.join(map(str, values))}\n")


_JOIN = """
import json, resource, sys, time
from shardflow.cli.main import main
started = time.perf_counter()
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which a process takes over from the one that started it.
status = open("/proc/self/status").read().split("VmHWM:")[1]
peak_kib = int(status.split()[0])
print(json.dumps({"seconds": time.perf_counter() - started, "cpu_seconds": used.ru_utime + used.ru_stime,
                  "peak_bytes": peak_kib * 1024, "code": code}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    output: Path = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        private = make_samples(folder)
        file = folder / "labels.csv"
        make_csv(file)
        size = file.stat().st_size
        arguments = ["attach", str(folder / "dataset"), str(file), "--name", "labels", "--json"]
        arguments += ["--on", "study_instance_uid", "--private-dir", str(private)]
        done = subprocess.run(
            [sys.executable, "-c", _JOIN, *arguments], capture_output=True, text=True, check=True
        )
        *shown, last = done.stdout.strip().splitlines()
        measured, counts = json.loads(last), json.loads("\n".join(shown))
        (table,) = (folder / "dataset").glob("tables/*/*/rows.tbl")
        table_bytes = table.stat().st_size
    result = {
        "what": "shardflow attach: a CSV of a million rows, joined by Study Instance UID",
        "command": "python -m benchmarks.tables.attach",
        **about_run(["shardflow", "numpy"]),
        "rows": NUM_ROWS,
        "csv_bytes": size,
        "table_bytes": table_bytes,
        "goal_seconds": GOAL_S,
        "goal_bytes": GOAL_BYTES,
        "seconds": round(measured["seconds"], 1),
        "cpu_seconds": round(measured["cpu_seconds"], 1),
        "peak_bytes": measured["peak_bytes"],
        "counts": {name: value for name, value in counts.items() if name.startswith("num_")},
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
