"""A dataset with everything that may lie beside it: a view, tokens of its reports, tokens of the view."""

from __future__ import annotations

from pathlib import Path

from shardflow.format import Dataset
from shardflow.format.entities import EntityDataset, EntityRules
from shardflow.reports.entity_views import build_view
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.entity_datasets import make_entity_dataset

__all__ = ["make_with_sidecars"]


def make_with_sidecars(folder: Path) -> Dataset:
    """Write a dataset to ``folder/data`` with a view ``entity`` and tokens of both, and a tokenizer."""
    dataset = make_entity_dataset(folder / "data")
    build_view(dataset, EntityRules())
    train_tokenizer(dataset, "train", 300, folder / "bpe")
    for rows in (dataset, EntityDataset.beside(dataset)):
        tokenize_dataset(rows, TextTokenizer(folder / "bpe"))
    return dataset
