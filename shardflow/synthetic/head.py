"""The head phantom: skull and brain, the brain's centre at the origin, x to the patient's left."""

from __future__ import annotations

import math

from shardflow.synthetic.anatomy import Anatomy, Body
from shardflow.synthetic.draws import Draws
from shardflow.synthetic.solids import Quadric, ellipsoid, pillar, slab
from shardflow.synthetic.vectors import IDENTITY, rotation

__all__ = ["build_head"]


def build_head(draws: Draws, *, scale: float) -> Anatomy:
    """Build the head of one patient."""
    body = Body(scale)
    at = body.at
    body.add("muscle", *pillar(at(0, 26, -195), 56 * scale, 60 * scale, 92 * scale), parent="air")
    body.add("spongy-bone", *pillar(at(0, 34, -195), 15 * scale, 13 * scale, 90 * scale), parent="muscle")
    # A projection never sees the head rest.
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
    body.add(
        "brain-white",
        *pillar(at(0, 12, -62), 13 * body.scale, 12 * body.scale, 32 * body.scale),
        parent="csf",
    )


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
