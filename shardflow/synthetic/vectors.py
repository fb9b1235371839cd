"""Vectors and rotations in patient space (mm, LPS), from operations that give the same bits on every machine.

Only ``+ - * /`` and square roots are used: IEEE 754 defines them exactly, while sine, cosine and
exponential differ in the last bit between math libraries. Rotations therefore come from quaternions of
small integers.
"""

from __future__ import annotations

import math

__all__ = [
    "IDENTITY",
    "Frame",
    "Vector",
    "cross",
    "dot",
    "move",
    "rotate",
    "rotation",
    "round_vector",
    "unit",
]

Vector = tuple[float, float, float]
"""x to the patient's left, y to the back, z to the head."""
Frame = tuple[Vector, Vector, Vector]
"""Three orthogonal unit vectors."""

IDENTITY: Frame = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_DIRECTION_DECIMALS = 10


def dot(a: Vector, b: Vector) -> float:
    """Return the inner product."""
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def cross(a: Vector, b: Vector) -> Vector:
    """Return the vector product."""
    return (a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0])


def move(point: Vector, direction: Vector, distance: float = 1.0) -> Vector:
    """Return the point ``distance`` along ``direction``."""
    return (
        point[0] + direction[0] * distance,
        point[1] + direction[1] * distance,
        point[2] + direction[2] * distance,
    )


def unit(vector: Vector) -> Vector:
    """Return the vector with length 1."""
    length = math.sqrt(dot(vector, vector))
    return (vector[0] / length, vector[1] / length, vector[2] / length)


def round_vector(vector: Vector, decimals: int = 6) -> Vector:
    """Return the vector as it is written to a file; ``-0.0`` becomes ``0.0``."""
    x, y, z = (round(value, decimals) + 0.0 for value in vector)
    return (x, y, z)


def rotation(a: int, b: int, c: int, d: int) -> Frame:
    """Return the images of the three axes under the rotation of the quaternion ``a + bi + cj + dk``.

    The angle is ``2 atan(|(b, c, d)| / a)`` about the direction ``(b, c, d)``.
    """
    n = a * a + b * b + c * c + d * d
    columns = (
        (a * a + b * b - c * c - d * d, 2 * (b * c + a * d), 2 * (b * d - a * c)),
        (2 * (b * c - a * d), a * a - b * b + c * c - d * d, 2 * (c * d + a * b)),
        (2 * (b * d + a * c), 2 * (c * d - a * b), a * a - b * b - c * c + d * d),
    )
    x, y, z = (
        round_vector((column[0] / n, column[1] / n, column[2] / n), _DIRECTION_DECIMALS) for column in columns
    )
    return (x, y, z)


def rotate(frame: Frame, vector: Vector) -> Vector:
    """Return the image of a vector, its directions rounded as they are written."""
    x, y, z = frame
    turned = move(move((x[0] * vector[0], x[1] * vector[0], x[2] * vector[0]), y, vector[1]), z, vector[2])
    return round_vector(turned, _DIRECTION_DECIMALS)
