"""Templates: conversations of studies are those that their values spell out, rendered by the processor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

import numpy as np
import pytest
from PIL import Image

import shardflow as sf
from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.registry import FieldsFile
from shardflow.fields.types.text import SECTIONS
from shardflow.format import Dataset
from shardflow.format.keys import STUDY_FIELD
from shardflow.loading import Loader
from shardflow.loading.sample import conversation_of
from shardflow.reports import ReportReader, SectionKind
from shardflow.sampling import BatchSpec
from shardflow.viewing import render_pieces
from tests.conversation_case import make_folder
from tests.factories import MadeSample, make_dataset
from tests.field_cases import make_case
from tests.integration.loader_support import Batches, batches_of, number_of, open_loader, slots_of

NUM_SAMPLES: Final = 16
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
TURNS: Final = [
    {"role": "system", "text": "You read {facts.modality}, {{briefly}}."},
    {
        "role": "user",
        "text": ["<image:frontal>What changed since <image:prior>?", "<image:frontal><image:prior> Compare."],
        "when": "prior and facts.age_years > 0",
    },
    {
        "role": "user",
        "text": [
            "<image:frontal>Report of a {facts.sex}, {facts.age_years:.1f}.",
            "<image:frontal>Seen?",
            "Say. <image:frontal>",
        ],
        "when": "not prior",
    },
    {"role": "assistant", "text": "{impression}", "weight": 0.5},
]  # fmt: skip
FIELDS: Final[Mapping[str, sf.Field]] = {
    "frontal": sf.Image(series="role == 'frontal'", size=(40, 56), missing="pad"),
    "prior": sf.Image(series="role == 'frontal'", size=(28, 30), study="previous", missing="pad"),
    "impression": sf.Text(section="impression", missing="pad"),
    "findings": sf.Text(section="findings", missing="pad"),
}


def impression_of(number: int) -> str:
    return f"Größe {number}, no effusion." if number % 5 else ""


def report_of(number: int) -> str:
    """A report whose findings have a part of their own; some have no impression."""
    end = f"\n\nIMPRESSION:\n{impression_of(number)}\n" if number % 5 else "\n"
    return f"INDICATION: Pain {number}.\n\nFINDINGS:\nNo mass.\nLUNGS: Clear {number}.{end}"


def box_of(number: int) -> list[float]:
    return [1.0, 2.0, 5.5 + number % 3, 9.25]


def make(number: int, **_: Any) -> MadeSample:
    """Study ``number`` of one of four persons, with a report that is read, and a box in its frontal image."""
    text, frontal = report_of(number), 1 if number % 4 == 0 else 0
    place = {"slice": 0, "box_px": box_of(number), "area_mm2": None, "diameter_mm": None, "fraction": None}
    roi = {"roi": 0, "series": frontal, "label": "nodule", "anatomy": None, "code": None, "laterality": None}
    roi |= {"kind": "box", "source": "csv", "tracking_key": None, "slices": [place]}
    extra = {"report.txt": text, "report.json": json.dumps(ReportReader().read(text).to_json())}
    extra["annotations.json"] = json.dumps({"format_version": 1, "rois": [roi], "dangling": []})
    made = make_case(number, extra={name: one.encode() for name, one in extra.items()})
    study = json.loads(made.fields[STUDY_FIELD])
    study["patient"] = {
        "patient_key": "abcd"[number // 4] * 8,
        "sex": "FM"[number % 2],
        "age_years": 40 + number,
    }
    study["dates"] = {"study_day": number}
    return replace(made, fields={**made.fields, STUDY_FIELD: json.dumps(study).encode()})


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("templates") / "a"
    return Dataset.open(
        make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make, facts=True)
    )


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str, Any]]:
    """Folder and processor by family."""
    folder = tmp_path_factory.mktemp("processors")
    families = ("qwen2_5_vl", "llava", "gemma3", "llama")
    return {one: (str(folder / one), make_folder(one, folder / one, with_model=False)) for one in families}


def talk(processors: Any, family: str = "qwen2_5_vl", turns: Any = TURNS, **settings: Any) -> sf.Field:
    given = {"missing": "pad", "max_tokens": 700, **settings}
    words = given.pop("words", {"F": "woman"})
    boxes = {name: given.pop(name) for name in ("coordinates", "box", "separator") if name in given}
    return sf.Conversation(
        processor=processors[family][0], template=sf.Template(turns=turns, words=words, **boxes), **given
    )


def loader_of(dataset: Dataset, field: sf.Field, **settings: Any) -> Loader:
    fields = {**FIELDS, "talk": field, **settings.pop("fields", {})}
    return open_loader(dataset, SPEC, fields, **{"max_bad_share": 1.0, "max_bad_samples": 99, **settings})


def picture(pixels: Any, display: Any) -> Any:
    """What packing makes of a slice in its display range, from the definition."""
    low, high = (float(one) for one in display)
    gray = np.clip(np.round((pixels[0].astype(float) - low) / (high - low) * 255), 0, 255).astype(np.uint8)
    return Image.fromarray(np.stack([gray] * 3, axis=-1))


def say(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def expected(batch: Any, slot: int, number: int, phrase: int) -> list[dict[str, Any]] | None:
    """Messages that a study spells out with a phrasing of its question; None where it lacks a value."""
    if number % 4 == 1 or not impression_of(number):
        return None
    frontal = {"type": "image", "image": picture(batch["frontal"][slot], batch["frontal_range"][slot])}
    if batch["prior_mask"][slot]:
        prior = {"type": "image", "image": picture(batch["prior"][slot], batch["prior_range"][slot])}
        asked = ([frontal, say("What changed since "), prior, say("?")], [frontal, prior, say(" Compare.")])[
            phrase % 2
        ]
    else:
        sex = "woman" if number % 2 == 0 else "M"
        asked = (
            [frontal, say(f"Report of a {sex}, {40 + number:.1f}.")],
            [frontal, say("Seen?")],
            [say("Say. "), frontal],
        )[phrase]
    system = f"You read {['DX', 'CT', 'CR', 'CR'][number % 4]}, {{briefly}}."
    return [
        {"role": "system", "content": [say(system)]},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [say(impression_of(number))]},
    ]


def rendered(processor: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return dict(
        processor.apply_chat_template([messages], tokenize=True, return_dict=True, return_tensors="np")
    )


def test_a_conversation_is_what_the_values_of_its_study_spell_out(dataset: Dataset, processors: Any) -> None:
    _, processor = processors["qwen2_5_vl"]
    drawn: Counter[tuple[bool, int]] = Counter()
    num_empty = num_pictures = 0
    with loader_of(dataset, talk(processors)) as loader:
        for _ in range(2):
            for batch in loader:
                pictures = []
                for slot, number in slots_of(batch):
                    length = int(batch["talk_mask"][slot].sum())
                    wanted = [expected(batch, slot, number, phrase) for phrase in range(3)]
                    if wanted[0] is None:
                        assert length == 0
                        num_empty += 1
                        continue
                    ids = batch["talk"][slot, :length].tolist()
                    made = [rendered(processor, one) for one in wanted if one is not None]
                    (found,) = {
                        phrase for phrase, one in enumerate(made) if one["input_ids"][0].tolist() == ids
                    } - ({2} if batch["prior_mask"][slot] else set())
                    drawn[bool(batch["prior_mask"][slot]), found] += 1
                    pictures.append(made[found]["pixel_values"])
                    is_learned = batch["talk_weights"][slot] > 0
                    words = processor.tokenizer.decode(batch["talk"][slot][is_learned])
                    assert words == impression_of(number) + "<|im_end|>"
                    assert {*batch["talk_weights"][slot][is_learned].tolist()} == {0.5}
                if pictures:
                    np.testing.assert_array_equal(batch["talk_pixel_values"], np.concatenate(pictures))
                    num_pictures += len(pictures)
                assert not batch.quarantined
        assert loader.counters.totals("incomplete_conversations").num_items == num_empty
        by_name = {
            name.rpartition(".")[2]: totals["num_items"]
            for name, totals in loader.counters.snapshot().items()
            if name.startswith("incomplete_conversations.")
        }
        assert sum(by_name.values()) == num_empty
        assert by_name["impression"] > 0
    assert num_pictures
    assert num_empty == 2 * sum(n % 4 == 1 or n % 5 == 0 for n in range(NUM_SAMPLES))
    assert {*drawn} == {(True, 0), (True, 1), (False, 0), (False, 1), (False, 2)}, "no phrasing is left out"


def test_conversations_are_equal_on_any_number_of_ranks_and_after_a_resume(
    dataset: Dataset, processors: Any
) -> None:
    def opened(**settings: Any) -> Loader:
        return loader_of(dataset, talk(processors), **settings)

    whole = batches_of(opened())
    assert batches_of(opened(num_threads=1)) == whole
    for world_size in (2, 4):
        parts: Batches = {}
        for rank in range(world_size):
            parts |= batches_of(opened(world=sf.World(rank=rank, world_size=world_size)))
        assert {place: parts[place] for place in whole} == whole
    with opened() as loader:
        state = next(loader.state_dict() for batch in loader if batch.slot == 3)
    resumed = opened()
    resumed.load_state_dict(state)
    assert batches_of(resumed) == {place: one for place, one in whole.items() if place[0] >= 1}


@pytest.mark.slow
def test_conversations_are_equal_in_every_execution(dataset: Dataset, processors: Any) -> None:
    whole = batches_of(loader_of(dataset, talk(processors)))
    for execution in ("process", "workers"):
        assert batches_of(loader_of(dataset, talk(processors), execution=execution)) == whole


def test_a_missing_value_masks_the_slot_and_is_counted(dataset: Dataset, processors: Any) -> None:
    lacking = {number for number in range(NUM_SAMPLES) if number % 4 == 1 or number % 5 == 0}
    with loader_of(dataset, talk(processors, missing="error")) as loader:
        batches = list(loader)
    bad = {number for batch in batches for slot, number in slots_of(batch) if not batch.info.weight[slot]}
    assert bad == lacking
    reasons = {(row.field, row.reason) for batch in batches for row in batch.quarantined}
    assert reasons == {("talk", "FIELD_MISSING")}


def test_columns_alone_ask_and_answer_in_a_model_of_text(dataset: Dataset, processors: Any) -> None:
    turns = [
        {"role": "user", "text": "Sex?", "when": "facts.sex == 'F'"},
        {"role": "user", "text": "Old?", "when": "facts.sex == 'M'"},
        {"role": "assistant", "text": "Yes", "when": "facts.age_years >= 50"},
        {"role": "assistant", "text": "{facts.age_years}", "when": "facts.age_years < 45"},
    ]
    spec = talk(processors, "llama", turns, words={"41": "forty-one"})
    processor, found = processors["llama"][1], {}
    with open_loader(dataset, SPEC, {"talk": spec}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                found[number] = processor.decode(batch["talk"][slot][batch["talk_weights"][slot] > 0])
    for number, words in found.items():
        age = 40 + number
        said = "Yes" if age >= 50 else {41: "forty-one"}.get(age, str(age)) if age < 45 else ""
        assert words == (f"{said}<|eot_id|>" if said else "")
    assert len(found) == NUM_SAMPLES


def test_numbers_are_written_in_full() -> None:
    template = sf.Template(turns=[USER, ANSWER])  # type: ignore[arg-type]
    given = [1234567.0, 0.1, np.float32(0.1), 40.0, 2**60 + 1, -2.5e-7, np.float32(16777216)]
    said = ["1234567", "0.1", "0.1", "40", "1152921504606846977", "-0.00000025", "16777216"]
    assert [template.write_value(one, "") for one in given] == said
    assert [template.write_value(one, ".2f") for one in (3.14159, 1234567)] == ["3.14", "1234567.00"]
    assert [template.write_value(one, "d") for one in (3.0, 2**60 + 1)] == ["3", "1152921504606846977"]


def test_a_whole_number_is_written_of_whole_numbers_alone(
    dataset: Dataset, processors: Any, tmp_path: Path
) -> None:
    def make_half(number: int, **_: Any) -> MadeSample:
        made = make(number)
        study = json.loads(made.fields[STUDY_FIELD])
        study["patient"]["age_years"] += 0.5 * (number % 3 == 0)
        return replace(made, fields={**made.fields, STUDY_FIELD: json.dumps(study).encode()})

    turns = [{"role": "user", "text": "Age?"}, {"role": "assistant", "text": "{facts.age_years:d}"}]
    spec = talk(processors, "llama", turns)
    with open_loader(dataset, SPEC, {"talk": spec}) as loader:
        assert {row.reason for batch in loader for row in batch.quarantined} == set()
    other = Dataset.open(make_dataset(tmp_path / "b", num_samples=NUM_SAMPLES, make=make_half, facts=True))
    with pytest.raises(
        ConfigError, match=r"\{facts.age_years:d\}, and 6 of 16 samples .* \{facts.age_years:.0f"
    ):
        open_loader(other, SPEC, {"talk": spec})


def test_a_field_is_required_where_it_is_used(dataset: Dataset, processors: Any) -> None:
    """``missing="error"`` of what only turns with a condition name masks no sample that says none of them."""
    prior = sf.Image(series="role == 'frontal'", size=(28, 30), study="previous")
    padded = batches_of(loader_of(dataset, talk(processors)))
    eased = batches_of(loader_of(dataset, talk(processors), fields={"prior": prior}))
    assert eased == padded
    turns = [
        {"role": "user", "text": "Seen?"},
        {"role": "assistant", "text": "{impression}", "when": "facts.sex == 'F'"},
        {"role": "assistant", "text": "Ask him.", "when": "facts.sex == 'M'"},
    ]
    fields = {"impression": sf.Text(section="impression"), "talk": talk(processors, "llama", turns)}
    with open_loader(dataset, SPEC, fields, max_bad_share=1.0, max_bad_samples=99) as loader:
        batches = list(loader)
    bad = {number for batch in batches for slot, number in slots_of(batch) if not batch.info.weight[slot]}
    assert bad == {number for number in range(NUM_SAMPLES) if number % 2 == 0 and not impression_of(number)}
    assert {(row.field, row.reason) for batch in batches for row in batch.quarantined} == {
        ("talk", "FIELD_MISSING")
    }


GROUNDED: Final = [
    {"role": "user", "text": "<image:frontal>Where?"},
    {"role": "assistant", "text": "At {lesions}."},
]


def said_boxes(
    dataset: Dataset, field: sf.Field, processor: Any, size: Any, fit: Any
) -> Iterator[tuple[int, Any, list[int]]]:
    fields: dict[str, sf.Field] = {
        "frontal": sf.Image(series="role == 'frontal'", size=size, fit=fit, missing="pad")
    }
    fields["lesions"] = sf.Boxes(like="frontal", labels=["nodule"])
    words = getattr(processor, "tokenizer", processor)
    with loader_of(dataset, field, fields=fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                said = words.decode(batch["talk"][slot][batch["talk_weights"][slot] > 0])
                if said:
                    numbers = said.partition("[")[2].partition("]")[0].split(", ")
                    yield number, batch, [int(one) for one in numbers]
                else:
                    assert number % 4 == 1  # no frontal image, so no box either


def stored_shape(number: int) -> tuple[int, int]:
    return {0: (24, 16), 2: (18, 18), 3: (22, 14)}[number % 4]


@pytest.mark.parametrize("coordinates", ["thousandths", "pixels", "model"])
def test_boxes_are_where_the_model_sees_them(dataset: Dataset, processors: Any, coordinates: str) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    spec = talk(processors, turns=GROUNDED, coordinates=coordinates, box="{label}: [{x0}, {y0}, {x1}, {y1}]")
    rows, columns = 41, 77
    limits = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}
    seen = {
        "thousandths": (1000, 1000),
        "pixels": (rows, columns),
        "model": smart_resize(rows, columns, factor=28, **limits),
    }[coordinates]
    found = list(said_boxes(dataset, spec, processors["qwen2_5_vl"][1], (rows, columns), "stretch"))
    assert len(found) == 12
    for number, batch, said in found:
        stored = stored_shape(number)
        x0, y0, x1, y1 = box_of(number)
        wanted = [x0 / stored[1], y0 / stored[0], x1 / stored[1], y1 / stored[0]]
        np.testing.assert_allclose(said, np.array(wanted) * (seen[1], seen[0], seen[1], seen[0]), atol=0.51)
        if coordinates == "model":
            for grid in batch["talk_image_grid_thw"]:
                assert (grid[1:] * 14).tolist() == [*seen]


def test_boxes_of_a_letterboxed_image_count_its_borders(dataset: Dataset, processors: Any) -> None:
    spec = talk(processors, "llava", GROUNDED)
    for number, _, said in said_boxes(dataset, spec, processors["llava"][1], (60, 60), "letterbox"):
        rows, columns = stored_shape(number)
        scale = 60 / max(rows, columns)
        before = (60 - round(columns * scale)) // 2, (60 - round(rows * scale)) // 2
        x0, y0, x1, y1 = box_of(number)
        wanted = [
            x0 * scale + before[0],
            y0 * scale + before[1],
            x1 * scale + before[0],
            y1 * scale + before[1],
        ]
        np.testing.assert_allclose(said, np.array(wanted) / 60 * 1000, atol=12)  # half a pixel


def test_boxes_that_the_model_would_see_elsewhere_are_refused(dataset: Dataset, processors: Any) -> None:
    wide = {
        "frontal": sf.Image(series="role == 'frontal'", size=(28, 56), missing="pad"),
        "lesions": sf.Boxes(like="frontal"),
    }
    square = {**wide, "frontal": sf.Image(series="role == 'frontal'", size=(28, 28), missing="pad")}
    several = {**wide, "frontal": sf.Image(num_images=2, size=(28, 28), missing="pad")}

    def refused(family: str, fields: Any, match: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            loader_of(dataset, talk(processors, family, **{"turns": GROUNDED, **settings}), fields=fields)

    refused("llava", wide, "cuts images.*square size")
    refused("gemma3", square, "Qwen2.5-VL", coordinates="model")
    refused("gemma3", several, "num_images=1")
    refused("gemma3", square, "write labels=", box="{label} [{x0}, {y0}, {x1}, {y1}]")
    asked = [{"role": "user", "text": "<image:prior>Where?"}, GROUNDED[1]]
    refused("gemma3", square, "<image:frontal>", turns=asked)
    with loader_of(dataset, talk(processors, "llava", GROUNDED), fields=square) as loader:
        next(iter(loader))


USER: Final = {"role": "user", "text": "<image:frontal>Seen?"}
ANSWER: Final = {"role": "assistant", "text": "{impression}"}


@pytest.mark.parametrize(
    ("turns", "match"),
    [
        ([USER, {**ANSWER, "text": "{impresion}"}], "did you mean impression"),
        ([USER, {**ANSWER, "text": "{sex}"}], "did you mean facts.sex"),
        ([USER, {**ANSWER, "text": "{facts.patient_key}"}], "no column or field"),
        ([USER, {**ANSWER, "text": "{series.modality}"}], "no column or field"),
        ([USER, {**ANSWER, "text": "{frontal}"}], "no column or field"),
        ([{**USER, "text": "<image:impression>?"}, ANSWER], "no field of images"),
        ([USER, {**ANSWER, "when": "facts.sx == 'F'"}], "did you mean facts.sex"),
        ([USER, {**ANSWER, "when": "facts.sex = 'F'"}], "two equals signs"),
        ([USER, {**ANSWER, "text": "{impression"}], "write {{ or }}"),
        ([USER, {**ANSWER, "text": "{facts.age_years:>9}"}], "format"),
        ([USER, {**ANSWER, "text": "{facts.age_years:.1d}"}], "format"),
        ([USER, {**ANSWER, "text": " "}], "none of them empty"),
        ([USER, {**ANSWER, "role": "doctor"}], "role"),
        ([USER, {**ANSWER, "weight": -1}], "weight"),
        ([USER], "'assistant'"),
        ([ANSWER], "'user'"),
        ([USER, {"role": "system", "text": "x"}, ANSWER], "first one"),
        ([USER, {**ANSWER, "wen": "x"}], "may have when"),
        ([], "list of turns"),
        ("<image:frontal>", "list of turns"),
    ],
)
def test_a_slip_is_told_before_step_0(dataset: Dataset, processors: Any, turns: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        loader_of(dataset, talk(processors, turns=turns))


def test_settings_that_do_not_go_together_are_refused(dataset: Dataset, processors: Any) -> None:
    for settings, match in (
        ({"pairs": True}, "pairs"),
        ({"missing": "drop"}, "where="),
        ({"member": "a.json"}, "member"),
    ):
        with pytest.raises(ConfigError, match=match):
            talk(processors, **settings)
    with pytest.raises(ConfigError, match="text alone"):
        loader_of(dataset, talk(processors, "llama"))
    turns = [USER, {**ANSWER, "when": "prior"}, USER, ANSWER]
    with loader_of(dataset, talk(processors, turns=turns)) as loader:
        rows = [row for batch in loader for row in batch.quarantined]
    assert {row.reason for row in rows} == {"DECODE_FAILED"}, "two questions follow each other"


def test_a_template_is_read_from_toml_and_written_back(
    dataset: Dataset, processors: Any, tmp_path: Path
) -> None:
    spec = talk(processors)
    template: Any = spec.template  # type: ignore[attr-defined]
    (tmp_path / "report.toml").write_text(dump_config(template), encoding="utf-8")
    lines = [
        "[fields.talk]",
        'type = "conversation"',
        f'processor = "{processors["qwen2_5_vl"][0]}"',
        "max_tokens = 700",
    ]
    lines += ['missing = "pad"', 'template = "report.toml"']
    (tmp_path / "fields.toml").write_text("\n".join(lines), encoding="utf-8")
    read = load_config(FieldsFile, tmp_path / "fields.toml")
    assert read.fields["talk"] == spec
    (tmp_path / "again.toml").write_text(dump_config(read), encoding="utf-8")
    assert load_config(FieldsFile, tmp_path / "again.toml").fields["talk"] == spec, (
        "written out, without the file"
    )
    (tmp_path / "report.toml").write_text("[[turns]]\nrole = 'user'\ntxt = 'x'", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'txt'.*'text'"):
        load_config(FieldsFile, tmp_path / "fields.toml")


def test_preview_draws_what_a_loader_delivers(dataset: Dataset, processors: Any, tmp_path: Path) -> None:
    """Pictures stand where their tokens do, each once; weights and words are those of the batch."""
    spec: Any = talk(processors)
    opened = sf.open(dataset.store.url)
    renderer, seen = Renderer.load(spec.processor), 0
    for row in range(NUM_SAMPLES):
        fields = {**FIELDS, "talk": spec}
        sample = opened.sample(row, fields)
        length = int(sample["talk_mask"].sum())
        if not length:
            with pytest.raises(ConfigError, match="makes no conversation"):
                conversation_of(opened, row, fields, "talk")
            continue
        document, pictures = conversation_of(opened, row, fields, "talk")
        rendered = renderer.render(document["messages"], pictures, train_on=("assistant",))
        assert rendered.ids.tolist() == sample["talk"][:length].tolist()
        assert rendered.weights.tolist() == sample["talk_weights"][:length].tolist()
        pieces = renderer.pieces(rendered, len(pictures))
        assert [one for one in pieces if isinstance(one, int)] == [*range(len(pictures))]
        learned = [one for one in pieces if not isinstance(one, int) and one[1] > 0]
        assert learned == [(impression_of(number_of(opened.samples.sample_key(row))) + "<|im_end|>", 0.5)]
        words = "".join(one[0] for one in pieces if not isinstance(one, int))
        assert words == renderer.tokenizer.decode(rendered.ids).replace("<|image_pad|>", "")
        seen += 1
    assert seen
    assert render_pieces("talk", "", [("", pieces)], pictures).startswith(b"\x89PNG")


def test_a_changed_template_is_other_content(dataset: Dataset, processors: Any) -> None:
    def content_id(turns: Any) -> str:
        with loader_of(dataset, talk(processors, turns=turns)) as loader:
            return str(loader.state_dict()["content_id"])

    assert content_id(TURNS) == content_id(TURNS)
    assert content_id([USER, ANSWER]) != content_id([{**USER, "text": "<image:frontal>Seen"}, ANSWER])


def test_an_evaluation_says_the_first_phrasing(dataset: Dataset, processors: Any) -> None:
    words = processors["qwen2_5_vl"][1].tokenizer
    with loader_of(dataset, talk(processors).for_evaluation()) as loader:
        said = [words.decode(row) for _ in range(2) for batch in loader for row in batch["talk"]]
    asked = [one for one in said if "assistant" in one]
    assert asked
    assert all("What changed since" in one or "Report of a" in one for one in asked)


def test_a_section_of_a_report_is_text(dataset: Dataset) -> None:
    assert {*SECTIONS} == {*get_args(SectionKind)}
    with open_loader(dataset, SPEC, {name: FIELDS[name] for name in ("findings", "impression")}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert batch["findings"][slot] == f"No mass.\nLUNGS: Clear {number}."
                assert batch["impression"][slot] == impression_of(number)
                assert batch["impression_mask"][slot] == bool(impression_of(number))
    for settings, match in (
        ({"section": "finding"}, "findings"),
        ({"section": "findings", "member": "a.txt"}, "member"),
    ):
        with pytest.raises(ConfigError, match=match):
            sf.Text(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot drop"):
        open_loader(dataset, SPEC, {"text": sf.Text(section="findings", missing="drop")})
    with open_loader(
        dataset, SPEC, {"text": sf.Text(section="impression")}, max_bad_share=1.0, max_bad_samples=9
    ) as loader:
        bad = {row.key for batch in loader for row in batch.quarantined}
    assert len(bad) == sum(not impression_of(number) for number in range(NUM_SAMPLES))
