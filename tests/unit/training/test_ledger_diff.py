"""Two ledgers side by side: what differs is named with its step, its kind and its samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.cli.main import main
from shardflow.training.ledger import LedgerMicroBatch, LedgerWriter

pytestmark = pytest.mark.fast

NUM_STEPS = 6
Step = list[list[str]]


def samples() -> list[Step]:
    """Six steps of two micro-batches of two samples."""
    return [[[f"s{step}m{m}k{k}" for k in range(2)] for m in range(2)] for step in range(NUM_STEPS)]


def write_run(
    run: Path, steps: list[Step], *, world_size: int = 1, weight: float = 1.0, epoch_of_last: int = 0
) -> Path:
    for rank in range(world_size):
        writer = LedgerWriter(run, attempt=1, rank=rank, world_size=world_size, start=0)
        for number, step in enumerate(steps):
            mine = [
                LedgerMicroBatch(micro=m, keys=tuple(keys), weights=(1.0, weight))
                for m, keys in enumerate(step)
                if m % world_size == rank
            ]
            epoch = epoch_of_last if number == len(steps) - 1 else 0
            writer.write(number, epoch=epoch, step=number, micro_batches=mine)
        writer.sync()
        writer.close()
    (run / "checkpoints" / f"step-{len(steps):08d}").mkdir(parents=True)
    return run


def diff(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["ledger", "diff", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_runs_of_the_same_samples_are_equal_whoever_ran_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_run(tmp_path / "a", samples())
    b = write_run(tmp_path / "b", samples(), world_size=2)
    assert diff(capsys, a, b) == (0, "equal: 6 steps, the same samples in the same micro-batches\n")


def test_compact_lines_tell_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", samples())
    changed = samples()
    changed[4][1] = ["x", "y"]
    b = write_run(tmp_path / "b", changed)
    for options in (["--compact"], []):
        capsys.readouterr()
        assert main(["ledger", "show", str(a), "--json", *options]) == 0
        text = capsys.readouterr().out
        assert ("s0m0k0" in text) == (not options)
        lines = tmp_path / "a.jsonl"
        lines.write_text(text)
        assert diff(capsys, lines, a)[0] == 0
        code, out = diff(capsys, lines, b, "--json")
        found = json.loads(out)
        assert (code, found["equal"], found["first_difference"]) == (1, False, 4)
        assert found["differences"] == {"samples": 1}
    assert "only A has s4m1k0, s4m1k1, only B x, y" in out


def changed(kind: str) -> list[Step]:
    steps = samples()
    if kind == "order":
        steps[3][0].reverse()
    elif kind == "dealt":
        steps[3] = [["s3m0k0"], ["s3m0k1", "s3m1k0", "s3m1k1"]]
    elif kind == "samples":
        steps[3][0][0] = "other"
    elif kind == "doubled":
        steps[3][0][0] = "s1m0k0"
    return steps


@pytest.mark.parametrize(
    ("kind", "named", "text"),
    [
        ("order", "order", "from place 0 on A has s3m0k0, B s3m0k1"),
        ("samples", "samples", "only A has s3m0k0, only B other"),
        ("doubled", "doubled", "only A has s3m0k0, only B s1m0k0; more than once in the epoch: s1m0k0"),
    ],
)
def test_each_kind_of_difference_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, named: str, text: str
) -> None:
    a, b = write_run(tmp_path / "a", samples()), write_run(tmp_path / "b", changed(kind))
    code, out = diff(capsys, a, b)
    assert code == 1
    assert out.splitlines() == [
        f"step 3: {named}: {out.splitlines()[0].split(': ', 2)[2]}",
        f"different in 1 step, from step 3 on: 1 {named}",
    ]
    assert text in out


def test_missing_steps_places_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", samples())
    code, out = diff(capsys, write_run(tmp_path / "b", samples()[:4]), a)
    assert code == 1
    assert "step 4: missing: only B has it" in out
    assert out.endswith("from step 4 on: 2 missing\n")
    assert (
        "place: A runs it as epoch 0, step 5, B as epoch 1, step 5"
        in (diff(capsys, a, write_run(tmp_path / "c", samples(), epoch_of_last=1))[1])
    )
    out = diff(capsys, a, write_run(tmp_path / "d", samples(), weight=0.0), "--limit", 2)[1]
    assert out.splitlines()[2:] == ["... and 4 more", "different in 6 steps, from step 0 on: 6 weights"]


def test_show_lists_the_committed_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", str(write_run(tmp_path / "a", samples()))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "6 committed steps, 24 samples"
    assert lines[2] == "step 1 (epoch 0, step 1): s1m0k0 s1m0k1 s1m1k0 s1m1k1"


@pytest.mark.parametrize(
    "arguments", [["show"], ["diff", "only-one"], ["show", "absent"], ["diff", "a", "b"]]
)
def test_what_is_not_there_is_an_error_of_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", *arguments]) == 2
    assert capsys.readouterr().err


def test_file_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text('{"event": "something"}\n')
    assert main(["ledger", "show", str(tmp_path / "notes.txt")]) == 1
    assert "neither a run folder" in capsys.readouterr().err
