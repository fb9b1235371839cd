"""The same with the Trainer of transformers: it gets the loader as it is, and must not skip.

torchrun --standalone --nproc-per-node 2 -m examples.hf_trainer DATASET TOKENIZER RUN

``ignore_data_skip`` is what makes a resume exact: the loader goes to its saved position by itself, and the
Trainer's own skipping would leave out the same samples again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardflow as sf
from examples.small_model import CONFIG, MICRO_BATCHES_PER_STEP, SPEC, SummedLoss, to_tensors

__all__ = ["train"]

_POSITION = "shardflow.json"


class Batches:
    """The loader as the Trainer iterates it: tensors by name, and an epoch to go to."""

    def __init__(self, loader: sf.Loader, convert: Callable[[sf.Batch], dict[str, torch.Tensor]]) -> None:
        self.loader = loader
        self._convert = convert

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return map(self._convert, self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; one that was loaded from a checkpoint stays where it is."""
        self.loader.set_epoch(epoch)


class SavePosition(TrainerCallback):
    """Puts the loader's position into every checkpoint; it is equal on all ranks."""

    def __init__(self, loader: sf.Loader) -> None:
        self._loader = loader

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Write it beside what the Trainer has written."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / _POSITION).write_text(json.dumps(self._loader.state_dict()), encoding="utf-8")


class StreamingTrainer(Trainer):
    """A Trainer whose batches come from a loader."""

    def __init__(self, batches: Batches, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._batches = batches

    def get_train_dataloader(self) -> Any:
        """Return the batches as they are: no sampler, no sharding, the plan has done both."""
        return self._batches

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        """Return the mean over the micro-batch's tokens."""
        loss, num_tokens = model(**inputs)
        mean: torch.Tensor = loss / num_tokens.clamp(min=1)
        return mean


def train(dataset: Path, tokenizer: Path, run: Path, num_steps: int) -> None:
    """Train to ``num_steps``, from where the run stands; ends with a checkpoint."""
    world = sf.World.from_environment()
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=num_steps,
        gradient_accumulation_steps=-(-MICRO_BATCHES_PER_STEP // world.world_size),
        ignore_data_skip=True,
        save_steps=num_steps,
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
    convert = to_tensors(tokenizer, torch.device("cpu"))

    with sf.Loader(sf.open(dataset), split="train", batch=SPEC, seed=1, world=world, config=CONFIG) as loader:
        last = get_last_checkpoint(str(run)) if run.is_dir() else None
        if last is not None:
            loader.load_state_dict(json.loads((Path(last) / _POSITION).read_text(encoding="utf-8")))
        StreamingTrainer(
            Batches(loader, convert),
            model=SummedLoss(tokenizer),
            args=arguments,
            callbacks=[SavePosition(loader)],
        ).train(resume_from_checkpoint=last)


if __name__ == "__main__":
    data, words, folder = map(Path, sys.argv[1:4])
    train(data, words, folder, num_steps=100)
