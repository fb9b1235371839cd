"""The reader's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.reader import make_reader_folder


@pytest.fixture(scope="session")
def reader(once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """The folder that a reader has after step 4 of the tutorial, to be copied."""
    return once("reader", make_reader_folder)
