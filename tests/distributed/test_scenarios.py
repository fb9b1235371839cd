"""Judges what four real ranks did; see ``scenarios.py`` for what that was."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from shardflow.monitoring import read_history
from shardflow.training.ledger import read_ledger
from shardflow.training.metrics import read_metrics
from tests.distributed.conftest import Scenarios
from tests.distributed.runs import committed_samples, differing_weights, newest_weights
from tests.distributed.stage import NUM_EPOCHS
from tests.tiny_runs import NUM_VAL

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2400)]

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
    assert read_metrics(scenarios.output / "disagreeing") == []


def test_run_whose_ranks_read_other_data_ends_before_its_first_step(scenarios: Scenarios) -> None:
    for result in scenarios.of("another_dataset"):
        assert re.search(r"lock \S+ on ranks 0, 1, 3 but \S+ on rank 2", result["message"])
        assert "same configuration, dataset and code" in result["message"]
    assert read_metrics(scenarios.output / "another-dataset") == []


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


def test_packed_sequences_train_the_same_model_on_two_ranks(scenarios: Scenarios) -> None:
    """In float64 the sums of a step differ by the order of additions alone; a run of each stays beside."""
    for rank in (0, 1):
        result = scenarios.of("packed_sequences")[rank]
        assert len(result["rows"]) == 4
        for rows, packed, difference in zip(
            result["rows"], result["packed"], result["gradients"], strict=True
        ):
            assert abs(packed - rows) < 1e-12 * rows
            assert difference < 1e-12
    rows, packed = (read_metrics(scenarios.output / name) for name in ("rows", "packed"))
    assert len(rows) == len(packed) > 4
    for one, other in zip(rows, packed, strict=True):
        assert (one["num_tokens"], one["num_samples"]) == (other["num_tokens"], other["num_samples"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert packed[-1]["loss"] < 0.9 * packed[0]["loss"]
    by_rows, by_sequence = (committed_samples(scenarios.output / name) for name in ("rows", "packed"))
    assert by_rows == by_sequence


def test_a_budget_without_padding_fills_packed_sequences(scenarios: Scenarios) -> None:
    lines = read_metrics(scenarios.output / "packed-budget")
    assert lines
    sizes = {
        len(micro.keys)
        for step in read_ledger(scenarios.output / "packed-budget")
        for micro in step.micro_batches
    }
    assert len(sizes) > 1  # as many samples as fit, not always the same number


HELD = [
    *((size, strategy, text) for size in (2, 3, 4) for strategy in ("ddp", "fsdp2") for text in (0, 2)),
    *((2, strategy, 4) for strategy in ("ddp", "fsdp2")),
    *((2, "fsdp2-each", text) for text in (0, 2, 4)),
]


@pytest.mark.parametrize(("world_size", "strategy", "num_text_only"), HELD)
def test_step_gradient_is_the_same_whole_or_sharded_with_images_or_without(
    scenarios: Scenarios, world_size: int, strategy: str, num_text_only: int
) -> None:
    """Within 1e-12 of one process's in float64; a rank without images neither hangs nor errs."""
    one = load_file(scenarios.output / f"held-ddp-{num_text_only}-1.safetensors")
    many = load_file(scenarios.output / f"held-{strategy}-{num_text_only}-{world_size}.safetensors")
    assert one.keys() == many.keys()
    for name, gradient in one.items():
        assert float((gradient - many[name]).abs().max()) < 1e-12, name
    of_vision = max(float(gradient.abs().max()) for name, gradient in one.items() if "vision" in name)
    assert (of_vision == 0.0) is (num_text_only == 4)


@pytest.mark.parametrize("case", ["ddp-2", "fsdp2-1", "fsdp2-2"])
def test_step_gradient_of_a_chat_model_is_the_same_with_a_rank_that_has_no_image(
    scenarios: Scenarios, case: str
) -> None:
    one = load_file(scenarios.output / "chat-ddp-1.safetensors")
    many = load_file(scenarios.output / f"chat-{case}.safetensors")
    assert one.keys() == many.keys()
    assert max(float(gradient.abs().max()) for name, gradient in one.items() if "vision" in name) > 0
    for name, gradient in one.items():
        assert float((gradient - many[name]).abs().max()) < 1e-12, name


CLASSIFIERS = [
    (case, size)
    for case in ("small-ddp", "small-fsdp2", "norm-ddp")
    for size in (1, 2, 4)
    if (case, size) not in {("small-ddp", 1), ("norm-ddp", 1)}
]


@pytest.mark.parametrize(("case", "world_size"), CLASSIFIERS)
def test_step_gradient_of_a_classifier_is_the_same_on_any_number_of_ranks(
    scenarios: Scenarios, case: str, world_size: int
) -> None:
    """Within 1e-12 of one process's in float64, every step; BatchNorm sees a micro-batch, whoever runs it."""
    (num_steps,) = {result[f"{case}-{world_size}"] for result in scenarios.of("classifier_gradients")[:1]}
    assert num_steps == 4
    for step in range(num_steps):
        one = load_file(scenarios.output / f"classify-{case.partition('-')[0]}-ddp-1-{step}.safetensors")
        many = load_file(scenarios.output / f"classify-{case}-{world_size}-{step}.safetensors")
        assert one.keys() == many.keys()
        assert max(float(gradient.abs().max()) for gradient in one.values()) > 1e-3
        for name, gradient in one.items():
            assert gradient.dtype == torch.float64
            assert float((gradient - many[name]).abs().max()) < 1e-12, (step, name)


def test_sharded_run_resumes_bit_for_bit_and_is_the_whole_one_to_rounding(scenarios: Scenarios) -> None:
    outcomes = scenarios.of("strategies")[0]["outcomes"]
    # Asked to stop by one rank before an evaluation, all leave it off.
    assert [outcome["global_step"] for outcome in outcomes] == [8, 4, 8, 8]
    assert differing_weights(scenarios.output / "sharded", scenarios.output / "sharded-parts") == []
    sharded, whole = (newest_weights(scenarios.output / name) for name in ("sharded", "unsharded"))
    assert sharded.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.allclose(tensor, sharded[name], rtol=0, atol=2e-4), name
    assert outcomes[0]["evaluation_loss"] == pytest.approx(outcomes[3]["evaluation_loss"], abs=1e-4)


def test_checkpoints_load_into_other_strategies_and_world_sizes(scenarios: Scenarios) -> None:
    starts = scenarios.of("strategies")[0]["starts"]
    assert [start["global_step"] for start in starts] == [2, 4, 6, 8]
    assert [start["resumed_from"] for start in starts] == [
        None,
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    mixed = scenarios.output / "strategies"
    # Two of them were cut off by a stop, and one was due at one.
    assert [line["global_step"] for line in read_metrics(mixed, "evaluation")] == [2, 4, 6, 8]
    assert committed_samples(mixed) == committed_samples(scenarios.output / "unsharded")
    whole, found = newest_weights(scenarios.output / "unsharded"), newest_weights(mixed)
    for name, tensor in whole.items():
        assert torch.allclose(tensor, found[name], rtol=0, atol=2e-4), name
    files = sorted(path.name for path in (mixed / "checkpoints" / "step-00000008").iterdir())
    assert files == [
        "loader.lock.json",
        *(f"{kind}-0000{rank}.safetensors" for kind in ("model", "optimizer") for rank in (0, 1)),
        "state.json",
    ]


def test_a_rank_that_cannot_write_its_part_is_every_ranks_error_and_older_ones_stay(
    scenarios: Scenarios,
) -> None:
    for result in scenarios.of("one_rank_fails_to_write"):
        assert "full disk on rank 2" in result["message"]
    folder = scenarios.output / "unwritten" / "checkpoints"
    assert (folder / "latest").read_text().strip() == "step-00000002"
    assert not (folder / "step-00000004").exists()


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
            assert result[f"{size}, stopped"] is None  # all ranks leave off, though one alone was asked to


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


@pytest.mark.parametrize("exchange", ["numbers", "json"])
def test_every_exchange_has_a_deadline_of_its_own(scenarios: Scenarios, exchange: str) -> None:
    for results in scenarios.of("silent_rank")[:3]:
        assert "within 1 s" in results[exchange]


def test_missing_rank_is_named_with_the_phase(scenarios: Scenarios) -> None:
    messages = [result["message"] for result in scenarios.of("missing_rank")]
    assert messages[0] is not None
    assert "'checkpoint written' within 1 s, no sign of rank 3;" in messages[0]
    for message in messages[1:3]:
        assert message is not None
        assert message.startswith("WaitTimeoutError")


def test_the_rank_that_all_wait_for_exchanges_least_and_computes_longest(scenarios: Scenarios) -> None:
    history = read_history(scenarios.output / "slow-rank")
    intervals = [interval for _, interval in history.intervals if not interval.is_warm_up]
    assert sum(one.num_steps for one in intervals) == 3
    for interval in intervals:
        fast, slow = interval.ranks
        assert (fast.rank, slow.rank) == (0, 1)
        assert fast.host == slow.host != ""
        assert interval.stage("exchange").num_items == 2 * interval.num_steps
        assert interval.stage("exchange").most_seconds == max(fast.exchange_s, slow.exchange_s)
        assert (interval.world_size, interval.ranks_per_node) == (2, 2)
    # Of all three steps, as a busy machine may take any rank its processor for a while.
    compute_s, exchange_s = (
        [sum(getattr(one.ranks[rank], name) for one in intervals) for rank in (0, 1)]
        for name in ("compute_s", "exchange_s")
    )
    assert compute_s[1] > compute_s[0]
    assert exchange_s[1] < exchange_s[0]


def test_measuring_changes_no_bit_on_several_ranks(scenarios: Scenarios) -> None:
    assert differing_weights(scenarios.output / "slow-rank", scenarios.output / "unmeasured") == []


def test_a_slow_rank_and_a_slow_exchange_are_what_comes_first(scenarios: Scenarios) -> None:
    rows = scenarios.of("verdicts")[0]
    for cause in ("slow rank", "slow collective"):
        assert rows[cause]["first_had_it_been_alone"] == rows[cause]["expected"], rows[cause]


def test_ranks_measure_their_ceilings_together_and_the_first_one_has_the_numbers(
    scenarios: Scenarios,
) -> None:
    first, second = scenarios.of("ceilings")[:2]
    assert second["facts"] is None
    facts = first["facts"]
    assert (facts["ranks"], facts["replayed_micro_batches"]) == (2, 8)
    assert {one["samples_per_step"] for one in facts["results"].values()} == {4.0}
    assert first["left"] == second["left"] == []
