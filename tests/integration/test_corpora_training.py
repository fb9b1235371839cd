"""Notes and images of the same patients, packed, blended, tokenized and trained on together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardflow.fields.slots import SlotAssembler
from shardflow.fields.types.text import Text
from shardflow.fields.types.tokens import Tokens
from shardflow.format import Dataset
from shardflow.loading import Loader, open_blend
from shardflow.sampling import BatchSpec
from shardflow.training.ledger import read_ledger
from shardflow.training.run import train
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.corpora_case import CorpusCase
from tests.dicom_factory import make_study
from tests.pack_case import PackCase
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_config

pytestmark = pytest.mark.usefixtures("packs_inline")

NUM_PATIENTS = 12
PARTS = {"train": 2, "val": 1}
BLEND = '[[component]]\ndataset = "images/out"\n[[component]]\ndataset = "notes/out"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and notes of the same patients, by one key; a tokenizer and settings beside them."""
    folder = tmp_path_factory.mktemp("both")
    make_tiny_input(folder)
    images = PackCase(folder / "images")
    images.folder.mkdir()
    images.prepare()
    for number in range(NUM_PATIENTS):
        make_study(images.dicom / f"p{number}", patient=f"P{number}", num_slices=2, seed=number)
    splits = [f"splits.{name}={parts}" for name, parts in (*PARTS.items(), ("test", 0))]
    images.pack(*splits)
    notes = CorpusCase(folder / "notes")
    notes.prepare()
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Note {n} of {p}?"},
                {"role": "assistant", "content": "Clear."},
            ]
        }
        | {"patient": f"P{p}"}
        for p in range(NUM_PATIENTS)
        for n in range(3)
    ]
    notes.write("a.jsonl", [json.dumps(line).encode() for line in lines])
    parts = ", ".join(f"{name} = {count}" for name, count in (*PARTS.items(), ("test", 0)))
    notes.pack("fields.kind=conversations", "splits.group=patient", f"splits.parts={{{parts}}}")
    train_tokenizer(Dataset.open(notes.output), "train", 300, folder / "bpe")
    (folder / "blend.toml").write_text(BLEND, encoding="utf-8")
    return folder


def test_a_patient_is_in_the_same_split_in_both(folder: Path) -> None:
    images, notes = Dataset.open(folder / "images" / "out"), Dataset.open(folder / "notes" / "out")
    assert len(notes.splits) == 2
    for split in PARTS:
        assert len(notes.splits[split]) == 3 * len(images.splits[split])
        patients = {
            int(notes.read_fields(row)["report.txt"].split(b" of ")[1].split(b"?")[0])
            for row in notes.splits[split]
        }
        assert len(patients) == len(images.splits[split])


def test_texts_take_the_short_way_of_the_loader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(SlotAssembler, "fill", refuse)
    dataset = Dataset.open(folder / "notes" / "out")
    spec = BatchSpec(micro_batch_size=8, micro_batches_per_step=1, tail="mask")
    with Loader(dataset, split="train", batch=spec, seed=5, fields={"report": Text()}) as loader:
        texts = [
            batch["report"][slot]
            for batch in loader
            for slot, weight in enumerate(batch.arrays["weight"])
            if weight
        ]
    assert sorted(texts) == sorted(
        dataset.read_fields(row)["report.txt"].decode() for row in dataset.splits["train"]
    )


def test_tokens_stand_beside_a_corpus(folder: Path) -> None:
    dataset = Dataset.open(folder / "notes" / "out")
    tokenizer = TextTokenizer(folder / "bpe")
    done = tokenize_dataset(dataset, tokenizer)
    assert done.num_samples == 3 * NUM_PATIENTS
    spec = BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask")
    fields = {"tokens": Tokens(tokenizer=tokenizer.digest, flat=True)}
    found = {}
    with Loader(dataset, split="train", batch=spec, seed=5, fields=fields) as loader:
        for batch in loader:
            for slot, row in enumerate(batch.arrays["row"].tolist()):
                if row >= 0:
                    start, stop = batch["tokens_offsets"][slot : slot + 2].tolist()
                    found[row] = batch["tokens"][start:stop].tolist()
    texts = {row: dataset.read_fields(row)["report.txt"].decode() for row in dataset.splits["train"]}
    assert found == {row: tokenizer.encode([text])[0] for row, text in texts.items()}


def test_a_blend_of_both_is_trained_on(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(
        TinyInput(folder),
        tmp_path / "run",
        f"data.dataset={folder / 'blend.toml'}",
        f"text.tokenizer={folder / 'bpe'}",
        "batch.micro_batch_size=2",
        "run.max_steps=3",
    )
    summary = train(config)
    assert (summary.outcome, summary.global_step) == ("finished", 3)
    components = {
        component
        for step in read_ledger(tmp_path / "run")
        for micro in step.micro_batches
        for component in micro.components
    }
    assert components >= {0, 1}
    assert len(open_blend(folder / "blend.toml").datasets) == 2
