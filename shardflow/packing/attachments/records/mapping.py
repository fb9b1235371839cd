"""Settings of clinical records, and mappings: which facts of one's own XML and JSON files are read.

Paths are names joined by ``/``; ``@name`` at the end is an attribute in XML. Lists are iterated. A field has
a type, and a value of another type is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias
from zoneinfo import ZoneInfo

from shardflow.config import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.packing.attachments.codes import system_name
from shardflow.packing.attachments.records.record_filter import FreeText
from shardflow.packing.sources.documents.bounded import XmlNode
from shardflow.packing.sources.documents.facts import DocumentFacts, parse_moment, uid_of

if TYPE_CHECKING:
    from shardflow.packing.attachments.records.record_filter import Fact, RecordFilter

Node: TypeAlias = Any
"""A node that paths descend through: an `XmlNode`, or a value of JSON."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_KIND: Final = re.compile(r"[a-z0-9-]{1,20}")
_LOCAL_CODE: Final = re.compile(r"(?!.*\d{6})[A-Za-z0-9][\w./+-]{0,31}", re.ASCII)
_WORD: Final = re.compile(r"[\w .%<>=+-]{1,40}")
_MAX_VALUES: Final = 64
_RESERVED: Final = frozenset({"document", "end", "kind", "source", "when"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldMapping:
    """One field of a record."""

    path: str
    """Its path below the record."""
    type: Literal["choice", "code", "date", "flag", "number", "text"] = "number"
    """``text`` becomes a scrubbed document; ``choice`` is published as one of ``choices``."""
    unit: str = "1"
    """Of a ``number``, where ``unit_path`` does not say it."""
    unit_path: str = ""
    system: str = ""
    """Code system of a ``code``: its URI, OID or name (docs/attachments.md)."""
    choices: tuple[str, ...] = ()
    """Values that may be published unchanged."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.type == "code" and system_name(self.system) is None:
            raise ConfigError(
                f"{self.system!r} is not a code system of docs/attachments.md; set system to one of those."
            )
        if self.type == "choice" and not all(_WORD.fullmatch(choice) for choice in self.choices):
            raise ConfigError("choices must be short words; list the values that the field may have.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordMapping:
    """Mapping of one kind of files."""

    name: str
    """Name of the kind; ``[a-z0-9-]``."""
    format: Literal["json", "json-lines", "xml"]
    root: str
    """Name of the root element, or of a key that every file has near its beginning; others are not of it."""
    records: str = ""
    """Path of the records; empty for a file that is one."""
    study_uid: str = ""
    """Paths, below the record or (with ``/`` before) below the root, of what links it."""
    accession: str = ""
    patient_id: str = ""
    time: str = ""
    identifying: tuple[str, ...] = ()
    """Paths of names, numbers and addresses: looked for in texts, never written."""
    fields: dict[str, FieldMapping] = field(default_factory=dict)
    """Name in the fact, to where it lies."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not _KIND.fullmatch(self.name):
            raise ConfigError(f"the mapping name {self.name!r} is not 1 to 20 of [a-z0-9-]; rename it.")
        for name in self.fields:
            if not _NAME.fullmatch(name) or name in _RESERVED:
                raise ConfigError(f"the field name {name!r} is reserved or not of [a-z0-9_]; rename it.")
        if not self.fields:
            raise ConfigError("a mapping has no fields; name those to keep.")


def find_records(root: Node, mapping: RecordMapping) -> list[Node]:
    """Return the records of a parsed file."""
    return list(_walk(root, mapping.records)) if mapping.records else [root]


def mapped_facts(record: Node, root: Node, mapping: RecordMapping) -> DocumentFacts:
    """Return the linking facts of a record."""

    def values(path: str) -> list[str]:
        return _texts(record, root, path)

    facts = DocumentFacts(
        study_uids=[uid for uid in map(uid_of, values(mapping.study_uid)) if uid],
        accessions=values(mapping.accession),
        patient_ids=values(mapping.patient_id),
        time=next((moment for moment in map(parse_moment, values(mapping.time)) if moment), None),
    )
    for path in (*mapping.identifying, mapping.accession, mapping.patient_id):
        for text in values(path):
            # Its kind is unknown, so it is searched for as a name, as a number and as a place.
            facts.people.patient_name(text)
            facts.people.identifier(text)
            facts.people.place(text)
    return facts


def write_mapped(record: Node, root: Node, mapping: RecordMapping, record_filter: RecordFilter) -> None:
    """Add the fact of a record."""
    said: Fact = {}
    texts: list[str] = []
    for name, one in mapping.fields.items():
        found = _texts(record, root, one.path)
        if one.type == "text":
            texts += found
        elif found:
            said[name] = _value(found, record, root, one, record_filter)
    said["document"] = record_filter.document("\n\n".join(texts), mapping.name) if texts else None
    time = next(iter(_texts(record, root, mapping.time)), "")
    said["when"] = record_filter.when(time)
    record_filter.add(f"mapped-{mapping.name}", "record", said)


def _value(
    found: Sequence[str], record: Node, root: Node, one: FieldMapping, record_filter: RecordFilter
) -> Any:
    if one.type == "code":
        return record_filter.codes((one.system, text, "") for text in found)
    if one.type == "date":
        return record_filter.when(found[0])
    if one.type == "flag":
        return {"false": False, "0": False, "true": True, "1": True}.get(found[0].lower())
    if one.type == "choice":
        if found[0] not in one.choices:
            record_filter.left_out["NOT_A_CHOICE"] += 1
        return found[0] if found[0] in one.choices else None
    unit = next(iter(_texts(record, root, one.unit_path)), "") or one.unit
    quantities = [record_filter.quantity(text, unit) for text in found]
    kept = [quantity for quantity in quantities if quantity is not None]
    return kept[0] if len(kept) == 1 else kept


def _texts(record: Node, root: Node, path: str) -> list[str]:
    """Return the texts and numbers at a path as texts, at most 64."""
    if not path:
        return []
    start, below = (root, path[1:]) if path.startswith("/") else (record, path)
    found: list[str] = []
    for value in _walk(start, below):
        text = _text(value)
        if text and len(found) < _MAX_VALUES:
            found.append(text)
    return found


def _walk(node: Node, path: str) -> Iterator[Node]:
    name, _, rest = path.partition("/")
    for child in _children(node, name):
        if rest:
            yield from _walk(child, rest)
        else:
            yield child


def _children(node: Node, name: str) -> Iterator[Node]:
    if isinstance(node, XmlNode):
        if name.startswith("@"):
            yield node.get(name[1:])
        else:
            yield from node.elements(name)
    elif isinstance(node, dict):
        value = node.get(name)
        yield from value if isinstance(value, list) else [] if value is None else [value]
    elif isinstance(node, list):
        for one in node:
            yield from _children(one, name)


def _text(value: Node) -> str:
    if isinstance(value, XmlNode):
        return " ".join(value.text().split()) if not any(value.elements()) else value.text().strip()
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).strip() if isinstance(value, (str, int, float)) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCodes:
    """Codes of one's own, such as those of a laboratory; published are those that are listed."""

    names: tuple[str, ...]
    """What records call the system: a URI in FHIR, an OID in C-CDA, a name such as ``99LAB`` in HL7v2."""
    codes: tuple[str, ...]
    """All codes that may be published; others are dropped."""

    def __post_init__(self) -> None:
        check_fields(self)
        known = [name for name in self.names if system_name(name) is not None]
        if not self.names or known:
            raise ConfigError(
                "names of records.local_codes are what your records call a system of your own, got "
                f"{f'{known[0]!r}, which is a known one' if known else 'none'}; correct them."
            )
        if not self.codes or not all(_LOCAL_CODE.fullmatch(code) for code in self.codes):
            raise ConfigError(
                "codes of records.local_codes list 1 to 32 characters of letters, digits and _ . / + - each, "
                "and no number of six digits or more, which could be a patient's; correct them."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsConfig:
    """Settings of clinical records."""

    free_text: FreeText = "scrub"
    """``scrub``: narrative and other free text becomes ``document.NNN.txt``, scrubbed as reports are.
    ``drop``: none of it is published."""
    max_days: Annotated[int, Bounds(0, 40_000)] = 3653
    """Largest distance from the study at which a time is published; facts that lie farther lose theirs."""
    time_zone: str = ""
    """IANA name of the zone of the images' clock, such as ``Europe/Berlin``: times of records that state
    another offset are converted. Empty takes the offset that image headers state, else times as written."""
    mappings: tuple[RecordMapping, ...] = ()
    """Mappings of XML and JSON files."""
    local_codes: dict[str, LocalCodes] = field(default_factory=dict)
    """By a name of [a-z0-9-] codes of your own in FHIR, HL7v2 and C-CDA; a vocabulary of events names them as
    ``LOCAL-NAME:CODE``."""

    def __post_init__(self) -> None:
        check_fields(self)
        names = [mapping.name for mapping in self.mappings]
        if len(set(names)) != len(names):
            raise ConfigError("two of records.mappings have one name; rename one of them.")
        named = [name.lower() for one in self.local_codes.values() for name in one.names]
        if len(set(named)) != len(named) or not all(map(_KIND.fullmatch, self.local_codes)):
            raise ConfigError(
                "records.local_codes have names of [a-z0-9-], and each of their names is of one of them "
                "alone; correct them."
            )
        try:
            _ = self.time_zone and ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError):
            raise ConfigError(
                f"records.time_zone is the IANA name of a zone, such as Europe/Berlin, got "
                f"{self.time_zone!r}; correct it."
            ) from None

    def content(self) -> dict[str, Any] | None:
        """Return the settings that decide the dataset's bytes; None if nothing is set."""
        if self == RecordsConfig():
            return None
        # Left out at their defaults: settings older than these keep their digest.
        later = ("time_zone", "local_codes")
        return {name: value for name, value in asdict(self).items() if name not in later or value}

    def local_systems(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Return the published name and the codes of each local system, by what records call it."""
        return {
            called.removeprefix("urn:oid:").lower(): (f"LOCAL-{name.upper()}", frozenset(one.codes))
            for name, one in self.local_codes.items()
            for called in one.names
        }

    def to_text(self) -> str:
        """Return the settings as text; ``""`` if nothing is set."""
        content = self.content()
        return "" if content is None else json.dumps(content, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> RecordsConfig:
        """Parse the output of `to_text`."""
        if not text:
            return cls()
        given = json.loads(text)
        local = {
            name: LocalCodes(names=tuple(one["names"]), codes=tuple(one["codes"]))
            for name, one in given.get("local_codes", {}).items()
        }
        mappings = tuple(map(_mapping, given["mappings"]))
        return cls(**{**given, "mappings": mappings, "local_codes": local})


def _mapping(given: dict[str, Any]) -> RecordMapping:
    fields = {
        name: FieldMapping(**{**one, "choices": tuple(one["choices"])})
        for name, one in given["fields"].items()
    }
    return RecordMapping(**{**given, "identifying": tuple(given["identifying"]), "fields": fields})
