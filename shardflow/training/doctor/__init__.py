"""The settings doctor: what is wrong, or useless, before a job starts.

Every rule is a function of :class:`Surroundings` and says what must hold, what was found, and the fix. The
facts behind the rules stand beside them with their sources (``names``). Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardflow.training.doctor.finding import Finding, Level
from shardflow.training.doctor.machine import check_machine
from shardflow.training.doctor.software import check_software
from shardflow.training.doctor.surroundings import Surroundings, look_around
from shardflow.training.doctor.variables import check_variables, refuse_unknown_names

__all__ = ["Finding", "Level", "Surroundings", "examine", "look_around", "refuse_unknown_names"]


def examine(around: Surroundings, *, allowed: Iterable[str] = ()) -> list[Finding]:
    """Apply all rules.

    Args:
        around: What to look at.
        allowed: Names of variables that are left alone, such as a plugin's.
    """
    return [*check_variables(around, allowed), *check_machine(around), *check_software(around)]
