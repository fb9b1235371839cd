"""The loader state: a position, and the facts that say which run it belongs to (contract S4)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardflow.epochs.identity import DEFAULT_VIEW, plan_id
from shardflow.epochs.integers import MAX_COUNTER, checked_int
from shardflow.epochs.position import Position
from shardflow.epochs.spec import BatchSpec
from shardflow.errors import ConfigError, StateError

__all__ = ["STATE_VERSION", "LoaderState"]

STATE_VERSION = 1
"""Raised when a key is added, removed or changes its meaning (change class CHECKPOINT STATE)."""

_KEYS = frozenset(
    (
        "version",
        "plan_id",
        "dataset_id",
        "manifest_version",
        "split",
        "view",
        "seed",
        "epoch",
        "step",
        "batch",
    )
)
# Printable ASCII without quotation mark and backslash: one byte a character in JSON, so that a state stays under 1 KB.
_NAME = re.compile(r"[!#-\[\]-~]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")

_REMEDIES = {
    "dataset_id": "open the dataset and manifest version that the state was saved with, or start a new run",
    "manifest_version": "open the manifest version that the state was saved with",
    "seed": "set the seed that the state was saved with, or start a new run",
    "plan_id": "run the shardflow version that saved the state: it plans another order",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """What a checkpoint keeps of the loader: under 1 KB of JSON, equal on all ranks.

    Raises:
        StateError: A field is of the wrong type or out of range.
    """

    dataset_id: str
    manifest_version: int
    split: str
    seed: int
    spec: BatchSpec
    epoch: int = 0
    step: int = 0
    """The next step to run; all before it are consumed."""
    view: str = DEFAULT_VIEW
    plan_id: str = ""
    """Identity of the plan; computed from the other fields where it is not given."""

    def __post_init__(self) -> None:
        for name in ("manifest_version", "seed", "epoch", "step"):
            value = checked_int(
                name, getattr(self, name), low=0, high=MAX_COUNTER, where="loader state", error=StateError
            )
            object.__setattr__(self, name, value)
        if not self.plan_id:
            identity = plan_id(dataset_id=self.dataset_id, split=self.split, spec=self.spec, view=self.view)
            object.__setattr__(self, "plan_id", identity)
        for name, pattern, expected in (
            ("dataset_id", _DIGEST, "64 hexadecimal digits"),
            ("plan_id", _DIGEST, "64 hexadecimal digits"),
            ("split", _NAME, "a name of 1 to 64 printable ASCII characters"),
            ("view", _NAME, "a name of 1 to 64 printable ASCII characters"),
        ):
            text = getattr(self, name)
            if not isinstance(text, str) or not pattern.fullmatch(text):
                found = repr(text[:80]) if isinstance(text, str) else type(text).__name__
                raise StateError(f"{name} must be {expected}, got {found} (loader state).")

    @property
    def position(self) -> Position:
        """The next step to run."""
        return Position(self.epoch, self.step)

    def at(self, position: Position) -> LoaderState:
        """Return the state of the same run at another position."""
        return replace(self, epoch=position.epoch, step=position.step)

    def to_json(self) -> dict[str, object]:
        """Return the state as a JSON object of plain Python values, a new one at each call."""
        return {
            "version": STATE_VERSION,
            "plan_id": self.plan_id,
            "dataset_id": self.dataset_id,
            "manifest_version": self.manifest_version,
            "split": self.split,
            "view": self.view,
            "seed": self.seed,
            "epoch": self.epoch,
            "step": self.step,
            "batch": self.spec.to_json(),
        }

    @classmethod
    def from_json(cls, value: object) -> LoaderState:
        """Read what :meth:`to_json` wrote.

        Raises:
            StateError: No object, another version, a missing or unknown key, or a value of the wrong type or range.
        """
        if not isinstance(value, Mapping):
            raise StateError(
                f"loader state must be a JSON object, got {type(value).__name__}; pass what state_dict() returned."
            )
        if value.get("version") != STATE_VERSION or isinstance(value.get("version"), bool):
            raise StateError(
                f"version must be {STATE_VERSION}, got {_shown(value.get('version'))} (loader state); load it with the "
                f"shardflow that saved it, or a newer one."
            )
        missing, unknown = sorted(_KEYS - set(value)), sorted(str(key) for key in set(value) - _KEYS)
        if missing or unknown:
            raise StateError(
                f"loader state of version {STATE_VERSION} must have the keys {sorted(_KEYS)}, got missing {missing} and "
                f"unknown {unknown}; pass what state_dict() returned, unchanged."
            )
        try:
            spec = BatchSpec.from_json(value["batch"])
        except ConfigError as error:
            raise StateError(f"{error.message} (loader state, key 'batch')") from None
        fields = {key: value[key] for key in _KEYS - {"version", "batch"}}
        if fields["plan_id"] == "":
            raise StateError("plan_id must be 64 hexadecimal digits, got '' (loader state).")
        return cls(spec=spec, **fields)

    def check_matches(self, expected: LoaderState) -> None:
        """Refuse to go on from this state in a run that differs from the one it was saved in.

        Args:
            expected: The state of the run that wants to go on, at any position.

        Raises:
            StateError: Dataset, split, view, batch spec, seed or plan differ; the message names the first such field.
        """
        for name, found, wanted in zip(
            _identity_names(), self._identity(), expected._identity(), strict=True
        ):
            if found != wanted:
                remedy = _REMEDIES.get(name, f"set {name} to {_shown(found)}, or start a new run")
                raise StateError(
                    f"{name} of the loader state must be that of this run, {_shown(wanted)}, got {_shown(found)} "
                    f"(state at epoch {self.epoch}, step {self.step}); {remedy}."
                )

    def check_within(self, num_steps: int) -> None:
        """Refuse a step that the epoch does not have.

        Raises:
            StateError: ``step`` is not below ``num_steps``; a state at an epoch's end is step 0 of the next one.
        """
        if self.step >= num_steps:
            raise StateError(
                f"step of the loader state must be below {num_steps}, the steps of its epoch, got {self.step} (state at "
                f"epoch {self.epoch}); the state was changed after it was saved: take an earlier checkpoint."
            )

    def _identity(self) -> tuple[object, ...]:
        spec = self.spec
        return (
            self.dataset_id, self.manifest_version, self.split, self.view,
            spec.micro_batch_size, spec.micro_batches_per_step, spec.tail, self.seed, self.plan_id,
        )  # fmt: skip


def _identity_names() -> tuple[str, ...]:
    return (
        "dataset_id", "manifest_version", "split", "view",
        "micro_batch_size", "micro_batches_per_step", "tail", "seed", "plan_id",
    )  # fmt: skip


def _shown(value: object) -> str:
    return (
        json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    )
