"""Conversations: a batch holds what the model's own processor returns, and each token has its weight."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image, ImageOps
from transformers.utils import chat_template_utils

import shardflow as sf
from shardflow.errors import ConfigError, SampleError
from shardflow.fields.conversations import rendering
from shardflow.fields.conversations.rendering import Renderer
from tests.conversation_case import FAMILIES, IMAGE_FAMILIES, generate, make_folder, write_conversations
from tests.corpora_case import CorpusCase

pytestmark = pytest.mark.usefixtures("packs_inline")

SPEC = sf.BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask")
ENDS = {"llama": "<|eot_id|>", "qwen": "<|im_end|>", "gemma3": "<end_of_turn>", "llava": "</s>"}


def folder_of(family: str, tmp_path: Path) -> tuple[Path, Any]:
    """A processor's folder, and the processor itself, read anew where torchvision is not needed."""
    folder = tmp_path / family
    made = make_folder(family, folder, with_model=False)
    if family.startswith("qwen2_"):
        return folder, made
    return folder, transformers.AutoProcessor.from_pretrained(str(folder))


def direct(processor: Any, found: Sequence[tuple[Mapping[str, Any], Sequence[Any]]]) -> dict[str, Any]:
    """What the processor returns for whole conversations, called as its users do."""
    has_images = hasattr(processor, "image_processor")
    chats = []
    for document, pictures in found:
        chat = []
        for message in document["messages"]:
            parts = [
                {"type": "image", "image": pictures[part["image"]]} if part["type"] == "image" else part
                for part in message["content"]
            ]
            content: Any = parts if has_images else "".join(part["text"] for part in parts)
            chat.append({"role": message["role"], "content": content})
        chats.append(chat)
    settings: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "np"}
    if has_images:
        padding = {"padding": True, "padding_side": "right"}
        return dict(processor.apply_chat_template(chats, processor_kwargs=padding, **settings))
    if processor.pad_token is None:
        processor.pad_token = processor.eos_token
    return dict(processor.apply_chat_template(chats, padding=True, **settings))


def check_equal(family: str, tmp_path: Path, num: int) -> None:
    """Compare all batches of generated conversations in every bit."""
    folder, processor = folder_of(family, tmp_path)
    words = getattr(processor, "tokenizer", processor)
    found = generate(num, 11, max_images=2 if family in IMAGE_FAMILIES else 0)
    dataset = write_conversations(tmp_path / "dataset", found)
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=400)}
    end, num_seen, num_pictures = ENDS.get(family, ENDS["qwen"]), 0, 0
    with sf.Loader(sf.open(dataset), split="train", seed=3, batch=SPEC, fields=fields) as loader:
        for batch in loader:
            keys = [key for key in batch.info.sample_keys if key is not None]
            assert not batch.quarantined
            here = [found[int(key.removeprefix("talk"))] for key in keys]
            wanted = direct(processor, here)
            names = {"input_ids": "chat", "attention_mask": "chat_mask"}
            for name, value in wanted.items():
                got = batch[names.get(name, f"chat_{name}")][: len(keys) if value.ndim == 2 else None]
                if name in ("pixel_values", "image_grid_thw"):
                    got = batch[f"chat_{name}"]
                    assert got.dtype == value.dtype
                    num_pictures += len(got)
                np.testing.assert_array_equal(got, value, err_msg=name)
            shown = {f"chat_{name}" for name in ("pixel_values", "image_grid_thw")} & {*batch}
            others = {"chat_weights", *shown, *(f"{name}_offsets" for name in shown)}
            assert {*batch} == {names.get(name, f"chat_{name}") for name in wanted} | others
            for slot, (document, _) in enumerate(here):
                assert learned(words, batch, slot) == answers(document, end)
            num_seen += len(keys)
    assert num_seen == num
    assert bool(num_pictures) == (family in IMAGE_FAMILIES)


def learned(words: Any, batch: Any, slot: int) -> list[tuple[str, float]]:
    """Runs of tokens of one weight, as text."""
    ids, weights = batch["chat"][slot], batch["chat_weights"][slot]
    starts = np.flatnonzero(np.diff(weights, prepend=0.0, append=0.0))
    runs = [slice(a, b) for a, b in pairwise(starts.tolist()) if weights[a]]
    return [(words.decode(ids[run]).strip(), float(weights[run.start])) for run in runs]


def answers(document: Mapping[str, Any], end: str) -> list[tuple[str, float]]:
    """What the assistant says and its end token, with its weight."""
    said = [one for one in document["messages"] if one["role"] == "assistant"]
    pairs = [(one["content"][0]["text"].strip() + end, one.get("weight", 1.0)) for one in said]
    return [(text, weight) for text, weight in pairs if weight]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_what_the_processor_returns(family: str, tmp_path: Path) -> None:
    check_equal(family, tmp_path, 21)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_conversations_are_what_the_processor_returns(family: str, tmp_path: Path) -> None:
    check_equal(family, tmp_path, 1000)


def read(dataset: Path, folder: Path, **settings: Any) -> list[Any]:
    """All batches with conversations of a folder's processor."""
    fields = {"chat": sf.Conversation(processor=str(folder), **{"max_tokens": 400} | settings)}
    config = sf.LoaderConfig(max_bad_share=1.0, max_bad_samples=100)
    with sf.Loader(
        sf.open(dataset), split="train", seed=3, batch=SPEC, fields=fields, config=config
    ) as loader:
        return list(loader)


def test_pairs_share_their_beginning_and_learn_their_ends_alone(tmp_path: Path) -> None:
    folder, processor = folder_of("qwen2_5_vl", tmp_path)
    found = generate(4, 5, pairs=True)
    batch = read(write_conversations(tmp_path / "dataset", found), folder, pairs=True)[0]
    assert batch["chat"].shape == batch["chat_weights"].shape == (4, 2, batch["chat"].shape[-1])
    here = [found[int(key.removeprefix("talk"))] for key in batch.info.sample_keys]
    num_pictures = 0
    for slot, (document, pictures) in enumerate(here):
        for place, name in enumerate(("chosen", "rejected")):
            whole = {"messages": [*document["messages"], *document[name]]}
            wanted = direct(processor, [(whole, pictures)])
            length = int(batch["chat_mask"][slot, place].sum())
            np.testing.assert_array_equal(batch["chat"][slot, place, :length], wanted["input_ids"][0])
            one = {"chat": batch["chat"][slot], "chat_weights": batch["chat_weights"][slot]}
            assert learned(processor.tokenizer, one, place) == answers(
                {"messages": document[name]}, "<|im_end|>"
            )
            if pictures:
                grids = batch["chat_image_grid_thw"][num_pictures : num_pictures + len(pictures)]
                np.testing.assert_array_equal(grids, wanted["image_grid_thw"])
            num_pictures += len(pictures)
    assert num_pictures == len(batch["chat_image_grid_thw"]) > 0


def test_other_roles_are_learned_where_they_are_named(tmp_path: Path) -> None:
    folder, processor = folder_of("gemma3", tmp_path)
    found = generate(3, 6)
    batch = read(write_conversations(tmp_path / "dataset", found), folder, train_on=("user",))[0]
    for slot, key in enumerate(batch.info.sample_keys[:3]):
        document = found[int(key.removeprefix("talk"))][0]
        text = "".join(said for said, _ in learned(processor.tokenizer, batch, slot))
        asked = [message for message in document["messages"] if message["role"] == "user"]
        for message in asked:
            words = next(part["text"] for part in message["content"] if part["type"] == "text")
            assert words.strip() in text
        assert text.count("<end_of_turn>") == text.count("<start_of_turn>user") == len(asked)
        assert "<start_of_turn>model" not in text
        assert "<image_soft_token>" not in text


def test_documents_are_learned_whole_but_for_their_pictures(tmp_path: Path) -> None:
    folder, processor = folder_of("llava", tmp_path)
    (document, pictures), *_ = [one for one in generate(20, 8) if len(one[1]) == 2]
    parts = [
        {"type": "text", "text": "A chest."},
        {"type": "image", "image": 0},
        {"type": "text", "text": "And a later one."},
    ]
    page = {**document, "kind": "document", "messages": [{"role": "document", "content": parts}]}
    batch = read(write_conversations(tmp_path / "dataset", [(page, pictures[:1])]), folder)[0]
    said = [text for text, _ in learned(processor.tokenizer, batch, 0)]
    assert said == ["<s>A chest.", "And a later one.</s>"]
    assert len(batch["chat_pixel_values"]) == 1


def test_a_long_conversation_is_never_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = folder_of("llama", tmp_path)
    found = generate(8, 9, max_images=0)
    dataset = write_conversations(tmp_path / "dataset", found)
    lengths = np.concatenate([batch["chat_mask"].sum(axis=1) for batch in read(dataset, folder)])
    most = int(np.sort(lengths)[4])
    num_long = int((lengths > most).sum())
    masked = read(dataset, folder, max_tokens=most)
    rows = [row for batch in masked for row in batch.quarantined]
    assert [row.reason for row in rows] == ["CONVERSATION_TOO_LONG"] * num_long
    (line,) = [one.getMessage() for one in caplog.records if "masked a sample" in one.getMessage()]
    assert f"longer than max_tokens ({most}); raise max_tokens" in line
    field = sf.Conversation(processor=str(folder), max_tokens=most)
    for config in (sf.LoaderConfig(max_bad_samples=0), sf.LoaderConfig(on_bad_sample="raise")):
        spec = sf.BatchSpec.simple(global_batch_size=2, micro_batch_size=2)
        with (
            sf.Loader(
                sf.open(dataset), split="train", seed=3, batch=spec, fields={"chat": field}, config=config
            ) as one,
            pytest.raises(
                SampleError, match=r'CONVERSATION_TOO_LONG.*long = "skip".*split_long = true.*tokenize'
            ),
        ):
            list(one)
    assert "talk" not in line
    skipped = read(dataset, folder, max_tokens=most, long="skip")
    assert not [row for batch in skipped for row in batch.quarantined]
    kept = np.concatenate([batch["chat_mask"].sum(axis=1) for batch in skipped])
    assert sorted(kept[kept > 0]) == sorted(lengths[lengths <= most])
    weights = np.concatenate([batch["chat_weights"].sum(axis=1) for batch in skipped])
    assert not weights[kept == 0].any()


def test_scores_are_delivered_and_others_have_none(tmp_path: Path) -> None:
    folder, _ = folder_of("llama", tmp_path)
    found = generate(4, 16, max_images=0)
    found[1:3] = [({**one, "kind": "reward", "score": -1.5}, []) for one, _ in found[1:3]]
    (batch,) = read(write_conversations(tmp_path / "dataset", found), folder, scores=True)
    assert sorted(row.key for row in batch.quarantined) == ["talk0000", "talk0003"]
    assert batch["chat_score"].dtype == np.float32
    np.testing.assert_array_equal(batch["chat_score"], np.where(batch.info.weight > 0, -1.5, 0))
    with pytest.raises(ConfigError, match="scores are those of whole stored conversations"):
        sf.Conversation(processor=str(folder), max_tokens=9, scores=True, pairs=True)


def test_damaged_and_foreign_conversations_are_masked_one_by_one(tmp_path: Path) -> None:
    folder, _ = folder_of("qwen2_5_vl", tmp_path)
    found = generate(6, 10, max_images=1)
    (pictured, pictures), *_ = [one for one in generate(9, 12) if one[1]]
    bad: list[tuple[Any, Sequence[Any]]] = [
        ({**pictured, "format_version": 2}, pictures),
        (pictured, []),  # without its pictures
        ({**pictured, "kind": "preference"}, pictures),
        ({**pictured, "kind": "prompt"}, pictures),  # nobody answers
        ({"kind": "conversation"}, []),
        ({**pictured, "images": [{"series": 0, "slices": [0, 1]}] * len(pictures)}, []),
    ]
    dataset = write_conversations(tmp_path / "dataset", [*found, *bad])
    batches = read(dataset, folder)
    rows = [row for batch in batches for row in batch.quarantined]
    assert sorted(row.key for row in rows) == [f"talk{number:04d}" for number in range(6, 12)]
    for batch in batches:
        is_there = batch["chat_mask"].any(axis=1)
        np.testing.assert_array_equal(is_there, batch.info.weight > 0)


@pytest.mark.slow
def test_other_processes_render_the_same(tmp_path: Path) -> None:
    folder, _ = folder_of("llava", tmp_path)
    dataset = write_conversations(tmp_path / "dataset", generate(6, 13))
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=400)}
    config = sf.LoaderConfig(execution="process", num_threads=2)
    with sf.Loader(
        sf.open(dataset), split="train", seed=3, batch=SPEC, fields=fields, config=config
    ) as loader:
        other = [{name: np.array(value) for name, value in batch.items()} for batch in loader]
    for mine, batch in zip(read(dataset, folder), other, strict=True):
        for name, value in mine.items():
            np.testing.assert_array_equal(value, batch[name])


def test_files_of_a_processor_count_and_not_their_place(tmp_path: Path) -> None:
    folder, _ = folder_of("llava", tmp_path)
    dataset = write_conversations(tmp_path / "dataset", generate(6, 13))

    def identity(place: Path) -> object:
        fields = {"chat": sf.Conversation(processor=str(place), max_tokens=400)}
        with sf.Loader(sf.open(dataset), split="train", seed=3, batch=SPEC, fields=fields) as loader:
            return loader.state_dict()["content_id"]

    before = identity(folder)
    moved = folder.rename(tmp_path / "elsewhere")
    assert identity(moved) == before
    settings = json.loads((moved / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.5, 0.5, 0.5]
    (moved / "processor_config.json").write_text(json.dumps(settings))
    assert identity(moved) != before


def test_threads_render_beside_each_other(tmp_path: Path) -> None:
    """transformers has one compiled template for all threads, and it notes in it what the assistant says."""
    folder, _ = folder_of("llama", tmp_path)
    found = [document["messages"] for document, _ in generate(40, 15, max_images=0)]
    whole = Renderer.load(folder)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            renderers = [whole.copy() for _ in range(4)]

            def render(number: int) -> list[Any]:
                return [renderers[number].render(one, (), train_on=("assistant",)) for one in found]

            every = list(pool.map(render, range(4)))
    finally:
        sys.setswitchinterval(before)
    for rendered in every[1:]:
        for mine, other in zip(rendered, every[0], strict=True):
            np.testing.assert_array_equal(mine.weights, other.weights)


def test_every_render_of_a_marked_template_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beginnings too: they would add what the assistant says to the notes of another thread."""
    folder, _ = folder_of("llama", tmp_path)
    whole = Renderer.load(folder)
    real, held = chat_template_utils.render_jinja_template, []

    def render(**settings: Any) -> Any:
        held.append(rendering._MARKED.locked())
        return real(**settings)

    monkeypatch.setattr(chat_template_utils, "render_jinja_template", render)
    (document, _), *_ = generate(1, 15, max_images=0)
    whole.render(document["messages"], (), train_on=("user", "assistant"))
    assert len(held) > 1
    assert all(held)


DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }}\n"
)


def test_no_token_depends_on_the_day(tmp_path: Path) -> None:
    folder, processor = folder_of("llama", tmp_path)
    plain, template = Renderer.load(folder).digest, processor.chat_template
    processor.chat_template = DATED + template
    processor.save_pretrained(str(folder))
    found = Renderer.load(folder)
    text = processor.decode(found.example(()).ids)
    assert text.startswith("26 Jul 2024\n")
    assert found.digest != plain
    processor.chat_template = "{{ strftime_now('%Y') }}" + template
    processor.save_pretrained(str(folder))
    with pytest.raises(ConfigError, match=r"put a date in place of strftime_now\(\.\.\.\)"):
        Renderer.load(folder)


@pytest.mark.parametrize("most", [0, 1])
def test_more_pictures_than_allowed_are_a_long_conversation(most: int, tmp_path: Path) -> None:
    folder, _ = folder_of("qwen2_5_vl", tmp_path)
    found = [one for one in generate(40, 9, max_images=2) if len(one[1]) in (most, most + 1)]
    is_long = [len(pictures) > most for _, pictures in found]
    assert {*is_long} == {True, False}
    dataset = write_conversations(tmp_path / "dataset", found)
    skipped = read(dataset, folder, max_images=most, long="skip")
    assert not [row for batch in skipped for row in batch.quarantined]
    keys = [
        key
        for batch in skipped
        for key, mask in zip(batch.info.sample_keys, batch["chat_mask"], strict=True)
        if key is not None and not mask.any()
    ]
    assert sorted(keys) == [f"talk{number:04d}" for number, one in enumerate(is_long) if one]
    rows = [row for batch in read(dataset, folder, max_images=most) for row in batch.quarantined]
    assert [row.reason for row in rows] == ["CONVERSATION_TOO_LONG"] * sum(is_long)


def test_settings_and_processors_that_cannot_work_are_refused(tmp_path: Path) -> None:
    folder, processor = folder_of("qwen2", tmp_path)
    dataset = write_conversations(tmp_path / "dataset", generate(2, 14, max_images=0))
    with pytest.raises(ConfigError, match=r"train_on names roles"):
        sf.Conversation(processor=str(folder), max_tokens=8, train_on=("doctor",))
    with pytest.raises(ConfigError, match=r"processor must be a local folder with a tokenizer\.json"):
        read(dataset, tmp_path)
    budget = sf.BatchSpec(
        budget=sf.TokenBudget(max_tokens=500, max_samples=4), micro_batches_per_step=1, lanes=1
    )
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=400)}
    with pytest.raises(ConfigError, match=r"has no counts of tokens for this processor"):
        sf.Loader(sf.open(dataset), split="train", batch=budget, seed=3, fields=fields)
    # A template that shortens what was said before, so that no beginning is a beginning of the whole.
    processor.chat_template = (
        "{% for m in messages %}{{ m['role'] }}{{ m['content'] if loop.last else '' }}{% endfor %}"
    )
    processor.save_pretrained(str(folder))
    with pytest.raises(ConfigError, match=r"renders the beginning of a conversation otherwise"):
        read(dataset, folder)
    processor.chat_template = None
    processor.save_pretrained(str(folder))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"has no chat template"):
        read(dataset, folder)


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform, which gets a sample's own pictures."""
    return {"double": sample["chat_pixel_values"] * 2, "num_tokens": int(sample["chat_mask"].sum())}


def test_transforms_get_the_pictures_of_their_sample(tmp_path: Path) -> None:
    folder, _ = folder_of("llava", tmp_path)
    dataset = write_conversations(tmp_path / "dataset", generate(8, 17))
    whole = read(dataset, folder)
    fields = {"chat": sf.Conversation(processor=str(folder), max_tokens=400)}
    with sf.Loader(
        sf.open(dataset), split="train", seed=3, batch=SPEC, fields=fields, transform=doubled
    ) as loader:
        for batch, plain in zip(loader, whole, strict=True):
            offsets = plain["chat_pixel_values_offsets"]
            assert offsets[-1] == len(plain["chat_pixel_values"])
            for slot in range(4):
                own = plain["chat_pixel_values"][offsets[slot] : offsets[slot + 1]]
                np.testing.assert_array_equal(batch["double"][slot], own * 2)
                assert batch["num_tokens"][slot] == plain["chat_mask"][slot].sum()


def test_packed_lines_are_rendered_with_their_pictures_as_pillow_shows_them(tmp_path: Path) -> None:
    """JSON of LLaVA through the packing job: a turned photo and a gray PNG of 16 bits."""
    case = CorpusCase(tmp_path / "job")
    case.prepare()
    rng = np.random.default_rng(5)
    turned = Image.Exif()
    turned[0x0112] = 6
    photo = Image.fromarray(rng.integers(0, 256, (40, 70, 3), np.uint8))
    photo.save(case.texts / "a.jpg", exif=turned, quality=95)
    gray = rng.integers(0, 65536, (50, 60), np.uint16)
    Image.fromarray(gray).save(case.texts / "b.png")
    lines: list[dict[str, Any]] = [
        {
            "image": ["a.jpg", "b.png"],
            "conversations": [
                {"from": "human", "value": "<image>What is seen?\n<image>"},
                {"from": "gpt", "value": "Clear lungs."},
            ],
        },
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    ]
    (case.texts / "lines.json").write_text(json.dumps(lines), encoding="utf-8")
    case.pack("fields.kind=conversations", "splits.parts={train = 1, val = 0, test = 0}")
    folder, processor = folder_of("qwen2_5_vl", tmp_path)
    seen = 0
    for batch in read(case.output, folder):
        assert not batch.quarantined
        for slot in np.flatnonzero(batch.info.weight):
            text = processor.tokenizer.decode(batch["chat"][slot][batch["chat_mask"][slot] > 0])
            if "Hello." in text:
                continue
            with Image.open(case.texts / "a.jpg") as opened:
                shown = [ImageOps.exif_transpose(opened).convert("RGB")]
            shown.append(Image.fromarray((gray // 257).astype(np.uint8)).convert("RGB"))
            content = [
                {"type": "image", "image": shown[0]},
                {"type": "text", "text": "What is seen?\n"},
                {"type": "image", "image": shown[1]},
            ]
            answer = [{"type": "text", "text": "Clear lungs."}]
            wanted = processor.apply_chat_template(
                [{"role": "user", "content": content}, {"role": "assistant", "content": answer}],
                tokenize=True,
                return_dict=True,
                return_tensors="np",
            )
            length = wanted["input_ids"].shape[1]
            np.testing.assert_array_equal(batch["chat"][slot][:length], wanted["input_ids"][0])
            np.testing.assert_array_equal(batch["chat_pixel_values"], wanted["pixel_values"])
            np.testing.assert_array_equal(batch["chat_image_grid_thw"], wanted["image_grid_thw"])
            seen += 1
    assert seen == 1
