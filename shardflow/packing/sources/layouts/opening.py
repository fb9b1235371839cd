"""Registry of layouts: maps the kind in a recipe to the class that reads such an input.

Installed packages add layouts as entry points of the group ``shardflow.layouts``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from shardflow.errors import ConfigError
from shardflow.packing.sources.layouts.archives import Chexpert, CtRate, MimicCxr, OpenI, PadChest
from shardflow.packing.sources.layouts.base import LAYOUTS_GROUP, Layout, LayoutInputs, offered_layouts
from shardflow.packing.sources.layouts.bids import Bids
from shardflow.packing.sources.layouts.table_layout import Folder, Headers, Lidc, Manifest, Rsna
from shardflow.packing.sources.layouts.volumes import Decathlon, NnUnet, Pairs, TotalSegmentator

LayoutFactory: TypeAlias = Callable[[LayoutInputs, Sequence[str]], Layout]

_LAYOUTS: Final[dict[str, LayoutFactory]] = {
    "bids": Bids,
    "chexpert": Chexpert,
    "ct-rate": CtRate,
    "folder": Folder,
    "headers": Headers,
    "lidc": Lidc,
    "manifest": Manifest,
    "msd": Decathlon,
    "mimic-cxr": MimicCxr,
    "nnunet": NnUnet,
    "openi": OpenI,
    "padchest": PadChest,
    "pairs": Pairs,
    "rsna": Rsna,
    "totalsegmentator": TotalSegmentator,
}


def open_layout(inputs: LayoutInputs, splits: Sequence[str]) -> Layout:
    """Open the layout of a job; its tables and the first report of a table are read.

    Args:
        inputs: The settings of the inputs.
        splits: Names of the dataset's splits.

    Raises:
        ConfigError: A table is missing, damaged or contradicts itself, a setting does not fit, or the layout
            of another package cannot be imported.
    """
    kind = inputs.layout.kind
    layout = (_LAYOUTS.get(kind) or _load(kind))(inputs, splits)
    source = inputs.reports
    if source is not None and not source.is_dir() and inputs.reports_format != "documents":
        # The first line of a table shows whether it has its columns, before any image is read.
        next(iter(layout.reports()), None)
    return layout


def _load(kind: str) -> LayoutFactory:
    try:
        factory: LayoutFactory = offered_layouts()[kind].load()
    except Exception as error:
        raise ConfigError(
            f"layout {kind!r} (entry point group {LAYOUTS_GROUP}) must be importable, got "
            f"{type(error).__name__}; repair or remove the package that offers it."
        ) from error
    return factory
