"""What is measured, each in a process of its own: the packing job, the usual script, the bare loop.

    python -m benchmarks.pack.contestants NAME FOLDER KIND

prints one JSON object. Imports of the script and of the loop are not counted; those of the job are, because
a job begins with them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL_SIDE = {"ct": 256, "cxr": 1024}
SCRIPT_SLICES = {"ct": 400, "cxr": 24}
"""The script is slow and even: it does a part of the input."""


def job(folder: Path, output: Path, num_processes: int = 1) -> dict[str, Any]:
    """Run the packing job with its default settings, into a new dataset."""
    command = [
        *(sys.executable, "-m", "pipelines.pack", "--json"),
        *("--config", str(REPOSITORY / "pipelines" / "recipes" / "pack_folders.toml")),
        *("--set", f"inputs.dicom={folder / 'dicom'}"),
        *("--set", f"inputs.reports={folder / 'reports.csv'}"),
        *("--set", f"output={output / 'dataset'}"),
        *("--set", f"private_dir={output / 'private'}"),
        *("--set", f"execution.num_processes={num_processes}"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the job ended with {done.returncode}: {done.stderr[-2000:]}")
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        "num_slices": summary["num_slices"],
        "output_bytes": summary["num_bytes"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "dataset_id": summary["dataset_id"],
    }


def job_of_two(folder: Path, output: Path) -> dict[str, Any]:
    """Run the job with two processes."""
    return job(folder, output, 2)


def limit_of_two(folder: Path, output: Path) -> dict[str, Any]:
    """Run two bare loops at once, each over half of the files: what a second processor adds here."""
    command = [sys.executable, "-m", "benchmarks.pack.contestants", "limit", str(folder), str(output)]
    loops = [
        subprocess.Popen([*command, "--part", str(part), "2"], cwd=REPOSITORY, stdout=subprocess.PIPE)
        for part in range(2)
    ]
    said = [loop.communicate()[0] for loop in loops]
    if any(loop.returncode for loop in loops):
        raise RuntimeError("a bare loop failed")
    found = [json.loads(text.splitlines()[-1]) for text in said]
    sums = {name: sum(one[name] for one in found) for name in ("num_slices", "output_bytes", "processor_s")}
    return {**sums, "wall_s": max(one["wall_s"] for one in found)}


def limit(folder: Path, output: Path, part: int = 0, num_parts: int = 1) -> Callable[[], dict[str, Any]]:
    """Header, pixels, codec and write of the same members, in a loop that does nothing else."""
    import numpy as np

    from shardflow.format import encode_array
    from shardflow.format.tar import encode_member
    from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header

    files = _files(folder)[part::num_parts]
    encode_array("b2nd", np.zeros((64, 64), np.int16))

    def run() -> dict[str, Any]:
        num_bytes = 0
        with (output / "limit.tar").open("wb", buffering=0) as tar:
            for number, path in enumerate(files):
                header = read_header(path)
                if isinstance(header, BrokenInstance):
                    raise TypeError("a file of the benchmark must be an image")
                image = header.image
                with path.open("rb", buffering=0) as file:
                    raw = os.pread(file.fileno(), image.native_num_bytes, header.pixel_offset)
                pixels = np.frombuffer(raw, np.int16).reshape(image.rows, image.columns)
                intercept = header.planes[0].intercept
                pixels = pixels + np.int16(intercept) if intercept else pixels.view(np.uint16)
                tar.write(encode_member(f"{number:026d}.s000.i0000.b2nd", encode_array("b2nd", pixels)))
            num_bytes = tar.tell()
        return {"num_slices": len(files), "output_bytes": num_bytes}

    return run


def script(folder: Path, output: Path, *, is_scaled: bool = False) -> Callable[[], dict[str, Any]]:
    """What people write: pydicom, OpenCV's PNG of 16 bits, webdataset's ShardWriter; one process."""
    import cv2
    import numpy as np
    import pydicom
    import webdataset

    cv2.setNumThreads(1)
    kind = folder.name
    studies: dict[str, list[Path]] = {}
    for path in _files(folder)[: SCRIPT_SLICES[kind]]:
        studies.setdefault(path.parent.name, []).append(path)

    def scaled(pixels: Any) -> Any:
        factor = SMALL_SIDE[kind] / max(pixels.shape)
        size = round(pixels.shape[1] * factor), round(pixels.shape[0] * factor)
        return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)

    def run() -> dict[str, Any]:
        num_slices = 0
        pattern = str(output / "script-%06d.tar")
        with webdataset.ShardWriter(pattern, maxsize=512 << 20, maxcount=10_000, verbose=0) as writer:
            for name, paths in studies.items():
                images = [pydicom.dcmread(path) for path in paths]
                images.sort(key=lambda image: float(image.ImagePositionPatient[2]))
                sample: dict[str, Any] = {"__key__": name, "report.txt": "No acute finding. " * 40}
                for index, image in enumerate(images):
                    pixels = image.pixel_array
                    if "RescaleSlope" in image:
                        hounsfield = pixels * float(image.RescaleSlope) + float(image.RescaleIntercept)
                        pixels = (hounsfield + 32768).astype(np.uint16)
                    is_written, data = cv2.imencode(".png", scaled(pixels) if is_scaled else pixels)
                    if not is_written:
                        raise RuntimeError("OpenCV wrote no PNG")
                    sample[f"i{index:04d}.png"] = data.tobytes()
                    num_slices += 1
                writer.write(sample)
        return {
            "num_slices": num_slices,
            "output_bytes": sum(path.stat().st_size for path in output.glob("*.tar")),
        }

    return run


def script_scaled(folder: Path, output: Path) -> Callable[[], dict[str, Any]]:
    """The same, and every image scaled down before it is stored: most of its pixels are thrown away."""
    return script(folder, output, is_scaled=True)


def headers(folder: Path, output: Path) -> Callable[[], dict[str, Any]]:
    """The header pass as a packing process runs it: batch by batch, surrogates, rows on disk."""
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.header_rows import BATCH_FILES, batch_name
    from shardflow.packing.scan import Scanner
    from shardflow.packing.sources.dicom.elements import HeaderLimits
    from shardflow.packing.sources.placement import discover
    from shardflow.packing.studies.tasks import InputFile, ScanTask

    root = folder / "dicom"
    rows = output / "rows"
    rows.mkdir()
    key = SecretKey.create(output / "secret.key")
    scanner = Scanner(roots=(root,), folder=rows, key=key, limits=HeaderLimits())

    def run() -> dict[str, Any]:
        found = discover([root])
        for start in range(0, len(found), BATCH_FILES):
            batch = found[start : start + BATCH_FILES]
            files = [
                InputFile(
                    root_index=file.root_index,
                    relative_path=file.relative_path,
                    num_bytes=file.num_bytes,
                    reason=file.problem,
                    placement=None,
                )
                for file in batch
            ]
            scanner.scan(ScanTask(name=batch_name(start), files=tuple(files)))
        return {"num_slices": len(found), "output_bytes": 0}

    return run


def _files(folder: Path) -> list[Path]:
    return sorted((folder / "dicom").glob("*/*.dcm"))


JOBS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "job": job,
    "job_of_two": job_of_two,
    "limit_of_two": limit_of_two,
}
LOOPS: dict[str, Callable[..., Callable[[], dict[str, Any]]]] = {
    "headers": headers,
    "limit": limit,
    "script": script,
    "script_scaled": script_scaled,
}


def measure(name: str, folder: Path, scratch: Path, part: Sequence[int] = ()) -> dict[str, Any]:
    """Run one contestant once; times in seconds, wall and processor.

    Args:
        name: Of the contestant.
        folder: What `benchmarks.pack.content` made.
        scratch: Folder for what is written.
        part: Of ``limit``: which part of the files, of how many.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as where:
        output = Path(where)
        run = LOOPS[name](folder, output, *part) if name in LOOPS else partial(JOBS[name], folder, output)
        processor_s, start = _processor_s(), time.perf_counter()
        found = run()
        wall_s = time.perf_counter() - start
        return {"wall_s": wall_s, "processor_s": _processor_s() - processor_s, **found}


def _processor_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=sorted([*JOBS, *LOOPS]))
    parser.add_argument("folder", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--part", type=int, nargs=2, default=(), metavar=("PART", "PARTS"))
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.name, arguments.folder, arguments.scratch, arguments.part)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
