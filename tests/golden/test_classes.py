"""The change classes of CONTRIBUTING.md: a recorded value cannot change unannounced.

``make golden`` rewrites golden files, so they alone do not stop a change that nobody wanted. ``classes.json``
keeps a digest of every value beside the version of its class, and ``make golden`` does not write it. A value
that is added is no change. One that changes or goes away needs another version (of the code, where a resume
or a reader then refuses what is older) and the class's name under "Unreleased" in CHANGELOG.md; then
``python -m tests.golden.test_classes`` records it, and refuses otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from shardflow.format.manifest import FORMAT_VERSION
from shardflow.sampling.plan import PLAN_VERSION
from shardflow.sampling.state import STATE_VERSION

pytestmark = pytest.mark.fast

GOLDEN = Path(__file__).parent
RECORD = GOLDEN / "classes.json"
CHANGELOG = GOLDEN.parent.parent / "CHANGELOG.md"
BYTES_VERSION = 2
"""Counted here alone: encoded bytes that every reader of the format reads the same."""
CLASSES = {
    "SHARD FORMAT": (FORMAT_VERSION, ("format",)),
    "SHARD BYTES": (BYTES_VERSION, ("codecs",)),
    "ITERATION ORDER": (
        PLAN_VERSION,
        ("order", "order-lanes", "order-blends", "order-weights", "slice-choice"),
    ),
    "CHECKPOINT STATE": (STATE_VERSION, ("loader-state", "loader-state-1", "batch-specs")),
}


def values_of(name: str) -> dict[str, str]:
    """Return the digests of a golden file's values, two levels deep, by their path."""
    content = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    found: dict[str, str] = {}

    def add(path: str, value: object, depth: int) -> None:
        if depth and isinstance(value, dict):
            for key, inner in value.items():
                add(f"{path}/{key}", inner, depth - 1)
        else:
            text = json.dumps(value, sort_keys=True)
            found[path] = hashlib.sha256(text.encode()).hexdigest()[:12]

    add(name, content, 2)
    return found


def current(change_class: str) -> dict[str, Any]:
    version, names = CLASSES[change_class]
    values = {path: value for name in names for path, value in values_of(name).items()}
    return {"version": version, "values": values}


def changed(recorded: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return what was recorded and is not there any more, or is something else."""
    return sorted(path for path, value in recorded.items() if found.get(path) != value)


def is_announced(change_class: str, changelog: str) -> bool:
    unreleased = changelog.partition("## Unreleased")[2].partition("\n## ")[0]
    return f"{change_class}:" in unreleased or f"{change_class}," in unreleased


def record(old: dict[str, Any], new: dict[str, dict[str, Any]], changelog: str) -> dict[str, Any]:
    """Return the record with the present values, or refuse."""
    for change_class, found in new.items():
        known = old.get(change_class, {"version": found["version"], "values": {}})
        gone = changed(known["values"], found["values"])
        if gone and (known["version"] >= found["version"] or not is_announced(change_class, changelog)):
            raise SystemExit(
                f"{change_class}: {len(gone)} recorded values changed ({gone[0]}); raise its version in the "
                f"code and name it in CHANGELOG.md."
            )
    return new


@pytest.mark.parametrize("change_class", CLASSES)
def test_no_recorded_value_changed_unannounced(change_class: str) -> None:
    known, found = json.loads(RECORD.read_text(encoding="utf-8"))[change_class], current(change_class)
    assert known["version"] == found["version"], f"{change_class}: see the head of {Path(__file__).name}"
    assert changed(known["values"], found["values"]) == [], (
        f"{change_class}: a value that users depend on changed; see the head of {Path(__file__).name}"
    )


def test_the_record_is_renewed_with_version_and_changelog_only() -> None:
    old = {"ITERATION ORDER": {"version": 1, "values": {"a": "1", "b": "2"}}}
    added = {"ITERATION ORDER": {"version": 1, "values": {"a": "1", "b": "2", "c": "3"}}}
    assert record(old, added, "") == added
    quiet, silent = "## Unreleased\n- x\n## 1\n- ITERATION ORDER: old", "## Unreleased\n- ITERATION ORDER: y"
    for values, version, said in (
        ({"a": "1"}, 1, silent),
        ({"a": "1", "b": "3"}, 1, silent),
        ({"a": "1", "b": "3"}, 2, quiet),
        ({"a": "1", "b": "3"}, 2, ""),
    ):
        with pytest.raises(SystemExit, match="recorded values changed"):
            record(old, {"ITERATION ORDER": {"version": version, "values": values}}, said)
    raised = {"ITERATION ORDER": {"version": 2, "values": {"a": "1", "b": "3"}}}
    assert record(old, raised, silent) == raised


def settings_of(kind: type[Any], path: str) -> dict[str, str]:
    """Return every setting of a configuration with its default, and every word that it may be."""
    found: dict[str, str] = {}
    hints = get_type_hints(kind)
    for entry in fields(kind):
        inner = hints[entry.name]
        if is_dataclass(inner) and isinstance(inner, type):
            found |= settings_of(inner, f"{path}.{entry.name}")
            continue
        default = entry.default if entry.default is not MISSING else "required or made"
        found[f"{path}.{entry.name}"] = str(default)
        found |= {f"{path}.{entry.name} = {word}": "allowed" for word in words_of(inner)}
    return found


def words_of(hint: Any) -> list[str]:
    """Return the words of a Literal, wherever it stands in a type."""
    if get_origin(hint) is Literal:
        return [str(word) for word in get_args(hint)]
    return [word for inner in get_args(hint) for word in words_of(inner)]


def test_no_setting_changed_or_went_away() -> None:
    """Class CONFIG: a recipe that was valid stays valid; a new setting is no change."""
    known = json.loads((GOLDEN / "settings.json").read_text(encoding="utf-8"))
    assert changed(known, all_settings()) == [], (
        "CONFIG: name it in CHANGELOG.md, then: python -m tests.golden.test_classes"
    )


def all_settings() -> dict[str, str]:
    from shardflow.packing.config import PackConfig
    from shardflow.training.config import TrainConfig

    return settings_of(PackConfig, "pack") | settings_of(TrainConfig, "train")


def main() -> None:
    """Record the present values."""
    old = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    changelog = CHANGELOG.read_text(encoding="utf-8")
    new = record(old, {change_class: current(change_class) for change_class in CLASSES}, changelog)
    RECORD.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    settings_path = GOLDEN / "settings.json"
    known = json.loads(settings_path.read_text(encoding="utf-8")) if settings_path.is_file() else {}
    if changed(known, all_settings()) and not is_announced("CONFIG", changelog):
        raise SystemExit("CONFIG: a setting changed or went away; name it in CHANGELOG.md.")
    text = json.dumps(all_settings(), indent=1, sort_keys=True) + "\n"
    settings_path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
