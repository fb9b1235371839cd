"""What packing processes can do: the kinds of tasks and who answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import SourceError
from shardflow.packing.assembly import Assembler
from shardflow.packing.scan import Scanner
from shardflow.packing.study import StudyPacker
from shardflow.packing.study_members import StudyRules
from shardflow.sources.dicom import HeaderLimits, read_header

if TYPE_CHECKING:
    from shardflow.packing.child import Handler
    from shardflow.packing.config import PackConfig
    from shardflow.packing.workplace import Workplace

__all__ = ["HANDLERS", "make_handler", "make_setup"]

HANDLERS: Final = "shardflow.packing.handlers:make_handler"
"""Name by which a packing process finds `make_handler`."""


def make_setup(config: PackConfig, place: Workplace) -> dict[str, Any]:
    """Gather what every task needs, as JSON; the key goes as the path of its file."""
    return {
        "codec": config.shards.codec,
        "fragments": str(place.fragments),
        "headers": str(place.headers),
        "key_file": str(config.key_file),
        "limits": {field.name: getattr(config.limits, field.name) for field in fields(HeaderLimits)},
        "on_bad_instance": config.policy.on_bad_instance,
        "output": str(place.output),
        "records": str(place.records),
        "reports": str(place.reports),
        "roots": [str(root) for root in config.inputs.dicom],
    }


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the function that answers tasks inside a packing process.

    Raises:
        ConfigError: The key file cannot be used.
    """
    key = SecretKey.load(Path(setup["key_file"]))
    roots = tuple(map(Path, setup["roots"]))
    headers, fragments = Path(setup["headers"]), Path(setup["fragments"])
    limits = HeaderLimits(**setup["limits"])
    scanner = Scanner(roots=roots, folder=headers, key=key, limits=limits)
    packer = StudyPacker(
        roots=roots,
        headers=headers,
        reports=Path(setup["reports"]),
        fragments=fragments,
        rules=StudyRules(
            key=key, limits=limits, codec=setup["codec"], on_bad_instance=setup["on_bad_instance"]
        ),
    )
    assembler = Assembler(output=Path(setup["output"]), fragments=fragments, records=Path(setup["records"]))

    def probe(payload: Mapping[str, Any]) -> dict[str, Any]:
        """Read one header for nothing: whoever asks wants to know whether it can be survived."""
        with suppress(SourceError):
            read_header(roots[payload["root"]] / payload["path"], limits=limits)
        return {}

    kinds: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "check": assembler.check,
        "probe": probe,
        "scan": scanner.scan,
        "shard": assembler.assemble,
        "study": packer.pack,
    }
    return lambda kind, payload: kinds[kind](payload)
