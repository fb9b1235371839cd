"""Registry of layouts: the name in a recipe, and the class that reads such an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from shardflow.packing.sources.layouts.archives import Chexpert, CtRate, MimicCxr, OpenI, PadChest
from shardflow.packing.sources.layouts.base import Layout, LayoutInputs
from shardflow.packing.sources.layouts.folders import Folder, Headers, Lidc, Rsna
from shardflow.packing.sources.layouts.table_layout import Manifest

_LAYOUTS: Final[dict[str, Callable[[LayoutInputs, Sequence[str]], Layout]]] = {
    "chexpert": Chexpert,
    "ct-rate": CtRate,
    "folder": Folder,
    "headers": Headers,
    "lidc": Lidc,
    "manifest": Manifest,
    "mimic-cxr": MimicCxr,
    "openi": OpenI,
    "padchest": PadChest,
    "rsna": Rsna,
}


def open_layout(inputs: LayoutInputs, splits: Sequence[str]) -> Layout:
    """Open the layout of a job; its tables are read.

    Args:
        inputs: The settings of the inputs.
        splits: Names of the dataset's splits.

    Raises:
        ConfigError: A table is missing, damaged or contradicts itself, or a setting does not fit.
    """
    return _LAYOUTS[inputs.layout.kind](inputs, splits)
