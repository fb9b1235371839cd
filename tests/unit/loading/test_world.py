from __future__ import annotations

import pytest

from shardflow.errors import ConfigError
from shardflow.loading import World

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
