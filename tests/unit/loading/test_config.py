from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardflow.config import load_config
from shardflow.errors import ConfigError
from shardflow.loading import ImageView, LoaderConfig, NativeView

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


def test_a_loader_delivers_one_view() -> None:
    view: Any = (ImageView(num_slices=1, rows=8, columns=8), NativeView())
    with pytest.raises(ConfigError, match=r"view must be one of .* got tuple"):
        LoaderConfig(view=view)


@pytest.mark.parametrize(
    "change",
    [
        {"num_slices": 0},
        {"rows": 0},
        {"columns": -1},
        {"slice_choice": "odd"},
        {"dtype": "int8"},
        {"windows": ("heart",)},
        {"fit": "crop"},
        {"padding": "none"},
    ],
)
def test_a_view_out_of_range_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ImageView(**{"num_slices": 1, "rows": 8, "columns": 8, **change})


def test_a_config_reads_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "loader.toml"
    path.write_text('prefetch_bytes = "64MiB"\n[view]\nnum_slices = 4\nrows = 32\ncolumns = 48\n')
    config = load_config(LoaderConfig, path)
    assert config.prefetch_bytes == 64 << 20
    assert config.view == ImageView(num_slices=4, rows=32, columns=48)
