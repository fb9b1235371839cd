"""Monitor process of a rank: ``python -m shardflow.training.health.side CONFIG``.

It checks its rank several times a second, reports to the monitor process of rank 0 (the *hub*, which is this
same program), and notifies its rank of faults anywhere. It imports no torch and shares nothing with the rank
but a page of memory, so it keeps running when the rank is stopped, killed, or stuck in a call that holds the
interpreter lock. It ends soon after its rank, whatever happens to the others.

Reads JSON lines from standard input (``hub``: where to report; ``stacks``: the rank has written them;
``bye``: how the rank ends) and writes them to standard output (``port``: where the hub listens; ``fault``:
what is wrong).

`RankJudge` and `RunJudge` decide who is at fault, with the time as an argument. Both forgive a pause of their
own: after a machine was suspended, or a scheduler stopped and continued the whole job, everybody seems to
have been silent for as long as the judge itself was.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Final

from shardflow.processes import ignore_group_signals
from shardflow.training.health.heartbeat import (
    FAULTS_FILE,
    LAST_STACKS_SIGNAL,
    Beat,
    Fault,
    FaultKind,
    HeartbeatPage,
    HeartbeatView,
    Lines,
    SideConfig,
    split_lines,
)


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
        self._view = HeartbeatView({}, "", 0, 0)

    def look(self, view: HeartbeatView, state: str, now: float) -> Fault | None:
        """Take in what the page shows.

        Args:
            view: The page.
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


_LINGER_S: Final = 5.0
"""How long a hub whose rank has ended still tells the others why."""
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 3.0
"""How long a rank that was told a fault may take to write its stacks by itself."""


class Side:
    """The program's state.

    Args:
        settings: What it was started with.
    """

    def __init__(self, settings: SideConfig) -> None:
        now = time.monotonic()
        self.settings = settings
        self.page = HeartbeatPage(settings.page)
        self.judge = RankJudge(
            rank=settings.rank,
            host=settings.host,
            pid=settings.pid,
            hang_s=settings.hang_s,
            tick_s=settings.tick_s,
            now=now,
        )
        self.run_judge = RunJudge(lost_s=settings.lost_s, tick_s=settings.tick_s, now=now)
        self.fault: Fault | None = None
        self.ended_at: float | None = None
        """When the rank ended, or said that it does."""
        self.kill_at: float | None = None
        self.stacks_at: float | None = None
        """When to take the stacks of a rank that was told a fault and has not written them."""
        self.hub: Lines | None = None
        self.hub_heard_at = now
        self.last_of_hub: Fault | None = None
        self.launcher: int | None = None
        """The rank's parent when we began."""
        self.clients: dict[Lines, int | None] = {}
        self._commands = b""
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Monitor until the rank has ended and the others know."""
        self._open()
        next_tick = time.monotonic()
        while not self._is_over():
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                key.data()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + self.settings.tick_s
                self._tick(now)
        for client in self._members():
            client.send({"over": True})

    def _tick(self, now: float) -> None:
        self._look_at_rank(now)
        if self.hub is not None:
            self._report(self.hub, now)
        elif self.settings.listen:
            self._look_at_others(now)

    def _open(self) -> None:
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_commands)
        if self.settings.listen:
            family = socket.AF_INET6 if ":" in self.settings.listen else socket.AF_INET
            try:
                listener = socket.create_server((self.settings.listen, 0), family=family, backlog=1024)
            except OSError as error:
                self._warn(
                    f"the rendezvous address must be one of this machine's, got {type(error).__name__}; "
                    "faults of other ranks are not named"
                )
                self._tell_rank({"port": None})
                return
            self._listener = listener
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._tell_rank({"port": listener.getsockname()[1]})

    def _is_over(self) -> bool:
        if self.ended_at is None:
            return False
        # The hub gives the others time to hear what was wrong, those that come only now too.
        is_needed = self.fault is not None and bool(self.clients)
        return not is_needed or time.monotonic() - self.ended_at > _LINGER_S

    # ---- this rank -------------------------------------------------------------------------------

    def _look_at_rank(self, now: float) -> None:
        state, parent = _process_state(self.settings.pid)
        fault = self.judge.look(self.page.read(), state, now)
        self._look_at_launcher(parent)
        if os.getppid() != self.settings.pid:
            self._rank_ended()
        elif self.ended_at is None and fault is not None:
            self._raise(fault)
        if self.stacks_at is not None and self.ended_at is None and now > self.stacks_at:
            self.stacks_at = None
            self._signal(LAST_STACKS_SIGNAL)
        if self.kill_at is not None and self.ended_at is None and now > self.kill_at:
            self._signal(signal.SIGKILL)

    def _look_at_launcher(self, parent: int) -> None:
        """A rank whose launcher was killed goes on, and keeps the run folder locked: have it stop well."""
        if self.launcher is None:
            self.launcher = parent
        elif parent != self.launcher and self.ended_at is None and os.getppid() == self.settings.pid:
            self.launcher = parent
            self._warn(
                "the launcher must outlive its ranks, got none any more; the rank writes a checkpoint and "
                "stops"
            )
            self._signal(signal.SIGTERM)

    def _read_commands(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:  # the pipe closes with the rank, at once
            self._selector.unregister(sys.stdin.fileno())
            self._rank_ended()
            return
        commands, self._commands, _ = split_lines(self._commands + data)
        for command in commands:
            if "hub" in command:
                self._connect(*command["hub"])
            elif "stacks" in command:
                self.stacks_at = None
            else:
                self._say_bye(**command)

    def _say_bye(self, bye: str, text: str, is_refusal: bool) -> None:
        now = time.monotonic()
        self.judge.look(self.page.read(), "R", now)
        if bye == "failed" and self.fault is None:
            self._raise(self.judge.fault("failed", now, text=text, is_refusal=is_refusal), tell_rank=False)
        elif self.hub is not None:
            self.hub.send({"bye": True})
        self.ended_at = now

    def _rank_ended(self) -> None:
        if self.ended_at is None:
            now = time.monotonic()
            self.judge.look(self.page.read(), "Z", now)
            self._raise(self.judge.fault("gone", now), tell_rank=False)
            self.ended_at = now

    def _raise(self, fault: Fault, *, tell_rank: bool = True) -> None:
        """Make a fault known, the first one only: what follows it is its consequence."""
        if self.fault is not None:
            return
        self.fault = fault
        if self.settings.listen:
            self._write_down(fault)
            for client in self._members():
                client.send({"fault": fault.to_json()})
        elif self.hub is not None and fault.rank == self.settings.rank:
            self.hub.send({"fault": fault.to_json()})
        if tell_rank:
            self._tell_rank({"fault": fault.to_json()})
            self.kill_at = time.monotonic() + self.settings.kill_after_s
            self.stacks_at = time.monotonic() + _ANSWER_S
            self._signal(signal.SIGCONT)

    def _tell_rank(self, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")

    def _warn(self, text: str) -> None:
        sys.stderr.write(f"rank {self.settings.rank}: {text}.\n")
        sys.stderr.flush()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.settings.pid, number)

    def _write_down(self, fault: Fault) -> None:
        line = json.dumps({"event": "fault", "time_s": round(time.time(), 3), **fault.to_json()})
        with contextlib.suppress(OSError), Path(self.settings.folder, FAULTS_FILE).open("a") as file:
            file.write(line + "\n")

    # ---- reporting to the hub ---------------------------------------------------------------------

    def _connect(self, address: str, port: int) -> None:
        try:
            stream = socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError as error:
            self._warn(
                f"the watch of rank 0 must be within reach, got {type(error).__name__} (port {port}); open "
                "the ports between the machines of the job, or faults of other ranks are not named here"
            )
            return
        self.hub, self.hub_heard_at = Lines(stream), time.monotonic()
        # What is known of rank 0 until it is heard: a connection that closes before that is its end too.
        self.last_of_hub = Fault(kind="gone", rank=0, host=address, pid=0, beat=Beat())
        self._selector.register(stream, selectors.EVENT_READ, self._hear_hub)
        self.hub.send({"token": self.settings.token, "rank": self.settings.rank})
        self._report(self.hub, self.hub_heard_at)

    def _report(self, hub: Lines, now: float) -> None:
        silent_s = now - self.hub_heard_at
        if silent_s > self.settings.lost_s + self.settings.tick_s:
            self._lose_hub(silent_s)
            return
        # What would be said of this rank if nothing came any more.
        hub.send({"last": self.judge.fault("gone", now).to_json()})

    def _hear_hub(self) -> None:
        if self.hub is None:
            return
        for value in self.hub.receive():
            self.hub_heard_at = time.monotonic()
            if "fault" in value:
                self._raise(Fault.from_json(value["fault"]))
            elif "over" in value:
                self._drop(self.hub)
                self.hub = None
                return
            elif "alive" in value:
                self.last_of_hub = Fault.from_json(value["alive"])
        if not self.hub.is_open:
            self._lose_hub(0.0)

    def _lose_hub(self, silent_s: float) -> None:
        if self.hub is not None:
            self._drop(self.hub)
            self.hub = None
        if self.last_of_hub is not None and self.ended_at is None:
            self._raise(silent(self.last_of_hub, silent_s) if silent_s else _gone(self.last_of_hub))

    def _drop(self, lines: Lines) -> None:
        self._selector.unregister(lines.stream)
        lines.close()

    # ---- being the hub ----------------------------------------------------------------------------

    def _members(self) -> list[Lines]:
        """The sides that have shown that they are of this run."""
        return [client for client, rank in self.clients.items() if rank is not None]

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            stream, _ = self._listener.accept()
            client = Lines(stream)
            self.clients[client] = None
            self._selector.register(stream, selectors.EVENT_READ, lambda: self._hear(client))

    def _hear(self, client: Lines) -> None:
        for value in client.receive():
            rank = self.clients[client]
            if rank is None:
                if not hmac.compare_digest(str(value.get("token")), self.settings.token):
                    client.is_open = False
                    break
                self.clients[client] = int(value["rank"])
                if self.fault is not None:  # it came too late to be told
                    client.send({"fault": self.fault.to_json()})
            elif "last" in value:
                self.run_judge.hear(Fault.from_json(value["last"]), time.monotonic())
            elif "fault" in value:
                self.run_judge.forget(rank)
                self._raise(Fault.from_json(value["fault"]))
            elif "bye" in value:
                self.run_judge.forget(rank)
        if not client.is_open:
            self._part_from(client)

    def _part_from(self, client: Lines) -> None:
        rank = self.clients.pop(client)
        self._drop(client)
        if rank is not None and self.run_judge.is_watched(rank):
            # Its side ended without a word: it was killed together with the rank.
            self.run_judge.forget(rank)
            self._raise(_gone(self.run_judge.last_of(rank)))

    def _look_at_others(self, now: float) -> None:
        alive = self.judge.fault("silent", now).to_json()
        for client in self._members():
            client.send({"alive": alive})
        for client in [client for client in self.clients if not client.is_open]:
            self._part_from(client)
        fault = self.run_judge.look(now)
        if fault is not None and self.ended_at is None:
            self._raise(fault)


def _gone(last: Fault) -> Fault:
    return Fault(kind="gone", rank=last.rank, host=last.host, pid=last.pid, beat=last.beat)


def _process_state(pid: int) -> tuple[str, int]:
    """State letter and parent of a process; ``R`` and 0 where they cannot be told."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "R", 0
    return state, int(parent)


def main() -> None:
    """Run the side; its one argument is the settings as JSON."""
    ignore_group_signals()  # the side ends with its rank
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Side(SideConfig(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
