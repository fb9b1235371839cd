"""One browser for all tests of pages: Debian's Chromium, installed where it is missing and may be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.packages import find_program, install_programs


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    if find_program("chromium-browser") is None:
        install_programs(("chromium",), ("chromium",), otherwise="no Chromium on this machine")
    program = find_program("chromium") or find_program("chromium-browser")
    with sync_playwright() as playwright:
        # Tests run as root in a container, where Chromium's own sandbox cannot.
        made = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield made
        made.close()
