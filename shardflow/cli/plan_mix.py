"""Tables of ``shardflow plan``: the draws of the components of a blend, and of classes of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shardflow.cli.common import show_lines, show_table

if TYPE_CHECKING:
    from shardflow.loading.selection import Selection

_MOST_CLASSES: Final = 30
_SHOWN_ERROR: Final = 1e-6


def component_numbers(selection: Selection, epoch: int) -> list[dict[str, Any]]:
    """Return the numbers of each component in an epoch; none without a blend.

    Whole passes are those that begin and end in the epoch; what it finishes or begins of others is counted in
    samples.
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
    """Show a row for each class of weights, those of most draws if they are many."""
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
