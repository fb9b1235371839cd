"""Windows of CT by name, in Hounsfield units: what becomes black, what becomes white."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from shardflow.epochs import Permutation
from shardflow.errors import ConfigError
from shardflow.seeds import derive

__all__ = ["WINDOWS", "check_windows", "choose_window"]

# Level and width as radiologists set them; the low and high ends are level -+ width / 2.
WINDOWS: Final = MappingProxyType(
    {
        "abdomen": (-160.0, 240.0),
        "angiography": (0.0, 600.0),
        "bone": (-450.0, 1050.0),
        "brain": (0.0, 80.0),
        "full": (-1024.0, 3071.0),
        "liver": (-20.0, 140.0),
        "lung": (-1350.0, 150.0),
        "mediastinum": (-125.0, 225.0),
        "stroke": (20.0, 60.0),
        "subdural": (-25.0, 175.0),
    }
)


def check_windows(names: tuple[str, ...]) -> None:
    """Refuse names that are no window's.

    Raises:
        ConfigError: There is one.
    """
    unknown = sorted(set(names) - set(WINDOWS))
    if unknown:
        raise ConfigError(f"windows must be of {', '.join(WINDOWS)}, got {unknown[0]!r}; correct it.")


def choose_window(
    names: tuple[str, ...], *, seed: int, epoch: int, row: int, place: tuple[int, ...]
) -> tuple[float, float] | None:
    """Return the window that a sample of a CT gets in an epoch; None for that of the study.

    Args:
        names: Of `WINDOWS`; each is as likely. None of them: that of the study.
        seed: Run-level seed.
        epoch: Epoch.
        row: Row of the sample, as in `ImageView.choose`.
        place: Likewise.
    """
    if not names:
        return None
    if len(names) == 1:
        return WINDOWS[names[0]]
    order = Permutation(len(names), derive(seed, "window-choice", epoch, row, *place))
    return WINDOWS[names[int(order(np.array([0]))[0])]]
