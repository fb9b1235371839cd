"""All fuzz targets by name, and mutations of their seeds for the tests, which do without libFuzzer."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fuzz.target import MAX_BYTES, Target

TARGETS: Final = {
    "dicom": "fuzz.images:Dicom",
    "pixels": "fuzz.images:Pixels",
    "slices": "fuzz.images:Slices",
    "nifti": "fuzz.images:Nifti",
    "pictures": "fuzz.images:Pictures",
    "tables": "fuzz.datasets:Tables",
    "manifests": "fuzz.datasets:Manifests",
    "tar": "fuzz.datasets:Tar",
    "fhir": "fuzz.documents:Fhir",
    "cda": "fuzz.documents:Cda",
    "hl7": "fuzz.documents:Hl7",
    "rtf": "fuzz.documents:Rtf",
    "edf": "fuzz.documents:Edf",
    "wfdb": "fuzz.documents:Wfdb",
    "expressions": "fuzz.datasets:Expressions",
    "conversations": "fuzz.documents:Conversations",
    "corpus-tar": "fuzz.documents:CorpusTar",
    "run-files": "fuzz.datasets:RunFiles",
    "viewer": "fuzz.datasets:Viewer",
}
ROOMS: Final = {
    "fuzz.images": ["shardflow.packing.sources", "shardflow.format.slice_codecs"],
    "fuzz.documents": [
        "shardflow.packing.sources.documents",
        "shardflow.packing.attachments",
        "shardflow.packing.corpora",
    ],
    "fuzz.datasets": [
        "shardflow.format",
        "shardflow.sampling",
        "shardflow.viewing",
        "shardflow.training.checkpoint",
    ],
}
"""What libFuzzer sees the branches of."""
FOUND: Final = Path(__file__).with_name("found")
"""Inputs that broke something once, ``TARGET-NUMBER.bin``; seeds, and tests."""

_TOKENS: Final = (
    *(
        b"",
        b"\0",
        b"\xff" * 4,
        b"\x7f\xff\xff\xff",
        b"\0\0\0\x80",
        b"-1",
        b"0",
        b"1e400",
        b"Infinity",
        b"null",
    ),
    *(b"99999999999999999999", b"[" * 300, b'{"a":' * 300, b"\xed\xa0\x80", b"\\ud800", b"%", b'"', b"\n"),
    *(b"true", b"[]", b"{}", b"<a>", b"&lt;", b"^~\\&", b"\r\n\r\n", b"1.5", b"2014-02-30", b"\\x00"),
)


def make_target(name: str, folder: Path) -> Target:
    """Import and make a target.

    Args:
        name: A key of `TARGETS`.
        folder: For its temporary files.
    """
    module, _, found = TARGETS[name].partition(":")
    target: Target = getattr(importlib.import_module(module), found)(folder)
    return target


def found_inputs(name: str) -> list[bytes]:
    """Return the inputs that broke a target once."""
    return [path.read_bytes() for path in sorted(FOUND.glob(f"{name}-[0-9]*"))]


def mutations(seeds: Sequence[bytes], number: int, seed: str) -> Iterator[bytes]:
    """Make inputs of seeds, the same for the same arguments: bits, bytes, spans and tokens are changed."""
    draws = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(number):
        data = bytearray(draws.choice(seeds))
        for _ in range(draws.choice((1, 1, 2, 4, 8))):
            at = draws.randrange(len(data) + 1)
            length = draws.choice((1, 2, 4, 8, 64))
            match draws.randrange(6):
                case 0 if data:
                    data[at % len(data)] ^= 1 << draws.randrange(8)
                case 1:
                    data[at : at + length] = draws.randbytes(length)
                case 2:
                    del data[at : at + length]
                case 3:
                    data[at:at] = data[at : at + length] * draws.choice((1, 16))
                case 4:
                    data[at : at + draws.choice((0, length))] = draws.choice(_TOKENS)
                case _:
                    other = draws.choice(seeds)
                    start = draws.randrange(len(other) + 1)
                    data[at:at] = other[start : start + length * 8]
        yield bytes(data[:MAX_BYTES])
