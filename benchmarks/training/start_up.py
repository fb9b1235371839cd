"""Memory and time in which the ranks of a run get the weights of a folder.

    python -m benchmarks.training.start_up --output benchmarks/results/start_up.json

Two ranks on the CPU get a language model of random weights, stored as bfloat16, in float32 shares of FSDP2:
``shares`` as a run does, each rank reading its rows into place; ``whole`` as most programs do, with
`from_pretrained` on each rank and `fully_shard` behind it. Each in fresh processes. The peak is that of the
process (VmHWM), reset before the model is built; ``growth`` is what the process had not held before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from benchmarks.about import about_run
from shardflow.training.config import ModelConfig, ParallelConfig, TimeoutConfig
from shardflow.training.distributed import Ranks, join_ranks, local_part, shard
from shardflow.training.models.pretrained import read_model
from shardflow.training.models.weights import load_weights, weights_later

REPOSITORY = Path(__file__).resolve().parents[2]
SIZES = {
    # As Llama 3.2 1B, embeddings tied.
    "1B": {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70M": {
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
}
KINDS = ("shares", "whole")


def make_folder(folder: Path, size: str) -> None:
    """Write a model of random weights, several files of it, without ever holding it."""
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True, architectures=["LlamaForCausalLM"])
    config.save_pretrained(str(folder))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    names, waiting, num_bytes = {}, {}, 0
    generator = torch.Generator().manual_seed(7)

    def flush() -> None:
        file = f"model-{len(set(names.values())):05d}.safetensors"
        save_file(waiting, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(waiting, file))
        waiting.clear()

    for name, one in model.named_parameters():
        waiting[name] = torch.empty(one.shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
        num_bytes += waiting[name].nbytes
        if num_bytes > 1 << 29:
            flush()
            num_bytes = 0
    flush()
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def memory(key: str) -> int:
    """Return a number of bytes of this process, such as ``VmRSS``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def get_weights(ranks: Ranks, folder: Path, kind: str) -> dict[str, Any]:
    """Get a model's shares one way; return its sizes, the peak above what was held before, and the time."""
    config = AutoConfig.from_pretrained(str(folder))
    settings, parallel = ModelConfig(path=folder), ParallelConfig(strategy="fsdp2")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, started = memory("VmRSS"), time.perf_counter()
    if kind == "shares":
        with weights_later():
            model = read_model(AutoModelForCausalLM, config, settings)
    else:
        model = read_model(AutoModelForCausalLM, config, settings)
    shard(model, ranks, parallel, compute=None)
    load_weights(model, ranks.device)
    peak = memory("VmHWM")
    return {
        "share_bytes": sum(local_part(one).nbytes for one in model.parameters()),
        "before_bytes": before,
        "peak_bytes": peak,
        "growth_bytes": peak - before,
        "seconds": time.perf_counter() - started,
    }


def run_rank(folder: Path, kind: str, output: Path) -> None:
    """Measure in a process that torchrun has started; a small model first, for what is imported once."""
    with join_ranks("cpu", TimeoutConfig(startup_s=600, hang_s=0)) as ranks:
        get_weights(ranks, folder / "small", kind)
        ranks.barrier("small", 600)
        found = get_weights(ranks, folder / "large", kind)
        by_rank = ranks.all_gather_json(found)
        if ranks.rank == 0:
            output.write_text(json.dumps(by_rank), encoding="utf-8")


def measure(folder: Path, kind: str, num_ranks: int) -> list[dict[str, Any]]:
    """Start ranks; return what each found, with its peak over its share."""
    output = folder / f"{kind}.json"
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    command = ["-m", "benchmarks.training.start_up", "--folder", str(folder), "--rank", kind, str(output)]
    subprocess.run([*torchrun, *command], cwd=REPOSITORY, check=True, timeout=1800)
    found: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
    for one in found:
        one["growth_over_share"] = one["growth_bytes"] / one["share_bytes"]
        one["peak_over_share"] = one["peak_bytes"] / one["share_bytes"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--size", default="1B", choices=list(SIZES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", nargs=2, metavar=("KIND", "OUTPUT"))
    arguments = parser.parse_args()
    if arguments.rank:
        kind, output = arguments.rank
        run_rank(arguments.folder, kind, Path(output))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        make_folder(folder / "small", "70M")
        make_folder(folder / "large", arguments.size)
        load = os.getloadavg()[0]
        results = {kind: measure(folder, kind, arguments.ranks) for kind in KINDS}
    record = {
        "command": "python -m benchmarks.training.start_up",
        **about_run(["torch", "transformers", "safetensors"]),
        "load_average_at_start": load,
        "model": {"size": arguments.size, **SIZES[arguments.size], "stored": "bfloat16", "held": "float32"},
        "num_ranks": arguments.ranks,
        "results": results,
    }
    text = json.dumps(record, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
