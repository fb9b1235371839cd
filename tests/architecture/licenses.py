"""License table of what an installation brings: ``python -m tests.architecture.licenses [EXTRA ...]``.

Packages are found from the metadata of this environment, from the base dependencies and the named extras on;
native libraries are those that wheels bundle in a folder of their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

IMAGES = {"pack": ("pack", "wfdb", "remote"), "train": ("train", "prometheus", "remote", "service")}
"""Extras of each container image."""

STATED = {
    # Their metadata names no license; their license files do.
    "google-crc32c": "Apache-2.0",
}
COPYLEFT = re.compile(r"(?<![A-Za-z])A?GPL|GNU (Affero )?General Public", re.ASCII)
COPYLEFT_LIBRARIES = re.compile(r"lib(x264|x265|readline|gsl|fftw3|postproc|cdio|samplerate)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """What one installed package says of itself."""

    name: str
    version: str
    license: str
    libraries: tuple[str, ...]

    @property
    def is_copyleft(self) -> bool:
        """Whether no license is offered but the GPL's, or a library is known to be under it."""
        offered = re.split(r"\s+OR\s+|;", self.license)
        return all(map(COPYLEFT.search, offered)) or any(map(COPYLEFT_LIBRARIES.match, self.libraries))


def packages(extras: Iterable[str]) -> list[Package]:
    """Return the packages that ``shardflow[extras]`` needs here, by name."""
    found: dict[str, set[str]] = {}
    todo = [Requirement(f"shardflow[{','.join(extras)}]")]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        known = found.setdefault(name, set())
        new = {"", *wanted.extras} - known
        known |= new
        for text in metadata.requires(name) or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in new):
                todo.append(needed)
    return [_package(name) for name in sorted(found.keys() - {"shardflow"})]


def _package(name: str) -> Package:
    distribution = metadata.distribution(name)
    return Package(
        name=name,
        version=distribution.version,
        license=STATED.get(name) or _license(distribution.metadata),
        libraries=tuple(sorted(_libraries(distribution))),
    )


def _license(facts: metadata.PackageMetadata) -> str:
    if "License-Expression" in facts:
        return str(facts["License-Expression"])
    classifiers = [one for one in facts.get_all("Classifier") or [] if one.startswith("License :: ")]
    names = [one.rpartition(" :: ")[2] for one in classifiers if one != "License :: OSI Approved"]
    stated = [str(one).strip() for one in facts.get_all("License") or []]
    return "; ".join(names) or "".join(stated[:1]).partition("\n")[0]


def _libraries(distribution: metadata.Distribution) -> Iterator[str]:
    for path in map(PurePosixPath, distribution.files or []):
        if any(part.endswith(".libs") for part in path.parts):
            # libjpeg-f0b8d3c1.so.62.4.0: the hash is the wheel's own.
            yield re.sub(r"(-[0-9a-f]{8})?(\.so.*)?$", "", path.name)


def main(extras: list[str]) -> None:
    """Print the table as Markdown; by default of both images."""
    rows = packages(extras or {extra for one in IMAGES.values() for extra in one})
    lines = [f"| {one.name} | {one.version} | {one.license} | {', '.join(one.libraries)} |" for one in rows]
    head = ["| package | version | license | bundled native libraries |", "|---|---|---|---|"]
    sys.stdout.write("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
