"""The same with the Trainer of transformers, through ``LoaderTrainer``.

torchrun --standalone --nproc-per-node 2 -m examples.hf_trainer DATASET TOKENIZER RUN
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardflow as sf
from examples.small_model import FIELDS, SPEC, SummedLoss, to_tensors
from shardflow.training.hf import LoaderTrainer

__all__ = ["train"]


class ReportTrainer(LoaderTrainer):
    """A Trainer for the toy model, whose outputs are a sum and the number of tokens in it."""

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        """Return the mean over the micro-batch's tokens."""
        loss, num_tokens = model(**inputs)
        mean: torch.Tensor = loss / num_tokens.clamp(min=1)
        return mean


def train(dataset: Path, tokenizer: Path, run: Path, num_steps: int) -> None:
    """Train to ``num_steps``, from where the run stands; ends with a checkpoint."""
    world, convert = sf.World.from_environment(), to_tensors(tokenizer, torch.device("cpu"))
    with sf.Loader(sf.open(dataset), split="train", batch=SPEC, seed=1, world=world, fields=FIELDS) as loader:
        arguments = TrainingArguments(
            output_dir=str(run),
            max_steps=num_steps,
            gradient_accumulation_steps=loader.num_micro_batches_per_rank,
            save_steps=num_steps,
            lr_scheduler_type="constant",
            use_cpu=True,
            ddp_find_unused_parameters=False,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = ReportTrainer(SummedLoss(tokenizer), arguments, train_dataset=loader, data_collator=convert)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(run)) if run.is_dir() else None)


if __name__ == "__main__":
    data, words, folder = map(Path, sys.argv[1:4])
    train(data, words, folder, num_steps=100)
