"""Waveforms beside what is known of their signals, and what WFDB makes of real ones; damage masks a slot."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.data import get_testdata_file
from pydicom.waveforms import multiplex_array

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.format.tables import StoredColumn, write_table
from shardflow.packing.attachments.waveforms.dicom import read_dicom_recording
from shardflow.packing.attachments.waveforms.recording import attach_recording
from shardflow.packing.attachments.waveforms.wfdb_records import read_wfdb_recording
from shardflow.sampling import BatchSpec
from tests.factories import MadeSample, make_dataset, sample_key
from tests.field_cases import make_case
from tests.integration import test_loader_events
from tests.integration.loader_support import batches_of, check_everywhere, open_loader, slots_of
from tests.unit.packing.waveforms.test_recordings import study

pytestmark = pytest.mark.fast

NUM_SAMPLES = 12
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")
INVALID = -32768
GAIN, OFFSET = 0.5, 3.0  # uV
RATES = {"II": 250.0, "V1": 250.0, "RESP": 125.0}


def signal(label: str, time: NDArray[np.float64]) -> NDArray[np.float64]:
    """A slow wave, in uV, over the seconds of a recording."""
    return np.asarray(900 * np.sin(2 * np.pi * {"II": 3.0, "V1": 5.0, "RESP": 1.0}[label] * time + 0.3))


def has_recordings(number: int) -> bool:
    return number % 4 != 1


def seconds_of(number: int) -> float:
    return -float(number % 3) - 20.0


def _channel(label: str, **more: Any) -> dict[str, Any]:
    return {
        "label": label, "code": None, "unit": "uV", "gain": GAIN, "offset": OFFSET,
        "invalid_value": INVALID, "filters": None, **more,
    }  # fmt: skip


def _npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def members(number: int, **more: Any) -> dict[str, bytes]:
    """A recording of 30 s in two arrays; the second array begins 0.4 s later."""
    fields, arrays = {}, []
    for group, (labels, start) in enumerate(((("ECG II", "Lead V1"), 0.0), (("RESP",), 0.4))):
        names = [label.split(" ")[-1] for label in labels]
        rate = RATES[names[0]]
        time = np.arange(int(30 * rate)) / rate + start
        stored = np.stack([np.round((signal(name, time) - OFFSET) / GAIN) for name in names]).astype("<i2")
        if not group:
            stored[0, 1000:1100] = INVALID
        fields[f"w000.g{group:02d}.npy"] = _npy(stored)
        channels = [_channel(label, **more) for label in labels]
        arrays.append(
            {"field": f"w000.g{group:02d}.npy", "dtype": "int16", "num_samples": len(time), "rate_hz": rate,
             "start_s": start, "channels": channels}
        )  # fmt: skip
    entry = {"recording": 0, "source": "edf", "seconds_from_study": seconds_of(number), "arrays": arrays}
    fields["waveforms.json"] = json.dumps({"format_version": 1, "recordings": [entry]}).encode()
    return fields


def make(number: int, **_: Any) -> MadeSample:
    return make_case(number, extra=members(number) if has_recordings(number) else {})


def _made(folder: Path, changes: Mapping[int, Mapping[str, bytes]]) -> Dataset:
    def make_changed(number: int, **_: Any) -> MadeSample:
        made = make(number)
        fields = {**made.fields, **changes.get(number, {})}
        return MadeSample(key=made.key, fields=dict(sorted(fields.items())), facts=made.facts)

    return Dataset.open(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make_changed))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return _made(tmp_path_factory.mktemp("waveforms") / "a", {})


@pytest.mark.parametrize("rate", [250.0, 500.0, 100.0, 360.0, 125.0])
@pytest.mark.parametrize("window", [("-18s", "-2s"), ("-30s", "30s"), None])
def test_channels_are_the_known_signals_in_their_places(dataset: Dataset, rate: float, window: Any) -> None:
    length: dict[str, Any] = {"duration_s": 12} if window is None else {"window": window}
    field = sf.Waveform(channels=["v1", "II", "resp", "V9"], rate_hz=rate, **length)
    start, stop = (0.0, 12.0) if window is None else (float(end[:-1]) for end in window)
    time = start + np.arange(round((stop - start) * rate)) / rate
    with open_loader(dataset, SPEC, {"w": field}) as loader:
        for batch in loader:
            assert batch["w"].shape == (2, 4, len(time))
            assert batch["w"].dtype == np.float32
            assert batch.info.classes["w"] == ("v1", "II", "resp", "V9")
            for slot, number in slots_of(batch):
                assert batch["w_recorded"][slot] == has_recordings(number)
                values, mask = batch["w"][slot], batch["w_mask"][slot] == 1
                assert not values[~mask].any()
                assert not mask[3].any()
                if not has_recordings(number):
                    assert not mask.any()
                    continue
                own = time if window is None else time - seconds_of(number)
                for place, (label, first) in enumerate((("V1", 0.0), ("II", 0.0), ("RESP", 0.4))):
                    is_inside = (own >= first) & (own < first + 30 - 1 / RATES[label])
                    if label == "II":
                        is_inside &= (own < 4.0 - 1 / 250) | (own >= 4.4)
                    kept = is_inside & (own > first + 0.2) & (own < first + 29.8)
                    kept &= (own < 3.8) | (own > 4.6) if label == "II" else True
                    assert mask[place][kept].all()
                    assert not mask[place][(own < first - 1 / rate) | (own > first + 30)].any()
                    # Half a step of quantization, and the ripple of the filter.
                    error = np.abs(values[place][kept] - signal(label, own[kept]) / 1000)
                    assert error.max(initial=0) < 0.004
        counters = loader.counters.snapshot()
    assert counters["absent_channels"]["num_items"] >= NUM_SAMPLES // 2


def test_invalid_samples_are_no_samples(dataset: Dataset) -> None:
    field = sf.Waveform(channels=["II"], rate_hz=250, duration_s=8, unit="uV")
    found = dataset.sample(sample_key(0), {"w": field})
    assert np.flatnonzero(found["w_mask"][0] == 0).tolist() == list(range(1000, 1100))
    assert not found["w"][0, 1000:1100].any()
    assert np.abs(found["w"][0, :1000] - signal("II", np.arange(1000) / 250)).max() <= GAIN / 2 + 1e-3


def test_waveforms_are_equal_everywhere(dataset: Dataset) -> None:
    fields = {
        "ecg": sf.Waveform(channels=["II|MLII", "V1"], rate_hz=500, window=("-15s", "-5s")),
        "breath": sf.Waveform(channels=["RESP"], rate_hz=50, duration_s=20),
    }
    check_everywhere(lambda **settings: open_loader(dataset, SPEC, fields, **settings))


def test_image_label_age_events_and_waveform_come_in_one_batch(tmp_path: Path) -> None:
    def make_all(number: int, **_: Any) -> MadeSample:
        facts = {
            "format_version": 1,
            "facts": test_loader_events.facts_of(number),
            "time_origin": "acquisition",
        }
        records = {"records.json": json.dumps(facts).encode()}
        return make_case(number, extra={**records, **(members(number) if has_recordings(number) else {})})

    url = make_dataset(
        tmp_path / "a", num_samples=NUM_SAMPLES, samples_per_shard=4, make=make_all, facts=True
    )
    made, numbers = Dataset.open(url), np.arange(NUM_SAMPLES)
    columns = [
        StoredColumn(name="finding", kind="int", values=numbers % 2, is_missing=numbers == 3),
        StoredColumn(name="age", kind="float", values=40.0 + numbers, is_missing=numbers == 5),
    ]
    write_table(made.store, made.dataset_id, "labels", "study", columns)
    fields = {
        "image": sf.Image(size=(8, 8), missing="pad"),
        "label": sf.Column("labels.finding", missing="pad"),
        "age": sf.Column("labels.age", missing="pad"),
        "vitals": sf.Events(codes=dict(test_loader_events.KINDS), max_events=6),
        "ecg": sf.Waveform(channels=["II|MLII", "V1"], rate_hz=250, window=("-15s", "-5s")),
    }
    whole = check_everywhere(lambda **settings: open_loader(url, SPEC, fields, **settings))
    assert len(whole) == 8


def test_a_real_record_is_what_wfdb_makes_of_it(tmp_path: Path, shared_data: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wfdb
    from scipy.signal import resample_poly

    path = shared_data / "wfdb" / "100.hea"
    attached = attach_recording(read_wfdb_recording(path), study())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = wfdb.rdrecord(str(path.with_suffix("")))
    fields = {**attached.fields, "waveforms.json": json.dumps(attached.parts["waveforms"]).encode()}
    dataset = _made(tmp_path / "a", {1: fields})
    labels = record.sig_name[:2]
    for rate in (record.fs, 500):
        field = sf.Waveform(channels=labels, rate_hz=rate, duration_s=5, max_bytes=1 << 28)
        found = dataset.sample(sample_key(1), {"w": field})
        whole = record.p_signal[:, :2].T
        if rate != record.fs:
            level = whole.mean(axis=1, keepdims=True)
            whole = resample_poly(whole - level, rate, record.fs, axis=1, padtype="edge") + level
        assert found["w_mask"].all()
        np.testing.assert_allclose(found["w"], whole[:, : 5 * rate], atol=1e-5)


def test_an_averaged_beat_does_not_cover_the_strip_that_it_was_made_of(tmp_path: Path) -> None:
    path = Path(str(get_testdata_file("waveform_ecg.dcm")))  # a strip of 10 s, and 1.2 s of the same channels
    attached = attach_recording(read_dicom_recording(path), study())
    fields = {**attached.fields, "waveforms.json": json.dumps(attached.parts["waveforms"]).encode()}
    strip = multiplex_array(dcmread(path), 0, as_raw=False)
    found = _made(tmp_path / "a", {1: fields}).sample(
        sample_key(1), {"w": sf.Waveform(channels=["I", "II", "V6"], rate_hz=1000, duration_s=10, unit="uV")}
    )
    assert found["w_mask"].all()
    np.testing.assert_allclose(found["w"], strip[:, [0, 1, 11]].T)


def test_a_transform_gets_waveforms(dataset: Dataset) -> None:
    def power(sample: dict[str, Any]) -> dict[str, Any]:
        return {"power": (sample["w"] ** 2).mean(axis=-1)}

    fields = {"w": sf.Waveform(channels=["II", "V1"], rate_hz=100, duration_s=4)}
    for outputs in (None, {"power": ("float32", (2,))}):
        with open_loader(dataset, SPEC, fields, transform=power, outputs=outputs) as loader:
            assert max(float(batch["power"].max()) for batch in loader) > 0.1


@pytest.mark.parametrize("change", [{"unit": None}, {"gain": None}, {"unit": "mmHg"}])
def test_what_has_no_known_unit_is_masked_and_counted(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dataset = _made(tmp_path / "a", {0: members(0, **change)})
    field = sf.Waveform(channels=["II"], rate_hz=250, duration_s=8, unit="mV")
    with open_loader(dataset, SPEC, {"w": field}) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                assert batch["w_mask"][slot].any() == (has_recordings(number) and number != 0)
        assert loader.counters.snapshot()["unknown_units"]["num_items"] == 1
    told = [one.getMessage() for one in caplog.records if "unknown_units" in one.getMessage()]
    assert len(told) == 1
    assert ("in 'mmHg', not 'mV'" in told[0]) == (change == {"unit": "mmHg"})


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"waveforms.json": b'{"recordings": ['}, id="cut JSON"),
        pytest.param({"waveforms.json": b'{"recordings": [{"recording": 0}]}'}, id="no arrays"),
        pytest.param({"w000.g00.npy": members(0)["w000.g00.npy"][:-7]}, id="cut array"),
        pytest.param({"w000.g00.npy": _npy(np.zeros((2, 9)))}, id="floats"),
        pytest.param({"w000.g00.npy": _npy(np.zeros((3, 9), "i2"))}, id="another number of channels"),
        pytest.param({"w000.g00.npy": b"no array"}, id="no array"),
        pytest.param({"w001.g00.npy": bytes(1 << 20)}, id="too large"),
    ],
)
def test_damaged_recordings_mask_their_slot_alone(
    tmp_path: Path, dataset: Dataset, fields: dict[str, bytes]
) -> None:
    specs = {
        "w": sf.Waveform(channels=["II"], rate_hz=100, duration_s=9, max_bytes=1 << 20),
        "report": sf.Text(missing="pad"),
    }
    whole = batches_of(open_loader(dataset, SPEC, specs))
    found = batches_of(open_loader(_made(tmp_path / "b", {6: fields}), SPEC, specs))
    for place, batch in found.items():
        is_bad = sample_key(6) in batch["keys"]
        assert batch["weight"].count(0.0) == whole[place]["weight"].count(0.0) + is_bad
        assert is_bad or batch == whole[place]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"channels": "II"}, r"write channels=\['II'\]"),
        ({"channels": []}, "is a list of names of channels"),
        ({"channels": ["II", "II"]}, "names one twice"),
        ({"rate_hz": 0}, "rate_hz is a number above 0"),
        ({"duration_s": None}, "either window"),
        ({"window": ("-10s", "0s")}, "either window"),
        ({"duration_s": None, "window": ("-inf", "0s")}, "has two ends"),
        ({"duration_s": 1e6, "rate_hz": 1e6}, "the number of samples"),
        ({"missing": "skip"}, "missing is one of"),
    ],
)
def test_a_slip_gives_a_sentence(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sf.Waveform(**{"channels": ["II"], "rate_hz": 500.0, "duration_s": 10.0, **settings})


def test_a_waveform_reads_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "fields.toml"
    path.write_text(
        '[fields.ecg]\ntype = "waveform"\nchannels = ["II", "V1"]\nrate_hz = 500\nwindow = ["-10s", "0s"]\n'
    )
    assert sf.read_fields(path) == {
        "ecg": sf.Waveform(channels=["II", "V1"], rate_hz=500.0, window=("-10s", "0s"))
    }
