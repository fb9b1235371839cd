"""Real ranks on a blend of studies and an entity view of one dataset: a stop changes no sample and no bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from shardflow.format.entities import EntityDataset, EntityRules
from shardflow.format.facts.making import attach_facts
from shardflow.reports.entity_views import build_view
from shardflow.training.ledger import read_ledger
from shardflow.training.run import train
from tests.distributed.blend_ranks import blend_config
from tests.distributed.launcher import job
from tests.distributed.runs import committed_samples, differing_weights
from tests.entity_datasets import make_entity_dataset
from tests.tiny_runs import make_tiny_input

pytestmark = pytest.mark.distributed

SETTINGS = ('fields.image.sampling="random"',)

BLEND = (
    '[[component]]\ndataset = "studies"\n[[component]]\ndataset = "studies"\nview = "entity"\nrepeat = 0.5\n'
)


@pytest.mark.slow
def test_studies_and_entities_on_two_ranks(tmp_path: Path) -> None:
    make_tiny_input(tmp_path)
    dataset = make_entity_dataset(tmp_path / "studies")
    attach_facts(dataset)
    build_view(dataset, EntityRules())
    (tmp_path / "blend.toml").write_text(BLEND, encoding="utf-8")
    arguments = [str(tmp_path), str(tmp_path / "out"), *SETTINGS]
    with job(tmp_path, "tests.distributed.blend_ranks", arguments, num_ranks=2, is_forked=True) as running:
        finished = running.wait(600)
    assert finished.exit_code == 0, finished.text

    entities = EntityDataset.beside(dataset)
    uses: Counter[tuple[int, str | None]] = Counter()
    for step in read_ledger(tmp_path / "out" / "whole"):
        for micro in step.micro_batches:
            uses.update(zip(micro.components, micro.keys, strict=True))
    # Half of the entities in each of two epochs: all of them, once or, where the half is rounded, nearly.
    found = [uses[1, entities.samples.sample_key(row)] for row in entities.splits["train"]]
    assert sum(found) >= len(found) - 1
    assert max(found) - min(found) <= 1
    studies = [uses[0, dataset.samples.sample_key(row)] for row in dataset.splits["train"]]
    assert set(studies) == {2}
    assert committed_samples(tmp_path / "out" / "parts") == committed_samples(tmp_path / "out" / "whole")
    assert differing_weights(tmp_path / "out" / "parts", tmp_path / "out" / "whole") == []

    # One rank runs the same steps.
    assert train(blend_config(tmp_path, tmp_path / "out" / "one", *SETTINGS)).outcome == "finished"
    assert committed_samples(tmp_path / "out" / "one") == committed_samples(tmp_path / "out" / "whole")
