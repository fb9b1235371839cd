"""The examples of other loops, on one and two real ranks: equal steps, and a resume without a gap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardflow.format import Dataset
from shardflow.sampling import EpochPlan
from tests.distributed.example_ranks import EXAMPLES, NUM_STEPS, STOPPED_AFTER
from tests.distributed.launcher import REPOSITORY, job
from tests.sweeps import sampled
from tests.tiny_runs import NUM_TRAIN, TinyInput, make_tiny_input

pytestmark = pytest.mark.distributed

MICROS, SIZE = 4, 2  # of a step, and samples in one
STEPS_PER_EPOCH = NUM_TRAIN // (MICROS * SIZE)


@pytest.fixture(scope="module", params=sampled([1, 2], {2}))
def examples(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TinyInput, Path]:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "input").mkdir()
    (folder / "output").mkdir()
    tiny = make_tiny_input(folder / "input")
    arguments = [str(folder / "input"), str(folder / "output")]
    with job(
        folder,
        "tests.distributed.example_ranks",
        arguments,
        num_ranks=request.param,
        is_forked=True,
        warnings="default",
    ) as running:
        finished = running.wait(600)
    assert finished.exit_code == 0, finished.text
    return tiny, folder / "output"


def seen(output: Path, name: str) -> list[dict[str, Any]]:
    """What each rank's model saw, in rank order."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(output.glob("rank-*.json"))]
    return [result[name] for result in results]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_rank_runs_the_plans_steps(examples: tuple[TinyInput, Path], name: str) -> None:
    tiny, output = examples
    dataset = Dataset.open(tiny.dataset)
    by_rank = [result["whole"] for result in seen(output, name)]
    assert {len(batches) for batches in by_rank} == {NUM_STEPS * MICROS // len(by_rank)}
    from examples.small_model import SPEC

    for number in range(NUM_STEPS):
        epoch, step = divmod(number, STEPS_PER_EPOCH)
        plan = EpochPlan(dataset.splits["train"], SPEC, seed=1, epoch=epoch)
        found = {batch[2]: batch[3] for batches in by_rank for batch in batches if batch[:2] == [epoch, step]}
        expected = {
            micro: [dataset.samples.sample_key(int(row)) for row in plan.micro_batch(step, micro).rows]
            for micro in range(MICROS)
        }
        assert found == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_that_was_stopped_goes_on_with_the_next_sample(
    examples: tuple[TinyInput, Path], name: str
) -> None:
    _, output = examples
    for result in seen(output, name):
        first, second = result["parts"]
        assert len(first) * NUM_STEPS == STOPPED_AFTER * len(result["whole"])
        assert first + second == result["whole"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_run_that_was_stopped_ends_with_the_same_weights(
    examples: tuple[TinyInput, Path], name: str
) -> None:
    _, output = examples
    whole, parts = (load_file(output / f"{name}-{kind}.safetensors") for kind in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, parts[key]), key


def test_the_plain_loop_fits_on_a_page() -> None:
    lines = (REPOSITORY / "examples" / "plain_ddp.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
