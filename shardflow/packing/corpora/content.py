"""Samples from the fields of a line: texts, pictures, split and sample key, with texts scrubbed.

The text is stored as ``report.txt``, as in every dataset, so tokenizing and training on texts work unchanged.
A single text without kept fields is one member of the tar; a conversation also has ``conversation.json`` and
its pictures. A line that cannot be packed raises a `LineError` with its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.format.foreign.places import ImageFacts
from shardflow.format.keys import CONVERSATION_FIELD, REPORT_FIELD, encode_json
from shardflow.format.sample_values import picture_facts
from shardflow.packing.corpora.config import (
    CorpusConfig,
    CorpusDeidConfig,
    FieldsConfig,
    LineError,
    LineReason,
)
from shardflow.packing.corpora.conversations import (
    Conversation,
    ConversationReader,
    Part,
    Slot,
    Turn,
    value_at,
)
from shardflow.packing.corpora.pictures import PictureFinder, StoredPicture
from shardflow.packing.deid.known_values import KnownValues
from shardflow.packing.deid.pseudonyms import SecretKey
from shardflow.packing.deid.report_text import scrub
from shardflow.packing.plan import split_of_bucket
from shardflow.packing.scan import NUM_BUCKETS

if TYPE_CHECKING:
    from shardflow.packing.corpora.studies import StudyFinder

CORPUS_FIELD: Final = "corpus.json"
_MAX_VALUE_BYTES: Final = 4096
_MAX_NAME: Final = 256
"""Characters of the name of a source or a license."""
_MAX_LEVELS: Final = 100
"""Levels of nesting of a kept field: each takes a frame of the stack, here and in every reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The content of one line: a text or a conversation."""

    text: str | None = None
    conversation: Conversation | None = None

    def texts(self) -> list[str]:
        """Return all texts, in order."""
        if self.conversation is not None:
            return list(self.conversation.texts())
        return [self.text or ""]


@dataclass(frozen=True, slots=True)
class Identity:
    """Sample key and split of a line."""

    sample_key: str
    split: str


def texts_digest(record: Record, folder: str | Path = "") -> bytes:
    """Return a 16-byte digest of a line's texts, roles and pictures, before scrubbing.

    Args:
        record: The content of the line.
        folder: That names of pictures begin in; without it equal names are equal pictures.
    """
    if record.conversation is None:
        kind, text = b"text\0", record.text or ""
    else:
        found = record.conversation
        turns = [
            [[turn.role, [_part_digest(part, folder) for part in turn.content]] for turn in turns]
            for turns in (found.messages, found.chosen, found.rejected)
        ]
        kind, text = b"turns\0", json.dumps([found.kind, turns, found.answer, found.score])
    return hashlib.blake2b(kind + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _part_digest(part: Part, folder: str | Path) -> Any:
    return _slot_digest(part, folder) if isinstance(part, Slot) else part


def _slot_digest(slot: Slot, folder: str | Path = "") -> list[Any]:
    """Return what identifies a picture: its name, a digest of its bytes, or its place in a study."""
    data = b"" if slot.data is None else hashlib.blake2b(slot.data, digest_size=16).digest()
    name = slot.name
    if name and not name.startswith("data:"):
        name = os.path.normpath(Path(folder) / name.removeprefix("file://") if folder else name)
    return [name, data.hex(), None if slot.study is None else asdict(slot.study)]


class ContentMaker:
    """Makes samples from the fields of lines.

    Args:
        config: All settings.
        key: Makes sample keys and splits.

    Attributes:
        config: All settings.
        tallies: Places that were scrubbed, by category.
        forms: Packed conversations by form.
        sources: Packed conversations by source and license, with a tab between.
        images: Common facts of the pictures of each name.
    """

    def __init__(self, config: CorpusConfig, key: SecretKey) -> None:
        self.config = config
        self._fields = config.fields
        self._deid = config.deid
        self._key = key
        self._nobody = KnownValues(())
        self._reader = ConversationReader(config.fields, config.conversations)
        self._pictures = PictureFinder(
            config.conversations.image_root,
            config.conversations.max_image_bytes,
            keeps_notes=config.deid.text == "keep",
        )
        self._label = "split" if not config.splits.seed else f"split-{config.splits.seed}"
        self.tallies: Counter[str] = Counter()
        self.forms: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.images: dict[str, ImageFacts] = {}

    @property
    def columns(self) -> list[str]:
        """Top-level fields that are read of a line."""
        fields, deid, splits = self._fields, self._deid, self.config.splits
        told = self.config.conversations
        texts = [fields.text] if fields.kind == "text" else ["text", *self._reader.columns]
        paths = [
            *texts,
            fields.key,
            splits.group,
            *fields.keep,
            *deid.names,
            *deid.identifiers,
            told.source_field,
            told.license_field,
        ]
        # A column may itself have a dot in its name.
        return sorted({name for path in paths if path for name in (path, path.partition(".")[0])})

    def read(self, fields: Mapping[str, Any]) -> Record:
        """Make the record of a line.

        Raises:
            LineError: Its fields do not fit, it has no text or too much, or JSON cannot hold a field that is
                to be kept.
        """
        if self.config.has_conversations:
            try:
                record = Record(conversation=self._reader.read(fields))
            except (TypeError, OverflowError, RecursionError):
                # A line may have any value anywhere, such as a number in place of a list.
                raise LineError(LineReason.WRONG_TYPE) from None
        else:
            record = Record(text=_text(fields, self._fields.text))
        num_bytes = 0
        is_empty = True
        for text in record.texts():
            try:
                num_bytes += len(text) if text.isascii() else len(text.encode("utf-8"))
            except UnicodeEncodeError:
                raise LineError(LineReason.INVALID_UTF8) from None
            is_empty = is_empty and (not text or text.isspace())
        if is_empty and record.conversation is None:
            raise LineError(LineReason.EMPTY_TEXT)
        if num_bytes > self.config.limits.max_text_bytes:
            raise LineError(LineReason.TEXT_TOO_LONG)
        for path in self._fields.keep:
            _check_kept(value_at(fields, path))
        return record

    def digest(self, record: Record, file: str | Path) -> bytes:
        """Return a digest of a line's content, its pictures by folder and name."""
        return texts_digest(record, self.config.conversations.image_root or Path(file).parent)

    def user_key(self, fields: Mapping[str, Any]) -> str | None:
        """Return the line's own key; None if keys are made from positions.

        Raises:
            LineError: It is missing, or neither a text nor an integer.
        """
        return _name(fields, self._fields.key) if self._fields.key else None

    def identify(self, fields: Mapping[str, Any], record: Record, file: str, place: int) -> Identity:
        """Return the sample key and the split of a line.

        Args:
            fields: Fields of the line.
            record: What `read` made of them.
            file: Surrogate of its file.
            place: Where it begins in the file: a byte, or a row.

        Raises:
            LineError: Its key or its group is missing, or of another type.
        """
        user_key = self.user_key(fields)
        if user_key is None:
            sample_key = self._key.surrogate("corpus-line", f"{file}:{place}")
        else:
            sample_key = self._key.surrogate("corpus-key", user_key)
        splits = self.config.splits
        split = self._split_of_studies(record)
        if split is not None:
            return Identity(sample_key, split)
        if splits.group:
            bucket = self._key.bucket(self._label, _name(fields, splits.group), NUM_BUCKETS)
        elif record.conversation is not None and (slot := next(record.conversation.slots(), None)):
            # Several conversations about one picture stay together.
            bucket = self._key.bucket(f"image-{self._label}", json.dumps(_slot_digest(slot)), NUM_BUCKETS)
        else:
            bucket = self._key.bucket(f"text-{self._label}", texts_digest(record).hex(), NUM_BUCKETS)
        return Identity(sample_key, split_of_bucket(splits.parts, bucket))

    def _split_of_studies(self, record: Record) -> str | None:
        """Return the split of the studies that a line names; None if it names none."""
        slots = () if record.conversation is None else record.conversation.slots()
        splits = {self._finder().split(slot.study) for slot in slots if slot.study is not None}
        if len(splits) > 1:
            raise LineError(LineReason.SPLITS_DIFFER)
        return next(iter(splits), None)

    def _finder(self) -> StudyFinder:
        # Most corpora name no studies, and tables and codecs take a moment to import.
        from shardflow.packing.corpora.studies import open_studies

        studies = self.config.conversations.studies
        if studies is None:
            raise LineError(LineReason.UNKNOWN_STUDY)
        return open_studies(studies)

    def _found(self, slot: Slot, folder: Path) -> list[StoredPicture]:
        """Return the pictures of a place: one, or one for each slice of a study that it names."""
        if slot.study is not None:
            return self._finder().pictures(slot.study)
        return [self._pictures.find(slot, folder)]

    def fields(
        self, fields: Mapping[str, Any], record: Record, folder: Path = Path()
    ) -> list[tuple[str, bytes]]:
        """Return the fields of a sample with their bytes, in the order of a shard.

        Args:
            fields: Fields of the line.
            record: What `read` made of them.
            folder: Of the line's file: names of pictures begin there.

        Raises:
            LineError: A picture is missing, or is not an image.
            StorageError: A picture cannot be read.
        """
        has_names = bool(self._deid.names or self._deid.identifiers)
        known = KnownValues([_known_values(fields, self._deid)]) if has_names else self._nobody
        kept = {path: self._kept(value_at(fields, path), known) for path in self._fields.keep}
        if record.conversation is not None:
            return self._conversation(fields, record.conversation, folder, known, kept)
        report = (REPORT_FIELD, self._clean(record.text or "", known).encode("utf-8"))
        if not kept:
            return [report]
        return [
            (CORPUS_FIELD, encode_json({"format_version": 1, "kind": "text", "fields": kept})),
            report,
        ]

    def _conversation(
        self,
        fields: Mapping[str, Any],
        found: Conversation,
        folder: Path,
        known: KnownValues,
        kept: Mapping[str, Any],
    ) -> list[tuple[str, bytes]]:
        """Return the fields of a conversation, with its pictures."""
        source, license_name = self._origin(fields, known)
        places: dict[Slot, range] = {}
        pictures: list[StoredPicture] = []
        for slot in found.slots():
            if slot not in places:
                pictures += self._found(slot, folder)
                first = max((span.stop for span in places.values()), default=0)
                places[slot] = range(first, len(pictures))
            if sum(len(one.payload) for one in pictures) > self.config.conversations.max_image_bytes:
                raise LineError(LineReason.IMAGES_TOO_LARGE)
        names = [f"image.{number:03d}.{one.kind}" for number, one in enumerate(pictures)]
        about: dict[str, Any] = {
            "format_version": 1,
            "kind": found.kind,
            "form": found.form,
            "images": [_image_entry(name, one) for name, one in zip(names, pictures, strict=True)],
        }
        for what, turns in (
            ("messages", found.messages),
            ("chosen", found.chosen),
            ("rejected", found.rejected),
        ):
            if turns or what == "messages":
                about[what] = [self._message(turn, places, known) for turn in turns]
        if found.answer is not None:
            about["answer"] = self._clean(found.answer, known)
        optional = {"score": found.score, "source": source, "license": license_name, "fields": kept}
        about |= {name: value for name, value in optional.items() if value not in (None, "", {})}
        self.forms[found.form] += 1
        if source or license_name:
            self.sources[f"{source}\t{license_name}"] += 1
        members = sorted(zip(names, (one.payload for one in pictures), strict=True))
        for name, facts in picture_facts(members):
            self.images[name] = facts.joined(self.images.get(name, facts))
        return [
            (CONVERSATION_FIELD, encode_json(about)),
            *members,
            (REPORT_FIELD, rendered(about, self._fields, self.config.conversations.marker).encode("utf-8")),
        ]

    def _message(self, turn: Turn, places: Mapping[Slot, range], known: KnownValues) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        for part in turn.content:
            if isinstance(part, Slot):
                content += [{"type": "image", "image": number} for number in places[part]]
            else:
                content.append({"type": "text", "text": self._clean(part or "", known)})
        weight = {} if turn.weight is None else {"weight": turn.weight}
        return {"role": turn.role, "content": content, **weight}

    def _origin(self, fields: Mapping[str, Any], known: KnownValues) -> tuple[str, str]:
        """Return the source and the license of a line; empty where unknown."""
        told = self.config.conversations
        source = self._named(fields, told.source_field, known) or told.source
        license_name = self._named(fields, told.license_field, known)
        return source, license_name or told.licenses.get(source, told.license)

    def _named(self, fields: Mapping[str, Any], path: str, known: KnownValues) -> str:
        value = value_at(fields, path) if path else None
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isprintable():
            raise LineError(LineReason.WRONG_TYPE)
        return " ".join(self._clean(value, known).split())

    def _clean(self, text: str, known: KnownValues) -> str:
        if self._deid.text == "keep":
            return text
        scrubbed = scrub(text, known, mode=self._deid.text, order=self._deid.date_order)
        self.tallies.update(scrubbed.counts)
        return scrubbed.text

    def _kept(self, value: Any, known: KnownValues) -> Any:
        if isinstance(value, str):
            return self._clean(value, known)
        if isinstance(value, list):
            return [self._kept(item, known) for item in value]
        if isinstance(value, dict):
            # Keys of an object may be names of people; two that are scrubbed to the same text stay two.
            kept: dict[str, Any] = {}
            for name, item in value.items():
                cleaned = self._clean(name, known)
                number = 1
                while (unique := cleaned if number == 1 else f"{cleaned} {number}") in kept:
                    number += 1
                kept[unique] = self._kept(item, known)
            return kept
        return value


def _known_values(fields: Mapping[str, Any], deid: CorpusDeidConfig) -> dict[str, list[str]]:
    """Return the values that name people, by the DICOM keyword that they correspond to."""
    found: dict[str, list[str]] = {"PatientName": [], "PatientID": []}
    for keyword, paths in (("PatientName", deid.names), ("PatientID", deid.identifiers)):
        for path in paths:
            value = value_at(fields, path)
            if isinstance(value, (str, int)) and not isinstance(value, bool):
                found[keyword].append(str(value)[:_MAX_VALUE_BYTES])
    return found


def _check_kept(value: Any, levels: int = _MAX_LEVELS) -> None:
    """Refuse values that JSON cannot hold (Parquet has dates, bytes and more) or that nest too deeply."""
    if not levels:
        raise LineError(LineReason.INVALID_JSON)
    if value is None or isinstance(value, (bool, int)):
        return
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise LineError(LineReason.INVALID_UTF8) from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise LineError(LineReason.WRONG_TYPE)
    elif isinstance(value, list):
        for item in value:
            _check_kept(item, levels - 1)
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_kept(name, levels - 1)
            _check_kept(item, levels - 1)
    else:
        raise LineError(LineReason.WRONG_TYPE)


def _name(fields: Mapping[str, Any], path: str) -> str:
    value = value_at(fields, path)
    if value is None or value == "":
        raise LineError(LineReason.MISSING_FIELD)
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise LineError(LineReason.WRONG_TYPE)
    return str(value)


def _image_entry(name: str, picture: StoredPicture) -> dict[str, Any]:
    return {"member": name, "rows": picture.rows, "columns": picture.columns, **picture.beside}


def rendered(about: Mapping[str, Any], config: FieldsConfig, marker: str) -> str:
    """Render a stored conversation as plain text, of a preference with the chosen answer.

    Args:
        about: Content of ``conversation.json``.
        config: Has the form of a turn.
        marker: What stands for a picture.
    """
    before, between, behind = config.turn_parts
    turns: list[str] = []
    for message in (*about["messages"], *about.get("chosen", ())):
        content = "".join(part.get("text", marker) for part in message["content"])
        is_document = about["kind"] == "document"
        turns.append(content if is_document else f"{before}{message['role']}{between}{content}{behind}")
    return "".join(turns)


def _text(fields: Mapping[str, Any], path: str) -> str:
    value = value_at(fields, path)
    if value is None:
        raise LineError(LineReason.MISSING_FIELD)
    if not isinstance(value, str):
        raise LineError(LineReason.WRONG_TYPE)
    return value
