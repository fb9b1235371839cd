"""Single samples by key, with the fields of a loader: ``dataset[key]`` in a notebook, or to look at one.

A sample is read by the machinery of a loader, as the only one of an epoch, so it equals what a loader of its
split delivers. What depends on the population, such as a dtype that holds every image, is that of the split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

from shardflow.errors import ConfigError, FormatError
from shardflow.fields.conversations.field import BoundTemplate, Conversation
from shardflow.fields.conversations.rendering import decode_picture
from shardflow.fields.conversations.templates import IncompleteError
from shardflow.fields.field import BoundField, DrawKey, Field, check_names
from shardflow.fields.previous import BoundPrevious
from shardflow.fields.quarantine import Quarantine
from shardflow.fields.registry import FieldSet
from shardflow.fields.units import unit_of
from shardflow.format import Dataset
from shardflow.format.dataset import register_sample_reader
from shardflow.format.facts.units import parse_unit_key
from shardflow.loading.binding import bind_fields
from shardflow.loading.config import LoaderConfig, World
from shardflow.loading.rows.selection import Selection, select
from shardflow.loading.rows.windows import select_windows
from shardflow.loading.runtime import LoaderRuntime
from shardflow.sampling import BatchSpec, RankSchedule
from shardflow.telemetry import StageCounters

_ALONE: Final = BatchSpec(micro_batch_size=1, micro_batches_per_step=1, tail="mask")
_MAX_BINDINGS: Final = 4


def conversation_of(
    dataset: Dataset, row: int, fields: Mapping[str, Field], name: str
) -> tuple[dict[str, Any], list[Any]]:
    """Return the conversation of a sample in its stored form, and its pictures as RGB images of Pillow.

    Args:
        dataset: The dataset.
        row: Row of its own table.
        fields: Fields of a loader.
        name: Of the field of conversations, stored or of a template, of which epoch 0 of seed 0 is drawn.

    Raises:
        ConfigError: The sample has no conversation, or lacks what the template names.
    """
    spec = fields[name]
    assert isinstance(spec, Conversation)  # noqa: S101 - of the caller
    if spec.template is None:
        if all(one.name != spec.member for one in dataset.sample_fields(row)[1]):
            raise ConfigError(f"This sample has no {spec.member}; write template= to make one of its study.")
        document = json.loads(dataset.read_fields(row, [spec.member])[spec.member])
        names = [one["member"] for one in document["images"]]
        payloads = dataset.read_fields(row, names) if names else {}
        return document, [decode_picture(payloads[one]) for one in names]
    wanted = {one: fields[one] for one in spec.depends_on if one in fields}
    entries = OneSampleReader(dataset).read(row, wanted, 0) if wanted else {}
    split = next(each for each, rows in dataset.splits.items() if row in rows)
    _, bound = bind_fields(
        select(dataset, split), {**_padded(select(dataset, split), wanted), name: spec}, StageCounters()
    )
    made = next(one for one in bound.bound if one.name == name)
    assert isinstance(made, BoundTemplate)  # noqa: S101 - its spec has a template
    try:
        return made.compose(0, row, DrawKey(0, 0, row, table_row=row), entries)
    except (IncompleteError, ValueError) as error:
        raise ConfigError(f"The template makes no conversation of this sample: {error}.") from None


open_dataset = Dataset.open
"""`Dataset.open`; importing it from here lets ``dataset[key]`` read samples."""


class OneSampleReader:
    """Reader of single samples of a dataset, which keeps the fields that it bound last.

    Args:
        dataset: The dataset; its rows may be series, images, windows or findings too.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._bindings: dict[str, tuple[Selection, FieldSet]] = {}
        self._of_windows: dict[str, OneSampleReader] = {}

    def read(self, key: str | int, fields: Mapping[str, Field] | None, seed: int) -> dict[str, Any]:
        """Read a sample, see `Dataset.sample`."""
        if fields is not None:
            check_names(fields)
            fields = _whole(fields)
        if unit_of(self._dataset) == "study" and any(one.has_windows for one in (fields or {}).values()):
            return self._windows(key, fields or {}).read(key, fields, seed)
        row = self._row(key)
        split = next(name for name, rows in self._dataset.splits.items() if row in rows)
        selection, bound = self._bind(split, fields)
        lacking = [one.name for one in bound.bound if not _has_content(one, row, fields or {})]
        if lacking:
            raise ConfigError(
                f"This sample has nothing for the field {lacking[0]!r}; write missing='pad' for it to look "
                "at the sample."
            )
        alone = replace(selection, population=range(row, row + 1))
        config = LoaderConfig(num_threads=1, on_bad_sample="raise")
        schedule = RankSchedule(1, 1)
        runtime = LoaderRuntime(
            alone, schedule, World(), alone.state(_ALONE, seed=seed), config, StageCounters(), bound
        )
        with closing(runtime):
            batch = next(runtime.stream(alone.plan(_ALONE, seed=seed, epoch=0), range(1), Quarantine(0)))
        # Flat entries hold the values of all samples, here of one.
        flat = {name for name in batch if f"{name}_offsets" in batch}
        beside = {f"{name}_offsets" for name in flat}
        return {
            name: value if name in flat else value[0] for name, value in batch.items() if name not in beside
        }

    def _windows(self, key: str | int, fields: Mapping[str, Field]) -> OneSampleReader:
        """Return the reader of the windows of the split that a key is in."""
        found = parse_unit_key(key, "window") if isinstance(key, str) else None
        if found is None:
            raise ConfigError(
                "With center='grid' a sample is a window; write its key, which is that of the study and the "
                "number of the window, such as dataset.sample('KEYw0', fields)."
            )
        try:
            row = self._dataset.samples.find(found.study_key)
        except FormatError:
            raise KeyError("the dataset has no study of this key; batch.info.units has some") from None
        split = next(name for name, rows in self._dataset.splits.items() if row in rows)
        name = repr((split, dict(fields)))
        if name not in self._of_windows:
            windows = select_windows(select(self._dataset, split), fields).datasets[0]
            kept = dict(list(self._of_windows.items())[1 - _MAX_BINDINGS :])
            self._of_windows = {**kept, name: OneSampleReader(windows)}
        return self._of_windows[name]

    def _row(self, key: str | int) -> int:
        samples = self._dataset.samples
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ConfigError(
                f"dataset[key] takes a sample key or a row, such as dataset[0], got {type(key).__name__}."
            )
        if isinstance(key, int):
            if not -samples.num_samples <= key < samples.num_samples:
                raise IndexError(f"rows are from 0 to {samples.num_samples - 1}, got {key}")
            return key % samples.num_samples
        try:
            return samples.find(key)
        except FormatError:
            raise KeyError("the dataset has no sample of this key; batch.info.sample_keys has some") from None

    def _bind(self, split: str, fields: Mapping[str, Field] | None) -> tuple[Selection, FieldSet]:
        name = repr((split, None if fields is None else dict(fields)))
        if name not in self._bindings:
            selection = select(self._dataset, split)
            try:
                found = bind_fields(selection, fields, StageCounters())
            except ConfigError:
                # Perhaps others lack what is required, which does not matter here.
                found = bind_fields(selection, _padded(selection, fields), StageCounters())
            self._bindings = {**dict(list(self._bindings.items())[1 - _MAX_BINDINGS :]), name: found}
        return self._bindings[name]


def _whole(fields: Mapping[str, Field]) -> dict[str, Field]:
    """Return fields of which none splits its conversation: a sample is looked at as a whole."""
    return {
        name: replace(one, split_long=False) if isinstance(one, Conversation) else one
        for name, one in fields.items()
    }


def _padded(selection: Selection, fields: Mapping[str, Field] | None) -> Mapping[str, Field]:
    """Return fields that pad what a sample lacks, where tables know which ones do."""
    if not fields:
        return fields or {}
    padded = {name: replace(one, missing="pad") for name, one in fields.items()}
    _, bound = bind_fields(selection, padded, StageCounters())
    return {one.name: padded[one.name] if _is_known(one) else fields[one.name] for one in bound.bound}


def _is_known(field: BoundField) -> bool:
    """Whether tables know which samples have the content of a field."""
    return (field.of if isinstance(field, BoundPrevious) else field).has_content is not None


def _has_content(field: BoundField, row: int, given: Mapping[str, Field]) -> bool:
    """Whether a sample has what a field requires, as far as tables know."""
    if field.name not in given or given[field.name].missing == "pad":
        return True
    known = field.has_content
    return known is None or bool(known[0][row])


register_sample_reader(lambda dataset: OneSampleReader(dataset).read)
