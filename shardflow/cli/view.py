"""``shardflow view`` and ``shardflow preview``: a dataset in a browser, and images of its studies."""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path
from typing import Any

from shardflow.cli.common import (
    add_dataset,
    add_json,
    conversation_field,
    interruptible,
    named_fields,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    write_result,
)
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.logs import counted, human_bytes
from shardflow.storage import write_atomic
from shardflow.viewing import (
    WINDOWS,
    Viewer,
    Window,
    find_row,
    has_conversation,
    read_conversation,
    read_findings,
    read_study,
    render_conversation,
    render_findings,
    render_pieces,
    render_study,
)
from shardflow.viewing.study import place_of

DESCRIPTION = """\
Serves a page on this machine: lists and searches studies, scrolls and windows slices, shows the report with
its findings marked and the slices that show them, three planes of volumes, regions, inputs that were not
packed, and the samples of any step of an epoch, with --fields also the crops that it takes. Voxels are read
from the shards on demand. Nothing is written, and no other server is contacted.

The page shows pixels and text of patients, unless it says GENERATED. Requests need a token, which is part of
the printed address, because other users of this machine reach its ports too; --no-token leaves it out where
there are none. The connection is not encrypted: instead of another address (--host), prefer a tunnel.
"""
EXAMPLES = """\
examples:
  shardflow view my-dataset
  shardflow view my-dataset --port 8765
  shardflow view my-dataset --fields my-fields.toml
"""
_DEFAULT_PORT = 8765
_MOST_PORT = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow view``."""
    add_dataset(parser)
    parser.add_argument(
        "--fields", metavar="FILE", help="show the crops that the volumes of this TOML file of fields take"
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (127.0.0.1)"
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="let every user of this machine read; only on this machine's own address",
    )
    parser.add_argument(
        "--port",
        metavar="P",
        type=natural_number,
        default=_DEFAULT_PORT,
        help=f"port to listen on; 0 for any free one ({_DEFAULT_PORT})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it is interrupted; the exit code is 0, or an error is raised."""
    if arguments.port > _MOST_PORT:
        raise ConfigError(f"--port must be at most {_MOST_PORT}, got {arguments.port}.")
    dataset = open_dataset(arguments.dataset, with_studies=True)
    steps = None
    if arguments.fields is not None:
        from shardflow.fields.registry import read_fields
        from shardflow.loading.crops import StepCrops

        steps = StepCrops(dataset, read_fields(arguments.fields))
    # A second signal must not interrupt the shutdown, in which current requests are answered.
    with (
        contextlib.suppress(KeyboardInterrupt),
        interruptible(),
        Viewer(
            dataset, host=arguments.host, port=arguments.port, steps=steps, token=not arguments.no_token
        ) as viewer,
    ):
        show_lines([f"{viewer.url} shows {dataset.samples.num_samples:,} samples; Ctrl-C ends it."])
        threading.Event().wait()
    return 0


PREVIEW_DESCRIPTION = """\
Draws slices of a study, evenly spread over its primary series, with the sides of the patient, a scale bar and
slice numbers, beside the report. With --findings the report is drawn with its findings marked by what is said
of them, and beside it the slices that show each, with the confidence and its evidence.

A sample that is a conversation is drawn turn by turn, with its images in their places; what is learned by
default is tinted. With --fields a conversation, stored or made of a study by a template, is drawn as the
processor of its field renders it: special tokens and all, with the tokens tinted that are learned.

KEY is a sample key, or a split and a row of it: train:0. The picture shows pixels and text of a
patient, unless it says GENERATED: keep it where the dataset may be kept. Needs Pillow:
pip install 'shardflow[pack]'.
"""
PREVIEW_EXAMPLES = """\
examples:
  shardflow preview my-dataset train:0 -o study.png
  shardflow preview my-dataset train:0 --findings -o findings.png
  shardflow preview my-dataset train:0 --fields fields.toml -o conversation.png
  shardflow preview my-dataset val:2 --slices 6 --window=-600,1500 -o study.png
"""
_MOST_SLICES = 64
_USUAL_SLICES = 12


def add_preview_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow preview``."""
    add_dataset(parser)
    parser.add_argument("key", metavar="KEY", help="sample key, or a row such as train:0")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=_png_file, required=True, help="PNG file to write"
    )
    parser.add_argument(
        "--series", metavar="S", type=natural_number, default=0, help="series, from 0 (0: primary)"
    )
    parser.add_argument(
        "--slices",
        metavar="K",
        type=positive_number,
        default=_USUAL_SLICES,
        help=f"slices at most, up to {_MOST_SLICES} ({_USUAL_SLICES})",
    )
    parser.add_argument(
        "--findings", action="store_true", help="mark the report's findings and show the slices of each"
    )
    parser.add_argument(
        "--fields", metavar="FILE", help="draw the conversation of the fields of this TOML file, as rendered"
    )
    parser.add_argument(
        "--window",
        metavar="C,W",
        help=f"center and width in the slices' unit (--window=-600,1500), or one of {', '.join(WINDOWS)}; by "
        "default what the series states",
    )
    parser.add_argument(
        "--font", metavar="FILE", type=Path, help="font for scripts that the system's fonts lack"
    )
    add_json(parser)


def _png_file(text: str) -> Path:
    if Path(text).suffix.lower() not in {"", ".png"}:
        raise argparse.ArgumentTypeError(f"must name a .png file, got {text!r}")
    return Path(text)


def run_preview(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    if arguments.slices > _MOST_SLICES:
        raise ConfigError(f"--slices must be at most {_MOST_SLICES}, got {arguments.slices}.")
    window = Window.parse(arguments.window) if arguments.window else None
    dataset = open_dataset(arguments.dataset, with_studies=True)
    row = find_row(dataset, arguments.key)
    if arguments.fields is not None or has_conversation(dataset, row):
        if arguments.findings or arguments.series or arguments.slices != _USUAL_SLICES or window:
            raise ConfigError(
                "--findings, --series, --slices and --window must be left out for a conversation, got one of "
                "them; its images are drawn as they are stored."
            )
        draw = _draw_conversation if arguments.fields is None else _draw_rendered
        picture, facts, amount = draw(arguments, dataset, row)
    elif arguments.findings:
        if arguments.series or arguments.slices != _USUAL_SLICES:
            raise ConfigError(
                "--series and --slices must be left out with --findings, got them; "
                "the slices of each finding are shown."
            )
        picture, facts, amount = _draw_findings(arguments, dataset, row, window)
    else:
        picture, facts, amount = _draw_slices(arguments, dataset, row, window)
    write_atomic(arguments.output, [picture], replace=True)
    line = f"{facts['row']}: {amount}, {human_bytes(len(picture))}: {arguments.output}"
    write_result(arguments, {**facts, "bytes": len(picture)}, [line])
    return 0


def _draw_slices(
    arguments: argparse.Namespace, dataset: Dataset, row: int, window: Window | None
) -> tuple[bytes, dict[str, Any], str]:
    """Return the image, facts about it, and how much of the study it shows."""
    view = read_study(dataset, row, series=arguments.series, num_slices=arguments.slices)
    facts = {
        "sample_key": view.sample_key,
        "row": view.place,
        "series": view.series_number,
        "slices": list(view.indexes),
        "generated": bool(view.generated),
    }
    return render_study(view, window=window, font=arguments.font), facts, counted(len(view.slices), "slice")


def _draw_conversation(
    arguments: argparse.Namespace, dataset: Dataset, row: int
) -> tuple[bytes, dict[str, Any], str]:
    view = read_conversation(dataset, row)
    turns = sum(len(view.about.get(what, ())) for what in ("messages", "chosen", "rejected"))
    facts = {
        "sample_key": view.sample_key,
        "row": view.place,
        "kind": view.about.get("kind"),
        "turns": turns,
        "images": len(view.images),
        "generated": bool(view.generated),
    }
    picture = render_conversation(view, font=arguments.font)
    return picture, facts, f"{counted(turns, 'turn')}, {counted(len(view.images), 'image')}"


def _draw_rendered(
    arguments: argparse.Namespace, dataset: Dataset, row: int
) -> tuple[bytes, dict[str, Any], str]:
    from shardflow.fields.conversations.rendering import Renderer, RenderError
    from shardflow.loading.sample import conversation_of

    fields = named_fields(arguments.fields) or {}
    name, spec = conversation_field(fields)
    document, pictures = conversation_of(dataset, row, fields, name)
    renderer, messages = Renderer.load(spec.processor), document["messages"]
    ends = ["chosen", "rejected"] if spec.pairs else [""]
    sections, rendered = [], []
    for end in ends:
        whole = [*messages, *(document[end] if end else ())]
        used = [part["image"] for one in whole for part in one["content"] if part["type"] == "image"]
        try:
            if document["kind"] == "document":
                found = renderer.render_document(whole, pictures)
            else:
                first = len(messages) if end else 0
                found = renderer.render(whole, pictures, train_on=spec.train_on, first=first)
        except RenderError as error:
            raise ConfigError(f"The conversation cannot be rendered: {error}.") from None
        pieces = renderer.pieces(found, len(used))
        sections.append((end, [used[one] if isinstance(one, int) else one for one in pieces]))
        rendered.append(found)
    tokens = sum(len(one.ids) for one in rendered)
    learned = sum(int((one.weights > 0).sum()) for one in rendered)
    key, place = dataset.samples.sample_key(row), place_of(dataset, row)
    told = (
        f"{counted(tokens, 'token')}, {learned:,} of them learned (tinted); {counted(len(pictures), 'image')}"
    )
    picture = render_pieces(f"{name} - {place}", told, sections, pictures, font=arguments.font)
    facts = {
        "sample_key": key,
        "row": place,
        "tokens": tokens,
        "learned_tokens": learned,
        "images": len(pictures),
    }
    return picture, facts, told


def _draw_findings(
    arguments: argparse.Namespace, dataset: Dataset, row: int, window: Window | None
) -> tuple[bytes, dict[str, Any], str]:
    view = read_findings(dataset, row)
    facts = {
        "sample_key": view.study.sample_key,
        "row": view.study.place,
        "findings": len(view.report["entities"]),
        "placed": len(view.rows) + view.num_left_out,
        "generated": bool(view.study.generated),
    }
    picture = render_findings(view, window=window, font=arguments.font)
    return picture, facts, f"{counted(len(view.rows), 'finding')} with slices"
