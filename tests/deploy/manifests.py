"""The Kubernetes manifests of docs/deploy, read as Kubernetes reads them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import yaml

from tests.conftest import REPOSITORY

__all__ = ["DEPLOY", "MANIFESTS", "jobs", "memory_bytes", "pod", "resources"]

DEPLOY = REPOSITORY / "docs" / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))

Resource = dict[str, Any]
_MEMORY = {"Mi": 2**20, "Gi": 2**30}


@cache
def resources() -> tuple[Resource, ...]:
    """Every document of every file."""
    return tuple(
        document
        for path in MANIFESTS
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
        if document
    )


def jobs() -> dict[str, Resource]:
    """The Jobs, and the Deployment of data servers, by name."""
    kinds = {"Job", "Deployment"}
    return {found["metadata"]["name"]: found for found in resources() if found["kind"] in kinds}


def pod(job: str) -> Resource:
    """The pod specification of one of them."""
    spec: Resource = jobs()[job]["spec"]["template"]["spec"]
    return spec


def memory_bytes(quantity: str) -> int:
    """Bytes of a quantity such as ``36Gi``."""
    match = re.fullmatch(r"(\d+)(Mi|Gi)", quantity)
    assert match is not None, quantity
    return int(match[1]) * _MEMORY[match[2]]
