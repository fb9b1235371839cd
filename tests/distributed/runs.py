"""What tests compare of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from shardflow.training.checkpoint.files import read_checkpoint
from shardflow.training.ledger import LedgerMicroBatch, read_ledger

__all__ = ["committed_samples", "differing_weights", "newest_checkpoint", "newest_weights"]


def newest_checkpoint(run: Path) -> str:
    """Name of the checkpoint that ``latest`` points at."""
    return (run / "checkpoints" / "latest").read_text(encoding="utf-8").strip()


def newest_weights(run: Path) -> Mapping[str, torch.Tensor]:
    """Model tensors of the newest checkpoint."""
    return read_checkpoint(run / "checkpoints" / newest_checkpoint(run)).model


def differing_weights(first: Path, second: Path) -> list[str]:
    """Names of the tensors that are not equal in every bit."""
    mine, other = newest_weights(first), newest_weights(second)
    assert mine.keys() == other.keys()
    return [name for name, tensor in mine.items() if not torch.equal(tensor, other[name])]


def committed_samples(run: Path) -> list[tuple[int, int, int, tuple[LedgerMicroBatch, ...]]]:
    """The committed lineage without who did it."""
    return [(s.global_step, s.epoch, s.step, s.micro_batches) for s in read_ledger(run)]
