"""What a step is made of: the batch spec, which the user chooses and no world size may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from shardflow.epochs.integers import checked_int
from shardflow.errors import ConfigError

__all__ = ["TAILS", "BatchSpec", "Tail"]

Tail = Literal["drop", "repeat", "mask"]
TAILS: Final[tuple[Tail, ...]] = get_args(Tail)

_KIND = "fixed"
_LIMIT = 2**24


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Fixed-size micro-batches, and how many of them make one optimizer step.

    The global batch is ``micro_batch_size * micro_batches_per_step`` samples. With ``micro_batches_per_step = world_size *
    grad_accum_steps`` any other split of that product runs the same steps made of the same micro-batches.

    Raises:
        ConfigError: A number is out of range or the tail is unknown.
    """

    micro_batch_size: int
    """Samples in one forward/backward of one rank."""
    micro_batches_per_step: int
    """Micro-batches in one step, over all ranks; the largest world size that can run it."""
    tail: Tail = "drop"
    """What happens to the samples that do not fill the last step.

    ``drop``: they are left out of this epoch (another epoch's order leaves out others). ``repeat``: the step is filled with
    samples from the start of the epoch's order, at full weight. ``mask``: it is filled with padding of weight 0, so that
    every sample counts exactly once.
    """

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "micro_batches_per_step"):
            number = checked_int(
                name, getattr(self, name), low=1, high=_LIMIT, where="batch spec", error=ConfigError
            )
            object.__setattr__(self, name, number)
        if self.tail not in TAILS:
            raise ConfigError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r} (batch spec).")

    @property
    def samples_per_step(self) -> int:
        """Slots of one step: the global batch, padding included."""
        return self.micro_batch_size * self.micro_batches_per_step

    def to_json(self) -> dict[str, int | str]:
        """Return the spec as a JSON object; ``kind`` leaves room for other ways to form micro-batches."""
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
            ConfigError: Another kind of spec, a missing or unknown key, or a value that the constructor refuses.
        """
        known = {"kind", "micro_batch_size", "micro_batches_per_step", "tail"}
        if not isinstance(value, Mapping) or set(value) != known:
            found = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise ConfigError(f"batch spec must be an object with the keys {sorted(known)}, got {found}.")
        if value["kind"] != _KIND:
            raise ConfigError(
                f"kind must be {_KIND!r}, got {value['kind']!r} (batch spec); a newer shardflow may know it."
            )
        return cls(
            micro_batch_size=value["micro_batch_size"],
            micro_batches_per_step=value["micro_batches_per_step"],
            tail=cast("Tail", value["tail"]),
        )
