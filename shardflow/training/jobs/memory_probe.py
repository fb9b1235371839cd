"""Memory probe: measures what micro-batches take, fits a line, and proposes a micro-batch size.

`measure_memory_curve` starts this module as a process (``python -m shardflow.training.jobs.memory_probe
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
from shardflow.training.model_fields import num_places

if TYPE_CHECKING:
    import torch

MARGIN: Final = 0.1
"""Of the memory that stays free: kernels, communication, fragments of the allocator."""
_TIMEOUT_S: Final = 900.0
_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Memory of micro-batches by their size, and how many samples fit."""

    device: str
    points: tuple[tuple[int, int], ...]
    """Sizes that were run, and the peak memory of each: of the device, or of the process on a CPU."""
    fixed_bytes: int
    """Weights, gradients, optimizer, libraries."""
    sample_bytes: int
    """Additional bytes of each sample of a micro-batch."""
    room_bytes: int
    """Memory that a rank may fill, less the margin."""
    largest: int
    """Samples of the largest micro-batch that fits; 0 for none."""
    proposed: int
    """Largest micro-batch size that keeps the samples of a step; 0 for none."""
    proposed_micro_batches: int
    """Micro-batches of a step with it."""

    def text(self) -> str:
        """Describe the proposal in a sentence."""
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
    """Return the bytes of no sample and of each one: a least-squares line, raised above all points.

    Args:
        points: Sizes and bytes, at least one pair; of a single one all bytes are attributed to the samples.

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
        ranks_per_node: Ranks that share the memory of the node, on CPUs.

    Raises:
        ConfigError: The settings have a token budget, or share the model among ranks.
        TrainingError: Not even one sample could be run; the message has the last line of the process.
    """
    batch = config.batch
    if not config.task.has_reports:
        raise ConfigError(
            "a micro-batch size is proposed for tasks of reports only; try sizes, and watch the device."
        )
    if batch.micro_batch_size is None:
        raise ConfigError(
            "no micro-batch size can be proposed for a token budget, as the curve counts samples; set "
            "batch.micro_batch_size in place of batch.max_tokens."
        )
    if config.parallel.strategy != "ddp":
        raise ConfigError(
            f"a micro-batch size is proposed for parallel.strategy 'ddp' only, got "
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
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="shardflow-memory-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "shardflow.training.jobs.memory_probe", str(path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
            text, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:  # what it has measured by then counts
            text, errors = _text(error.stdout), _text(error.stderr)
    room_bytes, device, points = 0, "", []
    for line in text.splitlines():
        found = json.loads(line)
        if "room_bytes" in found:
            room_bytes, device = int(found["room_bytes"]), str(found["device"])
        else:
            points.append((found["size"], found["peak_bytes"]))
    if not points:
        last = (errors.strip().splitlines() or ["nothing"])[-1]
        raise TrainingError(
            f"not one sample could be trained to measure memory: {last} Lower the sizes of [fields.image], "
            "[image], [text] or [model]."
        )
    return room_bytes, device, points


def _text(output: str | bytes | None) -> str:
    whole = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return whole[: whole.rfind("\n") + 1]


def main(path: str) -> int:
    """Measure in this process, and print JSON lines."""
    import torch

    from shardflow.training.data import sample_inputs
    from shardflow.training.distributed import choose_device, compile_blocks
    from shardflow.training.models.building import build_report_model
    from shardflow.training.step import COMPUTE_TYPES, WeightAverage, build_optimizer, compute_loss
    from shardflow.training.text import ReportTokenizer

    config = load_config(TrainConfig, path)
    device = choose_device(config.run.device, 0)
    peak = _PeakOfDevice(device) if device.type != "cpu" else _PeakOfProcess()
    _print(room_bytes=peak.room_bytes(), device=device.type)
    model, _ = build_report_model(
        config.model,
        ReportTokenizer.load(config.text.folder),
        image=config.image,
        num_places=num_places(config.image_field),
        text=config.text,
        lora=config.lora,
        seed=config.run.seed,
    )
    if config.run.compile:
        compile_blocks(model)
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer)
    average = WeightAverage(optimizer, config.optimizer.ema_decay)
    room_bytes = peak.room_bytes()
    for size in _SIZES:
        inputs = sample_inputs(
            config.image_field,
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
            average.update()
            optimizer.zero_grad(set_to_none=True)
            peak_bytes = peak.end()
        except (torch.OutOfMemoryError, MemoryError):
            break
        finally:
            del inputs
        del loss
        _print(size=size, peak_bytes=peak_bytes)
        if peak_bytes > room_bytes // 2:
            break
    return 0


class _PeakOfDevice:
    """Peak bytes of tensors on an accelerator, with what the allocator reserves."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._module = getattr(torch, device.type)

    def room_bytes(self) -> int:
        """Return what this process may fill: free memory, and what it holds."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def begin(self) -> None:
        """Reset the peak."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def end(self) -> int:
        """Return the peak since `begin`."""
        self._module.synchronize(self._device)
        return int(self._module.max_memory_reserved(self._device))


class _PeakOfProcess:
    """Peak resident bytes of this process (proc(5), VmHWM, which 5 in clear_refs resets)."""

    def room_bytes(self) -> int:
        """Return what it may fill: available memory, and what it holds."""
        return available_bytes() + _status("VmRSS:")

    def begin(self) -> None:
        """Reset the peak."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self) -> int:
        """Return the peak since `begin`."""
        return _status("VmHWM:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _print(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
