"""The proposal of a micro-batch: arithmetic, and a real curve of the small model on this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.cli.main import main
from shardflow.config import dump_config
from shardflow.errors import ConfigError
from shardflow.training.config import BatchConfig
from shardflow.training.jobs.memory import fit_memory, measure_memory_curve
from tests.tiny_runs import TinyInput, tiny_config


def points(*peaks: int) -> list[tuple[int, int]]:
    return [(1 << place, peak) for place, peak in enumerate(peaks)]


def test_a_line_lies_on_or_above_all_points() -> None:
    assert fit_memory(points(120, 140, 180, 260)) == (100, 20)
    seen = points(130, 140, 200, 250)
    fixed, each = fit_memory(seen)
    for size, peak_bytes in seen:
        assert fixed + each * size >= peak_bytes - len(seen)  # rounded
    assert fit_memory(points(100)) == (0, 100)
    assert fit_memory(points(100, 100, 100)) == (99, 1)


def test_memory_of_the_small_model_grows_and_a_proposal_keeps_the_samples_of_a_step(
    tiny: TinyInput, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the command, in a process of its own."""
    shapes = ("fields.image.num_slices=8", "fields.image.size=[32,32]", "image.rows=32", "image.columns=32")
    config = tiny_config(tiny, tmp_path / "run", *shapes, "batch.micro_batches_per_step=6")
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert main(["train", "--config", str(path), "--propose-micro-batch"]) == 0
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    sizes, peaks = zip(*found["points"], strict=True)
    assert sizes == (1, 2, 4, 8, 16, 32, 64)[: len(sizes)]
    assert len(sizes) >= 4
    assert found["sample_bytes"] > 4 * 8 * 32 * 32  # its pixels alone, as numbers of the model
    assert peaks[-1] > peaks[0] + 10 * found["sample_bytes"]
    assert found["largest"] >= 6
    assert (found["proposed"], found["proposed_micro_batches"]) == (6, 1)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_measured_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    config = tiny_config(tiny, tmp_path / "run")
    budget = BatchConfig(max_tokens=60, micro_batches_per_step=4)
    with pytest.raises(ConfigError, match="no micro-batch size can be proposed"):
        measure_memory_curve(replace(config, batch=budget))
    sharded = replace(config, parallel=replace(config.parallel, strategy="fsdp2"))
    with pytest.raises(ConfigError, match=r"parallel\.strategy 'ddp' only"):
        measure_memory_curve(sharded)
