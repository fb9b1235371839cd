"""TRL's trainers for conversations, preferences, rewards and prompts, fed by loaders.

torchrun --standalone --nproc-per-node 2 -m examples.trl_trainers sft DATASET MODEL RUN

DATASET holds conversations (``sft``), preferences (``dpo``, ``reward``) or prompts with answers (``grpo``) as
`shardflow pack` makes them, MODEL is a folder of a language model with its tokenizer and chat template. The
plan has dealt the samples to the ranks, so neither TRL nor Accelerate shards them again; each checkpoint
holds the loader's position, and a resumed run goes on with the next sample.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import DPOConfig, GRPOConfig, RewardConfig, SFTConfig

import shardflow as sf
from shardflow.training.trl import (
    LoaderDPOTrainer,
    LoaderGRPOTrainer,
    LoaderRewardTrainer,
    LoaderSFTTrainer,
)

__all__ = ["KINDS", "train"]

KINDS = ("sft", "dpo", "reward", "grpo")
SLOTS, GENERATIONS = 2, 2
SPEC = sf.BatchSpec(micro_batch_size=SLOTS, micro_batches_per_step=2)  # over all ranks


def names_the_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Reward completions that hold the answer."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(wanted in text) for text, wanted in zip(texts, answer, strict=True)]


def train(kind: str, dataset: Path, model: Path, run: Path, num_steps: int) -> Any:
    """Train to ``num_steps``, from where the run stands; ends with a checkpoint, and returns the trainer."""
    talk: sf.Field = sf.Conversation(processor=str(model), max_tokens=400, pairs=kind in ("dpo", "reward"))
    if kind == "grpo":
        talk = sf.Json(member="conversation.json", num_samples=GENERATIONS)
    data = sf.open(dataset)
    with sf.Loader(data, split="train", batch=SPEC, seed=1, fields={"talk": talk}) as loader:
        common: dict[str, Any] = {
            "output_dir": str(run),
            "max_steps": num_steps,
            "per_device_train_batch_size": SLOTS,
            "gradient_accumulation_steps": loader.num_micro_batches_per_rank,
            "save_steps": num_steps,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "bf16": False,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            "ddp_find_unused_parameters": False,
        }
        given: dict[str, Any] = {
            "model": str(model),
            "train_dataset": loader,
            "field": "talk",
            "processing_class": AutoTokenizer.from_pretrained(str(model)),
        }
        if kind == "sft":
            settings = SFTConfig(**common, dataset_kwargs={"skip_prepare_dataset": True})
            trainer: Any = LoaderSFTTrainer(args=settings, **given)
        elif kind == "dpo":
            trainer = LoaderDPOTrainer(args=DPOConfig(**common), **given)
        elif kind == "reward":
            trainer = LoaderRewardTrainer(args=RewardConfig(**common), **given)
        else:
            # A micro-batch of the plan is what a rank generates at once.
            generated = {
                "num_generations": GENERATIONS,
                "max_completion_length": 8,
                "steps_per_generation": 1,
            }
            trainer = LoaderGRPOTrainer(
                args=GRPOConfig(**common, **generated), reward_funcs=names_the_answer, **given
            )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(str(run)) if run.is_dir() else None)
        return trainer


if __name__ == "__main__":
    data, folder, output = map(Path, sys.argv[2:5])
    train(sys.argv[1], data, folder, output, num_steps=100)
