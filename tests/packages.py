"""Programs that some tests need beside Python's packages."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

__all__ = ["find_program", "install_beside", "install_programs", "unpack_programs"]


def find_program(name: str) -> str | None:
    """The path of a program, also of those for administrators."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def install_programs(programs: Sequence[str], packages: Sequence[str], *, otherwise: str) -> None:
    """Make programs available from Debian's packages, or skip the test with that reason."""
    if all(map(find_program, programs)):
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        # Several test processes may come here at once: they wait for each other.
        wait = ["-o", "DPkg::Lock::Timeout=240"]
        command = ["apt-get", *wait, "install", "-y", "-qq", "--no-install-recommends", *packages]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for attempt in (command, ["apt-get", *wait, "update", "-qq"], command):
            subprocess.run(attempt, env=environment, check=False, capture_output=True, timeout=300)
            if all(map(find_program, programs)):
                return
    pytest.skip(otherwise)


def unpack_programs(programs: Sequence[str], package: str, *, otherwise: str) -> list[Path]:
    """The programs of one of Debian's packages, without installing it; or skip the test with that reason.

    For a package whose installation would start a service, or bring more than the programs need. What is
    unpacked stays in the folder for temporary files, for the next test.
    """
    folder = _folder()
    found = [folder / package / "usr" / "bin" / name for name in programs]
    # Several test processes may come here at once: they wait for each other.
    with (folder / f"{package}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(path.is_file() for path in found) and not _unpack(package, folder):
            pytest.skip(otherwise)
    return found


def install_beside(name: str, version: str) -> Path:
    """The folder of a Python package alone, without what it requires, or skip the test.

    For a package that breaks others where they find it, so that the environment must not have it.
    """
    folder = _folder()
    found = folder / f"{name}-{version}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.is_dir():
            made = folder / f"{name}.part"
            shutil.rmtree(made, ignore_errors=True)
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(made)]
            done = subprocess.run([*command, f"{name}=={version}"], check=False, timeout=300)
            if done.returncode:
                pytest.skip(f"{name} cannot be installed")
            made.rename(found)
    return found


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"shardflow-programs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _unpack(package: str, folder: Path) -> bool:
    if not shutil.which("apt-get"):
        return False
    download = ["apt-get", "download", "-qq", package]
    # The lists of a fresh machine are missing, those of an old one name packages that are gone.
    for attempt in (download, ["apt-get", "-o", "DPkg::Lock::Timeout=240", "update", "-qq"], download):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            subprocess.run(attempt, cwd=work, check=False, capture_output=True, timeout=300)
            for archive in Path(work).glob("*.deb"):
                unpacked = Path(work) / "unpacked"
                subprocess.run(["dpkg-deb", "-x", archive, unpacked], check=True, timeout=120)
                shutil.rmtree(folder / package, ignore_errors=True)
                unpacked.rename(folder / package)
                return True
    return False
