"""Batch spec and sampling: how samples form micro-batches and steps, and how often each is drawn.

Both are independent of the world size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from shardflow.config import Bounds, check_fields
from shardflow.errors import ConfigError
from shardflow.sampling.budget import TokenBudget
from shardflow.sampling.permutation import MAX_COUNTER, check_ints, checked_int, checked_object

MissingClass = Literal["error", "drop", "own"]
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How often each sample is drawn; by default every one once an epoch.

    Draws are counted over all epochs: after any number of epochs each sample was drawn its exact share of
    times, within 1. The order is the same on any number of ranks and after a resume.

    Raises:
        ConfigError: Settings exclude each other, or a number is out of range.

    Example:
        >>> Sampling(weights={0: "quality.clean", 5: "quality.all"}).segments
        ((0, 'quality.clean'), (5, 'quality.all'))
    """

    weights: str | dict[int, str] | None = None
    """Column of numbers of at least 0, such as ``"quality.weight"``: a sample of weight 2 is drawn twice as
    often as one of weight 1, one of weight 0 never. A curriculum is a table of first epochs and columns, such
    as ``{0: "quality.clean", 5: "quality.all"}``; an empty name stands for equal weights."""
    balance: str | None = None
    """Column of classes, such as ``"labels.finding"``: each class is drawn equally often."""
    missing_class: MissingClass = "error"
    """What ``balance`` does with samples without a class: refuse them, leave them out (``drop``), or make
    them a class of their own (``own``)."""
    epoch_samples: Annotated[int, Bounds(1)] | None = None
    """Draws of an epoch; by default as many as there are samples."""
    limit: Annotated[int, Bounds(1)] | None = None
    """Use only this many samples: those whose sample keys come first in alphabetical order."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weights is not None and self.balance is not None:
            raise ConfigError("sampling takes weights or balance, got both; leave out one of them.")
        if self.missing_class != "error" and self.balance is None:
            raise ConfigError("missing_class is for balance=, which is not set; leave it out.")
        if isinstance(self.weights, Mapping):
            epochs = [str(epoch) for epoch in self.weights]  # a TOML file has texts
            if not all(map(str.isdecimal, epochs)) or "0" not in epochs:
                raise ConfigError(
                    "weights by epoch must begin with epoch 0 and have whole numbers as epochs, such as "
                    f'{{0: "easy", 5: "all"}}, got {", ".join(epochs) or "none"}.'
                )
            by_epoch = {int(epoch): name for epoch, name in zip(epochs, self.weights.values(), strict=True)}
            object.__setattr__(self, "weights", by_epoch)
        if not all(isinstance(name, str) for _, name in self.segments) or self.weights == "":
            raise ConfigError('weights must be the name of a column, such as "quality.weight".')

    @property
    def segments(self) -> tuple[tuple[int, str], ...]:
        """First epochs, ascending, and the column of weights from there on; empty without weights."""
        if self.weights is None:
            return ()
        if not isinstance(self.weights, Mapping):
            return ((0, self.weights),)
        return tuple(sorted(self.weights.items()))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        names = [name for _, name in self.segments if name]
        return tuple(dict.fromkeys(names if self.balance is None else [self.balance]))

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables of these columns."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.columns))

    @property
    def is_used(self) -> bool:
        """Whether anything differs from one draw of every sample an epoch."""
        return self != Sampling()

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are used as a JSON object."""
        settings: dict[str, Any] = {
            "weights": (
                {str(epoch): name for epoch, name in self.segments}
                if isinstance(self.weights, Mapping)
                else self.weights
            ),
            "balance": self.balance,
            "missing_class": None if self.missing_class == "error" else self.missing_class,
            "epoch_samples": self.epoch_samples,
            "limit": self.limit,
        }
        return {name: value for name, value in settings.items() if value is not None}
