"""Names by which packing loads what it does not import: each of them exists."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pkgutil import resolve_name

import pytest

from shardflow.errors import ConfigError
from shardflow.packing import registry
from shardflow.packing.registry import ATTACHMENT_KINDS, TASK_HANDLERS, load_attachment_kinds


def test_every_name_resolves() -> None:
    assert all(callable(resolve_name(target)) for target in TASK_HANDLERS.values())
    for target in ATTACHMENT_KINDS.values():
        assert all(kind.name and callable(kind.convert) for kind in resolve_name(target))


def test_installed_packages_offer_further_kinds_behind_the_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_attachment_kinds()

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == registry.ATTACHMENT_KINDS_GROUP
        return [EntryPoint("toys", "tests.attachment_kinds:KINDS", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    assert [kind.name for kind in load_attachment_kinds()] == [*(kind.name for kind in own), "toy"]


def test_kinds_that_cannot_be_imported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "tests.no_such_module:KINDS", registry.ATTACHMENT_KINDS_GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [broken])
    with pytest.raises(
        ConfigError, match=r"attachment kinds 'broken'.*ModuleNotFoundError; repair or remove"
    ):
        load_attachment_kinds()
