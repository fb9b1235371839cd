"""Clinical events beside what pandas makes of the same facts, on every way there; damage masks its slot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.sampling import BatchSpec
from tests.factories import MadeSample, make_dataset, sample_key
from tests.field_cases import make_case
from tests.integration.loader_support import batches_of, check_everywhere, open_loader, slots_of

pytestmark = pytest.mark.fast

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
DAY = 86_400
KINDS: Mapping[str, Any] = {
    "heart_rate": {"codes": ["LOINC:8867-4"], "unit": "/min"},
    "temperature": {"codes": ["LOINC:8310-5", "SNOMED:386725007"], "unit": "Cel"},
    "glucose": {"codes": ["LOINC:2345-7"], "unit": "mg/dL", "factors": {"mmol/L": 18.016}},
    "systolic": {"codes": ["LOINC:8480-6"], "unit": "mm[Hg]"},
    "aspirin": {"codes": ["RxNorm:1191"]},
    "lactate": {"codes": ["mapped-icu:lactate"], "unit": "mmol/L"},
}
NAMES = list(KINDS)
# Code and unit as stored, kind, and the value in the kind's unit.
STORED: Sequence[tuple[str, str, str | None, str | None, Callable[[float], float]]] = [
    ("LOINC", "8867-4", "/min", "heart_rate", lambda x: x),
    ("LOINC", "8867-4", "bpm", "heart_rate", lambda x: x),
    ("LOINC", "8310-5", "Cel", "temperature", lambda x: x),
    ("SNOMED", "386725007", "[degF]", "temperature", lambda x: (x - 32) / 1.8),
    ("LOINC", "2345-7", "mg/dL", "glucose", lambda x: x),
    ("LOINC", "2345-7", "g/L", "glucose", lambda x: x * 100),
    ("LOINC", "2345-7", "mmol/L", "glucose", lambda x: x * 18.016),
    ("LOINC", "2345-7", "[iU]/L", "glucose", lambda x: np.nan),
    ("LOINC", "718-7", "g/dL", None, lambda x: np.nan),
    ("RXNORM", "1191", None, "aspirin", lambda x: np.nan),
]


def has_records(number: int) -> bool:
    return number % 5 != 0


def facts_of(number: int) -> list[dict[str, Any]]:
    """Facts of a study in no order of time, some of one second, some after the image."""
    generator = np.random.Generator(np.random.PCG64([number, 7]))
    facts: list[dict[str, Any]] = []
    for place in range(int(generator.integers(0, 40))):
        system, code, unit, *_ = STORED[int(generator.integers(len(STORED)))]
        seconds = int(generator.integers(-60, 12)) * 3600
        value = round(float(generator.uniform(30, 120)), 1)
        fact: dict[str, Any] = {
            "kind": "observation" if unit else "medication",
            "source": "fhir",
            "codes": [{"system": "ICD-10", "code": "R00"}, {"system": system, "code": code}],
            "status": ["final", "cancelled"][int(place % 9 == 4)],
            "when": {"day_offset": seconds // DAY, "seconds": seconds},
        }
        if unit:
            fact["value"] = {"number": value, "unit": unit}
        if place % 11 == 3:
            fact["kind"] = "order"
        if place % 13 == 5:
            fact["negated"] = True
        if place % 7 == 6:
            fact["when"] = {"day_offset": seconds // DAY}
        if place % 17 == 8:
            del fact["when"]
        facts.append(fact)
    return facts


def expected(number: int, most: int, window: tuple[float, float]) -> pd.DataFrame:
    """The same of a table of the facts, by pandas."""
    known = {(system, code, unit): (kind, value) for system, code, unit, kind, value in STORED}
    rows = []
    for fact in facts_of(number) if has_records(number) else []:
        stored = fact.get("value", {})
        coded = fact["codes"][1]
        kind, convert = known[coded["system"], coded["code"], stored.get("unit")]
        when = fact.get("when", {})
        time = when.get("seconds", (when["day_offset"] + 1) * DAY if when else np.nan)
        done = fact["kind"] != "order" and fact["status"] == "final" and "negated" not in fact
        rows.append((time, kind, convert(stored.get("number", np.nan)), done))
    table = pd.DataFrame(rows, columns=["time", "kind", "value", "done"])
    table = table.astype({"time": float, "value": float})
    table = table[table.done.astype(bool) & table.kind.notna() & table.time.between(*window)]
    return table.sort_values("time", kind="stable").tail(most)


def make(number: int, **_: Any) -> MadeSample:
    extra: dict[str, bytes] = {}
    if has_records(number):
        records = {"format_version": 1, "facts": facts_of(number), "time_origin": "acquisition"}
        extra["records.json"] = json.dumps(records).encode()
    return make_case(number, extra=extra)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("events") / "a"
    return Dataset.open(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make))


def _with(folder: Path, number: int, records: bytes, manifest: Mapping[str, Any] | None = None) -> Dataset:
    """A dataset in which one sample has other records."""

    def make_changed(at: int, **_: Any) -> MadeSample:
        made = make(at)
        if at == number:
            made.fields["records.json"] = records
        return MadeSample(key=made.key, fields=dict(sorted(made.fields.items())), facts=made.facts)

    return Dataset.open(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make_changed))


def _of_facts(folder: Path, facts: Sequence[Mapping[str, Any]]) -> Dataset:
    return _with(folder, 1, json.dumps({"format_version": 1, "facts": facts}).encode())


def _events(dataset: Dataset, field: sf.Events, number: int = 1) -> dict[str, Any]:
    """What one sample's events are, without their padding."""
    found = dataset.sample(sample_key(number), {"e": field})
    num = int(found["e_mask"].sum())
    assert not found["e_mask"][num:].any()
    names = [NAMES[code] if isinstance(field.codes, dict) else code for code in found["e_code"][:num]]
    return {
        "value": found["e"][:num].tolist(),
        "time_s": found["e_time_s"][:num].tolist(),
        "kind": names,
        "has_value": found["e_has_value"][:num].tolist(),
    }


@pytest.mark.parametrize(
    ("window", "seconds", "most"),
    [
        (("-48h", "0h"), (-48 * 3600, 0), 256),
        (("-inf", "inf"), (-np.inf, np.inf), 8),
        (("-1d", "90min"), (-DAY, 5400), 3),
        ((-7200, 0), (-7200, 0), 64),
    ],
)
def test_events_are_what_pandas_finds_in_the_facts(
    dataset: Dataset, window: Any, seconds: tuple[float, float], most: int
) -> None:
    fields = {"e": sf.Events(codes=dict(KINDS), window=window, max_events=most)}
    seen = num_left_out = num_unknown = num_undated = 0
    with open_loader(dataset, SPEC, fields) as loader:
        for batch in loader:
            assert batch["e"].shape == (2, most)
            assert batch["e"].dtype == np.float32
            assert batch["e_time_s"].dtype == np.int64
            assert batch.info.classes == {"e": tuple(NAMES)}
            for slot, number in slots_of(batch):
                wanted = expected(number, most, seconds)
                num = len(wanted)
                seen += num
                assert batch["e_recorded"][slot] == has_records(number)
                assert batch["e_mask"][slot].tolist() == [1] * num + [0] * (most - num)
                assert batch["e_time_s"][slot, :num].tolist() == wanted.time.tolist()
                assert [NAMES[code] for code in batch["e_code"][slot, :num]] == wanted.kind.tolist()
                assert batch["e_has_value"][slot, :num].tolist() == wanted.value.notna().tolist()
                np.testing.assert_allclose(batch["e"][slot, :num], wanted.value.fillna(0), rtol=1e-6)
                assert (batch["e_code"][slot, num:] == -1).all()
                assert not batch["e"][slot, num:].any()
                assert not batch["e_time_s"][slot, num:].any()
                num_left_out += len(expected(number, 10**6, seconds)) - num
                found = expected(number, 10**6, seconds)
                num_unknown += int((found.value.isna() & (found.kind == "glucose")).sum())
        counters = loader.counters.snapshot()
    assert seen > 5
    assert counters.get("events_left_out", {}).get("num_items", 0) == num_left_out
    assert counters["unknown_units"]["num_items"] == num_unknown
    assert counters["undated_events"]["num_items"] > num_undated


def test_nothing_after_the_image_is_delivered_unless_asked(dataset: Dataset) -> None:
    def times(window: tuple[str, str]) -> list[int]:
        with open_loader(dataset, SPEC, {"e": sf.Events(codes=dict(KINDS), window=window)}) as loader:
            return [int(time) for batch in loader for time in batch["e_time_s"][batch["e_mask"] == 1]]

    assert max(times(("-inf", "0h"))) <= 0
    assert max(times(("-48h", "0h"))) <= 0
    assert max(times(("-48h", "12h"))) > 0


def test_events_are_equal_everywhere(dataset: Dataset) -> None:
    fields = {
        "vitals": sf.Events(codes=dict(KINDS), max_events=6),
        "drugs": sf.Events(codes={"aspirin": {"codes": ["RXNORM:1191"]}}, window=("-inf", "0s")),
    }
    check_everywhere(lambda **settings: open_loader(dataset, SPEC, fields, **settings))


def test_a_transform_and_its_outputs_get_events(dataset: Dataset) -> None:
    def last(sample: dict[str, Any]) -> dict[str, Any]:
        values = sample["e"][sample["e_mask"] == 1]
        return {"last": np.float32(values[-1] if len(values) else np.nan), "codes": sample["e_code"]}

    fields = {"e": sf.Events(codes=dict(KINDS), max_events=5)}
    outputs = {"last": ("float32", ()), "codes": ("int64", (5,))}
    for declared in (None, outputs):
        with open_loader(dataset, SPEC, fields, transform=last, outputs=declared) as loader:
            assert {tuple(batch["codes"].shape) for batch in loader} == {(2, 5)}


# ---- single facts ----------------------------------------------------------------------------------------


def _fact(code: str, number: float | None, unit: str = "", **more: Any) -> dict[str, Any]:
    system, _, value = code.partition(":")
    fact: dict[str, Any] = {
        "kind": "observation",
        "source": "fhir",
        "codes": [{"system": system, "code": value}],
    }
    if number is not None:
        fact["value"] = {"number": number, "unit": unit}
    return {**fact, "when": {"day_offset": 0, "seconds": -60}, **more}


@pytest.mark.parametrize(
    ("when", "time_s"),
    [
        pytest.param({"day_offset": -1, "seconds": -90_000}, [-90_000], id="second"),
        pytest.param({"day_offset": -1}, [0], id="the day before may end just before the image"),
        pytest.param({"day_offset": -2}, [-DAY], id="two days before"),
        pytest.param({"day_offset": 0}, [], id="the day itself may be later than the image"),
        pytest.param({"day_offset": 0, "seconds": 1}, [], id="a second later"),
        pytest.param({"date": "2011-01-01"}, [], id="no distance"),
    ],
)
def test_an_event_counts_as_late_as_it_may_have_been(tmp_path: Path, when: Any, time_s: list[int]) -> None:
    dataset = _of_facts(tmp_path / "a", [_fact("LOINC:8867-4", 80, "/min", when=when)])
    found = _events(dataset, sf.Events(codes=dict(KINDS), window=("-inf", "0h")))
    assert found["time_s"] == time_s


def test_parts_of_panels_doses_and_mapped_fields_are_events(tmp_path: Path) -> None:
    panel = _fact("LOINC:55284-4", None)
    panel["components"] = [
        {"codes": [{"system": "LOINC", "code": "8480-6"}], "value": {"number": 16, "unit": "kPa"}},
        {"codes": [{"system": "LOINC", "code": "8462-4"}], "value": {"number": 80, "unit": "mm[Hg]"}},
    ]
    when = {"day_offset": 0, "seconds": -30}
    facts = [
        panel,
        _fact("RXNORM:1191", None, kind="medication", dosage=[{"dose": {"number": 100, "unit": "mg"}}]),
        {
            "kind": "record",
            "source": "mapped-icu",
            "lactate": {"number": 2.5, "unit": "mmol/L"},
            "when": when,
        },
        {
            "kind": "record",
            "source": "mapped-lab",
            "test": [{"system": "LOINC", "code": "2345-7"}],
            "result": {"number": 5.0, "unit": "mmol/L"},
            "when": when,
        },
    ]
    kinds = {**KINDS, "aspirin": {"codes": ["RXNORM:1191"], "unit": "g"}}
    found = _events(_of_facts(tmp_path / "a", facts), sf.Events(codes=kinds))
    assert found["kind"] == ["systolic", "aspirin", "lactate", "glucose"]
    assert found["value"] == pytest.approx([120.009867, 0.1, 2.5, 90.08])


def test_a_unit_that_does_not_convert_masks_the_value_and_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts = [_fact("LOINC:8867-4", number, "mmol/L") for number in (3, 4)]
    dataset = _of_facts(tmp_path / "a", facts)
    with open_loader(dataset, SPEC, {"e": sf.Events(codes=dict(KINDS))}) as loader:
        batches = [dict(batch) for batch in loader]
    assert sum(batch["e_mask"].sum() - batch["e_has_value"].sum() for batch in batches) >= 2
    messages = [record.getMessage() for record in caplog.records if "no form in" in record.getMessage()]
    assert sum("'heart_rate'" in message for message in messages) == 1


def test_codes_that_no_record_has_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make_other(number: int, **_: Any) -> MadeSample:
        facts = [_fact("LOINC:718-7", 13, "g/dL")]
        return make_case(number, extra={"records.json": json.dumps({"facts": facts}).encode()})

    dataset = Dataset.open(make_dataset(tmp_path / "a", num_samples=20, samples_per_shard=8, make=make_other))
    with open_loader(dataset, SPEC, {"e": sf.Events(codes=dict(KINDS))}) as loader:
        assert not any(batch["e_mask"].any() for batch in loader)
    messages = [one.getMessage() for one in caplog.records if "has one of its codes" in one.getMessage()]
    assert messages == [
        "field 'e': none of the first 16 samples with records has one of its codes; they have loinc:718-7"
    ]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b'{"facts": [', id="cut"),
        pytest.param(b"\xff\xfe", id="no UTF-8"),
        pytest.param(b'{"facts": 3}', id="no list"),
        pytest.param(b'{"facts": [{"kind": "observation"}]}', id="no source"),
        pytest.param(
            b'{"facts": [{"kind": "observation", "source": "fhir", '
            b'"codes": [{"system": "LOINC", "code": "8867-4"}], '
            b'"value": {"number": "many", "unit": "/min"}, "when": {"seconds": -1}}]}',
            id="a number that is none",
        ),
        pytest.param(b'{"facts": []}' + b" " * 50_000, id="too large"),
    ],
)
def test_damaged_records_mask_their_slot_alone(tmp_path: Path, dataset: Dataset, content: bytes) -> None:
    fields = {"e": sf.Events(codes=dict(KINDS), max_bytes=40_000), "report": sf.Text(missing="pad")}
    whole = batches_of(open_loader(dataset, SPEC, fields))
    found = batches_of(open_loader(_with(tmp_path / "b", 6, content), SPEC, fields))
    assert found.keys() == whole.keys()
    for place, batch in found.items():
        is_bad = sample_key(6) in batch["keys"]
        assert batch["weight"].count(0.0) == whole[place]["weight"].count(0.0) + is_bad
        if not is_bad:
            assert batch == whole[place]


def test_a_missing_member_follows_missing(dataset: Dataset) -> None:
    with open_loader(dataset, SPEC, {"e": sf.Events(codes=dict(KINDS), missing="error")}) as loader:
        masked = [
            key
            for batch in loader
            for key, weight in zip(batch.info.sample_keys, batch.info.weight, strict=True)
            if key and not weight
        ]
    assert sorted(masked) == sorted(
        sample_key(number) for number in range(NUM_SAMPLES) if not has_records(number)
    )
    with pytest.raises(ConfigError, match="cannot drop the others"):
        open_loader(dataset, SPEC, {"e": sf.Events(codes=dict(KINDS), missing="drop")})


# ---- vocabularies and settings ---------------------------------------------------------------------------


def test_vocabulary_files_say_the_same(tmp_path: Path, dataset: Dataset) -> None:
    toml = tmp_path / "kinds.toml"
    toml.write_text(
        '[heart_rate]\ncodes = ["LOINC:8867-4"]\nunit = "/min"\n'
        '[temperature]\ncodes = ["LOINC:8310-5", "SNOMED:386725007"]\nunit = "Cel"\n'
        '[aspirin]\ncodes = ["RXNORM:1191"]\n'
    )
    table = tmp_path / "kinds.csv"
    table.write_text(
        "name,code,unit\nheart_rate,LOINC:8867-4,/min\ntemperature,LOINC:8310-5,Cel\n"
        "temperature,SNOMED:386725007,Cel\naspirin,RXNORM:1191,\n"
    )
    settings = tmp_path / "fields.toml"
    settings.write_text(
        '[fields.a]\ntype = "events"\ncodes = "kinds.toml"\nwindow = ["-48h", "0h"]\nmax_events = 9\n'
        '[fields.b]\ntype = "events"\nmax_events = 9\n[fields.b.codes.heart_rate]\ncodes = ["LOINC:8867-4"]\n'
        'unit = "/min"\n[fields.b.codes.temperature]\ncodes = ["LOINC:8310-5", "SNOMED:386725007"]\n'
        'unit = "Cel"\n[fields.b.codes.aspirin]\ncodes = ["RXNORM:1191"]\n'
    )
    kinds = {name: KINDS[name] for name in ("heart_rate", "temperature")}
    plain = sf.Events(codes={**kinds, "aspirin": {"codes": ["RXNORM:1191"]}}, max_events=9)
    read = sf.read_fields(settings)
    for other in (
        sf.Events(codes=str(toml), max_events=9),
        sf.Events(codes=str(table), max_events=9),
        *read.values(),
    ):
        assert other == plain
        with open_loader(dataset, SPEC, {"e": other}) as one, open_loader(dataset, SPEC, {"e": plain}) as two:
            assert one.state_dict()["content_id"] == two.state_dict()["content_id"]


def test_another_vocabulary_is_another_content(tmp_path: Path, dataset: Dataset) -> None:
    path = tmp_path / "kinds.toml"
    found = set()
    for unit in ("/min", "Hz"):
        path.write_text(f'[heart_rate]\ncodes = ["LOINC:8867-4"]\nunit = "{unit}"\n')
        with open_loader(dataset, SPEC, {"e": sf.Events(codes=str(path))}) as loader:
            found.add(loader.state_dict()["content_id"])
    assert len(found) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"codes": {}}, "codes is a vocabulary"),
        ({"codes": "nowhere.toml"}, "must be a readable TOML or CSV file, got No such file"),
        ({"codes": {"a": ["LOINC:1"]}}, "is a table of codes, unit and factors"),
        ({"codes": {"a": {"code": ["LOINC:1"]}}}, "is a table of codes, unit and factors"),
        ({"codes": {"a": {"codes": "LOINC:1"}}}, "lists codes as SYSTEM:CODE"),
        ({"codes": {"a": {"codes": ["8867-4"]}}}, "lists codes as SYSTEM:CODE"),
        ({"codes": {"a": {"codes": ["LOINC:1"], "unit": 3}}}, "the unit of 'a' is text"),
        ({"codes": {"a": {"codes": ["LOINC:1"], "factors": {"g": 2.0}}}}, "beside a unit"),
        ({"codes": {"a": {"codes": ["LOINC:1"]}, "b": {"codes": ["loinc:1"]}}}, "to 'a' and to 'b'"),
        ({"window": ("0h", "-48h")}, "begins before it ends"),
        ({"window": "-48h"}, "is a begin and an end"),
        ({"window": ("-2 fortnights", "0h")}, "a number with s, min, h"),
        ({"max_events": 0}, "max_events is a number from 1"),
        ({"max_bytes": -1}, "max_bytes is a number from 1"),
        ({"missing": "skip"}, "missing is one of"),
    ],
)
def test_a_slip_gives_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sf.Events(**{"codes": dict(KINDS), **settings})
