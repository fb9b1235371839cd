"""Fields of members and of stored tokens: equal to a direct read on every way; damage masks its slot."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardflow as sf
from shardflow.errors import ConfigError, SampleError, StateError
from shardflow.format import Dataset
from shardflow.format.token_manifest import tokens_folder
from shardflow.loading import Loader, Selection, open_blend
from shardflow.sampling import BatchSpec
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.factories import MadeSample, make_dataset, sample_key
from tests.field_cases import make_case
from tests.integration.loader_support import (
    batches_of,
    check_everywhere,
    flip_bit,
    loader_threads,
    locate,
    open_loader,
    slots_of,
)

NUM_SAMPLES = 14
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=4, tail="mask")


def _npy(array: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _npz(**arrays: NDArray[Any]) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()


def _points(number: int) -> NDArray[np.float64]:
    return np.random.default_rng(number).normal(size=(number % 4, 2))


def _vector(number: int) -> NDArray[np.float32]:
    return np.random.default_rng(number).normal(size=3).astype(np.float32)


def _has_labels(number: int) -> bool:
    return number % 5 != 0


def make(number: int, **_: Any) -> MadeSample:
    extra = {
        "blob.bin": bytes(range(number)),
        "points.npy": _npy(np.asfortranarray(_points(number))),
        "scores.npz": _npz(a=np.arange(4) + number, b=np.arange(3)),
        "vector.npy": _npy(_vector(number)),
    }
    if _has_labels(number):
        extra["labels.json"] = json.dumps({"number": number, "words": ["größer"] * (number % 3)}).encode()
    return make_case(number, extra=extra)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_dataset(folder / "data", num_samples=20)
    train_tokenizer(Dataset.open(folder / "data"), "train", 300, folder / "bpe")
    return TextTokenizer(folder / "bpe")


def _made(folder: Path, tokenizer: TextTokenizer) -> Dataset:
    dataset = Dataset.open(make_dataset(folder, num_samples=NUM_SAMPLES, samples_per_shard=4, make=make))
    tokenize_dataset(dataset, tokenizer)
    return dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer) -> Dataset:
    return _made(tmp_path_factory.mktemp("members") / "a", tokenizer)


def _fields(tokenizer: TextTokenizer) -> Mapping[str, sf.Field]:
    return {
        "labels": sf.Json(member="labels.json", missing="pad"),
        "study": sf.Json(member="study.json"),
        "blob": sf.Bytes(member="blob.bin", max_bytes=64),
        "vector": sf.Array(member="vector.npy", shape=(3,), dtype="float32"),
        "points": sf.Array(member="points.npy", max_shape=(3, 2), dtype="float64"),
        "scores": sf.Array(member="scores.npz", array="a", shape=(4,), dtype="int16"),
        "ids": sf.Tokens(tokenizer=tokenizer.digest, max_tokens=5, pad_id=-1, missing="pad"),
        "packed": sf.Tokens(tokenizer=tokenizer.digest, flat=True, missing="pad"),
        "report": sf.Text(missing="pad"),
    }


def _loader(dataset: Dataset | Selection, fields: Mapping[str, sf.Field], **settings: Any) -> Loader:
    return open_loader(dataset, SPEC, fields, **settings)


def _expected_ids(number: int, tokenizer: TextTokenizer) -> list[int]:
    text = make(number).fields.get("report.txt", b"").decode()
    return tokenizer.encode([text])[0] if text else []


def test_members_are_what_was_stored(dataset: Dataset, tokenizer: TextTokenizer) -> None:
    seen = 0
    with _loader(dataset, _fields(tokenizer)) as loader:
        for batch in loader:
            assert batch["ids"].shape == (2, 5)
            assert batch["ids"].dtype == np.int64
            for slot, number in slots_of(batch):
                seen += 1
                stored = make(number).fields
                wanted = json.loads(stored["labels.json"]) if _has_labels(number) else None
                assert batch["labels"][slot] == wanted
                assert batch["labels_mask"][slot] == _has_labels(number)
                assert batch["study"][slot] == json.loads(stored["study.json"])
                assert batch["blob"][slot] == stored["blob.bin"]
                assert np.array_equal(batch["vector"][slot], _vector(number))
                points = _points(number)
                assert tuple(batch["points_shape"][slot]) == points.shape
                assert np.array_equal(batch["points"][slot, : len(points)], points)
                assert not batch["points"][slot, len(points) :].any()
                assert batch["scores"].dtype == np.int16
                assert batch["scores"][slot].tolist() == [number, number + 1, number + 2, number + 3]
                ids = _expected_ids(number, tokenizer)
                start, stop = batch["packed_offsets"][slot : slot + 2]
                assert batch["packed"][start:stop].tolist() == ids
                assert batch["packed_mask"][slot] == bool(ids)
                padded = (ids[:5] + [-1] * 5)[:5]
                assert batch["ids"][slot].tolist() == padded
                assert batch["ids_mask"][slot].tolist() == [one != -1 for one in padded]
    assert seen == NUM_SAMPLES


def test_members_are_equal_on_any_number_of_ranks_in_every_execution_and_after_a_resume(
    dataset: Dataset, tokenizer: TextTokenizer
) -> None:
    check_everywhere(lambda **settings: _loader(dataset, _fields(tokenizer), **settings))


@pytest.mark.parametrize(
    ("member", "content"),
    [
        pytest.param("labels.json", b'{"number": ', id="cut JSON"),
        pytest.param("labels.json", b"\xff\xfe", id="no UTF-8"),
        pytest.param("labels.json", b"[" * 100_000, id="deep JSON"),
        pytest.param("blob.bin", bytes(65), id="too many bytes"),
        pytest.param("vector.npy", _npy(np.zeros(4, np.float32)), id="other shape"),
        pytest.param("vector.npy", _npy(np.array([1e300, 0, 0])), id="too large a value"),
        pytest.param("vector.npy", _npy(np.zeros(3, np.float32))[:-1], id="cut array"),
        pytest.param("vector.npy", b"\x93NUMPY", id="cut header"),
        pytest.param("vector.npy", _npy(np.array(["a", "b", "c"])), id="strings"),
        pytest.param("points.npy", _npy(np.zeros((4, 2))), id="above max_shape"),
        pytest.param("points.npy", _npy(np.zeros(3)), id="other axes"),
        pytest.param(
            "scores.npz", _npz(a=np.array([0, 0, 0, 40_000]), b=np.arange(3)), id="values beyond int16"
        ),
        pytest.param("scores.npz", _npz(b=np.arange(4)), id="no such array"),
        pytest.param("scores.npz", b"PK\x03\x04 no archive", id="no archive"),
    ],
)
def test_a_member_that_is_not_what_its_name_says_masks_its_slot(
    tmp_path: Path, tokenizer: TextTokenizer, dataset: Dataset, member: str, content: bytes
) -> None:
    def make_changed(number: int, **_: Any) -> MadeSample:
        made = make(number)
        if number == 6:
            made.fields[member] = content
        return MadeSample(key=made.key, fields=dict(sorted(made.fields.items())), facts=made.facts)

    fields = {name: one for name, one in _fields(tokenizer).items() if not isinstance(one, sf.Tokens)}
    whole = batches_of(_loader(dataset, fields))
    make_dataset(tmp_path / "b", num_samples=NUM_SAMPLES, samples_per_shard=4, make=make_changed)
    found = batches_of(_loader(Dataset.open(tmp_path / "b"), fields))
    _check_masked(found, whole, {6})


def test_a_pickle_in_an_array_masks_its_slot_and_is_never_run(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "run",)

    stream = io.BytesIO()
    np.save(stream, np.array([Trap()], object), allow_pickle=True)

    def make_trapped(number: int, **_: Any) -> MadeSample:
        made = make(number)
        if number == 6:
            made.fields["vector.npy"] = stream.getvalue()
        return made

    make_dataset(tmp_path / "b", num_samples=NUM_SAMPLES, samples_per_shard=4, make=make_trapped)
    fields = {"vector": _fields(tokenizer)["vector"]}
    found = batches_of(_loader(Dataset.open(tmp_path / "b"), fields))
    weights = {
        key: weight for one in found.values() for key, weight in zip(one["keys"], one["weight"], strict=True)
    }
    assert [key for key, weight in weights.items() if key and not weight] == [sample_key(6)]
    assert not (tmp_path / "run").exists()


def _check_masked(
    found: Mapping[tuple[int, int], Mapping[str, Any]],
    whole: Mapping[tuple[int, int], Mapping[str, Any]],
    numbers: set[int],
) -> None:
    """Check that the slots of some samples are masked, and that batches without them are as before."""
    bad = {sample_key(number) for number in numbers}
    assert found.keys() == whole.keys()
    for place, batch in found.items():
        assert batch["weight"] == [key is not None and key not in bad for key in batch["keys"]]
        if not bad & {*batch["keys"]}:
            assert batch == whole[place]


def test_damaged_bytes_mask_their_slots_and_a_replay_masks_the_same(
    tmp_path: Path, tokenizer: TextTokenizer, dataset: Dataset
) -> None:
    damaged = _made(tmp_path / "a", tokenizer)
    for number, field in ((3, "labels.json"), (6, "blob.bin"), (8, "scores.npz"), (9, "report.txt")):
        path, offset, num_bytes = locate(damaged, number, field)
        flip_bit(path, offset + num_bytes // 2)
    fields = _fields(tokenizer)
    first = _loader(Dataset.open(tmp_path / "a"), fields)
    found = batches_of(first)
    _check_masked(found, batches_of(_loader(dataset, fields)), {3, 6, 8, 9})
    replayed = _loader(Dataset.open(tmp_path / "a"), fields)
    replayed.load_masks(first.masks())
    assert batches_of(replayed) == found


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("column", ["first_token", "token_ids"])
def test_damaged_tokens_mask_the_slots_of_their_shard(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    dataset: Dataset,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    *,
    flat: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a node without a sound copy of the tokens
    damaged = _made(tmp_path / "a", tokenizer)
    path = tmp_path / "a" / tokens_folder(tokenizer.digest, damaged.dataset_id) / "ids-000001.tbl"
    content = bytearray(path.read_bytes())
    data_start = len(content) - 12 - 4 * 2  # trailer, and the checksums of two blocks
    content[data_start - 20 if column == "token_ids" else data_start - 64 * 4] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    fields = {"ids": sf.Tokens(tokenizer=tokenizer.digest, flat=flat, missing="pad")}
    first = _loader(Dataset.open(tmp_path / "a"), fields)
    found = batches_of(first)
    with pytest.raises(SampleError, match=r"CHECKSUM_MISMATCH \(shard train-000001, field ids\)"):
        list(_loader(Dataset.open(tmp_path / "a"), fields, on_bad_sample="raise"))
    # The sound dataset has the same id, and leaves a sound copy on the node.
    _check_masked(found, batches_of(_loader(dataset, fields)), {4, 5, 6, 7})
    replayed = _loader(Dataset.open(tmp_path / "a"), fields)
    replayed.load_masks(first.masks())
    assert batches_of(replayed) == found


def test_tokens_are_missed_before_step_0(dataset: Dataset, tokenizer: TextTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"3 of 14 samples have no tokens for the field 'x'.*missing='pad'"):
        _loader(dataset, {"x": sf.Tokens(tokenizer=tokenizer.digest)})
    dropped = _loader(dataset, {"x": sf.Tokens(tokenizer=tokenizer.digest, missing="drop")})
    longest = max(len(_expected_ids(number, tokenizer)) for number in range(NUM_SAMPLES))
    with dropped:
        assert dropped.selection.population_of(0).sum() == 11
        assert next(iter(dropped))["x"].shape == (2, longest)
    with pytest.raises(ConfigError, match="run: shardflow tokenize"):
        _loader(dataset, {"x": sf.Tokens(tokenizer="ab" * 32)})


def test_a_blend_takes_the_tokens_of_each_component(
    tmp_path: Path, tokenizer: TextTokenizer, dataset: Dataset
) -> None:
    make_dataset(tmp_path / "b", num_samples=6, samples_per_shard=2, seed=3)
    component = '[[component]]\ndataset = "{}"\nsplit = "train"\n'
    (tmp_path / "blend.toml").write_text(component.format(dataset.store.url) + component.format("b"))
    fields = {"ids": sf.Tokens(tokenizer=tokenizer.digest, missing="pad"), "report": sf.Text(missing="pad")}
    with pytest.raises(ConfigError, match="run: shardflow tokenize"):
        _loader(open_blend(tmp_path / "blend.toml"), fields)
    tokenize_dataset(Dataset.open(tmp_path / "b"), tokenizer)
    seen = set()
    with _loader(open_blend(tmp_path / "blend.toml"), fields) as loader:
        for batch in loader:
            for slot, number in slots_of(batch):
                text = batch["report"][slot]
                ids = batch["ids"][slot][batch["ids_mask"][slot] > 0].tolist()
                assert ids == (tokenizer.encode([text])[0] if text else [])
                seen.add((batch.components[slot], number))
    assert len(seen) == NUM_SAMPLES + 6


def test_other_tokens_are_another_content(tmp_path: Path, dataset: Dataset, tokenizer: TextTokenizer) -> None:
    fields = {"x": sf.Tokens(tokenizer=tokenizer.digest, missing="pad")}
    with _loader(dataset, fields) as loader:
        state = loader.state_dict()
    again = _made(tmp_path / "a", tokenizer)
    with _loader(again, fields) as loader:
        assert loader.state_dict() == state
    manifest = tmp_path / "a" / tokens_folder(tokenizer.digest, again.dataset_id) / "manifest.json"
    assert manifest.exists()
    with (
        _loader(dataset, {"x": sf.Tokens(tokenizer=tokenizer.digest, pad_id=3, missing="pad")}) as loader,
        pytest.raises(StateError, match="accept_content_change"),
    ):
        loader.load_state_dict(state)


def test_texts_and_tokens_alone_read_no_more_than_they_need(
    dataset: Dataset, tokenizer: TextTokenizer
) -> None:
    tokens = sf.Tokens(tokenizer=tokenizer.digest, missing="pad")
    for fields, num_threads, is_read in (
        ({"x": tokens}, 1, False),
        ({"x": tokens, "y": sf.Text(missing="pad")}, 3, True),
    ):
        with _loader(dataset, fields, num_threads=3) as loader:
            batches = iter(loader)
            next(batches)
            assert len(loader_threads()) == num_threads
            for _ in batches:
                pass
            assert ("read" in loader.counters.snapshot()) == is_read


@pytest.mark.parametrize(
    ("make_field", "sentence"),
    [
        (lambda: sf.Json(member="a.json", max_bytes=0), "max_bytes is a number"),
        (lambda: sf.Json(member=""), "member is the name"),
        (lambda: sf.Bytes(member="A.bin"), "member='a.bin'"),
        (lambda: sf.Array(member="a.pkl", shape=(3,), dtype="float32"), "pickles are never read"),
        (lambda: sf.Array(member="a.bin", shape=(3,), dtype="float32"), "names an .npy, .npz"),
        (lambda: sf.Array(member="a.npy", dtype="float32"), "either shape"),
        (lambda: sf.Array(member="a.npy", shape=(3,), max_shape=(3,), dtype="float32"), "or max_shape"),
        (lambda: sf.Array(member="a.npy", shape=3, dtype="float32"), "tuple of sizes"),  # type: ignore[arg-type]
        (lambda: sf.Array(member="a.npy", shape=(0,), dtype="float32"), "each size of shape"),
        (lambda: sf.Array(member="a.npy", shape=(3,), dtype="object"), "a number type"),
        (lambda: sf.Array(member="a.npy", array="x", shape=(3,), dtype="int8"), "leave it out"),
        (lambda: sf.Tokens(tokenizer="gpt2"), "64 hexadecimal digits"),
        (lambda: sf.Tokens(tokenizer="ab" * 32, max_tokens=0), "max_tokens is a number"),
        (lambda: sf.Tokens(tokenizer="ab" * 32, pad_id=0.5), "pad_id is a token id"),  # type: ignore[arg-type]
        (lambda: sf.Tokens(tokenizer="ab" * 32, flat="yes"), "flat is True or False"),  # type: ignore[arg-type]
    ],
)
def test_a_slip_in_a_member_is_one_sentence(make_field: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_field()


def test_no_table_knows_which_samples_have_a_member(dataset: Dataset) -> None:
    with pytest.raises(ConfigError, match=r"No table knows which samples have labels\.json"):
        _loader(dataset, {"x": sf.Json(member="labels.json", missing="drop")})
    with _loader(dataset, {"x": sf.Json(member="labels.json")}) as loader:
        masked = {row.key for batch in loader for row in batch.quarantined}
    assert masked == {sample_key(number) for number in range(NUM_SAMPLES) if not _has_labels(number)}
