"""Settings of a corpus job, split into those that decide bytes and those of the run; and reasons of lines.

The position of a reason in the list is the byte that stands for it in the table of outcomes, so reasons are
appended, never renamed, never moved (change class SHARD FORMAT).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from shardflow.config import SPREAD, Bounds, ByteSize, check_fields
from shardflow.errors import ConfigError
from shardflow.format.keys import canonical_json
from shardflow.packing.config import ExecutionConfig, IdentityConfig, check_splits
from shardflow.packing.deid.pseudonyms import DateOrder, ReportTextMode
from shardflow.packing.settings import KeyKind


class LineReason(StrEnum):
    """Why a line was skipped or quarantined; `REASONS` defines each one."""

    EMPTY_LINE = "EMPTY_LINE"
    EMPTY_TEXT = "EMPTY_TEXT"
    NOT_A_CORPUS_FILE = "NOT_A_CORPUS_FILE"
    DUPLICATE_TEXT = "DUPLICATE_TEXT"
    LINE_TOO_LONG = "LINE_TOO_LONG"
    TEXT_TOO_LONG = "TEXT_TOO_LONG"
    INVALID_UTF8 = "INVALID_UTF8"
    INVALID_JSON = "INVALID_JSON"
    MISSING_FIELD = "MISSING_FIELD"
    WRONG_TYPE = "WRONG_TYPE"
    UNKNOWN_ROLE = "UNKNOWN_ROLE"
    DUPLICATE_KEY = "DUPLICATE_KEY"
    FILE_DAMAGED = "FILE_DAMAGED"
    WORKER_FAILED = "WORKER_FAILED"
    WORKER_KILLED = "WORKER_KILLED"
    WORKER_OUT_OF_MEMORY = "WORKER_OUT_OF_MEMORY"
    WORKER_TIMEOUT = "WORKER_TIMEOUT"
    UNKNOWN_FORM = "UNKNOWN_FORM"
    TURN_ORDER = "TURN_ORDER"
    EMPTY_TURN = "EMPTY_TURN"
    UNSUPPORTED_CONTENT = "UNSUPPORTED_CONTENT"
    SAME_ANSWERS = "SAME_ANSWERS"
    IMAGE_COUNT = "IMAGE_COUNT"
    IMAGE_MISSING = "IMAGE_MISSING"
    IMAGE_ELSEWHERE = "IMAGE_ELSEWHERE"
    NOT_AN_IMAGE = "NOT_AN_IMAGE"
    UNKNOWN_STUDY = "UNKNOWN_STUDY"
    SPLITS_DIFFER = "SPLITS_DIFFER"
    IMAGES_TOO_LARGE = "IMAGES_TOO_LARGE"


class ReasonInfo(NamedTuple):
    """Meaning of a reason, and its remedy."""

    outcome: str
    meaning: str
    remedy: str


REASONS: Final[dict[LineReason, ReasonInfo]] = {
    LineReason.EMPTY_LINE: ReasonInfo("skipped", "a line of white space", "nothing"),
    LineReason.EMPTY_TEXT: ReasonInfo("skipped", "its texts are empty or white space", "nothing"),
    LineReason.NOT_A_CORPUS_FILE: ReasonInfo(
        "skipped", "a file with another ending, or no regular file; one for each", "nothing, or rename it"
    ),
    LineReason.DUPLICATE_TEXT: ReasonInfo(
        "skipped", "an earlier line has the same texts (policy.duplicates)", "nothing"
    ),
    LineReason.LINE_TOO_LONG: ReasonInfo(
        "quarantined", "more bytes than limits.max_line_bytes", "raise the limit, or cut the text"
    ),
    LineReason.TEXT_TOO_LONG: ReasonInfo(
        "quarantined", "more bytes of text than limits.max_text_bytes", "raise the limit, or cut the text"
    ),
    LineReason.INVALID_UTF8: ReasonInfo(
        "quarantined", "bytes that are no UTF-8, or half a surrogate pair", "write the file as UTF-8"
    ),
    LineReason.INVALID_JSON: ReasonInfo(
        "quarantined",
        "no JSON object: cut, NaN, a key given twice, nested too deeply",
        "write the line anew with a JSON library",
    ),
    LineReason.MISSING_FIELD: ReasonInfo(
        "quarantined", "a field of [fields] is not there, or null", "correct [fields], or the line"
    ),
    LineReason.WRONG_TYPE: ReasonInfo(
        "quarantined", "a field is no text (or no list of turns)", "correct [fields], or the line"
    ),
    LineReason.UNKNOWN_ROLE: ReasonInfo(
        "quarantined", "a turn's role is none of fields.roles", "add it to fields.roles"
    ),
    LineReason.DUPLICATE_KEY: ReasonInfo(
        "quarantined", "an earlier line has the same fields.key", "make keys unique, or leave fields.key out"
    ),
    LineReason.FILE_DAMAGED: ReasonInfo(
        "quarantined",
        "the rest of a compressed or Parquet file that cannot be read; one for the file",
        "fetch the file again, into a new output",
    ),
    LineReason.WORKER_FAILED: ReasonInfo("quarantined", "a process failed twice on its part", "report it"),
    LineReason.WORKER_KILLED: ReasonInfo(
        "quarantined", "a process died twice on its part", "look at the machine"
    ),
    LineReason.WORKER_OUT_OF_MEMORY: ReasonInfo(
        "quarantined",
        "its part took more memory than execution.memory_bytes, twice",
        "raise execution.memory_bytes, or write smaller row groups",
    ),
    LineReason.WORKER_TIMEOUT: ReasonInfo(
        "quarantined", "its part took longer than its time, twice", "raise the time"
    ),
    LineReason.UNKNOWN_FORM: ReasonInfo(
        "quarantined",
        "its fields show no form of a conversation",
        "name the fields in [fields] and [conversations], or correct the line",
    ),
    LineReason.TURN_ORDER: ReasonInfo(
        "quarantined",
        "turns are out of order: a system text that is not first, two users in a row, no answer at the end",
        "correct the line",
    ),
    LineReason.EMPTY_TURN: ReasonInfo(
        "quarantined", "a turn or an answer is empty or white space", "correct the line"
    ),
    LineReason.UNSUPPORTED_CONTENT: ReasonInfo(
        "quarantined",
        "content that is neither text nor image: sound, video, tools, a thought",
        "leave it out",
    ),
    LineReason.SAME_ANSWERS: ReasonInfo(
        "quarantined", "the chosen and the rejected answer are the same", "leave the pair out"
    ),
    LineReason.IMAGE_COUNT: ReasonInfo(
        "quarantined",
        "another number of images than of places for them, such as <image>",
        "correct the line, conversations.marker, or conversations.unplaced_images",
    ),
    LineReason.IMAGE_MISSING: ReasonInfo(
        "quarantined",
        "an image that it names is not there",
        "fetch the image, or correct conversations.image_root, and run the job again",
    ),
    LineReason.IMAGE_ELSEWHERE: ReasonInfo(
        "quarantined",
        "an image is named by an address, or by a path out of conversations.image_root",
        "fetch the image and name its file; packing reads no network",
    ),
    LineReason.NOT_AN_IMAGE: ReasonInfo(
        "quarantined",
        "an image is no whole JPEG or PNG, or has more than 2^27 pixels",
        "convert the image to PNG, or fetch it again, and run the job again",
    ),
    LineReason.UNKNOWN_STUDY: ReasonInfo(
        "quarantined",
        "conversations.studies has no such study, series, slice, region or finding, or slices are not stated",
        "correct the place, or conversations.studies",
    ),
    LineReason.SPLITS_DIFFER: ReasonInfo(
        "quarantined", "its studies are in several splits", "name studies of one split in a conversation"
    ),
    LineReason.IMAGES_TOO_LARGE: ReasonInfo(
        "quarantined",
        "more bytes of images than conversations.max_image_bytes",
        "raise the limit, or make the images smaller",
    ),
}

IMAGE_REASONS: Final = (LineReason.IMAGE_MISSING, LineReason.NOT_AN_IMAGE)
"""Reasons that files beside the lines can remove: parts with them are packed again."""

PACKED: Final = 0
"""Byte of a packed line."""

REASON_TABLE: Final[tuple[tuple[str, str], ...]] = (
    ("PACKED", "packed"),
    *((str(reason), REASONS[reason].outcome) for reason in LineReason),
)
"""Name and outcome by number."""

_NUMBERS: Final = {reason: number for number, reason in enumerate(LineReason, start=1)}


def number_of(reason: LineReason) -> int:
    """Return the byte that stands for a reason."""
    return _NUMBERS[reason]


class LineError(Exception):
    """A line cannot be packed; never leaves the package, and contains nothing of the line."""

    def __init__(self, reason: LineReason) -> None:
        super().__init__(str(reason))
        self.reason = reason


Form: TypeAlias = Literal[
    "messages",
    "llava",
    "sharegpt",
    "alpaca",
    "pair",
    "document",
    "preference",
    "reward",
    "prompt",
]
"""Form of a conversation, as docs/corpora.md describes it."""
ROLES: Final = ("system", "user", "assistant", "tool")
_FORMER_KINDS: Final = ("pair", "dialogue", "preference")
_ROLE: Final = re.compile(r"[a-z0-9_]{1,32}")
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusInputsConfig:
    """Locations of the texts; they are only read."""

    files: tuple[Path, ...]
    """Folders, or single files: ``.jsonl``, ``.jsonl.gz``, ``.jsonl.zst`` (also ``.ndjson`` and ``.json.gz``)
    and ``.parquet``. Every line below ends in one outcome."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.files:
            raise ConfigError("inputs.files is empty; name at least one folder or file.")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldsConfig:
    """Names of the fields of a line. A dot selects a field of an object: ``note.text``."""

    kind: Literal["text", "conversations"] = "text"
    """``text``: one text. ``conversations``: turns, with images; ``[conversations]`` has the settings."""
    text: str = "text"
    prompt: str = "prompt"
    response: str = "response"
    system: str = ""
    """Field of a system text that comes first, if a line has it; empty for none."""
    turns: str = "messages"
    role: str = "role"
    """Key of a turn's role, and of its text."""
    content: str = "content"
    chosen: str = "chosen"
    rejected: str = "rejected"
    roles: dict[str, str] = field(
        default_factory=lambda: {
            "system": "system",
            "user": "user",
            "assistant": "assistant",
            "tool": "tool",
            "human": "user",
            "gpt": "assistant",
        }
    )
    """Roles by their names in the lines."""
    turn_format: str = "<|{role}|>\n{content}\n"
    """Form of a turn in ``report.txt``; ``corpus.json`` records the byte range of each content."""
    key: str = ""
    """Field that identifies a line permanently, a text or an integer: its keyed surrogate is the sample key.
    Empty: a line is identified by its file and place."""
    keep: tuple[str, ...] = ()
    """Fields that go into ``corpus.json`` as they are, texts scrubbed; none by default."""

    def __post_init__(self) -> None:
        if self.kind in _FORMER_KINDS:
            raise ConfigError(
                f'kind = "{self.kind}" is one form of conversations now; write kind = "conversations".'
            )
        check_fields(self)
        for name in self.roles.values():
            if not _ROLE.fullmatch(name):
                raise ConfigError(f"the role {name!r} has other characters than [a-z0-9_]; rename it.")
        parts = self.turn_parts
        if "{content}" in parts[2] or "{role}" in parts[0] + parts[1] + parts[2]:
            raise ConfigError("turn_format must contain {role} and {content} once each; correct it.")

    @property
    def turn_parts(self) -> tuple[str, str, str]:
        """The text before the role, between role and content, and after the content."""
        before, has_role, rest = self.turn_format.partition("{role}")
        between, has_content, behind = rest.partition("{content}")
        if not (has_role and has_content):
            raise ConfigError("turn_format must contain {role} and then {content}; correct it.")
        return before, between, behind


@dataclass(frozen=True, kw_only=True, slots=True)
class StudiesConfig:
    """Packed dataset whose studies conversations may refer to."""

    dataset: Path
    on: KeyKind = "sample_key"
    """Kind of identifier in ``study`` of an image reference."""
    private_dir: Path | None = None
    """Private folder of the dataset; for any key but the sample key."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationsConfig:
    """Settings of ``fields.kind = "conversations"``. If a field name is empty, known names are tried."""

    form: Literal["auto", Form] = "auto"
    """Form of every line; ``auto``: recognized by its fields."""
    images: str = ""
    """Field of the images of a line: a name, bytes, an object with ``bytes``, ``path`` or ``url``, or a list
    of them. Empty: ``images``, else ``image``."""
    image_root: Path | None = None
    """Folder that the names of images begin in; the folder of the line's file if not given."""
    marker: str = "<image>"
    """Marker of an image in a text."""
    unplaced_images: Literal["refuse", "first"] = "refuse"
    """Treatment of images without a marker in the texts of their line: IMAGE_COUNT, or insertion before the
    first user turn."""
    max_image_bytes: Annotated[ByteSize, Bounds(1, 1 << 30)] = 64 * _MIB
    """Bytes of all images of one line."""
    instruction: str = "instruction"
    """Of an Alpaca line, as are ``input`` and ``output``."""
    input: str = "input"
    output: str = "output"
    studies: StudiesConfig | None = None
    """Dataset whose studies images may refer to; conversations go into the splits of their studies."""
    answer: str = "answer"
    """Verifiable answer to a prompt."""
    score: str = ""
    """Score of a conversation. Empty: ``reward``."""
    texts: str = "texts"
    """Texts of an interleaved document, each null where its images have one."""
    source: str = ""
    """Name of the source of the lines; published."""
    source_field: str = ""
    """Field with that name, before ``source``."""
    license: str = ""
    """License of the lines, such as ``CC-BY-4.0``; published."""
    license_field: str = ""
    """Field with the license, before ``licenses`` and ``license``."""
    licenses: dict[str, str] = field(default_factory=dict)
    """License by source."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.marker:
            raise ConfigError('marker is empty; write what stands for an image, such as "<image>".')

    def content(self) -> dict[str, Any]:
        """Return the settings that decide the dataset's bytes; the folder of images is not one."""
        settings = asdict(self)
        del settings["image_root"]
        settings["studies"] = None if self.studies is None else self.studies.on
        return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSplitsConfig:
    """Assignment of lines to splits."""

    parts: Annotated[dict[str, int], SPREAD] = field(
        default_factory=lambda: {"train": 98, "val": 1, "test": 1}
    )
    """Parts of each split; may be written in ``[splits]`` directly, as in the settings of a packing job."""
    group: str = ""
    """Field whose lines stay together, such as the patient; a patient of an imaging dataset with the same key
    and the same parts is in the same split there. Empty: lines with the same texts stay together."""
    seed: Annotated[int, Bounds(0, (1 << 63) - 1)] = 0
    """A different number gives different splits; keep 0 to match an imaging dataset."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_splits(self.parts, "parts")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusShardsConfig:
    """Layout of shards."""

    target_bytes: Annotated[ByteSize, Bounds(4 * _KIB, 1 << 40)] = 512 * _MIB
    """A shard is closed before it exceeds this; a longer text gets a shard of its own."""
    part_bytes: Annotated[ByteSize, Bounds(4 * _KIB, 1 << 40)] = _GIB
    """Bytes of input that are packed together: the unit of work, and the most repeated after a kill. No
    shard holds lines of two parts. A compressed file is never divided."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusPolicyConfig:
    """Treatment of defective lines."""

    duplicates: Literal["keep", "skip"] = "keep"
    """``skip``: of lines with the same texts only the first is packed; the inputs are read twice."""
    max_quarantined_share: Annotated[float, Bounds(0, 1)] = 0.01
    """Largest share of lines that may be quarantined; above it nothing is published."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusLimitsConfig:
    """Limits that decide outcomes."""

    max_line_bytes: Annotated[ByteSize, Bounds(1, 1 << 30)] = 16 * _MIB
    """Bytes of one line of JSON; a longer one is skipped without being held in memory."""
    max_text_bytes: Annotated[ByteSize, Bounds(1, 1 << 30)] = 8 * _MIB
    """Bytes of the texts of one line, before scrubbing."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusDeidConfig:
    """De-identification of texts."""

    text: ReportTextMode = "scrub"
    """``scrub``: forms of names, numbers, dates and places are replaced, at about a millisecond per kilobyte.
    ``strict``: also words that are on no list. ``keep``: texts are unchanged, for public texts and those
    that are de-identified already."""
    date_order: DateOrder = "unknown"
    """Order of dates such as 03/04/2019: ``mdy``, ``dmy``, or ``unknown``. All dates are removed."""
    names: tuple[str, ...] = ()
    """Fields with names of people, which are searched for in the line's texts."""
    identifiers: tuple[str, ...] = ()
    """Fields with numbers of people, such as a record number; searched for as well."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """All settings of a corpus job."""

    output: Path
    """Folder of the dataset: new, empty, or of an interrupted job with the same settings."""
    private_dir: Path
    """Folder outside the dataset (mode 0700) for the key and the list of the input files."""
    inputs: CorpusInputsConfig
    fields: FieldsConfig = field(default_factory=FieldsConfig)
    conversations: ConversationsConfig = field(default_factory=ConversationsConfig)
    identity: IdentityConfig = field(default_factory=IdentityConfig)
    splits: CorpusSplitsConfig = field(default_factory=CorpusSplitsConfig)
    shards: CorpusShardsConfig = field(default_factory=CorpusShardsConfig)
    policy: CorpusPolicyConfig = field(default_factory=CorpusPolicyConfig)
    limits: CorpusLimitsConfig = field(default_factory=CorpusLimitsConfig)
    deid: CorpusDeidConfig = field(default_factory=CorpusDeidConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.execution.engine != "local":
            raise ConfigError("a corpus is packed on one machine; remove execution.engine.")
        unknown = sorted(set(self.fields.roles.values()) - set(ROLES))
        if self.has_conversations and unknown:
            raise ConfigError(
                f"a conversation has the roles {', '.join(ROLES)}, and fields.roles gives {unknown[0]!r}; "
                "map it to one of them."
            )

    @property
    def has_conversations(self) -> bool:
        """Whether lines are conversations."""
        return self.fields.kind == "conversations"

    @property
    def key_file(self) -> Path:
        """Path of the secret key."""
        return self.identity.key_file or self.private_dir / "secret.key"

    def content(self) -> dict[str, Any]:
        """Return the settings that decide the dataset's bytes, as JSON without fractions."""
        # What old corpora do not have stays out of their digest.
        conversations = {"conversations": self.conversations.content()} if self.has_conversations else {}
        return {
            **conversations,
            "deid": asdict(self.deid),
            "duplicates": self.policy.duplicates,
            "fields": asdict(self.fields),
            "limits": asdict(self.limits),
            "shards": asdict(self.shards),
            "splits": {
                "group": self.splits.group,
                "parts": [[name, parts] for name, parts in self.splits.parts.items()],
                "seed": self.splits.seed,
            },
        }

    def content_digest(self) -> str:
        """Return the SHA-256 of `content`: the ``config_digest`` of the manifest."""
        return hashlib.sha256(canonical_json({"corpus": self.content()})).hexdigest()
