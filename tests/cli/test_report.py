"""``shardflow report``: one offline page whose numbers another way of counting gives too."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import cv2
import numpy as np
import pytest

from shardflow.cli.main import EXIT_CONFIGURATION, main
from shardflow.format import Dataset
from shardflow.viewing import Bounds, gather, render_page
from shardflow.viewing.dataset_facts import (
    HU_START,
    HU_STEP,
    HU_STOP,
    Histogram,
    count_hounsfield,
    key_hashes,
)
from shardflow.viewing.page import bars, hounsfield_chart
from tests.cli.conftest import Call
from tests.factories import make_dataset
from tests.run_factory import write_run

LIMITS: Final[dict[str, Any]] = {"kept_keywords": ("Rows", "Columns"), "max_age_years": 90}

pytestmark = pytest.mark.fast


def _lowest(dataset: Dataset, wanted: int) -> list[str]:
    """Places of the samples whose keys hash lowest, one by one."""
    keys = [dataset.samples.sample_key(row) for row in range(dataset.samples.num_samples)]
    hashes = [int(key_hashes(np.array([key.encode()]))[0]) for key in keys]
    rows = sorted(sorted(range(len(keys)), key=hashes.__getitem__)[:wanted])
    return [
        next(f"{split}:{row - rows.start}" for split, rows in dataset.splits.items() if row in rows)
        for row in rows
    ]


def _write(call: Call, dataset: Path, page: Path, *options: object) -> str:
    called = call("report", dataset, "-o", page, *options)
    assert called.code == 0, called.err
    return page.read_text(encoding="utf-8")


def test_page_asks_for_nothing_and_is_well_formed(call: Call, dataset: Path, tmp_path: Path) -> None:
    text = _write(call, dataset, tmp_path / "report.html")
    outside = re.sub(r"data:image/jpeg;base64,[A-Za-z0-9+/=]+", "", text)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|<iframe", outside)
    assert "default-src 'none'" in text
    assert str(tmp_path) not in text

    open_tags: list[str] = []

    class _Checker(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in {"meta", "img"} | {"line", "rect"} or tag == "rect":
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert open_tags.pop() == tag

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

    checker = _Checker()
    checker.feed(text)
    checker.close()
    assert open_tags == []


def test_same_dataset_gives_the_same_page_for_any_number_of_threads(
    call: Call, dataset: Path, tmp_path: Path
) -> None:
    one = _write(call, dataset, tmp_path / "a.html", "--threads", 1)
    assert _write(call, dataset, tmp_path / "b.html", "--threads", 5) == one


def test_counts_are_those_of_every_pixel(dataset: Path) -> None:
    opened = Dataset.open(dataset)
    facts = gather(opened)
    num_slices = int(opened.samples.column("num_slices").sum())
    assert facts.num_ct_slices == facts.num_ct_slices_counted == num_slices
    assert int(facts.hounsfield.sum()) == num_slices * 16 * 16
    assert facts.modalities == {"train": {"CT": 13}, "val": {"CT": 3}}
    assert facts.slices.total == facts.spacing.total == facts.gap.total == 16
    assert len(facts.thumbnails) == 16
    assert (facts.num_generated, facts.num_not_described) == (0, 0)
    picture = cv2.imdecode(np.frombuffer(facts.thumbnails[0].picture.jpeg, np.uint8), cv2.IMREAD_UNCHANGED)
    assert picture is not None
    assert picture.shape == (168, 168)
    fewer = gather(opened, slices_per_series=1, num_thumbnails=3)
    assert fewer.num_ct_slices_counted == 16
    assert int(fewer.hounsfield.sum()) == 16 * 16 * 16
    assert [thumbnail.place for thumbnail in fewer.thumbnails] == _lowest(opened, 3)
    assert "16 of" in render_page(opened, fewer, **LIMITS)


@pytest.mark.parametrize("bounds", [None, Bounds(num_studies=6, num_ct_slices=4)], ids=["all", "bounded"])
def test_facts_are_those_of_one_block_of_rows_and_of_many(
    dataset: Path, bounds: Bounds | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Dataset.open(dataset)
    one = gather(opened, num_thumbnails=3, bounds=bounds)
    assert [thumbnail.place for thumbnail in one.thumbnails] == _lowest(opened, 3)
    monkeypatch.setattr("shardflow.viewing.dataset_facts._ROWS_AT_ONCE", 2)
    many = gather(opened, num_thumbnails=3, bounds=bounds)
    assert render_page(opened, many, **LIMITS) == render_page(opened, one, **LIMITS)


def test_a_fast_page_says_how_much_of_the_dataset_it_counted(
    call: Call, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.cli.report.Bounds", lambda: Bounds(num_studies=5, num_ct_slices=3))
    assert "5 of 16 studies" in _write(call, dataset, tmp_path / "a.html", "--fast")
    assert "5 of 16 studies" not in _write(call, dataset, tmp_path / "a.html")
    called = call("report", dataset, "-o", tmp_path / "a.html", "--fast", "--ct-slices", 2)
    assert (called.code, "give one" in called.err) == (2, True)


def test_gallery_holds_pictures_or_nothing(call: Call, dataset: Path, tmp_path: Path) -> None:
    text = _write(call, dataset, tmp_path / "a.html", "--thumbnails", 2)
    pictures = re.findall(r"data:image/jpeg;base64,([^\"]+)", text)
    assert len(pictures) == 2
    assert all(base64.b64decode(picture).startswith(b"\xff\xd8") for picture in pictures)
    assert "pixels of patients" in text
    text = _write(call, dataset, tmp_path / "a.html", "--thumbnails", 0)
    assert "data:image" not in text


def test_reports_reach_neither_page_nor_output(call: Call, dataset: Path, tmp_path: Path) -> None:
    opened = Dataset.open(dataset)
    text = _write(call, dataset, tmp_path / "a.html")
    for row in range(opened.samples.num_samples):
        assert opened.read_fields(row)["report.txt"].decode() not in text


def test_json(call: Call, dataset: Path, tmp_path: Path) -> None:
    (said,) = call("report", dataset, "-o", tmp_path / "a.html", "--json").lines
    assert said["samples"] == 16
    assert said["bytes"] == (tmp_path / "a.html").stat().st_size


def test_damage_writes_no_page(call: Call, dataset: Path, tmp_path: Path) -> None:
    shard = dataset / "shards" / "train-000000.tar"
    shard.chmod(0o644)
    data = bytearray(shard.read_bytes())
    data[512] ^= 1
    shard.write_bytes(data)
    called = call("report", dataset, "-o", tmp_path / "a.html")
    assert called.code == 1
    assert "crc32c" in called.err
    assert not (tmp_path / "a.html").exists()


def test_too_many_thumbnails_are_refused(dataset: Path, tmp_path: Path) -> None:
    assert main(["report", str(dataset), "-o", str(tmp_path / "a"), "--thumbnails", "501"]) == 2


def test_dataset_of_no_slices_is_shown(tmp_path: Path) -> None:
    opened = Dataset.open(make_dataset(tmp_path / "d", num_samples=2, slices=0))
    text = render_page(opened, gather(opened), **LIMITS)
    assert "holds no CT" in text
    assert json.dumps(opened.dataset_id)[1:-1] in text


def test_bins_hold_every_value_once() -> None:
    histogram = Histogram.between([0, 1, 2.5], " mm")
    for value in (-1.0, 0.0, 0.99, 1.0, 2.5, 1e9, None):
        histogram.add(value)
    assert histogram.counts.tolist() == [3, 1, 2]
    assert histogram.unknown == 1
    assert histogram.labels == ("0 to 1 mm", "1 to 2.5 mm", "2.5 mm or more")
    doubling = Histogram.doubling(16)
    assert doubling.labels == ("0", "1", "2", "3-4", "5-8", "9 or more")
    doubling.add_all(np.array([0, 1, 2, 3, 4, 5, 8, 9, 16, 17]))
    assert doubling.counts.tolist() == [1, 1, 1, 2, 2, 3]


def test_hounsfield_bins_are_exact_at_their_edges() -> None:
    values = [-32768, HU_START - 1, HU_START, HU_START + HU_STEP - 1, HU_STOP - 1, HU_STOP, 32767]
    for dtype in (np.int16, np.float32, np.int32):
        counts = count_hounsfield(np.array(values, dtype))
        assert (counts[0], counts[1], counts[-2], counts[-1]) == (2, 2, 1, 2)
        assert counts.sum() == 7
    assert count_hounsfield(np.array([np.nan, 1e30], np.float32)).sum() == 1
    every = np.arange(-32768, 32768)
    slow, fast = count_hounsfield(every.astype(np.int32)), count_hounsfield(every.astype(np.int16))
    assert fast.tolist() == slow.tolist()


def test_charts_escape_names_and_leave_out_empty_ends() -> None:
    chart = bars("<b>", ["zero", "a<b", "c", "none"], [0, 3, 0, 0])
    assert "&lt;b&gt;" in chart
    assert "a&lt;b: 3" in chart
    assert "zero" not in chart
    assert "nothing" in bars("t", ["a"], [0])
    assert "no CT" in hounsfield_chart([5, 0, 0, 5])
    assert hounsfield_chart([0, 1, 0]).count("<rect") == 1


def test_pixels_with_burned_in_text_are_left_out(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def burned_in(payload: bytes | None) -> list[dict[str, object]]:
        series: list[dict[str, object]] = json.loads(payload or b"")["series"]
        return [one | {"technical": {"burned_in_annotation": "YES"}} for one in series]

    monkeypatch.setattr("shardflow.viewing.dataset_facts._series_of", burned_in)
    opened = Dataset.open(dataset)
    facts = gather(opened, num_thumbnails=3)
    assert (facts.thumbnails, facts.num_burned_in) == ([], 3)
    assert "burned into" in render_page(opened, facts, **LIMITS)


def test_sample_without_a_description_is_counted(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardflow.viewing.dataset_facts._series_of", lambda _: None)
    opened = Dataset.open(dataset)
    facts = gather(opened)
    assert (facts.num_not_described, facts.num_ct_slices, facts.thumbnails) == (16, 0, [])
    assert "16 samples have no description" in render_page(opened, facts, **LIMITS)


def test_a_run_and_two_runs_give_a_page(call: Call, tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", num_steps=40)
    second = write_run(tmp_path / "second", bound="compute", num_steps=20)
    page = tmp_path / "run.html"
    called = call("report", first, "-o", page)
    assert called.code == 0, called.err
    assert called.out.startswith("40 steps, ")
    text = page.read_text(encoding="utf-8")
    assert "Training run" in text
    assert str(tmp_path) not in text
    called = call("report", first, second, "-o", page, "--json")
    assert called.last_line == {
        "runs": ["first", "second"],
        "steps": [40, 20],
        "bytes": page.stat().st_size,
        "damaged_lines": [0, 0],
    }
    assert "What differs" in page.read_text(encoding="utf-8")


def test_what_is_no_run_is_refused_in_a_sentence(call: Call, dataset: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=5)
    page = tmp_path / "page.html"
    for arguments, words in (
        ((dataset, run), "the first of two"),
        ((run, dataset), "the second of two"),
        ((run, "--thumbnails", 3), "must be left out for a run"),
        ((tmp_path / "nowhere",), "DATASET must be an existing folder"),
    ):
        called = call("report", *arguments, "-o", page)
        assert called.code == EXIT_CONFIGURATION
        assert words in called.err
        assert str(tmp_path / "run") not in called.err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "resolved_config.toml").write_text("", encoding="utf-8")
    assert "metrics.jsonl" in call("report", tmp_path / "begun", "-o", page).err
    assert not page.exists()
