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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from shardflow.errors import os_reason
from shardflow.processes import ignore_group_signals
from shardflow.training.health.heartbeat import (
    FAULTS_FILE,
    LAST_STACKS_SIGNAL,
    Beat,
    Fault,
    FaultKind,
    HeartbeatPage,
    HeartbeatView,
    JsonConnection,
    SideConfig,
    split_lines,
)


class RankJudge:
    """Judge of one rank.

    Args:
        rank: The rank.
        host: Its machine.
        pid: Its process.
        hang_s: Longest time without a pulse of its interpreter; 0 for no limit.
        tick_s: How often :meth:`look` is called.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, *, rank: int, host: str, pid: int, hang_s: float, tick_s: float, now: float) -> None:
        self.rank, self.host, self.pid = rank, host, pid
        self._hang_s, self._tick_s = hang_s, tick_s
        self._looked_at = self._phase_at = self._pulse_at = now
        self._view = HeartbeatView({}, "", 0, 0)

    def look(self, view: HeartbeatView, state: str, now: float) -> Fault | None:
        """Check what the page shows.

        Args:
            view: The page.
            state: The process's state as in ``/proc/PID/stat``: ``T`` or ``t`` where a signal stopped it.
            now: The time.

        Returns:
            The fault of the rank, if it has one.
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
        """Return the rank's last known phase."""
        phase = self._view.phase.get("phase", "starting")
        return Beat(phase=phase, phase_s=max(0.0, now - self._phase_at), waits_for=self._view.waits_for)

    def fault(
        self,
        kind: FaultKind,
        now: float,
        *,
        after_s: float = 0.0,
        text: str = "",
        exit_code: int = 1,
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
            exit_code=exit_code,
        )


class RunJudge:
    """Judge of all ranks but its own.

    Args:
        lost_s: Longest silence of a rank's monitor process.
        tick_s: How often :meth:`look` is called.
        now: Seconds of a monotonic clock.
    """

    def __init__(self, *, lost_s: float, tick_s: float, now: float) -> None:
        self._lost_s, self._tick_s = lost_s, tick_s
        self._looked_at = now
        self._seen_at: dict[int, float] = {}
        self._last: dict[int, Fault] = {}

    def update(self, last: Fault, now: float) -> None:
        """Record a report: the fault that this rank would have if it were its last."""
        self._seen_at[last.rank] = now
        self._last[last.rank] = last

    def forget(self, rank: int) -> None:
        """Forget a rank that ended normally."""
        self._seen_at.pop(rank, None)

    def is_watched(self, rank: int) -> bool:
        """Return whether the rank has reported and not ended."""
        return rank in self._seen_at

    def last_of(self, rank: int) -> Fault:
        """Return the newest report of a rank."""
        return self._last[rank]

    def look(self, now: float) -> Fault | None:
        """Return the fault of the rank that has been silent for too long."""
        own_pause_s = now - self._looked_at - self._tick_s
        if own_pause_s > self._tick_s:
            self._seen_at = {rank: seen_at + own_pause_s for rank, seen_at in self._seen_at.items()}
        self._looked_at = now
        for rank, seen_at in sorted(self._seen_at.items(), key=lambda item: item[1]):
            if now - seen_at > self._lost_s:
                return replace(self._last[rank], kind="silent", after_s=now - seen_at)
        return None


_LINGER_S: Final = 5.0
"""How long a hub whose rank has ended keeps notifying the others."""
_CONNECT_S: Final = 5.0
_ANSWER_S: Final = 3.0
"""Time for a rank that was notified of a fault to write its stacks by itself."""


class Side:
    """The monitor process.

    Args:
        settings: Its arguments.
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
        """When the rank ended, or reported its end."""
        self.kill_at: float | None = None
        self.stacks_at: float | None = None
        """When to signal for the stacks of a rank that was notified of a fault and has not written them."""
        self.hub: JsonConnection | None = None
        self.hub_seen_at = now
        self.last_of_hub: Fault | None = None
        self.launcher: int | None = None
        """The rank's parent when we began."""
        self.clients: dict[JsonConnection, int | None] = {}
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
        self._check_rank(now)
        if self.hub is not None:
            self._report(self.hub, now)
        elif self.settings.listen:
            self._check_others(now)

    def _open(self) -> None:
        os.set_blocking(sys.stdin.fileno(), False)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._read_commands)
        if self.settings.listen:
            family = socket.AF_INET6 if ":" in self.settings.listen else socket.AF_INET
            try:
                listener = socket.create_server((self.settings.listen, 0), family=family, backlog=1024)
            except OSError as error:
                self._warn(
                    f"cannot listen on the rendezvous address ({os_reason(error)}); "
                    "faults of other ranks are not named"
                )
                self._notify_rank({"port": None})
                return
            self._listener = listener
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            self._notify_rank({"port": listener.getsockname()[1]})

    def _is_over(self) -> bool:
        if self.ended_at is None:
            return False
        # The hub lingers until the others know the fault, those that connect only now too.
        is_needed = self.fault is not None and bool(self.clients)
        return not is_needed or time.monotonic() - self.ended_at > _LINGER_S

    # ---- this rank -------------------------------------------------------------------------------

    def _check_rank(self, now: float) -> None:
        state, parent = _process_state(self.settings.pid)
        fault = self.judge.look(self.page.read(), state, now)
        self._check_launcher(parent)
        if os.getppid() != self.settings.pid:
            self._rank_ended()
        elif self.ended_at is None and fault is not None:
            self._raise(fault)
        if self.stacks_at is not None and self.ended_at is None and now > self.stacks_at:
            self.stacks_at = None
            self._signal(LAST_STACKS_SIGNAL)
        if self.kill_at is not None and self.ended_at is None and now > self.kill_at:
            self._signal(signal.SIGKILL)

    def _check_launcher(self, parent: int) -> None:
        """Stop a rank whose launcher was killed: it would keep running, with the run folder locked."""
        if self.launcher is None:
            self.launcher = parent
        elif parent != self.launcher and self.ended_at is None and os.getppid() == self.settings.pid:
            self.launcher = parent
            self._warn("the launcher has died before its ranks; the rank writes a checkpoint and stops")
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
                self._end(**command)

    def _end(self, bye: str, text: str, exit_code: int) -> None:
        now = time.monotonic()
        self.judge.look(self.page.read(), "R", now)
        if bye == "failed" and self.fault is None:
            self._raise(self.judge.fault("failed", now, text=text, exit_code=exit_code), notify_rank=False)
        elif self.hub is not None:
            self.hub.send({"bye": True})
        self.ended_at = now

    def _rank_ended(self) -> None:
        if self.ended_at is None:
            now = time.monotonic()
            self.judge.look(self.page.read(), "Z", now)
            self._raise(self.judge.fault("gone", now), notify_rank=False)
            self.ended_at = now

    def _raise(self, fault: Fault, *, notify_rank: bool = True) -> None:
        """Announce a fault, the first one only: later ones are its consequences."""
        if self.fault is not None:
            return
        self.fault = fault
        if self.settings.listen:
            self._log_fault(fault)
            for client in self._members():
                client.send({"fault": fault.to_json()})
        elif self.hub is not None and fault.rank == self.settings.rank:
            self.hub.send({"fault": fault.to_json()})
        if notify_rank:
            self._notify_rank({"fault": fault.to_json()})
            self.kill_at = time.monotonic() + self.settings.kill_after_s
            self.stacks_at = time.monotonic() + _ANSWER_S
            self._signal(signal.SIGCONT)

    def _notify_rank(self, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(sys.stdout.fileno(), json.dumps(value).encode() + b"\n")

    def _warn(self, text: str) -> None:
        sys.stderr.write(f"rank {self.settings.rank}: {text}.\n")
        sys.stderr.flush()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.settings.pid, number)

    def _log_fault(self, fault: Fault) -> None:
        line = json.dumps({"event": "fault", "time_s": round(time.time(), 3), **fault.to_json()})
        with contextlib.suppress(OSError), Path(self.settings.folder, FAULTS_FILE).open("a") as file:
            file.write(line + "\n")

    # ---- reporting to the hub ---------------------------------------------------------------------

    def _connect(self, address: str, port: int) -> None:
        try:
            stream = socket.create_connection((address, port), timeout=_CONNECT_S)
        except OSError as error:
            self._warn(
                f"the monitor process of rank 0 is unreachable ({os_reason(error)}, port {port}); open "
                "the ports between the machines of the job, or faults of other ranks are not named here"
            )
            return
        self.hub, self.hub_seen_at = JsonConnection(stream), time.monotonic()
        # Known of rank 0 before its first report: a connection that closes earlier means its end too.
        self.last_of_hub = Fault(kind="gone", rank=0, host=address, pid=0, beat=Beat())
        self._selector.register(stream, selectors.EVENT_READ, self._receive_from_hub)
        self.hub.send({"token": self.settings.token, "rank": self.settings.rank})
        self._report(self.hub, self.hub_seen_at)

    def _report(self, hub: JsonConnection, now: float) -> None:
        silent_s = now - self.hub_seen_at
        if silent_s > self.settings.lost_s + self.settings.tick_s:
            self._lose_hub(silent_s)
            return
        # The fault that this rank has if nothing follows.
        hub.send({"last": self.judge.fault("gone", now).to_json()})

    def _receive_from_hub(self) -> None:
        if self.hub is None:
            return
        for value in self.hub.receive():
            self.hub_seen_at = time.monotonic()
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
            self._raise(
                replace(self.last_of_hub, kind="silent", after_s=silent_s) if silent_s else self.last_of_hub
            )

    def _drop(self, lines: JsonConnection) -> None:
        self._selector.unregister(lines.stream)
        lines.close()

    # ---- being the hub ----------------------------------------------------------------------------

    def _members(self) -> list[JsonConnection]:
        """Return the monitor processes that proved to belong to this run."""
        return [client for client, rank in self.clients.items() if rank is not None]

    def _accept(self) -> None:
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            stream, _ = self._listener.accept()
            client = JsonConnection(stream)
            self.clients[client] = None
            self._selector.register(stream, selectors.EVENT_READ, lambda: self._receive(client))

    def _receive(self, client: JsonConnection) -> None:
        for value in client.receive():
            rank = self.clients[client]
            if rank is None:
                if not hmac.compare_digest(str(value.get("token")), self.settings.token):
                    client.is_open = False
                    break
                self.clients[client] = int(value["rank"])
                if self.fault is not None:  # it connected after the fault
                    client.send({"fault": self.fault.to_json()})
            elif "last" in value:
                self.run_judge.update(Fault.from_json(value["last"]), time.monotonic())
            elif "fault" in value:
                self.run_judge.forget(rank)
                self._raise(Fault.from_json(value["fault"]))
            elif "bye" in value:
                self.run_judge.forget(rank)
        if not client.is_open:
            self._disconnect(client)

    def _disconnect(self, client: JsonConnection) -> None:
        rank = self.clients.pop(client)
        self._drop(client)
        if rank is not None and self.run_judge.is_watched(rank):
            # Its monitor process ended without a message: it was killed with the rank.
            self.run_judge.forget(rank)
            self._raise(self.run_judge.last_of(rank))

    def _check_others(self, now: float) -> None:
        alive = self.judge.fault("gone", now).to_json()
        for client in self._members():
            client.send({"alive": alive})
        for client in [client for client in self.clients if not client.is_open]:
            self._disconnect(client)
        fault = self.run_judge.look(now)
        if fault is not None and self.ended_at is None:
            self._raise(fault)


def _process_state(pid: int) -> tuple[str, int]:
    """Return state letter and parent of a process; ``R`` and 0 if they cannot be read."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "R", 0
    return state, int(parent)


def main() -> None:
    """Run the monitor process; its one argument is the settings as JSON."""
    ignore_group_signals()  # it ends with its rank
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Side(SideConfig(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
