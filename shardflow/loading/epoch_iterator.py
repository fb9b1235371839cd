"""One iteration of a loader: counts what its consumer received, and ends when nobody wants it any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from shardflow.fields.quarantine import QuarantineRow
from shardflow.loading.batch import Batch

__all__ = ["EpochIterator", "Stream"]


class Stream(Protocol):
    """Micro-batches in order, made by threads or processes that `close` ends."""

    def __next__(self) -> Batch:
        """Return the next micro-batch."""

    def describe_activity(self) -> str:
        """Say which shard, tier and stage they wait for, from any thread; nothing where there is no wait."""

    def start(self) -> None:
        """Begin before the first one is asked for."""

    def close(self) -> None:
        """End what makes them."""


class EpochIterator(Iterator[Batch]):
    """An iteration. The loader knows it weakly: when its user drops it, its threads end.

    Args:
        stream: The micro-batches.
        numbers: Their numbers among the rank's micro-batches of the epoch.
        check_alive: Raises if the iteration is no longer the loader's newest.
        count: Counts a micro-batch as consumed: its epoch, its masked slots, its number.
    """

    def __init__(
        self,
        stream: Stream,
        numbers: range,
        check_alive: Callable[[EpochIterator], None],
        count: Callable[[int, list[QuarantineRow], int], None],
    ) -> None:
        self._stream = stream
        self._numbers = numbers
        self._check_alive = check_alive
        self._count = count
        self._num_fetched = 0
        self._has_failed = False
        # Of the micro-batches that were fetched and not counted: what counting needs, not their memory.
        self._uncounted: deque[tuple[int, list[QuarantineRow], int]] = deque()

    def __next__(self) -> Batch:
        """Return the next micro-batch and count it; raises what `fetch` and `count_fetched` raise."""
        batch = self.fetch()
        if batch is None:
            raise StopIteration
        self.count_fetched()
        return batch

    def fetch(self) -> Batch | None:
        """Return the next micro-batch without counting it as consumed, or None after the last one.

        For those who work ahead of their own steps, such as a copy to a device: the loader's position is
        where the steps are, so each micro-batch is counted, with `count_fetched`, when its step takes it.
        """
        if self._num_fetched == len(self._numbers):
            if not self._uncounted:
                self.close()
            return None
        self._check_alive(self)
        try:
            batch = next(self._stream)
        except BaseException:
            self._has_failed = True
            raise
        self._uncounted.append((batch.epoch, batch.quarantined, self._numbers[self._num_fetched]))
        self._num_fetched += 1
        return batch

    def count_fetched(self) -> None:
        """Count the oldest micro-batch that was fetched and not counted as consumed.

        Raises:
            SampleError: There are more bad samples than ``max_bad_samples`` allows.
            StateError: The iteration was retired.
        """
        self._check_alive(self)
        try:
            self._count(*self._uncounted.popleft())
        except BaseException:
            self.close()
            raise

    def hand_over(self, open_stream: Callable[[range], Stream]) -> bool:
        """Go on with another stream from the next micro-batch to fetch; call it between two of them.

        What the present one has made ahead is dropped. If the other cannot start, this one goes on.

        Args:
            open_stream: Makes a stream of the numbers that are left.

        Returns:
            Whether it does; there may be nothing left.
        """
        left = self._numbers[self._num_fetched :]
        if not left or self._has_failed:
            return False
        following = open_stream(left)
        following.start()
        present, self._stream = self._stream, following
        present.close()
        return True

    def describe_activity(self) -> str:
        """Say what its micro-batches wait for, from any thread."""
        return self._stream.describe_activity()

    def close(self) -> None:
        """End the iteration."""
        self._stream.close()
