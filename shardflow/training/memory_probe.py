"""The process that `measure_memory_curve` starts: one training step of growing micro-batches, a line each.

``python -m shardflow.training.memory_probe RUN.toml``; ends after 64 samples, when half of the memory is in
use, or when a size does not fit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import torch

from shardflow.configs import load_config
from shardflow.telemetry.machine import available_bytes
from shardflow.training.building import build_report_model
from shardflow.training.config import TrainConfig
from shardflow.training.devices import choose_device
from shardflow.training.losses import weighted_token_loss
from shardflow.training.optimizer import build_optimizer
from shardflow.training.sharding import compile_blocks
from shardflow.training.text import ReportTokenizer
from shardflow.training.views import sample_inputs

__all__ = ["main"]

_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)
_COMPUTE: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(path: str) -> int:
    """Measure; prints JSON lines."""
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
    compute = _COMPUTE[config.run.precision]
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
            with torch.autocast(device.type, dtype=compute, enabled=compute is not None):
                logits = model(*inputs.model_arguments)
            loss = weighted_token_loss(logits, inputs.labels_BT, inputs.weights_B)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen = peak.end()
        except (torch.OutOfMemoryError, MemoryError):
            break
        finally:
            del inputs
        del logits, loss
        _say(size=size, peak_bytes=seen)
        if seen > room_bytes // 2:
            break
    return 0


class _PeakOfDevice:
    """Most bytes of tensors on an accelerator, with what the allocator keeps beside them."""

    def __init__(self, device: torch.device) -> None:
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
