"""TRL's trainers on one and two real ranks: the plan's batches, and a resume that leaves out nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardflow.format import Dataset
from shardflow.format.writer import ShardWriter
from shardflow.sampling import BatchSpec, EpochPlan
from tests.conversation_case import generate, make_folder, write_conversations
from tests.distributed.launcher import job
from tests.distributed.trl_ranks import DATA, NUM_STEPS, STOPPED_AFTER
from tests.sweeps import sampled

pytest.importorskip("trl", reason="trl is not installed")
from examples.trl_trainers import GENERATIONS, SLOTS

pytestmark = pytest.mark.distributed

MICROS, NUM = 2, 16  # micro-batches of a step, and samples
STEPS_PER_EPOCH = NUM // (MICROS * SLOTS)


def write_prompts(folder: Path) -> None:
    """Prompts with verifiable answers, as `shardflow pack` writes them."""
    with ShardWriter(folder, max_samples=8, splits={"train": 1}) as writer:
        for number in range(NUM // GENERATIONS):
            text = f"What is {number} and {number}?"
            document = {"format_version": 1, "kind": "prompt", "form": "prompt", "images": []}
            messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            document |= {"messages": messages, "answer": str(2 * number)}
            writer.write({"__key__": f"prompt{number:04d}", "conversation.json": document})


CASES = ("1 sft dpo reward grpo", "2 vlm grpo", "2 sft dpo reward")
"""Ranks, and the trainers that they run; ``vlm`` is that of ``sft`` with pictures in some samples."""


@pytest.fixture(scope="module", params=sampled(CASES, {"2 vlm grpo"}))
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The input, and what the ranks wrote."""
    num_ranks, *kinds = request.param.split()
    folder = tmp_path_factory.mktemp("trl")
    make_folder("qwen2", folder / "model")
    make_folder("qwen2_5_vl", folder / "vision")
    for name in ("talks", "pairs", "pictures"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.conversation_case.WEIGHTED", 0.0)  # TRL knows no weights of messages
            found = generate(NUM, 21, max_images=0, pairs=name == "pairs")
            if name == "pictures":  # in half of them, so that a micro-batch of one rank may show none
                found = [*found[: NUM // 2], *generate(NUM // 2, 22)]
        write_conversations(folder / name, found, splits={"train": 1})
    write_prompts(folder / "prompts")
    (folder / "output").mkdir()
    arguments = [str(folder), str(folder / "output"), *kinds]
    module = "tests.distributed.trl_ranks"
    with job(
        folder, module, arguments, num_ranks=int(num_ranks), is_forked=True, warnings="default"
    ) as running:
        finished = running.wait(400)
    assert finished.exit_code == 0, finished.text
    return folder, folder / "output"


def by_kind(output: Path) -> dict[str, list[dict[str, Any]]]:
    """What each trainer got, in rank order."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(output.glob("rank-*.json"))]
    return {kind: [one[kind] for one in results] for kind in results[0]}


def test_every_rank_trains_on_its_part_of_the_plan_once(outputs: tuple[Path, Path]) -> None:
    folder, output = outputs
    for kind, results in by_kind(output).items():
        dataset = Dataset.open(str(folder / DATA.get(kind, "pairs")))
        group = GENERATIONS if kind == "grpo" else 1
        spec = BatchSpec(micro_batch_size=SLOTS // group, micro_batches_per_step=MICROS)
        ranks = [result["whole"] for result in results]
        assert {len(seen) for seen in ranks} == {NUM_STEPS * MICROS // len(ranks)}
        for number in range(NUM_STEPS):
            epoch, step = divmod(number, STEPS_PER_EPOCH)
            plan = EpochPlan(dataset.splits["train"], spec, seed=1, epoch=epoch)
            assert plan.num_steps == STEPS_PER_EPOCH
            found = {one[2]: one[3] for seen in ranks for one in seen if one[:2] == [epoch, step]}
            assert found == {
                micro: [
                    dataset.samples.sample_key(int(row))
                    for row in plan.micro_batch(step, micro).rows
                    for _ in range(group)
                ]
                for micro in range(MICROS)
            }


def test_a_rank_without_pictures_goes_on_with_one_that_has_some(outputs: tuple[Path, Path]) -> None:
    folder, output = outputs
    results = by_kind(output).get("vlm", [])
    dataset = Dataset.open(str(folder / "pictures"))

    def has_pictures(keys: list[str]) -> bool:
        rows = [dataset.samples.find(key) for key in keys]
        read = (dataset.read_fields(row, ["conversation.json"])["conversation.json"] for row in rows)
        return any(json.loads(one)["images"] for one in read)

    shown = [[has_pictures(seen[3]) for seen in result["whole"]] for result in results]
    assert not shown or any(one != other for one, other in zip(*shown, strict=True))


def test_a_run_that_was_stopped_goes_on_with_the_next_sample(outputs: tuple[Path, Path]) -> None:
    _, output = outputs
    for kind, results in by_kind(output).items():
        for result in results:
            first, second = result["parts"]
            assert len(first) == STOPPED_AFTER * len(result["whole"]) // NUM_STEPS
            assert first + second == result["whole"], kind


def test_a_run_that_was_stopped_ends_with_the_same_weights(outputs: tuple[Path, Path]) -> None:
    """What is generated is drawn anew, so not that of GRPO."""
    _, output = outputs
    for kind in by_kind(output).keys() - {"grpo"}:
        whole, parts = (load_file(output / f"{kind}-{name}.safetensors") for name in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        for key, tensor in whole.items():
            assert torch.equal(tensor, parts[key]), (kind, key)


def test_slots_of_a_prompt_are_neighbors(outputs: tuple[Path, Path]) -> None:
    _, output = outputs
    for result in by_kind(output).get("grpo", []):
        for *_, keys, given in result["whole"]:
            assert keys == given
            assert keys[::GENERATIONS] == keys[1::GENERATIONS]
