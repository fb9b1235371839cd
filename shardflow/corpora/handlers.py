"""What a packing process can do for a corpus: the kinds of tasks and who answers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.corpora.config import (
    CorpusConfig,
    CorpusDeidConfig,
    CorpusInputsConfig,
    CorpusLimitsConfig,
    CorpusPolicyConfig,
    CorpusShardsConfig,
    CorpusSplitsConfig,
    FieldsConfig,
)
from shardflow.corpora.duplicates import DigestScanner, dropped_lines, resolve_bucket
from shardflow.corpora.inputs import inspect_file
from shardflow.corpora.numbering import number_shard
from shardflow.corpora.parts import PartPacker, part_folder
from shardflow.deid.pseudonyms import SecretKey

if TYPE_CHECKING:
    from shardflow.packing.child import Handler

__all__ = ["HANDLERS", "make_handler", "make_setup"]

HANDLERS: Final = "corpus"
"""Name of `make_handler` in the registry of packing."""


def make_setup(config: CorpusConfig, output: Path, work: Path) -> dict[str, Any]:
    """Gather what every task needs, as JSON; the key goes as the path of its file."""
    return {
        "key_file": str(config.key_file),
        "output": str(output),
        "work": str(work),
        "fields": asdict(config.fields),
        "splits": asdict(config.splits),
        "shards": asdict(config.shards),
        "policy": asdict(config.policy),
        "limits": asdict(config.limits),
        "deid": asdict(config.deid),
    }


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Make the function that answers tasks inside a packing process.

    Raises:
        ConfigError: The key file cannot be used.
    """
    output, work = Path(setup["output"]), Path(setup["work"])
    key = SecretKey.load(Path(setup["key_file"]))
    deid = setup["deid"]
    config = CorpusConfig(
        output=output,
        private_dir=Path(setup["key_file"]).parent,
        inputs=CorpusInputsConfig(files=(output,)),
        fields=FieldsConfig(**{**setup["fields"], "keep": tuple(setup["fields"]["keep"])}),
        splits=CorpusSplitsConfig(**setup["splits"]),
        shards=CorpusShardsConfig(**setup["shards"]),
        policy=CorpusPolicyConfig(**setup["policy"]),
        limits=CorpusLimitsConfig(**setup["limits"]),
        deid=CorpusDeidConfig(
            **{**deid, "names": tuple(deid["names"]), "identifiers": tuple(deid["identifiers"])}
        ),
    )
    parts, scans, resolved = work / "parts", work / "scans", work / "resolved"
    packer = PartPacker(config=config, key=key, parts=parts)
    scanner = DigestScanner(config=config, key=key, folder=scans)

    def inspect(payload: Mapping[str, Any]) -> dict[str, Any]:
        return {"files": [inspect_file(Path(path), kind) for path, kind in payload["files"]]}

    def pack(payload: Mapping[str, Any]) -> dict[str, Any]:
        return packer.pack(payload, dropped_lines(scans, resolved, payload["number"]))

    def resolve(payload: Mapping[str, Any]) -> dict[str, Any]:
        return resolve_bucket(scans, payload["parts"], payload["bucket"], payload["count"], resolved)

    def number(payload: Mapping[str, Any]) -> dict[str, Any]:
        return number_shard(output, part_folder(parts, payload["part"]), payload)

    kinds: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
        "inspect": inspect,
        "number": number,
        "pack": pack,
        "resolve": resolve,
        "scan": scanner.scan,
    }
    return lambda kind, payload: kinds[kind](payload)
