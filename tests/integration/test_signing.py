"""Signed datasets: the plain programs check what we sign, and what no trusted key signed is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import shardflow as sf
from shardflow.cli import main as cli
from shardflow.errors import ConfigError, NotFoundError, ShardflowError, SignatureError
from shardflow.format import Dataset, manifest_table, verify
from shardflow.format.copies.signing import sign_dataset
from shardflow.format.manifest import commit, load
from shardflow.format.signatures import fingerprint, read_keys
from shardflow.format.token_manifest import (
    TokenFile,
    TokenFiles,
    TokensManifest,
    open_manifest,
    tokens_folder,
)
from shardflow.packing.tables.joining import TableSettings, attach_table
from shardflow.sampling import BatchSpec
from shardflow.storage import CacheConfig, LocalStore, open_store
from shardflow.training.config import DataConfig
from shardflow.training.data import open_data
from tests.factories import make_dataset
from tests.object_stores import WebServer, s3_bucket
from tests.packages import install_programs

_SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=1)
LIST = "signatures/000001-001.sha256"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    install_programs(["ssh-keygen"], ["openssh-client"], otherwise="OpenSSH's client cannot be installed")
    folder = tmp_path_factory.mktemp("keys")
    for name, kind in (("ours", "ed25519"), ("theirs", "ed25519"), ("rsa", "rsa")):
        make = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", name, "-f", str(folder / name)]
        subprocess.run(make, check=True)
    public = (folder / "ours.pub").read_text()
    (folder / "allowed").write_text(f'# the team\nalice@example.org namespaces="shardflow,git" {public}')
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    make_dataset(path, num_samples=8, facts=True)
    _attach(path, "labels")
    return path


def _attach(path: Path, name: str, shift: int = 0) -> None:
    dataset = Dataset.open(path)
    rows = [f"{dataset.studies.sample_key(row)},{row % 3 + shift}" for row in range(len(dataset))]
    table = path.parent / f"{name}.csv"
    table.write_text("\n".join(("sample_key,grade", *rows)) + "\n")
    attach_table(dataset, table, TableSettings(name=name, on="sample_key"), private=None)


def _sign(path: Path | str, keys: Path, name: str = "ours") -> str:
    return sign_dataset(open_store(str(path)), keys / name).path


def _plain(path: Path, keys: Path, signed: str = LIST) -> list[int]:
    """Exit codes of the programs that know nothing of shardflow."""
    check = ["ssh-keygen", "-Y", "verify", "-n", "shardflow", "-I", "alice@example.org"]
    check += ["-f", str(keys / "allowed"), "-s", f"{signed}.sig"]
    sums = ["sha256sum", "--check", "--quiet", signed]
    message = (path / signed).read_bytes()
    return [
        subprocess.run(command, cwd=path, input=message, capture_output=True, check=False).returncode
        for command in (check, sums)
    ]


def test_plain_programs_and_we_agree(data: Path, keys: Path) -> None:
    assert _sign(data, keys) == LIST
    assert _plain(data, keys) == [0, 0]
    for trusted in ("allowed", "ours.pub"):
        dataset = sf.open(data, signed_by=keys / trusted)
        assert dataset[0]
        assert set(dataset.tables) == {"labels"}
    listed = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(keys / "ours.pub")], capture_output=True, text=True, check=True
    )
    (key,) = read_keys(keys / "ours.pub")
    assert fingerprint(key) in listed.stdout
    assert verify(data).is_whole
    assert not verify(data).notes
    assert not sign_dataset(LocalStore(data), keys / "ours").is_new

    manifest = data / "manifest-000001.json"
    content = manifest.read_bytes()
    manifest.chmod(0o644)
    manifest.write_bytes(content.replace(b'"key_id"', b'"key_ie"'))
    assert _plain(data, keys) == [0, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("none", "is not signed, and only signed ones are trusted here"),
        ("foreign", "which is no trusted key"),
        ("list", "got one of other bytes"),
        ("transplanted", "another version or dataset"),
        ("namespace", "namespace 'shardflow'"),
        ("rsa", "Ed25519"),
        ("cut", "got other bytes"),
        ("half", "interrupted"),
        ("huge", "too large"),
    ],
)
def test_what_no_trusted_key_signed_is_refused(data: Path, keys: Path, damage: str, message: str) -> None:
    signed, signature = data / LIST, data / f"{LIST}.sig"
    if damage not in ("none", "foreign"):
        _sign(data, keys)
        signed.chmod(0o644)
        signature.chmod(0o644)
    if damage == "foreign":
        _sign(data, keys, "theirs")
    elif damage == "list":
        text = signed.read_text()
        signed.write_text(text.replace(text.split()[-1], "tables/other-000001/x/manifest.json"))
    elif damage == "transplanted":
        other = data.parent / "other"
        make_dataset(other, num_samples=4, seed=3)
        _sign(other, keys)
        shutil.copyfile(other / LIST, signed)
        shutil.copyfile(other / f"{LIST}.sig", signature)
    elif damage in ("namespace", "rsa"):
        name, key = ("file", "ours") if damage == "namespace" else ("shardflow", "rsa")
        signature.unlink()
        command = ["ssh-keygen", "-q", "-Y", "sign", "-n", name, "-f", str(keys / key), str(signed)]
        subprocess.run(command, check=True, capture_output=True)
    elif damage == "cut":
        signature.write_bytes(signature.read_bytes()[:-60])
    elif damage == "half":
        signature.unlink()
    elif damage == "huge":
        signature.write_bytes(b"x" * 5000)
    with pytest.raises(SignatureError, match=message) as refused:
        sf.open(data, signed_by=keys / "allowed")
    assert refused.value.exit_code == 2
    assert sf.open(data)  # nobody asked


def test_a_table_attached_later_needs_a_new_signature(data: Path, keys: Path) -> None:
    _sign(data, keys)
    before = sf.open(data, signed_by=keys / "ours.pub")
    _attach(data, "labels", 1)
    with pytest.raises(SignatureError, match=r"labels-000002/.* was added after the dataset was signed"):
        _ = before.tables
    elsewhere = pickle.loads(pickle.dumps(before.store))  # as a loader process gets it
    with pytest.raises(SignatureError, match="labels-000002"):
        _ = Dataset(elsewhere, load(elsewhere)).tables
    with pytest.raises(SignatureError, match="labels-000002"):
        sf.Loader(
            sf.open(data),
            split="train",
            batch=_SPEC,
            seed=1,
            signed_by=keys / "ours.pub",
            where="labels.grade > 0",
        )
    assert _sign(data, keys) == "signatures/000001-002.sha256"
    assert set(sf.open(data, signed_by=keys / "ours.pub").tables) == {"labels"}


def test_what_was_signed_must_be_there(data: Path, keys: Path) -> None:
    _attach(data, "labels", 1)
    _sign(data, keys)
    shutil.rmtree(data / "tables" / "labels-000002")  # else the labels before it would be back
    with pytest.raises(SignatureError, match=r"labels-000002/.* is missing"):
        sf.open(data, signed_by=keys / "ours.pub")


def test_a_changed_table_and_a_next_version_are_refused(data: Path, keys: Path) -> None:
    _sign(data, keys)
    (series,) = data.glob("facts/series/*/manifest.json")
    content = series.read_bytes()
    series.chmod(0o644)
    series.write_bytes(content.replace(b'"num_bytes":', b'"num_bytes" :'))
    fields = {"image": sf.Image(size=(8, 8))}
    with pytest.raises(SignatureError, match="is not the signed one"):
        sf.Loader(
            sf.open(data), split="train", batch=_SPEC, seed=1, fields=fields, signed_by=keys / "ours.pub"
        )
    series.write_bytes(content)
    store = LocalStore(data)
    first = load(store)
    commit(store, replace(first, manifest_version=2, parent=first.dataset_id))
    with pytest.raises(SignatureError, match="version 2 of the dataset is not signed"):
        sf.open(data, signed_by=keys / "ours.pub")
    assert sf.open(data, version=1, signed_by=keys / "ours.pub")


@pytest.mark.parametrize("is_shared", [False, True])
def test_other_tokens_than_the_signed_ones_are_refused(
    data: Path, keys: Path, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_table, "MIN_SHARED_BYTES", 1 if is_shared else 1 << 30)
    tokenizer, dataset_id = "ab" * 32, Dataset.open(data).dataset_id
    path = data / tokens_folder(tokenizer, dataset_id) / TokensManifest.file_name
    path.parent.mkdir(parents=True)

    def write(counts_sha256: str) -> None:
        file = TokenFile(num_rows=8, num_bytes=1, sha256="cd" * 32)
        path.write_bytes(
            TokensManifest(
                dataset_id=dataset_id,
                tokenizer=tokenizer,
                num_samples=8,
                counts_sha256=counts_sha256,
                files=TokenFiles.of([file]),
            ).encode()
        )

    write("12" * 32)
    _sign(data, keys)
    assert open_manifest(sf.open(data, signed_by=keys / "ours.pub"), tokenizer).files[0].num_rows == 8
    write("34" * 32)
    with pytest.raises(SignatureError, match="is not the signed one"):
        open_manifest(sf.open(data, signed_by=keys / "ours.pub"), tokenizer)


def test_training_and_blends_refuse_what_is_not_signed(data: Path, keys: Path, tmp_path: Path) -> None:
    settings = DataConfig(dataset=str(data), trusted_keys=keys / "allowed")
    with pytest.raises(SignatureError, match="is not signed"):
        open_data(settings, None)
    _sign(data, keys)
    assert open_data(settings, None).training.datasets
    other = tmp_path / "other"
    make_dataset(other, num_samples=4, seed=1, facts=True)
    blend = tmp_path / "blend.toml"
    blend.write_text(
        "".join(f'[[component]]\ndataset = "{name}"\nrepeat = 1.0\n' for name in ("data", "other"))
    )
    settings = DataConfig(dataset=str(blend), trusted_keys=keys / "allowed")
    with pytest.raises(ConfigError, match=r"component 2 of the blend .*is not signed"):
        open_data(settings, None)
    with pytest.raises(ConfigError, match="was opened without keys"):
        sf.Loader(sf.blend(blend), batch=_SPEC, seed=1, signed_by=keys / "allowed")
    _sign(other, keys)
    assert open_data(settings, None).training.datasets
    with sf.Loader(
        sf.blend(blend, signed_by=keys / "allowed"), batch=_SPEC, seed=1, signed_by=keys / "ours.pub"
    ) as loader:
        assert len(list(loader)) == 6
    _sign(data, keys, "theirs")
    _sign(other, keys, "theirs")
    opened = sf.blend(blend, signed_by=keys / "allowed")
    with pytest.raises(ConfigError, match="must have all keys that the blend"):
        sf.Loader(opened, batch=_SPEC, seed=1, signed_by=keys / "theirs.pub")


def test_object_stores_and_plain_http(s3: str, data: Path, keys: Path) -> None:
    bucket = f"{s3_bucket(s3, 'signed')}/set"
    assert cli.main(["copy", str(data), bucket]) == 0
    with pytest.raises(SignatureError, match="is not signed"):
        sf.open(bucket, signed_by=keys / "ours.pub")
    _sign(bucket, keys)
    assert sf.open(bucket, signed_by=keys / "ours.pub").tables
    _sign(data, keys)
    with WebServer(data) as server:
        assert len(sf.open(server.url, signed_by=keys / "ours.pub")) == 8
        with pytest.raises(SignatureError, match="no trusted key"):
            sf.open(server.url, signed_by=keys / "theirs.pub")


def test_verification_asks_for_no_signatures_by_name(data: Path, keys: Path) -> None:
    requests = []
    for is_signed in (False, True):
        if is_signed:
            _sign(data, keys)
        with WebServer(data) as server:
            result = verify(server.url)
            requests.append(server.num_requests)
        assert result.is_whole
        assert any("the store cannot list" in note for note in result.notes)
    assert requests[0] == requests[1] < 100


def test_a_store_that_cannot_list_is_asked_for_names(
    data: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _sign(data, keys)
    _attach(data, "labels", 1)
    _sign(data, keys)
    for name in (LIST, f"{LIST}.sig"):  # as a copy leaves out the signature of what was not copied
        (data / name).unlink()
    with WebServer(data) as server:
        check = ["verify", server.url, "--signature", "--keys", str(keys / "allowed")]
        assert cli.main(check) == 0
        assert "signed by alice@example.org: signatures/000001-002.sha256" in capsys.readouterr().out
        assert len(sf.open(server.url, signed_by=keys / "allowed")) == 8
        table = next(data.glob("tables/labels-000002/*/manifest.json"))
        table.chmod(0o644)
        table.write_bytes(table.read_bytes().replace(b"labels", b"lebals"))
        assert cli.main(check) == 2
        assert "is not the signed one" in capsys.readouterr().err
        shutil.rmtree(data / "signatures")
        assert cli.main(check) == 2
        said = capsys.readouterr().err
        assert "its store cannot list others" in said
        assert "is not signed" not in said


def test_keys_bind_the_dataset_that_was_opened_with_them_alone(data: Path, keys: Path) -> None:
    _sign(data, keys)
    plain = sf.open(data)
    other = Dataset(plain.store, plain.manifest)
    signed = plain.signed(keys / "ours.pub")
    _attach(data, "labels", 1)  # which no key has signed
    assert set(plain.tables) == set(other.tables) == {"labels"}
    with pytest.raises(SignatureError, match="labels-000002"):
        _ = Dataset(signed.store, signed.manifest).tables
    cached = sf.open(data, cache=CacheConfig(ram_bytes=1 << 20))
    with pytest.raises(SignatureError, match="labels-000002"):
        cached.signed(keys / "ours.pub")
    assert cached.tables


def test_commands(data: Path, keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["verify", str(data), "--signature", "--keys", str(keys / "allowed")]
    assert cli.main(check) == 2
    assert "is not signed" in capsys.readouterr().err
    assert cli.main(["sign", str(data), "--key", str(keys / "rsa")]) == 2
    assert "ssh-keygen -t ed25519" in capsys.readouterr().err
    assert cli.main(["sign", str(data), "--key", str(tmp_path / "none")]) == 2
    assert cli.main(["sign", str(data), "--key", str(keys / "ours"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["path"], report["num_files"]) == (LIST, len((data / LIST).read_text().splitlines()) - 2)
    assert cli.main(check) == 0
    assert f"signed by alice@example.org: {LIST}" in capsys.readouterr().out
    # A copy stays signed, unless it leaves out what was signed.
    assert cli.main(["copy", str(data), str(tmp_path / "copy")]) == 0
    assert sf.open(tmp_path / "copy", signed_by=keys / "allowed")
    assert cli.main(["copy", str(data), str(tmp_path / "bare"), "--no-sidecars"]) == 0
    with pytest.raises(NotFoundError):
        LocalStore(tmp_path / "bare").read(LIST)


def test_keys_that_cannot_be_read_are_named(keys: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text, message in (
        ("alice ssh-rsa AAAA", "line 1 of the file of trusted keys"),
        (f'bob valid-before="20200101" {(keys / "ours.pub").read_text()}', "time limit"),
        (f'bob namespaces="git" {(keys / "ours.pub").read_text()}', "got none"),
        ("", "got none"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_keys(path)
    with pytest.raises(ShardflowError, match="No such file"):
        read_keys(tmp_path / "nowhere")
