"""Image planes: where pixels lie in the patient, and stacks of planes of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardflow.synthetic.vectors import IDENTITY, Frame, Vector, cross, move, rotate, round_vector

__all__ = ["AXIAL", "CORONAL", "SAGITTAL", "Grid", "Plane", "stack_of_planes"]


AXIAL: tuple[Vector, Vector] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))
CORONAL: tuple[Vector, Vector] = ((1.0, 0.0, 0.0), (0.0, 0.0, -1.0))
SAGITTAL: tuple[Vector, Vector] = ((0.0, 1.0, 0.0), (0.0, 0.0, -1.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Pixels of a plane."""

    rows: int
    columns: int
    row_spacing_mm: float
    """Between the centres of neighbouring rows: the first value of Pixel Spacing."""
    column_spacing_mm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """One image plane, with the numbers as they are written to the file."""

    grid: Grid
    position: Vector
    """Centre of the first pixel, mm: (0020,0032) Image Position (Patient)."""
    row_direction: Vector
    """Along a row, column index growing: first half of (0020,0037) Image Orientation (Patient)."""
    column_direction: Vector
    """Down a column, row index growing."""

    @property
    def normal(self) -> Vector:
        """Cross product of row and column direction."""
        return cross(self.row_direction, self.column_direction)

    def moved(self, direction: Vector, distance_mm: float) -> Plane:
        """Return the plane further along a direction."""
        return Plane(
            grid=self.grid,
            position=move(self.position, direction, distance_mm),
            row_direction=self.row_direction,
            column_direction=self.column_direction,
        )


def stack_of_planes(
    grid: Grid,
    center: Vector,
    orientation: tuple[Vector, Vector],
    steps: Iterable[float],
    *,
    turn: Frame = IDENTITY,
    advance: Vector | None = None,
) -> list[Plane]:
    """Lay parallel planes around a point.

    Args:
        grid: Pixels of each.
        center: The middle of the stack, mm.
        orientation: Row and column direction before ``turn``.
        steps: Places of the planes along their normal from the centre, mm.
        turn: Rotation of the whole stack (oblique), or of the planes alone where ``advance`` is given.
        advance: Direction in which the planes follow each other; their normal by default. A gantry tilt is
            planes that are turned and still follow the table.
    """
    row_direction = rotate(turn, orientation[0])
    column_direction = rotate(turn, orientation[1])
    along = advance or cross(row_direction, column_direction)
    corner = move(center, row_direction, -grid.column_spacing_mm * (grid.columns - 1) / 2)
    corner = move(corner, column_direction, -grid.row_spacing_mm * (grid.rows - 1) / 2)
    return [
        Plane(
            grid=grid,
            position=round_vector(move(corner, along, step)),
            row_direction=row_direction,
            column_direction=column_direction,
        )
        for step in steps
    ]
