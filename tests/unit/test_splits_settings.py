"""The parts of the splits are written one way or the other, in the settings of studies and of texts alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError
from shardflow.packing import PackConfig
from shardflow.packing.corpora.config import CorpusConfig

pytestmark = pytest.mark.fast

FLAT = "[splits]\ntrain = 90\nval = 10\n"
INSIDE = "[splits.parts]\ntrain = 90\nval = 10\n"
INLINE = "[splits]\nparts = {train = 90, val = 10}\n"
JOBS = {"pack": (PackConfig, "dicom"), "pack-text": (CorpusConfig, "files")}


def _parts(tmp_path: Path, job: str, splits: str, *overrides: str) -> dict[str, int]:
    cls, inputs = JOBS[job]
    path = tmp_path / "job.toml"
    path.write_text(
        f'output = "out"\nprivate_dir = "private"\n[inputs]\n{inputs} = ["in"]\n{splits}', encoding="utf-8"
    )
    config: Any = load_config(cls, path, overrides)
    again = tmp_path / "again.toml"
    again.write_text(dump_config(config), encoding="utf-8")
    assert load_config(cls, again) == config
    found: dict[str, int] = config.splits if job == "pack" else config.splits.parts
    return found


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("splits", [FLAT, INSIDE, INLINE])
def test_every_form_says_the_same(tmp_path: Path, job: str, splits: str) -> None:
    assert list(_parts(tmp_path, job, splits).items()) == [("train", 90), ("val", 10)]


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("splits", [FLAT, INSIDE, INLINE])
@pytest.mark.parametrize("override", ["splits.val=20", "splits.test=5"])
def test_a_name_may_be_set_whatever_the_form(tmp_path: Path, job: str, splits: str, override: str) -> None:
    name, _, value = override.removeprefix("splits.").partition("=")
    assert _parts(tmp_path, job, splits, override) == {"train": 90, "val": 10} | {name: int(value)}


def test_a_corpus_keeps_its_other_settings(tmp_path: Path) -> None:
    splits = '[splits]\ntrain = 90\nval = 10\ngroup = "patient"\nseed = 7\n'
    assert _parts(tmp_path, "pack-text", splits) == {"train": 90, "val": 10}
    # Of studies there is no seed: it would be a split of seven parts.
    inside = f"{INLINE}seed = 7\n"
    with pytest.raises(ConfigError, match=r"splits\.seed must be left out beside parts, got both"):
        _parts(tmp_path, "pack", inside)
    assert _parts(tmp_path, "pack-text", inside) == {"train": 90, "val": 10}


def test_a_split_of_studies_may_still_be_called_parts(tmp_path: Path) -> None:
    assert _parts(tmp_path, "pack", "[splits]\nparts = 3\ntrain = 1\n") == {"parts": 3, "train": 1}


def test_what_is_written_twice_or_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"splits\.train must be written once.*remove one"):
        _parts(tmp_path, "pack-text", f"{INLINE}train = 80\n")
    with pytest.raises(ConfigError, match=r"got 'grup'.*nearest known key is 'group'"):
        _parts(tmp_path, "pack-text", '[splits]\ngrup = "patient"\n')
    with pytest.raises(ConfigError, match="got 'train'"):
        _parts(tmp_path, "pack-text", "[splits]\ntrain = true\n")
