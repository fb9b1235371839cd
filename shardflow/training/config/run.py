"""Settings of the run itself: where it writes, how long it goes, on what it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardflow.configs import check_fields
from shardflow.errors import ConfigError
from shardflow.training.config.ranges import Count, CountOrZero

__all__ = ["RunSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The run itself: where it writes, how long it goes, on what it runs."""

    output: Path
    """Run folder; belongs to one run, whose restarts share it."""
    seed: int = 0
    num_epochs: Count | None = None
    """Passes over the training split; one where ``max_steps`` is not set either."""
    max_steps: Count | None = None
    """Steps of the whole run, also inside an epoch. With both, what comes first ends the run; the learning
    rate's cosine ends there too."""
    checkpoint_every_steps: Count = 100
    """A checkpoint is also written at the end and on SIGTERM or SIGUSR1."""
    keep_last: Count = 2
    resume: str = "auto"
    """``auto``: the run folder's newest sound checkpoint, else step 0. ``never``: refuse a run folder that
    holds checkpoints. Or a checkpoint folder to start from where the run folder holds none yet."""
    max_failed_starts: CountOrZero = 3
    """So many starts in a row that end before a next checkpoint are enough: another one is refused, with exit
    code 2. 0 starts for ever."""
    evaluate_every_steps: CountOrZero = 0
    """0 evaluates at the end of each epoch; needs ``data.eval_split``."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """``npu``: Ascend, by ``torch_npu`` and HCCL. ``auto``: a GPU, else an NPU, else the CPU."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """``bf16``, ``fp16``: compute in it; weights and optimizer stay fp32. ``fp16`` scales the loss."""
    compile: bool = False
    """Compile the model's layers with ``torch.compile``; the first steps take minutes longer."""
    deterministic: bool = False
    """Choose kernels that add in a fixed order where there are such; torch warns of the others."""
    tensorboard: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.resume:
            raise ConfigError(
                "resume must be 'auto', 'never' or a checkpoint folder, got an empty text; use 'auto'."
            )
