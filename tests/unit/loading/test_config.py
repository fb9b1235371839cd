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


def test_a_config_reads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "loader.toml"
    path.write_text('prefetch_bytes = "64MiB"\nexecution = "process"\n')
    assert load_config(LoaderConfig, path) == LoaderConfig(prefetch_bytes=64 << 20, execution="process")
