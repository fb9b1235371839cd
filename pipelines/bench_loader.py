"""How the measured loaders read: whole primary series and reports, foreign fields, or texts alone."""

from __future__ import annotations

from shardflow.epochs import BatchSpec
from shardflow.fields.raw import readable_fields
from shardflow.loading import FieldsView, LoaderConfig, NativeView, StoredTokens
from shardflow.shards import Dataset

__all__ = ["bench_config", "bench_spec", "foreign_fields", "has_texts_alone"]

# Texts are read a micro-batch at once, so one of a single text would measure what nobody does.
_TEXTS_PER_MICRO_BATCH = 64


def has_texts_alone(dataset: Dataset) -> bool:
    """Whether no sample of a dataset has a slice."""
    return not dataset.is_foreign and not dataset.samples.column("num_slices").any()


def foreign_fields(dataset: Dataset) -> tuple[str, ...]:
    """The fields of foreign shards, as the first one has them; none that would be unpickled."""
    return readable_fields(dataset.shard_index(0).field_names)


def bench_spec(dataset: Dataset) -> BatchSpec:
    """Return how samples become micro-batches: one by one, texts many at once."""
    size = _TEXTS_PER_MICRO_BATCH if has_texts_alone(dataset) else 1
    return BatchSpec(micro_batch_size=size, micro_batches_per_step=1, tail="mask")


def bench_config(dataset: Dataset, *, num_threads: int, tokenizer: str = "") -> LoaderConfig:
    """Return what is read of each sample.

    Args:
        dataset: The dataset.
        num_threads: Threads of the loader.
        tokenizer: Deliver stored tokens of this one in place of texts.
    """
    view: FieldsView | NativeView | None = None
    if dataset.is_foreign:
        view = FieldsView(fields=foreign_fields(dataset))
    elif not has_texts_alone(dataset):
        view = NativeView(dtype="int16")
    return LoaderConfig(
        view=view,
        text=not tokenizer,
        tokens=StoredTokens(tokenizer=tokenizer) if tokenizer else None,
        num_threads=num_threads,
    )
