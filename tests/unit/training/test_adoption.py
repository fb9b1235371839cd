"""Newer versions of a dataset under a run: adopted at an epoch's start, recorded, the same after a kill."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.config import load_config
from shardflow.errors import ConfigError, StorageError
from shardflow.format import Dataset, Manifest
from shardflow.format.copies.signing import sign_dataset
from shardflow.format.facts.making import attach_facts
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import FileEntry, commit, load, manifest_path
from shardflow.format.samples import SamplesTable
from shardflow.format.tables import TableManifest
from shardflow.packing.tables.joining import TableSettings, attach_table
from shardflow.storage import LocalStore
from shardflow.training import adoption
from shardflow.training.adoption import choose_version, newest_descendant, recorded_versions
from shardflow.training.config import DataConfig, TrainConfig
from shardflow.training.ledger import compare_ledgers, read_ledger, read_records
from shardflow.training.metrics import StepMetrics
from shardflow.training.run import TrainSummary, train
from shardflow.training.tokenizing import count_dataset
from tests.factories import sample_entries
from tests.packages import install_programs
from tests.sweeps import sampled
from tests.tiny_runs import TinyInput, make_tiny_input, tiny_config
from tests.unit.training.test_packed_conversations import PACKED, packed_run

ADOPT = "data.adopt_new_versions=epoch"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TinyInput:
    """A dataset of which a first version holds all shards of samples."""
    return make_tiny_input(tmp_path_factory.mktemp("adoption"))


@pytest.fixture
def tiny(made: TinyInput, tmp_path: Path) -> TinyInput:
    shutil.copytree(made.folder, tmp_path / "input")
    return TinyInput(tmp_path / "input")


def keys_of(tiny: TinyInput) -> list[str]:
    samples = Dataset.open(tiny.dataset, version=1).samples
    return [samples.sample_key(row) for row in samples.splits["train"]]


def write_version(
    tiny: TinyInput, number: int, without: Iterable[str], *, parent: str | None = None
) -> Manifest:
    """Write a version that holds the samples of the first one without some."""
    store = LocalStore(tiny.dataset)
    whole = Dataset.open(tiny.dataset, version=1)
    gone = set(without)
    entries = [one for one in sample_entries(whole.samples) if one.sample_key not in gone]
    removed = [0] * len(whole.manifest.shards)
    for one in sample_entries(whole.samples):
        removed[one.shard] += one.sample_key in gone
    data = SamplesTable.encode(entries, shard_splits=[shard.split for shard in whole.manifest.shards])
    path = f"samples/samples-{number:06d}.tbl"
    store.put_new(path, data)
    manifest = replace(
        whole.manifest,
        manifest_version=number,
        parent=parent or load(store, number - 1).dataset_id,
        samples=FileEntry(path=path, num_bytes=len(data), sha256=sha256_hex(data)),
        shards=tuple(
            replace(shard, num_removed=count)
            for shard, count in zip(whole.manifest.shards, removed, strict=True)
        ),
    )
    commit(store, manifest)
    attach_facts(Dataset(store, manifest))
    return manifest


def attach_kinds(tiny: TinyInput, kinds: str, version: int, folder: Path) -> None:
    """Attach a table ``kinds`` with a column of letters to a version."""
    dataset = Dataset.open(tiny.dataset, version=version)
    rows = [f"{dataset.samples.sample_key(row)},{kinds[row % len(kinds)]}" for row in range(len(dataset))]
    (folder / "kinds.csv").write_text("\n".join(("sample_key,kind", *rows)) + "\n")
    attach_table(dataset, folder / "kinds.csv", TableSettings(name="kinds", on="sample_key"), private=None)


def run(tiny: TinyInput, output: Path, *overrides: str, at: dict[int, object] | None = None) -> TrainSummary:
    """Run; before the step after a number is taken, call what ``at`` holds for it."""

    def act(metrics: object, num_steps: int) -> None:
        done = metrics.global_step + 1  # type: ignore[attr-defined]
        if at is not None and done in at:
            at.pop(done)()  # type: ignore[operator]

    return train(tiny_config(tiny, output, *overrides), on_step=act)


class Killed(BaseException):
    pass


def kill() -> None:
    raise Killed


def drawn(output: Path) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for step in read_ledger(output):
        found.setdefault(step.epoch, set()).update(step.keys)
    return found


def of_epochs(output: Path) -> list[tuple[int, int]]:
    return [(line["epoch"], line["manifest_version"]) for line in recorded_versions(output)]


def test_the_next_epoch_takes_the_newest_version(tiny: TinyInput, tmp_path: Path) -> None:
    keys = keys_of(tiny)
    output = tmp_path / "run"
    summary = run(
        tiny,
        output,
        ADOPT,
        "run.num_epochs=3",
        "run.checkpoint_every_steps=4",
        at={3: lambda: write_version(tiny, 2, keys[::3])},
    )
    assert of_epochs(output) == [(0, 1), (1, 2), (2, 2)]
    epochs = drawn(output)
    assert not (epochs[1] | epochs[2]) & set(keys[::3])
    assert epochs[0] & set(keys[::3])
    assert summary.outcome == "finished"
    assert (summary.global_step, summary.num_steps) == (6 + 4 + 4, 14)
    state = json.loads((output / "checkpoints" / "step-00000014" / "state.json").read_text())["run"]
    assert state["loader"]["manifest_version"] == 2
    lock = json.loads((output / "checkpoints" / "step-00000014" / "loader.lock.json").read_text())
    assert lock["datasets"][0]["manifest_version"] == 2
    # Without it a run stays with the version that it began with.
    assert run(tiny, tmp_path / "same", "run.num_epochs=1").num_steps == 4


THREE_VERSIONS = (ADOPT, "run.num_epochs=3", "run.checkpoint_every_steps=4")


def third_version(tiny: TinyInput) -> Manifest:
    keys = keys_of(tiny)
    return write_version(tiny, 3, [*keys[::3], *keys[1:9:3]])


@pytest.fixture(scope="module")
def undisturbed(made: TinyInput, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to whose dataset two versions are added."""
    tiny = TinyInput(tmp_path_factory.mktemp("undisturbed") / "input")
    shutil.copytree(made.folder, tiny.folder)
    second = {3: lambda: write_version(tiny, 2, keys_of(tiny)[::3])}
    output = tiny.folder.with_name("run")
    run(tiny, output, *THREE_VERSIONS, at={**second, 8: lambda: third_version(tiny)})
    return output


@pytest.mark.parametrize("killed_after", sampled([5, 7, 9], {7}))
def test_a_killed_run_repeats_an_epoch_with_its_own_version(
    tiny: TinyInput, undisturbed: Path, tmp_path: Path, killed_after: int
) -> None:
    output, early = tmp_path / "run", killed_after < 8
    at: dict[int, object] = {3: lambda: write_version(tiny, 2, keys_of(tiny)[::3]), killed_after: kill}
    later: dict[int, object] = {8: lambda: third_version(tiny)}
    with pytest.raises(Killed):
        run(tiny, output, *THREE_VERSIONS, at=at if early else {**at, **later})
    if early and killed_after > 6:
        third_version(tiny)  # newest by now, while the epoch began with version 2
        run(tiny, output, *THREE_VERSIONS)
    else:
        run(tiny, output, *THREE_VERSIONS, at=later if early else None)
    assert drawn(output) == drawn(undisturbed)
    assert read_ledger(output)[-1].digest == read_ledger(undisturbed)[-1].digest


def test_a_replaced_version_is_not_taken_for_the_one_that_an_epoch_began_with(
    tiny: TinyInput, tmp_path: Path
) -> None:
    keys = keys_of(tiny)
    at: dict[int, object] = {3: lambda: write_version(tiny, 2, keys[::3]), 7: kill}
    settings = (ADOPT, "run.num_epochs=2", "run.checkpoint_every_steps=6")
    with pytest.raises(Killed):
        run(tiny, tmp_path / "run", *settings, at=at)
    (tiny.dataset / manifest_path(2)).unlink()
    (tiny.dataset / "samples" / "samples-000002.tbl").unlink()
    write_version(tiny, 2, keys[:2])
    with pytest.raises(ConfigError, match="version 2 of the dataset is not the one that epoch 1"):
        run(tiny, tmp_path / "run", *settings)


def test_a_new_run_that_adopts_goes_on_from_its_own_checkpoint(tiny: TinyInput, tmp_path: Path) -> None:
    at: dict[int, object] = {3: lambda: write_version(tiny, 2, keys_of(tiny)[::3])}
    run(tiny, tmp_path / "run", ADOPT, "run.num_epochs=2", "run.resume=never", at=at)
    assert of_epochs(tmp_path / "run") == [(0, 1), (1, 2)]


def test_an_unsigned_version_in_between_is_passed_over(tiny: TinyInput, tmp_path: Path) -> None:
    install_programs(["ssh-keygen"], ["openssh-client"], otherwise="OpenSSH's client cannot be installed")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    store, keys = LocalStore(tiny.dataset), keys_of(tiny)
    data = DataConfig(
        dataset=str(tiny.dataset), trusted_keys=tmp_path / "key.pub", adopt_new_versions="epoch"
    )
    first = load(store)
    sign_dataset(store, key)
    write_version(tiny, 2, keys[:2])
    assert newest_descendant(data, tmp_path, 1, first.dataset_id) == 1
    config = tiny_config(tiny, tmp_path / "run", ADOPT, f"data.trusted_keys={tmp_path / 'key.pub'}")
    assert choose_version(config, None) == 1  # a new run waits as one under way does
    write_version(tiny, 3, keys[:3])
    sign_dataset(store, key)
    attach_kinds(tiny, "abc", 3, tmp_path)
    # What was written beside a signed version is not signed yet.
    assert newest_descendant(data, tmp_path, 1, first.dataset_id, (TableManifest, "kinds")) == 1
    assert newest_descendant(data, tmp_path, 1, first.dataset_id) == 3
    write_version(tiny, 4, keys[:1])
    sign_dataset(store, key)
    with pytest.raises(ConfigError, match="brings back 2 samples"):
        newest_descendant(data, tmp_path, 1, first.dataset_id)


def test_what_cannot_be_adopted_is_refused_in_a_sentence(tiny: TinyInput, tmp_path: Path) -> None:
    keys = keys_of(tiny)
    settings = (ADOPT, "run.num_epochs=3")

    def refused(name: str, at: dict[int, object], message: str) -> None:
        for path in tiny.dataset.glob("manifest-*.json"):
            if path.name != manifest_path(1):
                path.unlink()
        for path in tiny.dataset.glob("samples/*"):
            if path.name != "samples-000001.tbl":
                path.unlink()
        with pytest.raises(ConfigError, match=message) as found:
            run(tiny, tmp_path / name, *settings, at=at)
        assert "data.adopt_new_versions = 'never'" in found.value.message

    refused("strange", {3: lambda: write_version(tiny, 2, keys[:2], parent="0" * 64)}, "does not descend")
    refused(
        "back",
        {3: lambda: write_version(tiny, 2, keys[:2]), 8: lambda: write_version(tiny, 3, keys[:1])},
        "brings back 1 samples",
    )


def test_a_class_that_was_not_there_is_refused(tiny: TinyInput, tmp_path: Path) -> None:
    def next_version() -> None:
        write_version(tiny, 2, keys_of(tiny)[:1])
        attach_kinds(tiny, "abc", 2, tmp_path)

    attach_kinds(tiny, "ab", 1, tmp_path)
    with (tiny.folder / "train.toml").open("a") as file:
        file.write('[fields.kind]\ntype = "column"\ncolumn = "kinds.kind"\n')
    with pytest.raises(ConfigError, match="changes the dtype, classes or columns of kind"):
        run(tiny, tmp_path / "run", ADOPT, "run.num_epochs=2", at={3: next_version})


def test_a_store_that_cannot_be_asked_costs_nothing(
    tiny: TinyInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise StorageError("no answer")

    monkeypatch.setattr(adoption, "newest_descendant", fails)
    assert run(tiny, tmp_path / "run", ADOPT, "run.num_epochs=2").global_step == 12


@pytest.mark.parametrize(
    ("setting", "message"),
    [("data.manifest_version=1", "pins one"), ("data.dataset=blend.toml", "is a blend file")],
)
def test_settings_that_contradict(tiny: TinyInput, tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tiny, tmp_path, ADOPT, setting)


def test_a_version_waits_until_its_tokens_are_counted(tmp_path: Path) -> None:
    """The steps of its epochs follow its own counts."""
    config = packed_run(tmp_path, "llama", num=32)
    tiny = TinyInput(tmp_path)
    dataset = Dataset.open(tiny.dataset)
    keys = [dataset.samples.sample_key(row) for row in dataset.splits["train"]]
    changes = [ADOPT, "run.num_epochs=3", "run.max_steps=999", PACKED]
    done: dict[int, int] = {}

    def act(metrics: StepMetrics, _: int) -> None:
        if metrics.step == 0 and metrics.epoch == 0:
            write_version(tiny, 2, keys[::3])
        if metrics.step == 0 and metrics.epoch == 1:
            count_dataset(Dataset.open(tiny.dataset), tmp_path / "model")
        done[metrics.epoch] = metrics.step + 1

    summary = train(load_config(TrainConfig, config, changes), on_step=act)
    assert of_epochs(tmp_path / "run") == [(0, 1), (1, 1), (2, 2)]
    assert summary.global_step == sum(done.values())
    epochs = drawn(tmp_path / "run")
    assert epochs[0] == epochs[1] == set(keys)
    assert epochs[2] == set(keys) - set(keys[::3])


@pytest.mark.slow
def test_two_ranks_adopt_the_same_version(tiny: TinyInput, tmp_path: Path) -> None:
    other = TinyInput(tmp_path / "other")
    shutil.copytree(tiny.folder, other.folder)
    for epochs in (1, 3):
        settings = [ADOPT, f"run.num_epochs={epochs}"]
        run(other, tmp_path / "one", *settings)
        command = [sys.executable, "-m", "shardflow.cli.main", "train", "--nproc-per-node", "2"]
        command += ["--config", str(tiny.folder / "train.toml"), "--adopt-new-versions", "epoch"]
        command += ["--set", f"run.output={tmp_path / 'two'}", "--set", settings[1]]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        if epochs == 1:
            write_version(tiny, 2, keys_of(tiny)[::3])
            write_version(other, 2, keys_of(other)[::3])
    assert of_epochs(tmp_path / "two") == of_epochs(tmp_path / "one") == [(0, 1), (1, 2), (2, 2)]
    assert list(compare_ledgers(read_records(tmp_path / "two"), read_records(tmp_path / "one"))) == []
