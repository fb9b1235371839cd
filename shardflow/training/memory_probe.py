"""Memory probe: measures what micro-batches take, fits a line, and proposes a micro-batch size.

`measure_memory_curve` starts this module as a process (``python -m shardflow.training.memory_probe
RUN.toml``), which builds the run's model and optimizer, and takes one step with 1, 2, 4, ... samples in the
largest shapes that the settings allow: all slices, the longest text. It prints a line for each size and ends
after 64 samples, when half of the memory is in use, or when a size does not fit; running out of memory does
not affect the caller. The size never changes during a run: it is part of the plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError, TrainingError
from shardflow.telemetry.process import available_bytes
from shardflow.training.config import TrainConfig

if TYPE_CHECKING:
    import torch

MARGIN: Final = 0.1
"""Of the memory that stays free: kernels, communication, fragments of the allocator."""
_TIMEOUT_S: Final = 900.0
_OF_RANKS: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """What micro-batches take, and how many samples fit."""

    device: str
    points: tuple[tuple[int, int], ...]
    """Sizes that were run, and the most memory at once: of the device, or of the process on a CPU."""
    fixed_bytes: int
    """Weights, gradients, optimizer, libraries."""
    sample_bytes: int
    """Of each sample of a micro-batch."""
    room_bytes: int
    """That a rank may fill, margin taken off."""
    largest: int
    """Samples of a micro-batch that fit; 0 for none."""
    proposed: int
    """The largest that leaves a step's samples as they are; 0 for none."""
    proposed_micro_batches: int
    """Micro-batches of a step with it."""

    def text(self) -> str:
        """Say what is proposed, in a sentence."""
        each = f"{self.fixed_bytes / 1e9:.3g} GB and {self.sample_bytes / 1e9:.3g} GB a sample"
        if not self.proposed:
            return f"not one sample fits into {self.room_bytes / 1e9:.3g} GB: the model takes {each}"
        return (
            f"{self.largest} samples fit into {self.room_bytes / 1e9:.3g} GB ({each}); with steps of as many "
            f"samples as now: batch.micro_batch_size = {self.proposed}, batch.micro_batches_per_step = "
            f"{self.proposed_micro_batches}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return all numbers."""
        return asdict(self)


def fit_memory(points: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return what is taken by no sample, and by each: a line by least squares, raised above all points.

    Args:
        points: Sizes and bytes, at least one pair; of a single one all bytes are taken for the samples'.

    Example:
        >>> fit_memory([(size, 100 + 20 * size) for size in (1, 2, 4)])
        (100, 20)
    """
    sizes, peaks = np.array(points, float).T
    if len(points) == 1:
        return 0, int(peaks[0] // sizes[0])
    slope = max(float(np.polyfit(sizes, peaks, 1)[0]), 1.0)
    return max(0, round(float((peaks - slope * sizes).max()))), round(slope)


def measure_memory_curve(config: TrainConfig, *, ranks_per_node: int = 1) -> MemoryCurve:
    """Measure a run's model on this machine.

    Args:
        config: All settings; its device, precision and shapes count.
        ranks_per_node: How many share the memory of the node, where that is what they compute in.

    Raises:
        ConfigError: The settings have a token budget, or share the model among ranks.
        TrainingError: Not even one sample could be run; the message has the last line that was said.
    """
    batch = config.batch
    if batch.micro_batch_size is None:
        raise ConfigError(
            "batch.micro_batch_size must be set to have one proposed, got a token budget; the curve counts "
            "samples."
        )
    if config.parallel.strategy != "ddp":
        raise ConfigError(
            f"parallel.strategy must be 'ddp' to have a micro-batch proposed, got "
            f"'{config.parallel.strategy}'; one process alone cannot hold a share of the model."
        )
    room_bytes, device, points = _run_sizes(config)
    if device == "cpu":
        room_bytes //= max(1, ranks_per_node)
    room_bytes = int(room_bytes * (1 - MARGIN))
    fixed, each = fit_memory(points)
    largest = max(0, (room_bytes - fixed) // each)
    per_step = batch.micro_batch_size * batch.micro_batches_per_step
    proposed = max((size for size in range(1, min(largest, per_step) + 1) if per_step % size == 0), default=0)
    return MemoryCurve(
        device=device,
        points=tuple(points),
        fixed_bytes=fixed,
        sample_bytes=each,
        room_bytes=room_bytes,
        largest=largest,
        proposed=proposed,
        proposed_micro_batches=per_step // proposed if proposed else 0,
    )


def _run_sizes(config: TrainConfig) -> tuple[int, str, list[tuple[int, int]]]:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    with tempfile.TemporaryDirectory(prefix="shardflow-memory-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "shardflow.training.memory_probe", str(path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
            text, said = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:  # what it has measured by then counts
            text, said = _text(error.stdout), _text(error.stderr)
    room_bytes, device, points = 0, "", []
    for line in text.splitlines():
        found = json.loads(line)
        if "room_bytes" in found:
            room_bytes, device = int(found["room_bytes"]), str(found["device"])
        else:
            points.append((found["size"], found["peak_bytes"]))
    if not points:
        last = (said.strip().splitlines() or ["nothing"])[-1]
        raise TrainingError(
            f"one sample must be trainable to measure memory, got a process that said: {last} Lower the "
            "sizes of [image], [text] or [model]."
        )
    return room_bytes, device, points


def _text(output: str | bytes | None) -> str:
    whole = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return whole[: whole.rfind("\n") + 1]


def main(path: str) -> int:
    """Measure in this process; prints JSON lines."""
    import torch

    from shardflow.training.data import sample_inputs
    from shardflow.training.distributed import choose_device, compile_blocks
    from shardflow.training.models.building import build_report_model
    from shardflow.training.step import COMPUTE_TYPES, build_optimizer, compute_loss
    from shardflow.training.text import ReportTokenizer

    config = load_config(TrainConfig, path)
    device = choose_device(config.run.device, 0)
    peak = _PeakOfDevice(device) if device.type != "cpu" else _PeakOfProcess()
    _say(room_bytes=peak.room_bytes(), device=device.type)
    model, _ = build_report_model(
        config.model,
        ReportTokenizer.load(config.text.tokenizer),
        image=config.image,
        text=config.text,
        lora=config.lora,
        seed=config.run.seed,
    )
    if config.run.compile:
        compile_blocks(model)
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer)
    room_bytes = peak.room_bytes()
    for size in _SIZES:
        inputs = sample_inputs(
            config.image,
            config.augment,
            device,
            packed=config.batch.packed,
            num_samples=size,
            num_tokens=config.text.max_tokens,
            is_full=True,
        )
        peak.begin()
        try:
            loss = compute_loss(model, inputs, COMPUTE_TYPES[config.run.precision])
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen = peak.end()
        except (torch.OutOfMemoryError, MemoryError):
            break
        finally:
            del inputs
        del loss
        _say(size=size, peak_bytes=seen)
        if seen > room_bytes // 2:
            break
    return 0


class _PeakOfDevice:
    """Most bytes of tensors on an accelerator, with what the allocator keeps beside them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._module = getattr(torch, device.type)

    def room_bytes(self) -> int:
        """Return what this process may fill: what is free, and what it has."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def begin(self) -> None:
        """Forget what was."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def end(self) -> int:
        """Return the most since `begin`."""
        self._module.synchronize(self._device)
        return int(self._module.max_memory_reserved(self._device))


class _PeakOfProcess:
    """Most resident bytes of this process (proc(5), VmHWM, which 5 in clear_refs sets back)."""

    def room_bytes(self) -> int:
        """Return what it may fill: what is available, and what it has."""
        return available_bytes() + _status("VmRSS:")

    def begin(self) -> None:
        """Forget what was."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self) -> int:
        """Return the most since `begin`."""
        return _status("VmHWM:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
