"""Signing of datasets; what a signature is and who checks it, see `shardflow.format.signatures`.

``ssh-keygen`` signs, so that keys with a passphrase, in an agent or on a hardware token work as they do
everywhere else, and no private key is read here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

from shardflow.errors import AlreadyExistsError, ConfigError, SignatureError
from shardflow.format.copies.copying import find_sidecars
from shardflow.format.dataset import Dataset
from shardflow.format.field_digests import FieldDigestsManifest, write_digests
from shardflow.format.keys import sha256_hex
from shardflow.format.manifest import load, manifest_path
from shardflow.format.signatures import (
    NAMESPACE,
    SignedList,
    fingerprint,
    list_path,
    signature_numbers,
    signer_of,
    stored_signature,
)
from shardflow.storage import ByteStore

_MAX_TRIES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningReport:
    """Result of signing."""

    dataset_id: str
    manifest_version: int
    path: str
    """Of the signed list; its signature has ``.sig`` behind that."""
    signer: str
    """Fingerprint of the key."""
    num_files: int
    """Manifests on the list: that of the version and those of its sidecars."""
    is_new: bool
    """Whether the newest signature was of another key or covered something else."""
    has_digests: bool
    """Whether digests of fields are among what is signed."""


def sign_dataset(
    store: ByteStore, key: str | os.PathLike[str], *, version: int | None = None, with_digests: bool = False
) -> SigningReport:
    """Sign a version of a dataset and every sidecar beside it that is finished.

    Args:
        store: Of the dataset.
        key: Private Ed25519 key of OpenSSH, or the ``.pub`` file of one that an agent holds.
        version: The version; by default the newest.
        with_digests: Write the digest of each field first, if the version has none: every shard is read.

    Raises:
        ChecksumError: A shard is not the one that the manifest names.
        ManifestError: There is no such version, or it cannot be trusted.
        ConfigError: The key cannot be used, or a program or package is missing.
        NoListingError: The store cannot list what is beside the shards.
        StorageError: Reading or writing failed.
    """
    manifest = load(store, version)
    if with_digests:
        dataset = Dataset(store, manifest)
        write_digests(dataset.store, manifest, dataset.shard_index, num_threads=os.cpu_count() or 1)
    files = {manifest_path(manifest.manifest_version): sha256_hex(manifest.encode())}
    has_digests = False
    for sidecar in find_sidecars(store, [manifest]):
        if sidecar.manifest is not None:
            has_digests = has_digests or sidecar.kind is FieldDigestsManifest
            files[sidecar.manifest_path] = sha256_hex(sidecar.manifest.encode())
    message = SignedList(dataset_id=manifest.dataset_id, files=files).encode()
    signature = _signature(message, key)
    try:
        signer = fingerprint(signer_of(signature, message))
    except SignatureError as error:
        raise ConfigError(
            f"--key cannot sign datasets: {error.message} Make one with: ssh-keygen -t ed25519"
        ) from None
    number, is_new = _put(store, manifest.manifest_version, message, signature)
    return SigningReport(
        dataset_id=manifest.dataset_id,
        manifest_version=manifest.manifest_version,
        path=list_path(manifest.manifest_version, number),
        signer=signer,
        num_files=len(files),
        is_new=is_new,
        has_digests=has_digests,
    )


def _signature(message: bytes, key: str | os.PathLike[str]) -> bytes:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise ConfigError(
            "ssh-keygen signs datasets, and is not installed; install OpenSSH's client (Debian: apt-get "
            "install openssh-client)."
        )
    command = [program, "-Y", "sign", "-q", "-n", NAMESPACE, "-f", os.fspath(key)]
    done = subprocess.run(command, input=message, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        reason = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            "--key must be an Ed25519 key that ssh-keygen can sign with "
            f"({reason[-1] if reason else 'no reason given'}); correct the path, allow reading it to "
            "yourself alone (chmod 600), or load it into ssh-agent and name its .pub file."
        )
    return done.stdout


def _put(store: ByteStore, version: int, message: bytes, signature: bytes) -> tuple[int, bool]:
    """Write a list and its signature under the next number, unless the newest ones are the same."""
    for _ in range(_MAX_TRIES):
        newest = max(signature_numbers(store, version), default=0)
        if newest and stored_signature(store, version, newest) == (message, signature):
            return newest, False
        try:
            # A list without a signature, of a signer that was killed, is passed over.
            store.put_new(list_path(version, newest + 1), message)
            store.put_new(f"{list_path(version, newest + 1)}.sig", signature)
        except AlreadyExistsError:
            continue
        return newest + 1, True
    raise ConfigError("others sign the dataset at the same time; run the command again.")
