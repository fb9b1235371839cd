"""Processor time of packing with and without the privacy searches that no setting turns off.

    python -m benchmarks.privacy.cost --output benchmarks/results/privacy_cost.json

The same job in one process, in turns: as it is, without the search for heads, and also without those for
pages of text and copies of images. Text in pixels is not searched, and reports are scrubbed. The CT is
generated: phantoms of `shardflow synth`, in several short series a study, and that of the packing benchmark.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benchmarks.about import REPOSITORY, about_run, write_result
from benchmarks.pack.content import CT, make_content
from shardflow.cli.main import main as shardflow
from shardflow.config import load_config
from shardflow.packing import PackConfig, pack, scan
from shardflow.packing.studies.privacy import StudyPrivacy
from shardflow.packing.studies.study import StudyMembers
from tests.inline_engine import packing_inline

_PHANTOMS: Final = ["--studies", "6", "--seed", "4", "--modality", "CT", "--pathologies", "none"]
_SEARCHES: Final[dict[str, tuple[Any, str, Any]]] = {
    "heads": (StudyMembers, "_head_finder", lambda *_: None),
    "pages": (StudyPrivacy, "held_back_pages", lambda *_: {}),
    "copies": (scan, "_pixel_digest", lambda *_: 0),
}
CASES: Final = {"all": (), "without heads": ("heads",), "without any": tuple(_SEARCHES)}


def _job(inputs: Path, output: Path, left_out: tuple[str, ...]) -> tuple[float, int]:
    """Pack once; return processor seconds and images."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    settings = [
        f"inputs.dicom={inputs / 'dicom'}",
        f"inputs.reports={inputs / 'reports.csv'}",
        f"output={output / 'dataset'}",
        f"private_dir={output / 'private'}",
        "execution.num_processes=1",
    ]
    config = load_config(PackConfig, REPOSITORY / "pipelines/recipes/pack_folders.toml", settings)
    with ExitStack() as patches:
        for name in left_out:
            patches.enter_context(mock.patch.object(*_SEARCHES[name]))
        start = time.process_time()
        summary = pack(config)
        return time.process_time() - start, summary.num_slices


def measure(inputs: Path, output: Path, rounds: int) -> dict[str, Any]:
    """Measure all cases in turns, after a job that warms up."""
    _, images = _job(inputs, output, ())
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(rounds):
        names = list(CASES)
        for name in names[turn % 3 :] + names[: turn % 3]:
            seconds[name].append(round(_job(inputs, output, CASES[name])[0], 3))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    least = medians["without any"]
    return {
        "images": images,
        "share_of_time": {
            "heads": round((medians["all"] - medians["without heads"]) / least, 3),
            "all": round(medians["all"] / least - 1, 3),
        },
        "median_cpu_s": medians,
        "cpu_s": seconds,
    }


def main() -> None:
    """Make the content, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"about": about_run(["numpy", "opencv-python-headless", "blosc2"])}
    with tempfile.TemporaryDirectory() as folder, packing_inline():
        phantoms, plain = Path(folder, "phantoms"), Path(folder, "plain")
        shardflow(["synth", str(phantoms), *_PHANTOMS])
        make_content(plain, CT, 24)
        found["phantoms, 6 studies"] = measure(phantoms, Path(folder, "out"), options.rounds)
        found["packing benchmark, 24 studies"] = measure(plain, Path(folder, "out"), options.rounds)
    write_result(found, options.output)


if __name__ == "__main__":
    main()
