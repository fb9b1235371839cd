"""Volumes of heads and of what is none, as arrays: ellipsoids of tissue with noise, in any orientation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TISSUES: dict[str, tuple[float, float, float, float, float]] = {
    #        CT HU,  T1,  T2, FLAIR, PET
    "air": (-1000.0, 5.0, 5.0, 5.0, 0.02),
    "skin": (20.0, 380.0, 260.0, 260.0, 0.5),
    "fat": (-100.0, 900.0, 600.0, 520.0, 0.3),
    "muscle": (55.0, 320.0, 170.0, 210.0, 0.7),
    "bone": (900.0, 20.0, 20.0, 20.0, 0.4),
    "spongy": (250.0, 500.0, 320.0, 320.0, 0.8),
    "brain": (35.0, 550.0, 520.0, 520.0, 6.0),
    "csf": (8.0, 140.0, 1000.0, 80.0, 0.4),
    "lung": (-850.0, 15.0, 18.0, 15.0, 0.3),
    "liver": (60.0, 480.0, 270.0, 300.0, 2.0),
    "water": (0.0, 300.0, 900.0, 200.0, 1.0),
}
CONTRASTS = ("CT", "T1", "T2", "FLAIR", "PET")
_NOISE = {"CT": 18.0, "T1": 12.0, "T2": 12.0, "FLAIR": 12.0, "PET": 0.05}

Vector = tuple[float, float, float]
Shape = tuple[str, Vector, Vector]
"""Tissue, center and half axes, LPS mm; an infinite half axis makes a cylinder."""


@dataclass(frozen=True, kw_only=True)
class Scan:
    """A volume, ``(slices, rows, columns)``, with its affine from (column, row, slice) to LPS mm."""

    pixels: NDArray[np.float32]
    affine_lps: NDArray[np.float64]
    modality: str
    brain: NDArray[np.bool_] | None = None
    face: NDArray[np.bool_] | None = None


def head(scale: float = 1.0, *, neck: bool = True) -> list[Shape]:
    """A head with a face, its brain's center at the origin; the front is at negative y."""
    shapes: list[Shape] = [
        ("skin", (0, 0, -2), (78, 99, 112)),
        ("skin", (0, -68, -72), (56, 36, 66)),  # face
        ("skin", (0, -108, -62), (13, 16, 20)),  # nose
        ("skin", (0, -88, -122), (30, 18, 18)),  # chin
        ("skin", (80, 8, -40), (9, 14, 26)),
        ("skin", (-80, 8, -40), (9, 14, 26)),
    ]
    if neck:
        shapes += [("skin", (0, 26, -190), (58, 62, 110)), ("spongy", (0, 36, -190), (15, 14, 108))]
    shapes += [
        ("fat", (0, 0, -2), (76, 97, 110)),
        ("muscle", (0, -66, -72), (52, 33, 62)),
        ("bone", (0, 0, 32), (73, 93, 76)),
        ("spongy", (0, 0, 32), (71, 91, 74)),
        ("bone", (0, 0, 32), (69, 89, 72)),
        ("csf", (0, 0, 32), (67, 87, 70)),
        ("brain", (0, 0, 32), (65, 85, 68)),
        ("muscle", (0, -72, -14), (62, 44, 42)),  # orbits, below the frontal lobe
        ("brain", (42, -34, 18), (20, 21, 17)),  # temporal poles
        ("brain", (-42, -34, 18), (20, 21, 17)),
        ("bone", (0, 36, -22), (46, 38, 32)),
        ("brain", (0, 34, -18), (42, 34, 28)),  # cerebellum
        ("brain", (0, 10, -35), (12, 11, 24)),  # brain stem
        ("air", (0, -80, -74), (12, 24, 24)),
        ("bone", (0, -84, -112), (36, 14, 12)),  # jaw
        ("water", (31, -84, -46), (12, 12, 12)),
        ("water", (-31, -84, -46), (12, 12, 12)),
    ]
    return [(t, _times(c, scale), _times(a, scale)) for t, c, a in shapes]


def torso(scale: float = 1.0, width: float = 172, depth: float = 118) -> list[Shape]:
    inf = np.inf
    return [
        (t, _times(c, scale), _times(a, scale))
        for t, c, a in (
            ("skin", (0, 0, 0), (width + 3, depth + 3, inf)),
            ("fat", (0, 0, 0), (width, depth, inf)),
            ("muscle", (0, 0, 0), (width - 22, depth - 20, inf)),
            ("lung", (75, -5, 120), (58, 76, 130)),
            ("lung", (-75, -5, 120), (58, 76, 130)),
            ("liver", (-60, -10, -40), (80, 70, 70)),
            ("spongy", (0, 76, 0), (20, 18, inf)),
            ("bone", (0, 92, 0), (6, 12, inf)),
        )
    ]


def limb(radius: float, depth: float, *, x: float = 0.0, cap: float = np.inf) -> list[Shape]:
    return [
        ("skin", (x, 0, 0), (radius, depth, cap)),
        ("fat", (x, 0, 0), (radius - 2, depth - 2, cap)),
        ("muscle", (x, 0, 0), (radius - 12, depth - 12, cap)),
        ("bone", (x, 0, 0), (radius * 0.25, depth * 0.25, cap)),
        ("spongy", (x, 0, 0), (radius * 0.17, depth * 0.17, cap)),
    ]


def _times(vector: Sequence[float], scale: float) -> Vector:
    return (vector[0] * scale, vector[1] * scale, vector[2] * scale)


def orientation(name: str) -> NDArray[np.float64]:
    """Directions of columns, rows and slices."""
    axes = {
        "axial": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
        "axial-down": ((1, 0, 0), (0, 1, 0), (0, 0, -1)),
        "sagittal": ((0, 1, 0), (0, 0, -1), (1, 0, 0)),
        "coronal": ((1, 0, 0), (0, 0, -1), (0, 1, 0)),
    }[name]
    return np.array(axes, float).T


def scan(
    shapes: Sequence[Shape],
    *,
    contrast: str = "CT",
    plane: str = "axial",
    center: Vector = (0.0, 0.0, 0.0),
    spacing: Vector = (2.0, 2.0, 4.0),
    count: tuple[int, int, int] = (128, 128, 56),
    turn_deg: float = 0.0,
    seed: int = 0,
    noise: float = 1.0,
) -> Scan:
    """Paint shapes into a volume around a center.

    Args:
        shapes: Later ones cover earlier ones.
        contrast: One of `CONTRASTS`.
        plane: See `orientation`.
        center: Of the volume, LPS mm.
        spacing: Between columns, rows, slices, mm.
        count: Columns, rows, slices.
        turn_deg: Turn of the body about its long axis.
        seed: Of the noise.
        noise: Its strength, in shares of the contrast's usual one.
    """
    axes = orientation(plane)
    affine = np.eye(4)
    affine[:3, :3] = axes * np.array(spacing)
    affine[:3, 3] = np.array(center) - affine[:3, :3] @ ((np.array(count) - 1) / 2)
    k, j, i = np.meshgrid(*(np.arange(n, dtype=np.float32) for n in reversed(count)), indexing="ij")
    x, y, z = (affine[r, 0] * i + affine[r, 1] * j + affine[r, 2] * k + affine[r, 3] for r in range(3))
    angle = np.radians(turn_deg)
    x, y = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    at = CONTRASTS.index(contrast)
    pixels = np.full(x.shape, TISSUES["air"][at], np.float32)
    brain, face = np.zeros(x.shape, bool), np.zeros(x.shape, bool)
    for tissue, middle, axes_mm in shapes:
        inside = sum(((p - m) / a) ** 2 for p, m, a in zip((x, y, z), middle, axes_mm, strict=True)) <= 1
        pixels[inside] = TISSUES[tissue][at]
        brain[inside] = tissue == "brain"
        if tissue == "skin":
            face |= inside & (y < -96) & (z < -40)
    rng = np.random.default_rng(seed)
    sigma = _NOISE[contrast] * noise
    if contrast == "CT":
        noisy = pixels + rng.normal(0, sigma, pixels.shape)
    else:  # Rician, as magnitudes are
        noisy = np.hypot(pixels + rng.normal(0, sigma, pixels.shape), rng.normal(0, sigma, pixels.shape))
    modality = {"CT": "CT", "PET": "PT"}.get(contrast, "MR")
    return Scan(
        pixels=np.asarray(noisy, np.float32), affine_lps=affine, modality=modality, brain=brain, face=face
    )


def heads(seed: int = 0, num: int = 120) -> Iterator[tuple[str, Scan]]:
    """Heads of children and adults in all contrasts and planes: turned, cut off, thin and thick."""
    rng = np.random.default_rng(seed)
    for number in range(num):
        contrast = CONTRASTS[number % 5]
        plane = ("axial", "axial-down", "sagittal", "coronal")[number // 5 % 4]
        scale = float(rng.uniform(0.72, 1.1))
        turn = float(rng.uniform(-25, 25))
        thick = float(rng.choice([1.5, 3.0, 5.0])) if contrast != "PET" else 3.0
        reach = 250.0
        step = {"axial": 2, "axial-down": 2, "sagittal": 0, "coronal": 1}[plane]
        size = [reach, reach, reach * 1.15]
        kind = number % 3
        middle = [0.0, -8.0, -40.0 * scale]
        if kind == 1 and step == 2:  # the brain alone
            size[2], middle[2] = 160.0 * scale, 30.0 * scale
        if kind == 2:  # a fixed field of view that cuts the neck
            middle[2] = -5.0 * scale
        counts, spacing = _counts(plane, size, thick)
        name = f"{contrast}-{plane}-{kind}-{scale:.2f}-{turn:.0f}-{thick}"
        yield (
            name,
            scan(
                head(scale),
                contrast=contrast,
                plane=plane,
                center=(middle[0], middle[1], middle[2]),
                spacing=spacing,
                count=counts,
                turn_deg=turn,
                seed=number,
                noise=float(rng.uniform(0.3, 2.0)),
            ),
        )


def _counts(plane: str, size: Sequence[float], thick: float) -> tuple[tuple[int, int, int], Vector]:
    order = {"axial": (0, 1, 2), "axial-down": (0, 1, 2), "sagittal": (1, 2, 0), "coronal": (0, 2, 1)}[plane]
    spacing = (2.0, 2.0, thick)
    counts = [max(8, round(size[axis] / mm)) for axis, mm in zip(order, spacing, strict=True)]
    return (counts[0], counts[1], counts[2]), spacing


def strangers(seed: int = 0, num: int = 120) -> Iterator[tuple[str, Scan]]:
    """Chests, bellies, limbs, breasts, spines, phantoms."""
    rng = np.random.default_rng(seed)
    for number in range(num):
        contrast = CONTRASTS[number % 4]
        kind = ("torso", "child", "thighs", "knee", "thigh", "foot", "phantom", "spine", "arm", "breast")[
            number // 4 % 10
        ]
        plane = ("axial", "sagittal", "coronal")[int(rng.integers(3))]
        factor = float(rng.uniform(0.85, 1.15))
        size, shapes = [420.0, 420.0, 240.0], torso(factor)
        if kind == "child":
            size, shapes = [260.0, 260.0, 220.0], torso(0.5 * factor)
        elif kind == "thighs":
            shapes = limb(80 * factor, 85 * factor, x=-95) + limb(80 * factor, 85 * factor, x=95)
        elif kind == "knee":
            size, shapes = [170.0, 170.0, 160.0], limb(58 * factor, 62 * factor)
        elif kind == "thigh":
            size, shapes = [260.0, 260.0, 260.0], limb(82 * factor, 88 * factor)
        elif kind == "foot":
            size = [160.0, 300.0, 150.0]
            shapes = [("skin", (0, 0, -30), (45 * factor, 125 * factor, 38)), *limb(42, 50)]
            shapes += [("bone", (0, 20, -30), (25, 90, 20))]
        elif kind == "phantom":
            size, shapes = [300.0, 300.0, 200.0], [("water", (0, 0, 0), (100 * factor, 100 * factor, np.inf))]
        elif kind == "spine":
            size, shapes = [180.0, 180.0, 240.0], torso(factor)
        elif kind == "arm":
            size, shapes = [140.0, 140.0, 240.0], limb(45 * factor, 48 * factor)
        elif kind == "breast":
            size = [400.0, 260.0, 180.0]
            shapes = [(t, (c[0], c[1] + 90, c[2]), a) for t, c, a in torso(factor)]
            shapes = [("fat", (x, -70, 0), (65, 80, 70)) for x in (-85, 85)] + shapes
        counts, spacing = _counts(plane, size, float(rng.choice([3.0, 5.0])))
        middle = (
            0.0,
            60.0 if kind == "spine" else 0.0,
            float(rng.uniform(-60, 60)) if kind == "torso" else 0.0,
        )
        yield (
            f"{kind}-{contrast}-{plane}-{factor:.2f}",
            scan(
                shapes,
                contrast=contrast,
                plane=plane,
                center=middle,
                spacing=spacing,
                count=counts,
                seed=number,
            ),
        )
