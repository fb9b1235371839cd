"""Header pass over a slow store: files a second, deadlines, memory, and how right the remaining time is.

    python -m benchmarks.pack.scan [--files N] [--processes N] --output benchmarks/results/scan.json

The files are generated DICOM images of one slice, on the local disk; a store with 20 ms a request is
simulated by a wait in each packing process at every open of one of them (an audit hook; the header pass opens
a file once for its header and once for a piece of its pixels). Some opens never return: their files must be
quarantined after their own deadline, which is shorter than a batch takes, and no other file with them. The
job is a dry run of `shardflow pack` with its plain progress lines, whose remaining time is compared with what
it was in the end.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.about import about_run, write_result
from shardflow.cli.pack import LineProgress
from shardflow.config import load_config
from shardflow.packing import PackConfig, pack
from shardflow.packing.engines.worker import Handler
from shardflow.packing.handlers import make_handler as make_real_handler
from tests.dicom_factory import dicom_uid, make_study

_DELAY_S: Final = 0.02
_OPENS_PER_FILE: Final = 2
_HUNG: Final = "hung-"
_HANGS: Final = "BENCHMARK_SCAN_HANGS"
_SLICES_PER_STUDY: Final = 40
_SETTINGS: Final = """
output = "{folder}/out"
private_dir = "{folder}/private"
[inputs]
dicom = ["{folder}/dicom"]
[splits]
train = 90
val = 10
[attachments]
enabled = false
[execution]
num_processes = {processes}
task_timeout_s = {timeout_s}
"""
_LEFT: Final = re.compile(r"(\d+) of (\d+), about ([0-9.]+) (s|min|h) left")
_SECONDS: Final = {"s": 1.0, "min": 60.0, "h": 3600.0}


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the handler of a packing process whose input folder is a slow store."""
    roots = tuple(f"{root}/" for root in setup["roots"])
    hangs = bool(os.environ.get(_HANGS))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(roots):
            time.sleep(3600.0 if hangs and _HUNG in str(arguments[0]) else _DELAY_S)

    handler = make_real_handler(setup)
    sys.addaudithook(hook)
    return handler


def make(folder: Path, num_files: int, num_hung: int) -> None:
    """Write the files: copies of one, each with UIDs of its own."""
    template = folder / "template"
    made = make_study(template, num_slices=1)
    data = made.files[0].read_bytes()
    instance, study_uid = dicom_uid("instance", "P1", "A", 1, 0).encode(), made.study_instance_uid.encode()
    for number in range(num_files):
        study, place = divmod(number, _SLICES_PER_STUDY)
        one = data.replace(instance, _renamed(instance, number))
        one = one.replace(study_uid, _renamed(study_uid, study))
        below = folder / "dicom" / f"{study:06d}"
        below.mkdir(parents=True, exist_ok=True)
        name = f"{_HUNG if number % (num_files // num_hung) == num_files // num_hung // 2 else ''}{place}.dcm"
        (below / name).write_bytes(one)


def _renamed(uid: bytes, number: int) -> bytes:
    return uid[:-9] + b"%09d" % number


class _Timed(io.StringIO):
    """Stream that keeps each line with its time."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def write(self, text: str) -> int:
        """Keep a line."""
        self.lines.append((time.monotonic(), text.strip()))
        return super().write(text)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--files", type=int, default=12_800)
    parser.add_argument("--processes", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--hung", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder, options.files, options.hung)
        for processes, hangs in [*((one, "") for one in options.processes), (options.processes[-1], "1")]:
            os.environ[_HANGS] = hangs
            rows.append(_measure(folder / f"{processes}{hangs}", folder / "dicom", processes, options))
            sys.stderr.write(f"{rows[-1]}\n")
    found = {
        "about": about_run(["numpy", "pydicom"]),
        "command": " ".join(["python", "-m", "benchmarks.pack.scan", *sys.argv[1:]]),
        "load_average": os.getloadavg(),
        "files": options.files,
        "hung_files": options.hung,
        "simulated": f"each open of a file takes {_DELAY_S} s; files are generated, on the local disk",
        "opens_per_file": _OPENS_PER_FILE,
        "deadline_s": options.timeout_s,
        "rows": rows,
    }
    write_result(found, options.output)
    return 0


def _measure(folder: Path, dicom: Path, processes: int, options: argparse.Namespace) -> dict[str, Any]:
    folder.mkdir()
    (folder / "dicom").symlink_to(dicom)
    (folder / "pack.toml").write_text(
        _SETTINGS.format(folder=folder, processes=processes, timeout_s=options.timeout_s), encoding="utf-8"
    )
    stream = _Timed()
    used, start = os.times(), time.monotonic()
    summary = pack(
        load_config(PackConfig, folder / "pack.toml", []),
        LineProgress(stream),
        is_dry_run=True,
        handlers="benchmarks.pack.scan:make_handler",
    )
    after = os.times()
    began = next(at for at, line in stream.lines if line.startswith("reading headers"))
    ended = next(at for at, line in stream.lines if at > began and not line.startswith("reading headers"))
    estimates = [
        {
            "elapsed_s": at - began,
            "done": int(match[1]),
            "said_left_s": float(match[3]) * _SECONDS[match[4]],
            "was_left_s": ended - at,
        }
        for at, line in stream.lines
        if (match := _LEFT.search(line)) is not None and line.startswith("reading headers")
    ]
    return {
        "processes": processes,
        "has_hung_files": bool(os.environ[_HANGS]),
        "wall_s": time.monotonic() - start,
        "headers_s": ended - began,
        "files_per_s": options.files / (ended - began),
        "bound_files_per_s": processes / (_OPENS_PER_FILE * _DELAY_S),
        "processor_s": sum(after[:4]) - sum(used[:4]),
        "inputs": summary.inputs,
        "reasons": summary.reasons,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "estimates": estimates,
    }


if __name__ == "__main__":
    sys.exit(main())
