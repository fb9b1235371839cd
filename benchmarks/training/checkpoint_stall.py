"""How long a checkpoint stops training: copied and written beside the steps, against written in their way.

    python -m benchmarks.training.checkpoint_stall --output benchmarks/results/checkpoint_stall.json

One rank trains a stack of linear layers with AdamW on this machine's device. Between checkpoints it runs
steps until the one before stands, so that writer and steps share processor and memory as in a run. The
stall is what the saver reports: the ranks' agreement and the copy. Beside it: the same checkpoint waited
for, which is what training stood still before; and a step while nothing is written and while something is.
The first copy also allocates its buffers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardflow import __version__
from shardflow.training.checkpoint.files import CheckpointFolder
from shardflow.training.checkpoint.saving import CheckpointSaver
from shardflow.training.config import OptimizerConfig, TimeoutConfig
from shardflow.training.distributed import Ranks, join_ranks
from shardflow.training.step import build_optimizer

LIMIT_S = 0.6
"""1 % of a checkpoint every 60 s."""
WIDTH = 2048
WAIT = 600.0


def measure(ranks: Ranks, folder: Path, num_parameters: int, repeats: int) -> dict[str, Any]:
    """Write checkpoints of one model size beside steps and in their way."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(max(1, num_parameters // WIDTH**2))]
    model = nn.Sequential(*layers).to(ranks.device)
    optimizer = build_optimizer(model, OptimizerConfig())
    inputs = torch.randn(64, WIDTH, device=ranks.device)
    checkpoints = CheckpointFolder(folder, keep_last=1)
    saver = CheckpointSaver(checkpoints, ranks, model, optimizer, is_sharded=False)
    stalls_s: list[float] = []
    writes_s: list[float] = []
    in_the_way_s: list[float] = []
    quiet_step_s: list[float] = []
    busy_step_s: list[float] = []

    def step() -> float:
        started = time.perf_counter()
        torch.autograd.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - started

    step()
    for repeat in range(repeats):
        quiet_step_s += [step() for _ in range(3)]
        saver.begin(2 * repeat, facts=None, state=lambda _: {})
        while True:
            busy_step_s.append(step())
            done = saver.advance(ranks.all_gather_numbers([saver.stage], WAIT)[:, 0].tolist())
            if done is not None:
                break
        stalls_s.append(done.stall_s)
        writes_s.append(done.write_s)
        started = time.perf_counter()
        saver.begin(2 * repeat + 1, facts=None, state=lambda _: {})
        saver.finish()
        in_the_way_s.append(time.perf_counter() - started)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "checkpoint_bytes": done.num_bytes,
        "stall_s": stalls_s,
        "write_beside_steps_s": writes_s,
        "written_in_the_way_s": in_the_way_s,
        "median_quiet_step_s": statistics.median(quiet_step_s),
        "median_step_beside_writing_s": statistics.median(busy_step_s),
        "largest_stall_is_within_limit": max(stalls_s) <= LIMIT_S,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--parameters", type=int, nargs="+", default=[25_000_000, 100_000_000], metavar="N")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = []
    with join_ranks(
        arguments.device, TimeoutConfig(startup_s=WAIT, steady_s=WAIT, control_s=WAIT, hang_s=0)
    ) as ranks:
        for num_parameters in arguments.parameters:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                results.append(measure(ranks, Path(folder), num_parameters, arguments.repeats))
                print(json.dumps(results[-1], indent=1), file=sys.stderr)
        device = torch.cuda.get_device_name() if ranks.device.type == "cuda" else "cpu"
    record = {
        "command": "python -m benchmarks.training.checkpoint_stall --output " + str(arguments.output),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "shardflow": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "hardware": {"device": device, "cores": os.cpu_count(), "system": platform.platform()},
        "load_average_at_start": load,
        "limit_s": LIMIT_S,
        "results": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
