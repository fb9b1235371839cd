"""One rare word that stands in every input, and a search for it in whatever form a byte may carry it."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from shardflow.format.codecs import decode_array

__all__ = ["DATE", "KIN", "NUMBER", "STEM", "find_canaries", "output_bytes", "variants"]

STEM = "QZJXKV"
"""In every text, name, path and code."""
KIN = "WVXQKJ"
"""In reports, and in headers only inside a sequence of another study of the same patient."""
DATE = "19171113"
"""In every date."""
NUMBER = "98765.4321"
"""In every number that is not on the allowlist, and in every UID."""


def variants(text: str) -> Iterator[bytes]:
    """Make a text as it is, in other cases and encodings, backwards, and inside base64 at any offset."""
    for form in {text, text.lower(), text.upper(), text.capitalize(), text[::-1], text[::-1].lower()}:
        plain = form.encode()
        yield plain
        yield form.encode("utf-16-le")
        yield form.encode("utf-16-be")
        yield plain.hex().encode()
        yield json.dumps(form)[1:-1].encode()
        for offset in range(3):
            encoded = base64.b64encode(bytes(offset) + plain + bytes(3))
            inner = encoded[4 : -4 - (len(plain) + offset) % 3 - 1]
            if len(inner) > 5:
                yield inner


_FORMS = sorted({form for text in (STEM, KIN, DATE, NUMBER) for form in variants(text)})


def find_canaries(data: bytes) -> list[bytes]:
    """Return the forms that are in the data; also in what inflates from it."""
    found = [form for form in _FORMS if form in data]
    if data[:2] == b"\x1f\x8b":
        found += find_canaries(gzip.decompress(data))
    elif data[:1] == b"\x78":
        with contextlib.suppress(zlib.error):
            found += find_canaries(zlib.decompress(data))
    return found


def output_bytes(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield every name and every byte below a folder: files, members of tars, decoded slices."""
    for path in sorted(folder.rglob("*")):
        yield "name", str(path.relative_to(folder)).encode()
        if not path.is_file():
            continue
        yield path.name, path.read_bytes()
        if path.suffix != ".tar":
            continue
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                assert (member.uname, member.gname, member.mtime, member.uid) == ("", "", 0, 0)
                stream = tar.extractfile(member)
                assert stream is not None
                payload = stream.read()
                yield member.name, payload
                if member.name.endswith(".b2nd"):
                    yield member.name, decode_array("b2nd", payload).tobytes()
