"""Silence around third-party parsers: their warnings, logs and errors quote the values of the file."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["third_party_silence"]

_NOTHING = logging.CRITICAL + 1


@contextlib.contextmanager
def third_party_silence() -> Iterator[None]:
    """Drop every warning and every log record of pydicom inside the block.

    What matters in them is found by our own checks and comes back as a flag or a reason; their text (pydicom
    writes ``Invalid value for VR UI: '<the value>'``) may hold identifiers. Exceptions pass: the caller keeps
    their class and drops their text. Warning filters belong to the process, so use one thread a process here.
    """
    logger = logging.getLogger("pydicom")
    level = logger.level
    logger.setLevel(_NOTHING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
