"""Stage 5 of the plan: who runs which micro-batch of a step; the only stage that knows the world size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from shardflow.epochs.integers import check_ints, checked_int
from shardflow.epochs.spec import MAX_PER_STEP
from shardflow.errors import PlanError

__all__ = ["RankSchedule", "data_parallel_rank"]


@dataclass(frozen=True, slots=True)
class RankSchedule:
    """The micro-batches of a step, dealt to the ranks like cards.

    Every rank runs ``ceil(M / W)`` micro-batches a step, one after the other in its *rank slots* 0, 1, ...;
    rank ``r`` runs micro-batch ``slot * W + r`` in slot ``slot``. Those of the last slot that are not below M
    are fillers of weight 0, so that every rank joins every collective.

    Where the plan has lanes and the nodes are told, and their number divides ``gcd(M, lanes)``, the lanes are
    dealt to the nodes first: a node runs the micro-batches of its own lanes only, dealt to its ranks like
    cards. So each shard is read by one node. The steps are the same either way.

    Args:
        micro_batches_per_step: M of the batch spec.
        world_size: W, the number of data-parallel ranks, 1 to M.
        allow_fillers: False refuses a world size that does not divide M.
        lanes: Lanes of the batch spec; 0 for none.
        ranks_per_node: Data-parallel ranks of a node, whose numbers follow each other; 0 for unknown.

    Raises:
        PlanError: The world size is out of range, or does not divide M and fillers are refused.

    Example:
        >>> schedule = RankSchedule(micro_batches_per_step=512, world_size=56)
        >>> schedule.num_micro_batches_per_rank, schedule.num_fillers, round(schedule.efficiency, 3)
        (10, 48, 0.914)
    """

    micro_batches_per_step: int
    world_size: int
    allow_fillers: bool = True
    lanes: int = 0
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        where = "rank schedule"
        bounds = dict.fromkeys(("lanes", "ranks_per_node"), (0, MAX_PER_STEP))
        bounds |= dict.fromkeys(("micro_batches_per_step", "world_size"), (1, MAX_PER_STEP))
        check_ints(self, bounds, where=where, error=PlanError)
        if self.world_size > self.micro_batches_per_step:
            raise PlanError(
                f"world_size must be at most micro_batches_per_step ({self.micro_batches_per_step}), got "
                f"{self.world_size} ({where}); start at most {self.micro_batches_per_step} ranks, or begin a "
                f"new run with micro_batches_per_step set to a multiple of {self.world_size}."
            )
        if self.num_fillers and not self.allow_fillers:
            raise PlanError(
                f"world_size must divide micro_batches_per_step ({self.micro_batches_per_step}), got "
                f"{self.world_size} ({where}, fillers are refused); start {self._divisor_below()} ranks, or "
                f"allow fillers at an efficiency of {self.efficiency:.1%}."
            )

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches that every rank runs in a step, fillers included."""
        return -(-self.micro_batches_per_step // self.world_size)

    @property
    def num_fillers(self) -> int:
        """Fillers of a step, over all ranks."""
        return self.num_micro_batches_per_rank * self.world_size - self.micro_batches_per_step

    @property
    def efficiency(self) -> float:
        """Share of the micro-batches that are run and are no fillers, over 0.5 and at most 1."""
        return self.micro_batches_per_step / (self.num_micro_batches_per_rank * self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes that have lanes of their own; 0 where every node reads from all lanes."""
        if not self.lanes or not self.ranks_per_node or self.world_size % self.ranks_per_node:
            return 0
        num_nodes = self.world_size // self.ranks_per_node
        return num_nodes if gcd(self.micro_batches_per_step, self.lanes) % num_nodes == 0 else 0

    def node_of_lane(self, lane: int) -> int:
        """Return the node that serves a lane; only where ``num_nodes`` is not 0."""
        group = gcd(self.micro_batches_per_step, self.lanes)
        return lane % group // (group // self.num_nodes)

    def micro(self, rank: int, slot: int) -> int:
        """Return the micro-batch that ``rank`` runs in its rank slot ``slot``; a filler if not below M.

        Raises:
            PlanError: There is no such rank or rank slot.
        """
        where = "rank schedule"
        rank = checked_int("rank", rank, low=0, high=self.world_size - 1, where=where, error=PlanError)
        last = self.num_micro_batches_per_rank - 1
        slot = checked_int("slot", slot, low=0, high=last, where=where, error=PlanError)
        num_nodes = self.num_nodes
        if not num_nodes:
            return slot * self.world_size + rank
        # Micro-batch m comes from a lane with the same rest modulo the group, in every step.
        node, local = divmod(rank, self.ranks_per_node)
        per_node, number = self.micro_batches_per_step // num_nodes, slot * self.ranks_per_node + local
        if number >= per_node:
            fillers_per_node = self.num_fillers // num_nodes
            return self.micro_batches_per_step + node * fillers_per_node + number - per_node
        group = gcd(self.micro_batches_per_step, self.lanes)
        row, column = divmod(number, group // num_nodes)
        return row * group + node * (group // num_nodes) + column

    def micros(self, rank: int) -> Sequence[int]:
        """Return the micro-batches that ``rank`` runs in a step, in order; those not below M are fillers.

        Raises:
            PlanError: There is no such rank.
        """
        return [self.micro(rank, slot) for slot in range(self.num_micro_batches_per_rank)]

    def is_filler(self, micro: int) -> bool:
        """Say whether a micro-batch that this schedule deals is a filler."""
        return micro >= self.micro_batches_per_step

    def _divisor_below(self) -> int:
        return next(w for w in range(self.world_size, 0, -1) if self.micro_batches_per_step % w == 0)


def data_parallel_rank(
    rank: int, mesh_shape: Sequence[int], data_dimensions: Sequence[int]
) -> tuple[int, int]:
    """Return the data-parallel rank of a process in a mesh, and how many there are.

    Processes that differ only in other dimensions (tensor, pipeline, context) get the same rank, and with it
    the same micro-batches.

    Args:
        rank: Number of the process in the mesh, counted along its last dimension first.
        mesh_shape: Size of each dimension.
        data_dimensions: Which of them are data-parallel, such as replicate and shard of a hybrid mesh.

    Raises:
        PlanError: There is no such rank or dimension, or a dimension is named twice.

    Example:
        >>> data_parallel_rank(5, mesh_shape=(4, 2), data_dimensions=(0,))
        (2, 4)
    """
    where = f"mesh {tuple(mesh_shape)}"
    rank = checked_int("rank", rank, low=0, high=prod(mesh_shape) - 1, where=where, error=PlanError)
    if len(set(data_dimensions)) != len(data_dimensions):
        raise PlanError(f"data_dimensions must differ, got {tuple(data_dimensions)} ({where}).")
    for number in data_dimensions:
        checked_int("dimension", number, low=0, high=len(mesh_shape) - 1, where=where, error=PlanError)
    data_rank, size = 0, 1
    for number in sorted(data_dimensions):
        place = rank // prod(mesh_shape[number + 1 :]) % mesh_shape[number]
        data_rank = data_rank * mesh_shape[number] + place
        size *= mesh_shape[number]
    return data_rank, size
