"""Who is at fault: judged from what a page shows and from who is heard, with the time given."""

from __future__ import annotations

import pytest

from shardflow.training.health.heartbeat import Beat, Fault, HeartbeatPage, HeartbeatView, split_lines
from shardflow.training.health.side import RankJudge, RunJudge

pytestmark = pytest.mark.fast

HANG_S, TICK_S = 60.0, 1.0


class Case:
    """A rank that is looked at once a second."""

    def __init__(self, hang_s: float = HANG_S) -> None:
        self.now = 1000.0
        self.judge = RankJudge(rank=3, host="node-b", pid=77, hang_s=hang_s, tick_s=TICK_S, now=self.now)
        self.view = HeartbeatView({}, "", 0, 0)

    def enter(self, phase: str, limit_s: float | None = None, *, together: bool = False) -> None:
        self.view.phase = {"phase": phase, "limit_s": limit_s, "together": together}
        self.view.phase_count += 2

    def pass_time(self, seconds: int, *, pulse: bool = True, state: str = "S") -> Fault | None:
        for _ in range(seconds):
            self.now += TICK_S
            self.view.pulse_count += pulse
            fault = self.judge.look(
                HeartbeatView(
                    self.view.phase, self.view.waits_for, self.view.phase_count, self.view.pulse_count
                ),
                state,
                self.now,
            )
            if fault is not None:
                return fault
        return None


def test_rank_that_gets_on_is_at_no_fault() -> None:
    case = Case()
    for step in range(10):
        case.enter(f"step {step}, computing", 60.0)
        assert case.pass_time(50) is None


@pytest.mark.parametrize(
    ("state", "kind"), [("T", "stopped"), ("t", "stopped"), ("R", "held"), ("D", "held")]
)
def test_rank_without_a_pulse_is_named_with_the_reason(state: str, kind: str) -> None:
    case = Case()
    case.enter("step 5, waiting for data", together=True)
    case.view.waits_for = "stage read of shard train-000003, tier remote for 61.0 s"
    fault = case.pass_time(100, pulse=False, state=state)
    assert fault is not None
    assert (fault.kind, fault.rank, fault.host) == (kind, 3, "node-b")
    assert HANG_S < fault.after_s <= HANG_S + 2
    assert "rank 3" in fault.sentence()
    assert "host node-b" in fault.sentence()
    assert "step 5, waiting for data" in fault.sentence()
    assert "shard train-000003, tier remote" in fault.sentence()


def test_phase_that_may_take_long_may_keep_the_lock_as_long_but_not_be_stopped() -> None:
    case = Case()
    case.enter("preparing", 600.0)
    assert case.pass_time(500, pulse=False, state="D") is None
    fault = case.pass_time(2, pulse=False, state="T")
    assert fault is not None
    assert fault.kind == "stopped"
    case.enter("step 0, computing", 60.0)
    fault = case.pass_time(2, pulse=False, state="R")
    assert fault is not None
    assert fault.kind == "held"


def test_phase_that_takes_too_long_is_this_ranks_fault_unless_it_waits_for_others() -> None:
    case = Case()
    case.enter("step 5, computing", 10.0, together=True)
    assert case.pass_time(500) is None
    case.enter("step 6, computing", 10.0)
    fault = case.pass_time(12)
    assert fault is not None
    assert fault.kind == "stuck"


def test_no_limit_and_no_bound_on_the_pulse_wait_for_ever() -> None:
    case = Case(hang_s=0.0)
    case.enter("step 5, computing", None)
    assert case.pass_time(5000, pulse=False) is None


def test_pause_of_the_judge_itself_is_forgiven() -> None:
    """A suspended machine: everybody was silent for as long as the judge was."""
    case = Case()
    case.enter("step 5, computing", 30.0)
    assert case.pass_time(20) is None
    case.now += 3600.0
    assert case.pass_time(8) is None
    fault = case.pass_time(5)
    assert fault is not None
    assert fault.after_s < 35


def report(rank: int) -> Fault:
    beat = Beat(phase="step 2, computing", phase_s=0.5)
    return Fault(kind="gone", rank=rank, host=f"node-{rank}", pid=rank, beat=beat)


def test_silent_machine_is_named_with_what_it_was_last_seen_at() -> None:
    judge = RunJudge(lost_s=10.0, tick_s=TICK_S, now=0.0)
    for now in range(1, 40):
        for rank in (1, 2) if now < 20 else (1,):
            judge.update(report(rank), now)
        fault = judge.look(now)
        assert (fault is not None) == (now > 29), now
    assert fault is not None
    assert (fault.kind, fault.rank) == ("silent", 2)
    assert "nothing has arrived from its machine for" in fault.sentence()
    assert "step 2, computing" in fault.sentence()


def test_rank_that_said_goodbye_is_not_missed() -> None:
    judge = RunJudge(lost_s=10.0, tick_s=TICK_S, now=0.0)
    judge.update(report(1), 0.0)
    judge.forget(1)
    assert all(judge.look(float(now)) is None for now in range(1, 100))


def test_fault_crosses_as_json() -> None:
    fault = Fault(kind="failed", rank=1, host="a", pid=2, beat=Beat(phase="p"), text="why", exit_code=2)
    assert Fault.from_json(fault.to_json()) == fault
    assert Fault.from_json({**fault.to_json(), "of another version": 1}) == fault
    assert "failed: why" in fault.sentence()


def test_board_shows_what_was_written_and_never_half_of_it() -> None:
    mine = HeartbeatPage()
    try:
        reader = HeartbeatPage(mine.descriptor)
        assert reader.read().phase == {}
        mine.write_phase("step 1, computing", limit_s=5.0, is_together=False)
        mine.write_wait("stage read of shard train-000001, tier local for 2.0 s")
        mine.beat()
        view = reader.read()
        assert view.phase == {"phase": "step 1, computing", "limit_s": 5.0, "together": False}
        assert view.waits_for.startswith("stage read of shard train-000001")
        assert view.pulse_count == 1
        # A writer that was stopped amid a write: the count is odd, the text half old.
        mine._page[0] = mine._page[0] + 1
        mine._page[20:24] = b"\xff\xff\xff\xff"
        assert reader.read().phase["phase"] == "step 1, computing"
    finally:
        mine.close()


@pytest.mark.parametrize("letter", ["x", '"', "\\", "\u00e9"])
def test_text_of_any_length_and_letters_fits_its_slot(letter: str) -> None:
    page = HeartbeatPage()
    try:
        page.write_wait(letter * 10_000)
        page.write_phase(letter * 10_000, limit_s=60.0, is_together=True)
        page.beat()
        view = page.read()
        assert view.waits_for == view.phase["phase"] == letter.replace("\u00e9", "?") * 1800
        assert view.pulse_count == 1
    finally:
        page.close()


def test_lines_are_cut_and_what_is_not_json_is_refused() -> None:
    assert split_lines(b'{"a": 1}\n{"b"') == ([{"a": 1}], b'{"b"', True)
    assert split_lines(b'{"a": 1}\n[2]\n')[2] is False
    assert split_lines(b"GET / HTTP/1.1\r\n\r\n")[2] is False
    assert split_lines(b"[" * 50_000 + b"\n")[2] is False
    assert split_lines(b"x" * 100_000)[2] is False
