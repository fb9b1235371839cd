"""Two ranks run every example: to the end in one go, and stopped in the middle of an epoch and gone on.

``torchrun --nproc-per-node 2 -m tests.distributed.example_ranks INPUT OUTPUT``: each rank writes which
samples every example's model saw, and rank 0 the weights at the end; ``test_examples.py`` judges them.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from shardflow.loading import Batch
from tests.tiny_runs import TinyInput

__all__ = ["EXAMPLES", "NUM_STEPS", "STOPPED_AFTER"]

EXAMPLES = ("plain_ddp", "accelerate_loop", "hf_trainer", "lightning_run")
NUM_STEPS, STOPPED_AFTER = 5, 2
"""An epoch is three steps, so the first start ends within one and the second crosses its end."""


class Notes:
    """Stands in for ``to_tensors`` and ``SummedLoss`` of an example, to see its batches and its weights."""

    def __init__(self, module: Any) -> None:
        self.seen: list[Any] = []
        self.models: list[torch.nn.Module] = []
        self._to_tensors: Any = module.to_tensors
        self._model: Any = module.SummedLoss

    def to_tensors(self, tokenizer: Path, device: torch.device) -> Callable[[Batch], dict[str, torch.Tensor]]:
        convert = self._to_tensors(tokenizer, device)

        def noted(batch: Batch) -> dict[str, torch.Tensor]:
            is_training = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            if is_training:
                self.seen.append([batch.epoch, batch.step, batch.micro, list(batch.sample_keys)])
            tensors: dict[str, torch.Tensor] = convert(batch)
            return tensors

        return noted

    def model(self, tokenizer: Path) -> torch.nn.Module:
        self.models.append(self._model(tokenizer))
        return self.models[-1]


def import_ahead() -> None:
    """Import the examples with their frameworks, once for all ranks."""
    for name in EXAMPLES:
        import_module(f"examples.{name}")


def run_example(name: str, tiny: TinyInput, run: Path, num_steps: int) -> Notes:
    """Run one start of an example."""
    module = import_module(f"examples.{name}")
    notes = Notes(module)
    if dist.get_rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with (
        mock.patch.object(module, "to_tensors", notes.to_tensors),
        mock.patch.object(module, "SummedLoss", notes.model),
    ):
        module.train(tiny.dataset, tiny.tokenizer, run, num_steps)
    dist.barrier()
    return notes


def main() -> None:
    warnings.simplefilter("ignore")  # what other frameworks warn of is not ours to judge
    tiny, output = TinyInput(Path(sys.argv[1])), Path(sys.argv[2])
    dist.init_process_group("gloo")
    results = {}
    for name in EXAMPLES:
        whole = run_example(name, tiny, output / f"{name}-whole", NUM_STEPS)
        first = run_example(name, tiny, output / f"{name}-parts", STOPPED_AFTER)
        second = run_example(name, tiny, output / f"{name}-parts", NUM_STEPS)
        results[name] = {"whole": whole.seen, "parts": [first.seen, second.seen]}
        if dist.get_rank() == 0:
            for kind, notes in (("whole", whole), ("parts", second)):
                weights = {key: tensor.clone() for key, tensor in notes.models[-1].named_parameters()}
                save_file(weights, output / f"{name}-{kind}.safetensors")
    (output / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
