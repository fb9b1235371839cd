"""``shardflow plan --fields`` counts what fields deliver, and every stored image can be delivered."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydicom.dataset import FileDataset

import shardflow as sf
from shardflow.cli.main import main
from shardflow.fields.registry import _TYPES as FIELD_TYPES
from shardflow.format import Dataset
from shardflow.loading import open_blend
from shardflow.packing import pack
from shardflow.sampling import CostRule, TileRule, TokenBudget
from tests.cli.conftest import Called
from tests.dicom_factory import make_study
from tests.factories import sample_key
from tests.field_cases import case_series, make_case_dataset
from tests.layout_trees import make_openi
from tests.pack_case import PackCase

pytestmark = pytest.mark.usefixtures("packs_inline")

NUM_SAMPLES = 14
BY_ROLE = """
[fields.frontal]
type = "image"
series = "role == 'frontal'"
size = [16, 16]
missing = "pad"

[fields.lateral]
type = "image"
series = "role == 'lateral'"
size = [16, 16]
missing = "pad"

[fields.ct]
type = "image"
series = "kind == 'volume'"
num_images = "all"
size = [8, 8]
missing = "pad"

[fields.report]
type = "text"
missing = "pad"
"""
LOCALIZERS = """
[fields.localizer]
type = "slices"
series = "kind == 'localizer'"
size = [8, 8]
missing = "pad"
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Radiographs of two series, of a series of two views, of one view; CT of two volumes and a localizer."""
    return make_case_dataset(tmp_path_factory.mktemp("cases") / "dataset", num_samples=NUM_SAMPLES)


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Count what a file of fields delivers of a dataset."""

    def run(dataset: Dataset | Path, text: str, *options: str) -> Called:
        path = tmp_path / "fields.toml"
        path.write_text(text, encoding="utf-8")
        url = dataset.store.url if isinstance(dataset, Dataset) else dataset
        named = ["--fields", "default" if text == "default" else str(path)]
        code = main(["plan", str(url), "--split", "train", *named, *options])
        return Called(code, *capsys.readouterr())

    return run


def _stored(num_samples: int) -> Counter[str]:
    """Count the images of the cases by role, from what they were made of."""
    return sum((_roles(number) for number in range(num_samples)), Counter())


def _roles(number: int) -> Counter[str]:
    """Count the images of a case by role."""
    views = {"PA": "frontal", "LL": "lateral"}
    counts: Counter[str] = Counter()
    for case in case_series(number):
        if case.images:
            counts.update(views[image["view_position"]] for image in case.images)
        elif case.modality in ("CR", "DX"):
            counts[views[case.technical["view_position"]]] += case.shape[0]
        else:
            role = "contrast" if case.technical.get("has_contrast") else "unknown"
            counts["localizer" if case.kind == "localizer" else role] += case.shape[0]
    return counts


def test_every_role_is_counted_and_what_no_field_delivers_is_named(cases: Dataset, plan: Any) -> None:
    stored = _stored(NUM_SAMPLES)
    (report,) = plan(cases, BY_ROLE, "--json").lines
    assert report["samples"] == {"all": NUM_SAMPLES, "left_out": 0}
    images = report["images"]
    assert (
        images["stored"]
        == dict(stored.most_common())
        == images["reachable"] | {"localizer": stored["localizer"]}
    )
    assert images["not_in_any_field"] == {"localizer": stored["localizer"]}
    assert images["share"] == pytest.approx(1 - stored["localizer"] / stored.total())
    fields = report["fields"]
    assert fields["frontal"]["delivered"] == {"frontal": stored["frontal"]}
    assert fields["lateral"]["delivered"] == {"lateral": stored["lateral"]}
    assert fields["frontal"]["missing"] == sum(number % 4 == 1 for number in range(NUM_SAMPLES))
    assert fields["report"]["missing"] == sum(number % 4 == 2 for number in range(NUM_SAMPLES))
    assert all(not one["left_out"] for one in fields.values())
    text = plan(cases, BY_ROLE).out
    assert f"not in any field: {stored['localizer']} localizer" in text


def test_every_image_of_mixed_studies_is_reachable(cases: Dataset, plan: Any) -> None:
    called = plan(cases, BY_ROLE + LOCALIZERS)
    total = _stored(NUM_SAMPLES).total()
    assert called.code == 0
    assert f"images reachable: {total} of {total} (100.0%)" in called.out
    assert "not in any field" not in called.out


def test_an_image_that_two_fields_deliver_counts_once(cases: Dataset, plan: Any) -> None:
    again = BY_ROLE.replace("[fields.", "[fields.small_")
    (once,), (twice,) = plan(cases, BY_ROLE, "--json").lines, plan(cases, BY_ROLE + again, "--json").lines
    assert once["images"] == twice["images"]


def test_places_and_slices_that_are_missing_are_left_out(cases: Dataset, plan: Any) -> None:
    text = """
    [fields.view]
    type = "image"
    series = "modality in ('CR', 'DX')"
    size = [8, 8]
    missing = "pad"
    [fields.ct]
    type = "slices"
    series = "kind == 'volume'"
    num_slices = 3
    size = [8, 8]
    missing = "pad"
    """
    stored = _stored(NUM_SAMPLES)
    (report,) = plan(cases, text, "--json").lines
    view, ct = report["fields"]["view"], report["fields"]["ct"]
    # One image per study: the frontal one is acquired first.
    assert (view["delivered"], view["left_out"]) == (
        {"frontal": stored["frontal"]},
        {"lateral": stored["lateral"]},
    )
    # The contrast volume is acquired first; of its five slices three are delivered.
    num_ct = sum(number % 4 == 1 for number in range(NUM_SAMPLES))
    assert ct["delivered"] == {"contrast": 3 * num_ct}
    assert ct["left_out"] == {"unknown": stored["unknown"], "contrast": 2 * num_ct}
    # Slices that are drawn anew in each epoch are all delivered by and by.
    (drawn,) = plan(
        cases, text.replace("num_slices = 3", 'num_slices = 3\nsampling = "random"'), "--json"
    ).lines
    assert drawn["fields"]["ct"]["delivered"] == {"contrast": 5 * num_ct}


def test_samples_that_a_field_drops_count_as_not_reachable(cases: Dataset, plan: Any) -> None:
    before, _, after = BY_ROLE.partition("[fields.ct]")
    text = before.replace('missing = "pad"', 'missing = "drop"', 1) + after[after.index("[fields.report]") :]
    (report,) = plan(cases, text, "--json").lines
    num_ct = sum(number % 4 == 1 for number in range(NUM_SAMPLES))
    assert report["samples"] == {"all": NUM_SAMPLES, "left_out": num_ct}
    assert report["fields"]["frontal"]["missing"] == num_ct
    assert {"contrast", "unknown", "localizer"} == {*report["images"]["not_in_any_field"]}
    assert f"{num_ct} of them left out" in plan(cases, text).out


def test_default_fields_are_counted_too(cases: Dataset, plan: Any) -> None:
    (report,) = plan(cases, "default", "--json").lines
    assert {*report["fields"]} == {"image", "slices", "report"}
    stored = _stored(NUM_SAMPLES)
    assert report["fields"]["image"]["delivered"] == {role: stored[role] for role in ("frontal", "lateral")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[fields.a]\ntype = "imge"', "There is no field type 'imge'; there are "),
        ('[fields.a]\ntype = "image"\nserise = "x"', "the nearest known key is 'series'"),
        ("[fields.a]\nsize = [8, 8]", "fields.a.type must be the name of a type"),
        ('[fields.a]\ntype = "image"\nsize = 8', "fields.a.size must be a list"),
        ('[fields.a]\ntype = "image"\nsize = [8]', "[fields.a] size is (rows, columns)"),
        ('[fields.a]\ntype = "image"\nnum_images = "some"', "fields.a.num_images must be"),
        ('[fields.a]\ntype = "image"\nseries = "rolle == 1"', "role"),
        ('[fields.a]\ntype = "image"\nseries = "role == \'x\'"', "matches no image"),
        ('[fields.a]\ntype = "image"\nseries = "role == \'frontal\'"', "write missing='pad'"),
        ('[fields.row]\ntype = "text"', "'row' is reserved"),
        ("[field.a]", "the nearest known key is 'fields'"),
        ("[fields]", "holds no field"),
        ("[fields.a", "must be TOML"),
    ],
)
def test_a_slip_is_one_sentence_before_anything_is_read(
    cases: Dataset, plan: Any, text: str, message: str
) -> None:
    called = plan(cases, text)
    assert called.code == 2
    sentence, *pointer = called.err.splitlines()
    assert message in sentence
    assert not pointer or pointer[0].strip() in text  # an expression is shown with the place of its slip
    assert not called.out


TYPES: dict[str, tuple[str, sf.Field]] = {
    "conversation": (
        'processor = "/models/a"\nmax_tokens = 64\ntrain_on = ["assistant", "user"]\nlong = "skip"',
        sf.Conversation(processor="/models/a", max_tokens=64, train_on=("assistant", "user"), long="skip"),
    ),
    "volume": (
        'roi_size = [4, 8, 8]\ncenter = "middle"',
        sf.Volume(roi_size=(4, 8, 8), center="middle"),
    ),
    "image": (
        'size = [8, 6]\nnum_images = "all"\nwindows = ["lung"]\nfill = 0\ndtype = "int16"',
        sf.Image(size=(8, 6), num_images="all", windows=("lung",), fill=0.0, dtype="int16"),
    ),
    "slices": ('num_slices = 3\nsampling = "slab"', sf.Slices(num_slices=3, sampling="slab")),
    "tiles": ("size = [64, 64]\nmpp = 0.25", sf.Tiles(size=(64, 64), mpp=0.25)),
    "mask": (
        'like = "a"\nlabels = ["mass"]\nmerge = "stack"',
        sf.Mask(like="a", labels=["mass"], merge="stack"),
    ),
    "boxes": ('like = "a"\nmax_boxes = 3', sf.Boxes(like="a", max_boxes=3)),
    "text": ('missing = "pad"', sf.Text(missing="pad")),
    "json": ('member = "meta.json"\nmax_bytes = 100', sf.Json(member="meta.json", max_bytes=100)),
    "bytes": ('member = "meta.bin"', sf.Bytes(member="meta.bin")),
    "array": (
        'member = "a.npy"\ndtype = "float32"\nshape = [2, 3]',
        sf.Array(member="a.npy", dtype="float32", shape=(2, 3)),
    ),
    "tokens": (
        f'tokenizer = "{"ab" * 32}"\nmax_tokens = 7',
        sf.Tokens(tokenizer="ab" * 32, max_tokens=7),
    ),
    "column": ('column = "facts.sex"\nmissing = "pad"', sf.Column(column="facts.sex", missing="pad")),
    "columns": ('columns = "labels.*"', sf.Columns(columns="labels.*")),
    "events": (
        'window = ["-2d", "0h"]\ncodes = { pulse = { codes = ["LOINC:8867-4"], unit = "/min" } }',
        sf.Events(codes={"pulse": {"codes": ["LOINC:8867-4"], "unit": "/min"}}, window=("-2d", "0h")),
    ),
    "waveform": (
        'channels = ["II", "V1"]\nrate_hz = 100\nduration_s = 10',
        sf.Waveform(channels=("II", "V1"), rate_hz=100, duration_s=10),
    ),
}


@pytest.mark.parametrize("name", sorted(FIELD_TYPES))
def test_every_type_reads_from_toml_what_python_says(tmp_path: Path, name: str) -> None:
    text, field = TYPES[name]
    path = tmp_path / "fields.toml"
    path.write_text(f'[fields.x]\ntype = "{name}"\n{text}\n', encoding="utf-8")
    assert sf.read_fields(path) == {"x": field}


STEPS = ("--seed", "7", "--epoch", "1", "--micro-batches-per-step", "2", "--world-size", "1")
BUDGET = ("--max-tokens", "90", "--max-samples", "4", "--lanes", "2", "--image-tokens-per-slice", "10")
DELIVERED = TokenBudget(
    max_tokens=90, max_samples=4, cost=CostRule(counts_delivered=True, image_tokens_per_slice=10)
)


def _rows(loader: sf.Loader, epoch: int) -> list[tuple[list[str | None], list[float]]]:
    """Return keys and weights of the micro-batches of an epoch."""
    loader.set_epoch(epoch)
    with loader:
        return [(list(batch.info.sample_keys), batch.info.weight.tolist()) for batch in loader]


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (None, ()),
        (sf.Sampling(limit=9), ("--limit", "9")),
        (sf.Sampling(epoch_samples=11), ("--epoch-samples", "11")),
    ],
)
@pytest.mark.parametrize("has_budget", [False, True])
@pytest.mark.parametrize("drops", [False, True])
def test_the_steps_are_those_of_a_loader_with_these_fields(
    cases: Dataset,
    plan: Any,
    tmp_path: Path,
    sampling: sf.Sampling | None,
    options: tuple[str, ...],
    *,
    has_budget: bool,
    drops: bool,
) -> None:
    text = BY_ROLE.replace('missing = "pad"', 'missing = "drop"', 1) if drops else BY_ROLE
    spec = sf.BatchSpec(
        micro_batch_size=0 if has_budget else 3,
        budget=DELIVERED if has_budget else None,
        micro_batches_per_step=2,
        tail="mask",
        lanes=2 if has_budget else 0,
    )
    size = BUDGET if has_budget else ("--micro-batch-size", "3")
    lines = plan(cases, text, *STEPS, *size, "--tail", "mask", "--json", *options).lines
    fields = sf.read_fields(tmp_path / "fields.toml")
    loader = sf.Loader(cases, split="train", seed=7, batch=spec, fields=fields, sampling=sampling)
    assert [(line["keys"], line["weights"]) for line in lines] == _rows(loader, 1)
    assert {key for line in lines for key in line["keys"]} - {None}


def test_a_budget_charges_for_what_the_fields_deliver(cases: Dataset, plan: Any) -> None:
    """By the images that the cases are made of: a micro-batch of several samples fits, as delivered."""
    fields = BY_ROLE.partition("[fields.report]")[0]
    # Whether four small samples share a lane of a shuffle window depends on the order of an epoch.
    epochs = [("--seed", str(seed), *STEPS[2:]) for seed in range(12)]
    lines = [
        line
        for epoch in epochs
        for line in plan(cases, fields, *epoch, *BUDGET, "--tail", "mask", "--json").lines
    ]
    numbers = {sample_key(number): number for number in range(NUM_SAMPLES)}
    delivered = {
        number: min(1, roles["frontal"]) + min(1, roles["lateral"]) + roles["contrast"] + roles["unknown"]
        for number, roles in ((number, _roles(number)) for number in range(NUM_SAMPLES))
    }
    batches = [[numbers[key] for key in line["keys"] if key is not None] for line in lines]
    lengths = [[2 + 10 * delivered[number] for number in batch] for batch in batches]
    assert all(len(batch) < 2 or max(batch) * len(batch) <= 90 for batch in lengths)
    # Nothing of the budget is spent on localizers, which no field delivers, and on reports.
    assert any(len(batch) == 4 for batch in lengths), sorted(map(len, lengths))


def test_the_crops_of_a_sample_fill_neighboring_slots(cases: Dataset, plan: Any, tmp_path: Path) -> None:
    text = '[fields.ct]\ntype = "volume"\nroi_size = [2, 4, 4]\nnum_samples = 2\nmissing = "pad"'
    lines = plan(cases, text, *STEPS, "--micro-batch-size", "4", "--tail", "mask", "--json").lines
    spec = sf.BatchSpec(micro_batch_size=4, micro_batches_per_step=2, tail="mask")
    fields = sf.read_fields(tmp_path / "fields.toml")
    loader = sf.Loader(cases, split="train", seed=7, batch=spec, fields=fields)
    assert [(line["keys"], line["weights"]) for line in lines] == _rows(loader, 1)
    assert lines[0]["keys"][::2] == lines[0]["keys"][1::2]
    assert "num_samples=2 fills slots" in plan(cases, text, *STEPS, *BUDGET).err


def test_a_blend_is_charged_by_component(cases: Dataset, tmp_path: Path, capsys: Any) -> None:
    blend, fields = tmp_path / "blend.toml", tmp_path / "fields.toml"
    blend.write_text(f'[[component]]\ndataset = "{cases.store.url}"\nsplit = "train"\nrepeat = 1\n' * 2)
    fields.write_text(BY_ROLE)
    options = [*STEPS, *BUDGET, "--tail", "mask", "--json"]
    assert main(["plan", "--blend", str(blend), "--fields", str(fields), *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    spec = sf.BatchSpec(budget=DELIVERED, micro_batches_per_step=2, tail="mask", lanes=2)
    loader = sf.Loader(open_blend(blend), seed=7, batch=spec, fields=sf.read_fields(fields))
    assert [(line["keys"], line["weights"]) for line in lines] == _rows(loader, 1)


def _warned(
    cases: Dataset, caplog: pytest.LogCaptureFixture, rule: CostRule, fields: dict[str, sf.Field]
) -> list[str]:
    """Return what a loader with a budget warns of."""
    caplog.clear()
    budget = TokenBudget(max_tokens=90, max_samples=4, cost=rule)
    spec = sf.BatchSpec(budget=budget, micro_batches_per_step=1, lanes=1)
    sf.Loader(cases, split="train", seed=7, batch=spec, fields=fields)
    return [record.getMessage() for record in caplog.records if record.name.endswith("binding")]


def test_a_loader_that_charges_for_more_than_it_delivers_says_so_once(
    cases: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    stored = _stored(NUM_SAMPLES)
    image = sf.Image(series="role == 'frontal'", size=(8, 8), missing="pad")
    rule = CostRule(image_tokens_per_slice=10, max_slices=100)
    (line,) = _warned(cases, caplog, rule, {"image": image})
    assert f"charges for {stored.total()} stored slices or tiles, and the fields deliver" in line
    assert f"deliver {stored['frontal']};" in line
    assert "write CostRule(counts_delivered=True, image_tokens_per_slice=10) without max_slices" in line
    (line,) = _warned(cases, caplog, rule, {"report": sf.Text(missing="pad")})
    assert "the fields deliver 0;" in line
    # Tiles are charged for in CT too, of which none is delivered.
    tiled = replace(image, num_images="all", series=None, size=(4, 4), tiles=4)
    tiles = replace(rule, tiles=TileRule(rows=4, columns=4, max_tiles=4))
    assert len(_warned(cases, caplog, tiles, {"image": tiled})) == 1


def test_a_loader_that_charges_for_what_it_delivers_says_nothing(
    cases: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    every = sf.Image(series="num_slices > 0", num_images="all", size=(8, 8))
    rule = CostRule(image_tokens_per_slice=10, max_slices=100)
    assert _warned(cases, caplog, rule, {"image": every}) == []
    assert _warned(cases, caplog, CostRule(), {"report": sf.Text(missing="pad")}) == []
    delivered = CostRule(image_tokens_per_slice=10, counts_delivered=True)
    assert _warned(cases, caplog, delivered, {"image": replace(every, num_images=1)}) == []
    # Stored slices are no measure of a region, and none of sizes that are drawn.
    assert _warned(cases, caplog, rule, {"ct": sf.Volume(roi_size=(2, 4, 4), missing="pad")}) == []
    sized = sf.Slices(sizes=((2, 8, 8, 1), (1, 8, 8, 1)), missing="pad")
    assert _warned(cases, caplog, rule, {"ct": sized}) == []


def test_a_region_counts_as_one_picture(cases: Dataset, plan: Any) -> None:
    """Whatever its size: what a budget charges for it is what ``image_tokens_per_slice`` says."""
    text = '[fields.ct]\ntype = "volume"\nroi_size = [{}, 4, 4]\nmissing = "pad"'
    options = (*STEPS, *BUDGET, "--max-tokens", "30", "--tail", "mask", "--json")
    lines = plan(cases, text.format(2), *options).lines
    has_volume = [any(one.kind == "volume" for one in case_series(number)) for number in range(NUM_SAMPLES)]
    numbers = {sample_key(number): number for number in range(NUM_SAMPLES)}
    for line in lines:
        lengths = [2 + 10 * has_volume[numbers[key]] for key in line["keys"] if key is not None]
        assert len(lengths) < 2 or max(lengths) * len(lengths) <= 30
    most = max(sum(has_volume[numbers[key]] for key in line["keys"] if key) for line in lines)
    assert most == 2
    assert plan(cases, text.format(3), *options).lines == lines


def test_the_summary_of_steps_follows_what_fields_deliver(cases: Dataset, plan: Any) -> None:
    compared = ("--summary", "--compare", "max-tokens=200")
    called = plan(cases, BY_ROLE, *STEPS, *BUDGET, *compared)
    assert called.code == 0
    assert called.out.index("images reachable") < called.out.index("budget used")
    counts = []
    for seed in range(8):
        steps = ("--seed", str(seed), *STEPS[2:])
        two = plan(cases, BY_ROLE, *steps, *BUDGET, *compared, "--json").lines
        assert [line["settings"] for line in two] == ["this", "other"]
        counts.append([line["plan"]["num_steps"] for line in two])
    assert sum(other for _, other in counts) < sum(this for this, _ in counts), counts
    text = plan(cases, BY_ROLE, *STEPS, "--micro-batch-size", "2").out
    assert text.index("images reachable") < text.index("steps")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--seed", "1"), "--epoch, --micro-batches-per-step, --world-size; or leave out --seed"),
        (("--summary",), "or leave out --summary"),
        ((*STEPS, *BUDGET, "--max-slices", "4"), "leave out --max-slices, and set --image-tokens-per-slice"),
        (("--max-slices", "4"), "leave out --max-slices"),
        ((*STEPS, *BUDGET, "--summary", "--compare", "max-slices=4"), "leave out --max-slices"),
        ((*STEPS, "--micro-batch-size", "2", "--transform", "a:b"), "--transform is timed without steps"),
        (STEPS, "one of --micro-batch-size and --max-tokens must be given"),
        ((*STEPS, "--micro-batch-size", "99"), "step"),
    ],
)
def test_options_that_do_not_go_with_fields_are_one_sentence(
    cases: Dataset, plan: Any, options: tuple[str, ...], said: str
) -> None:
    called = plan(cases, BY_ROLE, *options)
    assert (called.code, called.out, called.err.count("\n")) == (2, "", 1)
    assert said in called.err


def test_sizes_that_are_drawn_are_not_charged_for_as_delivered(cases: Dataset, plan: Any) -> None:
    text = '[fields.ct]\ntype = "slices"\nsizes = [[2, 8, 8, 1], [1, 8, 8, 1]]\nmissing = "pad"'
    assert plan(cases, text, *STEPS, "--micro-batch-size", "2", "--json").code == 0
    called = plan(cases, text, *STEPS, *BUDGET)
    assert (called.code, called.out, called.err.count("\n")) == (2, "", 1)
    assert "drawn sizes of the field 'ct'; write num_slices= and size= in place of sizes=" in called.err


def test_without_fields_the_options_of_steps_are_required(cases: Dataset, capsys: Any) -> None:
    assert main(["plan", str(cases.store.url), "--split", "train", "--seed", "1"]) == 2
    said = capsys.readouterr().err
    assert "--epoch, --micro-batches-per-step, --world-size; or --fields FILE" in said


def test_without_a_series_table_the_command_is_named(tmp_path: Path, plan: Any) -> None:
    dataset = make_case_dataset(tmp_path / "bare", num_samples=4)
    for path in (tmp_path / "bare" / "facts").rglob("*.*"):
        path.unlink()
    called = plan(dataset, BY_ROLE)
    assert called.code == 2
    assert "shardflow attach DATASET --facts" in called.err
    # A text needs no series; nothing is said about images then.
    assert "reachable" not in plan(dataset, '[fields.report]\ntype = "text"\nmissing = "pad"').out


def test_every_image_of_open_i_is_reachable(tmp_path: Path, plan: Any) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    pack(case.config(*make_openi(tmp_path).settings, "splits.train=100", "splits.val=0"))
    text = (
        '[fields.view]\ntype = "image"\nnum_images = "all"\nsize = [16, 16]\n[fields.report]\ntype = "text"'
    )
    (report,) = plan(case.output, text, "--json").lines
    assert report["images"]["share"] == 1
    assert sum(report["images"]["stored"].values()) == 3
    assert report["fields"]["report"]["missing"] == 0


def test_every_image_of_ct_mr_and_radiographs_in_one_dataset_is_reachable(tmp_path: Path, plan: Any) -> None:
    """As the demo's data: CT, MR of several weightings in a study, radiographs of two views in a series."""
    case = PackCase(tmp_path)
    case.prepare()
    views = (("PA", ["L", "F"]), ("LL", ["A", "F"]))

    def radiograph(dataset: FileDataset, index: int) -> None:
        dataset.ViewPosition, dataset.PatientOrientation = views[index % 2]

    for number in range(3):
        make_study(case.dicom / f"ct{number}", patient=f"C{number}", num_slices=3 + number, seed=number)
        make_study(
            case.dicom / f"x{number}",
            patient=f"X{number}",
            modality="CR",
            num_slices=2,
            seed=number,
            change=radiograph,
        )
        for series, (repetition, echo) in enumerate(((500, 10), (4000, 90), (4000, 30))):

            def weighted(
                dataset: FileDataset, index: int, times: tuple[int, int] = (repetition, echo)
            ) -> None:
                dataset.ScanningSequence = "SE"
                dataset.RepetitionTime, dataset.EchoTime = times

            make_study(
                case.dicom / f"mr{number}-{series}",
                patient=f"M{number}",
                modality="MR",
                series=series + 1,
                num_slices=4,
                seed=10 * number + series,
                change=weighted,
            )
    case.pack("splits.train=100", "splits.val=0")
    roles = {"ct": "modality == 'CT'", **{role: f"role == '{role}'" for role in ("t1", "t2", "pd")}}
    text = "".join(
        f'[fields.{name}]\ntype = "slices"\nseries = "{series}"\nsize = [8, 8]\nmissing = "pad"\n'
        for name, series in roles.items()
    )
    text += "".join(
        f'[fields.{role}]\ntype = "image"\nseries = "role == \'{role}\'"\nsize = [8, 8]\nmissing = "pad"\n'
        for role in ("frontal", "lateral")
    )
    (report,) = plan(case.output, text, "--json").lines
    assert report["images"]["stored"] == {
        "pd": 12,
        "t1": 12,
        "t2": 12,
        "unknown": 3 + 4 + 5,
        "frontal": 3,
        "lateral": 3,
    }
    assert report["images"]["reachable"] == report["images"]["stored"]
    assert report["images"]["share"] == 1
    assert report["fields"]["lateral"] == {
        "type": "image",
        "missing_is": "pad",
        "missing": 6,
        "delivered": {"lateral": 3},
        "left_out": {},
    }
    assert json.dumps(report["images"]["not_in_any_field"]) == "{}"


@pytest.mark.slow
def test_every_image_of_generated_studies_is_reachable(tmp_path: Path, plan: Any) -> None:
    """CT, MR, CR and DX as ``shardflow synth`` makes them, which the demo's data is like."""
    case = PackCase(tmp_path)
    case.prepare()
    size = ["--studies", "8", "--seed", "7", "--size", "48", "--slices", "4:6"]
    assert main(["synth", str(tmp_path / "generated"), *size]) == 0
    case.dicom.rmdir()
    (tmp_path / "generated" / "dicom").rename(case.dicom)
    case.pack("splits.train=100", "splits.val=0")
    report = plan(case.output, '[fields.report]\ntype = "text"\nmissing = "pad"', "--json").last_line
    images = report["images"]
    assert (images["share"], images["not_in_any_field"]) == (0, images["stored"])
    assert sum(images["stored"].values()) == case.open().samples.column("num_slices").sum()
    assert {"frontal", "t1"} <= {*images["stored"]}
    text = "".join(
        f'[fields.{role}]\ntype = "image"\nseries = "role == \'{role}\'"\nnum_images = "all"\nsize = [8, 8]\n'
        'missing = "pad"\n'
        for role in images["stored"]
    )
    (report,) = plan(case.output, text, "--json").lines
    assert report["images"]["share"] == 1
    assert report["images"]["reachable"] == images["stored"]


def test_units_are_counted_too(cases: Dataset, plan: Any) -> None:
    text = '[fields.image]\ntype = "image"\nsize = [8, 8]\n'
    frontal = _stored(NUM_SAMPLES)["frontal"]
    (report,) = plan(cases, text, "--unit", "image", "--where", "role == 'frontal'", "--json").lines
    assert report["samples"] == {"all": frontal, "left_out": 0}
    assert report["fields"]["image"]["delivered"] == {"frontal": frontal}
    assert report["transform"] is None
    called = plan(cases, text, "--where", "role == 'frontal'")
    assert (called.code, "any(series." in called.err) == (2, True)


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the GIL for some milliseconds."""
    total = 0
    for number in range(100_000):
        total += number
    return {"total": total}


def idle(sample: dict[str, Any]) -> dict[str, Any]:
    """Let other threads run Python."""
    time.sleep(0.005)
    return sample


def test_a_transform_is_timed_and_how_long_it_keeps_the_gil(
    cases: Dataset, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardflow.cli.bench_measure._TIMED_S", 0.5)
    for _ in range(10):  # on a busy machine the probe's thread may not run in half a second
        (kept,) = plan(cases, BY_ROLE, "--transform", f"{__name__}:slow", "--json").lines
        (let_go,) = plan(cases, BY_ROLE, "--transform", f"{__name__}:idle", "--json").lines
        if kept["transform"]["gil_share"] > let_go["transform"]["gil_share"]:
            break
    assert kept["transform"]["name"] == f"{__name__}:slow"
    assert kept["transform"]["samples"] == let_go["transform"]["samples"] == NUM_SAMPLES
    assert let_go["transform"]["ms_per_sample"] >= 5
    assert kept["transform"]["gil_share"] > let_go["transform"]["gil_share"]
    assert "holds the GIL" in plan(cases, BY_ROLE, "--transform", f"{__name__}:idle").out
    without = plan(cases, BY_ROLE, "--transform", "no.such:function")
    assert (without.code, len(without.err.splitlines())) == (2, 1)
    assert main(["plan", str(cases.store.url), "--split", "train", "--transform", "a:b"]) == 2
