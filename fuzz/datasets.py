"""Targets: files of a dataset and of a run, foreign tars, expressions, and requests to the viewer.

Where a file carries digests, they are made to fit after each mutation: whoever can write a file can do that
too, and without it no mutation would pass the first check.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fuzz.target import Target, as_json, encoded
from shardflow.errors import CheckpointError, ConfigError, FormatError, StateError
from shardflow.fields.units import open_unit
from shardflow.format import Dataset
from shardflow.format.foreign.scan import scan_tar
from shardflow.format.index import ShardIndex
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.ledger import verify_ledger
from shardflow.format.manifest import Manifest
from shardflow.format.samples import SamplesTable
from shardflow.format.table import BLOCK_NUM_BYTES, PREFIX, TRAILER, Table, align, crc32c
from shardflow.format.tables import ColumnsTable
from shardflow.format.tar import HashedStream
from shardflow.loading.rows.selection import select
from shardflow.monitoring.history import METRICS_FILE, MetricsTail
from shardflow.sampling import LoaderState
from shardflow.storage import ByteRange, LocalStore
from shardflow.training.checkpoint.files import CheckpointFolder, read_checkpoint
from shardflow.training.ledger import read_ledger
from shardflow.viewing.server import Routes
from shardflow.viewing.web import _Handler
from tests.factories import make_dataset
from tests.foreign_tars import make_members, python_tar
from tests.viewing_case import make_viewed_dataset


def resigned_table(data: bytes) -> bytes:
    """Return a table whose checksums fit: of its header, and of the blocks that the header states."""
    if len(data) < PREFIX.size:
        return data
    magic, num_bytes, _ = PREFIX.unpack_from(data)
    header = data[PREFIX.size : PREFIX.size + num_bytes]
    signed = PREFIX.pack(magic, num_bytes, crc32c(header)) + header
    fields = as_json(header)
    try:
        sizes = [int(column["num_bytes"]) for column in fields["columns"]]
    except (TypeError, KeyError, ValueError, OverflowError):
        return signed + data[len(signed) :]
    if any(size < 0 for size in sizes) or sum(sizes) > 1 << 20:
        return signed + data[len(signed) :]
    body = data[len(signed) : len(signed) + sum(map(align, sizes))].ljust(sum(map(align, sizes)), b"\0")
    sums, start = [], 0
    for size in sizes:
        stop = start + align(size)
        sums += [
            crc32c(body[at : min(at + BLOCK_NUM_BYTES, stop)]) for at in range(start, stop, BLOCK_NUM_BYTES)
        ]
        start = stop
    checksums = np.array(sums, "<u4").tobytes()
    return signed + body + checksums + TRAILER.pack(crc32c(checksums), b"SFTABEND")


class Tables(Target):
    """A table, and what is made of it: index, samples, columns."""

    errors = (FormatError,)

    def seeds(self) -> Iterator[bytes]:
        """Return all tables of a small dataset."""
        dataset = self.folder / "tables"
        make_dataset(dataset, num_samples=4, samples_per_shard=2, slices=(1, 2), facts=True)
        for path in sorted(dataset.rglob("*")):
            if path.is_file() and path.read_bytes()[:8] == b"SFTABLE1":
                yield path.read_bytes()
        shutil.rmtree(dataset)

    def read(self, data: bytes) -> None:
        """Open and read all of it, as each kind of table."""
        with suppress(FormatError):
            Table(memoryview(data), name="a")
        table = Table(memoryview(resigned_table(data)), name="a")
        table.verify()
        for name in table.column_names:
            table.column(name)
            with suppress(FormatError, IndexError):
                table.gather(name, np.arange(min(3, table.num_rows(name))))
        with suppress(FormatError):
            index = ShardIndex.decode(table)
            for row in range(min(4, index.num_samples)):
                index.fields(row)
                index.volumes_of(row)
            index.texts(np.arange(min(4, index.num_samples)))
        with suppress(FormatError):
            samples = SamplesTable(table)
            for row in range(min(4, samples.num_samples)):
                samples.sample_key(row)
                samples.modality(row)
        with suppress(FormatError):
            columns = ColumnsTable(table)
            for name in table.meta.get("columns", {}):
                columns.gather(name)


class Manifests(Target):
    """A manifest, with a digest that fits; and a ledger of inputs."""

    errors = (FormatError,)

    def seeds(self) -> Iterator[bytes]:
        """Return those of a small dataset."""
        dataset = self.folder / "manifests"
        make_dataset(dataset, num_samples=4, samples_per_shard=2, slices=(1, 2), facts=True)
        for path in sorted(dataset.rglob("*.json*")):
            yield path.read_bytes()
        shutil.rmtree(dataset)

    def read(self, data: bytes) -> None:
        """Parse it as it is, and with a digest that fits."""
        verify_ledger(data)
        with suppress(FormatError):
            Manifest.parse(data)
        body = as_json(data)
        if isinstance(body, dict):
            body.pop("digest", None)
            try:
                signed = {**body, "digest": sha256_hex(canonical_json(body))}
                line = canonical_json(signed) + b"\n"
            except (ValueError, RecursionError):  # no JSON of ours
                return
            manifest = Manifest.parse(line)
            manifest.files()
            manifest.encode()


class _Bytes(LocalStore):
    """An object in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def size(self, _path: str) -> int:
        return len(self._data)

    def read_ranges(self, _path: str, ranges: Sequence[ByteRange], buffers: Sequence[memoryview]) -> None:
        for one, buffer in zip(ranges, buffers, strict=True):
            buffer[:] = self._data[one.offset : one.offset + one.num_bytes]


class Tar(Target):
    """A tar that somebody else wrote."""

    errors = (FormatError,)

    def seeds(self) -> Iterator[bytes]:
        """Write tars in three forms."""
        for number in range(3):
            yield python_tar(self.folder / "seed.tar", make_members(range(2)), number).read_bytes()

    def read(self, data: bytes) -> None:
        """List its members."""
        for _ in scan_tar(HashedStream(_Bytes(data), "a", window_bytes=4096), shard="a", head_bytes=64):
            pass


class Expressions(Target):
    """``where=`` of studies, series and images."""

    errors = (ConfigError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_dataset(folder / "expressions", num_samples=6, samples_per_shard=3, facts=True)
        self._dataset = Dataset.open(folder / "expressions")

    def seeds(self) -> Iterator[bytes]:
        """Return expressions of every kind."""
        yield from (
            b"facts.modality == 'CT' and num_slices >= 2",
            b"not (facts.modality in ['CT', 'MR']) or any(series.role == 'axial')",
            b"all(series.num_slices > 1) and facts.age_years < 40.5",
            b"role == 'primary' and 1 < rows <= 512",
            b"facts.sex is None or facts.sex != 'F'",
            b"modality=CT",
            b"sample_key == 'a\\'b'",
        )

    def read(self, data: bytes) -> None:
        """Select by it."""
        text = data.decode("utf-8", "surrogateescape")
        with suppress(ConfigError):
            select(self._dataset, "train", where=text)
        for unit in ("series", "image"):
            with suppress(ConfigError):
                open_unit(self._dataset, unit, text)


class RunFiles(Target):
    """Files of a run; the first byte chooses: loader state, checkpoint's state, tensors, ledger, metrics."""

    errors = (CheckpointError, StateError)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._run = folder / "run"
        checkpoints = CheckpointFolder(self._run / "checkpoints", keep_last=1)
        unfinished = checkpoints.begin(4)
        tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor(1.0)}
        files = checkpoints.write_part(unfinished, 4, model=tensors, optimizer=tensors)
        checkpoints.publish(unfinished, 4, state={"loader": {}, "epoch": 1}, files=files)
        self._checkpoint = self._run / "checkpoints" / "step-00000004"
        self._state = (self._checkpoint / "state.json").read_bytes()
        self._tensors = (self._checkpoint / "model.safetensors").read_bytes()
        (self._run / "ledger" / "attempt-0001").mkdir(parents=True)

    def seeds(self) -> Iterator[bytes]:
        """Return sound files."""
        state = {
            "version": 1,
            "batch": {
                "kind": "fixed",
                "micro_batch_size": 4,
                "micro_batches_per_step": 8,
                "tail": "mask",
            },
            **dict.fromkeys(("dataset_id", "plan_id"), "0123456789abcdef" * 4),
            "epoch": 3,
            "step": 2,
            "seed": 7,
            "manifest_version": 2,
            "split": "train",
            "view": "full_study",
        }
        yield from (b"\0" + line for line in encoded(state, {**state, "version": 2, "components": []}))
        yield b"\1" + self._state
        yield b"\2" + self._tensors
        attempt = {"event": "attempt", "attempt": 1, "rank": 0, "world_size": 1, "start": 0}
        step = {"event": "step", "global_step": 0, "epoch": 0, "step": 0, "micros": [[0, ["a"], [1.0]]]}
        yield b"\3" + b"\n".join([*encoded(attempt, step), b""])
        line = {"time_s": 1.0, "global_step": 0, "step_s": 0.5, "loss": 1.0}
        yield b"\4" + b"\n".join([*encoded({**attempt, **line}, {**step, **line}), b""])

    def read(self, data: bytes) -> None:
        """Read the file that the first byte chooses."""
        kind, rest = (data[0] % 5, data[1:]) if data else (0, b"")
        if kind == 0:
            value = as_json(rest)
            LoaderState.from_json(value).check_within(100)
        elif kind == 1:
            self._read_state(rest)
        elif kind == 2:
            self._read_tensors(rest)
        elif kind == 3:
            (self._run / "ledger" / "attempt-0001" / "rank-00000.jsonl").write_bytes(rest)
            read_ledger(self._run)
        else:
            (self._run / METRICS_FILE).write_bytes(rest)
            for _ in MetricsTail(self._run).read():
                pass

    def _read_state(self, data: bytes) -> None:
        body = as_json(data)
        if isinstance(body, dict):
            body.pop("digest", None)
            try:
                canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
                body["digest"] = hashlib.sha256(canonical).hexdigest()
                data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
            except (ValueError, RecursionError):
                return
        (self._checkpoint / "state.json").write_bytes(data)
        read_checkpoint(self._checkpoint)

    def _read_tensors(self, data: bytes) -> None:
        body = json.loads(self._state)
        body["files"]["model.safetensors"] = {
            "num_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
        (self._checkpoint / "model.safetensors").write_bytes(data)
        try:
            # Signs it again.
            self._read_state(json.dumps(body).encode())
            found = read_checkpoint(self._checkpoint)
            for name in list(found.model)[:4]:
                _ = found.model[name]
        finally:
            (self._checkpoint / "model.safetensors").write_bytes(self._tensors)


class _Kept(io.BytesIO):
    """What was answered, after the handler has closed it."""

    answered = b""

    def close(self) -> None:
        self.answered = self.getvalue()
        super().close()


class Viewer(Target):
    """What a client sends to the viewer: any bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        make_viewed_dataset(folder / "viewed")
        self._routes = Routes(Dataset.open(folder / "viewed"))
        self._server: Any = SimpleNamespace(
            answering=nullcontext,
            is_local=False,
            token="",
            answer=self._routes.answer,
            server_address=("127.0.0.1", 1),
        )

    def seeds(self) -> Iterator[bytes]:
        """Return a request of each page."""
        for path in (
            "/",
            "/api/dataset?inputs=1",
            "/api/samples?text=nodule&split=train&modality=CT&start=0&count=9",
            "/api/samples?where=num_slices%20%3E%202&concept=nodule&assertion=present",
            "/api/findings",
            "/api/inputs?outcome=packed&reason=&start=0&count=2",
            "/api/steps?split=train&seed=7&epoch=0&step=0&size=2&count=2",
            "/api/samples/0",
            "/api/samples/0/slices/0/3",
            "/api/samples/0/planes/0/1/5",
            "/api/samples/0/regions/0/0/5/0",
            "/api/samples/0/documents/0",
            "/api/samples/0/waveforms/0/0?start=0&count=100&columns=10",
        ):
            yield f"GET {path} HTTP/1.1\r\nHost: a\r\nCookie: shardflow_1=x\r\n\r\n".encode()

    def read(self, data: bytes) -> None:
        """Let the handler answer; what it answers with 500 is a finding."""
        answer = _Kept()
        connection: Any = SimpleNamespace(
            makefile=lambda mode, size=0: io.BytesIO(data) if "r" in mode else answer,  # noqa: ARG005
            settimeout=lambda _: None,
            setsockopt=lambda *_: None,
        )
        _Handler(connection, ("127.0.0.1", 2), self._server)
        if b"HTTP/1.1 500" in answer.answered:
            raise RuntimeError(answer.answered[-200:].decode(errors="replace"))
