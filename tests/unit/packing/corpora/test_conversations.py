"""Every form of a conversation becomes the same stored form, or exactly one reason."""

from __future__ import annotations

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shardflow.errors import ConfigError
from shardflow.packing.corpora.config import (
    ConversationsConfig,
    CorpusDeidConfig,
    CorpusSplitsConfig,
    FieldsConfig,
    Form,
    LineError,
    LineReason,
)
from shardflow.packing.corpora.content import ContentMaker, texts_digest
from shardflow.packing.corpora.lines import TarLine, TarSample
from tests.unit.packing.corpora.test_mapping import KEY, make_config

pytestmark = pytest.mark.fast

USER = {"role": "user", "content": "Effusion?"}
YES, NO = {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}


def picture(seed: int = 0, size: tuple[int, int] = (8, 12), kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, kind, **options)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures beside lines."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.png").write_bytes(picture(1))
    (tmp_path / "in" / "sub" / "b.jpg").write_bytes(picture(2, (10, 6), "JPEG"))
    (tmp_path / "out.png").write_bytes(picture(3))
    return tmp_path / "in"


def maker(**settings: Any) -> ContentMaker:
    tables = {name: settings.pop(name) for name in ("fields", "deid", "splits", "limits") if name in settings}
    tables.setdefault("fields", FieldsConfig(kind="conversations"))
    return ContentMaker(make_config(conversations=ConversationsConfig(**settings), **tables), KEY)


def pack(line: dict[str, Any], folder: Path = Path(), /, **settings: Any) -> dict[str, bytes]:
    made = maker(**settings)
    members = made.fields(line, made.read(line), folder)
    assert members == sorted(members)
    return dict(members)


def stored(line: dict[str, Any], folder: Path = Path(), /, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pack(line, folder, **settings)["conversation.json"])
    assert found.pop("format_version") == 1
    return found


def said(turns: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return roles and contents, a picture as its number in braces."""
    return [
        (turn["role"], "".join(part.get("text", f"{{{part.get('image')}}}") for part in turn["content"]))
        for turn in turns
    ]


def reason(line: dict[str, Any], folder: Path = Path(), /, **settings: Any) -> LineReason:
    with pytest.raises(LineError) as caught:
        pack(line, folder, **settings)
    return caught.value.reason


TEXTS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "system", "content": "Be brief."}, USER, NO]},
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": "Effusion?"}, {"from": "gpt", "value": "No."}],
    },
    "alpaca": {"system": "Be brief.", "instruction": "Effusion?", "input": "", "output": "No."},
    "pair": {"system": "Be brief.", "prompt": "Effusion?", "completion": "No."},
    "reward": {"messages": [{"role": "developer", "content": "Be brief."}, USER, NO], "reward": -1.5},
}


@pytest.mark.parametrize("form", TEXTS)
def test_the_same_words_in_every_form_are_stored_the_same(form: str) -> None:
    found = stored(TEXTS[form])
    assert said(found.pop("messages")) == [
        ("system", "Be brief."),
        ("user", "Effusion?"),
        ("assistant", "No."),
    ]
    score = {"score": -1.5, "kind": "reward"} if form == "reward" else {"kind": "conversation"}
    assert found == {"form": form, "images": [], **score}
    assert pack(TEXTS[form])["report.txt"] == (
        b"<|system|>\nBe brief.\n<|user|>\nEffusion?\n<|assistant|>\nNo.\n"
    )


def test_other_names_of_fields_are_settings() -> None:
    line = {"q": "Effusion?", "a": {"en": "No."}, "rating": 3}
    names = FieldsConfig(kind="conversations", prompt="q", response="a.en")
    assert said(stored(line, fields=names)["messages"]) == [("user", "Effusion?"), ("assistant", "No.")]
    assert stored(line, fields=names, score="rating")["score"] == 3
    assert reason(line) is LineReason.UNKNOWN_FORM
    assert reason(line, form="alpaca") is LineReason.MISSING_FIELD
    turns = {"chat": [{"who": "Radiologist", "says": "Effusion?"}, {"who": "gpt", "says": "No."}]}
    roles = FieldsConfig(
        kind="conversations",
        turns="chat",
        role="who",
        content="says",
        roles={"Radiologist": "user", "gpt": "assistant"},
    )
    assert said(stored(turns, fields=roles)["messages"]) == [("user", "Effusion?"), ("assistant", "No.")]


def test_an_earlier_exchange_of_alpaca_comes_first() -> None:
    line = {"instruction": "And now?", "input": "CT", "output": "No.", "history": [["Effusion?", "Yes."]]}
    assert said(stored(line)["messages"]) == [
        ("user", "Effusion?"),
        ("assistant", "Yes."),
        ("user", "And now?\n\nCT"),
        ("assistant", "No."),
    ]


PREFERENCES: list[dict[str, Any]] = [
    {"prompt": "Effusion?", "chosen": "Yes.", "rejected": "No."},
    {"instruction": "Effusion?", "input": "", "chosen": "Yes.", "rejected": "No."},
    {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
    {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
    {"chosen": [USER, YES], "rejected": [USER, NO]},
    {
        "conversations": [{"from": "human", "value": "Effusion?"}],
        "chosen": {"from": "gpt", "value": "Yes."},
        "rejected": {"from": "gpt", "value": "No."},
    },
]


@pytest.mark.parametrize("line", PREFERENCES)
def test_a_preference_has_one_prompt_and_two_answers(line: dict[str, Any]) -> None:
    found = stored(line)
    assert (found["kind"], found["form"]) == ("preference", "preference")
    assert [said(found[what]) for what in ("messages", "chosen", "rejected")] == [
        [("user", "Effusion?")],
        [("assistant", "Yes.")],
        [("assistant", "No.")],
    ]
    assert pack(line)["report.txt"].endswith(b"<|assistant|>\nYes.\n")


def test_a_system_text_stands_before_a_prompt_that_both_answers_repeat() -> None:
    found = stored({"system": "Be brief.", "chosen": [USER, YES], "rejected": [USER, NO]})
    assert said(found["messages"]) == [("system", "Be brief."), ("user", "Effusion?")]


@pytest.mark.parametrize(
    "line",
    [
        {"problem": "1 + 1", "solution": "2"},
        {"messages": [{"role": "user", "content": "1 + 1"}], "answer": 2},
    ],
)
def test_a_prompt_has_its_answer_beside_it(line: dict[str, Any]) -> None:
    found = stored(line)
    assert (found["kind"], said(found["messages"]), found["answer"]) == ("prompt", [("user", "1 + 1")], "2")


def test_a_conversation_with_an_answer_beside_it_is_none(folder: Path) -> None:
    line = {"messages": [USER, NO], "answer": "no"}
    assert stored(line)["kind"] == "conversation"


REFUSED: list[tuple[LineReason, dict[str, Any]]] = [
    (LineReason.UNKNOWN_FORM, {"question": "a"}),
    (LineReason.EMPTY_TEXT, {"messages": []}),
    (LineReason.WRONG_TYPE, {"messages": "a"}),
    (LineReason.WRONG_TYPE, {"messages": ["a"]}),
    (LineReason.MISSING_FIELD, {"messages": [{"role": "user"}]}),
    (LineReason.MISSING_FIELD, {"messages": [{"content": "a"}]}),
    (LineReason.WRONG_TYPE, {"messages": [{"role": "user", "content": 3}]}),
    (LineReason.WRONG_TYPE, {"messages": [{"role": 3, "content": "a"}]}),
    (LineReason.UNKNOWN_ROLE, {"messages": [{"role": "oracle", "content": "a"}]}),
    (LineReason.EMPTY_TURN, {"messages": [USER, {"role": "assistant", "content": " "}]}),
    (LineReason.EMPTY_TURN, {"messages": [USER, {"role": "assistant", "content": []}]}),
    (LineReason.EMPTY_TURN, {"prompt": "a", "answer": " "}),
    (LineReason.TURN_ORDER, {"messages": [USER]}),
    (LineReason.TURN_ORDER, {"messages": [NO, USER]}),
    (LineReason.TURN_ORDER, {"messages": [USER, USER, NO]}),
    (LineReason.TURN_ORDER, {"messages": [USER, {"role": "system", "content": "a"}, NO]}),
    (LineReason.TURN_ORDER, {"prompt": [USER, NO], "answer": "a"}),
    (LineReason.TURN_ORDER, {"prompt": [USER], "chosen": [USER, YES], "rejected": [NO]}),
    (LineReason.SAME_ANSWERS, {"prompt": "a", "chosen": "b", "rejected": "b"}),
    (LineReason.WRONG_TYPE, {"messages": [USER, NO], "reward": True}),
    (LineReason.WRONG_TYPE, {"messages": [USER, NO], "reward": 10**400}),
    (LineReason.WRONG_TYPE, {"texts": 5}),
    (LineReason.WRONG_TYPE, {"messages": [{"role": "user", "content": [{"type": ["text"]}]}, NO]}),
    (LineReason.WRONG_TYPE, {"messages": [USER, {**NO, "weight": -1}]}),
    (LineReason.UNSUPPORTED_CONTENT, {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}),
    (LineReason.UNSUPPORTED_CONTENT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
    *(
        (LineReason.UNSUPPORTED_CONTENT, {"messages": [USER, {**NO, name: "Hm."}]})
        for name in ("reasoning_content", "thinking", "reasoning")
    ),
    *(
        (LineReason.UNSUPPORTED_CONTENT, {"messages": [USER, NO], name: ["x"]})
        for name in ("tools", "videos", "audios")
    ),
    (LineReason.INVALID_UTF8, {"messages": [USER, {"role": "assistant", "content": "\ud800"}]}),
    (LineReason.IMAGE_COUNT, {"messages": [{"role": "user", "content": "<image>?"}, NO]}),
    (
        LineReason.IMAGE_COUNT,
        {"messages": [{"role": "user", "content": "<image>?"}, NO], "images": ["a.png"] * 2},
    ),
    (LineReason.IMAGE_COUNT, {"messages": [USER, NO], "image": "a.png"}),
    (LineReason.IMAGE_COUNT, {"texts": ["a"], "images": ["a.png", None]}),
    (LineReason.WRONG_TYPE, {"messages": [{"role": "user", "content": "<image>?"}, NO], "images": [3]}),
]


@pytest.mark.parametrize(("expected", "line"), REFUSED)
def test_what_does_not_fit_has_its_reason(expected: LineReason, line: dict[str, Any], folder: Path) -> None:
    assert reason(line, folder) is expected


def test_tools_answer_assistants() -> None:
    tool = {"role": "tool", "content": "3 cm"}
    turns = stored({"messages": [USER, YES, tool, tool, NO]})["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool", "assistant"]


def test_fields_of_tools_and_thoughts_may_be_empty_or_kept() -> None:
    empty = {"messages": [USER, {**NO, "thinking": None, "reasoning": ""}], "tools": "[]", "videos": []}
    assert said(stored(empty)["messages"])[1] == ("assistant", "No.")
    assert {"tools", "videos", "audios"} <= {*maker().columns}
    kept = stored(
        {"messages": [USER, NO], "tools": ["x"]}, fields=FieldsConfig(kind="conversations", keep=("tools",))
    )
    assert kept["fields"] == {"tools": ["x"]}


def test_weights_of_turns_are_kept() -> None:
    turns = stored({"messages": [USER, {**YES, "weight": 0}, USER, {**NO, "weight": 0.5}]})["messages"]
    assert [turn.get("weight") for turn in turns] == [None, 0, None, 0.5]


# ---- pictures ------------------------------------------------------------------------------------------


def pictured(content: Any, **beside: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, NO], **beside}


def data_url(payload: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(payload).decode()


BEFORE, AFTER = {"type": "text", "text": "Before"}, {"type": "text", "text": "?"}
NAMES_OF_BOTH = ["a.png", "sub/b.jpg"]
BY_PATH = {"type": "image", "path": "sub/../sub/b.jpg"}
MARKED = "<image>Before<image>?"
IN_PLACE = [
    pictured(MARKED, images=NAMES_OF_BOTH),
    pictured([{"type": "image"}, BEFORE, {"type": "image", "image": None}, AFTER], images=NAMES_OF_BOTH),
    pictured([{"type": "image_url", "image_url": {"url": "a.png"}}, BEFORE, BY_PATH, AFTER]),
    pictured([{"type": "input_image", "image_url": data_url(picture(1))}, "Before", BY_PATH, "?"]),
    pictured(MARKED, images=[{"bytes": picture(1), "path": "x"}, {"bytes": None, "path": "sub/b.jpg"}]),
    {
        "image": NAMES_OF_BOTH,
        "conversations": [{"from": "human", "value": MARKED}, {"from": "gpt", "value": "No."}],
    },
]


@pytest.mark.parametrize("line", IN_PLACE)
def test_pictures_stand_where_they_were_and_are_stored_beside(line: dict[str, Any], folder: Path) -> None:
    members = pack(line, folder)
    found = json.loads(members["conversation.json"])
    assert said(found["messages"])[0] == ("user", "{0}Before{1}?")
    assert found["images"] == [
        {"member": "image.000.png", "rows": 8, "columns": 12},
        {"member": "image.001.jpg", "rows": 10, "columns": 6},
    ]
    assert members["image.000.png"] == picture(1)
    assert members["image.001.jpg"] == (folder / "sub" / "b.jpg").read_bytes()
    assert members["report.txt"].startswith(b"<|user|>\n<image>Before<image>?\n")


def numbered(*numbers: int | None) -> list[dict[str, Any]]:
    return [{"type": "image", "text": None, "index": number} for number in numbers]


def test_numbers_of_parts_say_which_picture_stands_where(folder: Path) -> None:
    text = {"type": "text", "text": "?", "index": None}
    found = stored(pictured([*numbered(1, 0), text, *numbered(1)], images=NAMES_OF_BOTH), folder)
    assert said(found["messages"])[0] == ("user", "{0}{1}?{0}")
    assert [one["member"] for one in found["images"]] == ["image.000.jpg", "image.001.png"]
    for wrong in (numbered(0, 2), numbered(0), numbered(0, None), numbered(0, 1, 2)):
        line = pictured([*wrong, text], images=NAMES_OF_BOTH)
        assert reason(line, folder) is LineReason.IMAGE_COUNT
    line = pictured([*numbered(-1), text], images=["a.png"])
    assert reason(line, folder) is LineReason.WRONG_TYPE


def test_pictures_beside_a_line_of_a_tar_are_not_dropped() -> None:
    def of_tar(line: dict[str, Any]) -> TarLine:
        sample = TarSample(key=b"0001", place=0, line=json.dumps(line).encode(), pictures={"png": picture(1)})
        return TarLine.of(sample)

    plain = of_tar({"messages": [USER, NO]})
    assert reason(plain) is LineReason.IMAGE_COUNT
    assert said(stored(plain, unplaced_images="first")["messages"])[0] == ("user", "{0}Effusion?")
    by_number = of_tar(pictured([*numbered(0), {"type": "text", "text": "?"}]))
    assert said(stored(by_number)["messages"])[0] == ("user", "{0}?")
    named = of_tar(pictured("<image>?", image="0001.png"))
    assert len(stored(named)["images"]) == 1


def test_a_document_alternates_texts_and_pictures(folder: Path) -> None:
    parallel = {"texts": [None, "first", "second", None], "images": ["a.png", None, None, "sub/b.jpg"]}
    marked = {"text": "<image>firstsecond<image>", "images": ["a.png", "sub/b.jpg"]}
    for line in (parallel, marked):
        found = stored(line, folder)
        assert (found["kind"], said(found["messages"])) == ("document", [("document", "{0}firstsecond{1}")])
        assert pack(line, folder)["report.txt"] == b"<image>firstsecond<image>"


def test_a_picture_that_comes_twice_is_stored_once(folder: Path) -> None:
    found = stored(pictured("<image><image>?", images=["a.png", "a.png"]), folder)
    assert (said(found["messages"])[0][1], len(found["images"])) == ("{0}{0}?", 1)


def test_pictures_without_a_place_go_first_if_asked(folder: Path) -> None:
    line = {"messages": [{"role": "system", "content": "Be brief."}, USER, NO], "image": "a.png"}
    assert said(stored(line, folder, unplaced_images="first")["messages"])[1] == ("user", "{0}Effusion?")


def test_another_marker_is_a_setting(folder: Path) -> None:
    line = pictured("<img> or <image>?", image="a.png")
    assert said(stored(line, folder, marker="<img>")["messages"])[0][1] == "{0} or <image>?"
    with pytest.raises(ConfigError, match="marker"):
        ConversationsConfig(marker="")


def test_a_picture_of_both_answers_is_in_the_prompt(folder: Path) -> None:
    asked = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "?"}]}
    found = stored({"chosen": [asked, YES], "rejected": [asked, NO]}, folder)
    assert (said(found["messages"]), len(found["images"])) == ([("user", "{0}?")], 1)


def test_pictures_that_cannot_be_had_have_their_reason(folder: Path, tmp_path: Path) -> None:
    whole = picture(1)
    (folder / "cut.png").write_bytes(whole[:-20])
    (folder / "cut.jpg").write_bytes((folder / "sub" / "b.jpg").read_bytes()[:-40])
    (folder / "text.png").write_text("OKONKWO")
    Image.new("RGB", (4, 4)).save(folder / "a.gif")
    expected = {
        "none.png": LineReason.IMAGE_MISSING,
        "sub": LineReason.IMAGE_MISSING,
        "": LineReason.IMAGE_MISSING,
        "x" * 5000: LineReason.IMAGE_MISSING,
        "../out.png": LineReason.IMAGE_ELSEWHERE,
        str(tmp_path / "out.png"): LineReason.IMAGE_ELSEWHERE,
        "https://example.org/a.png": LineReason.IMAGE_ELSEWHERE,
        "cut.png": LineReason.NOT_AN_IMAGE,
        "cut.jpg": LineReason.NOT_AN_IMAGE,
        "text.png": LineReason.NOT_AN_IMAGE,
        "a.gif": LineReason.NOT_AN_IMAGE,
        "data:image/png;base64,####": LineReason.NOT_AN_IMAGE,
    }
    assert {name: reason(pictured("<image>?", image=name), folder) for name in expected} == expected
    # A root of their own, for lines that lie elsewhere.
    assert stored(pictured("<image>?", image="a.png"), tmp_path, image_root=folder)["images"]


def test_images_of_a_line_have_a_limit_together(folder: Path) -> None:
    size = len(picture(1))
    (folder / "c.png").write_bytes(picture(4))
    line = pictured("<image><image>?", images=["a.png", "c.png"])
    assert len(stored(line, folder, max_image_bytes=2 * size + 50)["images"]) == 2
    for limit in (size + 50, size // 2):
        assert reason(line, folder, max_image_bytes=limit) is LineReason.IMAGES_TOO_LARGE
    # A few bytes that state many pixels: nothing is allocated for them.
    bomb = bytearray(picture(1))
    bomb[16:24] = struct.pack(">II", 15_000, 12_000)
    bomb[29:33] = struct.pack(">I", zlib.crc32(bomb[12:29]))
    (folder / "bomb.png").write_bytes(bomb)
    assert reason(pictured("<image>?", image="bomb.png"), folder) is LineReason.NOT_AN_IMAGE


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "progressive"])
def test_notes_in_pictures_go_and_pixels_stay(orientation: int, kind: str, folder: Path) -> None:
    from PIL.ImageOps import exif_transpose
    from PIL.PngImagePlugin import PngInfo

    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x0132] = orientation, "OKONKWO", "1970:01:02"
    notes = PngInfo()
    notes.add_text("Patient", "OKONKWO")
    options: dict[str, Any] = {"pnginfo": notes} if kind == "PNG" else {"comment": b"OKONKWO", "quality": 90}
    payload = picture(5, (17, 31), kind.replace("progressive", "JPEG"), exif=exif, **options,
                      **({"progressive": True} if kind == "progressive" else {}))  # fmt: skip
    (folder / "noted").write_bytes(payload + b"OKONKWO")
    line = pictured("<image>?", image="noted")
    members = pack(line, folder, deid=CorpusDeidConfig(text="scrub"))
    (name,) = (name for name in members if name.startswith("image."))
    assert b"OKONKWO" in payload
    assert not any(note in members[name] for note in (b"OKONKWO", b"1970"))
    before, after = (exif_transpose(Image.open(io.BytesIO(one))) for one in (payload, members[name]))
    assert np.array_equal(np.asarray(before), np.asarray(after))
    entry = json.loads(members["conversation.json"])["images"][0]
    assert (entry["columns"], entry["rows"]) == after.size
    kept = pack(line, folder, deid=CorpusDeidConfig(text="keep"))
    assert kept[name] == payload + b"OKONKWO"


# ---- texts, sources, splits ----------------------------------------------------------------------------


def test_texts_are_scrubbed_wherever_they_stand() -> None:
    named = "Mrs. Okonkwo, MRN 4711-0815."
    line = {
        "messages": [{"role": "user", "content": named}],
        "answer": named,
        "from": named,
    }
    about = pack(line, deid=CorpusDeidConfig(), source_field="from")
    assert not any(word in each for word in (b"Okonkwo", b"4711") for each in about.values())


def test_source_and_license_are_of_the_line_or_of_all() -> None:
    settings = {
        "source": "house",
        "license": "internal",
        "source_field": "set",
        "license_field": "terms",
        "licenses": {"pmc": "CC-BY-4.0"},
    }
    line = TEXTS["messages"]
    told = [
        [found["source"], found["license"]]
        for found in (
            stored(line | beside, **settings)
            for beside in ({}, {"set": "pmc"}, {"set": "pmc", "terms": "CC0-1.0"})
        )
    ]
    assert told == [["house", "internal"], ["pmc", "CC-BY-4.0"], ["pmc", "CC0-1.0"]]
    assert "source" not in stored(line)
    counted = maker(**settings)
    counted.fields(line, counted.read(line))
    assert (dict(counted.sources), dict(counted.forms)) == ({"house\tinternal": 1}, {"messages": 1})
    assert reason(line | {"set": "x" * 300}, **settings) is LineReason.WRONG_TYPE


def test_fields_that_are_kept_stand_in_the_conversation() -> None:
    fields = FieldsConfig(kind="conversations", keep=("n",))
    assert stored(TEXTS["messages"] | {"n": 3}, fields=fields)["fields"] == {"n": 3}


def test_conversations_about_one_picture_stay_in_one_split(folder: Path) -> None:
    made = maker(splits=CorpusSplitsConfig(parts={"train": 1, "val": 1}))

    def split(line: dict[str, Any]) -> str:
        return made.identify(line, made.read(line), "file", 0).split

    by_picture = [
        {
            split(pictured(f"<image>{question}?", image=f"{'./' * (question % 2)}{n}.png"))
            for question in range(6)
        }
        for n in range(30)
    ]
    assert all(len(splits) == 1 for splits in by_picture)
    assert set.union(*by_picture) == {"train", "val"}


def test_what_tells_conversations_apart_makes_the_digest() -> None:
    lines = [
        TEXTS["messages"],
        TEXTS["reward"],
        {"messages": [USER, YES]},
        {"prompt": "Effusion?", "chosen": "Yes.", "rejected": "No."},
        {"prompt": "Effusion?", "chosen": "No.", "rejected": "Yes."},
        pictured("<image>?", image="a.png"),
        pictured("<image>?", image="b.png"),
        pictured("?<image>", image="a.png"),
        pictured("<image>?", image={"bytes": b"1"}),
    ]
    made = maker()
    assert len({texts_digest(made.read(line)) for line in lines}) == len(lines)
    read = made.read(pictured("<image>?", image="a/0001.png"))
    other = made.read(pictured("<image>?", image="0001.png"))
    assert made.digest(read, "/in/lines.jsonl") != made.digest(read, "/other/lines.jsonl")
    assert made.digest(read, "/in/lines.jsonl") == made.digest(other, "/in/a/lines.jsonl")
    rooted = maker(image_root=Path("/in"))
    assert rooted.digest(read, "/in/lines.jsonl") == rooted.digest(read, "/other/lines.jsonl")
    assert texts_digest(made.read(TEXTS["messages"])) == texts_digest(made.read(TEXTS["sharegpt"]))


def test_roles_are_the_four_of_a_conversation() -> None:
    with pytest.raises(ConfigError, match="map it to one of them"):
        maker(fields=FieldsConfig(kind="conversations", roles={"human": "person"}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "<image>", "user", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "from", "content", "value", "type", "text", "image", "weight", "path"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
NAMES = ["messages", "conversations", "prompt", "response", "chosen", "rejected", "instruction", "input",
         "output", "history", "answer", "reward", "texts", "images", "text", "system"]  # fmt: skip


@given(
    line=st.dictionaries(st.sampled_from(NAMES), json_values, max_size=5),
    form=st.sampled_from(["auto", *get_args(Form)]),
)
def test_any_line_is_a_conversation_or_has_a_reason(line: dict[str, Any], form: Any) -> None:
    try:
        found = stored(line, form=form)
    except LineError:
        return
    for what in ("messages", "chosen", "rejected"):
        for turn in found.get(what, []):
            assert turn["content"]
            for one, other in zip(turn["content"], turn["content"][1:], strict=False):
                assert "image" in (one["type"], other["type"])
