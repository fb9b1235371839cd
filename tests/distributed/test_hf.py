"""`LoaderTrainer` on two real ranks: the loss of one rank, and a resume that ends with the same weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardflow.format import Dataset
from shardflow.format.facts.making import attach_facts
from tests.distributed.hf_ranks import NUM_STEPS
from tests.distributed.launcher import job
from tests.factories import make_dataset
from tests.field_cases import make_case

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results by number of ranks."""
    folder = tmp_path_factory.mktemp("hf")
    # Five of validation: on two ranks the last step has a padding slot and an empty micro-batch.
    dataset = make_dataset(folder / "data", make=make_case, splits={"train": 12, "val": 5})
    attach_facts(Dataset.open(dataset))
    arguments, sizes = [dataset, str(folder)], (1, 2)
    module = "tests.distributed.hf_ranks"
    with job(folder, module, arguments, num_ranks=sizes, is_forked=True, warnings="default") as running:
        finished = running.wait(480)
    assert finished.exit_code == 0, finished.text
    read = ((folder / str(size) / "results.json").read_text(encoding="utf-8") for size in sizes)
    return dict(zip(sizes, map(json.loads, read), strict=True))


def test_a_run_that_was_stopped_ends_with_the_same_weights(results: dict[int, Any]) -> None:
    for result in results.values():
        assert result["whole"]["steps"] == result["parts"]["steps"] == NUM_STEPS
        assert result["whole"] == result["parts"]


def test_two_ranks_train_and_evaluate_as_one_does(results: dict[int, Any]) -> None:
    one, two = results[1]["whole"], results[2]["whole"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-3, abs=1e-3)
