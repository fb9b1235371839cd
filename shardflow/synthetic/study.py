"""Plan of a study as plain records (every series, slice, number and oddity), and the draft that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from shardflow.synthetic.anatomy import Anatomy, Lesion
from shardflow.synthetic.draws import Draws, Kernel, make_uid
from shardflow.synthetic.geometry import IDENTITY, Frame, Plane, Vector, rotation
from shardflow.synthetic.options import Patient, Region, SynthOptions, Visit

SeriesKind = Literal["volume", "reformat", "localizer", "projection"]
Syntax = Literal["explicit-little", "implicit-little", "explicit-big", "deflated", "rle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """Encoding of values as stored integers: ``value = stored * slope + intercept``."""

    bits_stored: int
    """Of 16 allocated."""
    is_signed: bool = False
    slope: str | None = "1"
    """As written; None omits the attributes (values are stored unchanged)."""
    intercept: str = "0"
    photometric: Literal["MONOCHROME1", "MONOCHROME2"] = "MONOCHROME2"
    padding: int | None = None
    """Stored value outside a reconstructed circle."""
    has_padding_attribute: bool = True
    has_high_bits: bool = False
    """Whether unused bits are set."""

    @property
    def lowest(self) -> int:
        """Lowest stored value."""
        return -(1 << (self.bits_stored - 1)) if self.is_signed else 0

    @property
    def highest(self) -> int:
        """Highest stored value."""
        return (1 << (self.bits_stored - self.is_signed)) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SlicePlan:
    """One instance."""

    plane: Plane
    stack: int
    """Number of its stack in the series, from 0."""
    grid_index: int
    """Position in its stack, from 0, counting lost slices."""
    contrast: str
    """Phase or weighting (a column of `tissues`)."""
    instance_number: int
    acquisition_number: int
    sop_instance_uid: str
    view: str = ""
    """Of a projection: PA, AP or LL."""
    is_truncated: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A series before its numbers are drawn."""

    kind: SeriesKind
    name: str
    """Short words for the series: ``axial 1.25 mm lung``."""
    image_type: tuple[str, ...]
    encoding: Encoding
    kernel: Kernel = "standard"
    thickness_mm: float | None = None
    spacing_mm: float | None = None
    """Between neighboring planes of a stack."""
    noise: float = 0.0
    """Standard deviation, in the unit of the values."""
    gain: float = 1.0
    """Factor of tissue values (MR)."""
    pathologies: tuple[str, ...] = ()
    """Pathologies; in a recipe, those of the protocol itself."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """DICOM keyword to text: technical attributes of this series."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPlan(Recipe):
    """One series; its slices in geometric order, stack after stack."""

    index: int
    """Number within the study, from 0; keys the noise."""
    uid: str
    number: int
    """Series Number."""
    modality: str
    frame_of_reference_uid: str
    syntax: Syntax
    slices: tuple[SlicePlan, ...]
    lost_grid_indexes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyPlan:
    """One study, with everything that determines its pixels, report and truth."""

    number: int
    patient: Patient
    visit: Visit
    uid: str
    region: Region
    anatomy: Anatomy
    origin: Vector
    """Position of the body's origin in this study's frame of reference, mm."""
    lesions: tuple[Lesion, ...]
    resolved: tuple[Lesion, ...]
    """Lesions of the patient's previous study that are gone now."""
    series: tuple[SeriesPlan, ...]
    files: Mapping[str, str]
    """SOP Instance UID to path below the output folder."""
    copies: tuple[tuple[str, str], ...]
    """(SOP Instance UID, path) of second files of an instance."""
    stray_files: tuple[str, ...]


_SYNTAXES: tuple[tuple[Syntax, int], ...] = (
    ("explicit-little", 50),
    ("implicit-little", 20),
    ("rle", 14),
    ("deflated", 8),
    ("explicit-big", 8),
)
_SPACINGS_MM = (0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
_MIN_FOR_LOSS = 6
_STACKED = ("volume", "reformat")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Planes of one stack, in geometric order."""

    planes: Sequence[Plane]
    contrast: str
    views: Sequence[str] = ()


class StudyDraft:
    """Collects the series of one study."""

    def __init__(
        self,
        options: SynthOptions,
        draws: Draws,
        patient: Patient,
        visit: Visit,
        anatomy: Anatomy,
        number: int,
    ) -> None:
        self.options = options
        self.draws = draws
        self.patient = patient
        self.visit = visit
        self.anatomy = anatomy
        self.number = number
        self.series: list[SeriesPlan] = []
        self._frame_of_reference_uid = make_uid(options.seed, "frame-of-reference", number)
        self._syntax = draws.weighted(_SYNTAXES)
        self._hundreds = draws.chance(25)
        self._last_number = 0

    def happens(self, draws: Draws, pathology: str) -> bool:
        """Draw whether a pathology happens here."""
        return draws.at(pathology).chance(self.options.chance_of(pathology))

    def turn(self, draws: Draws) -> tuple[Frame, tuple[str, ...]]:
        """Draw an oblique turn or none; return it with its pathologies."""
        if not self.happens(draws, "oblique"):
            return IDENTITY, ()
        i, j, k = (draws.integer(-4, 4) for _ in range(3))
        return rotation(20, i or 2, j, k), ("oblique",)

    def add(self, recipe: Recipe, blocks: Sequence[Block]) -> None:
        """Add one series with its stacks."""
        index = len(self.series)
        draws = self.draws.at("series", index)
        pathologies = [*recipe.pathologies]
        slices, shuffled = self._number(draws, index, recipe, blocks)
        lost: tuple[int, ...] = ()
        if recipe.kind in _STACKED:
            if shuffled:
                pathologies.append("shuffled")
            if len(slices) >= _MIN_FOR_LOSS * len(blocks) and self.happens(draws, "missing-slices"):
                pathologies.append("missing-slices")
                lost = self._lose(draws.at("lost"), len(blocks[0].planes))
                slices = [item for item in slices if item.grid_index not in lost]
            if len(slices) > 1 and self.happens(draws, "truncated"):
                pathologies.append("truncated")
                slices = _truncate(slices, draws.at("cut").integer(0, len(slices) - 1))
        encoding, encoding_names = self._spoil(draws, recipe)
        pathologies += encoding_names
        if self.series and self.happens(draws, "same-number"):
            pathologies.append("same-number")
            number = self.series[-1].number
        else:
            number = self._next_number(draws)
        recipe = replace(recipe, encoding=encoding, pathologies=tuple(sorted(pathologies)))
        self.series.append(
            SeriesPlan(
                **{field.name: getattr(recipe, field.name) for field in fields(recipe)},
                index=index,
                uid=make_uid(self.options.seed, "series", self.number, index),
                number=number,
                modality=self.visit.modality,
                frame_of_reference_uid=self._frame_of_reference_uid,
                syntax=self._syntax if draws.chance(80) else draws.weighted(_SYNTAXES),
                slices=tuple(slices),
                lost_grid_indexes=lost,
            )
        )

    def _next_number(self, draws: Draws) -> int:
        if not self._hundreds:
            self._last_number += 1 if draws.chance(85) else 2
        else:
            self._last_number = 1 if self._last_number == 0 else (self._last_number // 100 + 1) * 100 + 1
        return self._last_number

    def _number(
        self, draws: Draws, index: int, recipe: Recipe, blocks: Sequence[Block]
    ) -> tuple[list[SlicePlan], bool]:
        """Number the slices; Instance Numbers rarely follow the positions."""
        places = [(stack, place) for stack, block in enumerate(blocks) for place in range(len(block.planes))]
        order, shuffled = places, False
        if recipe.kind in _STACKED:
            order, shuffled = self._order(draws.at("order"), blocks)
        first = 1 if draws.chance(92) else 101
        numbers = {place: first + count for count, place in enumerate(order)}
        slices = []
        for ordinal, (stack, place) in enumerate(places):
            block = blocks[stack]
            slices.append(
                SlicePlan(
                    plane=block.planes[place],
                    stack=stack,
                    grid_index=place,
                    contrast=block.contrast,
                    instance_number=numbers[stack, place],
                    acquisition_number=stack + 1,
                    sop_instance_uid=make_uid(self.options.seed, "instance", self.number, index, ordinal),
                    view=block.views[place] if block.views else "",
                )
            )
        return slices, shuffled

    def _order(self, draws: Draws, blocks: Sequence[Block]) -> tuple[list[tuple[int, int]], bool]:
        shuffled = self.happens(draws, "shuffled")
        style = draws.choice(("odd-even", "random")) if shuffled else draws.choice(("up", "down", "down"))
        order: list[tuple[int, int]] = []
        for stack, block in enumerate(blocks):
            places = list(range(len(block.planes)))
            if style == "down":
                places.reverse()
            elif style == "odd-even":
                places = places[0::2] + places[1::2]
            elif style == "random":
                places = draws.shuffled(places)
            order += [(stack, place) for place in places]
        return order, shuffled

    @staticmethod
    def _lose(draws: Draws, num_planes: int) -> tuple[int, ...]:
        """Draw lost places, never the first two or the last."""
        return tuple(sorted(draws.some(range(2, num_planes - 1), draws.integer(1, 3))))

    def _spoil(self, draws: Draws, recipe: Recipe) -> tuple[Encoding, list[str]]:
        """Add padding and high bits to an encoding."""
        encoding = recipe.encoding
        names: list[str] = []
        if encoding.bits_stored < 16 and self.happens(draws, "high-bits"):
            encoding = replace(encoding, has_high_bits=True)
            names.append("high-bits")
        is_round = self.visit.modality == "CT" and recipe.kind == "volume" and encoding.bits_stored == 16
        if is_round and self.happens(draws, "padding"):
            # As vendors do it: -2000 in signed pixels, sometimes unmarked; its bit pattern in unsigned ones.
            encoding = replace(
                encoding,
                padding=-2000 if encoding.is_signed else 63536,
                has_padding_attribute=not encoding.is_signed or draws.at("padding-tag").chance(60),
            )
            names.append("padding")
        return encoding, names


def _truncate(slices: Sequence[SlicePlan], place: int) -> list[SlicePlan]:
    return [replace(item, is_truncated=count == place) for count, item in enumerate(slices)]


def spacing_for(num_slices: int, length_mm: float) -> float:
    """Return the widest usual slice distance with which a stack stays within a length."""
    fitting = [spacing for spacing in _SPACINGS_MM if spacing * num_slices <= length_mm]
    return fitting[-1] if fitting else _SPACINGS_MM[0]
