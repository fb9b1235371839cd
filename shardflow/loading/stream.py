"""Some micro-batches of one epoch, in order, as an iterator that cleans up after itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial

from shardflow.errors import StateError
from shardflow.fields.reader import FieldReader
from shardflow.loading.assemble import BatchSource, MicroBatchTicket
from shardflow.loading.batch import Batch
from shardflow.loading.config import LoaderConfig
from shardflow.loading.engine import OrderedEngine
from shardflow.loading.foresight import Watch

__all__ = ["BatchStream"]


class BatchStream(Iterator[Batch]):
    """Yields micro-batches.

    Its threads run from the first one until the last, an error, or the end of the stream's life.

    Args:
        source: What the micro-batches are made from.
        numbers: Which of the rank's micro-batches of the epoch, in the order to yield them.
        reader: What reads for the source.
    """

    def __init__(self, source: BatchSource, numbers: range, reader: FieldReader) -> None:
        config = source.config
        self._source, self._reader = source, reader
        self._num_left = len(numbers)
        self._engine: OrderedEngine[Batch] = OrderedEngine(
            partial(_open, source, numbers),
            len(numbers),
            num_threads=source.num_threads(config),
            max_bytes=config.prefetch_bytes,
            wait_timeout_s=config.wait_timeout_s,
            counters=source.counters,
        )
        # The threads know the engine and not the stream, so the stream dies with its last user, whether that
        # one finished, broke off or raised. At exit the same call ends threads before the interpreter goes
        # down.
        self._finalizer = weakref.finalize(self, _close, self._engine, source.watch)

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

    def change(self, config: LoaderConfig) -> None:
        """Go on with other threads and bounds; what is made stays as it is. May be called from anywhere."""
        self._engine.resize(num_threads=self._source.num_threads(config), max_bytes=config.prefetch_bytes)
        self._reader.read_bytes = config.read_bytes
        if self._source.watch is not None:
            self._source.watch.change()

    def start(self) -> None:
        """Begin before the first micro-batch is asked for."""
        self._engine.start()

    def describe_wait(self, timeout_s: float) -> str:
        """Say what the next micro-batch waits for."""
        return self._engine.describe_wait(timeout_s)

    def describe_activity(self) -> str:
        """Say which shard, tier and stage its threads are at, from any thread."""
        return self._engine.describe_activity()

    def close(self) -> None:
        """End the threads; the stream yields nothing more."""
        self._finalizer()


def _close(engine: OrderedEngine[Batch], watch: Watch | None) -> None:
    if watch is not None:
        watch.close()
    engine.close()


def _open(source: BatchSource, numbers: range, place: int) -> MicroBatchTicket:
    return source.open(numbers[place])
