"""Signatures of datasets: who vouches for a version and for the tables beside it.

The signed file is a list in the form of ``sha256sum``: a line for the manifest, which has the digest of every
shard, index and table of the version, and one for the manifest of each sidecar. Its signature is that of
``ssh-keygen -Y sign`` (SSHSIG, OpenSSH's PROTOCOL.sshsig) with an Ed25519 key, so that ``ssh-keygen -Y
verify`` and ``sha256sum -c`` check it without shardflow. SSHSIG was chosen over minisign because teams have
these keys and files of allowed signers already, in agents and on hardware, and the program is on every host.

``signatures/000003-001.sha256`` and ``.sha256.sig`` are the first signature of version 3; as all objects
they are written once, so a table that is attached later is covered by the next number. A store of
`trust_only` opens only what the newest signature of a trusted key lists: a dataset asks when it is made, a
sidecar when its manifest is read, in every process. Other stores of the same place know nothing of it.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from shardflow.errors import ConfigError, NoListingError, NotFoundError, SignatureError, os_reason
from shardflow.format.manifest import Manifest, manifest_path
from shardflow.storage import ByteStore, origin_of

NAMESPACE: Final = "shardflow"
"""Namespace of the signatures: those for git or files are no signatures of datasets."""
FOLDER: Final = "signatures"
_HEAD: Final = "# shardflow dataset 1"
_MAGIC: Final = b"SSHSIG"
_HEADER: Final = _MAGIC + struct.pack(">I", 1)
_KEY_TYPE: Final = b"ssh-ed25519"
_HASHES: Final = {b"sha256": hashlib.sha256, b"sha512": hashlib.sha512}
_ARMOR: Final = re.compile(
    rb"-----BEGIN SSH SIGNATURE-----\n([A-Za-z0-9+/=\n]+)-----END SSH SIGNATURE-----\s*", re.ASCII
)
_ALLOWED: Final = re.compile(
    r"(?:(?P<name>\S+)\s+(?:namespaces=\"(?P<namespaces>[^\"]+)\"\s+)?)?"
    r"ssh-ed25519\s+(?P<key>[A-Za-z0-9+/=]+)(?:\s.*)?",
    re.ASCII,
)
_KEY_BYTES: Final = 32
_LINE: Final = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_][A-Za-z0-9._/-]*)", re.ASCII)
_NAME: Final = re.compile(rf"{FOLDER}/\d{{6}}-(\d{{3,}})\.sha256", re.ASCII)
_MAX_LIST_BYTES: Final = 16 << 20
_MAX_SIGNATURE_BYTES: Final = 4096
_MAX_TRIED: Final = 64
_MAX_MISSING: Final = 16
"""Numbers that a store that cannot list may lack in a row: a copy leaves out signatures of other tables."""


# ---- keys ----------------------------------------------------------------------------------------------


def fingerprint(key: bytes) -> str:
    """Return what ``ssh-keygen -l`` calls an Ed25519 key of 32 bytes: ``SHA256:...``."""
    digest = hashlib.sha256(_string(_KEY_TYPE) + _string(key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def read_keys(path: str | os.PathLike[str]) -> dict[bytes, str]:
    """Read public keys: OpenSSH's file of allowed signers, or lines of ``.pub`` files.

    Args:
        path: The file; a line is ``NAME [namespaces="shardflow"] ssh-ed25519 KEY``, or a public key.

    Returns:
        The name of the signer of each key of 32 bytes; its fingerprint where the line has none. Lines of
        other namespaces are left out.

    Raises:
        ConfigError: The file cannot be read, a line has another key or option, or no key is left.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the file of trusted keys cannot be read ({os_reason(error)}); name a file of allowed signers "
            "or a public key (.pub)."
        ) from None
    keys: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _ALLOWED.fullmatch(line.strip())
        key = None if found is None else _key_of(found["key"])
        if found is None or key is None:
            raise ConfigError(
                f'line {number} of the file of trusted keys must be NAME [namespaces="{NAMESPACE}"] '
                "ssh-ed25519 KEY, or the public key of an Ed25519 pair; got something else, such as another "
                "type of key, a certificate or a time limit. Make a key with: ssh-keygen -t ed25519"
            )
        if found["namespaces"] is None or NAMESPACE in found["namespaces"].split(","):
            keys[key] = found["name"] or fingerprint(key)
    if not keys:
        raise ConfigError(
            f"the file of trusted keys must have a key for the namespace {NAMESPACE!r}, got none; add a line "
            "of the .pub file of who signs."
        )
    return keys


def _key_of(text: str) -> bytes | None:
    """Return the Ed25519 key of a line; None if there is none."""
    with suppress(ValueError):
        kind, key = _strings(base64.b64decode(text, validate=True), 2)
        if kind == _KEY_TYPE and len(key) == _KEY_BYTES:
            return key
    return None


# ---- signatures ----------------------------------------------------------------------------------------


def _string(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _strings(data: bytes, count: int) -> list[bytes]:
    """Return the strings of an SSH structure that has nothing else; raises ValueError."""
    found, place = [], 0
    for _ in range(count):
        if len(data) < place + 4:
            raise ValueError
        (size,) = struct.unpack_from(">I", data, place)
        if len(data) < place + 4 + size:
            raise ValueError
        found.append(data[place + 4 : place + 4 + size])
        place += 4 + size
    if place != len(data):
        raise ValueError
    return found


def signer_of(signature: bytes, message: bytes) -> bytes:
    """Return the Ed25519 key that made a signature; whether it is trusted is for the caller to say.

    Args:
        signature: As ``ssh-keygen -Y sign -n shardflow`` writes it.
        message: What was signed.

    Returns:
        The public key, 32 bytes.

    Raises:
        SignatureError: It is no signature of this message for this namespace by such a key.
        ConfigError: The package cryptography is not installed.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise ConfigError(
            "signatures are checked with the package cryptography, which is not installed; run: "
            "pip install 'shardflow[sign]'"
        ) from None
    armored = _ARMOR.fullmatch(signature)
    try:
        data = base64.b64decode(armored[1].replace(b"\n", b"") if armored else b"", validate=True)
        key_blob, namespace, reserved, hash_name, signature_blob = _strings(data[len(_HEADER) :], 5)
        if not key_blob.startswith(_string(_KEY_TYPE)):
            kind, key, value = b"", b"", b""
        else:
            kind, key = _strings(key_blob, 2)
            kind, value = _strings(signature_blob, 2)
    except ValueError:
        data = b""
    if not data.startswith(_HEADER):
        raise SignatureError("a signature must be one of ssh-keygen -Y sign, got other bytes.")
    if kind != _KEY_TYPE:
        raise SignatureError("a signature must be made with an Ed25519 key, got another type of key.")
    if namespace != NAMESPACE.encode() or hash_name not in _HASHES:
        raise SignatureError(
            f"a signature must be made for the namespace {NAMESPACE!r} with sha256 or sha512, got another."
        )
    digest = _HASHES[hash_name](message).digest()
    content = _MAGIC + b"".join(map(_string, (namespace, reserved, hash_name, digest)))
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(value, content)
    except (InvalidSignature, ValueError):
        raise SignatureError("a signature must be one of this list, got one of other bytes.") from None
    return key


# ---- lists ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedList:
    """What a signature covers: SHA-256 of the manifest of a version and of those of its sidecars by path."""

    dataset_id: str
    files: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the bytes of the file, which ``sha256sum -c`` reads."""
        lines = [_HEAD, f"# dataset_id {self.dataset_id}"]
        lines += [f"{digest}  {path}" for path, digest in sorted(self.files.items())]
        return "\n".join(lines).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a list.

        Raises:
            SignatureError: It is none.
        """
        with suppress(ValueError):
            head, named, *lines, last = data.decode("ascii").split("\n")
            matches = [_LINE.fullmatch(line) for line in lines]
            files = {match[2]: match[1] for match in matches if match}
            found = cls(dataset_id=named.removeprefix("# dataset_id "), files=files)
            if (head, last) == (_HEAD, "") and found.encode() == data:
                return found
        raise SignatureError("a signed list must be one that shardflow sign writes, got other bytes.")


def signature_numbers(store: ByteStore, version: int) -> list[int]:
    """Return the numbers of the signatures of a version, ascending; a store that cannot list is asked."""
    try:
        matches = map(_NAME.fullmatch, store.list(f"{FOLDER}/{version:06d}-"))
        return sorted(int(match[1]) for match in matches if match)
    except NoListingError:
        return list(_probed(store, version))


def _probed(store: ByteStore, version: int) -> Iterator[int]:
    last = 0
    for number in itertools.count(1):
        if number > last + _MAX_MISSING:
            return
        with suppress(NotFoundError):
            store.size(list_path(version, number))
            last = number
            yield number


def list_path(version: int, number: int) -> str:
    """Name a signed list; its signature has ``.sig`` behind that."""
    return f"{FOLDER}/{version:06d}-{number:03d}.sha256"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A signature that was checked."""

    path: str
    """Of the signed list."""
    signer: str
    """Name of the signer in the file of trusted keys; the fingerprint where that has none."""
    files: Mapping[str, str]


class Trust:
    """Keys that must have signed what a store holds. Crosses process boundaries as its keys.

    Each dataset and sidecar that is opened from a store of `trust_only` asks it.

    Args:
        keys: Names of the signers by public key, see `read_keys`.
    """

    def __init__(self, keys: Mapping[bytes, str]) -> None:
        self._keys = dict(keys)
        self._files: dict[str, str] = {}
        self.signatures: dict[str, Signature] = {}
        """By ``dataset_id`` of the versions that were admitted."""

    def __reduce__(self) -> tuple[type[Trust], tuple[dict[bytes, str]]]:
        """Leave out what was found: another process checks for itself."""
        return type(self), (self._keys,)

    @property
    def keys(self) -> frozenset[bytes]:
        """The public keys."""
        return frozenset(self._keys)

    def admit(self, store: ByteStore, manifest: Manifest) -> Signature:
        """Check that a trusted key signed a version, and note what it signed.

        Raises:
            SignatureError: It is not signed, by another key only, or something signed is gone; the message
                says which, and what to do.
        """
        found = self.signatures.get(manifest.dataset_id)
        if found is None:
            found = self.signatures[manifest.dataset_id] = self._newest(store, manifest)
            self._files |= found.files
        return found

    def check(self, path: str, data: bytes) -> None:
        """Check the manifest of a sidecar.

        Raises:
            SignatureError: It is not on a signed list, or is another one.
        """
        self.check_digest(path, hashlib.sha256(data).hexdigest())

    def check_digest(self, path: str, sha256: str) -> None:
        """Check the manifest of a sidecar by its SHA-256; raises what `check` raises."""
        expected = self._files.get(path)
        if expected == sha256:
            return
        problem = "was added after the dataset was signed" if expected is None else "is not the signed one"
        raise SignatureError(
            f"{path} {problem}; check where it comes from, then sign the dataset again: shardflow sign "
            "DATASET --key FILE"
        )

    def _newest(self, store: ByteStore, manifest: Manifest) -> Signature:
        version = manifest.manifest_version
        numbers = signature_numbers(store, version)[-_MAX_TRIED:]
        if not numbers:
            _check_can_list(store, version)
            raise SignatureError(
                f"version {version} of the dataset is not signed, and only signed ones are trusted here; "
                "sign it (shardflow sign DATASET --key FILE), open a signed version, or remove signed_by or "
                "data.trusted_keys."
            )
        problems = []
        for number in reversed(numbers):
            path = list_path(version, number)
            try:
                found = self._checked(store, path, manifest)
            except SignatureError as error:
                problems.append(f"{path}: {error.message}")
                continue
            _check_exist(store, path, found.files)
            return found
        raise SignatureError(
            f"version {version} of the dataset has no signature of a trusted key ({problems[0]}) If "
            "you trust who signed it, add that public key to the trusted ones; else have the dataset signed "
            "again."
        )

    def _checked(self, store: ByteStore, path: str, manifest: Manifest) -> Signature:
        """Return a signature of a version; raises SignatureError if it is none of a trusted key."""
        message = _read(store, path, _MAX_LIST_BYTES)
        key = signer_of(_read(store, f"{path}.sig", _MAX_SIGNATURE_BYTES), message)
        if key not in self._keys:
            raise SignatureError(f"it is signed by {fingerprint(key)}, which is no trusted key.")
        listed = SignedList.decode(message)
        name = manifest_path(manifest.manifest_version)
        if listed.dataset_id != manifest.dataset_id or name not in listed.files:
            raise SignatureError("it is the signature of another version or dataset.")
        return Signature(path=path, signer=self._keys[key], files=listed.files)


def _check_can_list(store: ByteStore, version: int) -> None:
    """Refuse to call a version unsigned that may have a signature where nobody looked."""
    try:
        store.list(f"{FOLDER}/{version:06d}-")
    except NoListingError:
        raise SignatureError(
            f"version {version} of the dataset has no signature from {list_path(version, 1)} to "
            f"{list_path(version, _MAX_MISSING)}, and its store cannot list others; sign it, or if it is "
            "signed, open it where files can be listed, or copy it again (shardflow copy)."
        ) from None


def _read(store: ByteStore, path: str, max_bytes: int) -> bytes:
    try:
        if store.size(path) <= max_bytes:
            return store.read(path)
    except NotFoundError:
        raise SignatureError("it is incomplete, because signing was interrupted.") from None
    raise SignatureError("it is too large for a list of manifests or a signature.")


def _check_exist(store: ByteStore, path: str, files: Iterable[str]) -> None:
    """Refuse a version that lacks something signed: without its removal an old table would be back."""
    for name in files:
        try:
            store.size(name)
        except NotFoundError:
            raise SignatureError(
                f"{name} is missing, and {path} lists it; fetch it again, or if it was deleted on purpose, "
                "sign the dataset again: shardflow sign DATASET --key FILE"
            ) from None


def stored_signature(store: ByteStore, version: int, number: int) -> tuple[bytes, bytes] | None:
    """Return a signed list and its signature; None where one of them is missing."""
    path = list_path(version, number)
    try:
        return store.read(path), store.read(f"{path}.sig")
    except NotFoundError:
        return None


def trust_of(store: ByteStore) -> Trust | None:
    """Return the keys that must have signed what is opened from a store; None where nobody asked."""
    found: Trust | None = getattr(origin_of(store), "trust", None)
    return found


def trust_only(store: ByteStore, signed_by: str | os.PathLike[str]) -> tuple[ByteStore, Trust]:
    """Return a store of the same objects from which signed versions alone are opened, and its keys.

    Args:
        store: The store, which stays as it is: others read from it too.
        signed_by: File of public keys, see `read_keys`.

    Raises:
        ConfigError: The keys cannot be read.
    """
    trust = Trust(read_keys(signed_by))
    return _trusting(store, trust), trust


def _trusting(store: Any, trust: Trust) -> Any:
    """Return a copy as another process would get it, whose innermost store has the keys."""
    found = copy.copy(store)
    if getattr(store, "origin", None) is None:
        found.trust = trust
    else:
        found.origin = _trusting(store.origin, trust)
    return found
