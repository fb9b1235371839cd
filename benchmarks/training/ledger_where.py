"""Which steps drew a sample: the index of a run ledger of 10^8 committed draws, and a search in it.

    python -m benchmarks.training.ledger_where [--rows N] [--repeats N] [--output FILE.json]

A ledger of two ranks is written as a run writes it: a pool of a million samples in another order each epoch,
256 draws a step. The index is made once, in a process of its own; each search is a command of its own, start
of Python included, for a sample that none asked for before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.about import about_run, write_result
from shardflow.training.ledger import LEDGER_FOLDER, LedgerMicroBatch, LedgerWriter
from shardflow.training.ledger_index import FOLDER

_POOL: Final = 1_000_000
_DRAWS_PER_STEP: Final = 256
_NUM_RANKS: Final = 2
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz234567"
_KEY_LENGTH: Final = 26


def write_run(run: Path, num_rows: int) -> list[str]:
    """Write the ledger of a run, with a checkpoint that commits all of it; return the sample keys."""
    chance = random.Random(0)
    pool = ["".join(chance.choices(_ALPHABET, k=_KEY_LENGTH)) for _ in range(min(_POOL, num_rows))]
    per_rank = _DRAWS_PER_STEP // _NUM_RANKS
    num_steps, steps_per_epoch = num_rows // _DRAWS_PER_STEP, len(pool) // _DRAWS_PER_STEP
    with ExitStack() as stack:
        files = []
        for rank in range(_NUM_RANKS):
            micro = LedgerMicroBatch(micro=rank, keys=("key",), weights=(1.0,) * per_rank)
            writer = LedgerWriter(run, attempt=1, rank=rank, world_size=_NUM_RANKS, start=0)
            writer.write(0, epoch=0, step=0, micro_batches=[micro])
            writer.close()
            path = next((run / LEDGER_FOLDER).glob(f"*/rank-{rank:05d}.jsonl"))
            header, line = path.read_text(encoding="ascii").splitlines()
            # Lines as the writer writes them, some twenty times as fast.
            head, tail = line.split('["key"]')
            path.write_text(f"{header}\n", encoding="ascii")
            files.append((stack.enter_context(path.open("a", encoding="ascii")), head, tail))
        for step in range(num_steps):
            epoch, in_epoch = divmod(step, steps_per_epoch)
            if in_epoch == 0:
                chance.shuffle(pool)
            place = f'"global_step":{step},"epoch":{epoch},"step":{in_epoch},'
            for rank, (file, head, tail) in enumerate(files):
                start = in_epoch * _DRAWS_PER_STEP + rank * per_rank
                keys = '","'.join(pool[start : start + per_rank])
                at_step = head.replace('"global_step":0,"epoch":0,"step":0,', place)
                file.write(f'{at_step}["{keys}"]{tail}\n')
    (run / "checkpoints" / f"step-{num_steps:08d}").mkdir(parents=True)
    return pool


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(run: Path, command: str, *words: str) -> tuple[float, float, dict[str, Any]]:
    """Run a command of the ledger; return its seconds, those of the processor, and its answer."""
    started, used = time.perf_counter(), _processor_s()
    done = subprocess.run(
        [sys.executable, "-m", "shardflow.cli.main", "ledger", command, str(run), *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)
    return seconds, _processor_s() - used, json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, num_rows: int, repeats: int) -> dict[str, Any]:
    """Write, index and search a ledger."""
    run = folder / "run"
    keys = write_run(run, num_rows)
    index_s, index_processor_s, _ = timed(run, "where", "--sample", keys[0])
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    searches = [timed(run, "where", "--sample", key) for key in keys[1 : repeats + 1]]
    num_steps = num_rows // _DRAWS_PER_STEP
    steps = [timed(run, "where", "--step", str(num_steps * turn // repeats))[0] for turn in range(repeats)]
    several = [word for key in keys[-100:] for word in ("--sample", key)]
    proofs = [timed(run, "prove-removed", *several)[0] for _ in range(repeats)]

    def size(place: Path) -> int:
        return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())

    return {
        "num_draws": num_steps * _DRAWS_PER_STEP,
        "num_samples": len(keys),
        "ledger_bytes": size(run / LEDGER_FOLDER),
        "index_bytes": size(run / FOLDER),
        "index_s": round(index_s, 1),
        "index_processor_s": round(index_processor_s, 1),
        "index_peak_bytes": peak_bytes,
        "draws_of_a_sample": [answer["num_draws"] for *_, answer in searches],
        "search_s": [round(seconds, 2) for seconds, *_ in searches],
        "search_processor_s": [round(used, 2) for _, used, _ in searches],
        "median_search_s": round(statistics.median(seconds for seconds, *_ in searches), 2),
        "step_s": [round(seconds, 2) for seconds in steps],
        "prove_removed_100_samples_s": [round(seconds, 2) for seconds in proofs],
        "load": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Measure, and write or print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where 6 GB fit; the folder for temporary files")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found = {
            **about_run(["numpy"]),
            "method": " ".join((__doc__ or "").split("\n\n")[-1].split()),
            **measure(Path(folder), arguments.rows, arguments.repeats),
        }
    write_result(found, arguments.output)


if __name__ == "__main__":
    main()
