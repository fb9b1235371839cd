"""MR protocols: weightings with scales of their own, oblique stacks, two b-values at the same places."""

from __future__ import annotations

from collections.abc import Sequence

from shardflow.synthetic.ct import FOCUS_MM, LENGTH_MM
from shardflow.synthetic.draft import Block, Recipe, StudyDraft, spacing_for
from shardflow.synthetic.planes import AXIAL, CORONAL, SAGITTAL, Grid, stack_of_planes
from shardflow.synthetic.study import Encoding
from shardflow.synthetic.vectors import Vector

__all__ = ["add_mr_series"]

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
    steps = [spacing * (place - (num_planes - 1) / 2) for place in range(num_planes)]
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
    """How far a stack reaches along its normal."""
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
