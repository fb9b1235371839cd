"""Brick sizes, codecs and filters: stored size against slice frames, decoding, and what a crop decodes.

The volumes are generated: smooth shapes with texture and noise as of CT, MR and PET, and label masks. Run:
``python -m benchmarks.volumes.bricks --out benchmarks/results/bricks.json``. Sizes and decoded shares depend
on the volumes alone; MB/s are of processor time, and the speed of two threads on what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
from numpy.typing import NDArray

from benchmarks.about import about_run
from shardflow.format import encode_array
from shardflow.format.volumes.bricks import grid_of
from shardflow.format.volumes.encoder import fitting_brick_shape

SHAPES = ((16, 64, 64), (8, 64, 64), (32, 32, 32), (16, 32, 32), (32, 64, 64), (64, 64, 64), (16, 128, 128))
FILTERS = {
    "byte delta": ([blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA], 0),
    "shuffle": ([blosc2.Filter.SHUFFLE], 0),
    "2-D delta": ([blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA], 2),
    "3-D delta": ([blosc2.Filter.SHUFFLE, blosc2.Filter.BYTEDELTA], 3),
}
CODECS = {"zstd-1": (blosc2.Codec.ZSTD, 1), "lz4hc-9": (blosc2.Codec.LZ4HC, 9)}
CROP = 96
KINDS = ("CT", "MR", "PET", "mask")


def generate(kind: str, number: int, scale: float) -> NDArray[Any]:
    """Return one volume ``(D, H, W)`` of a kind: ellipsoids with smooth insides, texture and noise."""
    rng = np.random.default_rng([KINDS.index(kind), number])
    depth, side = {"CT": (128, 320), "MR": (96, 256), "PET": (160, 160), "mask": (128, 320)}[kind]
    shape = tuple(max(int(size * scale * rng.uniform(0.8, 1.2)), 20) for size in (depth, side, side))
    axes = np.meshgrid(
        *(np.linspace(-1, 1, size, dtype=np.float32) for size in shape), indexing="ij", sparse=True
    )
    values = np.zeros(shape, np.float32)
    labels = np.zeros(shape, np.uint8)
    for label in range(1, 9):
        center, size = rng.uniform(-0.35, 0.35, 3), rng.uniform(0.08, 0.4, 3)
        if label == 1:
            center, size = np.zeros(3), np.array([1.4, 0.75, 0.85])
        distance = sum(((axis - c) / s) ** 2 for axis, c, s in zip(axes, center, size, strict=True))
        inside = distance < 1
        values[inside] = rng.uniform(0.2, 1.0) + 0.1 * distance[inside]
        labels[inside] = label
    if kind == "mask":
        return np.where(labels > 1, labels, 0).astype("|u1")
    noise = rng.normal(size=shape).astype(np.float32)
    noise = (noise + np.roll(noise, 1, 2) + np.roll(noise, 1, 1)) / 1.7
    if kind == "CT":
        air = labels == 0
        hounsfield = np.where(air, -1000, -200 + 300 * values) + 18 * noise
        return np.maximum(hounsfield, -1024).round().astype("<i2")
    if kind == "MR":
        return np.abs(600 * values + 12 * noise).round().astype("<u2")
    return np.where(labels > 0, np.abs(3000 * values * (1 + 0.2 * noise)), 0).round().astype("<u2")


def delta(array: NDArray[Any], axes: int) -> NDArray[Any]:
    """Return differences along the rows (2-D: columns and rows; 3-D: slices too), modulo the dtype."""
    found = array.view(f"<u{array.itemsize}")
    for axis in (2, 1, 0)[:axes]:
        found = np.diff(found, axis=axis, prepend=found.dtype.type(0))
    return found


def undo(array: NDArray[Any], axes: int) -> None:
    """Undo `delta` in place."""
    for axis in (0, 1, 2)[3 - axes :]:
        np.add.accumulate(array, axis=axis, out=array, dtype=array.dtype)


def bricks_of(array: NDArray[Any], wanted: tuple[int, int, int]) -> Iterator[NDArray[Any]]:
    """Yield the bricks of a volume, whole at the edges."""
    size = fitting_brick_shape(array.shape, wanted)
    grid = grid_of(array.shape, size)
    pads = [(0, count * part - have) for count, part, have in zip(grid, size, array.shape, strict=True)]
    whole = np.pad(array, pads, mode="edge")
    for place in itertools.product(*(range(count) for count in grid)):
        box = tuple(slice(at * part, (at + 1) * part) for at, part in zip(place, size, strict=True))
        yield np.ascontiguousarray(whole[box])


def measure(
    array: NDArray[Any], wanted: tuple[int, int, int], codec: str, filters: str, *, times: bool
) -> dict[str, float]:
    """Encode a volume and decode it again; bytes of both, and seconds."""
    pipeline, axes = FILTERS[filters]
    name, level = CODECS[codec]
    stored, raw, chunks = 0, 0, []
    for brick in bricks_of(array, wanted):
        data = delta(brick, axes) if axes else brick
        chunk = blosc2.compress2(
            np.ascontiguousarray(data),
            codec=name,
            clevel=level,
            filters=pipeline,
            filters_meta=[0] * len(pipeline),
            typesize=brick.itemsize,
            nthreads=1,
            blocksize=brick.nbytes,
        )
        stored += len(chunk)
        raw += brick.nbytes
        chunks.append(chunk)
    found = {"stored": float(stored), "raw": float(raw), "seconds": 0.0}
    if times:
        out = np.empty(brick.shape, f"<u{brick.itemsize}")
        for _ in range(2):  # the second time counts; processor time, since other programs run as well
            start = time.process_time()
            for chunk in chunks:
                blosc2.decompress2(chunk, dst=out, nthreads=1)
                if axes:
                    undo(out, axes)
            found["seconds"] = time.process_time() - start
    return found


def decoded_share(shape: tuple[int, ...], wanted: tuple[int, int, int]) -> tuple[float, float]:
    """Return decoded voxels per voxel of a crop: the mean over all uniform positions, and the largest."""
    size = fitting_brick_shape(shape, wanted)
    means, most = [], []
    for length, part in zip(shape, size, strict=True):
        crop = min(CROP, length)
        starts = np.arange(length - crop + 1)
        touched = ((starts + crop - 1) // part - starts // part + 1) * part
        means.append(touched.mean() / crop)
        most.append(touched.max() / crop)
    return float(np.prod(means)), float(np.prod(most))


def two_threads(array: NDArray[Any]) -> float:
    """Return the speed of two threads that decode bricks, in units of one; of the fastest of many rounds."""
    blosc2.set_releasegil(True)
    chunks = [
        blosc2.compress2(
            brick,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=FILTERS["byte delta"][0],
            filters_meta=[0, 0],
            typesize=brick.itemsize,
            nthreads=1,
            blocksize=brick.nbytes,
        )
        for brick in bricks_of(array, SHAPES[0])
    ]
    num_bytes = fitting_brick_shape(array.shape, SHAPES[0])

    def decode() -> None:
        out = np.empty(num_bytes, array.dtype)
        for chunk in chunks:
            blosc2.decompress2(chunk, dst=out, nthreads=1)

    fastest = {1: math.inf, 2: math.inf}
    for _ in range(200):
        for count in (1, 2):
            threads = [threading.Thread(target=decode) for _ in range(count)]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            fastest[count] = min(fastest[count], time.perf_counter() - start)
    return 2 * fastest[1] / fastest[2]


def run(num_volumes: int, scale: float) -> dict[str, Any]:
    """Measure all shapes with the default codec, and all codecs with the default shape."""
    settings = [(shape, "zstd-1", "byte delta") for shape in SHAPES]
    settings += [(SHAPES[0], codec, filters) for codec in CODECS for filters in FILTERS]
    settings = list(dict.fromkeys(settings))
    sums: dict[Any, dict[str, float]] = {}
    frames: dict[str, float] = {}
    for kind in KINDS:
        for number in range(num_volumes // len(KINDS)):
            array = generate(kind, number, scale)
            frames[kind] = frames.get(kind, 0.0) + sum(len(encode_array("b2nd", plane)) for plane in array)
            for setting in settings:
                found = measure(array, *setting, times=number < 5)
                total = sums.setdefault(
                    (kind, *setting), {"stored": 0.0, "raw": 0.0, "seconds": 0.0, "timed": 0.0}
                )
                for key, value in found.items():
                    total[key] += value
                total["timed"] += found["raw"] if number < 5 else 0.0
    rows = [
        {
            "kind": kind,
            "brick": list(shape),
            "codec": codec,
            "filter": filters,
            "ratio": round(total["raw"] / total["stored"], 3),
            "share_of_slice_frames": round(total["stored"] / frames[kind], 4),
            "decode_mb_per_s": round(total["timed"] / max(total["seconds"], 1e-9) / 1e6),
        }
        for (kind, shape, codec, filters), total in sums.items()
    ]
    full = (256, 512, 512)
    crops = [
        {
            "brick": list(shape),
            "mean": round(decoded_share(full, shape)[0], 2),
            "worst": round(decoded_share(full, shape)[1], 2),
        }
        for shape in SHAPES
    ]
    base = sums[("CT", SHAPES[0], "zstd-1", "byte delta")]["stored"]
    masks = sums[("mask", SHAPES[0], "zstd-1", "byte delta")]["stored"]
    return {
        "volumes": {kind: num_volumes // len(KINDS) for kind in KINDS},
        "generated": True,
        "storage": rows,
        "decoded_per_crop_of_96_in_256x512x512": crops,
        "mask_share_of_ct": round(masks / base, 4),
        "two_threads": round(two_threads(generate("CT", 0, scale)), 2),
    }


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-volumes", type=int, default=200)
    parser.add_argument("--scale", type=float, default=0.5, help="size of the generated volumes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = {**about_run(["blosc2", "numpy"]), **run(options.num_volumes, options.scale)}
    text = json.dumps(found, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
