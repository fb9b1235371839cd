"""The same loop with Accelerate: the loader is registered, not prepared.

torchrun --standalone --nproc-per-node 2 -m examples.accelerate_loop DATASET TOKENIZER RUN

``accelerator.prepare`` is for torch's DataLoader: it would deal batches to ranks, which the plan has done
already. `register_loader` refuses settings that would do so, and has the loader's position saved and restored
with the rest, so ``skip_first_batches`` must not be called: it would leave out samples a second time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator

import shardflow as sf
from examples.small_model import FIELDS, MICRO_BATCHES_PER_STEP, SPEC, SummedLoss, to_tensors
from shardflow.training.frameworks import register_loader

__all__ = ["train"]


class Progress:
    """The number of steps done, in the form that ``register_for_checkpointing`` wants."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take it back."""
        self.step = state["step"]


def train(dataset: Path, tokenizer: Path, run: Path, num_steps: int) -> None:
    """Train to ``num_steps``, from where the run stands; ends with a checkpoint."""
    per_rank = -(-MICRO_BATCHES_PER_STEP // sf.World.from_environment().world_size)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=per_rank)
    model = SummedLoss(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    convert = to_tensors(tokenizer, accelerator.device)
    world = sf.World(rank=accelerator.process_index, world_size=accelerator.num_processes)
    progress, saved = Progress(), run / "checkpoint"
    with sf.Loader(sf.open(dataset), split="train", batch=SPEC, seed=1, world=world, fields=FIELDS) as loader:
        register_loader(accelerator, loader)
        accelerator.register_for_checkpointing(progress)
        if saved.exists():
            accelerator.load_state(str(saved))
        while progress.step < num_steps:
            tokens = torch.zeros(1, device=accelerator.device)
            for batch in loader:
                with accelerator.accumulate(model):
                    loss, num_tokens = model(**convert(batch))
                    # Accelerate divides by the accumulation and DDP by the ranks; a step is a sum.
                    accelerator.backward(loss * per_rank * world.world_size)
                    tokens += num_tokens
                    if accelerator.sync_gradients:
                        in_step = accelerator.reduce(tokens, reduction="sum")
                        for parameter in model.parameters():
                            parameter.grad /= in_step
                        tokens.zero_()
                        progress.step += 1
                    optimizer.step()
                    optimizer.zero_grad()
                if progress.step == num_steps:
                    break
        accelerator.save_state(str(saved))


if __name__ == "__main__":
    data, words, folder = map(Path, sys.argv[1:4])
    train(data, words, folder, num_steps=100)
