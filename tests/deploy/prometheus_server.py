"""A real Prometheus for tests: started on a port of the kernel's choice, asked by its HTTP interface."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.packages import unpack_programs

__all__ = ["Prometheus", "prometheus_programs", "run_prometheus"]

_WAIT_S = 300.0  # of a machine with much else to do; a second of a quiet one


def prometheus_programs() -> tuple[Path, Path]:
    """Prometheus and promtool, or the test is skipped."""
    server, tool = unpack_programs(
        ["prometheus", "promtool"], "prometheus", otherwise="Prometheus cannot be unpacked"
    )
    return server, tool


class Prometheus:
    """A server that runs."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the HTTP interface; what is wrong with a query fails the test."""
        query = urllib.parse.urlencode({name.rstrip("_"): value for name, value in parameters.items()})
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=300) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert found["status"] == "success", found
        return found["data"]

    def query(self, text: str) -> list[dict[str, Any]]:
        """The series of a query, now."""
        found: list[dict[str, Any]] = self.ask("query", query=text)["result"]
        return found

    def data(self, text: str) -> list[dict[str, Any]]:
        """The series of a query, once it has any: a scrape that failed for want of time has ended them."""
        found: list[dict[str, Any]] = []

        def has_data() -> bool:
            found[:] = self.query(text)
            return bool(found)

        self.wait_for(f"data of {text}", has_data)
        return found

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        """Wait until something is there."""
        deadline = time.monotonic() + _WAIT_S
        while not is_there():
            assert time.monotonic() < deadline, f"{what} did not come"
            time.sleep(0.05)


@contextmanager
def run_prometheus(folder: Path, configuration: dict[str, Any]) -> Iterator[Prometheus]:
    """Run one with its data in a folder; it has ended when the block has."""
    program, _ = prometheus_programs()
    folder.mkdir(parents=True, exist_ok=True)
    settings, log = folder / "prometheus.yml", folder / "log"
    settings.write_text(yaml.safe_dump(configuration))
    command = [str(program), f"--config.file={settings}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--web.listen-address=127.0.0.1:0"], stdout=stderr, stderr=stderr, cwd=folder
        )
    try:
        yield Prometheus(_address(process, log))
    finally:
        process.terminate()
        try:
            process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        text = log.read_text()
        if "Server is ready" in text and (found := re.search(r'msg="Listening on" address=(\S+)', text)):
            return f"http://{found[1]}"
        assert process.poll() is None, text
        time.sleep(0.05)
    raise AssertionError(f"Prometheus did not become ready:\n{log.read_text()}")
