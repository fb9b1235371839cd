"""Threads that fetch what the plan reads next: some keep the store busy, others publish what has come.

Checking and writing a study takes as long as many a request for the next one would need to begin. So a thread
that reads hands its bytes over and asks for more at once, and the link is idle only where the bound on bytes
is reached: requests under way, blocks that wait to be published, and blocks that the loader has yet to come
to, all together.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from shardflow.errors import ShardflowError
from shardflow.fields.scratch import ThreadState
from shardflow.loading.reads_ahead import ReadsAhead, ShardRead
from shardflow.telemetry import StageCounters
from shardflow.threads import wait_for_at_exit

__all__ = ["FetchingAhead"]

_LOGGER = logging.getLogger(__name__)

# Most of publishing is the kernel's work, and two are ahead of any link that one process fills.
_NUM_PUBLISHERS: Final = 2


class FetchingAhead:
    """Carries out the wishes of a `ReadsAhead`, in its order, until told to stop. Safe for many threads.

    Args:
        wishes: What to fetch.
        next_number: First micro-batch that the loader has not come to.
        num_threads: Threads that read.
        max_bytes: Bound on bytes under way and ahead of the loader; one read alone may exceed it.
        counters: Gets the gauge ``fetching_bytes``, seen as each read begins: bytes asked for or not yet
            published; and ``ahead_batches``, seen as the loader comes to a micro-batch: those after it of
            which something is there.
    """

    def __init__(
        self,
        wishes: ReadsAhead,
        *,
        next_number: int,
        num_threads: int,
        max_bytes: int,
        counters: StageCounters,
    ) -> None:
        self._wishes, self._next, self._max_bytes, self._counters = wishes, next_number, max_bytes, counters
        self._changed = threading.Condition()
        # By the place of the micro-batch: a wish that was passed counts until its bytes are published.
        self._under_way: Counter[int] = Counter()
        self._ahead: Counter[int] = Counter()
        self._waiting: list[int] = []
        self._landed: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._is_closed = False
        self._num_wanted, self._num_started = num_threads, 0
        self._readers: set[threading.Thread] = set()
        self._threads: list[threading.Thread] = []
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the threads."""
        with self._starting:
            self._start_readers()
            for _ in range(_NUM_PUBLISHERS):
                self._start(self._new_thread(self._publish_all))

    def resize(self, *, num_threads: int, max_bytes: int) -> None:
        """Change how many threads read, and the bound; one too many ends its wish first."""
        with self._starting:
            with self._changed:
                self._num_wanted, self._max_bytes = num_threads, max_bytes
                self._changed.notify_all()
            if not self._is_closed:
                self._start_readers()

    def passed(self, number: int) -> None:
        """Say that the loader has come to a micro-batch."""
        with self._changed:
            self._next = max(self._next, number + 1)
            for place in [place for place in self._ahead if place < self._next]:
                del self._ahead[place]
            self._counters.observe("ahead_batches", len(self._ahead))
            self._changed.notify_all()

    def close(self) -> None:
        """Tell the threads to end; what is under way is published all the same: others may wait for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that may still run."""
        return self._threads

    # ---- inside ----------------------------------------------------------------------------------

    def _start_readers(self) -> None:
        """Start those that are missing; under the lock of starting, for which no thread of ours waits."""
        # Counted once: where nothing is left to wish for, each of them ends as soon as it has started.
        for _ in range(self._num_wanted - len(self._readers)):
            thread = self._new_thread(self._read_all)
            with self._changed:
                self._readers.add(thread)
            self._start(thread)

    def _new_thread(self, target: Callable[[], None]) -> threading.Thread:
        self._num_started += 1
        name = f"shardflow-ahead-{self._num_started - 1}"
        return wait_for_at_exit(threading.Thread(target=target, name=name, daemon=True))

    def _start(self, thread: threading.Thread) -> None:
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _read_all(self) -> None:
        thread = ThreadState()
        try:
            while self._is_wanted() and (wish := self._wishes.take(self._next)) is not None:
                place, epoch, number, rows = wish
                for read in self._wishes.reads(epoch, number, rows, thread):
                    num_bytes = read.num_bytes
                    if self._reserve(place, num_bytes):
                        self._read(read, place, num_bytes)
        except (ShardflowError, OSError) as error:
            # The loader's own read meets the same fault, with its retries, deadline and place.
            _LOGGER.debug("reading ahead ended: %s", type(error).__name__)
        finally:
            with self._changed:
                self._readers.discard(threading.current_thread())

    def _is_wanted(self) -> bool:
        """Tell a reader whether to go on; one that is not to is no reader any more."""
        if len(self._readers) > self._num_wanted:  # without the lock, for there is mostly nothing to it
            with self._changed:
                if len(self._readers) > self._num_wanted:
                    self._readers.discard(threading.current_thread())
                    return False
        return not self._is_closed

    def _reserve(self, place: int, num_bytes: int) -> bool:
        """Wait for room; False where the loader was faster, or the stream is closed."""
        with self._changed:
            self._waiting.append(place)
            # What is needed first goes first, whichever thread wakes up first.
            self._changed.wait_for(
                lambda: self._is_settled(place) or (place == min(self._waiting) and self._has_room(num_bytes))
            )
            self._waiting.remove(place)
            self._changed.notify_all()
            if self._is_settled(place):
                return False
            self._under_way[place] += num_bytes
            self._counters.observe("fetching_bytes", self._under_way.total())
            return True

    def _is_settled(self, place: int) -> bool:
        return self._is_closed or place < self._next

    def _has_room(self, num_bytes: int) -> bool:
        held = self._under_way.total() + self._ahead.total()
        return not held or held + num_bytes <= self._max_bytes

    def _read(self, read: ShardRead, place: int, num_bytes: int) -> None:
        publish = None
        try:
            publish = read.run()
        finally:
            if publish is None:  # all of it is kept, or it failed
                self._done(place, num_bytes)
        if publish is None:
            return
        with self._changed:
            if not self._is_closed:
                self._landed.append((place, num_bytes, publish))
                self._changed.notify_all()
                return
        # The publishers may have ended.
        self._publish(place, num_bytes, publish)

    def _publish_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._landed or self._is_closed)
                if not self._landed:
                    return
                landed = self._landed.popleft()
            self._publish(*landed)
            # The name must not keep the bytes while this thread waits for others.
            del landed

    def _publish(self, place: int, num_bytes: int, publish: Callable[[], None]) -> None:
        try:
            publish()
        except (ShardflowError, OSError) as error:
            _LOGGER.debug("a block was not published: %s", type(error).__name__)
        finally:
            self._done(place, num_bytes)

    def _done(self, place: int, num_bytes: int) -> None:
        with self._changed:
            self._under_way[place] -= num_bytes
            if not self._under_way[place]:
                del self._under_way[place]
            if place >= self._next:
                self._ahead[place] += num_bytes
            self._changed.notify_all()
