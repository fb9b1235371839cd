"""The picture of a conversation: images in their places, and a tint behind what is learned."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import shardflow as sf
from shardflow.errors import FormatError
from shardflow.format import Dataset
from shardflow.viewing import has_conversation, read_conversation, render_conversation
from shardflow.viewing.catalog import Catalog
from shardflow.viewing.studies import Studies
from tests.cli.conftest import Call
from tests.conversation_case import make_folder

TINT = (0xDA, 0xFB, 0xE1)
RED, BLUE = (200, 30, 30), (30, 30, 200)


def picture(color: tuple[int, int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (40, 20), color).save(stream, "PNG")
    return stream.getvalue()


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


FIRST, SECOND = {"type": "image", "image": 1}, {"type": "image", "image": 0}
ASKED = {"role": "user", "content": [FIRST, text("And?"), SECOND]}
ANSWER: dict[str, Any] = {"role": "assistant", "content": [text("Clear.")]}
SAMPLES: dict[str, dict[str, Any]] = {
    "talk": {"kind": "conversation", "messages": [ASKED, ANSWER]},
    "unweighted": {"kind": "conversation", "messages": [ASKED, {**ANSWER, "weight": 0}]},
    "preference": {"kind": "preference", "messages": [ASKED], "chosen": [ANSWER], "rejected": [ANSWER]},
    "long": {
        "kind": "prompt",
        "messages": [{"role": "user", "content": [text("word\n" * 2_000)]}],
        "answer": "2",
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talks") / "dataset"
    images = [{"member": f"image.00{n}.png", "rows": 20, "columns": 40} for n in (0, 1)]
    with sf.ShardWriter(path) as writer:
        for key, about in SAMPLES.items():
            writer.write(
                {
                    "__key__": key,
                    "conversation.json": {"format_version": 1, "images": images, **about},
                    "image.000.png": picture(RED),
                    "image.001.png": picture(BLUE),
                }
            )
        writer.write({"__key__": "broken", "conversation.json": {"kind": "conversation"}})
        writer.write({"__key__": "other", "report.txt": "Clear."})
    return path


def drawn(folder: Path, key: str) -> NDArray[np.uint8]:
    dataset = Dataset.open(folder)
    view = read_conversation(dataset, dataset.samples.find(key))
    return np.asarray(Image.open(io.BytesIO(render_conversation(view))))


def rows_of(pixels: NDArray[np.uint8], color: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.unique(np.nonzero((pixels == color).all(axis=2))[0])


def test_images_stand_in_the_order_of_reading_and_answers_are_tinted(folder: Path) -> None:
    pixels = drawn(folder, "talk")
    first, second, learned = (rows_of(pixels, color) for color in (BLUE, RED, TINT))
    assert (len(first), len(second)) == (20, 20)
    assert first.max() < second.min() < learned.min()
    assert len(rows_of(drawn(folder, "preference"), TINT)) == 2 * len(learned)
    assert not len(rows_of(drawn(folder, "unweighted"), TINT))


def test_a_long_conversation_is_cut(folder: Path) -> None:
    assert drawn(folder, "long").shape[0] <= 12_000


def test_what_is_no_conversation_is_said(folder: Path) -> None:
    dataset = Dataset.open(folder)
    assert not has_conversation(dataset, dataset.samples.find("other"))
    with pytest.raises(FormatError, match="describes no conversation"):
        read_conversation(dataset, dataset.samples.find("broken"))


def test_preview_draws_a_conversation(call: Call, folder: Path, tmp_path: Path) -> None:
    called = call("preview", folder, "talk", "-o", tmp_path / "a.png", "--json")
    assert called.code == 0
    assert {name: called.last_line[name] for name in ("kind", "turns", "images")} == {
        "kind": "conversation",
        "turns": 2,
        "images": 2,
    }
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    refused = call("preview", folder, "talk", "-o", tmp_path / "b.png", "--slices", 3)
    assert (refused.code, "must be left out for a conversation" in refused.err) == (2, True)


def test_preview_draws_what_the_processor_of_a_field_renders(
    call: Call, folder: Path, tmp_path: Path
) -> None:
    make_folder("llava", tmp_path / "model", with_model=False)
    fields = tmp_path / "fields.toml"
    settings = {"type": "conversation", "processor": "model", "max_tokens": 200}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    fields.write_text("\n".join(["[fields.talk]", *lines]), encoding="utf-8")
    called = call("preview", folder, "talk", "--fields", fields, "-o", tmp_path / "a.png", "--json")
    pixels = np.asarray(Image.open(tmp_path / "a.png"))
    first, second, learned = (rows_of(pixels, color) for color in (BLUE, RED, TINT))
    assert (len(first), len(second)) == (20, 20)
    assert first.max() < second.min() < learned.min()
    assert (called.last_line["images"], called.last_line["learned_tokens"] > 1) == (2, True)
    fields.write_text("\n".join(["[fields.talk]", *lines, "pairs = true"]), encoding="utf-8")
    assert call("preview", folder, "preference", "--fields", fields, "-o", tmp_path / "b.png").code == 0
    pixels = np.asarray(Image.open(tmp_path / "b.png"))
    assert len(rows_of(pixels, TINT)) == 2 * len(learned)
    for key, extra, said in (
        ("other", (), "no conversation.json"),
        ("talk", ("--slices", 3), "must be left out"),
    ):
        refused = call("preview", folder, key, "--fields", fields, "-o", tmp_path / "c.png", *extra)
        assert (refused.code, said in refused.err) == (2, True)


def test_other_commands_show_a_conversation(call: Call, folder: Path) -> None:
    assert re.search(r"image\.\*\.png +8\n", call("info", folder).out)
    dataset = Dataset.open(folder)
    described = Studies(dataset, Catalog(dataset)).describe(dataset.samples.find("talk"))
    assert described["conversation"]["messages"][1]["content"] == [text("Clear.")]
    assert described["problems"] == []
