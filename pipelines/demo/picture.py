"""Picture of the demo: slices beside their reports, and the losses of both runs."""

from __future__ import annotations

import itertools
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pipelines.demo.studies import GENERATED
from shardflow.format import Dataset, decode_array
from shardflow.format.keys import REPORT_FIELD, STUDY_FIELD, parse_slice_field
from shardflow.training.metrics import read_metrics

_AVERAGED_STEPS = 8
_NUM_STUDIES = 5
_NUM_SLICES = 6
_THUMBNAIL_PIXELS = 64 * 64
_LEAST_CORRELATION = 0.6
# The sheet, in inches.
_LETTER_WIDTH = 0.081
_WIDTH, _MARGIN, _SLICE_HEIGHT, _SLICES_RIGHT, _LOSS_HEIGHT = 15.0, 0.5, 1.4, 9.5, 3.6
_HEIGHT = 1.3 + _NUM_STUDIES * (_SLICE_HEIGHT + 0.62) + _LOSS_HEIGHT
_INK, _FAINT, _FIRST, _SECOND, _ALARM = "#1b1f24", "#6a737d", "#1f6feb", "#e36209", "#cb2431"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """Where the killed run was cut, and where it went on; both count steps done."""

    killed_after: int
    resumed_after: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The course of one run's training loss."""

    steps: list[int]
    values: list[float]
    """Nats a token."""
    attempts: list[int]
    """Which start of the job made each step."""

    @property
    def first(self) -> float:
        """Mean of the first steps."""
        return sum(self.values[:_AVERAGED_STEPS]) / len(self.values[:_AVERAGED_STEPS])

    @property
    def last(self) -> float:
        """Mean of the last steps."""
        return sum(self.values[-_AVERAGED_STEPS:]) / len(self.values[-_AVERAGED_STEPS:])


def losses(run: Path) -> Losses:
    """Read the losses of a run; each step once, as its last attempt made it."""
    lines = [line for line in read_metrics(run) if line["loss"] is not None]
    return Losses(
        steps=[int(line["global_step"]) + 1 for line in lines],
        values=[float(line["loss"]) for line in lines],
        attempts=[int(line["attempt"]) for line in lines],
    )


@dataclass(frozen=True, slots=True)
class _Study:
    title: str
    slices: list[NDArray[Any]]
    """Each ``(rows, columns)`` or ``(rows, columns, 3)``."""
    aspect: float
    """Height of a pixel over its width."""
    display_range: tuple[float, float]
    report: str


def draw(dataset: Dataset, reference: Losses, killed: Losses, resumption: Resumption, path: Path) -> None:
    """Draw the picture into a PNG file."""
    with mpl.rc_context({"font.family": "DejaVu Sans", "text.color": _INK, "axes.edgecolor": _FAINT}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=100, facecolor="white")
        title = "shardflow demo: DICOM in, a resumed training run out"
        _write(figure, _MARGIN, _HEIGHT - 0.35, title, size=19, weight="bold")
        subtitle = "Real slices, read back from the packed dataset, beside reports that the demo generated."
        _write(figure, _MARGIN, _HEIGHT - 0.82, subtitle, size=12, color=_FAINT)
        for number, study in enumerate(_studies(dataset)):
            _draw_study(figure, _HEIGHT - 1.3 - number * (_SLICE_HEIGHT + 0.62), study)
        _draw_losses(figure, reference, killed, resumption)
        figure.savefig(path)


def _write(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Write text whose upper left corner lies at a place in inches."""
    figure.text(x / _WIDTH, y / _HEIGHT, text, va="top", **style)


def _studies(dataset: Dataset) -> list[_Study]:
    """Choose studies that look different: of each modality the largest, then the next; thumbnails last."""
    samples = dataset.samples
    pixels = samples.column("rows").astype(np.int64) * samples.column("columns")
    num_shown = np.minimum(samples.column("num_slices"), _NUM_SLICES)
    weight = pixels * num_shown
    order = np.argsort(-weight, kind="stable").tolist()
    seen: dict[str, int] = {}
    ranked = []
    for row in order:
        modality = samples.modality(row)
        is_thumbnail = bool(pixels[row] < _THUMBNAIL_PIXELS)
        ranked.append((is_thumbnail, seen.setdefault(modality, 0), -int(num_shown[row]), row))
        seen[modality] += 1
    studies = (_read_study(dataset, row) for *_, row in sorted(ranked))
    chosen = list(itertools.islice(filter(_shows_something, studies), _NUM_STUDIES))
    return sorted(chosen, key=lambda study: -sum(pixels.size for pixels in study.slices))


def _shows_something(study: _Study) -> bool:
    """Tell a picture from noise (some test files hold nothing else): neighbouring pixels are alike."""
    pixels = study.slices[len(study.slices) // 2].astype(np.float64)
    left, right = pixels[:, :-1].ravel(), pixels[:, 1:].ravel()
    return bool(left.std() and right.std() and np.corrcoef(left, right)[0, 1] > _LEAST_CORRELATION)


def _read_study(dataset: Dataset, row: int) -> _Study:
    _, fields = dataset.sample_fields(row)
    names = [field.name for field in fields]
    slices = [name for name in names if (part := parse_slice_field(name)) and part.series == 0]
    # The ends of a stack are often empty.
    shown = sorted({round(place) for place in np.linspace(0.28, 0.9, _NUM_SLICES) * (len(slices) - 1)})
    read = dataset.read_fields(row, [STUDY_FIELD, REPORT_FIELD, *(slices[place] for place in shown)])
    series = json.loads(read[STUDY_FIELD])["series"][0]
    spacing = series["pixel_spacing_mm"] or [1.0, 1.0]
    low, high = series["display_range"]
    body_part = f" {series['body_part'].lower()}" if series.get("body_part") else ""
    amount = "1 image" if len(slices) == 1 else f"{len(slices)} slices"
    return _Study(
        title=f"{series['modality']}{body_part}, {amount} of {series['rows']} x {series['columns']}",
        slices=[decode_array("b2nd", read[slices[place]]) for place in shown],
        aspect=spacing[0] / spacing[1],
        display_range=(low, high),
        report=read[REPORT_FIELD].decode("utf-8"),
    )


def _draw_study(figure: Figure, top: float, study: _Study) -> None:
    """Draw slices of one height from left to right, then the report; ``top`` in inches."""
    _write(figure, _MARGIN, top, study.title, size=11, weight="bold")
    bottom, left = top - 0.28 - _SLICE_HEIGHT, _MARGIN
    for pixels in study.slices:
        width = min(_SLICE_HEIGHT * pixels.shape[1] / (pixels.shape[0] * study.aspect), 1.6 * _SLICE_HEIGHT)
        if left + width > _SLICES_RIGHT:
            break
        place = (left / _WIDTH, bottom / _HEIGHT, width / _WIDTH, _SLICE_HEIGHT / _HEIGHT)
        axes = figure.add_axes(place, facecolor="black")
        axes.set_xticks([])
        axes.set_yticks([])
        low, high = study.display_range
        axes.imshow(pixels, cmap="gray", vmin=low, vmax=high, aspect=study.aspect, interpolation="nearest")
        left += width + 0.07
    left += 0.2
    badge = {"boxstyle": "round,pad=0.35", "facecolor": _ALARM, "edgecolor": "none"}
    _write(figure, left + 0.06, top - 0.33, "GENERATED", size=8, weight="bold", color="white", bbox=badge)
    num_columns = int((_WIDTH - _MARGIN - left) / _LETTER_WIDTH)
    body = study.report.removeprefix(GENERATED).strip()
    lines = [line for paragraph in body.splitlines() for line in textwrap.wrap(paragraph, num_columns)]
    _write(figure, left, top - 0.66, "\n".join(lines), size=10.5, linespacing=1.4)


def _draw_losses(figure: Figure, reference: Losses, killed: Losses, resumption: Resumption) -> None:
    width = _WIDTH - 2 * _MARGIN - 0.35
    axes = figure.add_axes(
        ((_MARGIN + 0.35) / _WIDTH, 0.65 / _HEIGHT, width / _WIDTH, (_LOSS_HEIGHT - 1.15) / _HEIGHT)
    )
    axes.plot(
        reference.steps,
        reference.values,
        color=_FIRST,
        linewidth=6,
        alpha=0.35,
        solid_capstyle="round",
        label="undisturbed run, 2 processes",
    )
    axes.plot(
        killed.steps, killed.values, color=_SECOND, linewidth=1.6, label="killed run, 2 processes, then 1"
    )
    cut, again = resumption.killed_after, resumption.resumed_after
    axes.axvspan(again + 0.5, cut + 0.5, color=_ALARM, alpha=0.10, linewidth=0)
    axes.axvline(cut + 0.5, color=_ALARM, linewidth=1.4, linestyle=(0, (4, 3)))
    top = max(reference.values + killed.values)
    axes.annotate(
        f"one rank killed (SIGKILL) after step {cut};\nthe run goes on from the checkpoint of step {again}",
        xy=(cut + 0.5, top * 0.78), xytext=(10, 0), textcoords="offset points", va="top", size=10,
        color=_ALARM,
    )  # fmt: skip
    axes.set_xlim(0.5, reference.steps[-1] + 0.5)
    axes.set_ylim(0, top * 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(axis="y", color="#e1e4e8", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper right", fontsize=10.5)
    axes.set_title(
        "Training loss: both runs see the same samples in the same steps", loc="left", size=11, weight="bold"
    )
