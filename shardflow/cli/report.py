"""``shardflow report``: one self-contained page about a dataset, a run, or two runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardflow.cli.common import (
    add_json,
    add_threads,
    natural_number,
    open_dataset,
    positive_number,
    step_progress,
    write_result,
)
from shardflow.errors import ConfigError
from shardflow.logs import counted, human_bytes
from shardflow.monitoring.history import CONFIG_FILE, METRICS_FILE
from shardflow.monitoring.run_page.compare import render_comparison
from shardflow.monitoring.run_page.page import render_run_page
from shardflow.monitoring.run_page.reading import read_run
from shardflow.packing.deid.allowlist import KEYWORDS, MAX_AGE_YEARS
from shardflow.storage import write_atomic
from shardflow.viewing import Bounds, gather, render_page

DESCRIPTION = """\
Writes one HTML file, which asks the network for nothing. The same input and options give the same bytes.

Of a dataset: outcomes of all inputs with their reasons, splits, histograms of size, spacing, slices and CT
values, and a gallery of thumbnails. A packed dataset holds such a page already (report.html, of a bounded
part of large datasets). This command reads every study, and every slice of CT, or as many as --ct-slices
says; with --fast that bounded part, 20,000 studies and 256 slices. Thumbnails are pixels of patients: keep
the page where the dataset is kept, or leave them out with --thumbnails 0.

Of a training run, which is a folder with metrics.jsonl: the time of its steps, what it was bound by and what
to do, stages, tiers, ranks, memory, loss, restarts, goodput, what the tuner did, settings. Of two runs: the
same charts overlaid, and a table of what differs. The run may continue meanwhile.
Nothing of a patient is in it.

For the privacy officer of a packed dataset (--privacy DIR): rules and counts, DICOM PS3.15 options, dates and
ages, recall on generated identifiers with the dataset's settings, images that were held back or blanked, open
questions.
It is signed with the secret key and stays in the private folder.
"""
EXAMPLES = """\
examples:
  shardflow report my-dataset -o report.html
  shardflow report my-dataset --thumbnails 0 --ct-slices 4 -o shareable.html
  shardflow report runs/first -o run.html
  shardflow report runs/first runs/second -o compare.html
  shardflow report my-dataset --privacy private
  shardflow report my-dataset --privacy private --check
"""
_NUM_PLANTED_IMAGES = 16
"""Enough to see that the models work here; benchmarks/privacy/pixels.py measures with many more."""
_NUM_THUMBNAILS, _MOST_THUMBNAILS = 24, 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow report``."""
    parser.add_argument(
        "dataset",
        metavar="DATASET|RUN",
        help="folder or address of a packed dataset, or the folder of a training run",
    )
    parser.add_argument(
        "other", metavar="RUN", nargs="?", help="folder of another run, which the first is compared with"
    )
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="HTML file to write")
    parser.add_argument(
        "--privacy",
        metavar="DIR",
        type=Path,
        help="private folder of the dataset: write the signed page for its privacy officer there",
    )
    parser.add_argument("--key-file", metavar="FILE", type=Path, help="secret key, if elsewhere")
    parser.add_argument(
        "--check", action="store_true", help="with --privacy: only check the signature of the page"
    )
    parser.add_argument("--thumbnails", metavar="N", type=natural_number, help="studies in the gallery (24)")
    parser.add_argument(
        "--ct-slices", metavar="K", type=positive_number, help="slices of each CT series to count (all)"
    )
    parser.add_argument(
        "--fast", action="store_true", help="read 20,000 studies and 256 CT slices in place of all"
    )
    add_threads(parser, "studies read at once")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, 1 for a page that was changed, or an error is raised."""
    if arguments.privacy is not None:
        return _report_privacy(arguments)
    if arguments.output is None or arguments.check:
        raise ConfigError("report needs -o FILE, and --check needs --privacy DIR; add it.")
    if arguments.other is not None or _is_run(arguments.dataset):
        return _report_runs(arguments)
    return _report_dataset(arguments)


def _report_privacy(arguments: argparse.Namespace) -> int:
    """Write the privacy page into the private folder, or check an existing one."""
    # Packing needs pydicom, which the training image does not carry.
    from shardflow.packing.deid.known_values import KnownValues
    from shardflow.packing.deid.pseudonyms import SecretKey
    from shardflow.packing.deid.report_text import find_spans, load_recognizers
    from shardflow.packing.privacy_page import is_signed, privacy_page_path, render_privacy_page
    from shardflow.packing.registry import offered_recognizers
    from shardflow.synthetic.identifiers import measure, plant

    dataset = open_dataset(arguments.dataset)
    private: Path = arguments.privacy
    path = privacy_page_path(private, dataset.manifest_version)
    key = SecretKey.load(arguments.key_file or private / "secret.key")
    if arguments.check:
        if not path.is_file():
            raise ConfigError("the private folder has no page of this version; write it without --check.")
        is_good = is_signed(path.read_bytes(), key)
        said = "the page is as it was signed" if is_good else "the page was changed after it was signed"
        write_result(arguments, {"page": str(path), "signed": is_good}, [said])
        return 0 if is_good else 1
    extra: Any = dataset.manifest.extra
    settings = extra.get("config", {}).get("deid", {})
    mode, order = settings.get("report_text", "keep"), settings.get("date_order", "unknown")
    nobody = KnownValues(())
    recognize = load_recognizers(offered_recognizers([name for name, _ in settings.get("recognizers", ())]))

    def find(text: str) -> Iterator[tuple[int, int]]:
        for span in find_spans(text, nobody, mode=mode, order=order, recognize=recognize):
            yield span.start, span.end

    measured = measure(plant("test", num_values=8), find).table()
    pixels = _measure_pixels(settings)
    page = render_privacy_page(dataset, private, key, measured, pixels)
    write_atomic(path, [page], replace=True, mode=0o600)
    facts = {"page": str(path), "bytes": len(page), "recall": measured["recall"]}
    said = f"recall on generated identifiers {measured['recall']:.4f}"
    if pixels is not None:
        facts["pixel_recall"] = pixels["recall"]
        said += f", on text in generated images {pixels['recall']:.4f}"
    write_result(arguments, facts, [f"{said}: {path}"])
    return 0


def _measure_pixels(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measure the detection of text in pixels with a dataset's settings; None if it has none.

    Raises:
        ConfigError: The models are missing, or differ from those that packed it.
    """
    if "pixel_text" not in settings:
        return None
    from shardflow.packing.deid.pixel_text import TextFinder, models_digest
    from shardflow.synthetic.draws import Draws
    from shardflow.synthetic.identifiers import letters_of, make_backgrounds, measure_pixels, plant_text

    if models_digest() != settings["pixel_text_sha256"]:
        raise ConfigError(
            "the dataset was packed with other models for text in pixels; install the rapidocr that its "
            "manifest names in created_with."
        )
    finder, fonts = TextFinder(settings["pixel_text_keep"]), letters_of("test")
    images = (
        plant_text(pixels, modality, "test", Draws(1, "officer", number), fonts)
        for number, (modality, pixels) in enumerate(make_backgrounds("test", _NUM_PLANTED_IMAGES))
    )
    return measure_pixels(images, lambda pixels: finder.find(pixels).boxes).table()


def _is_run(text: str) -> bool:
    return any((Path(text) / name).is_file() for name in (METRICS_FILE, CONFIG_FILE))


def _report_runs(arguments: argparse.Namespace) -> int:
    given = (arguments.dataset, arguments.other) if arguments.other is not None else (arguments.dataset,)
    for name, text in zip(("first", "second"), given, strict=False):
        if not _is_run(text):
            raise ConfigError(
                f"RUN must be the folder of a training run, which holds {METRICS_FILE}, got another one as "
                f"the {name} of two; name one dataset, one run, or two runs."
            )
    if arguments.thumbnails is not None or arguments.ct_slices is not None or arguments.fast:
        raise ConfigError(
            "--thumbnails, --ct-slices and --fast must be left out for a run, got one of them; they are "
            "about a dataset."
        )
    runs = [read_run(Path(text)) for text in given]
    text = render_comparison((runs[0], runs[1])) if len(runs) > 1 else render_run_page(runs[0])
    page = text.encode("utf-8")
    write_atomic(arguments.output, [page], replace=True)
    facts = {
        "runs": [run.name for run in runs],
        "steps": [run.num_steps for run in runs],
        "bytes": len(page),
        "damaged_lines": [run.num_damaged for run in runs],
    }
    steps = " and ".join(counted(run.num_steps, "step") for run in runs)
    write_result(arguments, facts, [f"{steps}, {human_bytes(len(page))}: {arguments.output}"])
    return 0


def _report_dataset(arguments: argparse.Namespace) -> int:
    num_thumbnails = _NUM_THUMBNAILS if arguments.thumbnails is None else arguments.thumbnails
    if num_thumbnails > _MOST_THUMBNAILS:
        raise ConfigError(f"--thumbnails must be at most {_MOST_THUMBNAILS}, got {num_thumbnails}.")
    if arguments.fast and arguments.ct_slices is not None:
        raise ConfigError("--fast counts 256 CT slices in all, --ct-slices some of each series; give one.")
    dataset = open_dataset(arguments.dataset, with_studies=True)
    with step_progress("reading studies") as progress:
        facts = gather(
            dataset,
            num_thumbnails=num_thumbnails,
            slices_per_series=arguments.ct_slices,
            bounds=Bounds() if arguments.fast else None,
            num_threads=arguments.threads,
            progress=progress,
        )
    page = render_page(dataset, facts, kept_keywords=KEYWORDS, max_age_years=MAX_AGE_YEARS).encode("utf-8")
    write_atomic(arguments.output, [page], replace=True)
    samples = dataset.samples.num_samples
    own = dataset.manifest.page
    lines = [f"{counted(samples, 'sample')}, {human_bytes(len(page))}: {arguments.output}"]
    if own is not None:
        lines.append(f"note: the dataset holds a page too, made when it was packed: {own.path}")
    written = {
        "dataset_id": dataset.dataset_id,
        "samples": samples,
        "thumbnails": len(facts.thumbnails),
        "bytes": len(page),
        "page_in_dataset": own.path if own else None,
    }
    write_result(arguments, written, lines)
    return 0
