"""Settings of a cache that cannot do anything are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ConfigError
from shardflow.storage import CacheConfig

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"policy": "lru"}, "policy"),
        ({"read_ahead_bytes": 1 << 30}, "read_ahead_bytes"),
        ({"min_free_bytes": 0, "wait_s": 5.0}, "min_free_bytes and wait_s"),
    ],
)
def test_settings_of_a_cache_that_is_off_are_refused(settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=f"directory or ram_bytes, got {names} without either"):
        CacheConfig(**settings)
    assert CacheConfig(**settings, ram_bytes=1 << 20).is_on
    assert CacheConfig(**settings, directory=Path("cache"), max_bytes=1 << 20).is_on


def test_a_folder_s_bound_without_the_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="directory must be given with max_bytes"):
        CacheConfig(max_bytes=1 << 30)


def test_nothing_set_is_no_cache() -> None:
    assert not CacheConfig().is_on
    assert not CacheConfig(policy="belady", ram_bytes=0).is_on
