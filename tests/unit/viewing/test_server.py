"""The server of the page: what it answers, and whom."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from shardflow.errors import ConfigError, FormatError
from shardflow.format import Dataset
from shardflow.format.samples import SamplesTable
from shardflow.processes import waited_for
from shardflow.viewing import Viewer
from shardflow.viewing.server import Routes
from shardflow.viewing.web import Answer, Request, read_token
from tests.corpora_case import CorpusCase
from tests.viewing_case import DOCUMENT, ECG_HZ, LEADS, NUM_SLICES, REPORT, RESP_HZ, SIZE, make_viewed_dataset

DEADLINE_S = 300.0
MARKUP_FROM_TEXT = (
    *(
        b"innerHTML",
        b"outerHTML",
        b"insertAdjacentHTML",
        b"document.write",
        b"DOMParser",
        b"srcdoc",
        b"setHTML",
    ),
    *(b"createContextualFragment", b"eval(", b"new Function", b"javascript:", b'setAttribute("on'),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("viewed") / "dataset"
    make_viewed_dataset(path)
    return path


@pytest.fixture(scope="module")
def viewer(folder: Path) -> Iterator[Viewer]:
    with Viewer(Dataset.open(folder)) as made:
        yield made


def get(
    viewer: Viewer, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(viewer.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=DEADLINE_S)
    try:
        token = {"Authorization": f"Bearer {_token(viewer)}"}
        connection.request(method, path, headers=token | headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def _token(viewer: Viewer) -> str:
    return urlsplit(viewer.url).query.removeprefix("token=")


def ask(viewer: Viewer, path: str) -> Any:
    status, _, body = get(viewer, path)
    assert status == 200, body
    return json.loads(body)


def test_page_asks_for_nothing_from_elsewhere(viewer: Viewer) -> None:
    status, headers, body = get(viewer, "/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"http" not in body
    assert b"style=" not in body
    assert b"onclick" not in body
    for name in ("app.js", "canvas.js", "documents.js", "report.js", "signals.js", "tables.js", "style.css"):
        status, headers, body = get(viewer, f"/{name}")
        assert status == 200
        assert b"http:" not in body
        assert b"https:" not in body
        for way in MARKUP_FROM_TEXT:  # text of a report must never become markup
            assert way not in body, way


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/pyproject.toml",
        "/..%2f..%2fetc/passwd",
        "/manifest-000001.json",
        "/shards/train-000000.tar",
        "/api/samples/0/../../manifest-000001.json",
        "/api/samples/-1",
        "/api/samples/0/slices/0/%D9%A3",
        "//etc/passwd",
        "/assets/app.js",
        "/__init__.py",
        "/server.py",
    ],
)
def test_addresses_lead_to_nothing_but_the_page(viewer: Viewer, path: str) -> None:
    status, _, body = get(viewer, path)
    assert status == 404
    assert body == b"there is no such page"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(viewer: Viewer, method: str) -> None:
    assert get(viewer, "/api/dataset", method=method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "192.0.2.1", "localhost.evil.example", ""]
)
def test_other_names_of_this_machine_are_refused(viewer: Viewer, host: str) -> None:
    assert get(viewer, "/", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:80", "127.0.0.1", "[::1]:80"])
def test_names_of_the_loopback_are_served(viewer: Viewer, host: str) -> None:
    assert get(viewer, "/", Host=host)[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_a_token_is_needed_on_every_address(folder: Path, host: str) -> None:
    with Viewer(Dataset.open(folder), host=host) as viewer:
        address = urlsplit(viewer.url)
        token = address.query.removeprefix("token=")
        assert len(token) >= 32
        connection_host = f"127.0.0.1:{address.port}"

        def status(path: str, **headers: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(connection_host, timeout=DEADLINE_S)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            answer.read()
            connection.close()
            return answer.status, answer.headers.get("Set-Cookie", "")

        assert status("/")[0] == 403
        assert status("/api/dataset")[0] == 403
        assert status("/?token=" + "x" * 32)[0] == 403
        name = f"shardflow_{address.port}"
        assert status("/", Cookie=f"{name}=wrong")[0] == 403
        assert status("/", Authorization=f"Bearer {token[:-1]}")[0] == 403
        assert status("/", Authorization=f"Basic {token}")[0] == 403
        assert status("/?token=%ff%00%E9")[0] == 403
        code, cookie = status(f"/?token={token}")
        assert code == 200
        assert cookie.startswith(f"{name}={token};")
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert status("/api/dataset", Cookie=cookie.split(";")[0])[0] == 200
        assert status("/api/dataset", Authorization=f"Bearer {token}")[0] == 200


def test_without_a_token_only_this_machine_is_served(folder: Path) -> None:
    with Viewer(Dataset.open(folder), token=False) as viewer:
        assert "token" not in viewer.url
        assert get(viewer, "/api/dataset", Authorization="")[0] == 200
    with pytest.raises(ConfigError, match="keep the token, or listen"):
        Viewer(Dataset.open(folder), host="0.0.0.0", token=False)


def wait_for_findings(viewer: Viewer) -> Any:
    """Return the findings once all reports are read."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := ask(viewer, "/api/findings"))["num_read"] < 10:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_studies_are_found_by_split_modality_key_and_row(viewer: Viewer) -> None:
    about = ask(viewer, "/api/dataset")
    assert about["num_samples"] == 10
    assert [split["name"] for split in about["splits"]] == ["train", "val"]
    found = ask(viewer, "/api/samples?split=val")
    assert [sample["place"] for sample in found["samples"]] == ["val:0", "val:1"]
    assert ask(viewer, "/api/samples?modality=MR")["total"] == 4
    assert ask(viewer, "/api/samples?modality=XA")["total"] == 0
    narrowed = ask(viewer, "/api/samples?split=val&where=facts.modality%20%3D%3D%20'MR'")
    assert narrowed["total"] == ask(viewer, "/api/samples?split=val&modality=MR")["total"]
    assert ask(viewer, "/api/samples?where=facts.modality%20%3D%3D%20'MR'")["total"] == 4
    key = found["samples"][0]["key"]
    assert [sample["key"] for sample in ask(viewer, f"/api/samples?text={key[:8]}")["samples"]] == [key]
    assert ask(viewer, "/api/samples?text=train:3")["samples"][0]["row"] == 3
    assert ask(viewer, "/api/samples?text=train:300")["total"] == 0
    assert len(ask(viewer, "/api/samples?start=4&count=3")["samples"]) == 3
    status, _, body = get(viewer, "/api/samples?split=none")
    assert (status, b"no such split" in body) == (400, True)
    assert get(viewer, "/api/samples?start=x")[0] == 400
    status, _, body = get(viewer, "/api/samples?where=facts.modalty%20%3D%3D%20'MR'")
    assert (status, b"did you mean facts.modality" in body) == (400, True)


@pytest.mark.parametrize(
    "query",
    [
        "start=4&count=3",
        "split=val",
        "modality=MR&start=1&count=2",
        "text=train:3",
        "text={beginning}",
        "where=facts.modality%20%3D%3D%20'MR'&count=3",
        "split=train&where=facts.modality%20%3D%3D%20'MR'",
        "concept=effusion&start=2",
        "concept=effusion&modality=MR",
    ],
)
def test_studies_are_searched_some_at_a_time(
    viewer: Viewer, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a request takes must not grow with the dataset: there may be 10^8 samples."""
    wait_for_findings(viewer)
    query = query.format(beginning=ask(viewer, "/api/samples?text=train:3")["samples"][0]["key"][:2])
    whole = ask(viewer, f"/api/samples?{query}")
    gathered: list[int] = []
    real = SamplesTable.gather

    def count(table: SamplesTable, name: str, rows: Any) -> Any:
        gathered.append(np.size(rows))
        return real(table, name, rows)

    monkeypatch.setattr("shardflow.viewing.catalog._ROWS_AT_ONCE", 3)
    monkeypatch.setattr(SamplesTable, "gather", count)
    assert ask(viewer, f"/api/samples?{query}") == whole
    assert whole["total"]
    assert max(gathered) <= 3


def test_studies_are_found_by_what_their_reports_say(viewer: Viewer) -> None:
    found = wait_for_findings(viewer)
    assert {"concept": "nodule", "assertion": "present", "num_samples": 10} in found["findings"]
    assert ask(viewer, "/api/samples?concept=effusion")["total"] == 5
    assert ask(viewer, "/api/samples?concept=effusion&assertion=absent&split=val")["total"] == 1
    assert ask(viewer, "/api/samples?concept=effusion&assertion=present")["total"] == 0


def test_study_slices_and_masks(viewer: Viewer) -> None:
    study = ask(viewer, "/api/samples/0")
    assert study["report"] == REPORT
    assert study["alignment"]["entities"][0]["confidence"] == 0.97
    assert study["problems"] == []
    status, headers, body = get(viewer, f"/api/samples/0/slices/0/{NUM_SLICES - 1}")
    assert status == 200
    assert (headers["X-Rows"], headers["X-Columns"], headers["X-Dtype"]) == (str(SIZE), str(SIZE), "int16")
    pixels = np.frombuffer(body, "<i2").reshape(SIZE, SIZE)
    assert pixels[0, 0] == NUM_SLICES - 1  # the factory writes number * 16 + slice there
    _, headers, body = get(viewer, "/api/samples/0/regions/0/0/0/5")
    assert headers["X-Dtype"] == "uint8"
    assert np.frombuffer(body, np.uint8).sum() == 400
    assert not any(get(viewer, "/api/samples/0/regions/0/0/0/6")[2])
    assert get(viewer, "/api/samples/0/regions/0/1/0/5")[0] == 400
    assert get(viewer, "/api/samples/0/slices/0/24")[0] == 400
    assert get(viewer, "/api/samples/99")[0] == 400


def excerpt(viewer: Viewer, path: str) -> tuple[dict[str, str], Any]:
    status, headers, body = get(viewer, path)
    assert status == 200, body
    shape = (int(headers["X-Channels"]), int(headers["X-Columns"]), 2)
    return headers, np.frombuffer(body, "<f4").reshape(shape)


def test_a_stretch_of_a_recording_in_its_unit(viewer: Viewer) -> None:
    headers, found = excerpt(viewer, f"/api/samples/0/waveforms/0/0?start=50&count={ECG_HZ}&columns=1000")
    assert found.shape == (len(LEADS), ECG_HZ, 2)
    assert headers["X-Per-Column"] == "1"
    assert (found[0, :50] == 0.5).all()
    assert (found[0, 50:] == -0.5).all()
    assert not found[1:].any()
    # The last samples: as many as there are.
    assert excerpt(viewer, "/api/samples/0/waveforms/0/0?start=1990&count=500")[1].shape[1] == 10


def test_a_long_recording_is_condensed_to_what_each_column_reaches(viewer: Viewer) -> None:
    headers, found = excerpt(viewer, "/api/samples/0/waveforms/1/0?columns=900")
    assert headers["X-Per-Column"] == str(3600 * RESP_HZ // 900)
    assert found.shape == (1, 900, 2)
    # Stored up to 100 either way, a gain of -0.5 and an offset of 1: a column holds a whole breath.
    assert found[0, 10:, 0].max() <= -48.0
    assert found[0, 10:, 1].min() >= 50.0
    assert (found[0, :2, 0] < found[0, :2, 1]).all()
    # No sample for ten seconds is no number, and nothing near it is drawn down to what stands there.
    _, near = excerpt(viewer, f"/api/samples/0/waveforms/1/0?start=0&count={30 * RESP_HZ}&columns=1000")
    assert np.isnan(near[0, 10 * RESP_HZ : 20 * RESP_HZ]).all()
    assert np.nanmax(np.abs(near)) <= 51.0


@pytest.mark.parametrize(
    "path",
    [
        "0/waveforms/2/0",
        "0/waveforms/0/1",
        "1/waveforms/0/0",
        "99/waveforms/0/0",
        "0/waveforms/0/0?start=2000",
    ],
)
def test_recordings_that_are_not_there(viewer: Viewer, path: str) -> None:
    assert get(viewer, f"/api/samples/{path}")[0] == 400


def test_documents_are_text(viewer: Viewer) -> None:
    assert ask(viewer, "/api/samples/0/documents/0") == {"text": DOCUMENT}
    assert get(viewer, "/api/samples/0/documents/2")[0] == 400
    assert get(viewer, "/api/samples/1/documents/0")[0] == 400
    assert get(viewer, "/api/samples/99/documents/0")[0] == 400


def test_a_recording_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardflow.viewing.studies.MAX_BYTES", 1000)
    with Viewer(Dataset.open(folder)) as viewer:
        status, _, body = get(viewer, "/api/samples/0/waveforms/0/0")
    assert (status, b"at most" in body) == (400, True)


def test_steps_are_those_of_the_plan(viewer: Viewer, folder: Path) -> None:
    from shardflow.sampling import BatchSpec, EpochPlan

    found = ask(viewer, "/api/steps?split=train&seed=7&epoch=2&step=1&size=2&count=2")
    dataset = Dataset.open(folder)
    spec = BatchSpec(micro_batch_size=2, micro_batches_per_step=2)
    plan = EpochPlan(dataset.splits["train"], spec, seed=7, epoch=2)
    rows, _ = plan.step(1)
    assert [[one["row"] for one in micro] for micro in found["micro_batches"]] == rows.tolist()
    assert found["num_steps"] == plan.num_steps
    assert get(viewer, "/api/steps?split=train&step=99")[0] == 400


def test_inputs_are_those_of_the_ledger(viewer: Viewer) -> None:
    about = ask(viewer, "/api/dataset?inputs=1")
    assert about["inputs"] == [{"kind": "dicom", "outcome": "packed", "reason": None, "num_inputs": 10}]
    found = ask(viewer, "/api/inputs?outcome=packed&count=3")
    assert (found["total"], len(found["inputs"])) == (10, 3)
    assert set(found["inputs"][0]) == {"input", "kind", "outcome", "reason", "sample_key"}


def test_damaged_slice_is_a_sentence_and_the_rest_is_shown(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    dataset = Dataset.open(copy)
    _, fields = dataset.sample_fields(0)
    field = next(field for field in fields if field.name == "s000.i0003.b2nd")
    tar = copy / "shards" / "train-000000.tar"
    with tar.open("r+b") as file:
        file.seek(field.offset + 40)
        file.write(b"\xff\xff")
    with Viewer(Dataset.open(copy)) as viewer:
        status, _, body = get(viewer, "/api/samples/0/slices/0/3")
        assert status == 500
        assert b"crc32c" in body or b"checksum" in body
        assert get(viewer, "/api/samples/0/slices/0/4")[0] == 200


def test_address_that_cannot_be_listened_on_is_an_error(folder: Path) -> None:
    with Viewer(Dataset.open(folder)) as viewer:
        port = urlsplit(viewer.url).port
        assert port is not None
        with pytest.raises(ConfigError, match="port free"):
            Viewer(Dataset.open(folder), port=port)


def test_inputs_of_a_corpus_are_its_lines(tmp_path: Path) -> None:
    case = CorpusCase(tmp_path / "corpus")
    case.prepare()
    case.write("a.jsonl", [b'{"text": "One."}', b"{broken", b'{"text": "Two."}', b'{"text": "Three."}'])
    case.write("b.jsonl", [b'{"text": "Four."}', b"", b'{"text": "Five."}', b'{"text": "Six."}', b"{broken"])
    case.pack("policy.max_quarantined_share=0.5")
    files = case.outcomes().files
    with Viewer(Dataset.open(case.output)) as made:
        counts = ask(made, "/api/dataset?inputs=1")["inputs"]
        broken = ask(made, "/api/inputs?outcome=quarantined&reason=INVALID_JSON")
        later = ask(made, "/api/inputs?outcome=packed&start=2&count=3")
        sample = ask(made, "/api/samples/0")
    assert [(one["outcome"], one["reason"], one["num_inputs"]) for one in counts] == [
        ("packed", None, 6),
        ("quarantined", "INVALID_JSON", 2),
        ("skipped", "EMPTY_LINE", 1),
    ]
    assert broken["total"] == 2
    assert [one["input"] for one in broken["inputs"]] == [f"{files[0]}:2", f"{files[1]}:5"]
    assert later["total"] == 6
    assert [one["input"] for one in later["inputs"]] == [f"{files[0]}:4", f"{files[1]}:1", f"{files[1]}:3"]
    assert sample["report"]


@pytest.mark.parametrize(
    "description", [b"", b"[]", b"{}", b'{"recordings": [{"arrays": [{"field": 1}, 2]}]}']
)
def test_a_description_that_is_none_is_a_sentence(description: bytes) -> None:
    from shardflow.viewing.studies import _channels

    with pytest.raises(FormatError, match="describes no recordings"):
        _channels(description, "w000.g00.npy")


def _request_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardflow-view-request"]


class _HeldRoutes(Routes):
    """Answers once it may."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def answer(self, request: Request) -> Answer:
        self.is_asked.set()
        self.may_answer.wait(DEADLINE_S)
        return super().answer(request)


def _held(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Viewer, _HeldRoutes]:
    held = _HeldRoutes(Dataset.open(folder))
    monkeypatch.setattr("shardflow.viewing.server.Routes", lambda *_: held)
    return Viewer(Dataset.open(folder)), held


def test_the_end_waits_for_what_is_being_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(_request_threads())
    viewer, held = _held(folder, monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(get, viewer, "/")
        assert held.is_asked.wait(DEADLINE_S)
        closing = threads.submit(viewer.close)
        while viewer._server.is_listening:  # it listens no more, and answers still
            time.sleep(0.01)
        assert not closing.done()
        held.may_answer.set()
        closing.result(DEADLINE_S)
        assert answer.result(DEADLINE_S)[0] == 200
    assert set(_request_threads()) <= before


def test_the_end_waits_for_nobody_who_says_nothing(folder: Path) -> None:
    """A browser keeps its connections for a minute, and a stranger may never ask."""
    before = set(_request_threads())
    with Viewer(Dataset.open(folder)) as viewer:
        host, port = urlsplit(viewer.url).netloc.split(":")
        kept = http.client.HTTPConnection(host, int(port), timeout=DEADLINE_S)
        kept.request("GET", "/", headers={"Authorization": f"Bearer {_token(viewer)}"})
        assert kept.getresponse().read()
        stranger = socket.create_connection((host, int(port)))
        while len(set(_request_threads()) - before) < 2:
            time.sleep(0.01)
    assert set(_request_threads()) <= before
    kept.close()
    stranger.close()


def test_the_end_leaves_alone_what_takes_too_long(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardflow.viewing.web._CLOSE_S", 0.05)
    before = set(_request_threads())
    viewer, held = _held(folder, monkeypatch)
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(get, viewer, "/")
        assert held.is_asked.wait(DEADLINE_S)
        viewer.close()
        (left,) = set(_request_threads()) - before
        assert left in waited_for()  # for a while more, at the end of the process
        held.may_answer.set()
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            answer.result(DEADLINE_S)
    left.join(DEADLINE_S)
    assert not left.is_alive()


def _connect(viewer: Viewer) -> socket.socket:
    host, port = urlsplit(viewer.url).netloc.split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


def test_half_open_connections_are_bounded_and_keep_nobody_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.viewing.web._MAX_CONNECTIONS", 4)
    before = set(_request_threads())
    with Viewer(Dataset.open(folder)) as viewer:
        slow = [_connect(viewer) for _ in range(12)]
        for connection in slow[:8]:
            assert not connection.recv(1)  # closed by the server
        assert get(viewer, "/")[0] == 200
        limit_s = time.monotonic() + DEADLINE_S
        while len(set(_request_threads()) - before) > 4 and time.monotonic() < limit_s:
            time.sleep(0.01)
        assert len(set(_request_threads()) - before) <= 4
        for connection in slow:
            connection.close()


def test_a_connection_too_many_is_closed_if_all_are_being_answered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.viewing.web._MAX_CONNECTIONS", 1)
    viewer, held = _held(folder, monkeypatch)
    with viewer, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(get, viewer, "/")
        assert held.is_asked.wait(DEADLINE_S)
        with _connect(viewer) as connection:
            assert not connection.recv(1)
        held.may_answer.set()
        assert answer.result(DEADLINE_S)[0] == 200


@pytest.mark.parametrize("path", ["/?" + "&".join(f"a{n}=1" for n in range(21)), "ftp://[a/"])
def test_an_address_that_cannot_be_parsed_is_a_bad_request(folder: Path, path: str) -> None:
    with Viewer(Dataset.open(folder)) as viewer:
        assert get(viewer, path)[0] == 400


LONG = "9" * 5000
HOSTILE = (
    *(
        f"/api/samples?{name}={value}"
        for name in ("start", "count")
        for value in ("-1", "1e9", LONG, "%00", "x")
    ),
    *(
        f"/api/samples?text={value}"
        for value in ("%00", "%ff%fe", "'%22%3Cb%3E", LONG, "train:" + LONG, ":", "::1")
    ),
    *(
        f"/api/samples?where={value}"
        for value in ("(" * 4000, "not%20" * 9000, "__import__('os')", "%00", LONG)
    ),
    *(f"/api/samples?split={value}" for value in ("none", "%00", "../..", LONG)),
    *("/api/samples?concept=%00&assertion=%ff", "/api/samples?modality=" + LONG, "/api/samples?unknown=1"),
    *("/api/dataset?inputs=1&inputs=2", "/api/findings?start=1", "/app.js?x=1", "/api/samples/0?start=0"),
    *(f"/api/samples/{value}" for value in ("999999999999", LONG, "-1", "0x0", "%30", "1.0", "1e3", "")),
    *(
        f"/api/samples/0/slices/{value}"
        for value in ("999999999999/0", "0/999999999999", "0/" + LONG, "0/-1")
    ),
    *(f"/api/samples/0/planes/{value}" for value in ("0/9/0", "0/1/999999999999", "999999999999/0/0")),
    *("/api/samples/0/regions/0/0/3/0", "/api/samples/0/regions/999999999999/999999999999/0/0"),
    *("/api/samples/0/documents/999999999999", "/api/samples/0/waveforms/999999999999/0"),
    *(
        f"/api/samples/0/waveforms/0/0?{value}"
        for value in ("columns=0", "count=0", "start=999999999999999999")
    ),
    *(f"/api/steps?{value}" for value in ("step=999999999999999999", "epoch=999999999999999999&split=train")),
    *(
        f"/api/steps?split=train&{value}"
        for value in ("seed=999999999999999999", "size=0", "count=0", "seed=-1")
    ),
    *("/api/inputs?outcome=%00&reason=" + LONG, "/api/inputs?start=999999999999999999"),
    *("/..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd", "/....//etc/passwd", "/index.html/../app.js"),
    *("*", "//[", "/%", "/%zz?%zz=%zz", "/?=&=&=", "/#/../x", "/\\..\\app.js", ";/app.js"),
)


def test_hostile_queries_are_answered_and_never_a_fault(
    viewer: Viewer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in HOSTILE:
        status, headers, body = get(viewer, path)
        assert status in {200, 400, 404}, (path[:80], status, body[:200])
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        if status != 200:
            assert headers["Content-Type"].startswith("text/plain")
            assert b"Traceback" not in body
            assert len(body) < 5000
    assert get(viewer, "/api/samples?unknown=1")[0] == 400
    assert get(viewer, "/api/dataset?inputs=1&inputs=2")[0] == 400
    assert not caplog.records
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 505),
        (b"GET / HTTP/x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 tls hello\r\n\r\n", 400),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nA: " + b"b" * 70_000 + b"\r\n\r\n", 431),
        (b"<img src=x> / HTTP/1.1\r\n\r\n", 400),
        (b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\nCookie: =;\xff\r\nAuthorization: Bearer \xe9\r\n\r\n", 403),
    ],
    ids=["path", "version", "versions", "TLS", "long", "headers", "header", "markup", "method", "text"],
)
def test_what_is_no_request_gets_a_status_and_nothing_of_it_back(
    viewer: Viewer,
    sent: bytes,
    status: int,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with _connect(viewer) as connection:
        connection.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # the rest of a long one was never read
            while part := connection.recv(1 << 16):
                received += part
                if b"\r\n\r\n" in received and status == 403:
                    break
    head, _, body = received.partition(b"\r\n\r\n")
    if b"HTTP/1.1" in head:  # to one that states no version there is no head
        assert head.split()[1] == str(status).encode()
        assert b"Content-Security-Policy: default-src 'none'" in head
    assert b"img" not in body
    assert b"<" not in body
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_clients_that_leave_in_the_middle_are_no_faults(
    viewer: Viewer, capfd: pytest.CaptureFixture[str]
) -> None:
    for sent in (
        b"",
        b"GE",
        b"GET / HTTP/1.1\r\nHost: loc",
        b"GET /app.js HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        connection = _connect(viewer)
        # A reset instead of an orderly end.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(sent)
        connection.close()
    assert ask(viewer, "/api/dataset")["num_samples"] == 10
    assert "Traceback" not in capfd.readouterr().err


def test_a_body_is_not_taken_for_the_next_request(viewer: Viewer) -> None:
    head = f"GET /?token={_token(viewer)} HTTP/1.1\r\nHost: localhost\r\n"
    with _connect(viewer) as connection:
        connection.sendall(f"{head}Content-Length: {len(head) + 2}\r\n\r\n{head}\r\n".encode())
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                received += part
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"Connection: close" in received


def test_a_token_file_holds_a_token_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    assert read_token(path, "--token-file") == "0123456789abcdef"
    for text in ("short", "", "two words of enough letters", "0123456789abcdef;x", "\u0663" * 20):
        path.write_text(text, "utf-8")
        with pytest.raises(ConfigError, match="--token-file must be a file with one token of 16"):
            read_token(path, "--token-file")
    with pytest.raises(ConfigError, match="No such file"):
        read_token(tmp_path / "none", "--token-file")
