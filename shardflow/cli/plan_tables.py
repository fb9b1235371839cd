"""Tables of ``shardflow plan``: the content of fields, and the draws of components and classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shardflow.cli.common import show_lines, show_table
from shardflow.logs import counted

if TYPE_CHECKING:
    from shardflow.fields.registry import FieldSet
    from shardflow.loading.rows.selection import Selection

_MOST_CLASSES: Final = 30
_SHOWN_ERROR: Final = 1e-6


def component_numbers(selection: Selection, epoch: int) -> list[dict[str, Any]]:
    """Return the numbers of each component in an epoch; none without a blend.

    Whole passes begin and end in the epoch; partial ones are counted in samples.
    """
    from shardflow.sampling.blend import Blend

    if not isinstance(selection.population, Blend):
        return []
    numbers = []
    for place, component in enumerate(selection.population.components, start=1):
        size, start, stop = len(component.rows), component.given(epoch), component.given(epoch + 1)
        first_whole, last_whole = -(-start // size), stop // size
        finished = min(first_whole * size, stop) - start
        begun = max(stop - max(last_whole, first_whole) * size, 0)
        numbers.append(
            {
                "component": place,
                "dataset_id": component.dataset_id,
                "manifest_version": component.manifest_version,
                "split": component.split,
                "subset": component.subset,
                "num_samples": size,
                "num_draws": stop - start,
                "share": (stop - start) / selection.population.num_draws,
                "repeat": (stop - start) / size,
                "num_whole_passes": max(0, last_whole - first_whole),
                "num_finished": finished,
                "num_begun": begun,
            }
        )
    return numbers


def show_components(selection: Selection, epoch: int) -> None:
    """Show a row for each component of a blend."""
    rows = [
        (
            f"{found['component']}  {found['dataset_id'][:12]}  {found['split']}"
            + ("" if found["subset"] is None else f", subset {found['subset'][:12]}"),
            f"{found['num_samples']:,}",
            f"{found['num_draws']:,}",
            f"{found['share']:.1%}",
            f"{found['repeat']:.3g}",
            f"{found['num_whole_passes']:,}",
            f"{found['num_finished']:,}",
            f"{found['num_begun']:,}",
        )
        for found in component_numbers(selection, epoch)
    ]
    if rows:
        heads = ["", "samples", "draws", "share", "repeat", "whole passes", "rest of one", "start of one"]
        show_table("components", heads, rows)
    show_classes(selection, epoch)


def class_numbers(selection: Selection, epoch: int) -> list[dict[str, Any]]:
    """Return the realized draws of each class of weights in an epoch; none without weights."""
    from shardflow.sampling.blend import Mixture

    mixture = selection.population
    if not isinstance(mixture, Mixture):
        return []
    numbers = []
    columns = (mixture.strata, mixture.sizes().tolist(), mixture.counts(epoch).tolist())
    for (component, code), size, count in zip(*columns, strict=True):
        classes = mixture.components[component].classes
        if classes is not None:
            numbers.append(
                {
                    "component": component + 1,
                    "class": classes.names[code],
                    "num_samples": size,
                    "num_draws": count,
                    "share": count / mixture.num_draws,
                    "draws_per_sample": count / size,
                }
            )
    return numbers


def show_classes(selection: Selection, epoch: int) -> None:
    """Show a row for each class of weights; of many, those with the most draws."""
    from shardflow.sampling.blend import Mixture

    mixture = selection.population
    found = class_numbers(selection, epoch)
    if not found or not isinstance(mixture, Mixture):
        return
    most = sorted(found, key=lambda one: -one["num_draws"])[:_MOST_CLASSES]
    rows = [
        (
            f"{one['component']}  {one['class']}" if selection.is_blend else one["class"],
            f"{one['num_samples']:,}",
            f"{one['num_draws']:,}",
            f"{one['share']:.1%}",
            f"{one['draws_per_sample']:.3g}",
        )
        for one in most
    ]
    show_table(f"classes of epoch {epoch}", ["", "samples", "draws", "share", "draws a sample"], rows)
    lines = [f"and {len(found) - len(most):,} classes of fewer draws"] if len(found) > len(most) else []
    errors = [one.classes.error for one in mixture.components if one.classes is not None]
    if max(errors, default=0.0) > _SHOWN_ERROR:
        lines.append(f"weights are rounded to {len(found):,} values: at most {max(errors):.2%} off")
    show_lines(lines)


def title_of(selection: Selection) -> str:
    """Name the samples in a line."""
    from shardflow.sampling.blend import Blend

    if isinstance(selection.population, Blend):
        return f"blend {selection.population.digest} of {len(selection.datasets)} components"
    subset = "" if selection.subset is None else f", subset {selection.subset[:12]}"
    missing = selection.num_missing
    left_out = f"; {counted(missing, 'sample')} left out because a value is missing" if missing else ""
    return f"split {selection.split} of {selection.datasets[0].dataset_id}{subset}{left_out}"


def fields_report(
    selection: Selection, left: Selection, bound: FieldSet, transform: str | None = None
) -> dict[str, Any]:
    """Count what fields deliver of some samples, from tables alone.

    Args:
        selection: The samples.
        left: Those that no field leaves out, see `bind_fields`.
        bound: The fields.
        transform: ``package.module:function`` to time on a few samples, which are read for it.

    Returns:
        ``samples``: all, and those ``left_out`` by fields with ``missing = "drop"``; ``fields``: for each its
        type, the samples without content (None if no table knows), and the images by role that it
        ``delivered`` and ``left_out``; ``images``: all that are stored, and the ``reachable`` ones, by role
        (None if there is no series table); ``transform``: see `time_transform`, None without one.

    Raises:
        ConfigError: The transform does not fit the samples.
        SampleError: The transform fails on a sample.
    """
    import numpy as np

    populations = [selection.population_of(place) for place in range(len(selection.datasets))]
    kept = [left.population_of(place) for place in range(len(left.datasets))]
    num_samples, num_kept = (sum(int(np.count_nonzero(one)) for one in each) for each in (populations, kept))
    found = {}
    for one in bound.bound:
        coverage, has_content = one.coverage, one.has_content
        missing = None
        if has_content is not None:
            pairs = zip(populations, has_content, strict=True)
            missing = sum(int(np.count_nonzero(used & ~has)) for used, has in pairs)
        found[one.name] = {
            "type": bound.specs[one.name].type_name,
            "missing_is": bound.specs[one.name].missing,
            "missing": missing,
            "delivered": {} if coverage is None else _ranked(coverage.delivered),
            "left_out": {} if coverage is None else _ranked(coverage.left_out),
        }
    reach = bound.reach(populations)
    images = None
    if reach is not None:
        rest = {role: count - reach.reachable.get(role, 0) for role, count in reach.stored.items()}
        images = {
            "stored": _ranked(reach.stored),
            "reachable": _ranked(reach.reachable),
            "not_in_any_field": _ranked({role: count for role, count in rest.items() if count}),
            "share": sum(reach.reachable.values()) / max(1, sum(reach.stored.values())),
        }
    samples = {"all": num_samples, "left_out": num_samples - num_kept}
    timed = None
    if transform is not None:
        from shardflow.cli.bench_measure import time_transform

        timed = time_transform(left, bound, transform)
    return {"samples": samples, "fields": found, "images": images, "transform": timed}


def _ranked(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts in descending order."""
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def show_fields_report(selection: Selection, report: Mapping[str, Any]) -> None:
    """Show what fields deliver, see `fields_report`."""
    samples, images = report["samples"], report["images"]
    dropped = f", {samples['left_out']:,} of them left out by missing='drop'" if samples["left_out"] else ""
    show_lines([title_of(selection), f"{samples['all']:,} samples{dropped}"])
    show_table(
        "fields",
        ["", "type", "samples without", "images delivered", "images left out"],
        [
            (
                name,
                one["type"],
                "not known" if one["missing"] is None else f"{one['missing']:,}",
                _counts(one["delivered"]),
                _counts(one["left_out"]),
            )
            for name, one in report["fields"].items()
        ],
    )
    if (timed := report["transform"]) is not None:
        taken = f"{timed['ms_per_sample']:,.3g} ms a sample (median of {counted(timed['samples'], 'sample')})"
        show_lines(
            ["", f"transform {timed['name']}: {taken}, holds the GIL for {timed['gil_share']:.0%} of it"]
        )
    if images is None:
        return
    stored, reachable = (sum(images[name].values()) for name in ("stored", "reachable"))
    lines = ["", f"images reachable: {reachable:,} of {stored:,} ({images['share']:.1%})"]
    if images["not_in_any_field"]:
        lines.append(f"not in any field: {_counts(images['not_in_any_field'])}")
    show_lines(lines)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {role}" for role, count in counts.items()) or "-"
