"""Radiographs of the chest: computed (CR) and digital (DX), views, polarity, large matrices."""

from __future__ import annotations

from shardflow.synthetic.draft import Block, Recipe, StudyDraft
from shardflow.synthetic.planes import CORONAL, SAGITTAL, Grid, stack_of_planes
from shardflow.synthetic.study import Encoding
from shardflow.synthetic.vectors import Vector

__all__ = ["add_radiographs"]

_MIDDLE: Vector = (0.0, 0.0, 100.0)
_LONG_MM = 430.0
_NOISE_SHARE = 0.006


def add_radiographs(draft: StudyDraft) -> None:
    """Add one or two views, in one series or in one each."""
    draws = draft.draws.at("radiograph")
    views = draws.weighted(((("PA", "LL"), 60), (("AP",), 25), (("PA",), 15)))
    together = draws.chance(40)
    bits = draws.choice((10, 12, 12) if draft.visit.modality == "CR" else (12, 14, 14, 16))
    inverse = draws.chance(50 if draft.visit.modality == "CR" else 25)
    encoding = Encoding(
        bits_stored=bits,
        slope="1" if draws.chance(60) else None,
        photometric="MONOCHROME1" if inverse else "MONOCHROME2",
    )
    blocks = [_view(draft, view, lying=draws.chance(20)) for view in views]
    for group in [blocks] if together else [[block] for block in blocks]:
        names = " and ".join(view for block in group for view in block.views)
        middle = 1 << (bits - 1)
        recipe = Recipe(
            kind="projection",
            name=f"chest {names}",
            image_type=("ORIGINAL", "PRIMARY"),
            encoding=encoding,
            noise=_NOISE_SHARE,
            attributes={
                "KVP": draws.choice(("110", "125")),
                "WindowCenter": str(middle),
                "WindowWidth": str(2 * middle),
            },
        )
        draft.add(recipe, group)


def _view(draft: StudyDraft, view: str, *, lying: bool) -> Block:
    long, short = 4 * draft.options.size, 4 * draft.options.size * 7 // 17 * 2
    pixel = round(_LONG_MM / long, 6)
    rows, columns = (short, long) if lying else (long, short)
    grid = Grid(rows=rows, columns=columns, row_spacing_mm=pixel, column_spacing_mm=pixel)
    orientation = SAGITTAL if view == "LL" else CORONAL
    return Block(planes=stack_of_planes(grid, _MIDDLE, orientation, [0.0]), contrast="native", views=[view])
