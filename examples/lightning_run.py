"""The same with Lightning, through ``ShardDataModule``.

torchrun --standalone --nproc-per-node 2 -m examples.lightning_run DATASET TOKENIZER RUN
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

import shardflow as sf
from examples.small_model import FIELDS, SPEC, SummedLoss, to_tensors
from shardflow.training.lightning import ShardDataModule

__all__ = ["train"]


class Reports(LightningModule):
    """The toy model with its optimizer."""

    def __init__(self, tokenizer: Path) -> None:
        super().__init__()
        self.model = SummedLoss(tokenizer)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the mean over the micro-batch's tokens."""
        loss, num_tokens = self.model(**batch)
        mean: torch.Tensor = loss / num_tokens.clamp(min=1)
        return mean

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        """Add up sums and tokens, never means: batches and ranks are of unequal size."""
        loss, num_tokens = self.model(**batch)
        self.log("loss_sum", loss, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1)
        self.log("num_tokens", num_tokens, on_epoch=True, reduce_fx="sum", sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        """Choose AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(dataset: Path, tokenizer: Path, run: Path, num_steps: int) -> None:
    """Train to ``num_steps``, from where the run stands; ends with a checkpoint."""
    world_size = sf.World.from_environment().world_size
    convert = to_tensors(tokenizer, torch.device("cpu"))

    data = ShardDataModule(dataset, batch=SPEC, fields=FIELDS, seed=1, eval_split="val", convert=convert)
    trainer = Trainer(
        default_root_dir=run,
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=num_steps,
        accumulate_grad_batches=data.accumulation(world_size),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    saved = run / "last.ckpt"
    trainer.fit(Reports(tokenizer), data, ckpt_path=str(saved) if saved.exists() else None, weights_only=True)
    trainer.save_checkpoint(saved)


if __name__ == "__main__":
    data, words, folder = map(Path, sys.argv[1:4])
    train(data, words, folder, num_steps=100)
