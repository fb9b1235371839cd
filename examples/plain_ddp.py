"""A whole training loop on a page: equal steps on every rank, one exchange a step, exact resume.

torchrun --standalone --nproc-per-node 2 -m examples.plain_ddp DATASET TOKENIZER RUN
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardflow as sf
from examples.small_model import FIELDS, SPEC, SummedLoss, to_tensors


def train(dataset: Path, tokenizer: Path, run: Path, num_steps: int) -> None:
    """Train to ``num_steps``, from where the run stands; ends with a checkpoint."""
    world, step, saved = sf.World(rank=dist.get_rank(), world_size=dist.get_world_size()), 0, run / "state.pt"
    model, convert = SummedLoss(tokenizer), to_tensors(tokenizer, torch.device("cpu"))
    ddp, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    data = sf.open(dataset)
    with sf.Loader(data, split="train", batch=SPEC, seed=1, world=world, fields=FIELDS) as loader:
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            for name, part in (("model", model), ("optimizer", optimizer), ("loader", loader)):
                part.load_state_dict(state[name])  # the loader's is a position: nothing is skipped through
            step = state["step"]
        while step < num_steps:  # a pass over the loader is an epoch, or the rest of one
            tokens = torch.zeros(1)
            for number, batch in enumerate(loader, start=1):
                is_last = number % loader.num_micro_batches_per_rank == 0
                with nullcontext() if is_last else ddp.no_sync():
                    loss, num_tokens = ddp(**convert(batch))
                    (loss * world.world_size).backward()  # DDP averages over ranks; a step is a sum
                tokens += num_tokens
                if is_last:
                    dist.all_reduce(tokens)
                    for parameter in model.parameters():
                        parameter.grad.div_(tokens)  # type: ignore[union-attr]
                    optimizer.step()
                    optimizer.zero_grad()
                    tokens, step = torch.zeros(1), step + 1
                    if step == num_steps:
                        break
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if world.rank == 0:
            torch.save({**state, "loader": loader.state_dict()}, saved)
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    data, words, folder = map(Path, sys.argv[1:4])
    train(data, words, folder, num_steps=100)
    dist.destroy_process_group()
