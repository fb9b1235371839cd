"""Batches of a loader for the training loops of others: converted, counted once, distributed once.

The plan has distributed the samples already. A framework that would do so again, or step in another rhythm,
is refused before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from shardflow.errors import ConfigError
from shardflow.loading import Batch, Loader

Convert: TypeAlias = Callable[[Batch], Any]
"""Makes what the model's step gets from a batch."""


class EvaluationBatches:
    """Converted batches of one epoch, the same at every iteration.

    Args:
        loader: Its tail must be ``mask``: every sample counts once, and padding slots have weight 0.
        convert: Makes what the step gets; `Batch.torch` by default.

    Raises:
        ConfigError: The tail would leave samples out, or repeat some.
    """

    def __init__(self, loader: Loader, convert: Convert | None = None) -> None:
        if loader.plan.spec.tail != "mask":
            raise ConfigError(
                "An evaluation counts every sample once: make its loader with "
                f"sf.BatchSpec(..., tail='mask'), not {loader.plan.spec.tail!r}."
            )
        self.loader = loader
        self._convert = convert or Batch.torch

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the start, also where an evaluation was cut off."""
        self.loader.close()
        self.loader.set_epoch(1)
        self.loader.set_epoch(0)
        return map(self._convert, self.loader)


class TrainingBatches:
    """Converted batches, epoch after epoch from the loader's position, which frameworks save and restore.

    Args:
        loader: The loader.
        convert: Makes what the step gets; `Batch.torch` by default.
    """

    def __init__(self, loader: Loader, convert: Convert | None = None) -> None:
        self.loader = loader
        self._convert = convert or Batch.torch

    def __len__(self) -> int:
        """Return the number of batches of this rank in the whole current epoch.

        Raises:
            TypeError: Epochs are of several lengths, with a token budget.
        """
        if self.loader.plan.spec.budget is not None:
            raise TypeError("with a token budget the number of batches differs by epoch")
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Iterate from the position to the end of its epoch."""
        return map(self._convert, self.loader)

    def state_dict(self) -> dict[str, object]:
        """Return the position, see `Loader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Move to a saved position, see `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)


def register_loader(accelerator: Any, loader: Loader) -> None:
    """Register a loader with an ``accelerate.Accelerator``, in place of ``prepare``.

    ``save_state`` and ``load_state`` save and restore its position then; ``skip_first_batches`` must not be
    called, because it would leave out samples a second time.

    Args:
        accelerator: The accelerator.
        loader: The training loader.

    Raises:
        ConfigError: The accelerator would distribute batches a second time, has another rank or world size
            than the loader, or accumulates another number of micro-batches than a rank has in a step.
    """
    check_accelerator(accelerator, loader)
    check_accumulation(loader, "gradient_accumulation_steps", accelerator.gradient_accumulation_steps)
    accelerator.register_for_checkpointing(loader)


def check_accelerator(accelerator: Any, *loaders: Loader) -> None:
    """Refuse an accelerator that would distribute batches again, or is of another rank than the loaders.

    Raises:
        ConfigError: It is.
    """
    for name in ("dispatch_batches", "split_batches"):
        if getattr(accelerator, name):
            raise ConfigError(
                f"{name}=True would distribute batches that the plan has already distributed to the ranks; "
                "leave it out."
            )
    for loader in loaders:
        check_world(loader, accelerator.process_index, accelerator.num_processes)


def check_world(loader: Loader, rank: int, world_size: int) -> None:
    """Refuse a loader that was made for another rank than the framework's.

    Raises:
        ConfigError: It was.
    """
    if (loader.world.rank, loader.world.world_size) != (rank, world_size):
        raise ConfigError(
            f"The loader is of rank {loader.world.rank} of {loader.world.world_size} and this process is "
            f"rank {rank} of {world_size}; make the loader with "
            f"world=sf.World(rank={rank}, world_size={world_size})."
        )


def check_accumulation(loader: Loader, name: str, number: int) -> None:
    """Refuse a framework that steps after another number of micro-batches than the plan.

    Args:
        loader: The loader.
        name: Name of the framework's setting.
        number: Its value.

    Raises:
        ConfigError: It does.
    """
    wanted = loader.num_micro_batches_per_rank
    if number != wanted:
        raise ConfigError(
            f"{name} is {number}, but a step of the plan has {wanted} micro-batches on each of "
            f"{loader.world.world_size} ranks; pass {name}={wanted}."
        )
