"""World of a data-parallel job: the rank of this process, and the number of ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Data-parallel rank, and the number of ranks.

    All ranks of a tensor- or pipeline-parallel group pass the same ``World``, so that they get the same
    micro-batches.
    """

    rank: int = 0
    #: From 0.
    world_size: int = 1
    ranks_per_node: int = 0
    #  Ranks of one node, numbered consecutively; 0 if unknown. Decides which lanes a rank reads, never what
    # is
    #: in a step.

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(
                f"world_size must be at least 1, got {self.world_size}; give the number of ranks."
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be from 0 to world_size - 1 ({self.world_size - 1}), got {self.rank}; correct it."
            )
        if self.ranks_per_node < 0:
            raise ConfigError(
                f"ranks_per_node must be at least 0, got {self.ranks_per_node}; give the ranks of one node."
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read ``RANK`` and ``WORLD_SIZE`` as torchrun sets them; a world of one rank if neither is set.

        ``LOCAL_WORLD_SIZE``, if set, is the number of ranks of a node.

        Call it once at the start of a job, and pass the result on.

        Args:
            environment: Variables to read; the process environment by default.

        Raises:
            ConfigError: Only one of the two is set, or a value is not a number in range.
        """
        names = ("RANK", "WORLD_SIZE")
        variables = os.environ if environment is None else environment
        found = [variables.get(name) for name in names]
        if found == [None, None]:
            return cls()
        numbers: list[int] = []
        for name, text in zip(names, found, strict=True):
            if text is None or not text.isascii() or not text.isdigit():
                raise ConfigError(
                    f"{name} must be a number when a world is given, got {text!r} (environment); "
                    "start the job with torchrun, or unset both RANK and WORLD_SIZE."
                )
            numbers.append(int(text))
        local = variables.get("LOCAL_WORLD_SIZE", "")
        ranks_per_node = int(local) if local.isascii() and local.isdigit() else 0
        return cls(rank=numbers[0], world_size=numbers[1], ranks_per_node=ranks_per_node)
