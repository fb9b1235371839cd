from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest

from shardflow.errors import ConfigError
from shardflow.loading import World
from shardflow.loading.config import resolve_world

pytestmark = pytest.mark.fast


def test_a_world_is_one_of_one_by_default() -> None:
    assert World() == World(rank=0, world_size=1)
    assert World.from_environment({}) == World()


def test_torchruns_variables_are_read() -> None:
    assert World.from_environment({"RANK": "3", "WORLD_SIZE": "4"}) == World(rank=3, world_size=4)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "world_size"),
    ],
)
def test_a_wrong_environment_is_refused_by_name(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        World.from_environment(environment)


SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "8"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize("variables", [SRUN, MPIRUN], ids=["srun", "mpirun"])
def test_processes_that_would_all_get_the_same_batches_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"process 3 of 8 .*export RANK=\$.* world='single'"):
        World.from_environment(variables)
    ranks = {"RANK": "3", "WORLD_SIZE": "8"}
    assert World.from_environment({**variables, **ranks}) == World(rank=3, world_size=8)


@pytest.mark.parametrize(
    "variables",
    [{"SLURM_NTASKS": "8"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"}],
)
def test_a_shell_or_a_step_of_one_process_is_a_world_of_one(variables: dict[str, str]) -> None:
    assert World.from_environment(variables) == World()


def test_ranks_of_a_node_are_left_out_where_nodes_differ() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}
    assert World.from_environment(variables).ranks_per_node == 4
    assert World.from_environment({**variables, "GROUP_WORLD_SIZE": "2"}).ranks_per_node == 0


class Mesh:
    """What `resolve_world` uses of a torch DeviceMesh."""

    def __init__(
        self, shape: tuple[int, ...], names: tuple[str, ...] | None, place: list[int] | None
    ) -> None:
        self.shape, self.mesh_dim_names, self._place = shape, names, place

    def get_coordinate(self) -> list[int] | None:
        return self._place


@pytest.fixture
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_variables")
def test_the_default_is_the_environment_else_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = resolve_world()
    assert (alone.world, alone.is_default) == (World(), True)
    with monkeypatch.context() as srun:
        for name, value in SRUN.items():
            srun.setenv(name, value)
        with pytest.raises(ConfigError, match="SLURM_PROCID"):
            resolve_world()
        assert resolve_world("single").world == World()
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        resolve_world()
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert str(resolve_world()) == "rank 3 of 8 from the environment (RANK, WORLD_SIZE)"
    assert resolve_world("single").world == World()
    given = World(rank=1, world_size=2)
    assert resolve_world(given).world == given
    given_now = resolve_world(given)
    given_now.check_unchanged()  # what was passed is not resolved again
    with pytest.raises(ConfigError, match=r"rank 0 of 1 from no process group.*now rank 3 of 8"):
        alone.check_unchanged()


@pytest.mark.usefixtures("_no_variables")
def test_torch_distributed_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 5,
        get_world_size=lambda: 6,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", joined)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found = resolve_world()
    assert found.world == World(rank=5, world_size=6)
    assert str(found) == "rank 5 of 6 from torch.distributed"
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert resolve_world().world == World(rank=5, world_size=6, ranks_per_node=2)
    monkeypatch.setattr(joined, "is_initialized", lambda: False)
    monkeypatch.setenv("RANK", "4")
    assert resolve_world().world.rank == 4


def test_ranks_along_a_mesh_dimension_share_their_batches() -> None:
    names = ("replicate", "shard", "tp")
    found: dict[int, list[int]] = {}
    for place in itertools.product(range(2), range(3), range(2)):
        world = resolve_world((Mesh((2, 3, 2), names, list(place)), ("replicate", "shard"))).world
        assert world.world_size == 6
        found.setdefault(world.rank, []).append(place[2])
    assert found == {rank: [0, 1] for rank in range(6)}
    one = resolve_world((Mesh((4, 2), ("dp", "tp"), [3, 1]), "dp"))
    assert str(one) == "rank 3 of 4 from the device mesh (dp)"
    assert resolve_world(Mesh((4,), None, [2])).world == World(rank=2, world_size=4)


@pytest.mark.parametrize(
    ("world", "named"),
    [
        (Mesh((4, 2), ("dp", "tp"), [0, 0]), r"'dp', 'tp'.*world=\(mesh, NAME\)"),
        ((Mesh((4, 2), ("dp", "tp"), [0, 0]), "data"), "there are 'dp', 'tp'"),
        ((Mesh((4, 2), ("dp", "tp"), [0, 0]), ()), "there are 'dp', 'tp'"),
        ((Mesh((4, 2), None, [0, 0]), "dp"), "mesh_dim_names"),
        ((Mesh((4,), ("dp",), None), "dp"), "not in the DeviceMesh"),
        ("all", "must be a World, 'single'.*got 'all'"),
        (4, "must be a World, 'single'.*got int"),
    ],
)
def test_a_wrong_world_is_refused_with_what_to_write(world: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolve_world(world)
