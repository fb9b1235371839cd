"""Templates under a token budget and as pairs: counted beside the dataset, planned, equal to single ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.fields.conversations.field import Conversation
from shardflow.fields.conversations.rendering import Renderer
from shardflow.fields.units import open_unit
from shardflow.format.checks.verification import verify
from shardflow.format.counts import open_conversation_counts
from shardflow.loading import Loader
from shardflow.loading.binding import bind_fields
from shardflow.loading.counting import TemplateCounter
from shardflow.loading.rows.selection import select
from shardflow.sampling import BatchSpec
from shardflow.telemetry import StageCounters
from shardflow.training.tokenizing import count_dataset
from tests.conversation_case import make_folder
from tests.factories import make_dataset
from tests.integration.loader_support import Batches, batches_of, number_of, open_loader
from tests.integration.test_templates import FIELDS, NUM_SAMPLES, TURNS, impression_of, make
from tests.sweeps import sampled

ALONE: Final = BatchSpec(micro_batch_size=1, micro_batches_per_step=1)
PACKED: Final = BatchSpec(
    budget=sf.TokenBudget(max_tokens=400, max_samples=8, padded=False),
    micro_batches_per_step=2,
    lanes=1,
    tail="mask",
)
HAS_IMPRESSION: Final = {number for number in range(NUM_SAMPLES) if impression_of(number)}
HAS_BOTH: Final = {number for number in HAS_IMPRESSION if number % 4 != 1}  # others have no frontal image
TEXT_TURNS: Final[list[dict[str, Any]]] = [
    {
        "role": "user",
        "text": ["Age?", "How many years old is the patient of this study, in words or numbers?"],
    },
    {"role": "assistant", "text": "{facts.age_years}, {impression}"},
]
PAIR_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "user", "text": "What is seen?"},
    {"role": "assistant", "chosen": "{impression}", "rejected": ["{findings}", "Nothing, {facts.sex}."]},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "a"
    return Path(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make, facts=True))


@pytest.fixture
def dataset(made: Path, tmp_path: Path) -> Path:
    """A dataset of its own, beside which nothing is counted yet."""
    return Path(shutil.copytree(made, tmp_path / "a"))


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("processors")
    families = ("qwen2_5_vl", "llama")
    for one in families:
        make_folder(one, folder / one, with_model=False)
    return {one: folder / one for one in families}


def fields_of(processor: Path, turns: Any, *, draws: Any = "sample", **settings: Any) -> dict[str, Any]:
    given = {"missing": "pad", "max_tokens": 400, **settings}
    template = sf.Template(turns=turns, words={"F": "woman"}, draws=draws)
    named = {name for one in template.turns for name in one.possible_fields}
    talk = sf.Conversation(processor=str(processor), template=template, **given)
    return {**{name: one for name, one in FIELDS.items() if name in named}, "talk": talk}


def count(dataset: Path, fields: Mapping[str, sf.Field], **settings: Any) -> Any:
    talk = fields["talk"]
    assert isinstance(talk, Conversation)
    return count_dataset(sf.open(dataset), Path(talk.processor), fields=fields, name="talk", **settings)


def alone(dataset: Path, fields: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each conversation in a batch of its own, by key; samples that make none are left out."""
    with open_loader(sf.open(dataset), ALONE, fields) as loader:
        found = {
            str(batch.info.sample_keys[0]): {name: np.array(one) for name, one in batch.items()}
            for batch in loader
            if batch["talk_mask"].any()
        }
    shows_images = any(name.endswith("pixel_values") for one in found.values() for name in one)
    assert {number_of(key) for key in found} == (HAS_BOTH if shows_images else HAS_IMPRESSION)
    return found


@pytest.mark.parametrize("family", sampled(["qwen2_5_vl", "llama"], {"qwen2_5_vl"}))
def test_a_sequence_holds_what_the_template_makes_of_each_sample(
    family: str, dataset: Path, processors: Mapping[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    turns = TURNS if family == "qwen2_5_vl" else TEXT_TURNS
    fields = fields_of(processors[family], turns)
    packed = {**fields, "talk": fields_of(processors[family], turns, packed=True)["talk"]}
    with pytest.raises(ConfigError, match=r"no counts of the tokens of this template .* --fields FILE"):
        open_loader(sf.open(dataset), PACKED, packed)
    single = alone(dataset, fields)
    done = count(dataset, packed)
    assert (done.num_samples, done.num_empty) == (NUM_SAMPLES, NUM_SAMPLES - len(single))
    assert done.num_tokens == sum(int(one["talk_mask"].sum()) for one in single.values())
    assert count(dataset, packed).num_shards_kept == done.num_shards
    assert verify(str(dataset)).is_whole
    seen: list[str] = []
    with caplog.at_level("INFO"), open_loader(sf.open(dataset), PACKED, packed) as loader:
        for batch in loader:
            cuts = batch["talk_cu_seqlens"]
            pictures = []
            for place, key in enumerate(key for key in batch.info.sample_keys if key is not None):
                seen.append(key)
                one, here = single[key], slice(cuts[place], cuts[place + 1])
                np.testing.assert_array_equal(batch["talk"][0, here], one["talk"][0])
                weights = one["talk_weights"][0].copy()
                weights[0] = 0
                np.testing.assert_array_equal(batch["talk_weights"][0, here], weights)
                pictures += [one["talk_pixel_values"]] if "talk_pixel_values" in one else []
            if pictures:
                np.testing.assert_array_equal(batch["talk_pixel_values"], np.concatenate(pictures))
        assert not any(batch.quarantined for batch in loader)
    assert sorted(seen) == sorted(single)
    assert f"leaves out {done.num_empty} of {NUM_SAMPLES} samples, of which its template" in caplog.text


def test_packed_templates_are_equal_on_any_number_of_ranks_and_after_a_resume(
    dataset: Path, processors: Mapping[str, Path]
) -> None:
    fields = fields_of(processors["llama"], TEXT_TURNS, packed=True)
    count(dataset, fields)

    spec = replace(PACKED, budget=sf.TokenBudget(max_tokens=200, max_samples=8, padded=False))

    def opened(**settings: Any) -> Loader:
        return open_loader(sf.open(dataset), spec, fields, **settings)

    whole = batches_of(opened())
    assert len({place[0] for place in whole}) > 1
    parts: Batches = {}
    for rank in range(2):
        parts |= batches_of(opened(world=sf.World(rank=rank, world_size=2)))
    assert {place: parts[place] for place in whole} == whole
    with opened() as loader:
        state = next(loader.state_dict() for batch in loader if batch.slot == 1)
    resumed = opened()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert batches_of(resumed) == {place: one for place, one in whole.items() if place[0] >= 1}


def test_a_phrasing_is_drawn_once_for_each_sample(dataset: Path, processors: Mapping[str, Path]) -> None:
    fields = fields_of(processors["llama"], TEXT_TURNS)
    words = Renderer.load(processors["llama"]).tokenizer
    said: dict[str, set[str]] = {}
    with open_loader(sf.open(dataset), ALONE, fields) as loader:
        for _ in range(2):
            for batch in loader:
                if batch["talk_mask"].any():
                    said.setdefault(str(batch.info.sample_keys[0]), set()).add(words.decode(batch["talk"][0]))
    assert {len(one) for one in said.values()} == {1}
    assert len({"How many" in one for each in said.values() for one in each}) == 2, "both phrasings are drawn"
    assert fields["talk"].for_evaluation() == fields["talk"]
    with pytest.raises(ConfigError, match=r'draws one anew in each epoch.*write draws = "sample"'):
        count(dataset, fields_of(processors["llama"], TEXT_TURNS, draws="epoch"))


def test_evaluations_need_no_counts_of_their_own(dataset: Path, processors: Mapping[str, Path]) -> None:
    """What an evaluation takes otherwise changes no token: the windows of an image, which slices."""
    fields = fields_of(processors["qwen2_5_vl"], TURNS, packed=True)
    count(dataset, fields)
    with open_loader(
        sf.open(dataset), PACKED, {name: one.for_evaluation() for name, one in fields.items()}
    ) as loader:
        assert not any(batch.quarantined for batch in loader)


def test_counting_resumes_and_notes_another_way_to_render(
    dataset: Path, processors: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, _of: int) -> None:
        if done == 2:
            raise StopError

    # Which no other test counts: a process compares counts once.
    turns = [{"role": "user", "text": "Years?"}, TEXT_TURNS[1]]
    fields = fields_of(processors["llama"], turns, packed=True)
    with pytest.raises(StopError):
        count(dataset, fields, on_shard=stop)
    assert count(dataset, fields).num_shards_kept == 2
    real = Renderer.call
    monkeypatch.setattr(Renderer, "call", lambda self, text, pictures: real(self, text + "x", pictures))
    with pytest.raises(ConfigError, match=r"conversations have other numbers of tokens .* --fields FILE"):
        open_loader(sf.open(dataset), PACKED, fields)


def test_counts_are_bound_to_the_tables_that_the_template_reads(
    dataset: Path, processors: Mapping[str, Path]
) -> None:
    """The series table among them, which decides which images are shown; not that of other fields."""
    opened, counters = sf.open(dataset), StageCounters()
    shown = fields_of(processors["qwen2_5_vl"], TURNS)
    images = {"image": sf.Image(size=(28, 28), missing="pad")}
    _, bound = bind_fields(select(opened, "train"), images, counters)
    (series,) = bound.series_tables
    assert series in TemplateCounter(opened, shown, "talk").template.tables
    texts = fields_of(processors["llama"], TEXT_TURNS)
    of_texts = TemplateCounter(opened, texts, "talk").template
    assert series not in of_texts.tables
    count(dataset, texts)
    packed = {**fields_of(processors["llama"], TEXT_TURNS, packed=True), **images}
    with open_loader(opened, PACKED, packed) as loader:
        assert loader.num_steps
    counts = open_conversation_counts(opened, Renderer.load(processors["llama"]).digest, template=of_texts)
    assert len(counts) == NUM_SAMPLES
    other = replace(of_texts, tables=("0" * 64,))
    with pytest.raises(ConfigError, match="anew where a column has changed"):
        open_conversation_counts(opened, Renderer.load(processors["llama"]).digest, template=other)


@pytest.mark.slow
def test_processes_count_as_one_does(
    dataset: Path, processors: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.training.tokenizing._CHUNK", NUM_SAMPLES // 4)  # enough for two
    fields = fields_of(processors["qwen2_5_vl"], TURNS, packed=True)
    count(dataset, fields, num_processes=2)
    counter = TemplateCounter(sf.open(dataset), fields, "talk")
    stored = open_conversation_counts(sf.open(dataset), counter.renderer.digest, template=counter.template)
    found, is_read = counter.count(np.arange(NUM_SAMPLES))
    assert is_read.all()
    assert not found.differs(stored).any()


def test_a_template_is_counted_for_each_series(dataset: Path, processors: Mapping[str, Path]) -> None:
    turns = [
        {"role": "user", "text": "<image:picture>Which one?"},
        {"role": "assistant", "text": "{facts.age_years}"},
    ]
    picture = sf.Image(size=(28, 28), missing="pad")
    fields = {**fields_of(processors["qwen2_5_vl"], turns, packed=True), "picture": picture}
    rows = open_unit(sf.open(dataset), "series")
    count_dataset(rows, processors["qwen2_5_vl"], fields=fields, name="talk")
    assert verify(str(dataset)).is_whole
    with open_loader(sf.open(dataset), PACKED, fields, unit="series") as loader:
        seen = [key for batch in loader for key in batch.info.sample_keys if key is not None]
        assert not any(batch.quarantined for batch in loader)
    assert len(seen) == rows.samples.num_samples > NUM_SAMPLES
    with pytest.raises(ConfigError, match="no counts of the tokens"):
        open_loader(sf.open(dataset), PACKED, fields)


def test_pairs_have_the_answers_of_their_turn(dataset: Path, processors: Mapping[str, Path]) -> None:
    fields = fields_of(processors["llama"], PAIR_TURNS, pairs=True)
    words = Renderer.load(processors["llama"]).tokenizer
    drawn = set()
    with open_loader(
        sf.open(dataset), BatchSpec.simple(global_batch_size=4, micro_batch_size=4), fields
    ) as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                number = number_of(str(key))
                ids, learned = batch["talk"][slot], batch["talk_weights"][slot] > 0
                assert ids.shape[0] == 2
                if not impression_of(number):
                    assert not batch["talk_mask"][slot].any()
                    continue
                chosen, rejected = (words.decode(ids[end][learned[end]]) for end in range(2))
                assert chosen == f"{impression_of(number)}<|eot_id|>"
                sex = "woman" if number % 2 == 0 else "M"
                others = [f"No mass.\nLUNGS: Clear {number}.<|eot_id|>", f"Nothing, {sex}.<|eot_id|>"]
                drawn.add(others.index(rejected))
                asked = [words.decode(ids[end]).partition("assistant")[0] for end in range(2)]
                assert asked[0] == asked[1]
                assert "What is seen?" in asked[0]
    assert drawn == {0, 1}


def test_a_packed_pair_of_a_template_costs_both_sequences(
    dataset: Path, processors: Mapping[str, Path]
) -> None:
    fields = fields_of(processors["llama"], PAIR_TURNS, pairs=True, packed=True)
    single = alone(dataset, fields_of(processors["llama"], PAIR_TURNS, pairs=True))
    count(dataset, fields)
    seen = []
    with open_loader(sf.open(dataset), PACKED, fields) as loader:
        for batch in loader:
            cuts = batch["talk_cu_seqlens"]
            assert cuts[-1] <= 400
            for slot, key in enumerate(filter(None, batch.info.sample_keys)):
                seen.append(key)
                for end in range(2):
                    row = batch["talk"][0, cuts[2 * slot + end] : cuts[2 * slot + end + 1]]
                    wanted = single[key]["talk"][0, end][single[key]["talk_mask"][0, end] > 0]
                    np.testing.assert_array_equal(row, wanted)
    assert sorted(seen) == sorted(single)


def test_conditions_choose_a_pair_and_equal_answers_are_none(
    dataset: Path, processors: Mapping[str, Path]
) -> None:
    turns = [
        PAIR_TURNS[0],
        {"role": "assistant", "chosen": "Yes.", "rejected": "No.", "when": "facts.sex == 'F'"},
        {"role": "assistant", "chosen": "No.", "rejected": "{facts.sex}.", "when": "facts.sex == 'M'"},
    ]
    talk = sf.Conversation(
        processor=str(processors["llama"]),
        template=sf.Template(turns=turns, words={"M": "No"}),  # type: ignore[arg-type]
        max_tokens=99,
        missing="pad",
        pairs=True,
    )
    with open_loader(sf.open(dataset), ALONE, {"talk": talk}) as loader:
        has_pair = {number_of(str(batch.info.sample_keys[0])): batch["talk_mask"].any() for batch in loader}
        lacking = loader.counters.totals("incomplete_conversations.rejected").num_items
    assert has_pair == {number: number % 2 == 0 for number in range(NUM_SAMPLES)}
    assert lacking == NUM_SAMPLES // 2


@pytest.mark.parametrize(
    ("turns", "pairs", "match"),
    [
        (PAIR_TURNS, False, "write pairs = true"),
        (TEXT_TURNS, True, "chosen and rejected in place of text"),
        ([PAIR_TURNS[0], {"role": "assistant", "chosen": "x"}], True, "both chosen and rejected"),
        ([PAIR_TURNS[0], {**PAIR_TURNS[1], "text": "x"}], True, "write text, or both"),
        ([{**PAIR_TURNS[1], "role": "user"}, PAIR_TURNS[1]], True, "of the role 'assistant'"),
        ([*PAIR_TURNS, *TEXT_TURNS], True, "no turn with a text follows them"),
        ([PAIR_TURNS[0], {**PAIR_TURNS[1], "chosen": " "}], True, "The chosen of a turn"),
        ([PAIR_TURNS[0], {"role": "assistant"}], False, "A turn has a text"),
    ],
)
def test_a_slip_in_a_pair_is_told(
    turns: Any, pairs: bool, match: str, processors: Mapping[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=match):
        fields_of(processors["llama"], turns, pairs=pairs)


def test_identities_of_templates_from_before_pairs_are_unchanged() -> None:
    template = sf.Template(turns=TEXT_TURNS)  # type: ignore[arg-type]
    assert repr(template.turns[1]) == (
        "Turn(role='assistant', text=('{facts.age_years}, {impression}',), when='', weight=1.0)"
    )
    assert repr(template).endswith(
        "words={}, coordinates='thousandths', box='[{x0}, {y0}, {x1}, {y1}]', separator=', ')"
    )
    pair = sf.Template(turns=PAIR_TURNS, draws="sample")  # type: ignore[arg-type]
    assert "chosen=('{impression}',)" in repr(pair)
    assert repr(pair).endswith(", draws='sample')")
