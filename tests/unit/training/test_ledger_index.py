"""The index of a run ledger: the same draws that reading the whole ledger finds, over kills and restarts."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardflow.cli import main as cli
from shardflow.errors import CheckpointError
from shardflow.training import ledger_index
from shardflow.training.ledger import LedgerMicroBatch, LedgerWriter, read_ledger
from shardflow.training.ledger_index import FOLDER, Draws, LedgerIndex, hash_keys, read_step

pytestmark = pytest.mark.fast

KEYS = [f"key{number}" + "x" * (number % 23) for number in range(40)]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_index, "SEGMENT_ROWS", 64)
    monkeypatch.setattr(ledger_index, "_ROWS_AT_ONCE", 16)


def train(run: Path, attempt: int, *, start: int, stop: int, world_size: int, committed: int) -> None:
    """Write what an attempt leaves behind; the last step is on the first rank only, as after a kill."""
    chance = random.Random(attempt)
    for rank in range(world_size):
        writer = LedgerWriter(run, attempt=attempt, rank=rank, world_size=world_size, start=start)
        for step in range(start, stop + (rank == 0)):
            micros = [
                LedgerMicroBatch(
                    micro=rank * 2 + number,
                    keys=(*chance.choices(KEYS, k=3), None),
                    weights=(1.0, float(chance.random() < 0.9), 1.0, 0.0),
                )
                for number in range(2)
            ]
            writer.write(step, epoch=step // 10, step=step % 10, micro_batches=micros)
        writer.close()
    (run / "checkpoints" / f"step-{committed:08d}").mkdir(parents=True)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three attempts: the second repeats steps of the first, the third resumes on fewer ranks."""
    folder = tmp_path / "run"
    train(folder, 1, start=0, stop=17, world_size=3, committed=12)
    train(folder, 2, start=12, stop=25, world_size=2, committed=20)
    train(folder, 3, start=20, stop=33, world_size=1, committed=30)
    return folder


def draws_by_reading(
    run: Path, keys: list[str], after_step: int = -1
) -> list[tuple[int, int, int, str, float]]:
    return [
        (step.global_step, micro.micro, slot, key, weight)
        for step in read_ledger(run)
        for micro in step.micro_batches
        for slot, (key, weight) in enumerate(zip(micro.keys, micro.weights, strict=True))
        if key in keys and step.global_step > after_step
    ]


def rows(found: Draws) -> list[tuple[int, int, int, str, float]]:
    return [(one.global_step, one.micro, one.slot, one.sample_key, one.weight) for one in found.described]


def check(run: Path) -> None:
    index = LedgerIndex(run)
    for keys in ([KEYS[0]], [KEYS[7]], KEYS[10:15], KEYS, ["none"], []):
        for after in (-1, 15):
            expected = draws_by_reading(run, keys, after)
            found = index.find(keys, after_step=after, limit=10_000)
            assert rows(found) == expected
            assert found.num_draws == len(expected)
            assert found.num_masked == sum(weight == 0 for *_, weight in expected)
            steps = {step for step, *_ in expected}
            assert found.num_steps == len(steps)
            assert (found.first_step, found.last_step) == (min(steps, default=None), max(steps, default=None))


def test_draws_are_those_of_the_committed_lineage(run: Path) -> None:
    assert len(draws_by_reading(run, KEYS)) > 200
    check(run)
    check(run)  # nothing new


def test_the_index_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, 1, start=0, stop=17, world_size=3, committed=12)
    check(folder)
    before = sorted(path.name for path in (folder / FOLDER).iterdir())
    train(folder, 2, start=12, stop=25, world_size=2, committed=20)
    check(folder)
    after = sorted(path.name for path in (folder / FOLDER).iterdir())
    # Full segments stay as they are; the short one was written anew.
    sizes = [(folder / FOLDER / name).stat().st_size for name in after if name.startswith("segment")]
    assert len({*before} - {*after}) == 1
    assert max(sizes) == 64 * 20
    assert sum(size < 64 * 20 for size in sizes) == 1
    with (folder / "ledger" / "attempt-0002" / "rank-00000.jsonl").open("a") as file:
        file.write('{"event":"step","global_step":26,"micros":[[0,["half')  # of a rank that is killed now
    check(folder)
    train(folder, 3, start=20, stop=33, world_size=1, committed=30)
    check(folder)


def test_a_run_that_was_replaced_is_indexed_anew(run: Path) -> None:
    check(run)
    (run / "ledger" / "attempt-0003" / "rank-00000.jsonl").unlink()
    (run / "ledger" / "attempt-0003").rmdir()
    (run / "checkpoints" / "step-00000030").rmdir()
    check(run)


def test_damage_is_an_error_that_says_what_to_do(run: Path) -> None:
    check(run)
    path = run / "ledger" / "attempt-0003" / "rank-00000.jsonl"
    header, *lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"x" * sum(map(len, lines)))
    with pytest.raises(CheckpointError, match="was changed since it was indexed; delete ledger-index"):
        LedgerIndex(run).find(KEYS, limit=10_000)
    (segment, *_) = (run / FOLDER).glob("segment-*")
    segment.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged; delete ledger-index"):
        LedgerIndex(run).find(KEYS)


def test_a_step_is_found_by_bisection(run: Path) -> None:
    steps = read_ledger(run)
    assert [read_step(run, number) for number in range(len(steps))] == steps
    assert read_step(run, len(steps)) is None


def test_hashes_depend_on_the_key_alone() -> None:
    together = hash_keys(KEYS)
    assert len(np.unique(together)) == len(KEYS)
    assert [int(hash_keys([key])[0]) for key in KEYS] == together.tolist()


def test_nothing_is_proven_by_a_ledger_with_holes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*options: str) -> tuple[int, str]:
        code = cli.main(["ledger", "prove-removed", str(run), "--sample", "never0drawn", *options])
        both = capsys.readouterr()
        return code, both.out + both.err

    assert ask()[0] == 0
    assert ask("--after-step", "30")[0] == 1
    assert "30 committed steps" in ask("--after-step", "400")[1]
    for name in ("attempt-0003/rank-00000.jsonl", "attempt-0001/rank-00001.jsonl"):
        path = run / "ledger" / name
        data = path.read_bytes()
        path.unlink()
        code, said = ask()
        assert (code, "proven: no draw" in said) == (1, False), name
        path.write_bytes(data)
    shutil.move(run / "ledger" / "attempt-0001", run / "elsewhere")
    code, said = ask()
    assert code == 1
    assert "begins with step" in said
    shutil.move(run / "elsewhere", run / "ledger" / "attempt-0001")
    shutil.move(run / "checkpoints", run / "elsewhere")
    assert ask()[0] == 1


@pytest.mark.parametrize("key", ["NEVER", "train-000012/typo", ""])
def test_what_is_no_sample_key_is_refused(run: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ledger", "prove-removed", str(run), "--sample", key]
    assert cli.main(arguments) == cli.EXIT_CONFIGURATION
    assert "lowercase letters and digits" in capsys.readouterr().err


def test_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = draws_by_reading(run, [KEYS[0]])
    assert cli.main(["ledger", "where", str(run), "--sample", KEYS[0], "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert f"... and {len(expected) - 2} more" in out
    assert f"{len(expected)} draws of 1 sample in" in out
    assert cli.main(["ledger", "where", str(run), "--sample", KEYS[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_draws"] == len(expected)
    assert cli.main(["ledger", "where", str(run), "--step", "3"]) == 0
    assert " ".join(read_ledger(run)[3].keys) in capsys.readouterr().out
    last = str(expected[-1][0])
    assert cli.main(["ledger", "prove-removed", str(run), "--sample", KEYS[0]]) == 1
    assert "not proven" in capsys.readouterr().out
    assert cli.main(["ledger", "prove-removed", str(run), "--sample", KEYS[0], "--after-step", last]) == 0
    assert f"proven: no draw of 1 sample in 30 committed steps after step {last}" in capsys.readouterr().out
    # A folder that cannot hold an index.
    (tmp_path / "file").write_text("")
    options = ["--index-dir", str(tmp_path / "file")]
    assert cli.main(["ledger", "where", str(run), "--sample", KEYS[0], *options]) == cli.EXIT_CONFIGURATION
    assert "name another folder by --index-dir" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["where", "RUN"], "needs one of --sample, --patient, --shard and --step"),
        (["prove-removed", "RUN"], "needs --sample or --patient"),
        (["prove-removed", "RUN", "--step", "3"], "--step is not an option of ledger prove-removed"),
        (["show", "RUN", "--sample", "a"], "--sample is not an option of ledger show"),
        (["where", "RUN", "RUN", "--step", "3"], "takes 1 RUN, got 2"),
        (["where", "RUN", "--step", "99"], "has no committed step 99"),
        (["where", "RUN", "--patient", "x"], "give it with --dataset"),
        (["where", "missing", "--step", "1"], "takes the folder of a run"),
        (["where", "EMPTY", "--sample", "x"], "holds no ledger of a run"),
    ],
)
def test_a_slip_is_one_sentence(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"RUN": str(run), "EMPTY": str(tmp_path / "empty")}
    assert cli.main(["ledger", *(names.get(one, one) for one in arguments)]) != 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5000])
def test_a_hash_is_found_where_a_bisection_finds_it(num_rows: int) -> None:
    draws = np.random.default_rng(num_rows)
    hashes = np.sort(draws.integers(0, 1 << 64, num_rows, dtype=np.uint64))
    hashes[num_rows // 3 : num_rows // 2] = hashes[
        num_rows // 3 : num_rows // 3 + 1
    ]  # one that is drawn often
    ends = np.array([0, (1 << 64) - 1], np.uint64)
    for wanted in (*ends, *hashes[::7], *draws.integers(0, 1 << 64, 50, dtype=np.uint64)):
        found = ledger_index._equal_range(hashes, wanted)
        assert found == tuple(np.searchsorted(hashes, wanted, side=side) for side in ("left", "right"))
