"""Heads: recall on generated and real heads, false alarms, and what defacing leaves of face and brain.

python -m benchmarks.privacy.heads [--num 240] [--data ../shared/data]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.about import about_run
from shardflow.errors import SourceError
from shardflow.packing.deid.heads import MIN_SLICES, MODALITIES, Head, HeadFinder
from shardflow.packing.sources.dicom.headers import InstanceHeader, read_header
from shardflow.packing.sources.dicom.pixels import iter_slices
from shardflow.packing.sources.dicom.stacks import build_studies
from tests.phantoms import Scan, heads, strangers


def find(volume: Scan) -> tuple[Head | None, float]:
    start = time.perf_counter()
    finder = HeadFinder(
        volume.affine_lps.tolist(), len(volume.pixels), volume.pixels.shape[1:], volume.modality
    )
    return finder.find(lambda index: volume.pixels[index]), time.perf_counter() - start


def real(folder: Path) -> Iterator[tuple[str, Scan]]:
    """Yield the real volumes of a folder by the path of their folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    studies: defaultdict[str, list[InstanceHeader]] = defaultdict(list)
    for number, path in enumerate(paths):
        try:
            header = read_header(path, file_index=number)
        except SourceError:
            continue
        if isinstance(header, InstanceHeader):
            studies[header.study_instance_uid].append(header)
    for headers in studies.values():
        for stack in [stack for study in build_studies(headers).studies for stack in study.stacks]:
            affine = stack.geometry.affine_lps
            if affine is None or len(stack.slices) < MIN_SLICES or stack.modality not in MODALITIES:
                continue
            try:
                pixels = [
                    next(
                        iter_slices(paths[part.instance.file_index], part.instance, frames=[part.frame])
                    ).pixels
                    for part in stack.slices
                ]
            except SourceError:
                continue
            place = paths[stack.slices[0].instance.file_index].parent.relative_to(folder)
            yield (
                str(place),
                Scan(
                    pixels=np.stack(pixels).astype(np.float32),
                    affine_lps=np.array(affine),
                    modality=stack.modality,
                ),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=240)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/privacy_heads.json"))
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    missed, wrong, seconds = [], [], 0.0
    brain_cut, face_left = [], []
    for name, volume in heads(num=options.num):
        found, took = find(volume)
        seconds += took
        counts["heads"] += 1
        if found is None:
            missed.append(name)
        elif found.vertex_mm is None:
            counts["found_but_not_cut"] += 1
        else:
            affine, shape = volume.affine_lps.tolist(), volume.pixels.shape[1:]
            cut = np.stack([found.face_mask(affine, index, shape) for index in range(len(volume.pixels))])
            if volume.brain is not None and volume.face is not None:
                brain_cut.append(float((cut & volume.brain).sum() / volume.brain.sum()))
                face_left.append(float((volume.face & ~cut).sum() / max(1, volume.face.sum())))
    for name, volume in strangers(num=options.num):
        found, _ = find(volume)
        counts["others"] += 1
        if found is not None:
            wrong.append(name)
    seen = {place: find(volume)[0] is not None for place, volume in real(options.data)}
    result: dict[str, Any] = {
        "about": about_run(["numpy", "opencv-python-headless"]),
        "heads": counts["heads"],
        "recall": 1 - len(missed) / counts["heads"],
        "missed": missed,
        "found_but_not_cut": counts["found_but_not_cut"],
        "others": counts["others"],
        "wrong_share": len(wrong) / counts["others"],
        "wrong": wrong,
        "brain_cut_share": {"mean": float(np.mean(brain_cut)), "worst": max(brain_cut)},
        "face_left_share": {"mean": float(np.mean(face_left)), "worst": max(face_left)},
        "seconds_per_volume": seconds / counts["heads"],
        "real_volumes_with_a_head": seen,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in result.items() if name != "about"}, indent=1))


if __name__ == "__main__":
    main()
