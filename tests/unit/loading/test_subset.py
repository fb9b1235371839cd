"""Parts of a split: which rows an expression and a list of keys give, and what each slip is answered with."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.loading.rows.selection import choose_rows
from tests.factories import make_dataset, sample_key

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("subset") / "dataset"
    return Dataset.open(make_dataset(folder, splits={"test": 3, "train": 20, "val": 7}, slices=(0, 6)))


def slices(dataset: Dataset) -> list[int]:
    return [int(value) for value in dataset.samples.column("num_slices")]


def test_an_expression_chooses_rows(dataset: Dataset) -> None:
    train = dataset.splits["train"]
    numbers, lengths = slices(dataset), dataset.samples.column("text_bytes").tolist()
    found = choose_rows(dataset, "train", "facts.num_slices >= 3")
    assert list(found.rows) == [row for row in train if numbers[row] >= 3]
    assert found.digest is not None
    text = "3 <= facts.num_slices and facts.text_bytes < 60 and facts.modality in ('CT',)"
    both = choose_rows(dataset, "train", text)
    assert list(both.rows) == [row for row in train if numbers[row] >= 3 and lengths[row] < 60]


def test_an_expression_that_leaves_nothing_out_is_the_split(dataset: Dataset) -> None:
    assert choose_rows(dataset, "train", "facts.rows >= 0") == choose_rows(dataset, "train")
    assert choose_rows(dataset, "train").digest is None
    assert choose_rows(dataset, "train").rows == dataset.splits["train"]


def test_several_splits_in_the_order_of_the_table(dataset: Dataset) -> None:
    both = choose_rows(dataset, "val+train")
    assert both.split == "train+val"
    assert list(both.rows) == [*dataset.splits["train"], *dataset.splits["val"]]
    gap = choose_rows(dataset, "val+test")
    assert list(gap.rows) == [*dataset.splits["test"], *dataset.splits["val"]]
    assert gap.digest is None


def test_a_list_of_keys_and_digests(dataset: Dataset, tmp_path: Path) -> None:
    rows = list(dataset.splits["train"])[::3]
    lines = [dataset.samples.sample_key(row) for row in rows]
    lines[1] = "sha256:" + hashlib.sha256(lines[1].encode()).hexdigest()
    (tmp_path / "wanted.txt").write_text("\n".join(["", *reversed(lines), ""]), encoding="utf-8")
    wanted = tmp_path / "wanted.txt"
    assert list(choose_rows(dataset, "train", keys=wanted).rows) == rows
    numbers = slices(dataset)
    combined = choose_rows(dataset, "train", "facts.num_slices > 1", wanted)
    assert list(combined.rows) == [row for row in rows if numbers[row] > 1]


def test_a_list_that_an_editor_of_windows_wrote(dataset: Dataset, tmp_path: Path) -> None:
    keys = [dataset.samples.sample_key(row) for row in dataset.splits["train"][:2]]
    (tmp_path / "wanted.txt").write_text("\ufeff" + "\r\n".join(keys), encoding="utf-8", newline="")
    rows = choose_rows(dataset, "train", keys=tmp_path / "wanted.txt").rows
    assert list(rows) == list(dataset.splits["train"][:2])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("facts.num_slices >= 99", "where= selects none of the 20 samples of split 'train'; loosen it"),
        ("facts.modality != 'CT'", "where= selects none of the 20"),
        ("facts.age_years > 60", "This needs the table of study facts, .* shardflow attach DATASET --facts"),
        ("facts.age > 60", "There is no column 'facts.age'; did you mean .*facts.age_years"),
        ("num_slices == 3", "A study has many series; write facts.num_slices of the study, or any\\(series."),
        ("series.role == 'frontal'", "A study has many series; write any\\(series.role ...\\) or all"),
        ("num_slice == 3", "There is no column 'num_slice'; did you mean facts.num_slices"),
        ("age == 3", "There is no column 'age'; did you mean facts.age_years"),
        ("facts.shard == 0", "There is no column 'facts.shard'"),
        (["facts.rows > 1"], "where= is one expression, .* got list; join several with `and`"),
        # What former versions called terms of a subset.
        ("modality=CT", "This is written as in former versions; write where=\"facts.modality == 'CT'\""),
        ("modality!=CT,MR", ".* write where=\"facts.modality not in \\('CT', 'MR'\\)\""),
        ("num_slices>=16", '.* write where="facts.num_slices >= 16"'),
        ("keys=wanted.txt", "where= takes no list of keys; write it as keys=, such as keys='wanted.txt'"),
    ],
)
def test_an_expression_that_cannot_be_used_is_refused(dataset: Dataset, where: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        choose_rows(dataset, "train", where)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([sample_key(5), sample_key(5)], f"a key list must name a sample once, got {sample_key(5)} a second"),
        (["Doe^John"], "a line of a key list must be a sample key, got 8 characters that are none"),
        (["sha256:12"], "a digest in a key list must be 64 hexadecimal digits, got 2 characters"),
        ([], "a key list must hold at least one line, got none"),
        (
            [sample_key(5), "unknown"],
            "every line of a key list must be a sample of the split, got 1 that are",
        ),
        # Sample 0 is one of split test.
        ([sample_key(0)], "every line of a key list must be a sample of the split, got 1 that are not, "),
        (["sha256:" + "0" * 64], "every line .* got 1 that are not, all of them as digests"),
        (
            [sample_key(5), "sha256:" + hashlib.sha256(sample_key(5).encode()).hexdigest()],
            "a key list must name a sample once, .* as key and as digest",
        ),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(
    dataset: Dataset, tmp_path: Path, lines: list[str], message: str
) -> None:
    path = tmp_path / "wanted.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        choose_rows(dataset, "train", keys=path)
    assert "Doe" not in caught.value.message
    assert str(tmp_path) not in caught.value.message


def test_a_missing_list_and_a_missing_split_are_named(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the key list must exist, got no file"):
        choose_rows(dataset, "train", keys=tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="split must be one that holds samples"):
        choose_rows(dataset, "train+holdout")
    with pytest.raises(ConfigError, match="split must name each split once"):
        choose_rows(dataset, "train+train")
