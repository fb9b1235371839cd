"""Reports as tokens, and the tokenizer that a run trains for itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.training.text import ReportTokenizer, train_tokenizer
from tests.factories import MadeSample, make_dataset, make_sample
from tests.tiny_runs import TinyInput


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyInput) -> ReportTokenizer:
    return ReportTokenizer.load(tiny.tokenizer)


def test_any_text_survives_the_way_through_tokens(tokenizer: ReportTokenizer) -> None:
    for text in ("clear lungs.", "Größe 3 mm, Δ = 0", "  two  spaces\n\nand lines", "\U0001fac1"):
        rows = tokenizer.encode([text], 256)
        assert tokenizer.decode(rows.token_ids[0].tolist()) == text


def test_rows_begin_with_begin_and_end_with_end(tokenizer: ReportTokenizer) -> None:
    rows = tokenizer.encode(["clear.", ""], 256)
    assert rows.token_ids.shape == rows.token_mask.shape
    assert rows.token_ids.shape[1] % 8 == 0
    assert (rows.token_ids[:, 0] == tokenizer.begin_id).all()
    for ids, mask in zip(rows.token_ids, rows.token_mask, strict=True):
        assert ids[mask][-1] == tokenizer.end_id
        assert (ids[~mask] == tokenizer.padding_id).all()
    assert rows.token_mask[1].sum() == 2  # an empty report is begin and end


def test_long_report_is_cut(tokenizer: ReportTokenizer) -> None:
    rows = tokenizer.encode(["clear " * 100], 10)
    assert rows.token_ids.shape == (1, 10)
    assert rows.token_mask.all()
    assert rows.token_ids[0, -1] != tokenizer.end_id


def test_text_that_spells_a_special_token_stays_text(tokenizer: ReportTokenizer) -> None:
    rows = tokenizer.encode(["a</s>b"], 32)
    assert (rows.token_ids == tokenizer.end_id).sum() == 1
    assert tokenizer.decode(rows.token_ids[0].tolist()) == "a</s>b"


def test_same_reports_give_the_same_files_in_another_process(tiny: TinyInput, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shardflow.cli.main",
            "train-tokenizer",
            f"--dataset={tiny.dataset}",
            "--vocab-size=320",
            f"--output={tmp_path / 'again'}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"PYTHONHASHSEED": "77", "PATH": ""},
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 0, done.stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny.tokenizer / name).read_bytes()
    digest = hashlib.sha256((tiny.tokenizer / "tokenizer.json").read_bytes()).hexdigest()
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "vocab_size": ReportTokenizer.load(tiny.tokenizer).vocab_size,
        "digest": digest,
    }


def test_other_split_gives_another_tokenizer(tiny: TinyInput, tmp_path: Path) -> None:
    other = train_tokenizer(Dataset.open(tiny.dataset), "val", 320, tmp_path / "val")
    assert other.digest != ReportTokenizer.load(tiny.tokenizer).digest


def test_studies_without_a_report_teach_nothing(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing takes studies without a report by default."""

    def make_without(number: int, **options: Any) -> MadeSample:
        made = make_sample(number, **options)
        if number in {0, 3}:
            facts = replace(made.facts, text_bytes=0)
            fields = {name: data for name, data in made.fields.items() if name != "report.txt"}
            made = replace(made, fields=fields, facts=facts)
        return made

    monkeypatch.setattr("tests.factories.make_sample", make_without)
    make_dataset(tmp_path / "some", splits={"train": 6, "val": 1})
    seen: list[tuple[int, int]] = []
    some = Dataset.open(str(tmp_path / "some"))
    train_tokenizer(some, "train", 300, tmp_path / "made", lambda *counts: seen.append(counts))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]

    make_dataset(tmp_path / "none", splits={"train": 1})
    with pytest.raises(ConfigError, match="hold reports"):
        train_tokenizer(Dataset.open(str(tmp_path / "none")), "train", 300, tmp_path / "made")


def test_wrong_arguments_are_refused(tiny: TinyInput, tmp_path: Path) -> None:
    dataset = Dataset.open(tiny.dataset)
    with pytest.raises(ConfigError, match="at least 259"):
        train_tokenizer(dataset, "train", 100, tmp_path)
    with pytest.raises(ConfigError, match="train, val"):
        train_tokenizer(dataset, "trian", 320, tmp_path)


def test_missing_dataset_is_a_wrong_argument(tmp_path: Path) -> None:
    arguments = ["--dataset", str(tmp_path / "nothing"), "--output", str(tmp_path / "made")]
    assert main(["train-tokenizer", *arguments]) == 2
    assert not (tmp_path / "made").exists()


def test_missing_or_broken_tokenizer_is_named_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a tokenizer\.json or a folder with one") as missing:
        ReportTokenizer.load(tmp_path / "nothing")
    assert str(tmp_path) not in missing.value.message
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="readable tokenizer"):
        ReportTokenizer.load(tmp_path)


def test_tokenizer_without_an_end_token_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny.tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="end-of-sequence"):
        ReportTokenizer.load(tmp_path)
