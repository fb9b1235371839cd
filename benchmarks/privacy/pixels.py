"""Text in pixels: recall on planted text by font, size, contrast, turn and modality; what goes by mistake.

python -m benchmarks.privacy.pixels [--part test] [--num 120] [--data ../shared/data]

The development part has other fonts, phrases, bodies and real images than the test part.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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
_MOST_OF_A_FOLDER = 8
_MIN_SIDE = 120


def fonts_of(part: Part) -> dict[str, Letters]:
    """Return strokes of cv2, outlines of DejaVu, STIX and Computer Modern, and Pillow's own fonts."""
    folder = Path(mpl.get_data_path()) / "fonts" / "ttf"
    fonts = letters_of(part)
    for name in _FONTS[part]:
        fonts[name] = typeface(lambda size, path=folder / f"{name}.ttf": ImageFont.truetype(path, size))
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


def real(part: Part, folder: Path) -> Iterator[tuple[str, str, Pixels]]:
    """Yield real images: the middle frame of files that show a body."""
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
                yield path.relative_to(folder).as_posix(), modality, pixels
    if part == "test":
        for name in ("examples_rgb_color.dcm", "examples_ybr_color.dcm", "examples_palette.dcm"):
            found = get_testdata_file(name)
            pixels = np.asarray(pydicom.dcmread(found).pixel_array)
            yield name, "US", pixels[0] if pixels.ndim == 4 else pixels


def corpus(part: Part, num: int, folder: Path) -> Iterator[tuple[str, PlantedImage]]:
    """Yield generated images, and real ones, with text, by where they come from."""
    fonts = fonts_of(part)
    images = [("generated", *one) for one in make_backgrounds(part, num)]
    images += [("real", modality, pixels) for _, modality, pixels in real(part, folder)]
    for number, (source, modality, pixels) in enumerate(images):
        yield source, plant_text(pixels, modality, part, Draws(5, "pixels", number), fonts)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("development", "test"), default="test")
    parser.add_argument("--num", type=int, default=160)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/privacy_pixels.json"))
    options = parser.parse_args()
    finder, seconds, megapixels = TextFinder(), 0.0, 0.0

    def find(pixels: Pixels) -> Any:
        nonlocal seconds, megapixels
        start = time.process_time()
        found = finder.find(pixels)
        seconds += time.process_time() - start
        megapixels += pixels.shape[0] * pixels.shape[1] / 1e6
        return found.boxes

    faults: list[dict[str, Any]] = []

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

    planted = list(corpus(options.part, options.num, options.data))
    result: dict[str, Any] = {
        "about": about_run(["numpy", "onnxruntime", "opencv-python-headless", "pillow", "rapidocr"]),
        "models_sha256": models_digest(),
        "part": options.part,
    }
    for source in ("generated", "real"):
        images = [image for of, image in planted if of == source]
        result[source] = measure_pixels(images, find, on_fault=note).table()
    lines = sum(result[source]["lines"] for source in ("generated", "real"))
    missed = sum(result[source]["missed"] for source in ("generated", "real"))
    result["lines"], result["missed"] = lines, missed
    result["recall"] = round(1 - missed / max(1, lines), 5)
    result["cpu_ms_per_megapixel"] = round(1000 * seconds / megapixels)
    result["cpu_ms_per_image"] = round(1000 * seconds / (2 * len(planted)))
    result["faults"] = faults
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        json.dumps(
            {name: value for name, value in result.items() if name not in ("about", "faults")}, indent=1
        )
    )


if __name__ == "__main__":
    main()
