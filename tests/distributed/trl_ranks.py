"""Ranks that run the example of TRL's trainers: in one go, and stopped within an epoch and gone on.

``torchrun --nproc-per-node N -m tests.distributed.trl_ranks INPUT OUTPUT KIND...``: each rank writes which
samples its model got, and rank 0 the weights at the end; ``test_trl.py`` judges them.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from examples import trl_trainers
from shardflow.loading import Batch
from shardflow.training.trl import (
    LoaderDPOTrainer,
    LoaderGRPOTrainer,
    LoaderRewardTrainer,
    LoaderSFTTrainer,
)

__all__ = ["DATA", "NUM_STEPS", "STOPPED_AFTER"]

DATA = {"sft": "talks", "vlm": "pictures", "grpo": "prompts"}
"""Dataset of each trainer; of the others it is ``pairs``."""
NUM_STEPS, STOPPED_AFTER = 5, 2
"""An epoch is four steps, so the first start ends within one and the second crosses its end."""


def run(kind: str, folder: Path, output: Path, num_steps: int) -> tuple[list[Any], torch.nn.Module]:
    """One start of the example: what each micro-batch held and what the trainer got of it, and the model."""
    seen: list[Any] = []
    trainers: Any = {
        "sft": LoaderSFTTrainer,
        "vlm": LoaderSFTTrainer,
        "dpo": LoaderDPOTrainer,
        "reward": LoaderRewardTrainer,
        "grpo": LoaderGRPOTrainer,
    }
    original = trainers[kind]._to_inputs

    def noted(trainer: Any, batch: Batch) -> Any:
        found = original(trainer, batch)
        what = [one["sample_key"] for one in found] if kind == "grpo" else found["input_ids"].tolist()
        seen.append([batch.epoch, batch.step, batch.micro, list(batch.sample_keys), what])
        return found

    data, model = folder / DATA.get(kind, "pairs"), folder / ("vision" if kind == "vlm" else "model")
    name = "sft" if kind == "vlm" else kind
    dist.barrier()
    with mock.patch.object(trainers[kind], "_to_inputs", noted):
        trainer = trl_trainers.train(name, data, model, output, num_steps)
    dist.barrier()
    return seen, trainer.accelerator.unwrap_model(trainer.model)


def main() -> None:
    warnings.simplefilter("ignore")  # what other frameworks warn of is not ours to judge
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    results = {}
    for kind in sys.argv[3:]:
        whole, model = run(kind, folder, output / f"{kind}-whole", NUM_STEPS)
        first, _ = run(kind, folder, output / f"{kind}-parts", STOPPED_AFTER)
        second, again = run(kind, folder, output / f"{kind}-parts", NUM_STEPS)
        results[kind] = {"whole": whole, "parts": [first, second]}
        if dist.get_rank() == 0:
            for name, one in (("whole", model), ("parts", again)):
                weights = {key: tensor.detach().clone() for key, tensor in one.named_parameters()}
                save_file(weights, output / f"{kind}-{name}.safetensors")
    (output / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
