"""Loader state: the position of a run, and the facts that identify the run.

A position counts *consumed* steps, so prefetched but unused data is planned again. It is equal on all ranks
and independent of the world size, so any world size resumes from it at once: the plan finds the next step
without those before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardflow.errors import ConfigError, StateError
from shardflow.sampling.blend import ComponentState, check_components, components_from_json
from shardflow.sampling.permutation import MAX_COUNTER, check_ints, checked_int, checked_object
from shardflow.sampling.plan import DEFAULT_VIEW, plan_id
from shardflow.sampling.spec import BatchSpec

STATE_VERSION = 3
"""Version 3 names the sampling of a run with weights; others are saved as version 2, which has none. Version
1, without subset and blend, is still read.

Increased when a key is added, removed or changes its meaning (change class CHECKPOINT STATE)."""
# As they are spelled in JSON; "batch" holds the spec.
_COUNTERS = ("manifest_version", "seed", "epoch", "step")
_NAMES = ("split", "view")
_DIGESTS = ("dataset_id", "plan_id")
_KEYS_1 = ("version", *_DIGESTS, *_NAMES, *_COUNTERS, "batch")
_KEYS_2 = (*_KEYS_1, "subset", "components")
_KEYS = {1: _KEYS_1, 2: _KEYS_2, STATE_VERSION: (*_KEYS_2, "sampling")}
# Printable ASCII without quotation mark and backslash: one byte per character in JSON, so that a state
# stays below 1 KB.
_NAME = re.compile(r"[ !#-\[\]-~]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDIES = {
    "dataset_id": "open the dataset and the manifest version that it was saved with, or start a new run",
    "manifest_version": "open the manifest version that it was saved with, or start a new run",
    "subset": "set the split and terms of the subset back, or start a new run",
    "sampling": (
        "set sampling, and the table versions of its columns, to those that it was saved with, or start a "
        "new run"
    ),
    "view": "set unit and where to those that it was saved with, or start a new run",
    "plan_id": "resume with the shardflow that saved it, since this one plans another order",
}


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The next step to run.

    Raises:
        StateError: Epoch or step is no integer of at least 0.
    """

    epoch: int
    step: int

    def __post_init__(self) -> None:
        check_ints(
            self, dict.fromkeys(("epoch", "step"), (0, MAX_COUNTER)), where="position", error=StateError
        )

    @classmethod
    def after(
        cls, *, epoch: int, num_consumed: int, num_micro_batches_per_rank: int, num_steps: int
    ) -> Position:
        """Return the position of a rank that has consumed ``num_consumed`` micro-batches of ``epoch``.

        After the last micro-batch of step k it is k + 1. Inside a step it rounds down, because a step that
        was not finished has not changed the model. After the epoch's last step it is step 0 of the next.

        Args:
            epoch: The current epoch.
            num_consumed: Micro-batches of it that this rank has consumed, including padding, counted from the
                epoch's start even if the run was resumed within it.
            num_micro_batches_per_rank: Micro-batches of the rank in a step, at least 1.
            num_steps: Steps of the epoch.

        Raises:
            StateError: More micro-batches were consumed than the epoch has.
        """
        total = num_steps * num_micro_batches_per_rank
        where = f"epoch {epoch}"
        num_consumed = checked_int(
            "num_consumed", num_consumed, low=0, high=total, where=where, error=StateError
        )
        if num_consumed == total:
            return cls(epoch + 1, 0)
        return cls(epoch, num_consumed // num_micro_batches_per_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """State of a loader in a checkpoint: below 1 KB of JSON, equal on all ranks and any world size.

    Raises:
        StateError: A field is of the wrong type or out of range.
    """

    dataset_id: str
    manifest_version: int
    """Manifest version of ``dataset_id``; a resume opens this one, not the newest."""
    split: str
    seed: int
    spec: BatchSpec
    epoch: int = 0
    step: int = 0
    """The next step to run; all earlier ones are consumed."""
    view: str = DEFAULT_VIEW
    subset: str | None = None
    """Digest of the rows, if they are not all of the split."""
    components: tuple[ComponentState, ...] = ()
    """Components of a blend, whose digest is ``dataset_id``; empty for one dataset."""
    sampling: str | None = None
    """Digest of weights and draws, if not every row is drawn once an epoch; of a blend in ``dataset_id``."""
    plan_id: str = ""
    """Identity of the plan; computed from the other fields if not given."""

    def __post_init__(self) -> None:
        check_ints(self, dict.fromkeys(_COUNTERS, (0, MAX_COUNTER)), where="loader state", error=StateError)
        _check_text("dataset_id", self.dataset_id, _DIGEST, "64 hexadecimal digits")
        for name in _NAMES:
            _check_text(name, getattr(self, name), _NAME, "1 to 64 printable ASCII characters")
        if self.plan_id == "":
            identity = plan_id(
                dataset_id=self.dataset_id,
                split=self.split,
                spec=self.spec,
                view=self.view,
                subset=self.subset,
                sampling=self.sampling,
            )
            object.__setattr__(self, "plan_id", identity)
        _check_text("plan_id", self.plan_id, _DIGEST, "64 hexadecimal digits")
        for name in ("subset", "sampling"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name), _DIGEST, "64 hexadecimal digits or null")

    @property
    def position(self) -> Position:
        """The next step to run."""
        return Position(self.epoch, self.step)

    def at(self, position: Position) -> LoaderState:
        """Return the state of the same run at another position."""
        return replace(self, epoch=position.epoch, step=position.step)

    def to_json(self) -> dict[str, object]:
        """Return the state as a new JSON object of plain Python values."""
        return {
            "version": 2 if self.sampling is None else STATE_VERSION,
            **{key: getattr(self, key) for key in (*_DIGESTS, *_NAMES, *_COUNTERS)},
            "batch": self.spec.to_json(),
            "subset": self.subset,
            "components": [component.to_json() for component in self.components],
            **({} if self.sampling is None else {"sampling": self.sampling}),
        }

    @classmethod
    def from_json(cls, value: object) -> LoaderState:
        """Read what :meth:`to_json` wrote.

        Raises:
            StateError: The value is no object or of another version, a key is missing or unknown, or a value
                has the wrong type or range.
        """
        if not isinstance(value, Mapping):
            raise StateError(
                f"loader state must be a JSON object, got {type(value).__name__}; pass what state_dict() "
                f"returned."
            )
        version = value.get("version")
        if type(version) is not int or version not in _KEYS:
            found = version if type(version) is int else type(version).__name__
            raise StateError(
                f"version must be 1 to {STATE_VERSION}, got {found} (loader state); load it with the "
                f"shardflow that saved it."
            )
        checked_object(
            value,
            _KEYS[version],
            what=f"loader state of version {version}",
            error=StateError,
            remedy="; pass what state_dict() returned, unchanged",
        )
        _check_text("plan_id", value["plan_id"], _DIGEST, "64 hexadecimal digits")
        try:
            spec = BatchSpec.from_json(value["batch"])
        except ConfigError as error:
            raise StateError(f"loader state, key 'batch': {error.message}") from None
        return cls(
            spec=spec,
            subset=value.get("subset"),
            sampling=value.get("sampling"),
            components=components_from_json(value.get("components", [])),
            **{key: value[key] for key in (*_DIGESTS, *_NAMES, *_COUNTERS)},
        )

    def check_matches(self, expected: LoaderState) -> None:
        """Check that a run is the one in which this state was saved.

        Args:
            expected: The state of the run that resumes, at any position.

        Raises:
            StateError: Dataset, split, view, batch spec, seed or plan differ; the message names the first
                field that does.
        """
        check_components(self.components, expected.components)
        own, wanted = self._identity(), expected._identity()
        # A field of only one of the two specs, such as lanes, is null in the other. The plan's digest comes
        # last, because it differs with every other field.
        names = [name for name in {**own, **wanted} if name != "plan_id"]
        for name in (*names, "plan_id"):
            found = own.get(name)
            if found != wanted.get(name):
                remedy = _REMEDIES.get(name, f"set {name} to {json.dumps(found)}, or start a new run")
                raise StateError(
                    f"{name} of the loader state must be this run's {json.dumps(wanted.get(name))}, got "
                    f"{json.dumps(found)} (saved at epoch {self.epoch}, step {self.step}); {remedy}."
                )

    def check_adopted_by(self, expected: LoaderState) -> None:
        """Check that a run of another version of the dataset may continue from this state.

        Args:
            expected: The state of the run that resumes, at any position.

        Raises:
            StateError: The position is within an epoch, or split, view, batch spec or seed differ.
        """
        if self.step:
            raise StateError(
                f"another version of a dataset is adopted at the start of an epoch, got a state of step "
                f"{self.step} of epoch {self.epoch}; resume with the version that it was saved with."
            )
        of_version = ("dataset_id", "manifest_version", "subset", "sampling")
        spec = replace(self.spec, lanes=expected.spec.lanes)  # which may be chosen by the samples
        if spec.budget is not None and expected.spec.budget is not None:
            cost, other = spec.budget.cost, expected.spec.budget.cost
            of_samples = {
                name: getattr(other, name) for name in ("delivered", "counted") if getattr(cost, name)
            }
            spec = replace(spec, budget=replace(spec.budget, cost=replace(cost, **of_samples)))
        own = {name: getattr(expected, name) for name in of_version}
        replace(self, spec=spec, plan_id="", **own).check_matches(expected)

    def check_within(self, num_steps: int) -> None:
        """Check that the epoch has the step; the end of an epoch is step 0 of the next.

        Raises:
            StateError: ``step`` is not below ``num_steps``.
        """
        if self.step >= num_steps:
            raise StateError(
                f"step must be below {num_steps}, the steps of epoch {self.epoch}, got {self.step} (loader "
                f"state); it was changed after it was saved, so take an earlier checkpoint."
            )

    def _identity(self) -> dict[str, object]:
        """Return the fields that must be equal; a difference in one explains those in later ones."""
        return {
            "view": self.view,
            "dataset_id": self.dataset_id,
            "manifest_version": self.manifest_version,
            "split": self.split,
            "subset": self.subset,
            "sampling": self.sampling,
            **self.spec.to_json(),
            "seed": self.seed,
            "plan_id": self.plan_id,
        }


def _check_text(name: str, value: object, pattern: re.Pattern[str], expected: str) -> None:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        # The text is not repeated: a damaged state may hold anything.
        found = f"{len(value)} characters" if isinstance(value, str) else type(value).__name__
        raise StateError(f"{name} must be {expected}, got {found} (loader state).")
