"""How fast the page of ``shardflow view`` scrolls through a study of 300 slices, in Chromium.

``python -m benchmarks.view.run --output benchmarks/results/view.json``. Presses the arrow key and waits until
that slice is drawn, from the first slice to the last: what a hand does that never goes further than the eye.
Half a minute; needs Chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.about import about_run
from benchmarks.stream.content import make_content
from shardflow.format import Dataset
from shardflow.viewing import Viewer

NUM_SLICES = 300
ROUNDS = 5
GOAL_PER_S = 30
_SCROLL = """async (count) => {
  const canvas = document.getElementById("canvas");
  const begin = performance.now();
  const gaps = [];
  for (let index = 1; index < count; index++) {
    const pressed = performance.now();
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
    const isDrawn = () => canvas.dataset.drawn?.split("/")[2] === String(index);
    while (!isDrawn()) await new Promise((done) => setTimeout(done));
    gaps.push(performance.now() - pressed);
  }
  return { seconds: (performance.now() - begin) / 1000, gaps };
}"""


def scroll(address: str, chromium: str) -> list[dict[str, float]]:
    """Scroll a number of times, each with a fresh page, whose cache is empty."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(ROUNDS):
            page = browser.new_page(viewport={"width": 1366, "height": 768})
            page.goto(address)
            page.wait_for_selector("#canvas[data-drawn]")
            page.keyboard.press("Home")
            page.wait_for_selector('#canvas[data-drawn="0/0/0/"]')
            result: dict[str, Any] = page.evaluate(_SCROLL, NUM_SLICES)
            gaps = sorted(result["gaps"])
            found.append(
                {
                    "slices_per_s": round((NUM_SLICES - 1) / result["seconds"], 1),
                    "median_ms": round(statistics.median(gaps), 2),
                    "p99_ms": round(gaps[int(0.99 * len(gaps))], 2),
                }
            )
            page.close()
        browser.close()
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        parser.error("Chromium must be installed, found none.")
    with tempfile.TemporaryDirectory() as folder:
        content = make_content(Path(folder), 1, num_slices=NUM_SLICES, with_png=False)
        with Viewer(Dataset.open(Path(folder) / "ours")) as viewer:
            rounds = scroll(viewer.url, chromium)
    result = {
        "what": f"shardflow view: {NUM_SLICES} slices of 512 x 512 int16, one after the other",
        "command": "python -m benchmarks.view.run",
        "content": content,
        **about_run(["shardflow", "blosc2", "playwright"]),
        "goal_slices_per_s": GOAL_PER_S,
        "median_slices_per_s": statistics.median(one["slices_per_s"] for one in rounds),
        "rounds": rounds,
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
