"""Path of micro-batches from the loader to the device, with the ledger's entry of each.

On a device the feed is one micro-batch ahead across the end of a step: while the device still computes the
last backward, the next step's first micro-batch is copied. The loader's position counts what was handed out,
never what was only sent ahead, so a checkpoint between the two says the right step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from shardflow.loading import Batch, Loader
from shardflow.training.hooks import LoopHook
from shardflow.training.inputs import InputMaker, MicroInputs, SentInputs
from shardflow.training.ledger import LedgerMicroBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FedMicroBatch:
    """A micro-batch on the device, and what the ledger says of it."""

    inputs: MicroInputs
    entry: LedgerMicroBatch


class MicroFeed(Protocol):
    """Where steps take their micro-batches from."""

    looks_ahead: bool
    """Whether `look_ahead` does anything."""

    def take(self) -> FedMicroBatch | None:
        """Return the next micro-batch on the device; None where there is none left."""

    def look_ahead(self) -> None:
        """Begin with the micro-batch that comes after those that were taken."""

    def drain(self) -> float:
        """Return the seconds waited for data since the last call."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A micro-batch that was sent and not handed out."""

    sent: SentInputs
    entry: LedgerMicroBatch


class DeviceFeed:
    """This rank's micro-batches of the rest of an epoch, on the device.

    Args:
        loader: At the position to go on from.
        maker: Makes the model's tensors.
        looks_ahead: Send the next step's first micro-batch before it is asked for; pointless on CPUs.

    Attributes:
        looks_ahead: Whether it does.
    """

    def __init__(self, loader: Loader, maker: InputMaker, *, looks_ahead: bool) -> None:
        self._maker = maker
        self.looks_ahead = looks_ahead
        self._loader = loader
        self._batches = iter(loader)
        self._ahead: _Sent | None = None

    def take(self) -> FedMicroBatch | None:
        """Return the next micro-batch; None at the end of the epoch."""
        self._maker.transfer.ask()
        found, self._ahead = self._ahead or self._send_next(), None
        if found is None:
            return None
        self._batches.count_fetched()
        return FedMicroBatch(inputs=self._maker.receive(found.sent), entry=found.entry)

    def look_ahead(self) -> None:
        """Send the next micro-batch, if that is worth it; call it when the step's work has been launched."""
        if self.looks_ahead and self._ahead is None:
            self._maker.transfer.ask()
            self._ahead = self._send_next()
            self._maker.transfer.got()

    def apply_pending(self) -> bool:
        """Let changes of the loader's settings act that wait for a boundary, see `Loader.apply_pending`.

        Call it between two steps. What was sent ahead stays, and is handed out next.
        """
        return self._loader.apply_pending()

    def drain(self) -> float:
        """Return the seconds waited for data since the last call, see `Transfer.drain`."""
        return self._maker.transfer.drain()

    def close(self) -> None:
        """End the loader's threads; what was sent ahead is forgotten."""
        self._ahead = None
        self._batches.close()

    def _send_next(self) -> _Sent | None:
        batch = self._batches.fetch()
        return None if batch is None else _Sent(self._maker.send(batch), _entry(batch))


def step_inputs(
    feed: MicroFeed, num_micro_batches: int, hooks: LoopHook | None = None
) -> Iterator[tuple[int, MicroInputs]]:
    """Yield number and inputs of a rank's micro-batches of one step, padding ones included.

    Args:
        feed: At the step's first micro-batch.
        num_micro_batches: Of this rank in the step; fewer come where the loader ends.
        hooks: Called around each.
    """
    hooks = hooks or LoopHook()
    for slot in range(num_micro_batches):
        hooks.on_data_wait()
        fed = feed.take()
        if fed is None:
            return
        hooks.on_micro_batch(fed.entry, is_last=slot == num_micro_batches - 1)
        yield fed.entry.micro, fed.inputs
    if feed.looks_ahead:
        # Whoever asks for one more has launched the last backward.
        hooks.on_look_ahead()
        feed.look_ahead()
        hooks.on_look_ahead_end()


def _entry(batch: Batch) -> LedgerMicroBatch:
    return LedgerMicroBatch(
        micro=batch.micro,
        keys=tuple(batch.keys),
        weights=tuple(batch.arrays["weight"].tolist()),
        components=tuple(batch.components) if "component" in batch.arrays else (),
    )
