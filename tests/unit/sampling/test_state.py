"""The loader state: small, equal everywhere, and refused where it does not belong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardflow.errors import StateError
from shardflow.sampling import BatchSpec, CostRule, LoaderState, Position, TokenBudget, plan_id
from shardflow.sampling.blend import MAX_COMPONENT_STATES, ComponentState

pytestmark = pytest.mark.fast

SPEC = BatchSpec(micro_batch_size=4, micro_batches_per_step=8, tail="mask")
STATE = LoaderState(
    dataset_id="d" * 64, manifest_version=3, split="train", seed=7, spec=SPEC, epoch=2, step=11
)


def saved(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(STATE.to_json())), **changes}


def test_json_there_and_back() -> None:
    assert LoaderState.from_json(saved()) == STATE
    assert STATE.position == Position(2, 11)
    assert STATE.plan_id == plan_id(dataset_id="d" * 64, split="train", spec=SPEC)


def test_moving_keeps_the_run() -> None:
    moved = STATE.at(Position(3, 0))
    assert (moved.epoch, moved.step, moved.plan_id) == (3, 0, STATE.plan_id)
    moved.check_matches(STATE)


def test_a_state_is_below_1_kilobyte() -> None:
    largest = LoaderState(
        dataset_id="f" * 64,
        manifest_version=2**63 - 1,
        split="s" * 64,
        view="v" * 64,
        seed=2**63 - 1,
        epoch=2**63 - 1,
        step=2**63 - 1,
        spec=BatchSpec(micro_batch_size=2**24, micro_batches_per_step=2**24, tail="repeat"),
    )
    assert len(json.dumps(largest.to_json(), indent=1)) < 1024
    blend = replace(
        largest,
        manifest_version=0,
        split="blend",
        view="full_study",
        epoch=10**6,
        step=10**9,
        components=tuple(ComponentState(10**4, "01234567") for _ in range(MAX_COMPONENT_STATES)),
        spec=BatchSpec(
            budget=TokenBudget(
                max_tokens=2**20,
                max_samples=2**12,
                cost=CostRule(quadratic_tokens=2**20, tokenizer="ab" * 32),
            ),
            micro_batches_per_step=2**12,
            lanes=64,
        ),
    )
    assert len(json.dumps(blend.to_json())) < 1024
    assert LoaderState.from_json(json.loads(json.dumps(blend.to_json()))) == blend
    assert len(json.dumps(STATE.to_json())) < 450


def test_a_state_of_version_1_says_what_version_1_could() -> None:
    """What was saved before there were subsets and blends goes on in a run without them."""
    old = saved(version=1)
    del old["subset"], old["components"]
    assert LoaderState.from_json(old) == STATE
    with pytest.raises(StateError, match=r"^subset of the loader state must be this run's .*, got null"):
        LoaderState.from_json(old).check_matches(replace(STATE, subset="a" * 64, plan_id=""))


def test_another_component_is_refused_by_its_position() -> None:
    one, two = ComponentState(3, "01234567"), ComponentState(1, "abcdef01")
    blend = replace(STATE, components=(one, two))
    blend.check_matches(blend)
    for other in (ComponentState(2, "abcdef01"), ComponentState(1, "abcdef02")):
        with pytest.raises(StateError, match=r"^component 2 of the blend must be this run's "):
            blend.check_matches(replace(STATE, dataset_id="e" * 64, plan_id="", components=(one, other)))
    with pytest.raises(StateError, match=r"^components of the loader state must be this run's 0, got 2"):
        blend.check_matches(STATE)


def test_numbers_from_numpy_are_written_as_json() -> None:
    numbers: dict[str, Any] = {"epoch": np.int64(2), "step": np.int64(11), "seed": np.uint32(7)}
    state = replace(STATE, **numbers)
    assert json.dumps(state.to_json()) == json.dumps(STATE.to_json())


def test_each_call_gives_its_own_object() -> None:
    first = STATE.to_json()
    first["step"] = 99
    first["batch"]["tail"] = "drop"  # type: ignore[index]
    assert STATE.to_json() == saved()


DIFFERENT = {
    "dataset_id": {"dataset_id": "e" * 64},
    "manifest_version": {"manifest_version": 4},
    "split": {"split": "val"},
    "subset": {"subset": "a" * 64},
    "view": {"view": "entity"},
    "micro_batch_size": {"spec": replace(SPEC, micro_batch_size=2)},
    "micro_batches_per_step": {"spec": replace(SPEC, micro_batches_per_step=16)},
    "tail": {"spec": replace(SPEC, tail="drop")},
    "seed": {"seed": 8},
    "plan_id": {"plan_id": "0" * 64},
}


@pytest.mark.parametrize(("field", "change"), DIFFERENT.items())
def test_another_run_is_refused_by_the_field_that_differs(field: str, change: dict[str, Any]) -> None:
    expected = replace(STATE, **{"plan_id": "", **change})
    with pytest.raises(StateError) as caught:
        STATE.check_matches(expected)
    message = caught.value.message
    assert message.startswith(f"{field} of the loader state must be this run's ")
    for state in (STATE, expected):
        value = {**state.to_json(), **state.spec.to_json()}[field]
        assert json.dumps(value) in message
    assert "epoch 2, step 11" in message
    assert message.split("; ")[-1].startswith(("open", "set", "resume"))


def test_another_position_of_the_same_run_matches() -> None:
    STATE.check_matches(replace(STATE, epoch=0, step=0))
    replace(STATE, epoch=9, step=1).check_matches(STATE)


def test_a_step_that_the_epoch_does_not_have_is_refused() -> None:
    STATE.check_within(12)
    for num_steps in (11, 1):
        with pytest.raises(StateError, match=f"step must be below {num_steps}"):
            STATE.check_within(num_steps)


@pytest.mark.parametrize("value", [None, [], "state", 3, b"{}"])
def test_other_things_than_objects_are_refused(value: Any) -> None:
    with pytest.raises(StateError, match="loader state must be a JSON object"):
        LoaderState.from_json(value)


@pytest.mark.parametrize("version", [0, 4, None, "1", 1.0, True])
def test_other_versions_are_refused(version: Any) -> None:
    with pytest.raises(StateError, match=r"^version must be 1 to 3, got"):
        LoaderState.from_json(saved(version=version))


def test_a_state_without_a_version_is_refused() -> None:
    with pytest.raises(StateError, match=r"^version must be 1 to 3, got NoneType"):
        LoaderState.from_json({"epoch": 0, "step": 4})


@pytest.mark.parametrize("key", sorted(set(saved()) - {"version"}))
def test_a_missing_key_is_named(key: str) -> None:
    value = saved()
    del value[key]
    with pytest.raises(StateError) as caught:
        LoaderState.from_json(value)
    assert f"got ['{key}'] missing and [] unknown" in caught.value.message


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(StateError) as caught:
        LoaderState.from_json(saved(rank=3))
    assert "got [] missing and ['rank'] unknown" in caught.value.message


DAMAGED: dict[tuple[str, ...], tuple[Any, ...]] = {
    ("manifest_version", "seed", "epoch", "step"): (-1, 1.0, "1", None, True, 2**63),
    ("split", "view"): ("", "x" * 65, 'a"b', "a\\b", "a\nb", "\u00e9", 3, None),
    ("dataset_id", "plan_id"): ("", "d" * 63, "D" * 64, "d" * 65, 3, None),
    ("subset",): ("", "d" * 63, 3, []),
    ("components",): (None, {}, [3], ["1"], ["1:x"], ["-1:01234567"], ["1:01234567"] * 13),
    ("batch",): (
        *(None, 3, {}, {"kind": "fixed"}, {**SPEC.to_json(), "tail": "wrap"}),
        *({**SPEC.to_json(), "micro_batch_size": value} for value in (0, "4", 4.0)),
    ),
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for keys, values in DAMAGED.items() for key in keys for value in values]
)
def test_a_damaged_value_is_refused(key: str, value: Any) -> None:
    with pytest.raises(StateError) as caught:
        LoaderState.from_json(saved(**{key: value}))
    assert key in caught.value.message
