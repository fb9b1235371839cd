"""TensorBoard's event files: what goes wrong with them costs their curves, never the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

__all__ = ["CLOSE_S", "Board"]

_LOGGER = logging.getLogger(__name__)

CLOSE_S: Final = 60.0
"""How long the end of a run waits for the files at most."""


class Board:
    """Writes curves into a run folder, for rank 0.

    Args:
        run: The run folder.
        start: Global step of this start: what earlier ones drew from there on is hidden.
    """

    def __init__(self, run: Path, *, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # needs the tensorboard package

        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=start)

    def add(self, name: str, value: float, step: int) -> None:
        """Draw a point."""
        if self._writer is not None:
            self._attempt(lambda: self._writer.add_scalar(name, value, step))

    def close(self) -> None:
        """Write the rest; files that take longer than `CLOSE_S`, or cannot be written, are left so."""
        if self._writer is None:
            return
        # A disk that hangs would hold the thread that flushes, and who waits for it.
        closing = threading.Thread(
            target=self._attempt, args=(self._writer.close,), name="shardflow-board", daemon=True
        )
        closing.start()
        closing.join(CLOSE_S)
        if closing.is_alive():
            _LOGGER.warning("TensorBoard did not take the last numbers within %.0f s", CLOSE_S)
        self._writer = None

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever becomes of the curves, the run goes on
            _LOGGER.warning("TensorBoard failed (%s) and gets no more numbers", type(error).__name__)
            self._writer = None
