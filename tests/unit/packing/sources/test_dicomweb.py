"""Fetching from an archive: files as they are stored, whatever it does, and no word of whose they are."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydicom
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardflow.errors import ConfigError, ShardflowError, StorageError
from shardflow.format.reasons import Reason
from shardflow.packing.config import InputsConfig
from shardflow.packing.progress import SilentProgress
from shardflow.packing.sources.dicomweb import client
from shardflow.packing.sources.dicomweb.client import ArchiveClient, DeliveryError, Pace
from shardflow.packing.sources.dicomweb.config import PASSWORD, TOKEN, USER, ArchiveConfig, check_address
from shardflow.packing.sources.dicomweb.multipart import MultipartError, PartReader, boundary_of
from shardflow.packing.sources.dicomweb.retrieval import Archive, Instance, Listing, _differs, instance_uid
from shardflow.storage.requests import RetryPolicy
from tests.dicom_factory import make_study
from tests.dicomweb_server import Fault, WebArchive, basic, serving
from tests.pack_case import tree_digests

_RETRY = RetryPolicy(max_attempts=4, first_wait_s=0.001)


class _Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three studies as files, named as they are fetched: two slices, one, and three in two series."""
    folder = tmp_path_factory.mktemp("source")

    def dated(dataset: pydicom.FileDataset, _: int) -> None:
        dataset.StudyDate = "20240" + dataset.PatientID[1:] + "15"

    made = [
        make_study(folder / "made", patient="P1", num_slices=2, change=dated),
        make_study(folder / "made", patient="P2", num_slices=1, modality="CR", change=dated),
        make_study(folder / "made", patient="P3", num_slices=2, change=dated),
        make_study(folder / "made", patient="P3", num_slices=1, modality="SR", series=2, change=dated),
    ]
    for study in made:
        for path in study.files:
            header = pydicom.dcmread(path, stop_before_pixels=True)
            uids = Instance(header.StudyInstanceUID, header.SeriesInstanceUID, header.SOPInstanceUID)
            target = folder / "files" / uids.relative_path
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    return folder / "files"


@pytest.fixture
def served(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebArchive]:
    for name in (TOKEN, USER, PASSWORD):
        monkeypatch.delenv(name, raising=False)
    with serving(source) as archive:
        yield archive


def _archive(url: str, folder: Path, *, max_instance_bytes: int = 1 << 20, **settings: Any) -> Archive:
    settings = {"max_requests_per_s": 0, "retry": _RETRY, **settings}
    archive = Archive(
        url=url,
        settings=ArchiveConfig(**settings),
        folder=folder / "archive",
        max_instance_bytes=max_instance_bytes,
    )
    archive.prepare()
    return archive


def _fetch(served: WebArchive, folder: Path, **settings: Any) -> tuple[Listing, dict[str, str]]:
    notes = _Notes()
    archive = _archive(served.url, folder, **settings)
    listing = archive.fetch(notes)
    _check_silence(served, *notes.texts, repr(listing), *map(repr, listing.instances))
    return listing, tree_digests(archive.files)


def _check_silence(served: WebArchive, *texts: str) -> None:
    for one in served.stored:
        for uid in (one.study, one.series, one.instance):
            assert not any(uid in text for text in texts)


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("piece_bytes", [7, 1 << 16])
def test_files_come_as_they_are_stored(
    served: WebArchive, source: Path, tmp_path: Path, framing: str, piece_bytes: int
) -> None:
    served.framing, served.piece_bytes, served.page_size = framing, piece_bytes, 2
    listing, files = _fetch(served, tmp_path)
    assert files == tree_digests(source)
    assert not listing.reasons
    assert {one.relative_path for one in listing.instances} == set(files)
    assert (tmp_path / "archive").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="truncate", times=3),
        Fault(kind="status", value="500", times=3),
        Fault(kind="status", value="503", times=3),
        Fault(kind="status", value="429", times=3),
        Fault(kind="reset", times=3),
        Fault(kind="type", times=3),
        Fault(kind="wrong", times=3),
        Fault(kind="duplicate"),
        Fault(kind="length", times=3),
        Fault(kind="encoding", times=3),
        Fault(kind="redirect", value="/dicom-web/studies?limit=500&offset=0", path="/studies", times=1),
    ],
    ids=lambda fault: f"{fault.kind}{fault.value[:3]}",
)
def test_passing_faults_do_not_show(served: WebArchive, source: Path, tmp_path: Path, fault: Fault) -> None:
    served.faults.append(fault)
    listing, files = _fetch(served, tmp_path, num_connections=1)
    assert files == tree_digests(source)
    assert not listing.reasons
    assert fault.times == 0 or fault.kind == "duplicate"


@pytest.mark.parametrize("kind", ["truncate", "reset", "status", "type", "wrong", "length", "encoding"])
def test_an_instance_that_never_comes_is_an_input_with_a_reason(
    served: WebArchive, source: Path, tmp_path: Path, kind: str
) -> None:
    lost = next(one for one in served.stored if one.modality == "CR")
    for path in (f"/series/{lost.series}", f"/instances/{lost.instance}"):
        served.faults.append(Fault(kind=kind, path=path, value="404"))
    listing, files = _fetch(served, tmp_path)
    uids = Instance(lost.study, lost.series, lost.instance)
    assert listing.reasons == {uids: Reason.NOT_RETRIEVED}
    assert files == {
        path: digest for path, digest in tree_digests(source).items() if path != uids.relative_path
    }
    (missing,) = [one for one in listing.select([], 3) if one.relative_path == uids.relative_path]
    assert missing.problem is Reason.NOT_RETRIEVED
    assert (missing.root_index, missing.study_instance_uid) == (3, lost.study)
    # The next run gets it, and asks for nothing else.
    served.faults.clear()
    served.requests.clear()
    assert _fetch(served, tmp_path)[1] == tree_digests(source)
    assert [path for path in served.requests if "/series/" in path] == [
        f"/dicom-web/studies/{lost.study}/series/{lost.series}/instances/{lost.instance}"
    ]


def test_a_body_that_hardly_arrives_is_given_up(served: WebArchive, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = itertools.count()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: float(next(moments))))
    made = ArchiveClient(served.url, ArchiveConfig(timeout_s=2.5, max_requests_per_s=0), None)
    accept = 'multipart/related; type="application/dicom"; transfer-syntax=*'
    try:
        with (
            pytest.raises(DeliveryError, match="hardly arrives"),
            made.get(["studies", served.stored[0].study], accept) as answer,
        ):
            list(iter(lambda: answer.read(8), b""))
    finally:
        made.close()


def test_a_file_above_the_limit_is_not_fetched_to_its_end(served: WebArchive, tmp_path: Path) -> None:
    listing, files = _fetch(served, tmp_path, max_instance_bytes=600)
    assert set(listing.reasons.values()) == {Reason.LIMIT_EXCEEDED}
    assert len(listing.reasons) + len(files) == len(served.stored)
    assert all(not list(path.parent.glob(".*")) for path in (tmp_path / "archive").rglob("*"))


def test_a_redirect_to_another_host_is_refused_and_not_followed(
    served: WebArchive, source: Path, tmp_path: Path
) -> None:
    with serving(source) as other:
        served.faults.append(Fault(kind="redirect", value=f"{other.url}/studies"))
        with pytest.raises(ConfigError, match="must not redirect to another host") as error:
            _fetch(served, tmp_path)
        assert not other.requests
    assert other.url not in str(error.value)


def test_credentials_come_from_the_environment(
    served: WebArchive, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.authorization = "Bearer a-token"
    with pytest.raises(ConfigError, match=TOKEN):
        _fetch(served, tmp_path)
    monkeypatch.setenv(TOKEN, "a-token")
    assert _fetch(served, tmp_path)[1] == tree_digests(source)
    monkeypatch.setenv(USER, "reader")
    with pytest.raises(ConfigError, match="got both"):
        _fetch(served, tmp_path)
    monkeypatch.delenv(TOKEN)
    with pytest.raises(ConfigError, match="got one"):
        _fetch(served, tmp_path)
    monkeypatch.setenv(PASSWORD, "secret words")
    served.authorization = basic("reader", "secret words")
    assert _fetch(served, tmp_path)[1] == tree_digests(source)


def test_a_certificate_of_an_unknown_authority_is_refused(
    served: WebArchive, source: Path, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    with serving(source, tls=(certificate, key)) as secured:
        with pytest.raises(ConfigError, match="ca_file"):
            _fetch(secured, tmp_path)
        assert _fetch(secured, tmp_path, ca_file=certificate)[1] == tree_digests(source)
        with pytest.raises(ConfigError, match="PEM"):
            _fetch(secured, tmp_path, ca_file=key.with_name("none.pem"))


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"modalities": ("CT",)}, {("20240115", "CT"), ("20240315", "CT")}),
        ({"modalities": ("CR", "SR")}, {("20240215", "CR"), ("20240315", "SR")}),
        ({"study_dates": "20240215"}, {("20240215", "CR")}),
        ({"study_dates": "20240201-"}, {("20240215", "CR"), ("20240315", "CT"), ("20240315", "SR")}),
        ({"study_dates": "-20240216", "modalities": ("CT",)}, {("20240115", "CT")}),
    ],
)
def test_filters_choose_series(
    served: WebArchive, tmp_path: Path, settings: dict[str, Any], wanted: set[tuple[str, str]]
) -> None:
    listing, _ = _fetch(served, tmp_path, **settings)
    chosen = [one for one in served.stored if (one.date, one.modality) in wanted]
    assert {one.instance for one in listing.instances} == {one.instance for one in chosen}


def test_instances_without_a_modality_have_that_of_their_series(served: WebArchive, tmp_path: Path) -> None:
    named = _fetch(served, tmp_path / "named", modalities=("CT",))
    served.names_modalities = False
    assert _fetch(served, tmp_path / "unnamed", modalities=("CT",)) == named


@pytest.mark.parametrize(
    ("wanted", "found", "differs"),
    [
        ("PT", ["CT", "PT"], False),
        ("PT", ["CT"], True),
        ("SMITH^JOHN", [{"Alphabetic": "Smith^John^^"}], False),
        ("SMITH^J?N*", [{"Alphabetic": "Smith^Jane"}], False),
        ("SMITH", [None, 3], False),
        ("A,B", ["C"], False),
    ],
)
def test_any_value_of_a_result_may_match(wanted: str, found: list[Any], differs: bool) -> None:
    assert _differs({"00080061": {"vr": "CS", "Value": found}}, "00080061", wanted) is differs


@pytest.mark.parametrize(("description", "is_known"), [("ct thorax 2", True), ("", True), ("MR HEAD", False)])
def test_an_archive_that_ignores_a_filter_is_refused(
    served: WebArchive, tmp_path: Path, description: str, is_known: bool
) -> None:
    served.description = description
    if is_known:
        assert _fetch(served, tmp_path, match={"StudyDescription": "*CT THORAX?2"})[0].instances
        return
    with pytest.raises(StorageError, match="another StudyDescription") as error:
        _fetch(served, tmp_path, match={"StudyDescription": "*CT THORAX?2"})
    assert "HEAD" not in str(error.value)


def test_wildcards_and_spaces_are_sent_as_archives_read_them(served: WebArchive, tmp_path: Path) -> None:
    _fetch(served, tmp_path, match={"StudyDescription": "*CT THORAX?", "PatientID": "a/b&c"})
    assert "PatientID=a%2Fb%26c&StudyDescription=*CT%20THORAX?&limit=500&offset=0" in served.queries


def test_a_list_names_the_studies(served: WebArchive, tmp_path: Path) -> None:
    names = tmp_path / "studies.txt"
    wanted = served.stored[0].study
    names.write_text(f"{wanted}\n\n1.2.3\n", encoding="utf-8")
    listing, _ = _fetch(served, tmp_path, studies=names)
    assert {one.study for one in listing.instances} == {wanted}
    assert listing.missing == ["1.2.3"]
    # A study without a wanted series is there; one that the archive does not know is missing all the same.
    assert served.stored[0].modality != "US"
    listing, _ = _fetch(served, tmp_path, studies=names, modalities=("US",))
    assert (listing.instances, listing.missing) == ([], ["1.2.3"])
    assert "/dicom-web/studies" not in served.requests
    names.write_text("1.2.3\nDoe^Jane\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2") as error:
        _fetch(served, tmp_path, studies=names)
    assert "Jane" not in str(error.value)


def test_an_archive_that_knows_no_pages_is_no_endless_loop(
    served: WebArchive, source: Path, tmp_path: Path
) -> None:
    served.ignores_pages = True
    assert _fetch(served, tmp_path)[1] == tree_digests(source)
    with pytest.raises(StorageError, match="page_size"):
        _fetch(served, tmp_path, page_size=1)


def test_an_archive_that_knows_no_dates_is_refused(served: WebArchive, tmp_path: Path) -> None:
    served.faults.append(Fault(kind="redirect", value="/dicom-web/studies?limit=500&offset=0", times=1))
    with pytest.raises(StorageError, match="study_dates"):
        _fetch(served, tmp_path, study_dates="20240115")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(kind="reset"), "no answer"),
        (Fault(kind="status", value="500"), "status 500"),
        (Fault(kind="status", value="404", path="/studies"), "status 404"),
        (Fault(kind="reset", path="/instances"), "no answer"),
    ],
)
def test_an_archive_that_fails_stops_the_job(
    served: WebArchive, tmp_path: Path, fault: Fault, said: str
) -> None:
    served.faults.append(fault)
    with pytest.raises(ShardflowError, match=said) as error:
        _fetch(served, tmp_path)
    _check_silence(served, str(error.value))
    with pytest.raises(ConfigError, match="--dry-run"):
        _archive(served.url, tmp_path).listed()


def test_an_archive_that_delivers_nothing_stops_the_job(tmp_path: Path) -> None:
    for number in range(9):
        make_study(tmp_path / "made", patient=f"P{number}", num_slices=1)
    with serving(tmp_path / "made") as served:
        served.faults += [Fault(kind="status", value="404", path=one.instance) for one in served.stored]
        served.faults += [Fault(kind="status", value="404", path=one.series) for one in served.stored]
        with pytest.raises(StorageError, match="nothing of the last 8 studies"):
            _fetch(served, tmp_path)


def test_a_listing_is_kept_for_tasks_and_retries(served: WebArchive, source: Path, tmp_path: Path) -> None:
    lost = served.stored[0]
    served.faults.append(Fault(kind="status", value="410", path=lost.instance))
    served.faults.append(Fault(kind="status", value="410", path=lost.series))
    listing, _ = _fetch(served, tmp_path)
    archive = _archive(served.url, tmp_path)
    assert archive.listed() == listing
    served.faults.clear()
    served.requests.clear()
    again = archive.fetch(SilentProgress(), asks=False)
    assert again.instances == listing.instances
    assert not again.reasons
    assert tree_digests(archive.files) == tree_digests(source)
    assert not [path for path in served.requests if path.endswith("studies")]


def test_names_of_files_never_leave_their_folder() -> None:
    path = Instance("../..", "/etc", "1.2\n").relative_path
    assert [len(part) for part in path.split("/")] == [41, 41, 45]
    assert Instance("1.2", "3", "4.5").relative_path == "1.2/3/4.5.dcm"


def test_a_truncated_or_foreign_head_names_no_instance(source: Path) -> None:
    path = next(source.rglob("*.dcm"))
    head = path.read_bytes()[:2048]
    assert instance_uid(head, is_whole=True) == path.stem
    sizes = [size for size in range(len(head)) if instance_uid(head[:size], is_whole=False) is not None]
    assert min(sizes) > 132
    assert {instance_uid(head[:size], is_whole=True) for size in range(len(head))} == {"", path.stem}
    assert instance_uid(bytes(200), is_whole=False) == ""
    assert (
        instance_uid(
            head[:132] + b"\x02\x00\x01\x00OB\x00\x00\xff\xff\xff\xff" + bytes(1 << 17), is_whole=False
        )
        == ""
    )


def test_rates_hold_over_all_threads() -> None:
    clock = [100.0]

    def wait(seconds: float) -> None:
        clock[0] += seconds

    pace = Pace(4, 1000, wait, lambda: clock[0])
    for _ in range(9):
        pace.request()
    assert clock[0] == 102.0
    pace.received(500)
    pace.received(1)
    assert clock[0] == 102.5
    pace.pause(7)
    pace.request()
    assert clock[0] == 109.5
    for _ in range(1000):
        Pace(0, 0, wait, lambda: clock[0]).received(10**9)
    assert clock[0] == 109.5


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("archive/dicom-web", "root of a DICOMweb service"),
        ("ftp://archive/", "root of a DICOMweb service"),
        ("https://archive:99999/", "root of a DICOMweb service"),
        ("https://archive/?PatientID=1", "root of a DICOMweb service"),
        ("https://reader:secret@archive/", "must not hold credentials"),
        ("http://archive/dicom-web", "allow_plain_http"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_sentence(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        check_address(url, ArchiveConfig())
    assert "secret" not in str(error.value)


def test_plain_http_is_for_this_machine_or_by_choice() -> None:
    check_address("http://127.0.0.1:8042/dicom-web", ArchiveConfig())
    check_address("http://archive/dicom-web", ArchiveConfig(allow_plain_http=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"study_dates": "2024"},
        {"study_dates": "-"},
        {"study_dates": "2024010120241231"},
        {"study_dates": "20241231-20240101"},
        {"study_dates": "20241301-"},
        {"match": {"Patient ID": "x"}},
        {"match": {"PatientId": "x"}},
        {"modalities": ("ct",)},
        {"modalities": ("CT,MR",)},
        {"modalities": ("",)},
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name} must"):
        ArchiveConfig(**settings)


def test_settings_of_an_archive_without_its_address_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"inputs\.dicomweb names none"):
        InputsConfig(dicom=(Path("images"),), archive=ArchiveConfig(modalities=("CT",)))


_CONTENT = st.binary(max_size=60) | st.lists(
    st.sampled_from([b"\r\n", b"--", b"bound", b"boundary", b"\r\n--boundary", b" ", b"x"]), max_size=6
).map(b"".join)


@given(parts=st.lists(_CONTENT, max_size=4), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_parts_are_found_wherever_the_body_is_cut(parts: list[bytes], sizes: list[int]) -> None:
    # What looks like a delimiter up to the end of its line is one.
    parts = [
        part for part in parts if b"\r\n--boundary\r\n" not in part + b"\r\n" and b"boundary--" not in part
    ]
    parts = [
        part for part in parts if b"\r\n--boundary " not in part and not part.endswith(b"\r\n--boundary")
    ]
    parts = [part for part in parts if not part.startswith(b"--boundary")]
    body = b"".join(b"\r\n--boundary\r\nA: b\r\n\r\n" + part for part in parts) + b"\r\n--boundary--"
    if not parts:
        body = b"--boundary--"
    assert _read(body, sizes) == parts
    for cut in range(1, min(len(body), 20)):
        with pytest.raises(MultipartError):
            _read(body[:-cut], sizes)


def _read(body: bytes, sizes: list[int]) -> list[bytes]:
    at, turn = 0, 0

    def read(_: int) -> bytes:
        nonlocal at, turn
        start, at, turn = at, at + sizes[turn % len(sizes)], turn + 1
        return body[start:at]

    reader, found = PartReader(read, b"boundary"), []
    while (header := reader.next_part()) is not None:
        assert header == {"a": "b"}
        found.append(b"".join(reader.body()))
    return found


@pytest.mark.parametrize(
    "content_type",
    [
        "text/html",
        "multipart/related",
        "multipart/mixed; boundary=a",
        f"multipart/related; boundary={'a' * 71}",
    ],
)
def test_a_content_type_without_parts_is_refused(content_type: str) -> None:
    with pytest.raises(MultipartError):
        boundary_of(content_type)
