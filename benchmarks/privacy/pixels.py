"""Text in pixels: recall on planted text by font, size, contrast, turn and modality; what goes by mistake.

python -m benchmarks.privacy.pixels [--part test] [--num 80] [--data ../shared/data] [--source real ...]

The development part has other fonts, phrases, bodies and real images than the test part. Ultrasound images of
devices show text of their own, so that nothing can be said there about what goes by mistake. The source
`small` is large letters in small images: Latin, Cyrillic, and Chinese with ``--chinese``, a font of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import matplotlib as mpl
import numpy as np
import pydicom
from PIL import ImageFont
from pydicom.data import get_testdata_file

from benchmarks.about import about_run
from shardflow.packing.deid.pixel_text import TextFinder, models_digest
from shardflow.synthetic.draws import Draws
from shardflow.synthetic.identifiers import (
    PlantedImage,
    PlantedLine,
    letters_of,
    make_backgrounds,
    measure_pixels,
    plant_text,
    typeface,
)
from shardflow.synthetic.identifiers.burned_in import Letters, Pixels
from shardflow.synthetic.identifiers.corpus import Part

_FONTS: Mapping[Part, tuple[str, ...]] = {
    "development": ("DejaVuSans", "DejaVuSansMono-Bold", "cmss10"),
    "test": ("DejaVuSerif", "DejaVuSans-BoldOblique", "DejaVuSansMono", "STIXGeneral", "cmtt10"),
}
_REAL: Mapping[Part, tuple[str, ...]] = {
    "development": (
        "ct_philips_phantom/S21570/S2010/*",
        "mr_ge_fruit/*.dcm",
        "dicom2nifti_small/ge/anatomical/001/*",
        "dicom2nifti_small/hitachi/anatomical/001/*",
    ),
    "test": (
        "dcmqi_ct_seg_sr/segmentations/ct-3slice/*",
        "mr_oblique_20/volume/*",
        "highdicom/dx_image.dcm",
        "highdicom/ct_image.dcm",
        "dicom2nifti_small/generic/anatomical/001/*",
        "dicom2nifti_small/philips_enhanced/anatomical/001/*",
        "rt_utils/mock_data/*",
    ),
}
_DEVICES = ("examples_rgb_color.dcm", "examples_ybr_color.dcm", "examples_palette.dcm")
"""Ultrasound in pydicom's test data, for the test part."""
_SOURCES = ("generated", "real", "devices", "small")
_SMALL_SIDES = (96, 128, 160, 192)
_SMALL_HEIGHT = 15, 24
"""Least and largest height of capitals in small images, in percent of the side."""
_SMALL_TEXTS: Mapping[Part, Mapping[str, tuple[str, ...]]] = {
    "development": {
        "Latin": ("NOVAK", "Weber", "DOE 45"),
        "Cyrillic": ("\u0418\u0412\u0410\u041d\u041e\u0412", "\u041f\u0435\u0442\u0440\u043e\u0432"),
        "Chinese": ("\u738b\u5c0f\u660e", "\u674e\u5a1c"),
    },
    "test": {
        "Latin": ("MILLER", "Dubois", "PID 4471"),
        "Cyrillic": ("\u0421\u041c\u0418\u0420\u041d\u041e\u0412", "\u041e\u0440\u043b\u043e\u0432\u0430"),
        "Chinese": ("\u9648\u5efa\u56fd", "\u8d75\u654f"),
    },
}
_MOST_OF_A_FOLDER = 6
_MIN_SIDE = 120


def fonts_of(part: Part) -> dict[str, Letters]:
    """Return strokes of cv2, outlines of DejaVu, STIX and Computer Modern, and Pillow's own fonts."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    fonts = letters_of(part)
    for name in _FONTS[part]:
        fonts[name] = typeface(partial(ImageFont.truetype, folder / f"{name}.ttf"))
    if part == "test":
        fonts["Aileron"] = typeface(ImageFont.load_default)
    fonts["bitmap" if part == "test" else "bitmap, enlarged"] = _bitmap(part)
    return fonts


def _bitmap(part: Part) -> Letters:
    """Return an old screen font of one pixel a stroke, whole multiples of it; in the test at its own size."""
    draw = typeface(lambda _: ImageFont.load_default_imagefont())

    def letters(text: str, height: int) -> Any:
        times = max(1 if part == "test" else 2, round(height / 8))
        return np.kron(draw(text, 8), np.ones((times, times), np.uint8))

    return letters


def real(part: Part, folder: Path) -> Iterator[tuple[str, Pixels]]:
    """Yield real images without text: the middle frame of files that show a body."""
    for pattern in _REAL[part]:
        paths = [path for path in sorted(folder.glob(pattern)) if path.is_file()]
        for path in paths[:: -(-len(paths) // _MOST_OF_A_FOLDER) or 1]:
            try:
                pixels = np.asarray(pydicom.dcmread(path).pixel_array)
                modality = str(pydicom.dcmread(path, stop_before_pixels=True).Modality)
            except (AttributeError, ValueError, pydicom.errors.InvalidDicomError):
                continue
            if pixels.ndim == 3 and pixels.shape[-1] != 3:
                pixels = pixels[len(pixels) // 2]
            if min(pixels.shape[:2]) >= _MIN_SIDE:
                yield modality, pixels


def backgrounds(source: str, part: Part, num: int, folder: Path) -> Iterator[tuple[str, Pixels]]:
    """Yield the modality and pixels of the images of a source."""
    if source == "generated":
        yield from make_backgrounds(part, num)
    elif source == "real":
        yield from real(part, folder)
    else:
        for name in _DEVICES if part == "test" else ():
            found = get_testdata_file(name)
            pixels = np.asarray(pydicom.dcmread(found).pixel_array)
            yield "US", pixels[0] if pixels.ndim == 4 else pixels


def corpus(
    source: str, part: Part, num: int, folder: Path, chinese: Path | None = None
) -> Iterator[PlantedImage]:
    """Yield images of a source with text."""
    if source == "small":
        yield from small(part, num, chinese)
        return
    fonts = fonts_of(part)
    for number, (modality, pixels) in enumerate(backgrounds(source, part, num, folder)):
        yield plant_text(pixels, modality, part, Draws(5, "pixels", number), fonts)


def small(part: Part, num: int, chinese: Path | None) -> Iterator[PlantedImage]:
    """Yield small images with one line of large bright letters of a script."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    files = {"Latin": folder / f"{_FONTS[part][0]}.ttf", "Cyrillic": folder / f"{_FONTS[part][0]}.ttf"}
    if chinese is not None:
        files["Chinese"] = chinese
    for number, (modality, pixels) in enumerate(make_backgrounds(part, num)):
        draws, side = Draws(5, "small", number), _SMALL_SIDES[number % len(_SMALL_SIDES)]
        gray = np.asarray(pixels if pixels.ndim == 2 else pixels.mean(2), np.float32)
        clean = np.asarray(cv2.resize(gray, (side, side), interpolation=cv2.INTER_AREA), np.int16)
        script = draws.choice(sorted(files))
        letters = typeface(partial(ImageFont.truetype, files[script]))
        height, text = side * draws.integer(*_SMALL_HEIGHT) // 100, draws.choice(_SMALL_TEXTS[part][script])
        drawn = letters(text, height)
        while max(drawn.shape) > side:
            height -= 1
            drawn = letters(text, height)
        top, left = (draws.integer(0, side - length) for length in drawn.shape)
        ink = np.zeros(clean.shape, bool)
        ink[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn > 100
        burned = clean.copy()
        burned[ink] = int(clean.max()) * 3 // 2 + 1
        line = PlantedLine(text=text, ink=ink, font=script, height_px=height, contrast="saturated", turn=0)
        yield PlantedImage(pixels=burned, clean=clean, modality=modality, lines=(line,))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("development", "test"), default="test")
    parser.add_argument("--num", type=int, default=80)
    parser.add_argument(
        "--source", action="append", choices=_SOURCES, help="others stay as they are in --out"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--chinese", type=Path, metavar="FONT")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/privacy_pixels.json"))
    options = parser.parse_args()
    is_known = options.source and options.out.is_file()
    result: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if is_known else {}
    for source in options.source or _SOURCES:
        result[source] = _run(source, options.part, options.num, options.data, options.chinese)
        print(json.dumps({name: one for name, one in result[source].items() if name != "faults"}, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _run(source: str, part: Part, num: int, folder: Path, chinese: Path | None) -> dict[str, Any]:
    finder, seconds, megapixels = TextFinder(), 0.0, 0.0
    faults: list[dict[str, Any]] = []

    def find(pixels: Pixels) -> Any:
        nonlocal seconds, megapixels
        start = time.process_time()
        found = finder.find(pixels)
        seconds += time.process_time() - start
        megapixels += pixels.shape[0] * pixels.shape[1] / 1e6
        return found.boxes

    def note(image: PlantedImage, line: PlantedLine | None) -> None:
        place = {"modality": image.modality, "shape": list(image.pixels.shape)}
        if line is None:
            faults.append({"fault": "blanked by mistake", **place})
        else:
            of_line = {
                name: getattr(line, name) for name in ("text", "font", "height_px", "contrast", "turn")
            }
            faults.append({"fault": "missed", **place, **of_line})
        print(faults[-1], flush=True)

    measured = measure_pixels(corpus(source, part, num, folder, chinese), find, on_fault=note).table()
    if source == "devices":
        for name in ("wrong_area_share", "images_blanked_by_mistake"):
            del measured[name]
        faults = [fault for fault in faults if fault["fault"] == "missed"]
    return {
        "about": about_run(["numpy", "onnxruntime", "opencv-python-headless", "pillow", "rapidocr"]),
        "models_sha256": models_digest(),
        "part": part,
        **measured,
        "cpu_ms_per_megapixel": round(1000 * seconds / max(megapixels, 1e-9)),
        "faults": faults,
    }


if __name__ == "__main__":
    main()
