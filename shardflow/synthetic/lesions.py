"""Lesions: ellipsoids of known place, size and look that grow, shrink, appear and vanish between studies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardflow.synthetic.anatomy import Anatomy, Host
from shardflow.synthetic.draws import Draws
from shardflow.synthetic.geometry import Frame, Quadric, Vector, ellipsoid, move, rotation

Course = Literal["stable", "growing", "shrinking", "new", "resolved"]
_COURSES: tuple[tuple[Course, int], ...] = (
    ("stable", 40),
    ("growing", 25),
    ("shrinking", 12),
    ("new", 13),
    ("resolved", 10),
)
_MAX_GROWTH = 1.6
_ATTEMPTS = 400
_MARGIN_MM = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionKind:
    """A kind of lesion of an organ."""

    label: str
    organ: str
    min_mm: float
    max_mm: float
    """Longest diameter of the first study."""
    weight: int
    on_radiographs: bool = False


_KINDS = (
    LesionKind(label="pulmonary nodule", organ="lung", min_mm=5, max_mm=26, weight=6, on_radiographs=True),
    LesionKind(label="calcified granuloma", organ="lung", min_mm=4, max_mm=12, weight=2, on_radiographs=True),
    LesionKind(label="ground-glass nodule", organ="lung", min_mm=6, max_mm=22, weight=2),
    LesionKind(label="hepatic cyst", organ="liver", min_mm=8, max_mm=38, weight=3),
    LesionKind(label="hepatic hemangioma", organ="liver", min_mm=9, max_mm=34, weight=2),
    LesionKind(label="hepatic metastasis", organ="liver", min_mm=8, max_mm=36, weight=3),
    LesionKind(label="renal cyst", organ="kidney", min_mm=7, max_mm=24, weight=3),
    LesionKind(label="renal calculus", organ="kidney", min_mm=3, max_mm=9, weight=2),
    LesionKind(label="splenic cyst", organ="spleen", min_mm=8, max_mm=26, weight=1),
    LesionKind(label="sclerotic bone lesion", organ="vertebra", min_mm=6, max_mm=15, weight=2),
    LesionKind(label="lytic bone lesion", organ="vertebra", min_mm=6, max_mm=15, weight=2),
    LesionKind(label="brain metastasis", organ="brain", min_mm=6, max_mm=26, weight=3),
    LesionKind(label="intracranial hemorrhage", organ="brain", min_mm=8, max_mm=30, weight=2),
    LesionKind(label="lacunar infarct", organ="brain", min_mm=4, max_mm=12, weight=2),
    LesionKind(label="meningioma", organ="brain", min_mm=9, max_mm=28, weight=1),
    LesionKind(label="white matter lesion", organ="brain", min_mm=4, max_mm=10, weight=2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesion:
    """One lesion as it is at the time of one study, in the body's own coordinates."""

    lesion_id: str
    """The same in every study of the patient."""
    label: str
    organ: str
    side: str
    level: str
    """Such as ``T9`` for a vertebra; else empty."""
    host_value: Vector
    """Place within the organ: the center's offset from the organ's, in the organ's semi-axes."""
    bounds: Quadric
    semi_axes_mm: Vector
    course: Course
    prior_mm: float | None
    """Longest diameter in the patient's previous study; None if it was absent."""

    @property
    def diameter_mm(self) -> float:
        """Longest diameter."""
        return 2 * max(self.semi_axes_mm)


def kinds_of(organs: Sequence[str], *, radiograph: bool) -> tuple[LesionKind, ...]:
    """Return the kinds that can grow in some organs (and are visible on a radiograph)."""
    return tuple(kind for kind in _KINDS if kind.organ in organs and (kind.on_radiographs or not radiograph))


def place_lesions(
    draws: Draws,
    anatomy: Anatomy,
    kinds: Sequence[LesionKind],
    *,
    count: int,
    window_mm: tuple[float, float],
    visit: int,
) -> tuple[Lesion, ...]:
    """Return a patient's lesions at the time of one of the patient's studies.

    The place of a lesion depends on the patient alone, so the same lesion appears again in the next study.

    Args:
        draws: The patient's stream for lesions.
        anatomy: The body to grow in.
        kinds: Kinds of lesions.
        count: Number of attempts; a lesion that does not fit is left out.
        window_mm: Lowest and highest z of the centers.
        visit: Number of the study of this patient, from 0.

    Returns:
        The lesions that are present at this visit, none touching another one or the edge of its organ.
    """
    placed: list[tuple[Vector, float]] = []
    present: list[Lesion] = []
    for number in range(count):
        own = draws.at("lesion", number)
        seeded = _seed(own, anatomy, kinds, window_mm, placed)
        if seeded is None:
            continue
        kind, host, center, semi_axes, frame = seeded
        placed.append((center, max(semi_axes) * _MAX_GROWTH))
        course = own.at("course").weighted(_COURSES)
        size, before = _factor(course, visit), _factor(course, visit - 1) if visit else None
        if size is None:
            continue
        x, y, z = (round(axis * size, 2) for axis in semi_axes)
        present.append(
            Lesion(
                lesion_id=f"SYN-L{number + 1:02d}",
                label=kind.label,
                organ=kind.organ,
                side=host.side,
                level=host.name,
                host_value=_place_in(host, center),
                bounds=ellipsoid(center, (x, y, z), frame),
                semi_axes_mm=(x, y, z),
                course=course,
                prior_mm=None if before is None else 2 * max(semi_axes) * before,
            )
        )
    return tuple(present)


def _factor(course: Course, visit: int) -> float | None:
    """Return the size at a visit relative to the seeded one; None if the lesion is absent."""
    if course == "new":
        return None if visit == 0 else 1.0
    if course == "resolved":
        return 1.0 if visit == 0 else None
    step = {"stable": 1.0, "growing": 1.25, "shrinking": 0.8}[course]
    return 1.0 if visit == 0 else step if visit == 1 else step * step


def _seed(
    draws: Draws,
    anatomy: Anatomy,
    kinds: Sequence[LesionKind],
    window_mm: tuple[float, float],
    placed: Sequence[tuple[Vector, float]],
) -> tuple[LesionKind, Host, Vector, Vector, Frame] | None:
    for _ in range(_ATTEMPTS):
        kind = draws.weighted([(kind, kind.weight) for kind in kinds])
        hosts = [host for host in anatomy.hosts if host.organ == kind.organ]
        host = draws.choice(hosts)
        half = draws.real(kind.min_mm, kind.max_mm) / 2
        semi_axes = (half, half * draws.real(0.7, 1), half * draws.real(0.65, 1))
        frame = rotation(6, draws.integer(-3, 3), draws.integer(-3, 3), draws.integer(-3, 3))
        reach = _reach(host.bounds)
        x, y, z = (
            round(middle + draws.real(-0.9, 0.9) * size, 2)
            for middle, size in zip(host.bounds.center, reach, strict=True)
        )
        center = (x, y, z)
        if not window_mm[0] <= z <= window_mm[1]:
            continue
        if _fits(anatomy, host, center, half * _MAX_GROWTH) and _is_apart(center, half * _MAX_GROWTH, placed):
            return kind, host, center, semi_axes, frame
    return None


def _reach(bounds: Quadric) -> Vector:
    """Return half extents of an ellipsoid along x, y, z, mm: exact if aligned, else slightly too small."""
    xx, _, _, yy, _, zz = bounds.matrix
    return (1 / math.sqrt(xx), 1 / math.sqrt(yy), 1 / math.sqrt(zz))


def _fits(anatomy: Anatomy, host: Host, center: Vector, radius_mm: float) -> bool:
    """Return whether a ball is inside the organ and outside everything painted over it."""
    if math.sqrt(host.bounds.value(center)) + radius_mm / min(_reach(host.bounds)) > 0.97:
        return False
    points = [center] + [
        move(center, axis, sign * (radius_mm + _MARGIN_MM))
        for axis in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
        for sign in (-1.0, 1.0)
    ]
    own = anatomy.solids[host.last_solid]
    if own.hollow is not None and any(own.hollow.value(point) <= 1 for point in points):
        return False
    over = [solid for solid in anatomy.solids[host.last_solid + 1 :] if _is_obstacle(host, solid.tissue)]
    return not any(solid.contains(point) for solid in over for point in points)


def _is_obstacle(host: Host, tissue: str) -> bool:
    """Return whether a lesion must avoid a tissue; it may touch lung vessels and folds of the brain."""
    ignored = {"lung": {"blood"}, "brain": {"brain-gray", "brain-white"}, "liver": {"blood"}}
    return tissue not in ignored.get(host.organ, set())


def _is_apart(center: Vector, radius_mm: float, placed: Sequence[tuple[Vector, float]]) -> bool:
    return all(
        sum((a - b) ** 2 for a, b in zip(center, other, strict=True)) > (radius_mm + size + _MARGIN_MM) ** 2
        for other, size in placed
    )


def _place_in(host: Host, center: Vector) -> Vector:
    reach = _reach(host.bounds)
    x, y, z = (
        round((value - middle) / size, 3)
        for value, middle, size in zip(center, host.bounds.center, reach, strict=True)
    )
    return (x, y, z)
