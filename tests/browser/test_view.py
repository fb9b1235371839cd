"""The page in a real browser: lists, wheel, window, findings, regions, keys, themes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.format import Dataset
from shardflow.loading.crops import StepCrops
from shardflow.viewing import Viewer
from tests.integration.test_mask_bricks import extra_of
from tests.viewing_case import NUM_SLICES, make_viewed_dataset
from tests.volume_cases import VolumeSeries, affine_of, make_volumes

PATIENCE_MS = 240_000


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("viewed") / "dataset"
    make_viewed_dataset(folder)
    with Viewer(Dataset.open(folder)) as viewer:
        yield viewer.url


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 720}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    made = context.new_page()
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    made.on(
        "request", lambda request: problems.append(request.url) if not _is_own(request.url, address) else None
    )
    made.goto(address)
    drawn(made, 0, NUM_SLICES // 2)
    yield made
    context.close()
    assert problems == []


def _is_own(url: str, address: str) -> bool:
    return url.startswith((address.partition("?")[0], "data:"))


def drawn(page: Any, row: int, index: int, series: int = 0) -> None:
    """Wait until a slice is on the canvas."""
    page.wait_for_selector(f'#canvas[data-drawn="{row}/{series}/{index}/"]')


def settled(page: Any, expression: str) -> None:
    """Wait until an expression is true; polled from here, because the page's policy lets nobody evaluate."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        time.sleep(0.02)


def rows(page: Any, number: int) -> None:
    """Wait until the list has a number of studies."""
    settled(page, f"document.querySelectorAll('#rows li').length === {number}")


def pixel(page: Any, x: float, y: float) -> list[int]:
    """Colour at a place of the canvas, in parts of its width and height."""
    found: list[int] = page.evaluate(
        "([x, y]) => { const c = document.getElementById('canvas');"
        "return [...c.getContext('2d').getImageData(x * c.width, y * c.height, 1, 1).data]; }",
        [x, y],
    )
    return found


def test_wheel_keys_and_slider_change_the_slice(page: Any) -> None:
    middle = NUM_SLICES // 2
    page.mouse.move(600, 400)
    page.mouse.wheel(0, 100)
    drawn(page, 0, middle + 1)
    page.mouse.wheel(0, -100)
    drawn(page, 0, middle)
    page.keyboard.press("ArrowDown")
    drawn(page, 0, middle + 1)
    page.keyboard.press("End")
    drawn(page, 0, NUM_SLICES - 1)
    page.keyboard.press("ArrowDown")
    drawn(page, 0, NUM_SLICES - 1)
    page.keyboard.press("Home")
    drawn(page, 0, 0)
    page.fill("#scrub", "7")
    drawn(page, 0, 7)
    assert "slice 8 of 24" in page.inner_text("#where")


def test_dragging_widens_the_window_and_r_brings_it_back(page: Any) -> None:
    assert page.inner_text("#window") == "C 0 W 2000"
    page.mouse.move(600, 400)
    page.mouse.down()
    page.mouse.move(700, 380, steps=4)
    page.mouse.up()
    centre, width = (int(part) for part in page.inner_text("#window")[2:].split(" W "))
    assert width > 2000
    assert centre < 0
    page.select_option("#preset", label="lung")
    assert page.inner_text("#window") == "C -600 W 1500"
    page.keyboard.press("Escape")
    page.focus("#canvas")
    page.keyboard.press("r")
    assert page.inner_text("#window") == "C 0 W 2000"


def test_inverting_turns_dark_into_bright(page: Any) -> None:
    page.select_option("#preset", label="stroke")  # nearly black and white
    before = pixel(page, 0.5, 0.5)[0]
    page.click("#invert")
    assert pixel(page, 0.5, 0.5)[0] == 255 - before


def test_click_on_a_finding_leads_to_its_slices_with_evidence(page: Any) -> None:
    mark = page.locator("mark.present[data-entity]")
    assert mark.inner_text() == "nodule"
    # Behind a character of two halves.
    assert page.locator("mark.absent[data-entity]").inner_text() == "effusion"
    mark.click()
    drawn(page, 0, 5)
    card = page.inner_text("#finding")
    assert "0.97" in card
    assert "E1 0.98 series and image named" in card
    assert "series 1, images 5 to 7" in card  # as the report counts, not from 0
    page.locator("mark.absent[data-entity]").click()
    assert "No slices" in page.inner_text("#finding")


def test_an_ecg_is_drawn_in_millimetres(page: Any) -> None:
    page.select_option("#series", label="ECG 0: dicom-waveform, 12 channels, 20 s")
    page.wait_for_selector('#strip[data-drawn="0/0/0/0"]')
    assert not page.is_visible("#canvas")
    assert "12 channels at 100 Hz · 25 mm/s, 10 mm/mV" in page.inner_text("#where")
    millimetre = float(page.get_attribute("#strip", "data-millimetre"))
    # The first lead is half a millivolt up for a second, and half down for the next.
    assert trace(page, 0.5, 0) - trace(page, 1.5, 0) == pytest.approx(-10 * millimetre, abs=2)
    assert trace(page, 0.5, 5) == pytest.approx(trace(page, 1.5, 5), abs=1)
    page.select_option("#gain", label="5 mm/mV")
    assert trace(page, 0.5, 0) - trace(page, 1.5, 0) == pytest.approx(-5 * millimetre, abs=2)
    page.select_option("#speed", label="50 mm/s")
    settled(page, "document.getElementById('where').textContent.includes('50 mm/s')")


def trace(page: Any, second: float, channel: int) -> float:
    """Height of the trace of one of twelve channels at a second of what is seen at 25 mm/s, in CSS pixels."""
    found: float = page.evaluate(
        """([second, channel]) => {
            const strip = document.getElementById('strip'), ratio = strip.width / strip.clientWidth;
            const x = 74 + second * 25 * Number(strip.dataset.millimetre);
            const row = (strip.clientHeight - 18) / 12, middle = 18 + (channel + 0.5) * row;
            const reach = Math.round(0.7 * row * ratio), top = Math.round(middle * ratio) - reach;
            const pixels = strip.getContext('2d').getImageData(Math.round(x * ratio), top, 1, 2 * reach).data;
            let [sum, weight] = [0, 0];
            for (let at = 0; at < 2 * reach; at++) {
                const dark = Math.max(0, 200 - pixels[4 * at]);
                sum += at * dark; weight += dark;
            }
            return (top + sum / weight) / ratio;
        }""",
        [second, channel],
    )
    return found


def test_a_recording_is_scrolled_and_left(page: Any) -> None:
    page.keyboard.press("ArrowRight")
    page.wait_for_selector('#strip[data-drawn="0/0/0/0"]')
    page.keyboard.press("ArrowRight")
    page.wait_for_selector('#strip[data-drawn="0/1/0/0"]')
    where = page.inner_text("#where")
    assert "0 s to 10 s of 60 min" in where
    assert "truncated" in where
    page.mouse.move(600, 400)
    page.mouse.wheel(0, 100)
    page.wait_for_selector('#strip[data-drawn="0/1/0/1"]')
    assert "1 s to 11 s" in page.inner_text("#where")
    page.keyboard.press("End")
    settled(page, "document.getElementById('where').textContent.startsWith('59:50 to 1:00:00')")
    page.select_option("#speed", label="60 min")
    settled(page, "document.getElementById('where').textContent.startsWith('0 s to 1:00:00')")
    page.focus("#strip")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    drawn(page, 0, NUM_SLICES // 2)
    assert page.is_visible("#canvas")
    assert "slice 13 of 24" in page.inner_text("#where")


def test_documents_are_shown_as_text(page: Any) -> None:
    page.click("#documents-tab")
    settled(page, "document.getElementById('documents').textContent.includes('seen again')")
    text = page.inner_text("#documents")
    assert "Document 0 summary, " in text
    assert "<b>of nobody</b>" in text  # never markup
    assert "A second one." not in text
    page.locator("#documents summary").nth(1).click()
    settled(page, "document.getElementById('documents').textContent.includes('A second one.')")
    page.keyboard.press("j")
    drawn(page, 1, NUM_SLICES // 2)
    assert not page.is_visible("#documents-tab")
    assert page.is_visible("#report")


def test_markup_in_a_report_is_text(page: Any) -> None:
    assert "<img src=x onerror=alert(1)>" in page.inner_text("#report")
    assert page.evaluate("document.querySelectorAll('#report img, #report script').length") == 0


def test_the_token_is_not_left_in_the_address_bar(page: Any) -> None:
    assert page.evaluate("location.search") == ""
    page.reload()
    drawn(page, 0, NUM_SLICES // 2)


def test_regions_are_drawn_over_their_slice_and_can_be_hidden(page: Any) -> None:
    page.uncheck("#regions")
    page.fill("#scrub", "5")
    drawn(page, 0, 5)
    plain = page.evaluate(_SUM_OF_COLOUR)
    page.check("#regions")
    settled(page, f"({_SUM_OF_COLOUR}) > {plain} + 1000")
    page.focus("#canvas")
    page.keyboard.press("m")
    settled(page, f"({_SUM_OF_COLOUR}) === {plain}")


_SUM_OF_COLOUR = (
    "(() => { const c = document.getElementById('canvas');"
    "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let sum = 0;"
    "for (let at = 0; at < d.length; at += 4) sum += Math.abs(d[at] - d[at + 2]); return sum; })()"
)


def test_search_narrows_the_list_and_j_opens_the_next(page: Any) -> None:
    assert page.locator("#rows li").count() == 10
    page.select_option("#split", "val")
    rows(page, 2)
    page.select_option("#split", "")
    rows(page, 10)
    page.focus("#concept")
    page.wait_for_selector("#concept option[value=effusion]", state="attached")
    page.select_option("#concept", "effusion")
    rows(page, 5)
    page.select_option("#concept", "")
    rows(page, 10)
    page.focus("#canvas")
    page.keyboard.press("j")
    drawn(page, 1, NUM_SLICES // 2)
    page.keyboard.press("/")
    page.keyboard.type("val:1")
    rows(page, 1)
    page.click("#rows li")
    drawn(page, 9, NUM_SLICES // 2)
    assert page.inner_text("#rows li b") == "MR val:1"


def test_inputs_and_steps_lead_to_their_studies(page: Any) -> None:
    page.click("[data-page=inputs]")
    page.click("#inputs tr.chooses")
    page.wait_for_selector("#inputs code")
    assert page.locator("#inputs code").count() == 20  # input and sample of ten
    page.click("[data-page=steps]")
    page.fill("#steps input[name=seed]", "7")
    page.click("#steps form button")
    page.wait_for_selector("#steps tr.chooses")
    assert page.locator("#steps tr.chooses").count() == 8
    page.locator("#steps tr.chooses").first.click()
    page.wait_for_selector("#studies:not([hidden])")


def test_details_and_both_themes(page: Any) -> None:
    page.click("[data-side=about-study]")
    assert "series.0.modality" in page.inner_text("#about-study")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert light != dark
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()


def test_every_slice_of_a_series_is_drawn_when_scrolled_through(page: Any) -> None:
    page.keyboard.press("Home")
    drawn(page, 0, 0)
    for index in range(1, NUM_SLICES):
        page.keyboard.press("ArrowDown")
        drawn(page, 0, index)


def test_what_is_damaged_is_said_and_asked_for_once(browser: Any, tmp_path: Path) -> None:
    make_viewed_dataset(tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    middle = NUM_SLICES // 2
    for name in (f"s000.i{middle:04d}.b2nd", "report.txt"):
        shard, fields = dataset.sample_fields(0)
        field = next(one for one in fields if one.name == name)
        with (tmp_path / "dataset" / shard).open("r+b") as tar:
            tar.seek(field.offset)
            first = tar.read(1)
            tar.seek(field.offset)
            tar.write(bytes([first[0] ^ 1]))
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    asked: list[str] = []
    with Viewer(Dataset.open(tmp_path / "dataset")) as viewer:
        page = context.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto(viewer.url)
        settled(page, "document.getElementById('note').textContent.includes('shardflow verify')")
        assert "has no report" not in page.inner_text("#report")
        assert "report.txt" in page.inner_text("#report")
        page.keyboard.press("ArrowDown")
        drawn(page, 0, middle + 1)
        assert page.inner_text("#note") == ""
        page.keyboard.press("ArrowUp")
        settled(page, "document.getElementById('note').textContent.includes('shardflow verify')")
        page.keyboard.press("Home")
        drawn(page, 0, 0)
    context.close()
    assert sum(url.endswith(f"/slices/0/{middle}") for url in asked) == 1


def test_a_study_that_comes_late_does_not_cover_the_one_chosen_after_it(page: Any, address: str) -> None:
    held: list[Any] = []

    def hold(route: Any) -> None:  # playwright looks into a function, which it cannot with `list.append`
        held.append(route)

    page.route("**/api/samples/3", hold)
    page.evaluate(
        "() => { const all = document.querySelectorAll('#rows li'); all[3].click(); all[4].click(); }"
    )
    drawn(page, 4, NUM_SLICES // 2)
    with page.expect_response(f"{address.partition('?')[0]}api/samples/3") as late:
        held[0].continue_()
    late.value.finished()
    page.unroute("**/api/samples/3")
    # When this answer is there, the page has long had the other one.
    page.evaluate("fetch('api/samples/3').then((answer) => answer.json()).then(() => 0)")
    assert page.evaluate("location.hash") == "#4"


# ---- planes of volumes --------------------------------------------------------------------------------

SHAPE = (11, 14, 13)
"""Slices, rows and columns of volumes, in millimeters 2, 1 and 1."""


def _series(number: int) -> list[VolumeSeries]:
    """Voxels whose value says where they are, below the white of a crop."""
    slices, rows, columns = np.indices(SHAPE)
    voxels = (10 * slices + 6 * rows + 3 * columns - 100 + number).astype(np.int16)
    return [VolumeSeries(voxels=voxels, affine=affine_of((2, 1, 1)))]


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of viewers of the same volumes, in slices and in bricks."""
    folder = tmp_path_factory.mktemp("volumes")
    make_volumes(folder / "slices", _series, num_samples=4, extra_of=extra_of)
    assert cli.main(["copy", str(folder / "slices"), str(folder / "bricks"), "--volumes", "bricks"]) == 0
    bricks = Dataset.open(folder / "bricks")
    crops = StepCrops(bricks, {"ct": sf.Volume(roi_size=(4, 6, 6), num_samples=2)})
    with Viewer(Dataset.open(folder / "slices")) as first, Viewer(bricks, steps=crops) as second:
        yield {"slices": first.url, "bricks": second.url}


@pytest.fixture
def planes(browser: Any, volumes: dict[str, str]) -> Iterator[dict[str, Any]]:
    context = browser.new_context(viewport={"width": 1280, "height": 720}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    problems: list[str] = []
    made = {}
    for storage, url in volumes.items():
        made[storage] = page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on(
            "request",
            lambda request, url=url: problems.append(request.url) if not _is_own(request.url, url) else None,
        )
        page.goto(url)
        drawn(page, 0, SHAPE[0] // 2)
    yield made
    context.close()
    assert problems == []


def at(page: Any, *place: int) -> None:
    """Wait until three planes are on the canvas."""
    page.wait_for_selector(f'#canvas[data-planes="{place[0]}/{place[1]}/{place[2]}"]')


def test_three_planes_are_those_of_slices_and_of_bricks(planes: dict[str, Any]) -> None:
    page = planes["bricks"]
    page.keyboard.press("p")
    at(page, 5, 7, 6)
    assert "slice 6 of 11 · row 8, column 7" in page.inner_text("#where")
    # The head is up across slices, and voxels are what they are: the plane at the right top is that of row 7.
    top, bottom = pixel(page, 0.75, 0.1)[0], pixel(page, 0.75, 0.4)[0]
    assert top > bottom
    for each in planes.values():
        each.bring_to_front()
        each.uncheck("#planes")
        each.check("#planes")
        at(each, 5, 7, 6)
        settled(each, f"({_SUM_OF_COLOUR}) > 20000")
    # Tints of regions arrive one by one.
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while len({each.evaluate(_PICTURE) for each in planes.values()}) > 1:
        assert time.monotonic() < deadline, "planes of slices and of bricks differ"
        time.sleep(0.05)


_PICTURE = "document.getElementById('canvas').toDataURL()"


def test_wheel_and_click_move_planes(planes: dict[str, Any]) -> None:
    page = planes["bricks"]
    page.check("#planes")
    at(page, 5, 7, 6)
    box = page.locator("#canvas").bounding_box()

    def point(x: float, y: float) -> tuple[float, float]:
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    page.mouse.move(*point(0.75, 0.25))
    page.mouse.wheel(0, 100)
    at(page, 5, 8, 6)
    page.mouse.move(*point(0.75, 0.75))
    page.mouse.wheel(0, -100)
    at(page, 5, 8, 5)
    page.mouse.move(*point(0.25, 0.5))
    page.mouse.wheel(0, 100)
    at(page, 6, 8, 5)
    page.mouse.click(*point(0.25, 0.5))  # the middle of the slice
    at(page, 6, 7, 6)
    page.mouse.click(*point(0.75, 0.04))  # the uppermost slice of the plane at the right top
    at(page, 10, 7, 6)
    page.keyboard.press("p")
    drawn(page, 0, 10)
    assert page.get_attribute("#canvas", "data-planes") == ""


def test_crops_of_a_step_are_drawn_where_they_are(planes: dict[str, Any]) -> None:
    page = planes["bricks"]
    page.click("[data-page=steps]")
    page.fill("#steps input[name=count]", "2")
    page.click("#steps form button")
    page.wait_for_selector("#steps tr.chooses")
    assert page.locator("#steps tr.chooses").count() == 4  # two samples of two crops
    cells = page.locator("#steps tr.chooses").first.locator("td").all_inner_texts()
    name, series, *spans = cells[3].replace(",", "").split()[:1] + cells[3].replace(",", "").split()[2:]
    assert (name, series) == ("ct:", "0")
    first, last = zip(*(map(int, span.split(":")) for span in spans), strict=True)
    assert [stop - start for start, stop in zip(first, last, strict=True)] == [4, 6, 6]
    page.locator("#steps tr.chooses").first.click()
    middle = [(start + stop - 1) / 2 for start, stop in zip(first, last, strict=True)]
    at(page, *(int(place + 0.5) for place in middle))
    white = page.evaluate(_WHITE_ROWS_AND_COLUMNS)
    # The slice fills the left half of the canvas: 14 rows in 0.96 of its width or height.
    size = page.evaluate(
        "(() => { const c = document.getElementById('canvas'); return [c.width, c.height]; })()"
    )
    fit = 0.96 * min(size[0] / 2 / SHAPE[2], size[1] / SHAPE[1])
    left, top = size[0] / 4 - fit * SHAPE[2] / 2, size[1] / 2 - fit * SHAPE[1] / 2
    expected = [left + first[2] * fit, left + last[2] * fit, top + first[1] * fit, top + last[1] * fit]
    assert white == pytest.approx(expected, abs=4)
    page.locator("#rows li[aria-current]").click()  # from the list there are none
    settled(page, f"({_WHITE_ROWS_AND_COLUMNS}) === null")


_WHITE_ROWS_AND_COLUMNS = (
    "(() => { const c = document.getElementById('canvas'), w = c.width >> 1;"
    "const d = c.getContext('2d').getImageData(0, 0, w, c.height).data; const xs = [], ys = [];"
    "for (let at = 0; at < d.length; at += 4) if (d[at] + d[at + 1] + d[at + 2] === 765) {"
    "xs.push((at >> 2) % w); ys.push(Math.floor((at >> 2) / w)); }"
    "const ends = (a) => a.reduce(([l, h], v) => [Math.min(l, v), Math.max(h, v)], [Infinity, -Infinity]);"
    "return xs.length ? [...ends(xs), ...ends(ys)] : null; })()"
)
"""Least and greatest column and row of white pixels in the left half of the canvas."""
