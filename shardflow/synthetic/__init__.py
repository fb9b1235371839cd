"""Generator of realistic studies with reports, annotations and the complete ground truth about them.

Data flow: `options` (who, when) -> `planning` (body, lesions, series, files; no pixels) -> `render` (pixels)
-> `instances` (DICOM files); beside it `render.find_appearances` -> `reports`. `generation` runs all of it
and writes the truth. Everything is a pure function of the options, and every output is marked as generated.
"""

from __future__ import annotations

from shardflow.synthetic.generation import SynthSummary, generate
from shardflow.synthetic.options import (
    DEFAULT_PATHOLOGIES,
    MODALITIES,
    PATHOLOGIES,
    REPORT_ODDITIES,
    SynthOptions,
)

__all__ = [
    "DEFAULT_PATHOLOGIES",
    "MODALITIES",
    "PATHOLOGIES",
    "REPORT_ODDITIES",
    "SynthOptions",
    "SynthSummary",
    "generate",
]
