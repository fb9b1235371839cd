"""Batch spec: how samples form micro-batches and steps, independent of the world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from shardflow.errors import ConfigError
from shardflow.sampling.budget import TokenBudget
from shardflow.sampling.permutation import MAX_COUNTER, check_ints, checked_int, checked_object

Tail = Literal["drop", "repeat", "mask"]
TAILS: Final[tuple[Tail, ...]] = get_args(Tail)

MAX_PER_STEP = 2**24
"""Largest micro-batch, in samples, and largest step, in micro-batches."""

MAX_LANES = 2**16
DEFAULT_WINDOW_BYTES = 2**30

# Keys of the JSON by kind of spec; those of lanes are present only if lanes are used.
_SIZES = {"fixed": "micro_batch_size", "budget": "budget"}
_KEYS = ("kind", "micro_batches_per_step", "tail")
_LANE_KEYS = ("lanes", "window_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSpec:
    """Sizes of micro-batches and steps, and the handling of the samples that do not fill the last step.

    With ``micro_batches_per_step = world_size * grad_accum_steps`` any other split of that product runs the
    same steps made of the same micro-batches.

    Raises:
        ConfigError: A number is out of range, the tail is unknown, or the settings exclude each other.
    """

    micro_batch_size: int = 0
    """Samples in one forward/backward of one rank; 0 with a ``budget``."""
    budget: TokenBudget | None = None
    """Fills micro-batches by the length of their samples instead; requires lanes."""
    micro_batches_per_step: int
    """Micro-batches in one step, over all ranks; also the largest world size that can run the plan."""
    tail: Tail = "drop"
    """What happens to the samples that do not fill the last step.

    ``drop``: this epoch leaves them out (another epoch leaves out others). ``repeat``: samples from the start
    of the epoch's order fill the step, at full weight. ``mask``: padding of weight 0 fills it, so that every
    sample counts exactly once.
    """
    lanes: int = 0
    """L: samples are shuffled within the shuffle windows of L lanes, so that few shards are open; 0 shuffles
    the whole epoch. Chosen from the data, never from the world size: see
    :func:`shardflow.sampling.lanes.choose_lanes`."""
    window_bytes: int = DEFAULT_WINDOW_BYTES
    """Approximate size of a shuffle window of a lane; not part of a spec without lanes."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.micro_batch_size != 0:
            raise ConfigError(
                "micro_batch_size must be left out where there is a budget, got both; remove one of them."
            )
        bounds = {
            "micro_batch_size": (1, MAX_PER_STEP) if self.budget is None else (0, 0),
            "micro_batches_per_step": (1, MAX_PER_STEP),
            "lanes": (0 if self.budget is None else 1, MAX_LANES),
            "window_bytes": (1, MAX_COUNTER),
        }
        check_ints(self, bounds, where="batch spec", error=ConfigError)
        if not self.lanes:
            object.__setattr__(self, "window_bytes", DEFAULT_WINDOW_BYTES)
        if self.tail not in TAILS:
            raise ConfigError(f"tail must be one of {', '.join(TAILS)}, got {self.tail!r} (batch spec).")

    @classmethod
    def simple(cls, *, global_batch_size: int, micro_batch_size: int, tail: Tail = "drop") -> BatchSpec:
        """Make a spec from the samples of a step and those of each forward/backward.

        Args:
            global_batch_size: Samples of an optimizer step, over all ranks.
            micro_batch_size: Samples in one forward/backward of one rank.
            tail: Handling of the samples that do not fill the last step.

        Raises:
            ConfigError: The micro-batch size does not divide the global batch size, or a number is out of
                range.

        Example:
            >>> BatchSpec.simple(global_batch_size=256, micro_batch_size=4).micro_batches_per_step
            64
        """
        where = "batch spec"
        size = checked_int(
            "micro_batch_size", micro_batch_size, low=1, high=MAX_PER_STEP, where=where, error=ConfigError
        )
        total = checked_int(
            "global_batch_size", global_batch_size, low=size, high=MAX_COUNTER, where=where, error=ConfigError
        )
        per_step, rest = divmod(total, size)
        if rest:
            raise ConfigError(
                f"global_batch_size must be a multiple of micro_batch_size ({size}), got {total} ({where}); "
                f"take {total - rest} or {total - rest + size}."
            )
        return cls(micro_batch_size=size, micro_batches_per_step=per_step, tail=tail)

    @property
    def kind(self) -> str:
        """How micro-batches are formed: ``fixed`` or ``budget``."""
        return "fixed" if self.budget is None else "budget"

    @property
    def samples_per_step(self) -> int:
        """Sample slots of a step, including padding: the global batch size; 0 with a budget."""
        return self.micro_batch_size * self.micro_batches_per_step

    def to_json(self) -> dict[str, Any]:
        """Return the spec as a JSON object; ``kind`` names the way micro-batches are formed."""
        sizes = {"micro_batch_size": self.micro_batch_size}
        lanes = {"lanes": self.lanes, "window_bytes": self.window_bytes}
        return {
            "kind": self.kind,
            **(sizes if self.budget is None else {"budget": self.budget.to_json()}),
            "micro_batches_per_step": self.micro_batches_per_step,
            "tail": self.tail,
            **(lanes if self.lanes else {}),
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
        size = _SIZES.get(value["kind"]) if isinstance(value.get("kind"), str) else None
        if size is None:
            raise ConfigError(
                f"kind must be one of {', '.join(map(repr, _SIZES))}, got {value.get('kind')!r} (batch "
                f"spec); this shardflow knows no other."
            )
        keys = {*_KEYS, size, *(_LANE_KEYS if "lanes" in value or size == "budget" else ())}
        checked_object(value, keys, what="batch spec", error=ConfigError)
        parts = {key: value[key] for key in keys if key != "kind"}
        if size == "budget":
            parts["budget"] = TokenBudget.from_json(parts["budget"])
        return cls(**parts)
