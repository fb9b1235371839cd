"""Settings of clinical records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from shardflow.configs import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.records.mapping import FieldMapping, RecordMapping
from shardflow.records.scribe import FreeText

__all__ = ["RecordsConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordsConfig:
    """What of clinical documents is packed."""

    free_text: FreeText = "scrub"
    """``scrub``: narrative and other free text becomes ``document.NNN.txt``, scrubbed as reports are.
    ``drop``: none of it leaves."""
    max_days: Annotated[int, Bounds(0, 40_000)] = 3653
    """Largest distance from the study at which a day is told. What lies farther keeps all but its day."""
    mappings: tuple[RecordMapping, ...] = ()
    """XML and JSON of one's own."""

    def __post_init__(self) -> None:
        check_fields(self)
        names = [mapping.name for mapping in self.mappings]
        if len(set(names)) != len(names):
            raise ConfigError("records.mappings must have different names, got one twice; rename it.")

    def content(self) -> dict[str, Any] | None:
        """Return what decides the dataset's bytes; None where nothing is set."""
        return None if self == RecordsConfig() else asdict(self)

    def to_text(self) -> str:
        """Return the settings as text; ``""`` where nothing is set."""
        content = self.content()
        return "" if content is None else json.dumps(content, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> RecordsConfig:
        """Read what `to_text` wrote."""
        if not text:
            return cls()
        given = json.loads(text)
        return cls(**{**given, "mappings": tuple(map(_mapping, given["mappings"]))})


def _mapping(given: dict[str, Any]) -> RecordMapping:
    fields = {
        name: FieldMapping(**{**one, "choices": tuple(one["choices"])})
        for name, one in given["fields"].items()
    }
    return RecordMapping(**{**given, "identifying": tuple(given["identifying"]), "fields": fields})
