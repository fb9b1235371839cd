"""What packing processes can do: the kinds of tasks and who answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.deid.pixel_rules import load_rules
from shardflow.deid.pseudonyms import SecretKey
from shardflow.errors import ConfigError
from shardflow.packing.assembly import Assembler
from shardflow.packing.content_config import AttachmentsConfig
from shardflow.packing.deid_config import DeidConfig
from shardflow.packing.finding import AttachmentFinder
from shardflow.packing.kinds import attachment_kinds
from shardflow.packing.privacy import PrivacyRules
from shardflow.packing.report_content import ReportParser, parser_setup
from shardflow.packing.scan import Scanner
from shardflow.packing.study import StudyPacker
from shardflow.packing.study_members import StudyRules
from shardflow.packing.variants_config import VariantsConfig
from shardflow.sources.dicom import HeaderLimits

if TYPE_CHECKING:
    from shardflow.packing.child import Handler
    from shardflow.packing.config import PackConfig
    from shardflow.packing.workplace import Workplace

__all__ = ["HANDLERS", "make_handler", "make_setup"]

HANDLERS: Final = "shardflow.packing.handlers:make_handler"
"""Name by which a packing process finds `make_handler`."""


def make_setup(config: PackConfig, place: Workplace) -> dict[str, Any]:
    """Gather what every task needs, as JSON; the key goes as the path of its file.

    Raises:
        ConfigError: A table, an extractor or a kind of attachments that the settings name cannot be used.
    """
    reading, clinical = parser_setup(config.reports, config.alignment), config.records.to_text()
    # Said here once: in a packing process it would be the failure of every input.
    if reading is not None and (reading["findings"] or reading["anatomy"] or reading["extractors"]):
        ReportParser(reading).check()
    if config.attachments.leave_out:
        known = {kind.name for kind in attachment_kinds(clinical)}
        unknown = sorted(set(config.attachments.leave_out) - known)
        if unknown:
            raise ConfigError(
                f"attachments.leave_out must hold kinds of attachments ({', '.join(sorted(known))}), "
                f"got {unknown[0]!r}; correct it."
            )
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
        "variants": asdict(config.variants),
        "deid": {**asdict(config.deid), "accept": list(config.deid.accept), "rules_file": None},
        "pixel_rules": list(config.deid.rules_text()),
        "roots": [str(root) for root in config.inputs.roots],
        "num_image_roots": len(config.inputs.dicom),
        "attachments": asdict(config.attachments),
        "reading": reading,
        "clinical": clinical,
        "splits": list(config.splits),
    }


def _privacy(setup: Mapping[str, Any], key: SecretKey) -> PrivacyRules:
    """Take the rules as text: their file may have changed since the job began."""
    pixels = load_rules(*setup["pixel_rules"])
    settings = DeidConfig(**{**setup["deid"], "accept": tuple(setup["deid"]["accept"])})
    return PrivacyRules(key=key, settings=settings, pixels=pixels)


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the function that answers tasks inside a packing process.

    Raises:
        ConfigError: The key file cannot be used.
    """
    key = SecretKey.load(Path(setup["key_file"]))
    roots = tuple(map(Path, setup["roots"]))
    headers, fragments = Path(setup["headers"]), Path(setup["fragments"])
    limits = HeaderLimits(**setup["limits"])
    attachments = AttachmentsConfig(
        **{**setup["attachments"], "leave_out": tuple(setup["attachments"]["leave_out"])}
    )
    finder = AttachmentFinder(
        limits=limits,
        max_bytes=attachments.max_bytes,
        leave_out=attachments.leave_out,
        records=setup["clinical"],
    )
    scanner = Scanner(
        roots=roots,
        folder=headers,
        key=key,
        limits=limits,
        splits=tuple(setup["splits"]),
        finder=finder if attachments.enabled else None,
        num_image_roots=setup["num_image_roots"],
    )
    packer = StudyPacker(
        roots=roots,
        headers=headers,
        reports=Path(setup["reports"]),
        fragments=fragments,
        rules=StudyRules(
            key=key,
            limits=limits,
            codec=setup["codec"],
            variants=VariantsConfig.from_setup(setup["variants"]),
            on_bad_instance=setup["on_bad_instance"],
            privacy=_privacy(setup, key),
            records=setup["clinical"],
            reading=None if setup["reading"] is None else ReportParser(setup["reading"]),
        ),
    )
    assembler = Assembler(output=Path(setup["output"]), fragments=fragments, records=Path(setup["records"]))

    kinds: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "check": assembler.check,
        "probe": scanner.probe,
        "scan": scanner.scan,
        "shard": assembler.assemble,
        "study": packer.pack,
    }
    return lambda kind, payload: kinds[kind](payload)
