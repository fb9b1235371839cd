"""A patient's body: solids in painting order, and the organs that lesions grow in."""

from __future__ import annotations

from dataclasses import dataclass

from shardflow.synthetic.solids import Quadric, Solid
from shardflow.synthetic.vectors import Vector

__all__ = ["Anatomy", "Body", "Host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """An organ that lesions grow in."""

    organ: str
    """Such as ``liver``; `lesions` knows what grows there."""
    side: str
    """``left``, ``right`` or empty."""
    bounds: Quadric
    """The organ as one ellipsoid."""
    last_solid: int
    """Index of the organ in the painting order: what is painted later lies before it."""
    name: str = ""
    """Such as ``T9``; empty where organ and side say it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """A body. Later solids replace earlier ones where they overlap."""

    solids: tuple[Solid, ...]
    hosts: tuple[Host, ...]
    half_width_mm: float
    """Widest extent of the body from the middle, along x and along y."""
    half_depth_mm: float


class Body:
    """Collects solids and hosts, and scales them to the patient's size."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._solids: list[Solid] = []
        self._hosts: list[Host] = []

    def at(self, x: float, y: float, z: float) -> Vector:
        """Scale a point or a size given for a patient of middle size."""
        return (x * self.scale, y * self.scale, z * self.scale)

    def add(self, tissue: str, *parts: Quadric, parent: str, hollow: Quadric | None = None) -> Quadric:
        """Paint a solid over what is there; returns its first part."""
        self._solids.append(Solid(tissue=tissue, parts=parts, parent=parent, hollow=hollow))
        return parts[0]

    def host(self, organ: str, bounds: Quadric, *, side: str = "", name: str = "") -> None:
        """Let lesions grow in the organ painted last."""
        self._hosts.append(
            Host(organ=organ, side=side, bounds=bounds, last_solid=len(self._solids) - 1, name=name)
        )

    def finish(self, half_width_mm: float, half_depth_mm: float) -> Anatomy:
        """Return the body."""
        return Anatomy(
            solids=tuple(self._solids),
            hosts=tuple(self._hosts),
            half_width_mm=half_width_mm * self.scale,
            half_depth_mm=half_depth_mm * self.scale,
        )
