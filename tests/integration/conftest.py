"""What is so before each test of this folder."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def own_threads() -> None:
    """Let `loader_threads` count those of the test at hand."""
    from tests.integration.loader_support import forget_threads

    forget_threads()
