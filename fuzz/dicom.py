"""Fuzz target: whatever the bytes of a file are, the DICOM source ends with a header, an image or a reason.

``make fuzz`` runs it in an environment of its own. libFuzzer's options may follow, such as
``-max_total_time=60``; a file that was found to break something is written to the working directory as
``crash-...``, and given as the only argument it is run again.

The process grows by some 0.7 KB an input, 300 MB in five minutes. That is libFuzzer's own bookkeeping:
100,000 mutated files read without it leave 70 MB resident (63 MB after the first thousand), and the number of
Python objects stays the same with it and without it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

import atheris

with atheris.instrument_imports(include=["shardflow.packing.sources"]):
    from shardflow.errors import SourceError
    from shardflow.packing.sources.dicom.attributes import read_attributes
    from shardflow.packing.sources.dicom.elements import HeaderLimits
    from shardflow.packing.sources.dicom.headers import BrokenInstance, read_header
    from shardflow.packing.sources.dicom.pixels import iter_slices
    from shardflow.packing.sources.dicom.stacks import build_studies

_LIMITS: Final = HeaderLimits(
    max_frames=64, max_frame_pixels=1 << 20, max_pixel_bytes=1 << 24, max_inflated_bytes=1 << 22
)
_MAX_SEED_BYTES: Final = 1 << 16
_OPTIONS: Final = ("-timeout=25", "-rss_limit_mb=3072", f"-max_len={_MAX_SEED_BYTES}", "-print_final_stats=1")
_CORPUS: Final = Path(".fuzz-corpus")


def read_one(data: bytes) -> None:
    """Read one file as the header pass and the packing of its study do.

    Only the source's own errors may leave it: libFuzzer reports any other.
    """
    descriptor = os.memfd_create("fuzzed")
    try:
        os.write(descriptor, data)
        path = Path(f"/proc/self/fd/{descriptor}")
        try:
            header = read_header(path, limits=_LIMITS)
            if isinstance(header, BrokenInstance):
                return
            build_studies([header])
            read_attributes(path, ("Modality", "PatientSex", "PixelSpacing"), limits=_LIMITS)
            for decoded in iter_slices(path, header, limits=_LIMITS):
                if decoded.pixels.shape[:2] != (header.image.rows, header.image.columns):
                    raise RuntimeError("a slice must have the shape of its header")
        except SourceError:
            return
    finally:
        os.close(descriptor)


def _write_seeds(folder: Path) -> None:
    """Begin with the small files that come with pydicom: all transfer syntaxes, and known oddities."""
    import pydicom.data

    for path in sorted((Path(pydicom.data.__file__).parent / "test_files").rglob("*")):
        if path.is_file() and path.stat().st_size <= _MAX_SEED_BYTES:
            (folder / path.name).write_bytes(path.read_bytes())


def main() -> None:
    """Run libFuzzer with the arguments of the process."""
    given = sys.argv[1:]
    if given and Path(given[0]).is_file():
        read_one(Path(given[0]).read_bytes())
        return
    _CORPUS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as seeds:
        _write_seeds(Path(seeds))
        atheris.Setup([sys.argv[0], *_OPTIONS, *given, str(_CORPUS), seeds], read_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
