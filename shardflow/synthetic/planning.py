"""Planning of one study without pixels: patient, body, lesions, series, protocols and file names.

CT: scouts, thin and thick stacks, kernels, contrast phases, reformats, tilted gantries. MR: weightings with
scales of their own, oblique stacks, two b-values at the same positions. Radiography: computed (CR) and
digital (DX), views, polarity, large matrices. Files are named in four ways found in archives, none of them in
slice order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from shardflow.synthetic.anatomy import Anatomy, Lesion, build_head, build_torso, kinds_of, place_lesions
from shardflow.synthetic.draws import Draws, Kernel, make_uid
from shardflow.synthetic.geometry import (
    AXIAL,
    CORONAL,
    IDENTITY,
    SAGITTAL,
    Frame,
    Grid,
    Plane,
    Vector,
    centered_steps,
    rotation,
    stack_of_planes,
)
from shardflow.synthetic.options import Patient, Region, SynthOptions
from shardflow.synthetic.study import Block, Encoding, Recipe, SeriesPlan, StudyDraft, StudyPlan, spacing_for

LENGTH_MM: dict[Region, float] = {"chest": 280.0, "abdomen": 250.0, "head": 150.0, "spine": 100.0}
"""Length of the stacks of a region."""
FOCUS_MM: dict[Region, Vector] = {
    "chest": (0.0, 6.0, 90.0),
    "abdomen": (0.0, 6.0, -60.0),
    "head": (0.0, 0.0, 5.0),
    "spine": (0.0, 30.0, -110.0),
}
"""Middle of the stacks, in the body's own coordinates."""

_ENCODINGS = (
    (Encoding(bits_stored=12, intercept="-1024"), 35),
    (Encoding(bits_stored=16, is_signed=True, intercept="0"), 20),
    (Encoding(bits_stored=16, is_signed=True, intercept="-1024"), 20),
    (Encoding(bits_stored=16, intercept="-1024"), 10),
    (Encoding(bits_stored=16, slope="0.5", intercept="-1024.0"), 8),
    (Encoding(bits_stored=12, is_signed=True, intercept="0.000000"), 7),
)
_KERNELS: dict[Kernel, str] = {"smooth": "B30f", "standard": "STANDARD", "sharp": "B70f"}
_NOISE_HU: dict[Kernel, float] = {"smooth": 8.0, "standard": 15.0, "sharp": 34.0}
_WINDOWS: dict[Kernel, tuple[str, str]] = {
    "smooth": ("40", "400"),
    "standard": ("40\\300", "400\\1500"),
    "sharp": ("-600", "1500"),
}
# Tilt in degrees for the quaternion (20, b, 0, 0), so that no arc tangent is needed.
_TILTS = ((2, "11.4"), (3, "17.1"), (4, "22.6"))
_IMAGE_TYPES = {
    "volume": ("ORIGINAL", "PRIMARY", "AXIAL"),
    "reformat": ("DERIVED", "SECONDARY", "REFORMATTED", "AVERAGE"),
}
_PHASE_WORDS = {
    "native": "without contrast",
    "arterial": "arterial phase",
    "portal": "portal venous phase",
    "delayed": "delayed phase",
}


def add_ct_series(draft: StudyDraft) -> None:
    """Add the series of one CT study."""
    _Protocol(draft).run()


class _Protocol:
    def __init__(self, draft: StudyDraft) -> None:
        self.draft = draft
        self.draws = draws = draft.draws.at("ct")
        self.region = region = draft.patient.region
        options = draft.options
        self.num_slices = draws.integer(options.min_slices, options.max_slices)
        self.thin_mm = spacing_for(self.num_slices, LENGTH_MM[region])
        self.thick_factor = max(2, round(5 / self.thin_mm)) if self.thin_mm < 4 else 2
        self.encoding = draws.weighted(_ENCODINGS)
        self.center = FOCUS_MM[region]
        room = 236.0 if region == "head" else 2 * draft.anatomy.half_width_mm * draws.real(1.03, 1.12)
        self.field_mm = round(room, 1)
        size = options.size
        self.grid = _square(size, self.field_mm)
        self.kvp = draws.choice(("100", "120", "120", "140"))

    def run(self) -> None:
        self._add_scouts()
        if self.region == "chest":
            self._run_chest()
        elif self.region == "abdomen":
            self._run_abdomen()
        else:
            self._run_head()

    def _run_chest(self) -> None:
        phase = self.draws.choice(("native", "portal"))
        self._add_axial("thin", "sharp", (phase,))
        if self.draws.chance(60):
            self._add_axial("thin", "standard", (phase,))
        self._add_axial("thick", "smooth", (phase,))
        self._add_reformat("coronal", phase)

    def _run_abdomen(self) -> None:
        phases = self.draws.weighted(
            ((("portal",), 40), (("native", "arterial", "portal"), 35), (("native",), 25))
        )
        mixed = len(phases) > 1 and self.draft.happens(self.draws, "mixed-phases")
        if mixed:
            self._add_axial("thick", "smooth", phases[:1])
            self._add_axial("thin", "standard", phases[1:])
        else:
            for phase in phases:
                self._add_axial("thin" if phase == phases[-1] else "thick", "standard", (phase,))
        self._add_axial("thick", "smooth", phases[-1:])
        self._add_reformat("coronal", phases[-1])
        if self.draws.chance(40):
            self._add_reformat("sagittal", phases[-1])

    def _run_head(self) -> None:
        phase = self.draws.weighted((("native", 75), ("portal", 25)))
        turn, tilt = IDENTITY, ""
        if self.draft.happens(self.draws, "tilt"):
            quarter, tilt = self.draws.choice(_TILTS)
            turn = rotation(20, quarter if self.draws.chance(50) else -quarter, 0, 0)
        self._add_axial("thick", "smooth", (phase,), turn=turn, tilt=tilt)
        self._add_axial("thin", "sharp", (phase,), turn=turn, tilt=tilt)
        if self.draws.chance(50):
            self._add_reformat("coronal", phase)

    def _add_axial(
        self,
        width: str,
        kernel: Kernel,
        phases: tuple[str, ...],
        *,
        turn: Frame = IDENTITY,
        tilt: str = "",
    ) -> None:
        every = self.thick_factor if width == "thick" else 1
        spacing = self.thin_mm * every
        num_planes = max(1, self.num_slices // every)
        steps = centered_steps(num_planes, spacing)
        planes = stack_of_planes(self.grid, self.center, AXIAL, steps, advance=(0.0, 0.0, 1.0), turn=turn)
        pathologies = (("tilt",) if tilt else ()) + (("mixed-phases",) if len(phases) > 1 else ())
        words = " and ".join(_PHASE_WORDS[phase] for phase in phases)
        self._add(
            f"axial {spacing:g} mm {kernel}, {words}",
            "volume",
            [Block(planes=planes, contrast=phase) for phase in phases],
            kernel=kernel,
            spacing=spacing,
            pathologies=pathologies,
            tilt=tilt,
        )

    def _add_reformat(self, plane_name: str, phase: str) -> None:
        """Cut the volume again in another plane."""
        draws = self.draws.at(plane_name)
        turn, pathologies = self.draft.turn(draws)
        length = self.num_slices * self.thin_mm
        spacing = 3.0 if self.field_mm > 300 else 2.0
        num_planes = max(1, min(self.num_slices // 2, int(2 * self.draft.anatomy.half_depth_mm / spacing)))
        pixel = max(self.grid.column_spacing_mm, 0.5)
        rows = max(8, min(self.grid.rows, int(length / pixel)))
        columns = max(8, int(self.field_mm / pixel))
        grid = Grid(rows=rows, columns=columns, row_spacing_mm=pixel, column_spacing_mm=pixel)
        steps = centered_steps(num_planes, spacing)
        orientation = CORONAL if plane_name == "coronal" else SAGITTAL
        planes = stack_of_planes(grid, self.center, orientation, steps, turn=turn)
        self._add(
            f"{plane_name} {spacing:g} mm reformat, {_PHASE_WORDS[phase]}",
            "reformat",
            [Block(planes=planes, contrast=phase)],
            kernel="smooth",
            spacing=spacing,
            pathologies=pathologies,
        )

    def _add_scouts(self) -> None:
        """Add one series with a frontal and a lateral scout, or the lateral one alone."""
        length = LENGTH_MM[self.region] + 80
        pixel = max(1.0, round(length / self.draft.options.size, 3))
        rows, columns = int(length / pixel), int(self.field_mm * 1.15 / pixel)
        grid = Grid(rows=rows, columns=columns, row_spacing_mm=pixel, column_spacing_mm=pixel)
        both = self.region != "head"
        planes: list[Plane] = []
        for orientation in (CORONAL, SAGITTAL) if both else (SAGITTAL,):
            planes += stack_of_planes(grid, self.center, orientation, [0.0])
        blocks = [
            Block(planes=[plane], contrast="native", views=[view])
            for plane, view in zip(planes, ("AP", "LL") if both else ("LL",), strict=True)
        ]
        recipe = Recipe(
            kind="localizer",
            name="scout",
            image_type=("ORIGINAL", "PRIMARY", "LOCALIZER"),
            encoding=replace(self.encoding, slope="1"),
            noise=14.0,
            attributes={"KVP": self.kvp, "WindowCenter": "0", "WindowWidth": "1600"},
        )
        self.draft.add(recipe, blocks)

    def _add(
        self,
        name: str,
        kind: Literal["volume", "reformat"],
        blocks: list[Block],
        *,
        kernel: Kernel,
        spacing: float,
        pathologies: tuple[str, ...],
        tilt: str = "",
    ) -> None:
        center, width = _WINDOWS[kernel]
        if kernel == "sharp" and self.region == "head":
            center, width = "500", "2000"
        attributes = {
            "KVP": self.kvp,
            "ConvolutionKernel": _KERNELS[kernel],
            "WindowCenter": center,
            "WindowWidth": width,
            "XRayTubeCurrent": str(self.draws.integer(80, 420)),
            "GantryDetectorTilt": tilt or "0",
        }
        self.draft.add(
            Recipe(
                kind=kind,
                name=name,
                image_type=_IMAGE_TYPES[kind],
                encoding=self.encoding,
                kernel=kernel,
                thickness_mm=spacing,
                spacing_mm=spacing,
                noise=_NOISE_HU[kernel] * (0.7 if spacing >= 4 else 1.0),
                pathologies=pathologies,
                attributes=attributes,
            ),
            blocks,
        )


def _square(size: int, field_mm: float) -> Grid:
    spacing = round(field_mm / size, 6)
    return Grid(rows=size, columns=size, row_spacing_mm=spacing, column_spacing_mm=spacing)


_ORIENTATIONS = {"axial": AXIAL, "coronal": CORONAL, "sagittal": SAGITTAL}
_WORDS = {
    "t1": "T1",
    "t2": "T2",
    "flair": "FLAIR",
    "dwi-b0": "DWI",
    "dwi-b1000": "DWI",
    "t1-contrast": "T1 post contrast",
}
_TIMING = {
    "t1": ("500", "10", "SE", "SP", "90"),
    "t2": ("4200", "98", "SE", "SK", "150"),
    "flair": ("9000", "120", "SE\\IR", "SK", "150"),
    "dwi-b0": ("5200", "85", "EP", "SK", "90"),
    "dwi-b1000": ("5200", "85", "EP", "SK", "90"),
    "t1-contrast": ("520", "11", "SE", "SP", "90"),
}
_NOISE = 16.0


def add_mr_series(draft: StudyDraft) -> None:
    """Add the series of one MR study."""
    region, draws = draft.patient.region, draft.draws.at("mr")
    _add_localizer(draft)
    if region == "head":
        _add(draft, "sagittal", ("t1",))
        _add(draft, "axial", ("t2",))
        _add(draft, "axial", ("flair",))
        _add(draft, "axial", ("dwi-b0", "dwi-b1000"))
        if draws.chance(50):
            _add(draft, "axial", ("t1-contrast",))
    elif region == "spine":
        _add(draft, "sagittal", ("t1",))
        _add(draft, "sagittal", ("t2",))
        _add(draft, "axial", ("t2",), share=3)
    else:
        _add(draft, "coronal", ("t2",))
        _add(draft, "axial", ("t1",))
        _add(draft, "axial", ("dwi-b0", "dwi-b1000"))
        _add(draft, "axial", ("t1-contrast",))


def _add(draft: StudyDraft, orientation: str, weightings: Sequence[str], *, share: int = 1) -> None:
    draws = draft.draws.at("mr-series", len(draft.series))
    options, region = draft.options, draft.patient.region
    num_planes = max(1, draws.integer(options.min_slices, options.max_slices) // share)
    spacing = spacing_for(num_planes, _reach_mm(draft, orientation))
    thickness = spacing if draws.chance(50) else round(spacing * 0.9, 2)
    rows = max(8, options.size // 2)
    columns = max(8, draws.choice((options.size // 2, options.size * 5 // 8)))
    pixel = round(_field_mm(draft, orientation) / min(rows, columns), 6)
    grid = Grid(rows=rows, columns=columns, row_spacing_mm=pixel, column_spacing_mm=pixel)
    turn, pathologies = draft.turn(draws)
    steps = centered_steps(num_planes, spacing)
    planes = stack_of_planes(grid, FOCUS_MM[region], _ORIENTATIONS[orientation], steps, turn=turn)
    encoding, gain = _scale(draft, len(draft.series))
    recovery, echo, sequence, variant, flip = _TIMING[weightings[0]]
    draft.add(
        Recipe(
            kind="volume",
            name=f"{orientation} {_WORDS[weightings[0]]}",
            image_type=("ORIGINAL", "PRIMARY", "M", "DIFFUSION" if len(weightings) > 1 else "NONE"),
            encoding=encoding,
            thickness_mm=thickness,
            spacing_mm=spacing,
            noise=_NOISE,
            gain=gain,
            pathologies=pathologies,
            attributes={
                "RepetitionTime": recovery,
                "EchoTime": echo,
                "ScanningSequence": sequence,
                "SequenceVariant": variant,
                "FlipAngle": flip,
                "MagneticFieldStrength": draft.draws.at("field").choice(("1.5", "3")),
                "SpacingBetweenSlices": f"{spacing:g}",
                "WindowCenter": f"{round(480 * gain)}",
                "WindowWidth": f"{round(960 * gain)}",
            },
        ),
        [Block(planes=planes, contrast=weighting) for weighting in weightings],
    )


def _scale(draft: StudyDraft, index: int) -> tuple[Encoding, float]:
    """Draw how a series stores its arbitrary units; the gain includes the slope."""
    draws = draft.draws.at("mr-scale", index)
    gain = draws.real(0.4, 3.4)
    style = draws.choice(("plain", "plain", "sloped", "sixteen", "signed"))
    if style == "sloped":
        # As one vendor writes it: the stored integers fill twelve bits, the slope has many digits.
        slope = f"{draws.real(0.6, 2.4) * 1.0731:.8f}"
        return Encoding(bits_stored=12, slope=slope, intercept="0"), gain * float(slope)
    if style == "sixteen":
        return Encoding(bits_stored=16, slope=None), gain * 4
    if style == "signed":
        return Encoding(bits_stored=16, is_signed=True, slope=None), gain
    return Encoding(bits_stored=12, slope=None), gain


def _add_localizer(draft: StudyDraft) -> None:
    """Add one plane of each orientation, in one series."""
    size = max(8, draft.options.size // 2)
    pixel = round(_field_mm(draft, "coronal") * 1.1 / size, 6)
    grid = Grid(rows=size, columns=size, row_spacing_mm=pixel, column_spacing_mm=pixel)
    blocks = [
        Block(planes=stack_of_planes(grid, FOCUS_MM[draft.patient.region], orientation, [0.0]), contrast="t1")
        for orientation in (AXIAL, CORONAL, SAGITTAL)
    ]
    encoding, gain = _scale(draft, 0)
    recipe = Recipe(
        kind="localizer",
        name="three plane localizer",
        image_type=("ORIGINAL", "PRIMARY", "LOCALIZER"),
        encoding=encoding,
        thickness_mm=8.0,
        noise=_NOISE * 2,
        gain=gain,
        attributes={
            "RepetitionTime": "8",
            "EchoTime": "3",
            "ScanningSequence": "GR",
            "SequenceVariant": "SP",
        },
    )
    draft.add(recipe, blocks)


def _reach_mm(draft: StudyDraft, orientation: str) -> float:
    """Return the extent of a stack along its normal."""
    region, anatomy = draft.patient.region, draft.anatomy
    if orientation == "axial":
        return LENGTH_MM[region] if region != "spine" else 200.0
    if region == "spine":
        return LENGTH_MM[region]
    across: Vector = (2 * anatomy.half_width_mm, 2 * anatomy.half_depth_mm, 0.0)
    return across[0] if orientation == "sagittal" else across[1]


def _field_mm(draft: StudyDraft, orientation: str) -> float:
    if draft.patient.region == "head":
        return 240.0
    if draft.patient.region == "spine":
        return 220.0 if orientation == "axial" else 320.0
    return 2 * draft.anatomy.half_width_mm * 1.08


_MIDDLE: Vector = (0.0, 0.0, 100.0)
_LONG_MM = 430.0
_NOISE_SHARE = 0.006


def add_radiographs(draft: StudyDraft) -> None:
    """Add one or two views, in one series or in one each."""
    draws = draft.draws.at("radiograph")
    views = draws.weighted(((("PA", "LL"), 60), (("AP",), 25), (("PA",), 15)))
    together = draws.chance(40)
    bits = draws.choice((10, 12, 12) if draft.visit.modality == "CR" else (12, 14, 14, 16))
    inverse = draws.chance(50 if draft.visit.modality == "CR" else 25)
    encoding = Encoding(
        bits_stored=bits,
        slope="1" if draws.chance(60) else None,
        photometric="MONOCHROME1" if inverse else "MONOCHROME2",
    )
    blocks = [_view(draft, view, lying=draws.chance(20)) for view in views]
    for group in [blocks] if together else [[block] for block in blocks]:
        names = " and ".join(view for block in group for view in block.views)
        middle = 1 << (bits - 1)
        recipe = Recipe(
            kind="projection",
            name=f"chest {names}",
            image_type=("ORIGINAL", "PRIMARY"),
            encoding=encoding,
            noise=_NOISE_SHARE,
            attributes={
                "KVP": draws.choice(("110", "125")),
                "WindowCenter": str(middle),
                "WindowWidth": str(2 * middle),
            },
        )
        draft.add(recipe, group)


def _view(draft: StudyDraft, view: str, *, lying: bool) -> Block:
    long, short = 4 * draft.options.size, 4 * draft.options.size * 7 // 17 * 2
    pixel = round(_LONG_MM / long, 6)
    rows, columns = (short, long) if lying else (long, short)
    grid = Grid(rows=rows, columns=columns, row_spacing_mm=pixel, column_spacing_mm=pixel)
    orientation = SAGITTAL if view == "LL" else CORONAL
    return Block(planes=stack_of_planes(grid, _MIDDLE, orientation, [0.0]), contrast="native", views=[view])


IMAGE_FOLDER = "dicom"
"""Folder below the output with the images and nothing else."""

_STYLES = ("numbered", "uid", "hex", "modality")
_STRAY_NAMES = ("SYNTHETIC-readme.txt", "SYNTHETIC-Thumbs.db", "SYNTHETIC-series.json")


def place_files(
    options: SynthOptions, draws: Draws, *, patient: int, study: int, series: Sequence[SeriesPlan]
) -> tuple[dict[str, str], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Name the files of one study; return its files, copies and stray files, as in `StudyPlan`."""
    style = draws.choice(_STYLES)
    folder = f"{IMAGE_FOLDER}/SYN{patient:07d}/ST{study:07d}"
    files: dict[str, str] = {}
    copies: list[tuple[str, str]] = []
    for plan in series:
        own = draws.at("series", plan.index)
        below = folder if style in {"uid", "hex"} else f"{folder}/SE{plan.index + 1:04d}"
        # Files are numbered in the order in which an archive happened to receive them.
        for count, item in enumerate(own.shuffled(plan.slices)):
            files[item.sop_instance_uid] = _name(style, below, plan, count, item.sop_instance_uid, own)
        if own.at("duplicates").chance(options.chance_of("duplicates")):
            for item in own.at("copied").some([item for item in plan.slices if not item.is_truncated], 2):
                path = files[item.sop_instance_uid]
                stem, dot, suffix = path.rpartition(".")
                copy = f"{stem}_1.{suffix}" if dot and "/" not in suffix else f"{path}_1"
                copies.append((item.sop_instance_uid, copy))
    stray: tuple[str, ...] = ()
    if draws.at("stray-files").chance(options.chance_of("stray-files")):
        stray = tuple(f"{folder}/{name}" for name in draws.some(_STRAY_NAMES, draws.integer(1, 3)))
    return files, tuple(copies), stray


def _name(style: str, folder: str, plan: SeriesPlan, count: int, uid: str, draws: Draws) -> str:
    if style == "numbered":
        return f"{folder}/IM{count + 1:06d}"
    if style == "uid":
        return f"{folder}/{uid}.dcm"
    if style == "hex":
        return f"{folder}/{plan.index:01X}{count:03X}{draws.key() % 16**6:06X}"
    return f"{folder}/{plan.modality}.{draws.key() % 10**8:08d}.{count + 1}.dcm"


_ORGANS: dict[Region, tuple[str, ...]] = {
    "chest": ("lung", "lung", "vertebra"),
    "abdomen": ("liver", "kidney", "spleen", "vertebra"),
    "head": ("brain",),
    "spine": ("vertebra",),
}


def plan_study(options: SynthOptions, number: int, patient: Patient, visit_number: int) -> StudyPlan:
    """Plan one study.

    Args:
        options: What is generated.
        number: The study's number, from 0.
        patient: The patient.
        visit_number: Number of the patient's study, from 0.
    """
    draws = Draws(options.seed, "study", number)
    visit = patient.visits[visit_number]
    anatomy = _build_body(options, patient)
    draft = StudyDraft(options, draws, patient, visit, anatomy, number)
    if visit.modality == "CT":
        add_ct_series(draft)
    elif visit.modality == "MR":
        add_mr_series(draft)
    else:
        add_radiographs(draft)
    lesions = _grow(options, patient, anatomy, visit_number)
    before = _grow(options, patient, anatomy, visit_number - 1) if visit_number else ()
    present = {lesion.lesion_id for lesion in lesions}
    files, copies, stray_files = place_files(
        options, draws.at("files"), patient=patient.number, study=number, series=draft.series
    )
    offset = draws.at("origin")
    return StudyPlan(
        number=number,
        patient=patient,
        visit=visit,
        uid=make_uid(options.seed, "study", number),
        region=patient.region,
        anatomy=anatomy,
        origin=(offset.integer(-40, 40) / 2, offset.integer(-400, 100) / 2, offset.integer(-1600, 1600) / 2),
        lesions=lesions,
        resolved=tuple(lesion for lesion in before if lesion.lesion_id not in present),
        series=tuple(draft.series),
        files=files,
        copies=copies,
        stray_files=stray_files,
    )


def _build_body(options: SynthOptions, patient: Patient) -> Anatomy:
    draws = Draws(options.seed, "anatomy", patient.number)
    if patient.region == "head":
        return build_head(draws, scale=patient.scale)
    return build_torso(draws, scale=patient.scale, is_female=patient.sex == "F")


def _grow(options: SynthOptions, patient: Patient, anatomy: Anatomy, visit: int) -> tuple[Lesion, ...]:
    draws = Draws(options.seed, "lesions", patient.number)
    only_radiographs = options.modality in {"CR", "DX"}
    return place_lesions(
        draws,
        anatomy,
        kinds_of(_ORGANS[patient.region], radiograph=only_radiographs),
        count=draws.integer(options.min_lesions, options.max_lesions),
        window_mm=_window(options, patient.region),
        visit=visit,
    )


def _window(options: SynthOptions, region: Region) -> tuple[float, float]:
    """Return the range of heights in which every stack of the region shows a lesion."""
    if options.modality in {"CR", "DX"}:
        return 30.0, 200.0
    middle = FOCUS_MM[region][2]
    if region == "spine":
        return middle - 100, middle + 100
    reach = min(
        count * spacing_for(count, LENGTH_MM[region])
        for count in range(options.min_slices, options.max_slices + 1)
    )
    return middle - 0.42 * reach, middle + 0.42 * reach
