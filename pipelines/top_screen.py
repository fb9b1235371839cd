"""The terminal of a live view: the picture twice a second, keys, and the terminal left as it was found."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

from rich.console import Console
from rich.control import Control
from rich.text import Text

from pipelines.top_draw import DIM, Glyphs, duration, fitted
from pipelines.top_frame import LEAST_HEIGHT, LEAST_WIDTH, frame
from shardflow.monitoring.live import LiveRun, LiveView
from shardflow.monitoring.live_replay import Replay

__all__ = ["show_live", "show_replay"]

_REFRESH_S: Final = 0.5
_REPLAY_REFRESH_S: Final = 0.1
_SIGNALLED: Final = 128
_JUMP_S: Final = 10.0
_LONG_JUMP_S: Final = 60.0
_KEYS: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1b[1;2C": "long right",
    b"\x1b[1;2D": "long left",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
}


def show_live(console: Console, folder: Path, glyphs: Glyphs) -> None:
    """Show a run until somebody leaves."""
    run = LiveRun(folder)
    with _Screen(console) as screen:
        screen.say("reading what the run has written")  # seconds, after days of steps
        view, is_held = run.follow(time.time()), False
        while True:
            held = "  held: p goes on" if is_held else ""
            screen.draw(view, glyphs, f"q leave  p hold{held}")
            for key in screen.keys(_REFRESH_S):
                if key == "q":
                    return
                if key in {"p", " "}:
                    is_held = not is_held
            if not is_held:
                view = run.follow(time.time())


def show_replay(console: Console, folder: Path, glyphs: Glyphs, *, speed: float) -> None:
    """Play a run until somebody leaves; it stays at its end."""
    replay = Replay(folder)
    is_playing = True
    with _Screen(console) as screen:
        seen_s = time.monotonic()
        while True:
            state = f"x{speed:g}" if is_playing else "paused"
            place = f"{duration(replay.position_s)} of {duration(replay.length_s)}"
            keys = "q leave  space play  arrows time, speed"
            screen.draw(replay.view(), glyphs, f"replay {state}  {place}  {keys}")
            for key in screen.keys(_REPLAY_REFRESH_S):
                if key == "q":
                    return
                if key in {"p", " "}:
                    is_playing = not is_playing
                elif key in {"up", "down"}:
                    speed = min(100_000.0, max(0.01, speed * (2.0 if key == "up" else 0.5)))
                else:
                    replay.move(_jump(key, replay))
            now_s = time.monotonic()
            if is_playing:
                replay.move((now_s - seen_s) * speed)
            seen_s = now_s


def _jump(key: str, replay: Replay) -> float:
    jumps = {
        "left": -_JUMP_S,
        "right": _JUMP_S,
        "long left": -_LONG_JUMP_S,
        "long right": _LONG_JUMP_S,
        "home": -replay.length_s,
        "end": replay.length_s,
    }
    return jumps.get(key, 0.0)


class _Screen:
    """The terminal's other screen without echo and cursor, for a ``with`` block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_keyed = sys.stdin.isatty()
        self._mode: list[Any] = []
        self._former: Any = None

    def __enter__(self) -> _Screen:
        # A signal that ends the process must not leave a terminal without echo behind.
        self._former = signal.signal(signal.SIGTERM, _leave)
        if self._is_keyed:
            self._mode = list(termios.tcgetattr(sys.stdin.fileno()))
            tty.setcbreak(sys.stdin.fileno(), termios.TCSANOW)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)
        if self._is_keyed:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._mode)
        signal.signal(signal.SIGTERM, self._former)

    def say(self, text: str) -> None:
        """Show a line until there is a picture."""
        self._console.control(Control.home())
        self._console.print(text, end="", style=DIM)

    def draw(self, view: LiveView, glyphs: Glyphs, footer: str) -> None:
        """Draw over what is there: every cell is written, so that nothing flickers or stays."""
        width, height = self._console.size
        if width < LEAST_WIDTH or height < LEAST_HEIGHT:
            needed = Text(f"needs {LEAST_WIDTH} x {LEAST_HEIGHT}")
            lines = [fitted(needed, width, glyphs), *[Text(" " * width)] * (height - 1)]
        else:
            lines = frame(view, width=width, height=height, glyphs=glyphs, footer=footer)
        picture = Text("\n").join(lines)
        self._console.control(Control.home())
        self._console.print(picture, end="", no_wrap=True, overflow="crop", crop=False)

    def keys(self, timeout_s: float) -> list[str]:
        """Wait so long for keys, and return the names of those that were pressed."""
        if not self._is_keyed:
            time.sleep(timeout_s)
            return []
        descriptor = sys.stdin.fileno()
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return []
        pressed = os.read(descriptor, 256)
        if not pressed:  # the terminal is gone
            return ["q"]
        return list(_named(pressed))


def _named(pressed: bytes) -> Iterator[str]:
    while pressed:
        sequence = next((one for one in _KEYS if pressed.startswith(one)), None)
        if sequence is None:
            yield chr(pressed[0]).lower()
            pressed = pressed[1:]
        else:
            yield _KEYS[sequence]
            pressed = pressed[len(sequence) :]


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(_SIGNALLED + number)
