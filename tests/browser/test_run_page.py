"""The page about a run in a real browser, from a file: read-out, zoom, steps and time, dark and paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardflow.monitoring.run_page import read_run, render_comparison, render_run_page
from tests.run_factory import write_run

PATIENCE_MS = 60_000


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


def box_of(page: Any, chart: str, by: str = "step") -> dict[str, float]:
    """Where a chart's plot is on the screen, in view."""
    plot = page.locator(f'figure[data-chart="{chart}"] svg.by-{by} > svg.plot').first
    plot.scroll_into_view_if_needed()
    # In the middle of the screen: at its top lies the bar of buttons.
    plot.evaluate("(one) => one.ownerSVGElement.scrollIntoView({block: 'center'})")
    chart_box: dict[str, float] = page.locator(
        f'figure[data-chart="{chart}"] svg.chart.by-{by}'
    ).bounding_box()
    scale = chart_box["width"] / 960
    return {
        "x": chart_box["x"] + 86 * scale,
        "y": chart_box["y"] + 8 * scale,
        "width": 850 * scale,
        "height": plot.evaluate("(one) => one.height.baseVal.value") * scale,
    }


def view_of(page: Any, chart: str, by: str = "step") -> list[float]:
    text = page.locator(f'figure[data-chart="{chart}"] svg.by-{by} > svg.plot').first.get_attribute("viewBox")
    return [float(part) for part in text.split()]


def test_the_pointer_reads_out_what_was_measured(context: Any, folder: Path, problems: list[str]) -> None:
    page = opened(context, folder / "run.html", problems)
    box = box_of(page, "step_time")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    text = page.inner_text("#readout")
    assert "after 50 steps" in text
    assert "600 ms" in text
    assert "370 ms" in text
    # The same place is marked in all charts.
    assert page.locator("line.cursor").count() == page.locator("svg.chart.by-step").count()
    heat = page.locator('figure[data-heat="compute"] svg.by-step')
    heat.evaluate("(one) => one.scrollIntoView({block: 'center'})")
    area = heat.bounding_box()
    page.mouse.move(area["x"] + area["width"] * 0.5, area["y"] + area["width"] / 960 * 12)
    assert "rank 0" in page.inner_text("#readout")
    assert "30.9 %" in page.inner_text("#readout")
    page.mouse.move(2, 2)
    assert page.is_hidden("#readout")


def test_dragging_looks_closer_at_all_charts_and_a_double_click_goes_back(
    context: Any, folder: Path, problems: list[str]
) -> None:
    page = opened(context, folder / "run.html", problems)
    whole = view_of(page, "step_time")
    assert whole[0] == 0
    assert whole[2] == 10_000
    box = box_of(page, "loss")
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=3)
    page.mouse.up()
    for chart in ("step_time", "loss", "loop", "verdicts"):
        begin, _, width, _ = view_of(page, chart)
        assert begin == pytest.approx(2500, abs=40)
        assert width == pytest.approx(2500, abs=60)
    assert page.inner_text("#range") == "25 to 50"
    labels = page.locator('figure[data-chart="loss"] svg.by-step g.x text').all_text_contents()
    # The pointer stands on whole pixels: whether 50 is still on the axis is theirs.
    assert labels[:4] in (["25", "30", "35", "40"], ["30", "35", "40", "45"])
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    assert any(f"after {steps} steps" in page.inner_text("#readout") for steps in (37, 38))
    page.mouse.dblclick(box["x"] + box["width"] * 0.5, middle)
    assert view_of(page, "loop") == view_of(page, "loop", "time")
    page.locator('figure[data-chart="loss"] svg.by-step').focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    assert view_of(page, "loss")[0] == pytest.approx(3750)
    page.click("#reset")
    assert view_of(page, "loss")[0] == 0
    assert page.is_hidden("#reset")


def test_steps_and_time(context: Any, folder: Path, problems: list[str]) -> None:
    page = opened(context, folder / "run.html", problems)
    assert page.is_visible('figure[data-chart="loss"] svg.by-step')
    page.click("#by-time")
    assert page.is_hidden('figure[data-chart="loss"] svg.by-step')
    assert page.get_attribute("#by-time", "aria-pressed") == "true"
    box = box_of(page, "step_time", "time")
    page.mouse.move(box["x"] + box["width"] * 0.999, box["y"] + box["height"] / 2)
    assert "after 100 steps, 2 min" in page.inner_text("#readout")
    assert page.locator('figure[data-chart="step_time"] svg.by-time .band.lost').is_visible()


def test_two_runs_are_read_out_together(context: Any, folder: Path, problems: list[str]) -> None:
    page = opened(context, folder / "compare.html", problems)
    box = box_of(page, "step_time")
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] / 2)
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
    assert page.is_hidden("#tools")
    # Nothing reaches beyond a laptop's width.
    page.emulate_media(media="screen")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
