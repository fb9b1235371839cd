"""What makes a table of entities beside a dataset valid: its manifest, and where both lie.

A sidecar, added later without touching a shard: ``views/<name>/<dataset_id>/`` holds ``entities.tbl`` and
``view.json``, which names the dataset, the rules and the table, and is written last. The layout is in
docs/format.md, section 16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final, Literal, TypeAlias, get_args

from shardflow.errors import ConfigError, FormatError, NotFoundError
from shardflow.shards.canonical import Json, canonical_json, parse_json, sha256_hex
from shardflow.shards.manifest import Manifest
from shardflow.storage import ByteStore

__all__ = [
    "MANIFEST_NAME",
    "TABLE_NAME",
    "EntityManifest",
    "EntityRules",
    "EntityText",
    "check_view_name",
    "load_entity_manifest",
    "view_digests",
    "view_folder",
]

MANIFEST_NAME: Final = "view.json"
TABLE_NAME: Final = "entities.tbl"
EntityText: TypeAlias = Literal["sentence", "entity", "report"]
_FORMAT: Final = "shardflow-view"
_FORMAT_VERSION: Final = 1
_KIND: Final = "entity"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_STUDIES: Final = "full_study"
_MAX_CONTEXT: Final = 1000
_NUM_PARTS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityRules:
    """Which entities become rows, and what a row holds beside its own slices.

    Raises:
        ConfigError: A value is out of range.
    """

    threshold: float = 0.7
    """An entity counts where its confidence is above it; one that has just this does not."""
    context_slices: int = 1
    """So many neighbours on either side of each slice belong to the row, with weight 0."""
    text: EntityText = "sentence"
    """What of the report goes with the slices: the sentence, the words of the entity, or all of it."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"threshold must be from 0 to 1, got {self.threshold}; 0.7 is usual.")
        if not 0 <= self.context_slices <= _MAX_CONTEXT:
            raise ConfigError(
                f"context_slices must be from 0 to {_MAX_CONTEXT}, got {self.context_slices}; 1 is usual."
            )
        if self.text not in get_args(EntityText):
            known = ", ".join(get_args(EntityText))
            raise ConfigError(f"text must be one of {known}, got {self.text!r}; correct it.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EntityManifest:
    """The manifest of a view."""

    dataset_id: str
    rules: EntityRules
    num_studies: int
    """Samples of the dataset."""
    num_entities: int
    num_bytes: int
    """Of the table."""
    sha256: str

    @property
    def digest(self) -> str:
        """Identity of the view, 64 hexadecimal digits: another dataset, rule or row gives another one."""
        return sha256_hex(canonical_json(self._body()))

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return canonical_json({**self._body(), "digest": self.digest}) + b"\n"

    @classmethod
    def decode(cls, data: bytes, *, name: str) -> EntityManifest:
        """Parse and check a manifest.

        Raises:
            FormatError: It is no manifest of an entity view, or its digest is another one.
        """
        body = parse_json(data.removesuffix(b"\n"), what=name)
        try:
            rules = body["rules"]
            manifest = cls(
                dataset_id=body["dataset_id"],
                rules=EntityRules(**{**rules, "threshold": float(rules["threshold"])}),
                num_studies=body["num_studies"],
                num_entities=body["num_entities"],
                num_bytes=body["table"]["num_bytes"],
                sha256=body["table"]["sha256"],
            )
            is_whole = manifest.encode() == data
        except (KeyError, TypeError, ValueError, AttributeError, ConfigError):
            is_whole = False
        if not is_whole:
            raise FormatError(
                f"{name} must be a whole manifest of an entity view of format {_FORMAT_VERSION}, got another "
                "file; delete its folder and make the view again."
            )
        return manifest

    def _body(self) -> dict[str, Json]:
        # Canonical JSON has no fractions: the threshold is the shortest text of its number.
        rules: dict[str, Json] = {**asdict(self.rules), "threshold": repr(float(self.rules.threshold))}
        return {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "kind": _KIND,
            "dataset_id": self.dataset_id,
            "rules": rules,
            "num_studies": self.num_studies,
            "num_entities": self.num_entities,
            "table": {"num_bytes": self.num_bytes, "sha256": self.sha256},
        }


def check_view_name(name: str) -> str:
    """Return the name of a view beside a dataset.

    Raises:
        ConfigError: It is none.
    """
    if not _NAME.fullmatch(name) or name == _STUDIES:
        raise ConfigError(
            f"a view must have a name of a-z, 0-9, '-' and '_' other than {_STUDIES}, got {name!a}; "
            "entity is usual."
        )
    return name


def view_folder(name: str, dataset_id: str) -> str:
    """Return where a view lies in a dataset.

    Args:
        name: Of the view.
        dataset_id: Digest of the manifest that is open: rows of another version are other rows.

    Raises:
        ConfigError: The name is none.
    """
    return f"views/{check_view_name(name)}/{dataset_id}"


def load_entity_manifest(store: ByteStore, manifest: Manifest, name: str) -> EntityManifest:
    """Return the manifest of a view.

    Args:
        store: Of the dataset.
        manifest: The version that is open.
        name: Of the view.

    Raises:
        ConfigError: Nobody made such a view of this version.
        FormatError: The view is another dataset's, or cannot be trusted.
    """
    path = f"{view_folder(name, manifest.dataset_id)}/{MANIFEST_NAME}"
    try:
        data = store.read(path)
    except NotFoundError:
        raise ConfigError(
            f"the dataset must have a view {name!r} beside version {manifest.manifest_version}, got none; "
            f"run: shardflow entities DATASET --name {name}"
        ) from None
    view = EntityManifest.decode(data, name=path)
    if view.dataset_id != manifest.dataset_id:
        raise FormatError(
            f"{path} must name this dataset, got another; delete the folder and make the view again."
        )
    return view


def view_digests(store: ByteStore, manifests: Iterable[Manifest]) -> set[str]:
    """Return the identities of all views beside some versions of a dataset.

    Raises:
        FormatError: A view cannot be trusted.
    """
    versions = {manifest.dataset_id: manifest for manifest in manifests}
    found = set()
    for path in store.list("views/"):
        parts = path.split("/")
        if len(parts) == _NUM_PARTS and parts[-1] == MANIFEST_NAME and parts[2] in versions:
            found.add(load_entity_manifest(store, versions[parts[2]], parts[1]).digest)
    return found
