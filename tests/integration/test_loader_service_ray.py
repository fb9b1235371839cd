"""Data servers on Ray: spread over two machines, started again where one is lost, found by their file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.loading import Loader, service
from shardflow.sampling import BatchSpec
from tests.conftest import REPOSITORY
from tests.factories import make_dataset
from tests.integration.loader_support import digest_of, open_loader

pytest.importorskip("ray", reason="Ray is not installed")

from tests.ray_cluster import actors, ray_cluster

pytestmark = pytest.mark.slow
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=3, tail="mask")
PATIENCE_S = 300.0


def _until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_servers_of_two_machines_are_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_RESOLVE_S", 0.5)
    url = make_dataset(tmp_path / "data", num_samples=40, samples_per_shard=16, facts=True)
    token, file = tmp_path / "token", tmp_path / "servers"
    token.write_text("0123456789abcdef0123", encoding="ascii")
    folder = Path(tempfile.mkdtemp(prefix="sf-"))

    def loader(**settings: object) -> Loader:
        return open_loader(url, SPEC, {"image": sf.Slices(num_slices=4, size=(32, 32))}, **settings)

    def lines() -> list[str]:
        return file.read_text(encoding="ascii").split() if file.exists() else []

    with ray_cluster(folder, num_nodes=2) as cluster:
        command = [sys.executable, "-m", "shardflow.cli.main", "serve", url, "--ray", cluster.address]
        command += ["--servers", "2", "--threads", "1", "--addresses", str(file), "--token-file", str(token)]
        with subprocess.Popen(command, cwd=REPOSITORY) as serving:
            try:
                _until(lambda: len(lines()) == 2)
                before = lines()
                servers = actors(os.getpid(), "ServingActor")
                assert len(servers) == 2
                with (
                    loader() as local,
                    loader(execution="service", servers=[f"@{file}"], server_token_file=str(token)) as served,
                ):
                    expected = [digest_of(batch) for batch in local]
                    assert [digest_of(batch) for batch in served] == expected
                    assert not served.counters.totals("service_local").num_items
                    os.kill(servers.pop(), signal.SIGKILL)
                    second = [digest_of(batch) for batch in local]
                    assert [digest_of(batch) for batch in served] == second
                    _until(lambda: len(lines()) == 2 and lines() != before)
                    third = [digest_of(batch) for batch in local]
                    assert [digest_of(batch) for batch in served] == third
            finally:
                serving.terminate()
        assert serving.returncode == 0
        _until(lambda: not actors(os.getpid(), "ServingActor"))
    shutil.rmtree(folder, ignore_errors=True)
