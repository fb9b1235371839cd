"""What disks, clocks, file systems and other programs do to jobs: each tried, and answered by name.

Failing reads and quotas are made by a library that is loaded before libc (LD_PRELOAD), in processes of their
own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ManifestError, ShardflowError
from shardflow.format import Dataset, verify
from shardflow.sampling import BatchSpec
from shardflow.storage import LocalStore
from shardflow.training.ledger import compare_ledgers, read_records
from shardflow.training.run import train
from tests.dicom_factory import make_study
from tests.factories import make_dataset
from tests.integration.loader_support import open_loader
from tests.pack_case import REPOSITORY, PackCase
from tests.packages import install_programs
from tests.tiny_runs import make_tiny_input, tiny_config

_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

/* 1 where a call on a file whose path holds $FAULT_PATH is to fail. */
static int hits(int fd, const char *kind) {
    const char *want = getenv("FAULT_PATH"), *on = getenv("FAULT_KIND");
    char link[64], path[4096];
    ssize_t n;
    if (!want || !on || strcmp(on, kind)) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if ((n = readlink(link, path, sizeof path - 1)) < 0) return 0;
    path[n] = 0;
    return strstr(path, want) != NULL;
}
#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(kind, code) do { if (hits(fd, kind)) { errno = code; return -1; } } while (0)
ssize_t read(int fd, void *b, size_t n) { REAL(read); FAIL("read", EIO); return real(fd, b, n); }
ssize_t pread64(int fd, void *b, size_t n, off64_t o) {
    REAL(pread64); FAIL("read", EIO); return real(fd, b, n, o); }
ssize_t preadv64(int fd, const struct iovec *v, int c, off64_t o) {
    REAL(preadv64); FAIL("read", EIO); return real(fd, v, c, o); }
ssize_t preadv64v2(int fd, const struct iovec *v, int c, off64_t o, int f) {
    REAL(preadv64v2); FAIL("read", EIO); return real(fd, v, c, o, f); }
ssize_t preadv(int fd, const struct iovec *v, int c, off_t o) {
    REAL(preadv); FAIL("read", EIO); return real(fd, v, c, o); }
ssize_t write(int fd, const void *b, size_t n) { REAL(write); FAIL("write", EDQUOT); return real(fd, b, n); }
ssize_t writev(int fd, const struct iovec *v, int c) {
    REAL(writev); FAIL("write", EDQUOT); return real(fd, v, c); }
int fsync(int fd) { REAL(fsync); FAIL("fsync", EIO); return real(fd); }
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    install_programs(["gcc"], ["gcc", "libc6-dev"], otherwise="a C compiler cannot be installed")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(_SHIM)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", "shim.so", "shim.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "shim.so"


def _under(shim: Path, kind: str, path: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours where calls of a kind fail on files whose path holds ``path``."""
    environment = {**os.environ, "LD_PRELOAD": str(shim), "FAULT_KIND": kind, "FAULT_PATH": path}
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


# ---- files -------------------------------------------------------------------------------------------


def test_a_pipe_in_place_of_a_tar_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "a.tar")
    assert cli.main(["index", str(tmp_path / "a.tar"), "-o", str(tmp_path / "out")]) == 1
    assert "got a pipe, folder or device" in capsys.readouterr().err


def test_a_huge_manifest_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(tmp_path / "data", num_samples=2)
    path = tmp_path / "data" / "manifest-000002.json"
    path.write_bytes(b"{")
    os.truncate(path, 200 << 20)
    monkeypatch.setattr(LocalStore, "read", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(LocalStore, "read_ranges", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ManifestError, match="at most 96 MiB, got 200 MiB"):
        sf.open(tmp_path / "data")


def test_a_dataset_that_is_replaced_under_a_loader_yields_no_other_bytes(tmp_path: Path) -> None:
    place = tmp_path / "data"
    make_dataset(place, num_samples=24, samples_per_shard=2, facts=True)
    make_dataset(tmp_path / "other", num_samples=24, samples_per_shard=2, seed=1, facts=True)
    whole = Dataset.open(place)
    texts = {whole.samples.sample_key(row): whole.read_fields(row)["report.txt"] for row in range(24)}
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)
    found: list[tuple[str, bytes]] = []

    def read(loader: sf.Loader) -> None:
        for number, batch in enumerate(loader):
            found.extend(
                (key, batch["report"][slot].encode())
                for slot, key in enumerate(batch.info.sample_keys)
                if key is not None and batch.info.weight[slot]
            )
            if number == 1:
                place.rename(tmp_path / "gone")
                (tmp_path / "other").rename(place)
                loader.dataset.store.close()  # type: ignore[attr-defined]  # as if no file had been open

    with (
        open_loader(str(place), spec, {"report": sf.Text()}, prefetch_bytes=1) as loader,
        pytest.raises(ShardflowError) as ended,
    ):
        read(loader)
    assert found
    assert all(texts[key] == text for key, text in found)
    assert ended.value.message


def test_inputs_that_change_while_they_are_packed(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    for number in range(6):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=3, seed=number)
    others = tmp_path / "others"
    make_study(others, patient="X", num_slices=3, seed=99)
    files = sorted(path for path in case.dicom.rglob("*") if path.is_file())
    contents = [path.read_bytes() for path in [*files, *(p for p in others.rglob("*") if p.is_file())]]
    is_done = threading.Event()

    def change() -> None:
        for turn in itertools.count():
            path = files[turn % len(files)]
            if turn % 5 == 0:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(contents[turn * 7 % len(contents)][: None if turn % 3 else 700])
            if is_done.wait(0.002):
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        summary = case.pack("policy.max_quarantined_share=1.0")
    finally:
        is_done.set()
        thread.join()
    counts = summary.inputs
    assert counts["total"] == counts["packed"] + counts["skipped"] + counts["quarantined"]
    if list(case.output.glob("manifest*")):
        assert verify(case.output).is_whole


@pytest.mark.parametrize("num_files", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_many_tiny_files_beside_one_study(tmp_path: Path, num_files: int) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    make_study(case.dicom / "p", patient="P", num_slices=3)
    for number in range(num_files):
        folder = case.dicom / "tiny" / f"{number % 97:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.dcm").write_bytes(b"x" * (number % 7))
    summary = case.pack("policy.max_quarantined_share=1.0")
    assert case.open().samples.num_samples == 1
    assert sum(summary.reasons.values()) == num_files


# ---- disks -------------------------------------------------------------------------------------------


def test_a_disk_that_fails_under_a_loader_is_named(tmp_path: Path, shim: Path) -> None:
    make_dataset(tmp_path / "data", num_samples=8)
    verified = _under(
        shim, "read", "train-000001.tar", "shardflow.cli.main", "verify", str(tmp_path / "data"), "--json"
    )
    assert verified.returncode == 1
    assert "Input/output error" in verified.stdout + verified.stderr
    code = (
        "import sys, shardflow as sf\n"
        "spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=1)\n"
        "fields = {'report': sf.Text()}\n"
        "loader = sf.Loader(sf.open(sys.argv[1]), split='train', batch=spec, seed=1, fields=fields)\n"
        "list(loader)\n"
    )
    (tmp_path / "reader.py").write_text(code)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "FAULT_KIND": "read", "FAULT_PATH": ".tar"}
    read = subprocess.run(
        [sys.executable, str(tmp_path / "reader.py"), str(tmp_path / "data")],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert read.returncode == 1
    assert "StorageError" in read.stderr
    assert "Input/output error" in read.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "reason"), [("write", "Disk quota exceeded"), ("fsync", "Input/output error")]
)
def test_a_quota_or_a_failed_sync_publishes_nothing(
    tmp_path: Path, shim: Path, kind: str, reason: str
) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    for number in range(3):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=3, seed=number)
    packed = _under(
        shim, kind, f"{case.output}/", "shardflow.cli.main", "pack", "--config", str(case.config_path)
    )
    assert packed.returncode == 1
    assert reason in packed.stderr
    assert not list(case.output.glob("manifest*"))
    again = case.pack()
    assert verify(case.output).is_whole
    assert again.dataset_id
    assert again.reasons == {}


def test_an_input_that_cannot_be_read_is_quarantined_alone(tmp_path: Path, shim: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    for number in range(3):
        make_study(case.dicom / f"p{number}", patient=f"P{number}", num_slices=2, seed=number)
    packed = _under(
        shim, "read", "/dicom/p1/", "shardflow.cli.main", "pack", "--config", str(case.config_path), "--json",
        "--set", "policy.max_quarantined_share=0.9",
    )  # fmt: skip
    assert packed.returncode == 0, packed.stderr
    summary = json.loads(packed.stdout.splitlines()[-1])
    assert summary["reasons"] == {"FILE_UNREADABLE": 2}
    assert case.open().samples.num_samples == 2


# ---- clocks ------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_nothing_that_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = make_tiny_input(tmp_path / "input")
    train(tiny_config(tiny, tmp_path / "whole", "run.max_steps=5"))
    real, jumps = time.time, itertools.cycle([0.0, 86400.0, -86400.0, 3600.0, -40 * 86400.0])
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    train(tiny_config(tiny, tmp_path / "run", "run.max_steps=3"))
    assert train(tiny_config(tiny, tmp_path / "run", "run.max_steps=5")).resumed_from == "step-00000003"
    assert list(compare_ledgers(read_records(tmp_path / "run"), read_records(tmp_path / "whole"))) == []
