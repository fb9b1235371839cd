"""The page about a run in a real browser, from a file: read-out, dark mode and paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardflow.monitoring.run_page.compare import render_comparison
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import read_run
from tests.run_factory import write_run

PATIENCE_MS = 240_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run-page")
    runs = (
        read_run(write_run(made / "first", num_steps=100, world_size=4, restart_at=45)),
        read_run(write_run(made / "second", bound="straggler", num_steps=50, world_size=4)),
    )
    (made / "run.html").write_text(render_run_page(runs[0]), encoding="utf-8")
    (made / "compare.html").write_text(render_comparison(runs), encoding="utf-8")
    return made


@pytest.fixture
def context(browser: Any) -> Iterator[Any]:
    made = browser.new_context(viewport={"width": 1280, "height": 720}, color_scheme="light")
    made.set_default_timeout(PATIENCE_MS)
    yield made
    made.close()


@pytest.fixture
def problems() -> Iterator[list[str]]:
    found: list[str] = []
    yield found
    assert found == []


def opened(context: Any, path: Path, problems: list[str]) -> Any:
    page = context.new_page()
    page.on("pageerror", lambda error: problems.append(str(error)))
    # What the policy forbids is an error of the console.
    page.on("console", lambda message: problems.append(message.text))
    page.on("request", lambda request: problems.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page


def point_at(page: Any, chart: str, share: float) -> None:
    """Move the pointer over a chart, to a share of its plot's width."""
    found = page.locator(f'figure[data-chart="{chart}"] svg.chart')
    found.evaluate("(one) => one.scrollIntoView({block: 'center'})")
    box = found.bounding_box()
    scale = box["width"] / 960
    page.mouse.move(box["x"] + (86 + 850 * share) * scale, box["y"] + 40 * scale)


def test_the_pointer_reads_out_what_was_measured(context: Any, folder: Path, problems: list[str]) -> None:
    page = opened(context, folder / "run.html", problems)
    point_at(page, "step_time", 0.5)
    text = page.inner_text("#readout")
    assert "after 50 steps" in text
    assert "600 ms" in text
    assert "370 ms" in text
    # The same place is marked in all charts.
    assert page.locator("line.cursor").count() == page.locator("svg.chart").count()
    page.mouse.move(2, 2)
    assert page.is_hidden("#readout")


def test_two_runs_are_read_out_together(context: Any, folder: Path, problems: list[str]) -> None:
    page = opened(context, folder / "compare.html", problems)
    point_at(page, "step_time", 0.3)
    text = page.inner_text("#readout")
    assert "A first" in text
    assert "970 ms" in text
    assert "B second" in text
    assert "830 ms" in text
    assert "run-page" not in page.content()


def test_dark_and_paper_follow_the_reader(context: Any, folder: Path, problems: list[str]) -> None:
    page = opened(context, folder / "run.html", problems)

    def background() -> str:
        found: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return found

    assert background() == "rgb(246, 248, 250)"
    page.emulate_media(color_scheme="dark")
    assert background() == "rgb(13, 17, 23)"
    page.emulate_media(color_scheme="dark", media="print")
    assert background() == "rgb(255, 255, 255)"
    # Nothing reaches beyond a laptop's width.
    page.emulate_media(media="screen")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
