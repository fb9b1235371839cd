"""A loader that is killed and goes on, thousands of times.

``python -m tests.distributed.loader_kills DATASET OUTPUT NUMBER SEED``. What a training job does around its
loader is done here without a model: a ledger line a step, and every other step a commit (the ledger synced,
the loader's state written beside and renamed). Readers are forked from this process, which has imported
everything, and killed at random times until the last epoch has ended; then the next run begins.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig
from shardflow.sampling import BatchSpec
from shardflow.training.ledger import LedgerMicroBatch, LedgerWriter, next_attempt, read_ledger
from tests.tiny_runs import tiny_fields

NUM_EPOCHS = 3
COMMIT_EVERY = 2
SPEC = BatchSpec(micro_batch_size=1, micro_batches_per_step=4, tail="mask")
CONFIG = LoaderConfig(num_threads=2)
Step = tuple[int, int, tuple[tuple[str | None, ...], ...]]


def read_to_the_end(dataset: Path, run: Path) -> None:
    """Go on from the newest commit to the end of the last epoch."""
    names = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    done = int(names[-1].removeprefix("step-")) if names else 0
    with Loader(
        Dataset.open(dataset), split="train", batch=SPEC, seed=3, fields=tiny_fields(), config=CONFIG
    ) as loader:
        if names:
            text = (run / "checkpoints" / names[-1] / "state.json").read_text(encoding="utf-8")
            loader.load_state_dict(json.loads(text))
        ledger = LedgerWriter(run, attempt=next_attempt(run), rank=0, world_size=1, start=done)
        while loader.epoch < NUM_EPOCHS:
            taken: list[LedgerMicroBatch] = []
            first = loader.position
            for number, batch in enumerate(loader, start=1):
                weights = tuple(batch.arrays["weight"].tolist())
                taken.append(
                    LedgerMicroBatch(micro=batch.micro, keys=tuple(batch.sample_keys), weights=weights)
                )
                if number % SPEC.micro_batches_per_step:
                    continue
                step = first.step + number // SPEC.micro_batches_per_step - 1
                ledger.write(done, epoch=first.epoch, step=step, micro_batches=taken)
                done, taken = done + 1, []
                if done % COMMIT_EVERY == 0 or loader.epoch == NUM_EPOCHS:
                    ledger.sync()
                    commit(run, done, json.dumps(loader.state_dict()))
        ledger.close()


def commit(run: Path, done: int, state: str) -> None:
    folder = run / "checkpoints" / f".unfinished-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(state, encoding="utf-8")
    folder.rename(run / "checkpoints" / f"step-{done:08d}")


def be_reader(dataset: Path, run: Path) -> NoReturn:
    code = 1
    try:
        read_to_the_end(dataset, run)
        code = 0
    finally:
        os._exit(code)


def steps_of(run: Path) -> list[Step]:
    """The committed lineage, without who did it."""
    return [(s.epoch, s.step, tuple(m.keys for m in s.micro_batches)) for s in read_ledger(run)]


def main() -> None:
    dataset, output, wanted, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rng = random.Random(seed)
    began = time.monotonic()
    started(dataset, output / "whole", None)
    longest_s = 1.2 * (time.monotonic() - began)
    expected = steps_of(output / "whole")
    num_kills = num_runs = 0
    while num_kills < wanted:
        run = output / f"run-{num_runs}"
        num_runs += 1
        while not started(dataset, run, rng.uniform(0.0, longest_s)):
            num_kills += 1
        if steps_of(run) != expected:
            raise SystemExit(f"run {num_runs - 1} of seed {seed} differs after {num_kills} kills")
    print(json.dumps({"kills": num_kills, "runs": num_runs, "steps": len(expected)}))  # noqa: T201


def started(dataset: Path, run: Path, kill_after_s: float | None) -> bool:
    """Start a reader; whether it came to its end before it was killed."""
    pid = os.fork()
    if pid == 0:
        be_reader(dataset, run)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in {0, -signal.SIGKILL}:
        raise SystemExit(f"a reader left with {code}")
    return code == 0


if __name__ == "__main__":
    main()
