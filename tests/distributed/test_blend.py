"""Real ranks on a blend: one holds text alone while the other holds images, and nobody hangs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shardflow.format import Dataset
from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics
from shardflow.training.run import train
from tests.distributed.blend_ranks import blend_config
from tests.distributed.launcher import job
from tests.distributed.runs import committed_samples, differing_weights
from tests.factories import make_dataset
from tests.tiny_runs import make_tiny_input

pytestmark = pytest.mark.distributed

BLEND = '[[component]]\ndataset = "dataset"\nrepeat = 0.5\n[[component]]\ndataset = "texts"\n'


def test_text_only_beside_images(tmp_path: Path) -> None:
    make_tiny_input(tmp_path)
    make_dataset(tmp_path / "texts", splits={"train": 13}, slices=0, seed=5)
    (tmp_path / "blend.toml").write_text(BLEND, encoding="utf-8")
    arguments = [str(tmp_path), str(tmp_path / "out")]
    with job(tmp_path, "tests.distributed.blend_ranks", arguments, num_ranks=2, is_forked=True) as running:
        finished = running.wait(600)
    assert finished.exit_code == 0, finished.text

    steps = read_ledger(tmp_path / "out" / "whole")
    held = [[set(micro.components) - {-1} for micro in step.micro_batches] for step in steps]
    assert sum(sorted(map(sorted, micros)) == [[0], [1]] for micros in held) > len(held) // 2
    images = Dataset.open(tmp_path / "dataset")
    uses: Counter[str | None] = Counter()
    for epoch in range(2):
        draws: Counter[int] = Counter()
        for step in steps:
            for micro in step.micro_batches if step.epoch == epoch else ():
                draws.update(micro.components)
                uses.update(key for key, c in zip(micro.keys, micro.components, strict=True) if c == 0)
        assert (draws[0], draws[1]) == (13, 13)
    # Half of the images in each epoch: all of them, once, in two.
    assert uses == {images.samples.sample_key(row): 1 for row in images.splits["train"]}

    assert committed_samples(tmp_path / "out" / "parts") == committed_samples(tmp_path / "out" / "whole")
    assert differing_weights(tmp_path / "out" / "parts", tmp_path / "out" / "whole") == []
    evaluations = read_metrics(tmp_path / "out" / "whole", "evaluation")
    assert {line["num_samples"] for line in evaluations} == {11}

    # One rank runs the same steps.
    assert train(blend_config(tmp_path, tmp_path / "out" / "one")).outcome == "finished"
    assert committed_samples(tmp_path / "out" / "one") == committed_samples(tmp_path / "out" / "whole")
