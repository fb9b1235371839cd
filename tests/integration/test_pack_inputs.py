"""Mistaken settings and inputs: each is named, nothing is lost, nothing identifying is said."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardflow.errors import ConfigError, FormatError
from tests.dicom_factory import make_study
from tests.forks import PATIENCE_S, REPOSITORY, run
from tests.pack_case import PackCase, tree_digests
from tests.pack_faults import FAULTY_COMMAND

pytestmark = pytest.mark.usefixtures("packs_inline")


@pytest.fixture
def case(tmp_path: Path) -> PackCase:
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "a", num_slices=2)
    return case


def _edit(case: PackCase, old: str, new: str) -> None:
    text = case.config_path.read_text(encoding="utf-8")
    assert old in text
    case.config_path.write_text(text.replace(old, new), encoding="utf-8")


def _reports_without_text(case: PackCase) -> None:
    """Refused by its first line: there is no output folder yet, and no header row."""
    case.config_path.with_name("reports.csv").write_text("study_instance_uid,findings\n", encoding="utf-8")
    _edit(case, '["dicom"]', '["dicom"]\nreports = "reports.csv"')


MISTAKES: dict[str, tuple[Callable[[PackCase], None], str]] = {
    "unknown key": (lambda c: _edit(c, "dicom =", "dcom ="), "'dicom'"),
    "unknown table": (lambda c: _edit(c, "[execution]", "[exceution]"), "'execution'"),
    "missing folder": (lambda c: _edit(c, '"dicom"', '"nowhere"'), "input folder 1 of 1 must exist"),
    "two folders, one missing": (lambda c: _edit(c, '"dicom"', '"dicom", "nowhere"'), "input folder 2 of 2"),
    "nested folders": (lambda c: _edit(c, '"dicom"', '"dicom", "dicom/a"'), "inside one another"),
    "no folder": (lambda c: _edit(c, '["dicom"]', "[]"), "dicom must name at least one folder"),
    "private inside output": (
        lambda c: _edit(c, '"private"', '"out/private"'),
        "private_dir must be outside output",
    ),
    "output inside input": (
        lambda c: _edit(c, '"out"', '"dicom/out"'),
        "output must not overlap with the input folders",
    ),
    "input inside output": (lambda c: _edit(c, '"out"', '"."'), "private_dir must be outside output"),
    "split name": (lambda c: _edit(c, "train =", "Train-1 ="), "a split's name must be 1 to 32 of [a-z0-9]"),
    "split parts": (lambda c: _edit(c, "train = 60\nval = 40", "train = 0"), "at least one part"),
    "negative parts": (lambda c: _edit(c, "val = 40", "val = -1"), "splits.val must be at least 0"),
    "processes": (
        lambda c: _edit(c, "num_processes = 1", "num_processes = -1"),
        "num_processes must be from 0",
    ),
    "memory": (lambda c: _edit(c, '"1GiB"', '"1MiB"'), "memory_bytes must be at least"),
    "reports missing": (
        lambda c: _edit(c, '["dicom"]', '["dicom"]\nreports = "none.csv"'),
        "inputs.reports must be an existing",
    ),
    "reports without their column": (_reports_without_text, "must have one column 'text', got 0"),
    "reports required": (
        lambda c: _edit(c, "[splits]", "[policy]\nrequire_report = true\n[splits]"),
        "require_report needs inputs.reports",
    ),
    "key missing": (
        lambda c: _edit(c, "[splits]", '[identity]\nkey_file = "k"\n[splits]'),
        "secret key file must be",
    ),
    "key open": (lambda c: (c.private / "secret.key").chmod(0o644), "closed to group and others"),
    "key short": (lambda c: _write(c.private / "secret.key", b"short"), "at least 32 bytes"),
    "private open": (lambda c: c.private.chmod(0o755), "private_dir must be closed"),
    "output is a file": (lambda c: _write(c.output, b""), "output must be a folder"),
    "output is in use": (
        lambda c: _write_below(c.output / "thesis.doc"),
        "output must be new, empty or a dataset",
    ),
}


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _write_below(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"years of work")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(case: PackCase, mistake: str) -> None:
    make, expected = MISTAKES[mistake]
    make(case)
    before = tree_digests(case.folder)
    with pytest.raises(ConfigError) as caught:
        case.pack()
    assert expected in caught.value.message
    assert str(case.folder) not in caught.value.message
    after = tree_digests(case.folder)
    assert {name: digest for name, digest in after.items() if name in before} == before
    assert not list(case.output.rglob("manifest*")) if case.output.is_dir() else True


def test_no_dicom_is_named_with_what_was_found(case: PackCase) -> None:
    for path in case.dicom.rglob("*.dcm"):
        path.write_text("not an image", encoding="utf-8")
    make_study(case.dicom / "sr", modality="SR", num_slices=1)
    with pytest.raises(ConfigError) as caught:
        case.pack()
    assert "must hold DICOM images, got 3 files and none of them" in caught.value.message
    assert "2 NOT_DICOM" in caught.value.message


def test_empty_folders_are_named(case: PackCase) -> None:
    for path in case.dicom.rglob("*.dcm"):
        path.unlink()
    with pytest.raises(ConfigError, match="names empty folders"):
        case.pack()


def test_nothing_left_by_the_policy_is_a_setting(case: PackCase) -> None:
    case.prepare(has_reports=True)
    case.write_reports({"1.2.3": "nobody's"})
    with pytest.raises(ConfigError, match=r"STUDY_WITHOUT_REPORT"):
        case.pack("policy.require_report=true")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: _edit(c, '"10KiB"', '"11KiB"'), "packed with other settings"),
        (lambda c: make_study(c.dicom / "b", patient="B"), "dataset of the same inputs"),
        (lambda c: _write(c.private / "secret.key", b"k" * 32), "packed with another secret key"),
        (lambda c: (c.private / "secret.key").unlink(), "secret key file must be"),
    ],
)
def test_a_dataset_is_never_changed(
    case: PackCase, change: Callable[[PackCase], object], expected: str
) -> None:
    case.pack()
    before = tree_digests(case.output)
    change(case)
    with pytest.raises(ConfigError, match=expected):
        case.pack()
    assert tree_digests(case.output) == before


def test_a_damaged_dataset_is_not_called_packed(case: PackCase) -> None:
    case.pack()
    next((case.output / "shards").glob("*.tar")).unlink()
    with pytest.raises(FormatError, match="run `shardflow verify`"):
        case.pack()


@pytest.mark.parametrize("folder", ["private", "out/.work"])
def test_two_jobs_do_not_share_a_folder(case: PackCase, folder: str) -> None:
    (case.folder / folder).mkdir(parents=True, exist_ok=True)
    with (case.folder / folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another job is using"):
            case.pack()
    assert case.pack().reasons == {}


def test_a_symbolic_link_to_the_inputs_is_seen_through(case: PackCase) -> None:
    (case.folder / "link").symlink_to(case.dicom)
    _edit(case, '"out"', '"link/out"')
    with pytest.raises(ConfigError, match="output must not overlap with"):
        case.pack()


# ---- the command ----


def test_the_last_line_is_the_summary(case: PackCase) -> None:
    done = case.command()
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["dataset_id"] == case.open().dataset_id
    assert summary["inputs"] == {"total": 2, "packed": 2, "skipped": 0, "quarantined": 0}
    assert summary["num_slices"] == 2
    assert summary["seconds"] > 0
    assert summary["peak_memory_bytes"]["process"] > 1 << 20
    assert "2 inputs: 2 packed, 0 skipped, 0 quarantined." in done.stdout
    # No terminal: plain lines, no control characters.
    assert "packing studies (1)" in done.stderr
    assert "\x1b" not in done.stderr
    again = case.command("--json")
    assert again.stdout.count("\n") == 1
    assert json.loads(again.stdout)["status"] == "already_packed"


def test_exit_codes(case: PackCase) -> None:
    wrong = case.command("--json", "--set", "shards.max_sample=3")
    assert wrong.returncode == 2
    assert json.loads(wrong.stdout.splitlines()[-1])["status"] == "configuration_error"
    assert "the nearest known key is 'max_samples'" in wrong.stderr
    assert case.command("--set", "execution.no").returncode == 2
    for path in case.dicom.rglob("*.dcm"):
        path.write_bytes(path.read_bytes()[:-50])
    over = case.command()
    assert over.returncode == 3, over.stderr
    assert json.loads(over.stdout.splitlines()[-1])["status"] == "quarantine_limit"
    assert "nothing is published" in over.stdout


def test_settings_can_be_shown(case: PackCase) -> None:
    done = case.command("--print-config", "--set", "shards.max_samples=77")
    assert done.returncode == 0
    assert "max_samples = 77" in done.stdout
    expected = case.config("shards.max_samples=77")
    case.config_path.write_text(done.stdout, encoding="utf-8")
    assert case.config() == expected
    assert not case.output.exists()


@pytest.mark.parametrize(
    "numbers", [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGINT, signal.SIGTERM, signal.SIGINT)]
)
def test_a_signal_ends_the_job_and_it_goes_on_later(
    case: PackCase, numbers: tuple[signal.Signals, ...]
) -> None:
    studies = [make_study(case.dicom / f"p{patient}", patient=f"Q{patient}") for patient in range(4)]
    case.write_faults(study={case.sample_key(studies[-1].study_instance_uid): "hold"})
    with subprocess.Popen(
        [sys.executable, "-c", FAULTY_COMMAND, "--config", str(case.config_path)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        case.wait_until_held(job)
        (server,) = _children_of(job.pid)
        processes = [server, *_children_of(server)]
        # As a terminal or a scheduler does it: to the whole group.
        for number in numbers:
            os.killpg(job.pid, number)
        output, errors = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 130, output + errors
    assert json.loads(output.splitlines()[-1])["status"] == "interrupted"
    assert "run the job again to resume" in errors
    assert "Traceback" not in errors
    assert len(processes) > 1
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
    assert not list(case.output.glob("manifest*"))
    assert not (case.private / "resource_outcomes.jsonl").exists()
    assert case.pack().reasons == {}


def _children_of(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]


def test_an_internal_error_shows_classes_and_places_only(case: PackCase) -> None:
    script = (
        "import sys, shardflow.cli.main, shardflow.packing\n"
        "def broken(*args, **settings):\n    raise KeyError('DOE^JANE')\n"
        "shardflow.packing.pack = broken\n"
        "sys.exit(shardflow.cli.main.main(['pack', *sys.argv[1:]]))"
    )
    done = run(["-c", script, "--config", case.config_path])
    assert done.returncode == 1
    assert "internal error: KeyError at" in done.stderr
    assert "DOE" not in done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["status"] == "error"


def test_the_recipe_is_whole(case: PackCase) -> None:
    recipe = REPOSITORY / "pipelines" / "recipes" / "pack_folders.toml"
    command = ["-m", "pipelines.pack", "--print-config", "--config"]
    done = run([*command, recipe])
    assert done.returncode == 0, done.stderr
    shown = case.folder / "shown.toml"
    shown.write_text(done.stdout, encoding="utf-8")
    again = run([*command, shown])
    assert again.stdout == done.stdout
