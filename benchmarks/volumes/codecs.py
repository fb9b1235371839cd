"""Slice codecs: stored size, and processor time to encode and to decode.

    python -m benchmarks.volumes.codecs --dicom ../shared/data --out benchmarks/results/codecs.json

Generated CT and MR slices, and those of the DICOM files below ``--dicom`` that are larger than 100 KiB, by
the name of the folder. Every codec decodes to equal slices. MB/s are of decoded bytes and one processor's
time, the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.about import about_run
from benchmarks.volumes.bricks import generate
from shardflow.format.codecs import FAST, codec_for, decode_array, encode_array

CODECS = ("b2nd", FAST, "htj2k", "png16", "npy")
MIN_BYTES = 100 << 10
MAX_SLICES = 32


def main() -> None:
    """Measure every codec on every content."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dicom", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    contents = {f"{kind}, generated": list(generate(kind, 0, 1.6)[::8]) for kind in ("CT", "MR")}
    if arguments.dicom is not None:
        contents |= real_slices(arguments.dicom)
    rows = [
        {"content": name, "num_slices": len(slices), **measure(codec, slices, arguments.rounds)}
        for name, slices in contents.items()
        for codec in CODECS
        if codec_for(codec, slices[0].shape, slices[0].dtype) == codec
    ]
    about = about_run(["numpy", "blosc2", "imagecodecs"])
    text = {"about": about, "method": " ".join((__doc__ or "").split("\n\n")[-1].split()), "rows": rows}
    arguments.out.write_text(json.dumps(text, indent=1) + "\n")


def real_slices(root: Path) -> dict[str, list[NDArray[Any]]]:
    """Return slices of the DICOM files of each folder, of one shape and dtype."""
    import pydicom

    found: dict[str, list[NDArray[Any]]] = {}
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.stat().st_size < MIN_BYTES:
            continue
        slices = found.setdefault(path.relative_to(root).parts[0], [])
        try:
            pixels = np.ascontiguousarray(pydicom.dcmread(path).pixel_array)
        except Exception:  # noqa: BLE001 - other files lie there, too
            continue
        if pixels.ndim == 2 and len(slices) < MAX_SLICES:
            form = pixels.shape, pixels.dtype
            slices += [pixels] * (not slices or form == (slices[0].shape, slices[0].dtype))
    return {f"{name}, real": slices for name, slices in found.items() if len(slices) > 1}


def measure(codec: str, slices: list[NDArray[Any]], num_rounds: int) -> dict[str, Any]:
    """Encode and decode all slices in each round."""
    num_bytes, rates = sum(each.nbytes for each in slices), []
    out = np.empty_like(slices[0])
    for _ in range(num_rounds):
        start = time.process_time()
        payloads = [encode_array(codec, each) for each in slices]
        encoded = time.process_time()
        for payload in payloads:
            decode_array(codec, payload, out=out)
        rates.append((num_bytes / (encoded - start), num_bytes / (time.process_time() - encoded)))
    if not all(
        np.array_equal(decode_array(codec, one), each) for one, each in zip(payloads, slices, strict=True)
    ):
        raise SystemExit(f"{codec} is not lossless")
    encode, decode = (statistics.median(one) / 1e6 for one in zip(*rates, strict=True))
    return {
        "codec": codec,
        "ratio": round(num_bytes / sum(map(len, payloads)), 3),
        "encode_mb_per_s": round(encode),
        "decode_mb_per_s": round(decode),
    }


if __name__ == "__main__":
    main()
