"""Counts of conversations that templates make: samples are read as by a loader, composed and rendered.

``shardflow tokenize`` counts all rows of a dataset, without a plan; a loader counts some of them again before
step 0, to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.conversations.field import BoundTemplate, Conversation
from shardflow.fields.conversations.rendering import RenderError
from shardflow.fields.conversations.stored import (
    StoredConversation,
    count_ends,
    note_checked,
    picture_entries,
    rows_to_check,
)
from shardflow.fields.conversations.templates import IncompleteError
from shardflow.fields.field import DrawKey, Field, with_dependencies
from shardflow.fields.quarantine import Quarantine
from shardflow.fields.registry import FieldSet
from shardflow.format import Dataset
from shardflow.format.counts import ConversationCounts, CountedTemplate, template_counts_name
from shardflow.loading.binding import bind_fields
from shardflow.loading.config import LoaderConfig, World
from shardflow.loading.rows.selection import Selection, select
from shardflow.loading.runtime import LoaderRuntime
from shardflow.sampling import BatchSpec, RankSchedule
from shardflow.sampling.layout import select_rows
from shardflow.telemetry import StageCounters

_FEW: Final = BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask")


class TemplateCounter:
    """Counter of the tokens and pictures of the conversations that a template makes of a dataset's rows.

    Args:
        dataset: The dataset; its rows may be studies, series, images or findings.
        fields: Fields of a loader.
        name: Of the one that has the template.
        processor: Folder of the processor in place of the field's own; None for that.

    Attributes:
        renderer: Of the processor.
        entries: Names of the entries of pictures.
        template: What decides the conversations.

    Raises:
        ConfigError: The template does not fit the dataset or the fields, or a sample may be of another length
            in another epoch.
    """

    def __init__(
        self, dataset: Dataset, fields: Mapping[str, Field], name: str, processor: Path | None = None
    ) -> None:
        spec = fields[name]
        assert isinstance(spec, Conversation)  # noqa: S101 - of the caller
        place = spec.processor if processor is None else str(processor)
        talk = replace(spec, processor=place, packed=False, missing="pad")
        # What a sample lacks makes no conversation of it, whatever a loader does with it.
        wanted = with_dependencies(fields, spec.depends_on)
        self._wanted = {
            one: replace(field.for_evaluation(), missing="pad")
            for one, field in fields.items()
            if one in wanted
        }
        self._selection = select(dataset, "+".join(name for name, rows in dataset.splits.items() if rows))
        _, bound = bind_fields(self._selection, {**self._wanted, name: talk}, StageCounters())
        made = next(one for one in bound.bound if one.name == name)
        assert isinstance(made, BoundTemplate)  # noqa: S101 - of the caller
        self._template, self._has_pairs = made, talk.pairs
        self.renderer = made.renderer
        self.entries = picture_entries(self.renderer)
        (self.template,) = made.counted_by()
        self._read: FieldSet | None = None
        if self._wanted:
            _, self._read = bind_fields(self._selection, self._wanted, StageCounters())

    def count(self, rows: NDArray[np.int64]) -> tuple[ConversationCounts, NDArray[np.bool_]]:
        """Count the conversations of some rows, 0 where a sample makes none.

        Args:
            rows: ``(n,)``, ascending.

        Returns:
            The counts, and which samples could be read, ``(n,)``.

        Raises:
            StorageError: A shard cannot be read.
        """
        found = ConversationCounts.zeros(len(rows), self.entries)
        is_read = np.zeros(len(rows), bool)
        for row, entries in self._samples(rows):
            place = int(np.searchsorted(rows, row))
            is_read[place] = True
            try:
                document, pictures = self._template.compose(
                    0, row, DrawKey(0, 0, row, table_row=row), entries
                )
                stored = StoredConversation.parse(document, pairs=self._has_pairs)
                members = {str(number): one for number, one in enumerate(pictures)}
                one = count_ends(self.renderer, stored, members, self.entries)
            except (IncompleteError, RenderError, ValueError):
                continue
            found.tokens[place], found.images[place] = one.tokens[0], one.images[0]
            for name, own in found.rows.items():
                own[place] = one.rows[name][0]
        return found, is_read

    def _samples(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the rows that can be read, each with the entries of the fields that the template names."""
        if self._read is None:
            yield from ((row, {}) for row in rows.tolist())
            return
        first, stop = int(rows[0]), int(rows[-1]) + 1
        chosen = np.zeros(stop - first, bool)
        chosen[rows - first] = True
        population = select_rows(range(first, stop), lambda one, other: chosen[one - first : other - first])
        alone = replace(self._selection, population=population, subset=None)
        plan, fields = alone.plan(_FEW, seed=0, epoch=0), self._read
        config = LoaderConfig(num_threads=1)
        runtime = LoaderRuntime(
            alone, RankSchedule(1, 1), World(), alone.state(_FEW, seed=0), config, StageCounters(), fields
        )
        with closing(runtime):
            for batch in runtime.stream(plan, range(plan.num_steps), Quarantine(len(rows))):
                for slot in np.flatnonzero(batch.info.weight > 0).tolist():
                    row = int(batch.arrays["row"][slot])
                    yield row, fields.sample(batch.arrays, slot, len(batch.info.weight))


def check_template_counts(selection: Selection, fields: FieldSet, batch: BatchSpec) -> None:
    """Render 64 keyed samples of each dataset, and compare them with the counts that a budget charges for.

    Args:
        selection: The samples of a loader.
        fields: What it delivers.
        batch: As given to the loader; one with counted tokens is of another process, which has compared them.

    Raises:
        ConfigError: They differ.
    """
    if batch.budget is None or batch.budget.cost.counted:
        return
    for bound in fields.bound:
        if not isinstance(bound, BoundTemplate):
            continue
        planned = bound.planned
        if planned is None or planned.templates is None:
            continue
        for dataset, counts, template in zip(
            selection.datasets, planned.counts, planned.templates, strict=True
        ):
            _check(dataset, counts, template, fields.specs, bound)


def _check(
    dataset: Dataset,
    counts: ConversationCounts,
    template: CountedTemplate,
    fields: Mapping[str, Field],
    bound: BoundTemplate,
) -> None:
    name = template_counts_name(dataset, bound.renderer.digest, template)
    rows = rows_to_check(name, dataset.dataset_id, len(counts))
    if not len(rows):
        return
    found, is_read = TemplateCounter(dataset, fields, bound.name).count(rows)
    num_other = int((found.differs(counts.take(rows)) & is_read).sum())
    note_checked(name, dataset.dataset_id, num_other, len(rows), " --fields FILE")
