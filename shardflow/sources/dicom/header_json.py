"""Headers as JSON: how a plan keeps them between its two passes.

Exact: floats survive, tuples come back as tuples.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from shardflow.sources.dicom.description import ImageDescription
from shardflow.sources.dicom.headers import InstanceHeader
from shardflow.sources.dicom.planes import PlaneHeader
from shardflow.sources.reasons import Reason, source_error

__all__ = ["header_from_json", "header_to_json"]

_HEADER = tuple(field.name for field in fields(InstanceHeader))
_IMAGE = tuple(field.name for field in fields(ImageDescription))
_PLANE = tuple(field.name for field in fields(PlaneHeader))


def header_to_json(header: InstanceHeader) -> dict[str, Any]:
    """Turn a header into an object that ``json.dumps`` takes. It holds identifiers: private folder only."""
    row = {name: getattr(header, name) for name in _HEADER}
    row["image"] = [getattr(header.image, name) for name in _IMAGE]
    row["planes"] = [[getattr(plane, name) for name in _PLANE] for plane in header.planes]
    return row


def header_from_json(row: dict[str, Any]) -> InstanceHeader:
    """Turn such an object back.

    Raises:
        SourceError: HEADER_UNREADABLE where the object is not one that `header_to_json` made.
    """
    try:
        known = {name: _tuples(row[name]) for name in _HEADER if name not in ("image", "planes")}
        image = ImageDescription(**dict(zip(_IMAGE, row["image"], strict=True)))
        planes = tuple(
            PlaneHeader(**dict(zip(_PLANE, map(_tuples, plane), strict=True))) for plane in row["planes"]
        )
        return InstanceHeader(**known, image=image, planes=planes)
    except (KeyError, TypeError, ValueError) as error:
        raise source_error(Reason.HEADER_UNREADABLE, f"stored header: {type(error).__name__}") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
