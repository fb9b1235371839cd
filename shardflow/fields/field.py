"""Fields of a batch: the interface that every type of field implements, before and after it is bound.

A `Field` is what a user writes: a frozen description without data. Bound to a selection it becomes a
`BoundField`, which knows from tables what each sample has, lays out the arrays of a micro-batch, names the
stored fields that a sample needs, and takes their bytes. `Field.present` turns the arrays of a finished batch
into what ``batch["name"]`` returns; it runs wherever the batch arrives, in another process too.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardflow.errors import ConfigError
from shardflow.seeds import derive

if TYPE_CHECKING:
    from shardflow.fields.catalog import SeriesCatalog
    from shardflow.fields.decode import ThreadState
    from shardflow.fields.quarantine import BadSampleReason
    from shardflow.fields.reader import Samples, Shard
    from shardflow.fields.series_rows import ImageSet
    from shardflow.format import Dataset
    from shardflow.format.entities import EntityPlace
    from shardflow.format.volumes.bricks import RegionPlan
    from shardflow.sampling.budget import TokenBudget
    from shardflow.telemetry import StageCounters

Arrays: TypeAlias = Mapping[str, NDArray[Any]]
"""The arrays of a micro-batch by name."""

_T = TypeVar("_T")
Missing: TypeAlias = Literal["pad", "drop", "error"]
"""Meaning of a sample without the content of a field: padding with a mask of 0, leaving the sample out of the
plan, or an error before step 0."""
_BLOCK_ROWS: Final = 1 << 20
FIELD_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
RESERVED_NAMES: Final = frozenset({"row", "weight", "component", "info"})


class ArraySpec(NamedTuple):
    """Name, dtype and shape of an array of a batch."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, dtype: DTypeLike, *shape: int) -> ArraySpec:
        """Create a spec from anything that NumPy accepts as a dtype."""
        return cls(name, np.dtype(dtype), shape)

    @property
    def num_bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DrawKey:
    """Key of the choices for a sample in an epoch; equal on all ranks and after a resume."""

    seed: int
    epoch: int
    row: int
    """Row of the selection."""
    place: tuple[int, ...] = ()
    """Step, micro-batch and slot in a blend, where an epoch may draw a sample again; otherwise empty."""
    table_row: int = 0
    """Row of the samples table of its dataset, which decides the size where there are several."""
    crop: int = 0
    """Number among the crops of the sample, see `Field.num_crops`."""

    def derive(self, name: str) -> int:
        """Return the 64-bit number of a choice."""
        crop = (self.crop,) if self.crop else ()  # the first one draws as a sample without crops does
        return derive(self.seed, name, self.epoch, self.row, *self.place, *crop)


@dataclass(frozen=True, slots=True)
class Slots:
    """Samples of a micro-batch by slot, ``(B,)`` each."""

    rows: NDArray[np.int64]
    """Row of the selection; -1 where the slot holds no sample, or a masked one."""
    study_rows: NDArray[np.int64]
    """Row of its study in the samples table of its dataset; 0 where there is none."""
    components: NDArray[np.int64]
    """Component of a blend; 0 without a blend."""
    table_rows: NDArray[np.int64]
    """Row of its dataset's own table: of a study, series, image or finding; 0 where there is none, and also
    known of a masked sample."""
    seed: int = 0
    epoch: int = 0
    """Seed and epoch of the plan, for keyed choices."""
    place: tuple[int, int] | None = None
    """Step and micro-batch in a blend, where an epoch may draw a sample again."""
    num_crops: int = 1
    """Neighboring slots that one sample has, see `Field.num_crops`."""
    is_planned: NDArray[np.bool_] | None = None
    """``(B,)`` which slots the plan gives a sample, masked or not; None for those of ``rows``."""
    _known: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def once(self, name: str, compute: Callable[[Slots], _T]) -> _T:
        """Return what a function computes of these slots, which a field needs more than once."""
        if name not in self._known:
            self._known[name] = compute(self)
        found: _T = self._known[name]
        return found

    def draw(self, slot: int) -> DrawKey:
        """Return the key of the random choices for the sample of a slot."""
        place = () if self.place is None else (*self.place, slot)
        row, crop = int(self.rows[slot]), slot % self.num_crops
        return DrawKey(self.seed, self.epoch, row, place, int(self.table_rows[slot]), crop)

    def __len__(self) -> int:
        """Return the number of slots, padding included."""
        return len(self.rows)

    @property
    def used(self) -> list[int]:
        """Slots that hold a sample, ascending."""
        found: list[int] = np.flatnonzero(self.rows >= 0).tolist()
        return found

    @property
    def planned(self) -> list[int]:
        """Slots of samples of the plan, masked ones included, ascending."""
        if self.is_planned is None:
            return self.used
        found: list[int] = np.flatnonzero(self.is_planned).tolist()
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRequest:
    """Sample to read, and its slot."""

    slot: int
    draw: DrawKey
    """Key of its random choices."""
    row_in_shard: int
    key: str
    entity: EntityPlace | None = None
    """Place of a finding in its study; None for the whole study."""
    component: int = 0
    """Component of a blend; 0 without a blend."""
    study_row: int = -1
    """Row of its study in the samples table of its dataset."""
    table_row: int = -1
    """Row of its dataset's own table: of a study, series, image or finding."""
    study_key: str = ""
    """Key that the shard has for it: of its study, where samples are series or images."""


class SlotContent(Protocol):
    """Content of one slot that a field delivers."""

    @property
    def fields(self) -> Sequence[int]:
        """Distinct numbers of the stored fields to read."""

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Take the bytes of the field at a place of `fields`; fields arrive in any order.

        Raises:
            BadSample: The bytes are invalid.
        """

    def close(self) -> None:
        """Finish the slot, after all fields."""


class StackContent(ABC):
    """Content of a slot that takes many stored fields at once, which costs less than one by one."""

    fields: Sequence[int]

    @abstractmethod
    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Take the bytes of a stored field; see `SlotContent`."""

    @abstractmethod
    def put_all(self, payloads: Sequence[tuple[int, NDArray[np.uint8]]], thread: ThreadState) -> None:
        """Take the bytes of several fields, each with its place, as `put` takes those of one.

        Raises:
            BadSample: The bytes of one are invalid.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the slot, after all fields."""


class RegionContent(ABC):
    """Content of a slot that takes regions of volumes in bricks, beside its stored fields."""

    fields: Sequence[int]
    plans: Sequence[RegionPlan]
    """What is read of volumes."""

    @abstractmethod
    def target(self, place: int, thread: ThreadState) -> NDArray[Any] | None:
        """Return where to decode a region, of the shape of its plan; None if it is not needed after all.

        Args:
            place: Of the plan.
            thread: Of the caller.
        """

    @abstractmethod
    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Take the bytes of a field, see `SlotContent.put`."""

    @abstractmethod
    def put_region(self, place: int, thread: ThreadState) -> None:
        """Note that a region is decoded, after all fields; see `target`."""

    @abstractmethod
    def close(self) -> None:
        """Finish the slot, after all fields and regions."""


class NoContent:
    """Content of a slot for a field that reads nothing from shards."""

    fields: Sequence[int] = ()

    def put(self, place: int, payload: NDArray[np.uint8], thread: ThreadState) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Coverage of a population by a field: what is delivered and left out."""

    num_samples: int
    num_missing: int
    """Samples that have nothing for the field."""
    delivered: Mapping[str, int] = field(default_factory=dict)
    """Number of images by role."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Images that the field selects and has no place for, by role."""


def _is_one_value(values: NDArray[np.bool_]) -> bool:
    """Return whether one value in memory stands for all rows, as `np.broadcast_to` makes it."""
    return values.strides == (0,)


def _num_true(values: NDArray[np.bool_]) -> int:
    """Count the true rows; of one value for 10^8 rows without going through them, which takes 0.1 s."""
    if _is_one_value(values):
        return len(values) if values[:1].all() else 0
    return int(np.count_nonzero(values))


class FieldContext:
    """Context that a field is bound to: the samples, which of them are used, and the tables beside them.

    Args:
        samples: The samples and their datasets.
        populations: For each dataset which rows of its own table are used, ``(num_rows,)``.
        counters: Gets the stages ``decode``, ``transform``, ``saturated``, ``regions``, ``absent_labels``,
            and those that `Events` and `Waveform` name.
    """

    def __init__(
        self, samples: Samples, populations: Sequence[NDArray[np.bool_]], counters: StageCounters
    ) -> None:
        self.samples, self.populations, self.counters = samples, populations, counters
        self.bound: dict[str, BoundField] = {}
        """Fields that are bound already, by name, see `Field.depends_on`."""
        self.eased: frozenset[str] = frozenset()
        """Names of fields with ``missing="error"`` that pad nevertheless, see `Field.needs_partly`."""

    @cached_property
    def catalog(self) -> SeriesCatalog:
        """Series tables of the datasets.

        Raises:
            ConfigError: A dataset has none.
        """
        from shardflow.fields.catalog import SeriesCatalog

        if any(dataset.is_foreign for dataset in self.samples.datasets):
            raise ConfigError(
                "Tars of other writers have no series; name the member of an image, such as "
                "sf.Image(member='png')."
            )
        return SeriesCatalog(self.samples)

    @property
    def num_samples(self) -> int:
        """Samples of the population, over all datasets."""
        return sum(map(_num_true, self.populations))

    def of_studies(self, values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Return numbers of studies by the rows of each dataset's own table, such as series."""
        pairs = zip(self.samples.datasets, values, strict=True)
        return [by_rows(dataset, each) for dataset, each in pairs]

    def count_missing(self, has_content: Sequence[NDArray[np.bool_]]) -> int:
        """Return how many samples of the population have no content, given which ones have."""
        num_missing = 0
        for used, has in zip(self.populations, has_content, strict=True):
            if _is_one_value(has):
                num_missing += 0 if has[:1].all() else _num_true(used)
                continue
            for start in range(0, len(used), _BLOCK_ROWS):
                rows = slice(start, start + _BLOCK_ROWS)
                num_missing += int(np.count_nonzero(used[rows] & ~has[rows]))
        return num_missing


@dataclass(frozen=True, kw_only=True)
class Field(ABC):
    """Description of one entry of a batch; see the subclasses."""

    type_name: ClassVar[str] = ""
    """Name in TOML and in descriptors of batches."""
    reads_previous: ClassVar[bool] = False
    """Whether ``study="previous"`` may be written."""

    own_suffixes: ClassVar[frozenset[str]] = frozenset()
    """Ends of the names of entries beside the field that only fields of its type have."""

    study: str = "own"
    """``previous`` delivers the same person's study of the latest earlier day in the same split, whether or
    not it is selected itself; a column of an attached table, such as ``negatives.study``, the study of the
    split whose sample key it holds. Only for samples that are studies."""
    missing: Missing = "error"
    """Meaning of a sample without this content. Where no table knows which samples have it, ``error`` masks
    the slot and counts a bad sample, and ``drop`` is refused."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Have every subclass check plain numbers: content_id is of JSON, which NumPy's scalars are not."""
        super().__init_subclass__(**options)
        check = cls.__dict__.get("__post_init__")
        if check is not None:

            def __post_init__(self: Field) -> None:  # noqa: N807
                for one in fields(self):
                    object.__setattr__(self, one.name, _plain(getattr(self, one.name)))
                check(self)

            cls.__post_init__ = __post_init__  # type: ignore[attr-defined]

    @property
    def num_crops(self) -> int:
        """Neighboring slots of a micro-batch that each sample fills; every field of a loader fills them."""
        return 1

    @property
    def has_windows(self) -> bool:
        """Whether a sample is a window of what the field delivers, which needs ``unit="window"``."""
        return False

    @property
    def depends_on(self) -> Sequence[str]:
        """Names of fields that are bound before this one."""
        return ()

    @property
    def needs_partly(self) -> Collection[str]:
        """Names of `depends_on` that it needs of some samples only, and then refuses those that lack them."""
        return ()

    def for_evaluation(self) -> Field:
        """Return the field with nothing drawn at random, so that two evaluations measure the same."""
        return self

    @abstractmethod
    def bind(self, name: str, context: FieldContext) -> BoundField:
        """Bind the field to a selection.

        Args:
            name: Name of the entry in the batch.
            context: The samples and their tables.

        Raises:
            ConfigError: The field does not fit the datasets.
        """

    @classmethod
    @abstractmethod
    def present(cls, entry: Mapping[str, Any], arrays: Arrays) -> dict[str, Any]:
        """Return the entries of a batch for this field: its value, and masks beside it.

        Args:
            entry: What `BoundField.describe` returned for it.
            arrays: The arrays of the batch by name; views without a copy are preferred.
        """


class BoundField(ABC):
    """Field bound to a selection. Safe for many threads.

    Args:
        name: Name of the entry in the batch; arrays have this name, or begin with it and ``_`` or ``.``.
            Arrays ``NAME.data`` are flat; of all others the first axis has B items, or B + 1 offsets.
    """

    is_beside: ClassVar[bool] = False
    """Whether the content is stored beside the shards: `fill_beside` delivers it, and no shard is read."""
    is_derived: ClassVar[bool] = False
    """Whether the content is made of that of other fields: `derive` delivers it, once theirs is there."""
    is_uncounted: ClassVar[bool] = False
    """Whether no table knows what it costs, so that a token budget cannot charge for it."""
    has_pictures: ClassVar[bool] = False
    """Whether it delivers images of series, so that a batch names the modality of each sample."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def is_packed(self) -> bool:
        """Whether the samples of a micro-batch share one sequence."""
        return False

    @property
    def varying(self) -> Sequence[str]:
        """Entries whose second axis has as many items as the largest sample of a micro-batch needs."""
        return ()

    @property
    def digests(self) -> Sequence[str]:
        """Digests of the tables that the field delivers, beside the series tables."""
        return ()

    @property
    def tables(self) -> Sequence[str]:
        """Names of the attached tables that the field delivers."""
        return ()

    @property
    def has_content(self) -> Sequence[NDArray[np.bool_]] | None:
        """Rows of each dataset's own table that have content, ``(num_rows,)``; None if no table knows.

        `FieldContext.of_studies` turns what is known by study into it.
        """
        return None

    @property
    def coverage(self) -> Coverage | None:
        """Content that is delivered and left out of the population; None if no table knows."""
        return None

    def delivered_images(self, place: int) -> ImageSet | None:  # noqa: ARG002
        """Return the stored images of a dataset that the field delivers; None if it delivers none.

        Args:
            place: Of the dataset in the selection.
        """
        return None

    def num_delivered(self, place: int) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return how many pictures, tiles or regions of each row of a dataset are delivered, ``(num_rows,)``.

        Token budgets charge for them; None for a field of other content.

        Args:
            place: Of the dataset in the selection.

        Raises:
            ConfigError: No table knows.
        """
        return None

    def token_counts(self, budget: TokenBudget) -> list[NDArray[np.int64]] | None:  # noqa: ARG002
        """Return the exact tokens of each row of each dataset, ``(num_rows,)``, which a budget charges for.

        A sample that is left out has more than the budget. None for a field that is charged by a rule.

        Raises:
            ConfigError: No table has them, or the budget does not fit the field.
        """
        return None

    def check_counts(self) -> None:  # noqa: B027 - most fields have none
        """Compare some of the counts with the samples.

        Raises:
            ConfigError: They differ.
        """

    def num_windows(self, place: int) -> NDArray[np.int64] | None:  # noqa: ARG002
        """Return how many windows each study of a dataset has, ``(num_studies,)``; None if it makes none.

        Args:
            place: Of the dataset in the selection, whose samples are studies.
        """
        return None

    def follow(self, name: str, spec: Field, context: FieldContext) -> BoundField | None:  # noqa: ARG002
        """Bind a field of regions that follows this one; None where its pictures are followed."""
        return None

    @abstractmethod
    def array_specs(self, slots: Slots) -> list[ArraySpec]:
        """Name the arrays of a micro-batch; sizes follow from tables alone."""

    @abstractmethod
    def prepare(self, arrays: Arrays, slots: Slots) -> None:
        """Fill the arrays so that every slot is empty; slots of samples are filled afterwards."""

    @abstractmethod
    def needed(self, shard: Shard, request: SlotRequest) -> Sequence[int]:
        """Return the numbers of the stored fields that a sample needs.

        Raises:
            BadSample: The shard lacks one of them.
        """

    def needed_regions(self, shard: Shard, request: SlotRequest) -> Sequence[RegionPlan]:  # noqa: ARG002
        """Return the regions of volumes in bricks that a sample needs, beside its stored fields."""
        return ()

    @abstractmethod
    def open(self, shard: Shard, request: SlotRequest, arrays: Arrays) -> SlotContent:
        """Begin a slot.

        Raises:
            BadSample: The shard lacks a stored field, or the sample does not fit into its slot.
        """

    def fill_beside(self, arrays: Arrays, slots: Slots) -> Mapping[int, BadSampleReason]:  # noqa: ARG002
        """Fill all slots of a micro-batch at once with what is stored beside the shards.

        Returns:
            What is wrong with the content of a slot; such slots are masked.
        """
        return {}

    def derive(
        self,
        arrays: Arrays,  # noqa: ARG002
        slots: Slots,  # noqa: ARG002
        slot: int,  # noqa: ARG002
        entries: Mapping[str, Any],  # noqa: ARG002
    ) -> tuple[BadSampleReason, str] | None:
        """Fill a slot with what follows from other fields of its sample.

        Args:
            arrays: Of the micro-batch.
            slots: Its samples.
            slot: The slot.
            entries: Of the fields that this one depends on, as a transform gets them.

        Returns:
            What is wrong with the sample, and a detail that holds nothing of it; None where all is right.
        """
        return None

    @abstractmethod
    def blank(self, arrays: Arrays, slot: int) -> None:
        """Make a slot look like one without a sample."""

    def example(self, arrays: Arrays) -> None:
        """Make the only slot of prepared arrays look like that of a sample, to try a transform with.

        By default its masks become 1, and everything else stays empty.
        """
        if f"{self.name}_mask" in arrays:
            arrays[f"{self.name}_mask"][:] = 1

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what `Field.present` needs beside the arrays, as plain JSON values."""


def with_dependencies(fields: Mapping[str, Field], names: Iterable[str]) -> set[str]:
    """Return the names of fields, and of those that they depend on, as far as these are there."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name in fields and name not in found:
            found.add(name)
            waiting += fields[name].depends_on
    return found


def settings_of(field: Field) -> dict[str, str]:
    """Return the settings that are not the default, so that a new setting leaves identities as they are.

    A folder whose digest the field states instead is marked ``is_place``.
    """
    given = {
        one.name: getattr(field, one.name)
        for one in fields(field)
        if one.init and not one.metadata.get("is_place")
    }
    defaults = {one.name: one.default for one in fields(field)}
    return {name: repr(value) for name, value in given.items() if value != defaults[name]}


def by_rows(dataset: Dataset, of_studies: NDArray[Any]) -> NDArray[Any]:
    """Return a column of the samples table by the rows of the dataset's own table."""
    if dataset.samples is dataset.studies:
        return of_studies
    found: NDArray[Any] = of_studies[dataset.study_rows(np.arange(dataset.samples.num_samples))]
    return found


def check_names(fields: Mapping[str, Field]) -> None:
    """Refuse names that cannot be entries of a batch.

    Raises:
        ConfigError: It is no mapping to fields; or a name is malformed, reserved, or that of an array beside
            another field.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(
            "fields maps names to fields, such as {'image': sf.Image(size=(512, 512))}, got "
            f"{type(fields).__name__!r}; leave it out for the default fields."
        )
    for name, one in fields.items():
        if isinstance(one, type) and issubclass(one, Field):
            raise ConfigError(
                f"fields[{name!r}] is the class {one.__name__}; call it, such as sf.{one.__name__}()."
            )
        if not isinstance(one, Field):
            raise ConfigError(
                f"fields[{name!r}] is {type(one).__name__}, not a field; write for example "
                "sf.Image(size=(512, 512))."
            )
        if not FIELD_NAME.fullmatch(str(name)):
            raise ConfigError(
                f"The field name {name!r} is not valid: use a-z, 0-9 and _, beginning with a letter."
            )
        owner = next((other for other in fields if name.startswith(f"{other}_")), None)
        if name in RESERVED_NAMES or (
            owner is not None
            and name.removeprefix(f"{owner}_") in RESERVED_SUFFIXES | fields[owner].own_suffixes
        ):
            beside = "every batch has an entry of this name" if owner is None else f"it is beside {owner!r}"
            raise ConfigError(f"The field name {name!r} is reserved ({beside}); choose another one.")


RESERVED_SUFFIXES: Final = frozenset(
    {"mask", "range", "box", "index", "shape", "label", "annotated", "grid", "offsets", "variant"}
    | {"time_s", "code", "has_value", "recorded", "affine", "valid", "start", "weights", "mpp", "tissue"}
)
"""Ends of the names of entries beside a field, such as ``NAME_mask``."""


def check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Refuse a setting that is not one of some values.

    Raises:
        ConfigError: It is not.
    """
    if value not in allowed or isinstance(value, bool):
        listed = ", ".join(repr(one) for one in allowed)
        raise ConfigError(f"{name} is one of {listed}, got {value!r}.")


def _plain(value: Any) -> Any:
    """Return Python's number for a scalar of NumPy, inside tuples and lists too, and a tuple for an array."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _plain(tuple(value)) if value.ndim else value.item()
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return value


def check_count(name: str, value: Any, most: int, more: str = "") -> None:
    """Refuse a setting that is not a number from 1 to ``most``.

    Raises:
        ConfigError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(f"{name} is a number from 1 to {most:,}, {more}got {value!r}.")
