"""Anatomy of a patient: solids in painting order, and the lesions that grow in organs.

The torso phantom is the chest and abdomen, diaphragm at z = 0, about 500 mm high; the head phantom is skull
and brain, the brain's center at the origin. Sizes are those of a middle-sized adult, scaled and varied by
keyed draws. x points to the patient's left. Lesions are ellipsoids of known place, size and look that grow,
shrink, appear and vanish between studies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.geometry import (
    IDENTITY,
    Frame,
    Quadric,
    Solid,
    Vector,
    cross,
    ellipsoid,
    move,
    pillar,
    rotation,
    slab,
    unit,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """An organ that lesions grow in."""

    organ: str
    """Such as ``liver``; `kinds_of` lists the kinds that grow there."""
    side: str
    """``left``, ``right`` or empty."""
    bounds: Quadric
    """The organ as a single ellipsoid."""
    last_solid: int
    """Index of the organ in the painting order; later solids cover it."""
    name: str = ""
    """Such as ``T9``; empty if organ and side identify it."""


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
        """Paint a solid over the previous ones; return its first part."""
        self._solids.append(Solid(tissue=tissue, parts=parts, parent=parent, hollow=hollow))
        return parts[0]

    def host(self, organ: str, bounds: Quadric, *, side: str = "", name: str = "") -> None:
        """Register the organ painted last as a host of lesions."""
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


def build_head(draws: Draws, *, scale: float) -> Anatomy:
    """Build the head of one patient."""
    body = Body(scale)
    at = body.at
    body.add("muscle", *_upright(body, (0, 26, -195), (56, 60, 92)), parent="air")
    body.add("spongy-bone", *_upright(body, (0, 34, -195), (15, 13, 90)), parent="muscle")
    # The head rest, which projections leave out.
    body.add(
        "table",
        ellipsoid(at(0, 6, 0), (96 * scale, 116 * scale, math.inf)),
        slab(at(0, 96, 0), IDENTITY[1], 60 * scale),
        parent="air",
        hollow=ellipsoid(at(0, 4, 0), (92 * scale, 111 * scale, math.inf)),
    )
    body.add("skin", ellipsoid(at(0, 0, -2), at(80, 101, 112)), parent="air")
    body.add("fat", ellipsoid(at(0, 0, -2), at(78, 99, 110)), parent="skin")
    body.add("muscle", ellipsoid(at(0, -62, -78), at(52, 34, 50)), parent="fat")
    body.add("cortical-bone", ellipsoid(at(0, 0, 0), at(75, 95, 106)), parent="fat")
    body.add("spongy-bone", ellipsoid(at(0, 0, 0), at(72.5, 92.5, 103.5)), parent="cortical-bone")
    body.add("cortical-bone", ellipsoid(at(0, 0, 0), at(70.5, 90.5, 101.5)), parent="spongy-bone")
    body.add("csf", ellipsoid(at(0, 0, 0), at(68.5, 88.5, 99.5)), parent="cortical-bone")
    brain = ellipsoid(at(0, 0, 2), at(66.5, 86.5, 96))
    body.add("brain-gray", brain, parent="csf")
    _add_inner_brain(body, draws, brain)
    _add_base(body)
    return body.finish(82, 103)


def _add_inner_brain(body: Body, draws: Draws, brain: Quadric) -> None:
    at = body.at
    for side, x in (("right", -29.0), ("left", 29.0)):
        white = ellipsoid(at(x, 2, 12), at(26, 68, 60))
        body.add("brain-white", white, parent="brain-gray")
        body.host("brain", ellipsoid(at(x, 0, 14), at(31, 72, 66)), side=side)
        for turn in range(5):
            # Sulci: gray tongues into the white matter, so that the border is not one smooth line.
            y = -52 + 26.0 * turn + draws.real(-5, 5)
            tongue = ellipsoid(at(x * 1.8, y, 14), at(20, 5, 44), rotation(12, 0, 0, draws.integer(-2, 2)))
            body.add("brain-gray", tongue, brain, parent="brain-white")
    for x in (-1.0, 1.0):
        body.add(
            "csf",
            ellipsoid(at(9.5 * x, -8, 14), at(6, 30, 12), rotation(20, 0, 0, int(-x))),
            parent="brain-white",
        )
        body.add("brain-gray", ellipsoid(at(18 * x, -8, 6), at(7, 16, 11)), parent="brain-white")
        body.add("brain-gray", ellipsoid(at(11 * x, 13, 4), at(8, 12, 9)), parent="brain-white")
    body.add("csf", ellipsoid(at(0, 6, 0), at(2.2, 14, 12)), parent="brain-white")
    falx = ellipsoid(at(0, 0, 3), at(66, 88, 97))
    body.add(
        "meninges",
        falx,
        slab(at(0, 0, 0), IDENTITY[0], 1.1 * body.scale),
        parent="csf",
        hollow=ellipsoid(at(0, -4, -22), at(200, 62, 62)),
    )
    body.add("brain-gray", ellipsoid(at(0, 44, -52), at(48, 32, 26)), parent="csf")
    body.add("brain-white", ellipsoid(at(0, 42, -50), at(24, 18, 13)), parent="brain-gray")
    body.add("csf", ellipsoid(at(0, 26, -48), at(6, 5, 12)), parent="brain-white")
    body.add("brain-white", *_upright(body, (0, 12, -62), (13, 12, 32)), parent="csf")


def _add_base(body: Body) -> None:
    at = body.at
    for x in (-1.0, 1.0):
        body.add(
            "cortical-bone",
            ellipsoid(at(44 * x, 22, -58), at(28, 10, 11), rotation(10, 0, 0, int(2 * x))),
            parent="csf",
        )
        body.add("air", ellipsoid(at(58 * x, 26, -62), at(9, 10, 14)), parent="spongy-bone")
        body.add("fat", ellipsoid(at(31 * x, -76, -44), at(17, 25, 16)), parent="muscle")
        body.add("water", ellipsoid(at(31 * x, -84, -44), at(12, 12, 12)), parent="fat")
        body.add("air", ellipsoid(at(27 * x, -66, -78), at(15, 18, 18)), parent="muscle")
    body.add("cortical-bone", ellipsoid(at(0, -64, -74), at(12, 30, 30)), parent="muscle")
    body.add("air", ellipsoid(at(0, -66, -72), at(10, 28, 28)), parent="cortical-bone")
    body.add("cortical-bone", ellipsoid(at(0, -66, -72), at(1.4, 28, 28)), parent="air")
    body.add("air", ellipsoid(at(0, -82, -30), at(16, 7, 12)), parent="cortical-bone")


VERTEBRA_PITCH_MM = 31.0
FIRST_LUMBAR_Z_MM = -48.0
"""Center of L1; T12 lies one pitch above."""

_NUM_THORACIC, _NUM_LUMBAR = 12, 5
_NUM_RIBS = 12
_RIB_NORMAL: Vector = (0.0, -0.42, 0.9075241)
_VESSELS_PER_LUNG = 20


def build_torso(draws: Draws, *, scale: float, is_female: bool) -> Anatomy:
    """Build the torso of one patient."""
    body = Body(scale)
    belly = draws.real(0.94, 1.1)
    _add_walls(body, belly, is_female=is_female)
    _add_ribs(body)
    _add_spine(body)
    liver = ellipsoid(body.at(-60, -10, -34), body.at(80, 76, draws.real(70, 78)), rotation(14, 0, 2, 0))
    _add_chest(body, draws.at("chest"), liver)
    _add_abdomen(body, draws.at("abdomen"), liver)
    return body.finish(176 * belly, 124 * belly)


def _add_walls(body: Body, belly: float, *, is_female: bool) -> None:
    at = body.at
    if is_female:
        for x in (-72.0, 72.0):
            body.add("fat", ellipsoid(at(x, -96, 92), at(52, 32, 50)), parent="air")
            body.add("gland", ellipsoid(at(x, -106, 92), at(28, 14, 28)), parent="fat")
    wide = ellipsoid(at(0, 0, -30), at(172 * belly, 118 * belly, 900))
    body.add("skin", ellipsoid(at(0, 0, -30), at(174 * belly, 120 * belly, 905)), parent="air")
    body.add("fat", wide, parent="skin")
    body.add("muscle", ellipsoid(at(0, 4, -30), at(154, 100, 900)), parent="fat")
    body.add("fat", ellipsoid(at(0, -14, -190), at(136, 74, 215)), parent="muscle")
    # The table, which projections leave out.
    top = 132 * belly + 6
    body.add("table", *_box(body, (0, top + 12, 0), (215, 12, 3000)), parent="air")
    body.add("table-top", *_box(body, (0, top + 2.5, 0), (215, 1.2, 3000)), parent="air")


def _box(body: Body, center: Vector, half: Vector) -> tuple[Quadric, ...]:
    middle = body.at(*center)
    return tuple(
        slab(middle, axis, size * body.scale) for axis, size in zip(IDENTITY[:2], half[:2], strict=True)
    )


def _add_ribs(body: Body) -> None:
    at = body.at
    outer = ellipsoid(at(0, 0, 78), at(147, 95, 205))
    inner = ellipsoid(at(0, 0, 78), at(140, 88, 197))
    body.add("mediastinum", ellipsoid(at(0, -1, 92), at(136, 84, 178)), parent="muscle")
    for rib in range(_NUM_RIBS):
        middle = at(0, 0, 228 - 24.0 * rib)
        between = slab(middle, _RIB_NORMAL, 5.5 * body.scale)
        body.add("rib", outer, between, parent="muscle", hollow=inner)
    body.add("spongy-bone", ellipsoid(at(0, -90, 122), at(17, 6, 72)), parent="muscle")
    for side in (-1.0, 1.0):
        tilt = rotation(12, 0, -1 if side > 0 else 1, 2 if side > 0 else -2)
        body.add("cortical-bone", ellipsoid(at(78 * side, -58, 232), at(70, 6, 6.5), tilt), parent="muscle")


def _add_spine(body: Body) -> None:
    at = body.at
    body.add("disc", ellipsoid(at(0, 58, 0), (20 * body.scale, 15.5 * body.scale, math.inf)), parent="muscle")
    names = [f"T{number}" for number in range(_NUM_THORACIC, 0, -1)]
    places = [(name, FIRST_LUMBAR_Z_MM + VERTEBRA_PITCH_MM * (up + 1)) for up, name in enumerate(names)]
    places += [
        (f"L{number + 1}", FIRST_LUMBAR_Z_MM - VERTEBRA_PITCH_MM * number) for number in range(_NUM_LUMBAR)
    ]
    for name, z in places:
        _add_vertebra(body, name, z)
    body.add(
        "csf", ellipsoid(at(0, 83.5, 0), (9 * body.scale, 8 * body.scale, math.inf)), parent="spongy-bone"
    )
    body.add("cord", *_upright(body, (0, 83, 130), (5, 4, 175)), parent="csf")


def _add_vertebra(body: Body, name: str, z: float) -> None:
    at, scale = body.at, body.scale
    body.add("cortical-bone", *_upright(body, (0, 58, z), (21.5, 16.5, 13)), parent="disc")
    body.add("spongy-bone", *_upright(body, (0, 58, z), (20, 15, 11.8)), parent="cortical-bone")
    body.host("vertebra", ellipsoid(at(0, 58, z), (20 * scale, 15 * scale, 14 * scale)), name=name)
    body.add("spongy-bone", ellipsoid(at(0, 80, z - 3), at(34, 6.5, 6)), parent="muscle")
    body.add("cortical-bone", ellipsoid(at(0, 85, z - 2), at(14, 13, 8)), parent="muscle")
    body.add("spongy-bone", ellipsoid(at(0, 98, z - 8), at(3.4, 14, 7.5)), parent="muscle")


def _upright(body: Body, center: Vector, size: Vector) -> tuple[Quadric, Quadric]:
    """Return the parts of an upright pillar of two radii and a half height."""
    radius_x, radius_y, half = (value * body.scale for value in size)
    return pillar(body.at(*center), radius_x, radius_y, half)


def _add_chest(body: Body, draws: Draws, liver: Quadric) -> None:
    at = body.at
    dome = ellipsoid(at(62, -4, -40), at(72, 76, 66))
    for side, x, width, floor in (("right", -70.0, 61.0, liver), ("left", 71.0, 57.0, dome)):
        bounds = ellipsoid(at(x, 2, 100), at(width, 80, draws.real(126, 136)))
        body.add("lung", bounds, parent="mediastinum", hollow=floor)
        body.host("lung", bounds, side=side)
        _add_vessels(body, draws.at(side), -1.0 if side == "right" else 1.0)
    turn = rotation(8, 0, 1, -3)
    body.add("heart", ellipsoid(at(24, -28, 58), at(58, 40, 48), turn), parent="lung-border")
    body.add("blood", ellipsoid(at(34, -26, 52), at(28, 18, 30), turn), parent="heart")
    body.add("blood", *_upright(body, (-12, -20, 118), (15, 15, 30)), parent="mediastinum")
    body.add("blood", ellipsoid(at(4, 8, 146), at(14, 44, 12)), parent="mediastinum")
    body.add("blood", *_upright(body, (-30, -12, 140), (9, 9, 46)), parent="mediastinum")
    body.add("blood", *_upright(body, (17, 36, -60), (11.5, 11.5, 208)), parent="mediastinum")
    body.add("air", *_upright(body, (0, 14, 200), (8.5, 8.5, 78)), parent="mediastinum")
    for sign in (-1.0, 1.0):
        direction = unit((0.72 * sign, 0.1, -0.68))
        body.add(
            "air",
            _rod(at(16 * sign, 15, 110), direction, 26 * body.scale, 5.5 * body.scale),
            parent="mediastinum",
        )


def _add_vessels(body: Body, draws: Draws, side: float) -> None:
    """Paint branches from the hilum outwards."""
    for _ in range(_VESSELS_PER_LUNG):
        direction = unit((side * draws.real(0.15, 1), draws.real(-0.9, 0.9), draws.real(-1, 1)))
        half = draws.real(18, 36)
        center = move((34 * side, 4.0, 96.0), direction, half)
        rod = _rod(body.at(*center), direction, half * body.scale, draws.real(1.3, 3.2))
        body.add("blood", rod, parent="lung")


def _rod(center: Vector, direction: Vector, half_mm: float, radius_mm: float) -> Quadric:
    """Return a long thin ellipsoid."""
    helper: Vector = (0.0, 0.0, 1.0) if abs(direction[2]) < 0.8 else (1.0, 0.0, 0.0)
    second = unit(cross(helper, direction))
    return ellipsoid(center, (half_mm, radius_mm, radius_mm), (direction, second, cross(direction, second)))


def _add_abdomen(body: Body, draws: Draws, liver: Quadric) -> None:
    at = body.at
    body.add("liver", liver, parent="fat")
    body.host("liver", liver)
    body.add("liver", ellipsoid(at(8, -42, -14), at(48, 30, 34)), parent="fat")
    for x, y, z in ((-40, -20, -10), (-75, 5, -40), (-50, 15, -55)):
        direction = unit((draws.real(-1, 1), draws.real(-0.6, 0.6), draws.real(-0.5, 0.5) + 0.1))
        body.add("blood", _rod(at(x, y, z), direction, 26 * body.scale, draws.real(2, 3.6)), parent="liver")
    body.add("bile", ellipsoid(at(-46, -56, -84), at(14, 13, 24)), parent="fat")
    spleen = ellipsoid(at(92, 34, -22), at(31, 37, 48))
    body.add("spleen", spleen, parent="fat")
    body.host("spleen", spleen)
    body.add("bowel", ellipsoid(at(54, -34, -42), at(42, 38, 46)), parent="fat")
    body.add("air", ellipsoid(at(54, -56, -40), at(27, 14, 28)), parent="bowel")
    body.add("pancreas", ellipsoid(at(6, 2, -72), at(62, 13, 13), rotation(10, 0, -2, 1)), parent="fat")
    body.add("blood", *_upright(body, (-17, 34, -150), (11, 10, 170)), parent="fat")
    for side, middle in (("right", -60.0), ("left", 60.0)):
        kidney = ellipsoid(at(middle, 44, draws.real(-112, -96)), at(28, 26, 54))
        body.add("kidney", kidney, parent="fat")
        body.host("kidney", kidney, side=side)
        inner = move(kidney.center, at(-5 if middle > 0 else 5, -3, 0))
        body.add("fat", ellipsoid(inner, at(11, 9, 27)), parent="kidney")
    _add_bowel(body, draws.at("bowel"))


def _add_bowel(body: Body, draws: Draws) -> None:
    for _ in range(12):
        center = (draws.real(-95, 95), draws.real(-50, 8), draws.real(-330, -128))
        size = (draws.real(16, 30), draws.real(14, 22), draws.real(16, 30))
        body.add("bowel", ellipsoid(body.at(*center), body.at(*size)), parent="fat")
        if draws.chance(60):
            bubble = move(center, (0.0, -size[1] * 0.45, 0.0))
            inner = ellipsoid(body.at(*bubble), body.at(size[0] * 0.6, size[1] * 0.4, size[2] * 0.6))
            body.add("air", inner, parent="bowel")


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
