"""Two ranks that get the weights of a folder as shares; ``test_weights.py`` judges what they found.

``torchrun --nproc-per-node 2 -m tests.distributed.weights_ranks FOLDER OUTPUT``
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.training.start_up import get_weights
from shardflow.training.config import ModelConfig, ParallelConfig, TimeoutConfig
from shardflow.training.distributed import Ranks, gather_whole, join_ranks, shard
from shardflow.training.models.pretrained import read_model
from shardflow.training.models.weights import load_weights, weights_later

__all__: list[str] = []


def read_share(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Get a model's shares; return how many bytes were read, and whether they make the whole model."""
    num_bytes = []
    read = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        num_bytes.append(read(descriptor, buffers, offset))
        return num_bytes[-1]

    config = AutoConfig.from_pretrained(str(folder))
    with weights_later():
        model = read_model(AutoModelForCausalLM, config, ModelConfig(path=folder))
    shard(model, ranks, ParallelConfig(strategy="fsdp2"), compute=None)
    with mock.patch.object(os, "preadv", counted):
        load_weights(model, ranks.device)
    wanted = dict(AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).named_parameters())
    found = {name: gather_whole(one) for name, one in model.named_parameters()}
    assert found.keys() == wanted.keys()
    ids = torch.arange(12).reshape(2, 6)
    logits = model(input_ids=ids).logits
    return {
        "bytes_read": sum(num_bytes),
        "bytes_stored": 4 * sum(one.numel() for one in wanted.values()),
        "equal": all(torch.equal(one, wanted[name]) for name, one in found.items()),
        "logits": float(logits.double().sum()),
    }


def main() -> None:
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    with join_ranks("cpu", TimeoutConfig(startup_s=300, hang_s=0)) as ranks:
        result = {"share": read_share(ranks, folder / "tiny")}
        result["memory"] = get_weights(ranks, folder / "large", "shares")
        by_rank = ranks.all_gather_json(result)
        if ranks.rank == 0:
            output.write_text(json.dumps(by_rank), encoding="utf-8")


if __name__ == "__main__":
    main()
