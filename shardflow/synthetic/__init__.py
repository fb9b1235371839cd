"""Generated studies that behave like real ones, with reports, annotations and the whole truth about them.

The data's way: `options` -> `patients` (who, when) -> `planning` (body, lesions, series, files; no pixels)
-> `render` and `stored` (pixels) -> `instances` (DICOM files); beside it `appearances` -> `reports` ->
`truth`. `generation` runs all of it. Everything is a pure function of the options, and every output says that
it is generated.
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
