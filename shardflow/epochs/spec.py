"""What a step is made of: the batch spec, which the user chooses and no world size may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from shardflow.epochs.integers import checked_int
from shardflow.errors import ConfigError

__all__ = ["MAX_PER_STEP", "TAILS", "BatchSpec", "Tail"]

Tail = Literal["drop", "repeat", "mask"]
TAILS: Final[tuple[Tail, ...]] = get_args(Tail)

MAX_PER_STEP = 2**24
"""Largest micro-batch, in samples, and largest step, in micro-batches."""

_KIND = "fixed"
_KEYS = ("kind", "micro_batch_size", "micro_batches_per_step", "tail")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Micro-batches of a fixed size, and how many of them make one optimizer step.

    With ``micro_batches_per_step = world_size * grad_accum_steps`` any other split of that product runs the
    same steps made of the same micro-batches.

    Raises:
        ConfigError: A number is out of range or the tail is unknown.
    """

    micro_batch_size: int
    """Samples in one forward/backward of one rank."""
    micro_batches_per_step: int
    """Micro-batches in one step, over all ranks; also the largest world size that can run the plan."""
    tail: Tail = "drop"
    """What happens to the samples that do not fill the last step.

    ``drop``: this epoch leaves them out (another epoch's order leaves out others). ``repeat``: samples from
    the start of the epoch's order fill the step, at full weight. ``mask``: padding of weight 0 fills it, so
    that every sample counts exactly once.
    """

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "micro_batches_per_step"):
            value = getattr(self, name)
            number = checked_int(name, value, low=1, high=MAX_PER_STEP, where="batch spec", error=ConfigError)
            object.__setattr__(self, name, number)
        if self.tail not in TAILS:
            raise ConfigError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r} (batch spec).")

    @property
    def samples_per_step(self) -> int:
        """Sample slots of one step, padding included: the global batch."""
        return self.micro_batch_size * self.micro_batches_per_step

    def to_json(self) -> dict[str, int | str]:
        """Return the spec as a JSON object; ``kind`` tells it from other ways to form micro-batches."""
        return {
            "kind": _KIND,
            "micro_batch_size": self.micro_batch_size,
            "micro_batches_per_step": self.micro_batches_per_step,
            "tail": self.tail,
        }

    @classmethod
    def from_json(cls, value: object) -> BatchSpec:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: Another kind of spec, a missing or unknown key, or a value that the constructor
                refuses.
        """
        if not isinstance(value, Mapping):
            raise ConfigError(f"batch spec must be a JSON object, got {type(value).__name__}.")
        if value.get("kind") != _KIND:
            raise ConfigError(
                f"kind must be {_KIND!r}, got {value.get('kind')!r} (batch spec); this shardflow knows no "
                f"other."
            )
        if set(value) != set(_KEYS):
            missing, unknown = set(_KEYS) - set(value), set(value) - set(_KEYS)
            raise ConfigError(
                f"batch spec must have the keys {', '.join(_KEYS)}, got {sorted(missing)} missing and "
                f"{sorted(map(str, unknown))} unknown."
            )
        return cls(**{key: value[key] for key in _KEYS if key != "kind"})
