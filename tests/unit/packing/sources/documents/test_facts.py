"""People named by a document: none is forgotten."""

from __future__ import annotations

import pytest

from shardflow.packing.sources.documents.facts import People

pytestmark = pytest.mark.fast


def test_every_name_of_a_document_is_known_however_many_there_are() -> None:
    people = People()
    for number in range(3000):
        people.name(f"Adeyemi {number}")
    people.merge({"PersonName": [f"Novak {number}" for number in range(1000)]})
    assert len(people.values()["PersonName"]) == 4000
