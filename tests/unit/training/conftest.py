"""Input for tests that train: generated once a session and worker."""

from __future__ import annotations

import pytest

from tests.tiny_runs import TinyInput, make_tiny_input


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    return make_tiny_input(tmp_path_factory.mktemp("tiny"))
