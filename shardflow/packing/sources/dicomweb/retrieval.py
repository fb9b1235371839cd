"""Retrieval of studies from an archive into a folder, which is packed like any other (PS3.18, 10.4, 10.6).

QIDO-RS lists the instances of the wanted studies; WADO-RS delivers them series by series in the transfer
syntax that they are stored in. An instance is written to ``files/STUDY/SERIES/INSTANCE.dcm`` as soon as its
part of an answer is complete, atomically, so a killed job resumes with what is missing. What was listed is
kept in ``listing.json``: array tasks and retries go by it and agree on the inputs.

An instance that the archive lists and does not deliver is an input without a file, whose outcome is
`Reason.NOT_RETRIEVED`; an archive that cannot be reached, or delivers nothing at all, stops the job.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardflow.errors import ConfigError, StorageError, naming_os_errors, os_reason
from shardflow.format.reasons import Reason
from shardflow.packing.sources.dicomweb.client import (
    ArchiveClient,
    DeliveryError,
    RefusedError,
    authorization,
)
from shardflow.packing.sources.dicomweb.config import ArchiveConfig
from shardflow.packing.sources.dicomweb.multipart import MultipartError, PartReader, boundary_of, media_type
from shardflow.packing.sources.placement import DiscoveredFile
from shardflow.storage import is_temporary_name
from shardflow.storage.local import write_atomic
from shardflow.storage.requests import PassingFaultError

if TYPE_CHECKING:
    from shardflow.packing.progress import Progress

_SAFE_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_MAX_META_BYTES: Final = 1 << 16
_META_START: Final = 132
_LONG_VRS: Final = {b"OB", b"OW", b"SQ", b"UN", b"UT"}


class Instance(NamedTuple):
    """One listed instance. Holds identifiers; its ``repr`` shows none."""

    study: str
    series: str
    instance: str

    def __repr__(self) -> str:
        return "Instance()"

    @property
    def relative_path(self) -> str:
        """POSIX path below the folder of files: the UIDs, or a digest of what is unfit for a file name."""
        return "/".join(map(_name, self)) + ".dcm"


def _name(uid: str) -> str:
    if _SAFE_NAME.fullmatch(uid):
        return uid
    return "x" + hashlib.sha256(uid.encode("utf-8", "surrogatepass")).hexdigest()[:40]


@dataclass(slots=True)
class Listing:
    """What the archive holds of the wanted studies. Holds identifiers; its ``repr`` shows none."""

    instances: list[Instance] = field(default_factory=list, repr=False)
    reasons: dict[Instance, Reason] = field(default_factory=dict, repr=False)
    """Why an instance has no file."""
    missing: list[str] = field(default_factory=list, repr=False)
    """Studies of the list of studies that the archive does not have."""

    def select(self, found: Sequence[DiscoveredFile], root_index: int) -> list[DiscoveredFile]:
        """Return the inputs, sorted as `shardflow.packing.sources.placement.discover` does.

        Args:
            found: Files of the folder; those that are not listed are no inputs.
            root_index: Of the folder.
        """
        by_path = {file.relative_path: file for file in found}
        files = []
        for instance in self.instances:
            path = instance.relative_path
            file = by_path.get(path)
            if file is None:
                reason = self.reasons.get(instance, Reason.NOT_RETRIEVED)
                file = _without_file(root_index, path, reason, instance.study, instance.instance)
            files.append(file)
        # Inputs of no study: what comes of it later is packed without them.
        files += [_without_file(root_index, _name(study), Reason.NOT_RETRIEVED) for study in self.missing]
        files.sort(key=lambda file: os.fsencode(file.relative_path))
        return files

    def save(self, path: Path) -> None:
        """Write the listing.

        Raises:
            StorageError: It cannot be written.
        """
        rows = {
            "instances": self.instances,
            "missing": self.missing,
            "reasons": [[*one, reason.value] for one, reason in sorted(self.reasons.items())],
        }
        write_atomic(path, [json.dumps(rows).encode("ascii")], replace=True, mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Listing:
        """Read what `save` wrote.

        Raises:
            ConfigError: There is none.
        """
        try:
            rows = json.loads(path.read_bytes())
            return cls(
                instances=[Instance(*one) for one in rows["instances"]],
                reasons={Instance(*one): Reason(reason) for *one, reason in rows["reasons"]},
                missing=rows["missing"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(
                "tasks, merges and retries go by what was fetched before, and nothing was; run `shardflow "
                "pack --dry-run` first, which fetches."
            ) from None


def _without_file(
    root_index: int, path: str, reason: Reason, study: str = "", instance: str = ""
) -> DiscoveredFile:
    return DiscoveredFile(
        root_index=root_index,
        relative_path=path,
        num_bytes=0,
        problem=reason,
        study_instance_uid=study,
        sop_instance_uid=instance,
    )


def instance_uid(head: bytes | bytearray, *, is_whole: bool) -> str | None:
    """Return the Media Storage SOP Instance UID of a file (PS3.10, 7.1), from its first bytes.

    Args:
        head: As many as have come.
        is_whole: Whether no more will come.

    Returns:
        The UID; ``""`` if the file has none; None if more bytes are needed.
    """
    unknown = "" if is_whole or len(head) > _MAX_META_BYTES else None
    if len(head) < _META_START:
        return unknown
    if head[_META_START - 4 : _META_START] != b"DICM":
        return ""
    at = _META_START
    while at + 12 <= len(head):
        group, element, vr, num_bytes = struct.unpack_from("<HH2sH", head, at)
        value = at + 8
        if group != 2:
            return ""
        if vr in _LONG_VRS:
            (num_bytes,) = struct.unpack_from("<I", head, value)
            value += 4
        if value + num_bytes > len(head):
            return unknown
        if element == 3:
            return bytes(head[value : value + num_bytes]).decode("latin-1").strip("\0 ")
        at = value + num_bytes
    return unknown


_DICOM: Final = "application/dicom"
_ACCEPT: Final = f'multipart/related; type="{_DICOM}"; transfer-syntax=*'
"""Asks for the syntax that is stored; without ``transfer-syntax`` archives convert (PS3.18, 8.7.3.5)."""
_STUDY, _SERIES, _INSTANCE, _MODALITY, _DATE = "0020000D", "0020000E", "00080018", "00080060", "00080020"
_MAX_LENGTH: Final = 256
_NOT_FOUND: Final = 404
_MAX_FAILED: Final = 8
"""Studies in a row without a delivered instance after which the archive counts as broken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A job's archive, and the folder that its files are kept in."""

    url: str
    settings: ArchiveConfig
    folder: Path
    max_instance_bytes: int
    """Bytes above which a file is not fetched to its end."""

    @property
    def files(self) -> Path:
        """Folder of the fetched files, an input folder of the job."""
        return self.folder / "files"

    @property
    def _listing(self) -> Path:
        return self.folder / "listing.json"

    def prepare(self) -> None:
        """Create the folder.

        Raises:
            StorageError: It cannot be created.
        """
        with naming_os_errors("creating the folder of the archive's files"):
            self.files.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)

    def listed(self) -> Listing:
        """Return what was fetched last, without asking the archive.

        Raises:
            ConfigError: Nothing was.
        """
        return Listing.load(self._listing)

    def fetch(self, progress: Progress, *, asks: bool = True) -> Listing:
        """Fetch what is missing of the wanted instances.

        Args:
            progress: Receives the progress, in studies.
            asks: Whether the archive is asked what it holds; else the last listing is completed.

        Raises:
            ConfigError: The archive refuses the credentials or redirects elsewhere, or a setting is wrong.
            StorageError: The archive or the disk fails; the job can be run again.
        """
        credentials = authorization(os.environ)
        client = ArchiveClient(self.url, self.settings, credentials)
        remove_unfinished(self.files)
        fetching = _Fetching(client, self)
        try:
            listing = fetching.run(progress, None if asks else self.listed())
        finally:
            client.close()
        listing.save(self._listing)
        progress.note(
            f"the archive lists {len(listing.instances):,} instances: {fetching.num_fetched:,} were fetched, "
            f"{len(listing.reasons):,} not delivered, the others there before"
        )
        return listing


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of a killed job."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if is_temporary_name(name):
                (Path(parent) / name).unlink(missing_ok=True)


class _Fetching:
    """One run: studies are listed and fetched by several threads."""

    def __init__(self, client: ArchiveClient, archive: Archive) -> None:
        self._client, self._archive, self._settings = client, archive, archive.settings
        self._lock = threading.Lock()
        self._failed: set[str] = set()
        self.num_fetched = 0

    def run(self, progress: Progress, known: Listing | None) -> Listing:
        wanted = self._wanted(known)
        progress.phase("archive", len(wanted))
        listing = Listing(missing=[] if known is None else known.missing)
        queue = iter(wanted.items())
        with ThreadPoolExecutor(self._settings.num_connections) as pool:
            try:
                running: set[Future[Listing]] = set()
                while True:
                    free = 2 * self._settings.num_connections - len(running)
                    running |= {
                        pool.submit(self._study, *one) for one in itertools.islice(queue, max(0, free))
                    }
                    if not running:
                        break
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        found = future.result()
                        listing.instances += found.instances
                        listing.reasons.update(found.reasons)
                        listing.missing += found.missing
                        progress.advance()
            except BaseException:
                self._client.close()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return replace(
            listing, instances=sorted(set(listing.instances)), missing=sorted(set(listing.missing))
        )

    def _wanted(self, known: Listing | None) -> dict[str, list[Instance] | None]:
        """Return the studies, each with its instances if they are known."""
        if known is not None:
            groups = itertools.groupby(sorted(known.instances), key=lambda one: one.study)
            return {study: list(group) for study, group in groups}
        if self._settings.studies is not None:
            return dict.fromkeys(_read_studies(self._settings.studies))
        try:
            return dict.fromkeys(self._ask_for_studies())
        except RefusedError as error:
            raise StorageError(_no_answer(error)) from None

    def _ask_for_studies(self) -> Iterator[str]:
        dates, settings = self._settings.study_dates, self._settings
        fixed = [("StudyDate", dates)] if dates else []
        fixed += sorted(settings.match.items())
        # Several modalities in one request mean different things to different archives.
        for modality in settings.modalities or ("",):
            query = [*fixed, *([("ModalitiesInStudy", modality)] if modality else [])]
            for row in self._pages(["studies"], query, (_STUDY,)):
                if dates and not _is_within(_value(row, _DATE), dates):
                    raise StorageError(
                        "the archive must answer with studies of inputs.archive.study_dates, got others: it "
                        "does not know this filter; name the studies in inputs.archive.studies."
                    )
                wrong = next(
                    (name for name, text in settings.match.items() if _differs(row, name, text)), None
                )
                if wrong is not None:
                    raise StorageError(
                        f"the archive must answer with studies that match inputs.archive.match, got another "
                        f"{wrong}: it does not know this filter; name the studies in inputs.archive.studies."
                    )
                yield _named(row, _STUDY)

    def _pages(
        self, parts: Sequence[str], query: list[tuple[str, str]], key: Sequence[str]
    ) -> Iterator[dict[str, Any]]:
        """Yield all results, each once; a page may be shorter than asked for, and the last one is empty."""
        size, offset = self._settings.page_size, 0
        seen: set[tuple[str, ...]] = set()
        while True:
            rows, has_more = self._client.search(
                parts, [*query, ("limit", str(size)), ("offset", str(offset))]
            )
            new = {uids: row for row in rows if (uids := tuple(_named(row, tag) for tag in key)) not in seen}
            if rows and not new and (has_more or len(rows) >= size):
                raise StorageError(
                    "the archive must answer page by page, got one page twice: it does not know `offset`; "
                    "raise inputs.archive.page_size above the number of results."
                )
            if not new:
                return
            seen |= new.keys()
            offset += len(rows)
            yield from new.values()

    def _study(self, study: str, known: list[Instance] | None) -> Listing:
        """List and fetch one study."""
        found = self._instances(study) if known is None else known
        listing = Listing(instances=found or [])
        if found is None and self._settings.studies is not None:
            listing.missing.append(study)
        for _, group in itertools.groupby(sorted(listing.instances), key=lambda one: one.series):
            self._series(list(group), listing.reasons)
        return listing

    def _instances(self, study: str) -> list[Instance] | None:
        """Return the wanted instances of a study; None if the archive lists none at all."""
        query = [("includefield", tag) for tag in (_SERIES, _MODALITY)]
        wanted = self._settings.modalities
        try:
            rows = list(self._pages(["studies", study, "instances"], query, (_SERIES, _INSTANCE)))
            modalities = {_named(row, _SERIES): _value(row, _MODALITY) for row in rows}
            if wanted and not all(modalities.values()):
                # Instances need not name it (PS3.18, table 10.6.3-5); series must.
                series = self._pages(["studies", study, "series"], query[1:], (_SERIES,))
                modalities |= {_named(row, _SERIES): _named(row, _MODALITY) for row in series}
        except RefusedError as error:
            if error.status == _NOT_FOUND:
                return None
            raise StorageError(_no_answer(error)) from None
        chosen = [row for row in rows if not wanted or modalities[_named(row, _SERIES)] in wanted]
        found = [Instance(study, _named(row, _SERIES), _named(row, _INSTANCE)) for row in chosen]
        return found if rows else None

    def _series(self, instances: Sequence[Instance], reasons: dict[Instance, Reason]) -> None:
        """Fetch what is missing of a series, at once or instance by instance."""
        missing = {one.instance: one for one in instances if not self._path(one).exists()}
        # One answer for all, unless most of it is here.
        if len(missing) > max(1, len(instances) // 2):
            parts = ["studies", instances[0].study, "series", instances[0].series]
            with suppress(PassingFaultError, RefusedError):
                self._deliver(parts, missing, reasons)
        for instance in list(missing.values()):
            if self._one(instance, reasons):
                continue
            reasons.setdefault(instance, Reason.NOT_RETRIEVED)
            with self._lock:
                self._failed.add(instance.study)
                if len(self._failed) >= _MAX_FAILED:
                    raise StorageError(
                        f"the archive delivered nothing of the last {_MAX_FAILED} studies; check that it is "
                        "healthy and delivers the stored transfer syntax, and run the job again."
                    )

    def _one(self, instance: Instance, reasons: dict[Instance, Reason]) -> bool:
        """Fetch one instance; whether it came."""
        parts = ["studies", instance.study, "series", instance.series, "instances", instance.instance]
        missing = {instance.instance: instance}
        fault: PassingFaultError | None = None

        def attempt(_number: int) -> None:
            nonlocal fault
            fault = None
            try:
                self._deliver(parts, missing, reasons)
            except PassingFaultError as error:
                fault = error
                if instance not in reasons:
                    raise

        try:
            self._client.retrying("fetching an instance", attempt)
        except RefusedError:
            return False
        except StorageError:
            if fault is None:
                raise
            if fault.is_refusal or not isinstance(fault, DeliveryError):
                # An archive that is down or overloaded is no fact about this instance: does it still answer?
                self._client.search(["studies", instance.study, "instances"], [("limit", "1")])
        return not missing and instance not in reasons

    def _deliver(
        self, parts: Sequence[str], missing: dict[str, Instance], reasons: dict[Instance, Reason]
    ) -> None:
        """Write the parts of one answer, and remove what came from ``missing``.

        Raises:
            DeliveryError: The answer is malformed, ends early, or lacks something.
            PassingFaultError: The archive cannot be reached.
            RefusedError: A final status.
        """
        with self._client.get(parts, _ACCEPT) as answer:
            try:
                reader = PartReader(answer.read, boundary_of(answer.content_type))
                while (header := reader.next_part()) is not None:
                    if media_type(header.get("content-type", _DICOM)) != _DICOM:
                        raise DeliveryError("a part that is no DICOM file")
                    self._take(reader.body(), header, missing, reasons)
            except MultipartError as error:
                raise DeliveryError(str(error)) from None
        if missing:
            raise DeliveryError("an answer without what was asked for")

    def _take(
        self,
        pieces: Iterator[bytes],
        header: dict[str, str],
        missing: dict[str, Instance],
        reasons: dict[Instance, Reason],
    ) -> None:
        """Write one part, if it is a missing instance; others, and copies, are left."""
        head = bytearray()
        uid: str | None = None
        while uid is None:
            piece = next(pieces, None)
            head += piece or b""
            uid = instance_uid(head, is_whole=piece is None)
        instance = missing.get(uid)
        if instance is None:
            return

        def content() -> Iterator[bytes]:
            num_bytes = 0
            for piece in itertools.chain([bytes(head)], pieces):
                num_bytes += len(piece)
                if num_bytes > self._archive.max_instance_bytes:
                    reasons[instance] = Reason.LIMIT_EXCEEDED
                    del missing[instance.instance]
                    raise DeliveryError("too large a part")
                yield piece
            declared = header.get("content-length", "")
            if declared.isdecimal() and int(declared) != num_bytes:
                raise DeliveryError("a part of another length than it declares")

        write_atomic(self._path(instance), content(), replace=True, mode=0o600)
        del missing[instance.instance]
        reasons.pop(instance, None)
        with self._lock:
            self.num_fetched += 1
            self._failed.clear()

    def _path(self, instance: Instance) -> Path:
        return self._archive.files / instance.relative_path


def _read_studies(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"inputs.archive.studies must be a readable text file, got {os_reason(error)}; correct its path."
        ) from None
    found = [line.strip() for line in lines if line.strip()]
    bad = next((number for number, line in enumerate(lines, 1) if line.strip() and not _is_uid(line)), None)
    if bad is not None or not found:
        place = "an empty file" if bad is None else f"something else on line {bad}"
        raise ConfigError(
            f"inputs.archive.studies must have a Study Instance UID on each line, got {place}; correct it."
        )
    return found


def _is_uid(text: str) -> bool:
    return re.fullmatch(r"[0-9.]{1,64}", text.strip()) is not None


def _values(row: dict[str, Any], tag: str) -> list[str]:
    """Return the texts of an attribute of the DICOM JSON model (PS3.18, F.2); numbers and nulls are none."""
    element = row.get(tag)
    values = element.get("Value") if isinstance(element, dict) else None
    found = []
    for one in values if isinstance(values, list) else ():
        text = one.get("Alphabetic", "") if isinstance(one, dict) else one  # a name of a person is an object
        if isinstance(text, str) and text.strip("\0 "):
            found.append(text.strip("\0 "))
    return found


def _value(row: dict[str, Any], tag: str) -> str:
    """Return the first text of an attribute; empty for none."""
    return next(iter(_values(row, tag)), "")


def _named(row: dict[str, Any], tag: str) -> str:
    """Return a value that a result must have."""
    value = _value(row, tag)
    if not 0 < len(value) <= _MAX_LENGTH:
        raise StorageError(
            f"the archive must name ({tag[:4]},{tag[4:]}) in its results, got one without; it speaks another "
            "dialect of QIDO-RS."
        )
    return value


def _differs(row: dict[str, Any], name: str, text: str) -> bool:
    """Whether a result has another value of an attribute than was asked for (PS3.4, C.2.2.2).

    Times and lists are not compared, nor what the archive leaves out.
    """
    from pydicom.datadict import tag_for_keyword

    number = tag_for_keyword(name)
    tag = name.upper() if number is None else f"{number:08X}"
    found = _values(row, tag)
    if not found or any(sign in text for sign in ",\\") or row[tag].get("vr") in ("DA", "TM", "DT"):
        return False
    pattern = re.escape(text.rstrip("^")).replace(r"\*", ".*").replace(r"\?", ".")
    return not any(re.fullmatch(pattern, one.rstrip("^"), re.IGNORECASE | re.DOTALL) for one in found)


def _is_within(date: str, dates: str) -> bool:
    """Whether a date is in a range as DICOM writes them; a study without a date is, as no archive knows."""
    first, dash, last = dates.partition("-")
    return not date or (first <= date <= (last or "99999999") if dash else date == dates)


def _no_answer(error: RefusedError) -> str:
    return (
        f"the archive must answer what it holds, got status {error.status}; check that inputs.dicomweb is "
        "the root of its DICOMweb service."
    )
