"""Packing from Orthanc: 200 studies, a kill -9 in the middle, and the bytes of the same files."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pydicom
import pytest
from pydicom.uid import RLELossless

from shardflow.packing.sources.dicomweb.config import PASSWORD, TOKEN, USER
from tests.dicom_factory import make_study
from tests.dicomweb_server import basic
from tests.pack_case import PATIENCE_S, REPOSITORY, PackCase, tree_digests
from tests.packages import find_program, install_programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STUDIES = 200
_PLUGIN = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
_HEADERS = {"Authorization": basic("reader", "a password")}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, _HEADERS)
        response = connection.getresponse()
        answer = response.read()
        assert response.status == 200, (path, response.status)
        return answer
    finally:
        connection.close()


@pytest.fixture(scope="module")
def orthanc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """An empty Orthanc; its port."""
    install_programs(["Orthanc"], ["orthanc", "orthanc-dicomweb"], otherwise="Orthanc cannot be installed")
    if not _PLUGIN.exists():
        pytest.skip("Orthanc cannot be installed")
    folder, port = tmp_path_factory.mktemp("orthanc"), _free_port()
    settings = {
        "StorageDirectory": str(folder / "storage"),
        "HttpPort": port,
        "DicomPort": _free_port(),
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": True,
        "RegisteredUsers": {"reader": "a password"},
        "Plugins": [str(_PLUGIN)],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
    }
    (folder / "orthanc.json").write_text(json.dumps(settings), encoding="utf-8")
    program = find_program("Orthanc")
    assert program is not None
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([program, str(folder / "orthanc.json")], stdout=log, stderr=log) as server,
    ):
        try:
            until = time.monotonic() + PATIENCE_S
            while True:
                try:
                    _ask(port, "GET", "/system")
                    break
                except OSError:
                    assert server.poll() is None, (folder / "log").read_text(errors="replace")
                    assert time.monotonic() < until
                    time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def _compressed(dataset: pydicom.FileDataset, index: int) -> None:
    if index % 2:
        dataset.compress(RLELossless, generate_instance_uid=False)


def test_a_killed_job_over_200_studies_resumes_to_the_bytes_of_the_files(
    orthanc: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, web = PackCase(tmp_path / "files"), PackCase(tmp_path / "web")
    for case in (files, web):
        case.folder.mkdir()
        case.prepare()
        text = case.config_path.read_text(encoding="utf-8").replace("num_processes = 1", "num_processes = 2")
        case.config_path.write_text(text.replace("10KiB", "100KiB"), encoding="utf-8")
    for number in range(NUM_STUDIES):
        modality = ("CT", "MR", "CR")[number % 3]
        made = make_study(
            tmp_path / "made",
            patient=f"P{number // 2}",
            study=str(number),
            modality=modality,
            num_slices=1 + number % 4,
            size=(64, 48),
            seed=number,
            change=_compressed,
        )
        for path in made.files:
            header = pydicom.dcmread(path, stop_before_pixels=True)
            folder = files.dicom / header.StudyInstanceUID / header.SeriesInstanceUID
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / f"{header.SOPInstanceUID}.dcm")
            _ask(orthanc, "POST", "/instances", path.read_bytes())
    assert files.pack().studies["packed"] == NUM_STUDIES

    text = web.config_path.read_text(encoding="utf-8")
    web.config_path.write_text(
        text.replace('dicom = ["dicom"]', f'dicomweb = "http://127.0.0.1:{orthanc}/dicom-web"'),
        encoding="utf-8",
    )
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setenv(USER, "reader")
    monkeypatch.setenv(PASSWORD, "a password")
    kept = web.private / "archive" / "files"
    num_files = len(tree_digests(files.dicom))
    command = [sys.executable, "-m", "pipelines.pack", "--config", str(web.config_path)]
    slowly = ["--set", "inputs.archive.max_requests_per_s=100"]
    with (tmp_path / "said").open("wb") as said:
        for share in (0.3, 0.6):
            with subprocess.Popen(
                [*command, *slowly], cwd=REPOSITORY, stdout=said, stderr=said, start_new_session=True
            ) as job:
                until = time.monotonic() + PATIENCE_S
                while len(list(kept.rglob("*.dcm"))) < share * num_files:
                    assert job.poll() is None, (tmp_path / "said").read_text(encoding="utf-8")
                    assert time.monotonic() < until
                    time.sleep(0.01)
                os.killpg(job.pid, signal.SIGKILL)
        before = {path: path.stat().st_mtime_ns for path in kept.rglob("*.dcm")}
        assert 0 < len(before) < num_files
        run = subprocess.run(
            command, cwd=REPOSITORY, stdout=said, stderr=said, check=False, timeout=PATIENCE_S
        )
    text = (tmp_path / "said").read_text(encoding="utf-8")
    assert run.returncode == 0, text
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert tree_digests(kept) == tree_digests(files.dicom)
    assert tree_digests(web.output) == tree_digests(files.output)
    assert not any(folder.name in text for folder in files.dicom.iterdir())
