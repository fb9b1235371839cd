"""The exit code of ``shardflow train``: one made of what the ranks of a machine say."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardflow.cli.train import code_after_stop, code_of_failures, folder_of_codes
from shardflow.training.__main__ import report_code

pytestmark = pytest.mark.fast


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDFLOW_EXIT_CODES", str(tmp_path))
    return tmp_path


@pytest.fixture
def report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    def as_rank(rank: int, code: int, attempt: int = 0) -> None:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        report_code(code)

    return as_rank


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 75], 75),
        ([2, 2], 2),
        ([2, 75], 2),  # torchrun stopped the other because one had failed
        ([2, -15], 2),  # the same, before it could listen
        ([75, -15], 75),
        ([2, 1], 1),
        ([-9, 75], 1),
        ([-9, 2], 1),
        ([-9], 1),
        ([-15], 1),  # by somebody else: torchrun ends ranks only after a failure
        ([75, 1], 1),
    ],
)
def test_the_code_of_the_ranks_that_failed(codes: list[int], expected: int) -> None:
    assert code_of_failures(codes) == expected
    assert code_of_failures(codes[::-1]) == expected


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 75], 75),
        ([2, 2], 2),
        ([75, 1], 1),  # one failed while the other stopped
        ([75], 75),  # torchrun killed the other because it was too slow
        ([], 75),  # killed before it could say anything, or not begun
        ([0, 75], 75),
        ([0], 75),
    ],
)
def test_the_code_after_a_stop_signal(folder: Path, report: object, codes: list[int], expected: int) -> None:
    assert callable(report)
    for rank, code in enumerate(codes):
        report(rank, code)
    assert code_after_stop(folder) == expected


def test_only_the_last_attempt_counts(folder: Path, report: object) -> None:
    assert callable(report)
    for rank in (0, 1):
        report(rank, 75, attempt=9)
    report(0, 1, attempt=10)
    assert code_after_stop(folder) == 1


def test_without_a_launcher_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDFLOW_EXIT_CODES", raising=False)
    report_code(75)


def test_folders_of_killed_launchers_are_removed_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "shardflow-launch-left"
    left.mkdir()
    (left / "held").touch()
    (left / "0-rank-0").write_text("75", encoding="ascii")
    with folder_of_codes() as one, folder_of_codes() as other:
        assert not left.exists()
        assert {one, other} == set(tmp_path.iterdir())
        assert code_after_stop(one) == 75
    assert list(tmp_path.iterdir()) == []


def test_rank_that_outlives_its_launcher_has_nobody_to_tell(folder: Path, report: object) -> None:
    assert callable(report)
    folder.rmdir()
    report(0, 75)
    assert not folder.exists()
