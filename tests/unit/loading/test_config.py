from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.loading import LoaderConfig

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_threads", 0),
        ("prefetch_bytes", 0),
        ("read_bytes", 0),
        ("wait_timeout_s", 0.0),
        ("on_bad_sample", "ignore"),
        ("max_bad_samples", -1),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=setting):
        LoaderConfig(**{setting: value})


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("data-0", "got 'data-0' without a port; write .*data-0:8815"),
        ("data-0:", "HOST:PORT"),
        ("data-0:0", "from 1 to 65535"),
        ("data-0:65536", "from 1 to 65535"),
        ("data-0:" + "9" * 50, "from 1 to 65535"),
        ("data..0:8815", "1 to 63 characters"),
        (f"{'x' * 64}.example:8815", "1 to 63 characters"),
        ("data\x000:8815", "HOST:PORT"),
        ("user@data-0:8815", "HOST:PORT"),
    ],
)
def test_an_address_that_nobody_can_ask_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoaderConfig(execution="service", servers=("data-1:8815", address))


def test_addresses_are_names_and_numbers() -> None:
    good = ("data-0:1", "data-0.example.org.:65535", "10.0.0.7:8815", "[fe80::1]:8815", "daten-ö:8815")
    assert LoaderConfig(execution="service", servers=good).servers == good


def test_a_config_reads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "loader.toml"
    path.write_text('prefetch_bytes = "64MiB"\nexecution = "process"\n')
    assert load_config(LoaderConfig, path) == LoaderConfig(prefetch_bytes=64 << 20, execution="process")
