"""Some micro-batches of one epoch, in order, as an iterator that cleans up after itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

from shardflow.errors import StateError
from shardflow.loading.assemble import BatchSource, MicroBatchTicket
from shardflow.loading.batch import Batch
from shardflow.loading.engine import OrderedEngine

__all__ = ["BatchStream"]


class BatchStream(Iterator[Batch]):
    """Yields micro-batches.

    Its threads run from the first one until the last, an error, or the end of the stream's life.

    Args:
        source: What the micro-batches are made from.
        numbers: Which of the rank's micro-batches of the epoch, in the order to yield them.
    """

    def __init__(self, source: BatchSource, numbers: range) -> None:
        config = source.config
        self._num_left = len(numbers)
        self._engine: OrderedEngine[Batch] = OrderedEngine(
            partial(_open, source, numbers),
            len(numbers),
            num_threads=config.num_threads,
            max_bytes=config.prefetch_bytes,
            wait_timeout_s=config.wait_timeout_s,
            counters=source.counters,
        )
        # The threads know the engine and not the stream, so the stream dies with its last user, whether that
        # one finished, broke off or raised. At exit the same call ends threads before the interpreter goes
        # down.
        self._finalizer = weakref.finalize(self, self._engine.close)

    def __next__(self) -> Batch:
        """Return the next micro-batch.

        Raises:
            WaitTimeoutError: It did not come in time.
            SampleError: A sample is bad, and the loader is told to raise.
            StateError: The stream was closed, or ended with an error, before its last micro-batch.
            ShardflowError: A shard cannot be read, or the stream was begun in another process.
        """
        try:
            batch = self._engine.take()
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            if self._num_left:
                # StopIteration here would look like the end of the epoch.
                raise StateError(
                    f"an iteration must go on to its end, got {self._num_left} micro-batches left of one "
                    "that was closed or ended with an error; call iter() again."
                )
            raise StopIteration
        self._num_left -= 1
        return batch

    def close(self) -> None:
        """End the threads; the stream yields nothing more."""
        self._finalizer()


def _open(source: BatchSource, numbers: range, place: int) -> MicroBatchTicket:
    return source.open(numbers[place])
