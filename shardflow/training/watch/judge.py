"""Decides who is at fault, from what the sides saw; pure, with the time as an argument.

A :class:`RankJudge` looks at one rank through its board, a :class:`RunJudge` at all ranks through their
sides' reports. Both forgive a pause of their own: after a machine was suspended, or a scheduler stopped the
whole job and continued it, everybody seems to have been silent for as long as the judge itself was.
"""

from __future__ import annotations

from shardflow.training.watch.board import BoardView
from shardflow.training.watch.fault import Beat, Fault, FaultKind

__all__ = ["RankJudge", "RunJudge"]


class RankJudge:
    """Looks at one rank.

    Args:
        rank: The rank.
        host: Its machine.
        pid: Its process.
        hang_s: How long its interpreter may show no pulse; 0 for ever.
        tick_s: How often :meth:`look` is called.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, *, rank: int, host: str, pid: int, hang_s: float, tick_s: float, now: float) -> None:
        self.rank, self.host, self.pid = rank, host, pid
        self._hang_s, self._tick_s = hang_s, tick_s
        self._looked_at = self._phase_at = self._pulse_at = now
        self._view = BoardView({}, "", 0, 0)

    def look(self, view: BoardView, state: str, now: float) -> Fault | None:
        """Take in what the board shows.

        Args:
            view: The board.
            state: The process's state as in ``/proc/PID/stat``: ``T`` or ``t`` where a signal stopped it.
            now: The time.

        Returns:
            The fault, if the rank is at one.
        """
        own_pause_s = now - self._looked_at - self._tick_s
        if own_pause_s > self._tick_s:
            self._phase_at += own_pause_s
            self._pulse_at += own_pause_s
        self._looked_at = now
        if view.phase_count != self._view.phase_count:
            self._phase_at = now
        if view.pulse_count != self._view.pulse_count:
            self._pulse_at = now
        self._view = view
        limit_s = view.phase.get("limit_s")
        silent_s = now - self._pulse_at
        if self._hang_s and silent_s > self._hang_s and state in "tT":
            return self.fault("stopped", now, after_s=silent_s)
        # Libraries that load from a slow disk keep the lock too: a phase that may take long may do that.
        if self._hang_s and silent_s > max(self._hang_s, limit_s or 0.0):
            return self.fault("held", now, after_s=silent_s)
        if limit_s and not view.phase.get("together") and now - self._phase_at > limit_s:
            return self.fault("stuck", now, after_s=now - self._phase_at)
        return None

    def beat(self, now: float) -> Beat:
        """What the rank is at."""
        phase = self._view.phase.get("phase", "starting")
        return Beat(phase=phase, phase_s=max(0.0, now - self._phase_at), waits_for=self._view.waits_for)

    def fault(
        self,
        kind: FaultKind,
        now: float,
        *,
        after_s: float = 0.0,
        text: str = "",
        is_refusal: bool = False,
    ) -> Fault:
        """Make a fault of this rank."""
        return Fault(
            kind=kind,
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            beat=self.beat(now),
            after_s=after_s,
            text=text,
            is_refusal=is_refusal,
        )


class RunJudge:
    """Looks at all ranks but its own.

    Args:
        lost_s: How long nothing may come from a rank's side.
        tick_s: How often :meth:`look` is called.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, *, lost_s: float, tick_s: float, now: float) -> None:
        self._lost_s, self._tick_s = lost_s, tick_s
        self._looked_at = now
        self._heard: dict[int, float] = {}
        self._last: dict[int, Fault] = {}

    def hear(self, last: Fault, now: float) -> None:
        """Take in a report: what would be said of the rank if it were the last one."""
        self._heard[last.rank] = now
        self._last[last.rank] = last

    def forget(self, rank: int) -> None:
        """A rank has ended as it should."""
        self._heard.pop(rank, None)

    def is_watched(self, rank: int) -> bool:
        """Whether the rank reported and has not ended."""
        return rank in self._heard

    def last_of(self, rank: int) -> Fault:
        """The newest report of a rank."""
        return self._last[rank]

    def look(self, now: float) -> Fault | None:
        """Return the fault of the rank that has been silent for too long."""
        own_pause_s = now - self._looked_at - self._tick_s
        if own_pause_s > self._tick_s:
            self._heard = {rank: heard + own_pause_s for rank, heard in self._heard.items()}
        self._looked_at = now
        for rank, heard in sorted(self._heard.items(), key=lambda item: item[1]):
            if now - heard > self._lost_s:
                return silent(self._last[rank], now - heard)
        return None


def silent(last: Fault, after_s: float) -> Fault:
    """Make the fault of a rank whose side is not heard any more, from its last report."""
    return Fault(kind="silent", rank=last.rank, host=last.host, pid=last.pid, beat=last.beat, after_s=after_s)
