"""Conversations with pictures through the whole job: kinds of files, resumption, versions, the loader."""

from __future__ import annotations

import io
import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from pyarrow import parquet
from transformers import AutoProcessor

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.manifest import load
from shardflow.packing.corpora import execution
from shardflow.storage import LocalStore
from tests.conversation_case import make_folder
from tests.corpora_case import CorpusCase
from tests.pack_case import tree_digests

pytestmark = pytest.mark.usefixtures("packs_inline")

CONVERSATIONS = "fields.kind=conversations"
NUM_LINES = 12


def picture(number: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (6 + number, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def line(number: int) -> dict[str, Any]:
    return {
        "id": f"P{number}",
        "image": f"images/{number}.png",
        "conversations": [
            {"from": "human", "value": f"<image>\nWhat is seen in {number}?"},
            {"from": "gpt", "value": "Clear lungs."},
        ],
    }


@pytest.fixture
def case(tmp_path: Path) -> CorpusCase:
    case = CorpusCase(tmp_path / "job")
    case.prepare()
    (case.texts / "images").mkdir()
    for number in range(NUM_LINES):
        (case.texts / "images" / f"{number}.png").write_bytes(picture(number))
    return case


def samples(case: CorpusCase) -> dict[str, dict[str, bytes]]:
    dataset = Dataset.open(case.output)
    return {
        dataset.samples.sample_key(row): dataset.read_fields(row)
        for row in range(dataset.samples.num_samples)
    }


def test_arrays_lines_parquet_and_tars_make_the_same_samples(case: CorpusCase) -> None:
    lines = [line(number) for number in range(NUM_LINES)]
    settings = (CONVERSATIONS, "fields.key=id", "splits.group=id")
    (case.texts / "a.json").write_text(json.dumps(lines, indent=1), encoding="utf-8")
    summary = case.pack(*settings)
    # Pictures below a folder are of the lines, and no inputs of their own.
    assert summary.inputs == {"total": NUM_LINES, "packed": NUM_LINES, "skipped": 0, "quarantined": 0}
    assert summary.forms == {"llava": NUM_LINES}
    found = samples(case)
    for members in found.values():
        about = json.loads(members["conversation.json"])
        number = int(about["messages"][0]["content"][1]["text"].split()[-1].rstrip("?"))
        assert members["image.000.png"] == picture(number)
    others: dict[str, bytes] = {"a.jsonl": b"\n".join(json.dumps(each).encode() for each in lines)}
    stream = io.BytesIO()
    # Hugging Face stores pictures in the rows.
    rows = [each | {"image": {"bytes": picture(n), "path": None}} for n, each in enumerate(lines)]
    parquet.write_table(pa.Table.from_pylist(rows), stream, row_group_size=5)
    others["a.parquet"] = stream.getvalue()
    # Tars of WebDataset have them beside the line, named or in the order of the tar.
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for number, each in enumerate(lines):
            if number % 2:
                each = {name: value for name, value in each.items() if name != "image"}
            else:
                each = each | {"image": "png" if number % 4 else f"images/{number}.png"}
            for ending, payload in (("json", json.dumps(each).encode()), ("png", picture(number))):
                member = tarfile.TarInfo(f"images/{number}.{ending}")
                member.size = len(payload)
                tar.addfile(member, io.BytesIO(payload))
    others["a.tar"] = stream.getvalue()
    for name, content in others.items():
        other = CorpusCase(case.folder.parent / name.replace(".", "_"))
        other.prepare()
        (other.texts / name).write_bytes(content)
        root = case.folder if name == "a.tar" else case.texts
        form = "conversations.form=llava"
        other.pack(*settings, form, f"conversations.image_root={root}")
        assert samples(other) == found


def test_a_picture_that_came_late_is_packed_by_the_same_command(case: CorpusCase) -> None:
    case.write("a.jsonl", [json.dumps(line(number)).encode() for number in range(NUM_LINES)])
    last = case.texts / "images" / f"{NUM_LINES - 1}.png"
    last.unlink()
    summary = case.pack(CONVERSATIONS, "policy.max_quarantined_share=0.01")
    assert (summary.status, summary.reasons) == ("quarantine_limit", {"IMAGE_MISSING": 1})
    last.write_bytes(picture(NUM_LINES - 1))
    assert case.pack(CONVERSATIONS, "policy.max_quarantined_share=0.01").inputs["packed"] == NUM_LINES
    # It is the dataset that a job with all pictures makes.
    other = CorpusCase(case.folder.parent / "whole")
    other.prepare()
    (other.texts / "images").symlink_to(case.texts / "images")
    other.write("a.jsonl", [json.dumps(line(number)).encode() for number in range(NUM_LINES)])
    other.pack(CONVERSATIONS, "policy.max_quarantined_share=0.01")
    assert tree_digests(case.output) == tree_digests(other.output)


def test_equal_names_in_two_folders_are_two_pictures(case: CorpusCase) -> None:
    for number, site in enumerate(("a", "b", "c")):
        (case.texts / site).mkdir()
        (case.texts / site / "0001.png").write_bytes(picture(number))
        case.write(f"{site}/lines.jsonl", [json.dumps(line(1) | {"image": "0001.png"}).encode()] * 2)
    case.pack(
        CONVERSATIONS,
        "policy.duplicates=skip",
        "policy.max_quarantined_share=1",
        "splits.parts={train=1}",
    )
    manifest = load(LocalStore(case.output))
    assert manifest.counts.packed == 3
    assert manifest.extra["reasons"] == {"DUPLICATE_TEXT": 3}


def test_forms_and_sources_are_counted_over_versions(case: CorpusCase) -> None:
    settings = (CONVERSATIONS, "conversations.source=house", "conversations.source_field=from")
    case.write("a.jsonl", [json.dumps(line(number)).encode() for number in range(3)])
    case.pack(*settings)
    pair = {"prompt": "Effusion?", "response": "No.", "from": "ward"}
    case.write("b.jsonl", [json.dumps(pair).encode(), json.dumps(line(4)).encode()])
    case.pack(*settings, mode="append")
    corpus: Any = load(LocalStore(case.output)).extra["corpus"]
    assert corpus["kind"] == "conversations"
    assert corpus["forms"] == {"llava": 4, "pair": 1}
    assert corpus["sources"] == [
        {"source": "house", "license": "", "num_samples": 4},
        {"source": "ward", "license": "", "num_samples": 1},
    ]


def test_nothing_of_a_picture_or_its_name_is_told(case: CorpusCase) -> None:
    (case.texts / "OKONKWO").mkdir()
    note = Image.Exif()
    note[0x010E] = "OKONKWO"
    Image.new("RGB", (8, 8)).save(case.texts / "OKONKWO" / "4711.jpg", exif=note)
    case.write("a.jsonl", [json.dumps(line(0) | {"image": "OKONKWO/4711.jpg"}).encode()])
    case.pack(CONVERSATIONS, "deid.text=scrub", f"conversations.image_root={case.texts}")
    for path in case.output.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert b"OKONKWO" not in content
        assert b"4711" not in content
        assert str(case.texts).encode() not in content


def test_the_loader_reads_conversations_and_their_pictures(case: CorpusCase) -> None:
    case.write("a.jsonl", [json.dumps(line(number)).encode() for number in range(NUM_LINES)])
    case.pack(CONVERSATIONS, "splits.parts={train = 1}")
    (tar,) = (case.output / "shards").glob("*.tar")
    assert stat.S_ISREG(tar.stat().st_mode)
    with tarfile.open(tar) as file:  # any reader of WebDataset finds them
        assert len([name for name in file.getnames() if name.endswith(".image.000.png")]) == NUM_LINES
    fields = {
        "conversation": sf.Json(member="conversation.json"),
        "picture": sf.Image(member="image.000.png", size=(8, 8)),
    }
    spec = sf.BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask")
    seen = []
    with sf.Loader(sf.open(case.output), split="train", seed=1, batch=spec, fields=fields) as loader:
        for batch in loader:
            assert batch["picture"].shape == (4, 3, 8, 8)
            seen += [batch["conversation"][slot]["messages"][0] for slot in batch.info.weight.nonzero()[0]]
    assert len({json.dumps(each) for each in seen}) == NUM_LINES


def test_conversations_about_packed_studies(case: CorpusCase) -> None:
    scans = case.folder / "scans"
    pixels = np.random.default_rng(3).integers(0, 4000, (5, 8, 6)).astype(np.int16)
    with sf.ShardWriter(scans) as writer:
        for number in range(4):
            writer.write({"__key__": f"s{number}", "s000.b2nd": pixels}, split="val" if number else "train")
    turns = [
        {"role": "user", "content": [{"type": "image", "study": f"s{number % 4}", "slices": 2}, "Effusion?"]}
        for number in range(8)
    ]
    lines = [{"messages": [turn, {"role": "assistant", "content": "No."}]} for turn in turns]
    case.write("a.jsonl", [json.dumps(each).encode() for each in lines])
    studies = f"conversations.studies={{dataset = {json.dumps(str(scans))}}}"
    with pytest.raises(ConfigError, match=r"splits\.parts has no val"):
        case.pack(CONVERSATIONS, studies, "splits.parts={train = 1}")
    summary = case.pack(CONVERSATIONS, studies, "splits.parts={train = 1, val = 0}")
    assert summary.reasons == {}
    dataset = Dataset.open(case.output)
    assert {split: len(rows) for split, rows in dataset.splits.items()} == {"train": 2, "val": 6}
    assert [name for name in dataset.read_fields(0) if name.startswith("image")] == [
        "image.000.png",
        "image.001.png",
    ]
    corpus: Any = dataset.manifest.extra["corpus"]
    assert corpus["studies"] == Dataset.open(scans).dataset_id
    assert str(scans).encode() not in b"".join(path.read_bytes() for path in case.output.rglob("*.json"))


def test_what_was_packed_is_rendered_as_the_processor_renders_the_input(case: CorpusCase) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (5, 40, 30)).astype(np.uint8)
    with sf.ShardWriter(case.folder / "scans") as writer:
        study = {"series": [{"display_range": [0, 255]}]}
        writer.write({"__key__": "s", "s000.b2nd": pixels, "study.json": study})
    turned = Image.Exif()
    turned[0x0112], turned[0x010E] = 6, "OKONKWO"
    radiograph = case.texts / "images" / "a.jpg"
    Image.fromarray(pixels[0]).save(radiograph, exif=turned)
    answer = {"role": "assistant", "content": "Clear lungs."}
    scans = {"type": "image", "study": "s", "slices": [1, 3]}
    before, after = {"type": "text", "text": "Before"}, {"type": "text", "text": "?"}
    marked = {"role": "user", "content": "<image>\nIs there an effusion?"}
    lines = [
        {"messages": [marked, answer], "image": "images/a.jpg"},
        {"messages": [{"role": "user", "content": [before, scans, after]}, answer]},
    ]
    case.write("a.jsonl", [json.dumps(each).encode() for each in lines])
    studies = f"conversations.studies={{dataset = {json.dumps(str(case.folder / 'scans'))}}}"
    # Nothing in these words is a name, so scrubbing changes the metadata of the picture alone.
    case.pack(CONVERSATIONS, studies, "splits.parts={train = 1}", "deid.text=scrub")
    folder = case.folder / "gemma3"
    make_folder("gemma3", folder, with_model=False)
    processor = AutoProcessor.from_pretrained(str(folder))

    def shown(image: Image.Image) -> dict[str, Any]:
        return {"type": "image", "image": ImageOps.exif_transpose(image).convert("RGB")}

    said = {"role": "assistant", "content": [{"type": "text", "text": "Clear lungs."}]}
    contents: list[list[dict[str, Any]]] = [
        [shown(Image.open(radiograph)), {"type": "text", "text": "\nIs there an effusion?"}],
        [before, *(shown(Image.fromarray(plane)) for plane in pixels[1:3]), after],
    ]
    chats = [[{"role": "user", "content": content}, said] for content in contents]
    wanted = processor.apply_chat_template(
        chats,
        tokenize=True,
        return_dict=True,
        return_tensors="np",
        processor_kwargs={"padding": True, "padding_side": "right"},
    )
    spec = sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=1, tail="mask")
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=200)}
    with sf.Loader(sf.open(case.output), split="train", seed=1, batch=spec, fields=fields) as loader:
        (batch,) = list(loader)
    rows = {tuple(row.tolist()) for row in batch["chat"]}
    assert rows == {tuple(row.tolist()) for row in wanted["input_ids"]}
    pictures = {plane.tobytes() for plane in batch["chat_pixel_values"]}
    assert pictures == {plane.tobytes() for plane in wanted["pixel_values"]}
    assert len(pictures) == 3


def test_bad_lines_are_listed_with_their_places(case: CorpusCase) -> None:
    """Also across the parts of a file, of files whose lines are values or rows, and of no dataset."""

    def talk(role: str = "user", answer: str = "Clear.") -> dict[str, Any]:
        turns = [{"role": role, "content": "Seen?"}, {"role": "assistant", "content": answer}]
        return {"messages": turns, "id": "secret"}

    filler = json.dumps(talk(answer="x" * 900))
    bad = [
        json.dumps(talk("doctor")), "{", "", json.dumps(talk(answer=" ")), json.dumps(line(99)),
        json.dumps(talk("user")), json.dumps(talk("user")),
    ]  # fmt: skip
    lines = [one for each in bad for one in (filler.replace("Seen?", f"{len(each)}?"), each)]
    case.write("a.jsonl", [one.encode() for one in lines])
    (case.texts / "b.json").write_text(json.dumps([talk(answer="y"), {"other": 1}]), encoding="utf-8")
    rows = [{"messages": talk(answer="z")["messages"]}, {"messages": []}]
    parquet.write_table(pa.Table.from_pylist(rows), case.texts / "c.parquet")
    settings = (CONVERSATIONS, "shards.part_bytes=4096", "policy.duplicates=skip")
    wanted = {
        ("a.jsonl", 2, "UNKNOWN_ROLE"),
        ("a.jsonl", 4, "INVALID_JSON"),
        ("a.jsonl", 6, "EMPTY_LINE"),
        ("a.jsonl", 8, "EMPTY_TURN"),
        ("a.jsonl", 10, "IMAGE_MISSING"),
        ("a.jsonl", 13, "DUPLICATE_TEXT"),
        ("a.jsonl", 14, "DUPLICATE_TEXT"),
        ("b.json", 2, "UNKNOWN_FORM"),
        ("c.parquet", 2, "EMPTY_TEXT"),
    }
    for share, status in (("0.01", "quarantine_limit"), ("1", "packed"), ("1", "already_packed")):
        summary = case.pack(*settings, f"policy.max_quarantined_share={share}")
        assert summary.status == status
        path = case.private / summary.bad_lines
        listed = [json.loads(one) for one in path.read_text(encoding="utf-8").splitlines()]
        found = {(Path(one["path"]).name, one["line"], one["reason"]) for one in listed}
        assert found == wanted
        assert len(listed) == sum(summary.reasons.values())
        assert all(one["problem"] and one["remedy"] for one in listed)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"secret" not in path.read_bytes()
        assert b"Seen" not in path.read_bytes()


def test_a_list_of_bad_lines_counts_what_it_leaves_out(
    case: CorpusCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "_MAX_LISTED", 3)
    case.write("a.jsonl", [b"{"] * 5 + [json.dumps({"prompt": "a", "response": "b"}).encode()])
    summary = case.pack(CONVERSATIONS, "policy.max_quarantined_share=1")
    listed = [json.loads(one) for one in (case.private / summary.bad_lines).read_text().splitlines()]
    assert [one.get("line") for one in listed] == [1, 2, 3, None]
    assert listed[-1] == {"reason": "INVALID_JSON", "num_not_listed": 2}
    # A job whose lines are all packed has none.
    whole = CorpusCase(case.folder.parent / "whole")
    whole.prepare()
    whole.write("a.jsonl", [json.dumps({"prompt": "a", "response": "b"}).encode()])
    assert whole.pack(CONVERSATIONS).bad_lines == ""
    assert not [*whole.private.glob("bad-lines*")]
