"""A minimal install: every ``--help`` works, and a command says which extra it lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardflow.cli.main import COMMANDS, EXTRAS, extra_of
from tests.factories import make_dataset

REPOSITORY = Path(__file__).resolve().parents[2]
_LACKS_PACK = "shardflow pack needs the extra 'pack': pip install 'shardflow[pack]'"
# Refuses what the extras install, as if none were installed, and runs the console script.
_WITHOUT_EXTRAS = """
import sys
from shardflow.cli.main import EXTRAS, main
refused = {package for packages in EXTRAS.values() for package in packages.split()}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
def code_of(arguments):
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code
"""


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_EXTRAS + script],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.fast
def test_every_help_works_without_extras() -> None:
    done = _run(
        "for name in " + repr(["", *COMMANDS]) + ": assert code_of([*name.split(), '--help']) == 0, name"
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"usage: shardflow {name} " in done.stdout


@pytest.mark.fast
def test_a_command_says_which_extra_it_needs(tmp_path: Path) -> None:
    recipe = tmp_path / "pack.toml"
    recipe.write_text('inputs = ["in"]\noutput = "out"\nprivate_dir = "private"\n', encoding="utf-8")
    done = _run(f"sys.exit(code_of(['pack', '--config', {str(recipe)!r}]))")
    assert done.stderr == f"shardflow: {_LACKS_PACK}\n"
    assert done.returncode == 2


@pytest.mark.fast
def test_a_package_of_no_extra_is_a_mistake_of_ours() -> None:
    assert extra_of(ModuleNotFoundError(name="pydicom.uid")) == "pack"
    assert extra_of(ModuleNotFoundError(name="nowhere.found")) is None
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS) <= set(project["optional-dependencies"])


_READS = """
import shardflow as sf
def batches(folder, **image):
    fields = {"image": sf.Slices(num_slices=2, dtype="int16", **image), "report": sf.Text()}
    spec = sf.BatchSpec.simple(global_batch_size=2, micro_batch_size=2)
    with sf.Loader(sf.open(folder), split="train", seed=7, batch=spec, fields=fields) as loader:
        return [(batch["image"].sum(), batch["report"]) for batch in loader], loader.quarantined
def needed(*arguments, **image):
    try:
        batches(*arguments, **image)
    except sf.ConfigError as error:
        return error.message
"""


@pytest.mark.fast
def test_a_dataset_is_read_without_extras_and_an_image_names_its_own(tmp_path: Path) -> None:
    for codec in ("b2nd", "png16", "htj2k"):
        make_dataset(tmp_path / codec, codec=codec, slices=3, facts=True)
    script = (
        _READS
        + f"""
folder = {str(tmp_path / "b2nd")!r}
plan = "--split train --micro-batch-size 2 --micro-batches-per-step 2 --seed 1 --epoch 0 --world-size 1"
for command in ("info", "verify", "plan " + plan):
    name, *options = command.split()
    assert code_of([name, folder, *options]) == 0, command
found, bad = batches(folder, size=(16, 16))
assert len(found) == 6 and all(total and text for total, text in found) and not bad
print(needed(folder, size=(8, 8)))
for codec in ("png16", "htj2k"):
    print(needed({str(tmp_path)!r} + "/" + codec, size=(16, 16)))
"""
    )
    done = _run(script)
    assert (done.returncode, done.stderr) == (0, "")
    resized, png, jpeg2000 = done.stdout.splitlines()[-3:]
    assert "need OpenCV, which is not installed; run: pip install 'shardflow[images]'" in resized
    assert png == resized
    assert "pip install 'shardflow[htj2k]'" in jpeg2000


@pytest.mark.fast
def test_an_opencv_that_does_not_load_is_an_error_of_images_alone(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", slices=3, facts=True)
    (tmp_path / "cv2.py").write_text('raise ImportError("libGL.so.1: cannot open shared object file")\n')
    script = f"""
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path.pop(0)
{_READS}
folder = {str(tmp_path / "data")!r}
assert len(batches(folder, size=(16, 16))[0]) == 6
print(needed(folder, size=(8, 8)))
"""
    done = _run(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "OpenCV must load, got: libGL.so.1: cannot open shared object file" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it installs the packages, and runs every command of theirs
def test_a_minimal_install_runs_every_help(tmp_path: Path) -> None:
    """The wheel with the base dependencies alone, in an environment of its own."""
    uv = [sys.executable, "-m", "uv"] if shutil.which("uv") is None else ["uv"]
    python = tmp_path / "venv" / "bin" / "python"
    constraints = REPOSITORY / "constraints.txt"
    commands: list[list[str | Path]] = [
        [*uv, "venv", "--quiet", "--python", sys.executable, python.parents[1]],
        [*uv, "pip", "install", "--quiet", "--python", python, "--constraints", constraints, REPOSITORY],
    ]
    for command in commands:
        subprocess.run(command, check=True, timeout=300)
    packages = python.parents[1] / "lib"
    num_bytes = sum(path.lstat().st_blocks * 512 for path in packages.rglob("*"))
    assert num_bytes < 150e6, f"a minimal install takes {num_bytes / 1e6:.0f} MB"
    make_dataset(tmp_path / "data", slices=3, facts=True)
    reading = _READS + "assert len(batches('data', size=(16, 16))[0]) == 6"
    subprocess.run([python, "-c", reading], cwd=tmp_path, check=True, timeout=300)
    shardflow = python.with_name("shardflow")
    for name in ("", *COMMANDS):
        done = subprocess.run(
            [shardflow, *name.split(), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), name
    recipe = tmp_path / "pack.toml"
    recipe.write_text('inputs = ["in"]\noutput = "out"\nprivate_dir = "private"\n', encoding="utf-8")
    done = subprocess.run(
        [shardflow, "pack", "--config", recipe], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (2, "shardflow: " + _LACKS_PACK)
