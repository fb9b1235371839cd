"""Wire of data servers: the settings that describe a run, and the messages between a loader and a server.

Arrow Flight carries two kinds of calls. The action ``open`` has a run as JSON: its lock, and its settings as
a TOML text, which the server reads as it reads any settings file. A ticket has the address of a micro-batch
as JSON; the answer is the flat buffer of the batch in pieces, and its descriptor as JSON with the first one.
On the host of the loader the batch is made in memory that the ticket names, and its descriptor is the answer.
No object of Python crosses the wire. Datasets travel by digest, transforms by name. With a run come digests
of the code that makes its batches, since a server with other code would make other ones.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal

from shardflow._version import __version__
from shardflow.config import check_fields, dump_config, keeping_integers, load_config
from shardflow.errors import ConfigError, FormatError, ShardflowError, os_reason
from shardflow.fields.outputs import Output, OutputContract
from shardflow.fields.registry import FIELD_GROUP, FieldSet, FieldTables
from shardflow.fields.transforming import load_function
from shardflow.fields.units import UnitDataset, WindowDataset
from shardflow.format import Dataset
from shardflow.format.entities import EntityDataset
from shardflow.format.keys import canonical_json, sha256_hex
from shardflow.format.manifest import load
from shardflow.loading.config import LoaderConfig, World
from shardflow.loading.ipc import error_from_json
from shardflow.loading.rows.blend_file import BlendFile, ComponentSettings, open_blend
from shardflow.loading.rows.lock import open_locked
from shardflow.loading.rows.selection import Given, Selection, open_view
from shardflow.sampling import BatchSpec
from shardflow.sampling.spec import Sampling

OPEN_RUN: Final = "open"
"""Flight action that describes a run to a server."""
UNKNOWN_RUN: Final = "UnknownRun"
"""Class of the error of a server that does not know the run of a ticket, or no longer."""
MAX_RUN_BYTES: Final = 64 << 20
MAX_TICKET_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 4 << 20
"""Bytes of a batch in one message, so that a slow network holds up no more than that."""
_WIRE_VERSION: Final = 3
_PACKAGE: Final = __name__.partition(".")[0]
_CODE_SUFFIXES: Final = (".py", ".csv", ".toml", ".txt")
_MAX_COUNTER: Final = 1 << 62
_SETTINGS_NAME: Final = "run.toml"
_SHOWN: Final = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings of a run, as a server gets them."""

    seed: int
    batch: str
    """The `BatchSpec` as JSON."""
    component: tuple[ComponentSettings, ...]
    """One, or those of a blend; ``dataset`` is the digest of its manifest, and ``keys`` is in the message."""
    is_blend: bool = False
    epoch_samples: int | None = None
    """As in a blend file."""
    sampling: Sampling | None = None
    transform: tuple[str, ...] = ()
    """Names ``package.module:function``."""
    collate: str = ""
    outputs: tuple[Output, ...] = ()
    """What the transform returns."""
    on_bad_sample: Literal["mask", "raise"] = "mask"
    fields: FieldTables

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.component:
            raise ConfigError("a run must have at least one component, got none.")

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the user's functions."""
        return (*self.transform, *filter(None, [self.collate]))


@dataclass(frozen=True, slots=True)
class RunMessage:
    """Description of a run for servers."""

    body: bytes
    """Of the action `OPEN_RUN`."""
    name: str
    """Digest of the body, which tickets hold: two runs never share it."""


def describe_run(
    selection: Selection,
    fields: FieldSet,
    batch: BatchSpec,
    config: LoaderConfig,
    lock: Mapping[str, Any],
) -> RunMessage:
    """Describe the batches of a loader to data servers.

    Args:
        selection: The samples.
        fields: What a batch holds.
        batch: The batch spec that the loader was made with.
        config: Of the loader.
        lock: Of the loader; a server that finds anything else refuses the run.

    Raises:
        ConfigError: The samples or a transform have no description that another machine can read.
    """
    given = selection.given
    if isinstance(given, Given):
        parts = [ComponentSettings(dataset="", split=given.split, where=given.where, keys=given.keys)]
    elif isinstance(given, BlendFile):
        parts = list(given.component)
    else:
        raise ConfigError(
            'execution = "service" needs samples that servers can select by themselves; pass a dataset with '
            "split= and where=, or a blend file, to the Loader."
        )
    listed = {
        str(number): _read_keys(part.keys) for number, part in enumerate(parts) if part.keys is not None
    }
    transform: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    collate = ""
    if fields.transform is not None:
        (transform, collate), outputs = fields.transform.given_names(), fields.transform.contract.outputs
    settings = RunSettings(
        seed=lock["sampling"]["seed"],
        batch=json.dumps(batch.to_json()),
        component=tuple(map(_named, parts, selection.datasets)),
        is_blend=isinstance(given, BlendFile),
        epoch_samples=given.epoch_samples if isinstance(given, BlendFile) else None,
        sampling=selection.sampling,
        transform=transform,
        collate=collate,
        outputs=outputs,
        on_bad_sample=config.on_bad_sample,
        fields=dict(fields.specs),
    )
    message = {
        "version": _WIRE_VERSION,
        "shardflow": __version__,
        "code": _code_digests(settings),
        "lock": lock,
        "settings": dump_config(settings),
        "keys": listed,
    }
    body = json.dumps(message, separators=(",", ":"), sort_keys=True).encode()
    if len(body) > MAX_RUN_BYTES:
        raise ConfigError(
            f"The key lists of a run may have {MAX_RUN_BYTES >> 20} MiB for data servers, got "
            f"{len(body) >> 20}; select with where= instead."
        )
    return RunMessage(body, sha256_hex(body))


def _named(part: ComponentSettings, dataset: Dataset) -> ComponentSettings:
    """Return a component with what its dataset is and is seen as, and without paths."""
    part = replace(part, dataset=dataset.manifest.dataset_id, version=dataset.manifest_version, keys=None)
    if isinstance(dataset, EntityDataset):
        return replace(part, view=dataset.name)
    if isinstance(dataset, UnitDataset):
        return replace(part, unit=dataset.unit, where=dataset.where)
    return replace(part, unit=dataset.unit) if isinstance(dataset, WindowDataset) else part


def _read_keys(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key list cannot be read for data servers ({os_reason(error)}).") from None


def loader_arguments(
    body: bytes, served: Sequence[Dataset], allowed: Collection[str], folder: Path
) -> dict[str, Any]:
    """Return the arguments of the loader that a run describes.

    Args:
        body: Of the action `OPEN_RUN`.
        served: The datasets of this server; other versions of them are opened where a run reads those.
        allowed: Packages and modules that a run may name functions of.
        folder: An empty folder for files that are read while the loader is made.

    Raises:
        ConfigError: The description is malformed, or asks for a dataset or a module that is not served.
    """
    message = _message(body)
    file = folder / _SETTINGS_NAME
    file.write_text(message["settings"], encoding="utf-8")
    _check_types(message["settings"], allowed)
    with keeping_integers():
        settings = load_config(RunSettings, file)
    for name in settings.functions:
        check_allowed(name, allowed)
    _check_code(message["code"], _code_digests(settings))
    keys: dict[int, str] = {}
    for number, text in message["keys"].items():
        path = folder / f"keys-{int(number)}.txt"
        path.write_text(text, encoding="utf-8")
        keys[int(number)] = str(path)
    parts = [replace(part, keys=keys.get(number)) for number, part in enumerate(settings.component)]
    opened = [_find(part, served) for part in parts]
    lock = message["lock"]
    arguments: dict[str, Any] = {
        "seed": settings.seed,
        "batch": BatchSpec.from_json(json.loads(settings.batch)),
        "fields": settings.fields,
        "world": World(),
        "config": LoaderConfig(num_threads=1, on_bad_sample=settings.on_bad_sample),
        "lock": lock,
    }
    if settings.transform or settings.collate:
        arguments |= {
            "transform": list(settings.transform) or None,
            "collate": settings.collate or None,
            "outputs": OutputContract(settings.outputs),
        }
    if settings.is_blend:
        placed = tuple(
            replace(part, dataset=dataset.store.url) for part, dataset in zip(parts, opened, strict=True)
        )
        blend, text = folder / "blend.toml", BlendFile(component=placed, epoch_samples=settings.epoch_samples)
        blend.write_text(dump_config(text), encoding="utf-8")
        cache = next((one.cache for one in opened if one.cache is not None), None)
        return arguments | {"dataset": open_blend(blend, lock=lock, cache=cache)}
    if len(parts) != 1:
        raise ConfigError("a run that is no blend must have one component.")
    (part,) = parts
    source = open_locked(opened[0], lock)
    assert isinstance(source, Dataset)  # noqa: S101 - a dataset stays one
    return arguments | {
        "dataset": open_view(source, part.view),
        "split": part.split,
        "unit": part.unit,
        "where": part.where,
        "keys": part.keys,
        "sampling": settings.sampling,
    }


def _find(part: ComponentSettings, served: Sequence[Dataset]) -> Dataset:
    """Return the version of a dataset that a component reads."""
    for dataset in served:
        if dataset.manifest.dataset_id == part.dataset:
            return dataset
    for dataset in served:
        with suppress(ShardflowError):  # it has no such version
            found = Dataset(dataset.store, load(dataset.store, part.version))
            if found.manifest.dataset_id == part.dataset:
                return found
    raise ConfigError(
        f"It has no dataset {part.dataset[:12]} of version {part.version}; start it with the folder that the "
        "run reads: shardflow serve DATASET."
    )


def _message(body: bytes) -> dict[str, Any]:
    """Return the parts of a description, of the right types."""
    found = parse_object(body, MAX_RUN_BYTES, "the description of a run")
    kinds = {"version": int, "shardflow": str, "code": dict, "lock": dict, "settings": str, "keys": dict}
    if found.keys() != kinds.keys() or any(type(found[name]) is not kind for name, kind in kinds.items()):
        raise ConfigError("the description of a run is malformed; run the same shardflow on all machines.")
    if (found["version"], found["shardflow"]) != (_WIRE_VERSION, __version__):
        raise ConfigError(
            f"The run is of shardflow {found['shardflow'][:_SHOWN]!a}, and it has {__version__}; install the "
            "same version on all machines."
        )
    _check_code({_PACKAGE: found["code"].get(_PACKAGE)}, {_PACKAGE: package_digest()})
    keys = found["keys"]
    if not all(one.isascii() and one.isdigit() and type(keys[one]) is str for one in keys):
        raise ConfigError("the key lists of a run are malformed.")
    return found


def parse_object(body: bytes, max_bytes: int, what: str) -> dict[str, Any]:
    """Return a JSON object that came over the wire.

    Raises:
        ConfigError: It is none, or too large.
    """
    if len(body) > max_bytes:
        raise ConfigError(f"{what} may have {max_bytes} bytes, got {len(body)}.")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{what} must be a JSON object.")
    return found


def _check_types(settings: str, allowed: Collection[str]) -> None:
    """Refuse field types whose modules this server does not import for anybody."""
    try:
        tables = tomllib.loads(settings).get("fields")
    except (tomllib.TOMLDecodeError, RecursionError):
        raise ConfigError("the settings of a run must be TOML.") from None
    installed = {entry.value for entry in entry_points(group=FIELD_GROUP)}
    for table in tables.values() if isinstance(tables, dict) else ():
        name = table.get("type") if isinstance(table, dict) else None
        if isinstance(name, str) and ":" in name and name not in installed:
            check_allowed(name, allowed)


def check_allowed(name: str, allowed: Collection[str]) -> None:
    """Refuse a function or class of a module that may not be imported for a run.

    Raises:
        ConfigError: It may not.
    """
    module = name.partition(":")[0]
    if not any(module == one or module.startswith(f"{one}.") for one in allowed):
        raise ConfigError(
            f"It may not import {module!a} for a run; start it with --allow {module} if it is to."
        )


# ---- code ----------------------------------------------------------------------------------------


@cache
def package_digest() -> str:
    """Return a digest of the files of this package that decide what is in a batch, when it is first asked."""
    folder = Path(__file__).parents[1]
    files = (path for path in folder.rglob("*") if path.suffix in _CODE_SUFFIXES)
    lines = sorted(f"{path.relative_to(folder).as_posix()} {sha256_hex(path.read_bytes())}" for path in files)
    return sha256_hex("\n".join(lines).encode())


_OF_MODULES: Final[dict[str, tuple[Any, str]]] = {}
"""Digests of modules by name, with the spec of the import that they belong to."""


def _module_digest(name: str) -> str:
    """Return a digest of the file of an imported module, as it was when it was first asked for.

    The file may change afterwards, and what runs here is what was imported; `importlib.reload` makes a new
    spec.
    """
    module = sys.modules[name]
    spec, digest = _OF_MODULES.get(name, (None, ""))
    if not digest or spec is not module.__spec__:
        file = getattr(module, "__file__", None)  # None: part of the interpreter
        try:
            digest = sha256_hex(Path(file).read_bytes() if file else b"")
        except OSError as error:
            raise ConfigError(
                f"the file of {name!a} cannot be read, so that nobody can tell whether data servers have the "
                f"same code ({os_reason(error)}); install it as files."
            ) from None
        _OF_MODULES[name] = (module.__spec__, digest)
    return digest


def _code_digests(settings: RunSettings) -> dict[str, str]:
    """Return digests of this package and of the modules of others that a run names.

    What such a module imports is not part of it.

    Raises:
        ConfigError: A function cannot be imported, or its module has no file that can be read.
    """
    for name in settings.functions:
        load_function(name)
    named = {name.partition(":")[0] for name in settings.functions}
    named |= {type(field).__module__ for field in settings.fields.values()}
    others = sorted(one for one in named if one.partition(".")[0] != _PACKAGE)
    return {_PACKAGE: package_digest(), **{name: _module_digest(name) for name in others}}


def _check_code(told: Mapping[str, Any], own: Mapping[str, str]) -> None:
    """Refuse a run whose batches other code would make here."""
    for name in sorted(told.keys() | own.keys()):
        if told.get(name) != own.get(name):
            raise ConfigError(
                f"Its code of {name[: 2 * _SHOWN]!a} is not that of the run; bring the same files to all "
                "machines, and start it again."
            )


# ---- tickets and answers -------------------------------------------------------------------------


def encode_ticket(run: str, request: Mapping[str, Any]) -> bytes:
    """Return the ticket of a micro-batch, see `MicroBatchTask.request`."""
    return canonical_json({"run": run, **request})


def decode_ticket(ticket: bytes) -> tuple[str, tuple[int, int, int], list[dict[str, Any]], Any]:
    """Return run, address (epoch, step and micro-batch), known masks and memory of a ticket.

    The memory is None, or as `SharedBuffers.place_of` describes it.

    Raises:
        ConfigError: It is malformed.
    """
    found = parse_object(ticket, MAX_TICKET_BYTES, "a ticket")
    places = [found.get(name) for name in ("epoch", "step", "micro")]
    masks, run = found.get("masks"), found.get("run")
    is_right = all(type(one) is int and 0 <= one < _MAX_COUNTER for one in places)
    is_right &= isinstance(masks, list) and all(isinstance(one, dict) for one in masks)
    if not is_right or not isinstance(run, str):
        raise ConfigError("a ticket must have run, epoch, step, micro and masks.")
    return run, tuple(places), masks, found.get("memory")  # type: ignore[return-value]


def encode_error(error: BaseException) -> bytes:
    """Return class and sentence of an error; of others' errors the class alone: their text may quote data."""
    message = error.message if isinstance(error, ShardflowError) else ""
    return json.dumps({"class": type(error).__name__, "message": message}).encode()


def decode_error(info: bytes, server: str) -> tuple[str, Exception] | None:
    """Return the class and the error that a server sent; None if there is none."""
    try:
        found = parse_object(info, MAX_TICKET_BYTES, "an error")
    except ConfigError:
        return None
    name, message = str(found.get("class", "")), str(found.get("message", ""))
    return name, error_from_json({"class": name, "message": message}, f"the data server {server}")


def check_piece(num_bytes: Any) -> int:
    """Return the size of a batch that an answer states.

    Raises:
        FormatError: It is none.
    """
    if type(num_bytes) is not int or num_bytes < 0:
        raise FormatError("an answer of a data server must state the size of its batch.")
    return num_bytes
