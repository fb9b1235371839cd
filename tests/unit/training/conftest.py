"""Input for tests that train, generated once a session and worker; what failed runs leave is taken down."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.tiny_runs import TinyInput, make_tiny_input


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def goodbye() -> Iterator[None]:
    """A failed run leaves its process group, because the process ends; this one lives on.

    A group that stood before the test belongs to the file (`test_step.py` joins one for all of its tests).
    """
    stood = _group_stands()
    yield
    if _group_stands() and not stood:
        sys.modules["torch.distributed"].destroy_process_group()


def _group_stands() -> bool:
    distributed = sys.modules.get("torch.distributed")  # quick tests do without torch
    return distributed is not None and distributed.is_initialized()
