"""Ranks that train and evaluate with `LoaderTrainer` over fields, stop, and resume; rank 0 writes results
below a folder of their number.

``torchrun --nproc-per-node N -m tests.distributed.hf_ranks DATASET OUTPUT``; ``test_hf.py`` judges them.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import shardflow as sf
from shardflow.training.hf import LoaderTrainer

__all__ = ["NUM_STEPS", "STOPPED_AFTER"]

NUM_STEPS, STOPPED_AFTER = 4, 1
FIELDS = {"report": sf.Text(missing="pad"), "image": sf.Image(size=(8, 8), num_images="all", missing="pad")}


def to_inputs(batch: sf.Batch) -> dict[str, torch.Tensor]:
    """Return reports as bytes; padding slots and empty reports have no labels."""
    tensors = batch.torch()
    rows = [torch.tensor([1, *report.encode()]) for report in tensors["report"]]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = pad(rows, batch_first=True, padding_value=-100)
    labels[tensors["weight"] == 0] = -100
    return {
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": (labels != -100).long(),
        "labels": labels,
    }


def run(dataset: str, folder: Path, num_steps: int, *, resume: bool) -> dict[str, Any]:
    """Run one start, and evaluate at its end."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    opened = sf.open(dataset)
    spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
    mask = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
    with (
        sf.Loader(opened, split="train", seed=3, batch=spec, fields=FIELDS) as loader,
        sf.Loader(opened, split="val", seed=3, batch=mask, fields=FIELDS) as val,
    ):
        arguments = TrainingArguments(
            str(folder),
            max_steps=num_steps,
            gradient_accumulation_steps=loader.num_micro_batches_per_rank,
            save_steps=num_steps,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        trainer = LoaderTrainer(
            model, arguments, train_dataset=loader, eval_dataset=val, data_collator=to_inputs
        )
        trainer.train(resume_from_checkpoint=resume)
        loss = trainer.evaluate()["eval_loss"]
    weights = {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}
    return {"loss": loss, "weights": weights, "steps": trainer.state.global_step}


def main() -> None:
    warnings.simplefilter("ignore")  # what other frameworks warn of is not ours to judge
    dataset, output = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    output /= str(dist.get_world_size())
    results = {"whole": run(dataset, output / "whole", NUM_STEPS, resume=False)}
    run(dataset, output / "parts", STOPPED_AFTER, resume=False)
    results["parts"] = run(dataset, output / "parts", NUM_STEPS, resume=True)
    if dist.get_rank() == 0:
        (output / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
