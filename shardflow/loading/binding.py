"""Binding of fields and of a transform to the samples of a loader."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardflow.errors import ConfigError
from shardflow.fields.field import Field, FieldContext, Slots
from shardflow.fields.registry import FieldSet, default_fields
from shardflow.fields.transforming import SampleTransform
from shardflow.fields.types.findings import FINDING_ENTRIES
from shardflow.fields.types.pixels import BoundPixels
from shardflow.fields.units import UnitDataset
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.loading.rows.selection import Selection, text_lengths
from shardflow.loading.rows.windows import check_window_fields, select_parts
from shardflow.sampling import BatchSpec, CostRule
from shardflow.sampling.budget import COUNTED_TOKENS, DELIVERED_PICTURES
from shardflow.sampling.layout import rows_digest, select_rows
from shardflow.telemetry import StageCounters

_LOGGER = logging.getLogger(__name__)
_BLOCK_ROWS: Final = 1 << 20
_NUM_EXAMPLES: Final = 64
"""Samples among which that of a synthetic one is chosen."""


def bind_fields(
    selection: Selection, fields: Mapping[str, Field] | None, counters: StageCounters
) -> tuple[Selection, FieldSet]:
    """Bind fields to the samples of a selection, without those that a field drops, split where one splits.

    Args:
        selection: The samples.
        fields: What a batch holds; None stands for `default_fields`.
        counters: Gets the stages of decoding.

    Returns:
        The samples that are left, and the bound fields.

    Raises:
        ConfigError: A field does not fit the datasets, or no sample is left.
    """
    selection = select_parts(selection, fields)
    populations = [selection.population_of(place) for place in range(len(selection.datasets))]
    context = FieldContext(selection, populations, counters)
    if fields is None:
        fields = default_fields(context)
    check_window_fields(selection, fields)
    bound = FieldSet(fields, context)
    taken = [name for name in FINDING_ENTRIES if name in bound.specs] if selection.has_entities else []
    if taken:
        raise ConfigError(
            f"The field name {taken[0]!r} is reserved (batches of findings have such an entry); choose "
            "another one."
        )
    dropped = [one for one in bound.bound if bound.specs[one.name].missing == "drop"]
    if not dropped:
        return selection, bound
    kept = [each.copy() for each in populations]
    for one in dropped:
        for place, has_content in enumerate(one.has_content or ()):
            kept[place] &= has_content
    if all((one == other).all() for one, other in zip(kept, populations, strict=True)):
        return selection, bound
    if selection.repeats:
        names = ", ".join(repr(one.name) for one in dropped)
        raise ConfigError(
            f"missing='drop' of {names} needs a single dataset; for a blend, select the samples in its file, "
            "or write missing='pad'."
        )
    rows = select_rows(range(len(kept[0])), lambda start, stop: kept[0][start:stop])
    if not rows:
        raise ConfigError("No sample has all fields with missing='drop'; write missing='pad' for some.")
    num_dropped = int(populations[0].sum()) - len(rows)
    _LOGGER.info("left out %d samples that lack a field with missing='drop'", num_dropped)
    left = replace(selection, population=rows, subset=rows_digest(rows))
    return left, FieldSet(fields, FieldContext(left, kept, counters))


def charge_for_delivered(
    selection: Selection, fields: FieldSet, spec: BatchSpec
) -> tuple[Selection, BatchSpec]:
    """Let a token budget charge for what fields deliver, where it says so or they read earlier studies.

    One that charges for more stored slices than pictures are delivered is logged, with both numbers.

    Args:
        selection: The samples.
        fields: What they hold.
        spec: How steps are formed.

    Returns:
        The samples with what is delivered of each, and the batch spec, whose cost rule counts it.

    Raises:
        ConfigError: No table knows how much a field delivers.
    """
    packed = [one.name for one in fields.bound if one.is_packed]
    if packed and (spec.budget is None or spec.budget.padded):
        raise ConfigError(
            f"The field {packed[0]!r} is packed, which needs a token budget for packed sequences; write "
            "BatchSpec(budget=sf.TokenBudget(max_tokens=..., max_samples=..., padded=False), lanes=1, ...)."
        )
    if spec.budget is None:
        return selection, spec
    counted = {one.name: found for one in fields.bound if (found := one.token_counts(spec.budget))}
    if counted:
        return _charge_for_counted(selection, fields, spec, counted)
    for one in fields.bound:
        if one.is_uncounted:
            raise ConfigError(
                f"A token budget cannot charge for the field {one.name!r}, of unknown length; write "
                "BatchSpec.simple(...) without a budget."
            )
    rule = spec.budget.cost
    if not (rule.counts_delivered or fields.of_previous):
        _warn_of_stored(selection, fields, rule)
        return selection, spec
    if not rule.counts_delivered:
        rule = rule.of_delivered()
    counts_text = bool(rule.text_tokens_per_1000_bytes)
    delivered = tuple(
        fields.costs(place, np.asarray(text_lengths(dataset, rule)) if counts_text else None)
        for place, dataset in enumerate(selection.datasets)
    )
    rule = replace(rule, delivered=_digest_of(delivered))
    spec = replace(spec, budget=replace(spec.budget, cost=rule))
    return replace(selection, delivered=delivered), spec


def _charge_for_counted(
    selection: Selection, fields: FieldSet, spec: BatchSpec, counted: Mapping[str, list[NDArray[np.int64]]]
) -> tuple[Selection, BatchSpec]:
    """Let a token budget charge for the exact tokens of a field; see `charge_for_delivered`."""
    assert spec.budget is not None  # noqa: S101 - counted for it
    budget, (name, *others) = spec.budget, counted
    if others:
        raise ConfigError(
            f"A token budget counts the conversations of one field, got {name!r} and {others[0]!r}; leave "
            "out one of them, or the budget."
        )
    if not (budget.padded or any(one.is_packed for one in fields.bound if one.name == name)):
        raise ConfigError(
            f"The budget has padded=False, and the field {name!r} is not packed; write packed=True for it, "
            "or leave out padded=False."
        )
    rule, default = budget.cost, CostRule()
    taken = {"quadratic_tokens", "counts_delivered", "counted"}
    given = [one.name for one in fields_of(rule) if getattr(rule, one.name) != getattr(default, one.name)]
    if {*given} - taken:
        raise ConfigError(
            f"Conversations cost the tokens that were counted, so {min({*given} - taken)} has no effect; "
            "leave it out of the cost rule."
        )
    if budget.over_budget == "truncate":
        raise ConfigError(
            'No conversation is cut: leave out over_budget; long = "skip" of the field leaves long ones out.'
        )
    if not rule.counted:  # otherwise another process has done so
        for one in fields.bound:
            one.check_counts()
    delivered = tuple({COUNTED_TOKENS: lengths.astype(np.uint32)} for lengths in counted[name])
    rule = CostRule(counted=_digest_of(delivered), quadratic_tokens=rule.quadratic_tokens)
    budget = replace(budget, cost=rule, over_budget="skip", fit="neighbors" if budget.padded else "best")
    return replace(selection, delivered=delivered), replace(spec, budget=budget)


def _warn_of_stored(selection: Selection, fields: FieldSet, rule: CostRule) -> None:
    """Log once if a rule charges for more stored slices than fields deliver, as far as tables know."""
    tokens = rule.image_tokens_per_slice
    # A region is one picture, whatever its depth: nothing that stored slices could be compared with.
    has_others = any(one.has_pictures and not isinstance(one, BoundPixels) for one in fields.bound)
    if not (tokens and rule.max_slices) or has_others:
        return
    of_images = replace(rule, text_tokens_per_1000_bytes=0, tokenizer="", tokens_per_sample=1)
    stored = delivered = 0
    for place, dataset in enumerate(selection.datasets):
        used = selection.population_of(place)
        try:
            pictures = fields.costs(place, None)[DELIVERED_PICTURES]
        except ConfigError:  # sizes are drawn
            return
        columns = {name: np.asarray(dataset.samples.column(name))[used] for name in of_images.used_facts()}
        stored += int((of_images.lengths(columns) - 1).sum()) // tokens
        delivered += int(pictures[used].sum())
    if stored > delivered:
        _LOGGER.warning(
            "the token budget charges for %d stored slices or tiles, and the fields deliver %d; to charge "
            "for these write CostRule(counts_delivered=True, image_tokens_per_slice=%d) without max_slices, "
            "in a training file batch.counts_delivered = true",
            stored,
            delivered,
            tokens,
        )


def _digest_of(delivered: Sequence[Mapping[str, NDArray[Any]]]) -> str:
    """Return the SHA-256 of columns, block by block."""
    digest = hashlib.sha256()
    for columns in delivered:
        for name, column in sorted(columns.items()):
            digest.update(f"{name} {len(column)} ".encode())
            for start in range(0, len(column), _BLOCK_ROWS):
                digest.update(np.ascontiguousarray(column[start : start + _BLOCK_ROWS], "<u4").data)
    return digest.hexdigest()


def field_meanings(selection: Selection, fields: FieldSet) -> dict[str, str]:
    """Return a digest of what each entry of a batch means: its columns, classes and dtypes, by its name.

    It is equal for versions of a dataset whose samples differ, but not where a category has another class or
    pixels need another dtype.
    """
    dtypes: dict[str, str] = {
        spec.name: spec.dtype.str for spec in fields.array_specs(_example_slots(selection, fields))
    }
    found = {}
    for entry in fields.entries:
        name = entry["name"]
        own = {
            one: dtype
            for one, dtype in dtypes.items()
            if one == name or one.startswith((f"{name}_", f"{name}."))
        }
        found[name] = sha256_hex(canonical_json({"entry": entry, "dtypes": own}))[:16]
    return found


def bind_transform(
    selection: Selection, fields: FieldSet, transform: Any, collate: Any, outputs: Any
) -> SampleTransform:
    """Bind a transform to the samples that it gets; see `SampleTransform`.

    Args:
        selection: The samples.
        fields: What they hold.
        transform: A callable, its name, or a list of them; None for none.
        collate: A callable of the samples of a micro-batch; None for none.
        outputs: Declared contract; None to call the transform with a synthetic sample.

    Raises:
        ConfigError: The transform cannot be used.
    """
    for one in fields.bound:
        if one.is_packed:
            raise ConfigError(
                f"A transform gets samples, and the field {one.name!r} packs them into one sequence; leave "
                "out packed and padded=False, or the transform."
            )
    slots = _example_slots(selection, fields)
    _, varies = fields.example(slots, is_other=False)
    try:
        catalog = FieldContext(selection, [], StageCounters()).catalog
    except ConfigError:  # without a series table there are no facts
        tables, digests = None, []
    else:
        tables, digests = catalog.tables, catalog.digests

    def facts(component: int, row: int) -> list[dict[str, Any]]:
        if tables is None:
            return []
        dataset, at = selection.datasets[component], np.array([row], np.int64)
        study = int(dataset.study_rows(at)[0])
        found = tables[component].facts_of(study)
        if not isinstance(dataset, UnitDataset):
            return found
        first = int(tables[component].array("first_series")[study])
        return [found[int(dataset.samples.series_rows(at)[0]) - first]]

    return SampleTransform(
        transform,
        collate,
        outputs,
        specs=fields.specs,
        example=lambda is_other: fields.example(slots, is_other=is_other)[0],
        varies=varies,
        facts=facts,
        digests=digests,
    )


def batch_of_samples(batch: BatchSpec, num_crops: int) -> BatchSpec:
    """Return the batch spec of the plan, whose micro-batches hold samples: B counts their crops.

    Raises:
        ConfigError: B is no multiple of the crops of a sample, or a budget.
    """
    if num_crops == 1:
        return batch
    if batch.budget is not None:
        raise ConfigError(
            f"num_samples={num_crops} fills slots of one number in every micro-batch, and a token budget "
            f"none; "
            "write BatchSpec.simple(...) without a budget."
        )
    if batch.micro_batch_size % num_crops:
        raise ConfigError(
            f"micro_batch_size={batch.micro_batch_size} counts crops and is no multiple of num_samples="
            f"{num_crops}; write micro_batch_size={-(-batch.micro_batch_size // num_crops) * num_crops}."
        )
    return replace(batch, micro_batch_size=batch.micro_batch_size // num_crops)


def _example_slots(selection: Selection, fields: FieldSet) -> Slots:
    """Return one slot, of a sample that has content for as many fields as possible."""
    nothing = np.zeros(1, np.int64)
    best, most = Slots(nothing, nothing, nothing, nothing), -1
    known = [one.has_content for one in fields.bound]
    for component, base in enumerate(selection.row_bases().tolist()):
        used = np.flatnonzero(selection.population_of(component))
        for row in used[:: max(1, len(used) // _NUM_EXAMPLES)].tolist():
            num_fields = sum(bool(has[component][row]) for has in known if has is not None)
            if num_fields > most:
                rows, most = np.array([base + row], np.int64), num_fields
                best = Slots(
                    rows, selection.study_rows(rows), np.array([component]), selection.table_rows(rows)
                )
    return best
