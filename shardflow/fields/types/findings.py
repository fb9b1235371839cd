"""Findings in a batch: arrays of what a finding is and where.

Only a selection with an entity view has the arrays. In a blend the samples of other components have -1 in all
of them, and names are numbered over all views of the blend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardflow.fields.field import ArraySpec
from shardflow.fields.reader import Samples
from shardflow.format.entities import ASSERTIONS, LATERALITIES, EntityDataset

NO_ENTITY = -1
_NAMED = {"label": "labels", "anatomy": "anatomies", "assertion": "assertions", "laterality": "lateralities"}
_NUMBERS = ("entity", "entity_series", "entity_centre", *(f"entity_{name}" for name in _NAMED))
FINDING_ENTRIES = (*_NUMBERS, "entity_span", "entity_confidence")
"""Entries of a batch beside the fields, where a sample may be a finding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityNames:
    """Names that the codes of a batch index."""

    labels: tuple[str, ...]
    anatomies: tuple[str, ...]
    """The first one is empty: no anatomy was given."""
    assertions: tuple[str, ...] = ASSERTIONS
    lateralities: tuple[str, ...] = LATERALITIES

    @classmethod
    def of(cls, samples: Samples) -> EntityNames:
        """Collect the names of all views of a selection; empty without views."""
        views = [dataset.samples for dataset in samples.datasets if isinstance(dataset, EntityDataset)]
        return cls(
            labels=tuple(sorted({name for view in views for name in view.labels})),
            anatomies=tuple(sorted({name for view in views for name in view.anatomies})),
        )


class FindingArrays:
    """Finding arrays of a selection's micro-batches. Safe for many threads.

    Args:
        samples: The samples, at least some of an entity view.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self.names = EntityNames.of(samples)
        self._codes = [self._codes_of(dataset) for dataset in samples.datasets]

    @classmethod
    def of(cls, samples: Samples) -> FindingArrays | None:
        """Return the finding arrays of a selection; None if no part of it is an entity view."""
        has_entities = any(isinstance(dataset, EntityDataset) for dataset in samples.datasets)
        return cls(samples) if has_entities else None

    def array_specs(self, num_slots: int) -> list[ArraySpec]:
        """Name the arrays of a micro-batch."""
        return [
            *(ArraySpec.of(name, np.int64, num_slots) for name in _NUMBERS),
            ArraySpec.of("entity_span", np.int64, num_slots, 2),
            ArraySpec.of("entity_confidence", np.float64, num_slots),
        ]

    def put(self, rows: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill the arrays of a micro-batch.

        Args:
            rows: ``(B,)`` rows of the selection; -1 is a slot without a sample.
            arrays: Of the micro-batch.

        Raises:
            ChecksumError: The table was damaged after it was opened.
        """
        for spec in self.array_specs(len(rows)):
            arrays[spec.name][:] = NO_ENTITY
        slots = np.flatnonzero(rows >= 0)
        components = self._samples.components_of(rows[slots])
        inside = self._samples.table_rows(rows[slots])
        for component in sorted(set(components.tolist())):
            dataset = self._samples.datasets[component]
            if not isinstance(dataset, EntityDataset):
                continue
            here, at = slots[components == component], inside[components == component]
            samples = dataset.samples
            arrays["entity"][here] = samples.gather("entity", at)
            arrays["entity_series"][here] = samples.gather("series", at)
            arrays["entity_centre"][here] = samples.centre_slices(at)
            for name in _NAMED:
                arrays[f"entity_{name}"][here] = self._codes[component][name][samples.gather(name, at)]
            start = samples.gather("span_start", at).astype(np.int64) - samples.gather("text_start", at)
            arrays["entity_span"][here, 0] = start
            arrays["entity_span"][here, 1] = start + samples.gather("span_bytes", at)
            arrays["entity_confidence"][here] = samples.gather("confidence", at)

    def _codes_of(self, dataset: Any) -> dict[str, NDArray[np.int64]]:
        """Return for each column the number here of each of the dataset's own names."""
        if not isinstance(dataset, EntityDataset):
            return {}
        found = {}
        for name, field in _NAMED.items():
            known = {value: number for number, value in enumerate(getattr(self.names, field))}
            own = dataset.samples.vocabularies[name]
            found[name] = np.array([known[value] for value in own], np.int64)
        return found
