"""Units and what belongs to studies: tokens and texts of series; slices and words of findings."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import shardflow as sf
from shardflow.fields.units import UnitDataset
from shardflow.format.codecs import decode_array
from shardflow.format.entities import EntityDataset, EntityRules
from shardflow.format.facts.making import attach_facts
from shardflow.format.keys import slice_field
from shardflow.loading import Loader
from shardflow.reports.entity_views import build_view
from shardflow.sampling import BatchSpec, CostRule, TokenBudget
from shardflow.training.text import train_tokenizer
from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset
from tests.entity_datasets import make_entity_dataset
from tests.field_cases import make_case_dataset

SPEC = BatchSpec(micro_batch_size=4, micro_batches_per_step=2, tail="mask")
ALL = "modality is not missing"


def test_tokens_of_a_series_are_those_of_its_study_and_are_charged(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")
    train_tokenizer(dataset, "train", 300, tmp_path / "bpe")
    tokenizer = TextTokenizer(tmp_path / "bpe")
    tokenize_dataset(dataset, tokenizer)
    fields = {"ids": sf.Tokens(tokenizer=tokenizer.digest, missing="pad"), "report": sf.Text(missing="pad")}
    cost = CostRule(tokenizer=tokenizer.digest, tokens_per_sample=1)
    budget = TokenBudget(max_tokens=90, max_samples=8, cost=cost)
    spec = BatchSpec(budget=budget, micro_batches_per_step=2, tail="mask", lanes=1)
    seen = 0
    with Loader(
        dataset, split="train", batch=spec, seed=3, fields=fields, unit="series", where=ALL
    ) as loader:
        for batch in loader:
            lengths = []
            for slot, unit in enumerate(batch.info.units):
                if unit is None:
                    continue
                seen += 1
                ids = batch["ids"][slot][batch["ids_mask"][slot] == 1].tolist()
                text = batch["report"][slot]
                assert ids == (tokenizer.encode([text])[0] if text else [])
                row = dataset.samples.find(unit.study_key)
                assert text.encode() == dataset.read_fields(row).get("report.txt", b"")
                lengths.append(len(ids) + 1)
            assert len(lengths) <= 1 or max(lengths) * len(lengths) <= budget.max_tokens
    assert seen == UnitDataset.beside(dataset, "series", ALL).samples.num_samples


def test_a_finding_delivers_the_slices_that_show_it(tmp_path: Path) -> None:
    dataset = make_entity_dataset(tmp_path / "a")
    attach_facts(dataset)
    build_view(dataset, EntityRules(text="sentence"))
    entities = EntityDataset.beside(dataset)
    fields = {"ct": sf.Slices(series=ALL), "report": sf.Text()}
    seen = 0
    texts: dict[str, str] = {}
    with Loader(dataset, split="train", batch=SPEC, seed=3, fields=fields, unit="entity") as loader:
        for batch in loader:
            for slot, key in enumerate(batch.info.sample_keys):
                if key is None:
                    continue
                row = entities.samples.find(key)
                place = entities.samples.place(row)
                study = int(entities.study_rows(np.array([row]))[0])
                stored = dataset.read_fields(study)
                indexes = batch["ct_index"][slot]
                chosen = indexes[indexes >= 0].tolist()
                assert (chosen[0], sorted(chosen)) == (place.slices[place.centre], place.slices.tolist())
                for found, index in zip(batch["ct"][slot], chosen, strict=True):
                    expected = decode_array("b2nd", stored[slice_field(place.series, index, "b2nd")])
                    assert np.array_equal(found[0], expected)
                start, size = place.text_start, int(entities.samples.gather("text_bytes", row))
                words = stored["report.txt"][start : start + size].decode()
                assert batch["report"][slot] == words
                unit = batch.info.units[slot]
                assert unit is not None
                assert unit.series == place.series
                texts[key] = words
                seen += 1
    assert seen == len(entities.splits["train"])
    alone = {"report": sf.Text()}
    with Loader(dataset, split="train", batch=SPEC, seed=3, fields=alone, unit="entity") as loader:
        found = {
            key: batch["report"][slot]
            for batch in loader
            for slot, key in enumerate(batch.info.sample_keys)
            if key is not None
        }
    assert found == texts


def test_a_transform_gets_the_facts_of_the_series_of_its_row(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a")

    def label(sample: dict[str, object]) -> dict[str, object]:
        facts = sample["__facts__"]
        assert isinstance(facts, list)
        return {"series": [int(one["series"]) for one in facts], "key": sample["__key__"]}

    fields = {"report": sf.Text(missing="pad")}
    with Loader(
        dataset, split="train", batch=SPEC, seed=3, fields=fields, unit="series", where=ALL, transform=label
    ) as loader:
        for batch in loader:
            for slot, unit in enumerate(batch.info.units):
                if unit is not None:
                    assert batch["series"][slot] == [unit.series]
                    assert batch["key"][slot] == batch.info.sample_keys[slot]
