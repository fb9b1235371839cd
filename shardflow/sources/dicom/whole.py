"""Whether a file that pydicom has parsed was cut: pydicom itself takes what is there and says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydicom import Dataset

__all__ = ["is_whole"]

_UNDEFINED = 0xFFFFFFFF
_TAG_BYTES = 8
"""Of the shortest element: fewer bytes at the end of a file are what is left of one."""


def is_whole(dataset: Dataset, num_bytes: int | None = None) -> bool:
    """Tell whether the elements of a dataset have all bytes that they declare.

    Sequences of undefined length need no look: without their delimiter pydicom raises. A file that was cut
    right between two elements cannot be told from a shorter one.

    Args:
        dataset: As `pydicom.dcmread` returned it, before its elements are touched.
        num_bytes: Size of the file; None where the dataset was deflated or not read to its end.
    """
    from pydicom.dataelem import RawDataElement

    end = 0
    for tag in dataset.keys():  # noqa: SIM118 - iterating over a dataset converts its elements
        element = dataset.get_item(tag)
        if not isinstance(element, RawDataElement) or element.length == _UNDEFINED:
            continue
        if element.value is not None and len(element.value) < element.length:
            return False
        end = max(end, element.value_tell + element.length)
    last = max(dataset.keys(), default=None)
    is_last_raw = last is not None and isinstance(dataset.get_item(last), RawDataElement)
    return num_bytes is None or not is_last_raw or not 0 < num_bytes - end < _TAG_BYTES
