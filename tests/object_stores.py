"""Object stores for tests, on 127.0.0.1.

S3 from moto and from a Ceph RADOS Gateway, the web from nginx and from a server of ours that can be told what
to do wrong. `tests.fault_proxy` stands before any of them.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import hmac
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.packages import find_program, install_programs

__all__ = ["CEPH_KEYS", "WebServer", "ceph_bucket", "ceph_gateway", "nginx", "s3_bucket", "s3_server"]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def s3_server() -> Iterator[str]:
    """Run moto's S3; yields its address."""
    address = f"http://127.0.0.1:{_free_port()}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", address.rpartition(":")[2]]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdout=quiet, stderr=quiet, env={**os.environ, "PYTHONWARNINGS": ""}
    ) as process:
        try:
            _wait_for(f"{address}/moto-api/", process)
            yield address
        finally:
            process.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300  # a busy machine starts a server late; a dead one is seen at once
    while True:
        try:
            with urllib.request.urlopen(url, timeout=300):
                return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def s3_bucket(address: str, name: str) -> str:
    """Make an empty bucket; returns its address."""
    with urllib.request.urlopen(urllib.request.Request(f"{address}/{name}", method="PUT"), timeout=300):
        return f"s3://{name}"


class WebServer:
    """Serves a folder: GET and HEAD, one range, ETag, If-Match. ``supports_ranges`` may be switched off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supports_ranges = True
        self.etag_prefix = ""
        self.num_requests = 0
        handler = type("_Handler", (_FolderHandler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> WebServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _FolderHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second would wait for an answer
    wbufsize = -1
    owner: WebServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.owner.num_requests += 1
        path = self.owner.folder / self.path.lstrip("/")
        if not path.is_file():
            self._answer(404, b"", {})
            return
        data = path.read_bytes()
        etag = f'{self.owner.etag_prefix}"{hashlib.sha256(data).hexdigest()[:16]}"'
        headers = {"ETag": etag, "Last-Modified": email.utils.formatdate(path.stat().st_mtime, usegmt=True)}
        wanted = self.headers.get("If-Match")
        if wanted not in (None, etag) or (wanted is not None and etag.startswith("W/")):
            self._answer(412, b"", headers)
            return
        span = self.headers.get("Range")
        if span is None or not self.owner.supports_ranges:
            self._answer(200, data, headers)
            return
        first, _, last = span.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
        if start >= len(data):
            self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self._answer(206, data[start:stop], headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


# ---- servers from Debian's packages --------------------------------------------------------------

CEPH_KEYS = {"AWS_ACCESS_KEY_ID": "shardflow-test-key", "AWS_SECRET_ACCESS_KEY": "shardflow-test-secret"}
NGINX_NOT_INSTALLABLE = "nginx cannot be installed"
CEPH_NOT_INSTALLABLE = "Ceph cannot be installed"

_NGINX = """
daemon off; worker_processes 1; error_log {folder}/error.log; pid {folder}/pid;
events {{ worker_connections 512; }}
http {{
  access_log off; sendfile on; keepalive_requests 1000000;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  limit_req_zone $server_port zone=few:64k rate=10r/s;
  server {{
    listen 127.0.0.1:{port}; root {root};
    location / {{ }}
    location /no-ranges/ {{ alias {root}/; max_ranges 0; }}
    location /limited/ {{ alias {root}/; limit_req zone=few burst=2 nodelay; limit_req_status 503; }}
    location /silent/ {{ return 444; }}
  }}
}}
"""


@contextmanager
def nginx(root: Path, folder: Path) -> Iterator[str]:
    """Serve a folder with nginx; yields its address.

    Below ``/no-ranges/`` it gives whole files only, below ``/limited/`` 10 a second and else 503, below
    ``/silent/`` it closes without an answer.
    """
    install_programs(["nginx"], ["nginx-light"], otherwise=NGINX_NOT_INSTALLABLE)
    program = find_program("nginx") or "nginx"
    port = _free_port()
    config = folder / "nginx.conf"
    config.write_text(_NGINX.format(folder=folder, port=port, root=root), encoding="utf-8")
    # Its workers are no longer root: they must be able to walk to the files.
    command = [program, "-c", str(config), "-e", str(folder / "error.log"), "-g", "user root;"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for_port(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


_CEPH = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr2 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}
admin socket =
log file = {folder}/$name.log
pid file =
crash dir = {folder}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
[mon]
mon data = {folder}/mon
mon data avail crit = 0
paxos propose interval = 0.05
paxos min wait = 0.01
mon cluster log file = {folder}/cluster.log
[osd]
osd data = {folder}/osd
osd objectstore = memstore
osd class update on start = false
osd crush update on start = false
memstore device bytes = {memory_bytes}
osd memory target = 939524096
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {folder}
rgw run sync thread = false
rgw enable gc threads = false
rgw enable lc threads = false
"""


@contextmanager
def ceph_gateway(folder: Path, *, memory_bytes: int = 1 << 30) -> Iterator[str]:
    """Run S3 by Ceph, its objects in memory; yields its address. Keys are `CEPH_KEYS`; it checks signatures.

    Args:
        folder: Of its own, empty; a short path.
        memory_bytes: For objects.
    """
    install_programs(
        ["ceph-mon", "ceph-osd", "radosgw", "ceph", "monmaptool"],
        ["ceph-mon", "ceph-osd", "radosgw", "ceph-common"],
        otherwise=CEPH_NOT_INSTALLABLE,
    )
    fsid, osd = str(uuid.uuid4()), str(uuid.uuid4())
    mon_port, port = _free_port(), _free_port()
    for name in ("mon", "osd"):
        (folder / name).mkdir()
    config = folder / "ceph.conf"
    config.write_text(
        _CEPH.format(folder=folder, fsid=fsid, mon_port=mon_port, port=port, memory_bytes=memory_bytes),
        encoding="utf-8",
    )
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str, *arguments: str) -> None:
        command = [program, "-c", str(config), *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=300)

    def start(program: str, *arguments: str) -> None:
        command = [program, "-c", str(config), "-f", *arguments]
        with (folder / "output").open("ab") as output:
            started.append(subprocess.Popen(command, stdout=output, stderr=output))

    try:
        monmap = str(folder / "monmap")
        addresses = f"[v1:127.0.0.1:{mon_port}]"
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, monmap)
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", "/dev/null")
        start("ceph-mon", "-i", "a")
        run("ceph", "osd", "create", osd, "0")
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        run("ceph", "osd", "crush", "add", "osd.0", "1", "root=default", "host=one")
        start("ceph-osd", "-i", "0")
        start("radosgw", "-n", "client.rgw")
        # It makes its pools first: the administrator's command beside it would make them too, and one waits.
        _wait_for_port(port, started[-1])
        keys = ["--access-key", CEPH_KEYS["AWS_ACCESS_KEY_ID"]]
        keys += ["--secret-key", CEPH_KEYS["AWS_SECRET_ACCESS_KEY"]]
        names = ["user", "create", "--uid", "test", "--display-name", "test"]
        run("radosgw-admin", "-n", "client.rgw", *names, *keys)
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def ceph_bucket(name: str) -> str:
    """Make an empty bucket in the store that the environment leads to; returns its address.

    Any client of S3 could do it; the one at hand cannot, so the request is signed here (Signature Version 2).
    """
    address = os.environ["AWS_ENDPOINT_URL"]
    date = email.utils.formatdate(usegmt=True)
    signed = hmac.new(
        os.environ["AWS_SECRET_ACCESS_KEY"].encode(), f"PUT\n\n\n{date}\n/{name}".encode(), "sha1"
    )
    signature = base64.b64encode(signed.digest()).decode()
    headers = {"Date": date, "Authorization": f"AWS {os.environ['AWS_ACCESS_KEY_ID']}:{signature}"}
    request = urllib.request.Request(f"{address}/{name}", method="PUT", headers=headers)
    with urllib.request.urlopen(request, timeout=300):
        return f"s3://{name}"
