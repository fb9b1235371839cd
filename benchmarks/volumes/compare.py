"""Crops of volumes by shardflow, MONAI and nnU-Net: equal output, one run, alternating.

    python -m benchmarks.volumes.compare --content folder --environments envs --out volumes.json

Generated CT (about 205 x 512 x 512, int16) and MR (about 154 x 410 x 410, uint16) volumes are stored as
datasets in bricks (``b2nd`` and ``fast``), as ``.nii.gz``, and as nnU-Net's Blosc2 files with the parameters
that it chooses. The loader decides where crops are; the others take the same ones, and the crc32 of all crops
must be equal. A cell is a process of its own; the order turns each round. ``cold`` takes all places again and
again, each time after the files have left the page cache. MONAI's ``PersistentDataset`` reads whole volumes
from its cache on the disk, ``CacheDataset`` has them all in memory. With ``--s3`` the dataset is also read
from a Ceph gateway behind a link of 100 MB/s and 20 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.volumes.crops import evict, peak_mib

REPOSITORY: Final = Path(__file__).resolve().parents[2]
SPACING_MM: Final = {"CT": 0.7, "MR": 1.0}
SCALE: Final = {"CT": 1.6, "MR": 1.9}
"""Of the generated volumes: none is smaller than a crop."""
NUM_VOLUMES: Final = {"CT": 6, "MR": 8}
NUM_PLACES: Final = 12
NUM_CROPS_PER_EPOCH: Final = 960
CROPS: Final = (96, 128)
OURS: Final = ("shardflow", "shardflow-fast")
PEERS: Final = ("monai-nifti", "monai-persistent", "monai-cache", "nnunet")
IN_TWO_THREADS: Final = (*OURS, "monai-cache", "nnunet")
FOLDERS: Final = {
    "shardflow": "bricks",
    "shardflow-fast": "bricks-fast",
    "monai-nifti": "nifti",
    "monai-persistent": "persistent",
    "nnunet": "nnunet",
}


def main() -> None:
    """Compare, or run one cell of shardflow."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--content", type=Path, required=True, help="folder for volumes, made where missing")
    parser.add_argument("--environments", type=Path, help="folder for the environment of nnU-Net")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--crop", type=int, default=96, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--places", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        print(json.dumps(measure(arguments)))
        return
    from benchmarks.peers.environments import made

    python = made(arguments.environments / "nnunet", "nnunetv2==2.8.1")
    sizes = {kind: make_content(arguments.content / kind, kind, python) for kind in NUM_VOLUMES}
    rows = compare(arguments, python)
    if arguments.s3:
        rows += over_s3(arguments)
    write(arguments, python, sizes, rows)


# ---- content ---------------------------------------------------------------------------------------


def make_content(content: Path, kind: str, python: Path) -> dict[str, int]:
    """Store the volumes of a kind in each form; return the bytes of each."""
    if not (content / "made").exists():
        shutil.rmtree(content, ignore_errors=True)
        for name in ("raw", "nifti"):
            (content / name).mkdir(parents=True)
        _write_volumes(content, kind)
        _peer(python, ["write-nnunet", "--content", str(content)])
        (content / "made").touch()
    forms = {name: content / name for name in _SUFFIXES}
    return {
        name: sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in _SUFFIXES[name])
        for name, folder in forms.items()
    }


_SUFFIXES: Final = {
    "raw": {".npy"},
    "slices": {".tar"},
    "bricks": {".tar"},
    "bricks-fast": {".tar"},
    "nifti": {".gz"},
    "nnunet": {".b2nd"},
}


def _write_volumes(content: Path, kind: str) -> None:
    import nibabel as nib

    import shardflow as sf
    from benchmarks.volumes.bricks import generate

    mm = SPACING_MM[kind]
    affine_lps = np.diag([mm, mm, mm, 1.0])
    to_ras = np.diag([-1.0, -1.0, 1.0, 1.0])
    with sf.ShardWriter(content / "slices", splits={"train": 1}) as writer:
        for number in range(NUM_VOLUMES[kind]):
            name, volume = f"case{number:03d}", generate(kind, number, scale=SCALE[kind])
            np.save(content / "raw" / f"{name}.npy", volume)
            series = {
                "kind": "volume",
                "modality": kind,
                "affine_lps": affine_lps.tolist(),
                "slice_spacing_mm": mm,
                "num_slices": len(volume),
                "rows": volume.shape[1],
                "columns": volume.shape[2],
                "samples_per_pixel": 1,
                "dtype": volume.dtype.str,
                "codec": "b2nd",
                **({"unit": "HU"} if kind == "CT" else {}),
            }
            writer.write({"__key__": name, "s000.b2nd": volume, "study.json": {"series": [series]}})
            nib.save(
                nib.Nifti1Image(volume.transpose(2, 1, 0), to_ras @ affine_lps),
                content / "nifti" / f"{name}.nii.gz",
            )
    program = Path(sys.executable).with_name("shardflow")
    for name, codec in (("bricks", "b2nd"), ("bricks-fast", "fast")):
        stored = ["--volumes", "bricks", "--codec", codec]
        for command in (
            ["copy", content / "slices", content / name, *stored],
            ["attach", content / name, "--facts"],
        ):
            subprocess.run([program, *command], check=True, capture_output=True)


# ---- cells -----------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a cell of shardflow: the first places once, compared by crc32, and then until the time is over."""
    from shardflow.storage import RemoteStore

    load = os.getloadavg()[0]
    folder = arguments.content / FOLDERS[arguments.cell]
    url = os.environ.get("BENCHMARK_URL", str(folder))
    places, crc = [], 0
    with open_loader(url, arguments, NUM_PLACES) as loader:
        for batch in loader:
            crc = zlib.crc32(batch["image"][0], crc)
            places.append([batch.info.sample_keys[0], *_first_voxel(batch)])
    num_crops, seconds, cpu = 0, 0.0, 0.0
    while arguments.cold and seconds < arguments.seconds:
        # A loader of its own each time, so that nothing is in its memory either.
        with open_loader(url, arguments, NUM_PLACES) as loader:
            evict(folder)
            start, start_cpu = time.perf_counter(), time.process_time()
            num_crops += sum(len(batch["image"]) for batch in loader)
            seconds += time.perf_counter() - start
            cpu += time.process_time() - start_cpu
    if not arguments.cold:
        with open_loader(url, arguments, NUM_CROPS_PER_EPOCH) as loader:
            batches = itertools.chain.from_iterable(itertools.repeat(loader))
            num_crops = sum(1 for _ in itertools.islice(batches, NUM_PLACES)) - NUM_PLACES
            store, link_bytes = loader.dataset.store, 0
            if isinstance(store, RemoteStore):
                link_bytes = -store.counts.num_bytes
            window, start, start_cpu = loader.counters.window(), time.perf_counter(), time.process_time()
            while time.perf_counter() - start < arguments.seconds:
                num_crops += len(next(batches)["image"])
            seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
            stages, _ = window.take()
            if isinstance(store, RemoteStore):
                link_bytes += store.counts.num_bytes
    if arguments.places is not None and not arguments.places.exists():
        arguments.places.write_text(json.dumps({"crop": arguments.crop, "places": places}))
    found = {
        "crops_per_s": round(num_crops / seconds, 3),
        "cpu_ms_per_crop": round(1000 * cpu / num_crops, 3),
        "peak_mib": peak_mib(),
        "crc32": crc,
        "load": round(load, 2),
    }
    if not arguments.cold:
        crop_bytes = 2 * arguments.crop**3
        found["decoded_by_crop"] = round(stages["decode"].num_bytes / num_crops / crop_bytes, 3)
        found["read_mb_per_crop"] = round(stages["read"].num_bytes / num_crops / 1e6, 3)
        found["read_mb_per_s"] = round(stages["read"].num_bytes / seconds / 1e6, 3)
        if link_bytes:
            found["link_mb_per_s"] = round(link_bytes / seconds / 1e6, 3)
    return found


def open_loader(url: str, arguments: argparse.Namespace, num_crops: int) -> Any:
    """Open the loader: one crop a batch, anywhere in the volume, stored voxels as float32."""
    import shardflow as sf

    return sf.Loader(
        sf.open(url),
        split="train",
        seed=3,
        batch=sf.BatchSpec(micro_batch_size=1, micro_batches_per_step=1),
        fields={"image": sf.Volume(roi_size=(arguments.crop,) * 3, dtype="float32")},
        sampling=sf.Sampling(epoch_samples=num_crops),
        world="single",
        config=sf.LoaderConfig(num_threads=arguments.threads),
    )


def _first_voxel(batch: Mapping[str, Any]) -> list[int]:
    affine = np.asarray(batch["image_affine"][0])
    spacing = np.linalg.norm(affine[:3, 0])
    return [round(float(mm / spacing)) for mm in affine[2::-1, 3]]


def compare(arguments: argparse.Namespace, python: Path) -> list[dict[str, Any]]:
    """Run every cell in every round."""
    cells = [
        *((name, 1, False) for name in (*OURS, *PEERS)),
        *((name, 2, False) for name in IN_TWO_THREADS),
        *((name, 1, True) for name in FOLDERS),
    ]
    rows = []
    for number in range(arguments.rounds):
        turned = cells[number % len(cells) :] + cells[: number % len(cells)]
        for kind, crop in itertools.product(NUM_VOLUMES, CROPS):
            content, places = arguments.content / kind, arguments.content / kind / f"places-{crop}.json"
            if not places.exists():
                _ours(arguments, "shardflow", content, crop, 1, places, cold=True)
            for name, threads, is_cold in turned:
                if name in OURS:
                    found = _ours(arguments, name, content, crop, threads, places, cold=is_cold)
                else:
                    options = ["--content", str(content), "--places", str(places)]
                    options += ["--threads", str(threads), "--seconds", str(arguments.seconds)]
                    if is_cold:
                        options += ["--evict", str(content / FOLDERS[name])]
                    found = _peer(python if name == "nnunet" else Path(sys.executable), [name, *options])
                cell = {"contestant": name, "kind": kind, "crop": crop, "threads": threads, "cold": is_cold}
                rows.append({**cell, "round": number, **found})
                print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _ours(
    arguments: argparse.Namespace,
    name: str,
    content: Path,
    crop: int,
    threads: int,
    places: Path,
    *,
    cold: bool,
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.volumes.compare", "--cell", name]
    command += ["--content", str(content), "--crop", str(crop), "--threads", str(threads)]
    command += ["--seconds", str(arguments.seconds), "--places", str(places), *["--cold"] * cold]
    return _output(command)


def _peer(python: Path, options: Sequence[str]) -> dict[str, Any]:
    return _output([str(python), "-m", "benchmarks.volumes.crops", *options])


def _output(command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def over_s3(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Read crops over the slow link, with as many threads as fill it."""
    from benchmarks.stream.remote import copy_to, slow_link
    from tests.object_stores import CEPH_KEYS, ceph_bucket, ceph_gateway

    rows = []
    with contextlib.ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardflow-bench-")))
        gateway = stack.enter_context(ceph_gateway(where, memory_bytes=4 << 30))
        os.environ.update(CEPH_KEYS, AWS_ENDPOINT_URL=gateway, AWS_REGION="us-east-1")
        urls = {}
        for kind in NUM_VOLUMES:
            urls[kind] = ceph_bucket(f"shardflow-volumes-{kind.lower()}")
            copy_to(arguments.content / kind / "bricks", urls[kind])
        os.environ["AWS_ENDPOINT_URL"] = stack.enter_context(slow_link(int(gateway.rpartition(":")[2])))
        for number, kind, crop in itertools.product(range(arguments.rounds), NUM_VOLUMES, CROPS):
            os.environ["BENCHMARK_URL"] = urls[kind]
            places = arguments.content / kind / f"places-{crop}.json"
            found = _ours(arguments, "shardflow", arguments.content / kind, crop, 16, places, cold=False)
            cell = {"contestant": "shardflow-s3", "kind": kind, "crop": crop, "threads": 16, "cold": False}
            rows.append({**cell, "round": number, **found})
            print(rows[-1], file=sys.stderr, flush=True)
        del os.environ["BENCHMARK_URL"]
    return rows


# ---- results ---------------------------------------------------------------------------------------


def write(
    arguments: argparse.Namespace, python: Path, sizes: Mapping[str, Any], rows: list[dict[str, Any]]
) -> None:
    """Write the rows, their medians and spread, and what each form takes on the disk."""
    from benchmarks.about import about_run
    from benchmarks.peers.environments import installed

    by_cell: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = (
            row["kind"],
            row["crop"],
            "cold" if row["cold"] else f"{row['threads']} threads",
            row["contestant"],
        )
        by_cell.setdefault(key, []).append(row)
    summary: dict[str, Any] = {}
    for (kind, crop, way, name), found in by_cell.items():
        summary.setdefault(f"{kind} {crop} {way}", {})[name] = {
            measure: {
                "median": round(statistics.median([row[measure] for row in found]), 3),
                "range": [min(row[measure] for row in found), max(row[measure] for row in found)],
            }
            for measure in found[0]
            if measure not in ("contestant", "kind", "crop", "threads", "cold", "round", "crc32", "load")
        }
    is_equal = all(
        len({row["crc32"] for row in rows if (row["kind"], row["crop"]) == cell}) == 1
        for cell in itertools.product(NUM_VOLUMES, CROPS)
    )
    about = about_run(["numpy", "blosc2", "monai", "nibabel"])
    text = {
        "about": {**about, "nnU-Net": installed(python, ["nnunetv2", "blosc2", "numpy"])},
        "command": f"python -m benchmarks.volumes.compare --rounds {arguments.rounds}"
        + " --s3" * arguments.s3,
        "method": " ".join((__doc__ or "").split("\n\n")[-1].split()),
        "generated": True,
        "bytes": sizes,
        "equal_output": is_equal,
        "summary": summary,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
