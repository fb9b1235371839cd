"""What a loader state says of a blend: enough to open its components again, and to name a changed one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardflow.errors import StateError

__all__ = ["DIGEST_LENGTH", "MAX_COMPONENTS", "ComponentState", "check_components", "components_from_json"]

MAX_COMPONENTS = 10
"""Most components of a blend; a state must stay below 1 KB."""

DIGEST_LENGTH = 8
"""Hexadecimal digits of a component's digest that a state keeps, to name what changed; that nothing changed
is told by the blend's own digest, which is kept whole."""

_TEXT = re.compile(rf"(\d{{1,18}}):([0-9a-f]{{{DIGEST_LENGTH}}})")


@dataclass(frozen=True, slots=True)
class ComponentState:
    """One component, at its position in the blend."""

    manifest_version: int
    """A resume opens this version of the component's dataset, not the newest."""
    digest: str
    """First digits of the digest over dataset, split, subset and draws."""

    def to_json(self) -> str:
        """Return the component as a text such as ``"3:01234567"``."""
        return f"{self.manifest_version}:{self.digest}"


def components_from_json(value: object) -> tuple[ComponentState, ...]:
    """Read the components of a state.

    Raises:
        StateError: No list of such texts, or more than `MAX_COMPONENTS`.
    """
    texts = value if isinstance(value, list) else [None]
    found = [_TEXT.fullmatch(text) if isinstance(text, str) else None for text in texts]
    if len(found) > MAX_COMPONENTS or not all(found):
        raise StateError(
            f"components must be a list of at most {MAX_COMPONENTS} texts of version and digest, got another "
            f"value (loader state); pass what state_dict() returned, unchanged."
        )
    return tuple(ComponentState(int(match[1]), match[2]) for match in found if match)


def check_components(own: Sequence[ComponentState], expected: Sequence[ComponentState]) -> None:
    """Refuse a state whose blend has other components than the run's; the first that differs is named.

    Raises:
        StateError: They differ.
    """
    if len(own) != len(expected):
        raise StateError(
            f"components of the loader state must be this run's {len(expected)}, got {len(own)} (0 is one "
            f"dataset without a blend); resume with the blend file that it was saved with."
        )
    for number, (saved, wanted) in enumerate(zip(own, expected, strict=True), start=1):
        if saved != wanted:
            raise StateError(
                f"component {number} of the blend must be this run's {wanted.to_json()} (manifest version, "
                f"digest), got {saved.to_json()} in the loader state; its dataset, split, subset or draws "
                f"were changed: set them back, or start a new run."
            )
