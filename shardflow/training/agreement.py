"""What all ranks must agree on before a step is run (contract S1: the step count is known before step 0)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardflow.errors import RanksDisagreeError
from shardflow.training.distributed import Ranks

__all__ = ["agree", "find_disagreement"]


def agree(ranks: Ranks, phase: str, facts: Mapping[str, Any]) -> None:
    """Compare facts between all ranks; a rank that went on with others would hang the rest in a collective.

    Args:
        ranks: The ranks of the run.
        phase: What is about to begin, for the message.
        facts: JSON values that must be equal on all ranks.

    Raises:
        RanksDisagreeError: on every rank, naming each differing fact, its values and the ranks that hold
            them.
    """
    problem = find_disagreement(ranks.gather_json(dict(facts)))
    if problem is not None:
        raise RanksDisagreeError(
            f"all ranks must agree before {phase}, got {problem}; start every rank with the same "
            "configuration, dataset and code."
        )


def find_disagreement(facts_by_rank: Sequence[Mapping[str, Any]]) -> str | None:
    """Say which facts differ, or return None.

    Example:
        >>> find_disagreement([{"num_steps": 12}, {"num_steps": 11}, {"num_steps": 12}])
        'num_steps 12 on ranks 0, 2 but 11 on rank 1'
    """
    names = sorted({name for facts in facts_by_rank for name in facts})
    problems = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            value = json.dumps(facts[name], sort_keys=True) if name in facts else "nothing"
            holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            problems.append(
                f"{name} " + " but ".join(f"{value} on {_rank_list(r)}" for value, r in holders.items())
            )
    return "; ".join(problems) or None


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
