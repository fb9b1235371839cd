"""Judges what four real ranks did; see ``scenarios.py`` for what that was."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics
from tests.distributed.conftest import Scenarios
from tests.distributed.runs import committed_samples, differing_weights, newest_weights
from tests.distributed.scenarios import NUM_EPOCHS
from tests.tiny_runs import NUM_VAL

pytestmark = pytest.mark.distributed

NUM_STEPS = 6 * NUM_EPOCHS


def test_every_rank_sees_what_every_rank_says(scenarios: Scenarios) -> None:
    for result in scenarios.of("exchange"):
        assert [entry["rank"] for entry in result["json"]] == [0, 1, 2, 3]
        assert [len(entry["text"]) for entry in result["json"]] == [0, 100, 200, 300]
        assert result["first"] == {"rank": 0}
        assert result["numbers"] == [[0.0, 0.1], [1.0, 0.1], [2.0, 0.1], [3.0, 0.1]]


def test_ranks_that_disagree_are_named_with_their_values_on_every_rank(scenarios: Scenarios) -> None:
    for result in scenarios.of("disagreement"):
        assert "num_steps 12 on ranks 0, 1, 3 but 11 on rank 2" in result["message"]
        assert "seed" not in result["message"]


def test_run_that_ranks_disagree_on_ends_before_its_first_step(scenarios: Scenarios) -> None:
    for result in scenarios.of("disagreeing_runs"):
        assert "steps of the run 10 on ranks 0, 2, 3 but 9 on rank 1" in result["message"]
    assert read_ledger(scenarios.output / "disagreeing", committed_only=False) == []


def test_refusal_of_rank_0_is_every_ranks_error(scenarios: Scenarios) -> None:
    for result in scenarios.of("refused_start"):
        assert "run.resume is 'never'" in result["message"]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("step", range(4))
def test_step_gradient_is_the_same_on_any_number_of_ranks(
    scenarios: Scenarios, world_size: int, step: int
) -> None:
    """Within 1e-12 of one rank's in float64; three ranks run fillers, the last step has padding slots."""
    one = load_file(scenarios.output / f"gradients-1-{step}.safetensors")
    many = load_file(scenarios.output / f"gradients-{world_size}-{step}.safetensors")
    assert one.keys() == many.keys()
    assert max(float(gradient.abs().max()) for gradient in one.values()) > 1e-3
    for name, gradient in one.items():
        assert gradient.dtype == torch.float64
        assert float((gradient - many[name]).abs().max()) < 1e-12, name


def test_tokens_of_a_step_are_the_same_on_any_number_of_ranks(scenarios: Scenarios) -> None:
    tokens = scenarios.of("step_gradients")[0]
    assert tokens["1"] == tokens["2"] == tokens["3"] == tokens["4"]


def test_every_sample_is_evaluated_once_on_any_number_of_ranks(scenarios: Scenarios) -> None:
    results = scenarios.of("evaluation")
    loss, num_tokens, num_samples = results[0]["1"]
    assert num_samples == NUM_VAL
    for rank, result in enumerate(results):
        for size in range(max(2, rank + 1), 5):
            assert result[str(size)][1:] == [num_tokens, num_samples]
            assert abs(result[str(size)][0] - loss) < 1e-12


def test_run_resumed_at_four_ranks_is_equal_in_every_bit(scenarios: Scenarios) -> None:
    whole, stopped, resumed = scenarios.of("resumed_at_four")[1]["outcomes"]
    assert (whole["global_step"], stopped["global_step"], resumed["global_step"]) == (NUM_STEPS, 5, NUM_STEPS)
    assert resumed["resumed_from"] == "step-00000005"
    assert differing_weights(scenarios.output / "whole", scenarios.output / "parts") == []
    assert committed_samples(scenarios.output / "whole") == committed_samples(scenarios.output / "parts")


def test_without_the_warm_up_step_the_bits_would_differ(scenarios: Scenarios) -> None:
    """Keeps the guard honest: should torch stop rebuilding buckets, this says that it may go (adr/0051)."""
    assert differing_weights(scenarios.output / "whole-cold", scenarios.output / "parts-cold") != []


def test_stop_request_of_one_rank_stops_all_at_the_same_step(scenarios: Scenarios) -> None:
    stopped = [result["outcomes"][1] for result in scenarios.of("resumed_at_four")]
    assert {summary["outcome"] for summary in stopped} == {"stopped"}
    assert [summary["stop_signal"] for summary in stopped] == [None, None, "SIGTERM", None]
    assert {summary["global_step"] for summary in stopped} == {5}


def test_run_that_changes_its_world_size_runs_the_same_steps(scenarios: Scenarios) -> None:
    """4, then 2, 3 and 1 ranks: the same samples in the same micro-batches, and nearly the same weights."""
    starts = scenarios.of("elastic")[0]["starts"]
    assert [start["world_size"] for start in starts] == [4, 2, 3, 1]
    assert [start["global_step"] for start in starts] == [5, 11, 14, NUM_STEPS]
    whole, elastic = scenarios.output / "whole", scenarios.output / "elastic"
    assert committed_samples(elastic) == committed_samples(whole)
    assert [step.attempt for step in read_ledger(elastic)] == [1] * 5 + [2] * 6 + [3] * 3 + [4] * 10
    expected = newest_weights(whole)
    for name, tensor in newest_weights(elastic).items():
        assert torch.allclose(tensor, expected[name], rtol=1e-3, atol=1e-4), name
    losses = [[line["loss"] for line in read_metrics(run)] for run in (whole, elastic)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 1


def test_long_preparation_trips_no_timeout(scenarios: Scenarios) -> None:
    assert [result["sum"] for result in scenarios.of("slow_preparation")] == [4.0] * 4


@pytest.mark.parametrize("exchange", ["numbers", "json"])
def test_every_exchange_has_a_deadline_of_its_own(scenarios: Scenarios, exchange: str) -> None:
    for results in scenarios.of("silent_rank")[:3]:
        assert "within 1 s" in results[exchange]["message"]
        assert results[exchange]["wait_s"] < 2.5


def test_missing_rank_is_named_with_the_phase(scenarios: Scenarios) -> None:
    messages = [result["message"] for result in scenarios.of("missing_rank")]
    assert messages[0] is not None
    assert "'checkpoint written' within 1 s, got no sign of rank 3;" in messages[0]
    for message in messages[1:3]:
        assert message is not None
        assert message.startswith("WaitTimeoutError")
