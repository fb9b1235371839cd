"""What ``shardflow plan`` says of a blend: its components, and how often each is drawn from."""

from __future__ import annotations

from typing import Any

from pipelines.surface import show_table
from shardflow.epochs.blend import Blend
from shardflow.loading.selection import Selection

__all__ = ["component_numbers", "show_components", "title_of"]


def title_of(selection: Selection) -> str:
    """Name the samples in a line."""
    if isinstance(selection.population, Blend):
        return f"blend {selection.population.digest} of {len(selection.datasets)} components"
    subset = "" if selection.subset is None else f", subset {selection.subset[:12]}"
    return f"split {selection.split} of {selection.datasets[0].dataset_id}{subset}"


def component_numbers(selection: Selection, epoch: int) -> list[dict[str, Any]]:
    """Return the numbers of each component in an epoch; none without a blend.

    Whole passes are those that begin and end in the epoch; what it finishes or begins of others is counted in
    samples.
    """
    if not isinstance(selection.population, Blend):
        return []
    numbers = []
    for place, component in enumerate(selection.population.components, start=1):
        size, start = len(component.rows), epoch * component.count
        stop = start + component.count
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
                "num_draws": component.count,
                "share": component.count / selection.population.num_draws,
                "repeat": component.count / size,
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
