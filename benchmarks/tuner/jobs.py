"""Four jobs that are bound by different things, each with a real loader and real work.

A step is four micro-batches of one study, as with accumulated gradients: some 60 to 100 ms. For each of them

- ``store``: the dataset lies behind a link with 60 ms to the first byte and is read ahead into a cache, in
  the first pass over it, when nothing is kept yet; the loop waits 10 ms, as for a device.
- ``decode``: CT studies of 40 slices, 512 x 512; the loop waits 5 ms.
- ``python``: the same studies; the loop is Python that never lets the interpreter go by itself.
- ``compute``: smaller studies; the loop does forward and backward of a network on all processors, which
  threads of the loader take from it.

The other three go through few studies many times in an epoch, so that it is longer than a measurement.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.stream.content import make_content
from shardflow.fields.types.pictures import Slices
from shardflow.loading import Loader, LoaderConfig, open_blend
from shardflow.sampling import BatchSpec
from shardflow.storage import CacheConfig
from tests.factories import make_dataset

__all__ = ["JOBS", "MICRO_BATCHES", "Job", "Settings", "make_data", "opened"]

Settings = dict[str, int | str]

MICRO_BATCHES: Final = 4
"""Of a step."""

_THREADS: Final = "loader.num_threads"
_EXECUTION: Final = "loader.execution"
_AHEAD: Final = "cache.read_ahead_threads"
_STORE_SAMPLES: Final = 1600
_STORE_SLICES: Final = 8
_STORE_SIZE: Final = 128


@dataclass(frozen=True, kw_only=True)
class Job:
    """What runs, and which settings are swept."""

    data: str
    repeat: int
    """Passes over the data that make an epoch."""
    image: Slices
    grid: tuple[tuple[str, tuple[int | str, ...]], ...]
    bad_start: Settings
    """The tuner's second start; its first one is the configuration's defaults."""
    make_step: Callable[[], Callable[[], None]]
    """Makes what is done with a micro-batch."""
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> list[Settings]:
        """All settings of the grid."""
        names = [name for name, _ in self.grid]
        return [dict(zip(names, values, strict=True)) for values in product(*(each for _, each in self.grid))]


def _waiting(seconds: float) -> Callable[[], Callable[[], None]]:
    return lambda: lambda: time.sleep(seconds)


def _python() -> Callable[[], None]:
    def count(num_rounds: int = 400_000) -> None:
        for number in range(num_rounds):
            number * number

    return count


def _network() -> Callable[[], None]:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1024))
    inputs = torch.randn(96, 1024)

    def train() -> None:
        model.zero_grad()
        torch.autograd.backward(model(inputs).square().mean())

    return train


_CT: Final = Slices(num_slices=40, size=(512, 512))
_EXECUTIONS: Final = ("threads", "process")

JOBS: Final[dict[str, Job]] = {
    "store": Job(
        data="store",
        repeat=1,
        image=Slices(num_slices=_STORE_SLICES, size=(_STORE_SIZE, _STORE_SIZE)),
        grid=((_THREADS, (1, 2, 4)), (_AHEAD, (1, 4, 8, 16, 32))),
        bad_start={_THREADS: 1, _AHEAD: 1},
        make_step=_waiting(0.01),
        cache={"max_bytes": 16 << 20, "min_free_bytes": 0, "read_ahead_bytes": 8 << 20},
    ),
    "decode": Job(
        data="ct/ours",
        repeat=16,
        image=_CT,
        grid=((_THREADS, (1, 2, 3, 4)), (_EXECUTION, _EXECUTIONS)),
        bad_start={_THREADS: 4, _EXECUTION: "process"},
        make_step=_waiting(0.005),
    ),
    "python": Job(
        data="ct/ours",
        repeat=16,
        image=_CT,
        grid=((_THREADS, (1, 2, 4)), (_EXECUTION, (*_EXECUTIONS, "workers"))),
        bad_start={_THREADS: 4, _EXECUTION: "threads"},
        make_step=_python,
    ),
    "compute": Job(
        data="ct/ours",
        repeat=16,
        image=Slices(num_slices=12, size=(512, 512)),
        grid=((_THREADS, (1, 2, 3, 4)), (_EXECUTION, _EXECUTIONS)),
        bad_start={_THREADS: 4, _EXECUTION: "threads"},
        make_step=_network,
    ),
}


def make_data(folder: Path) -> None:
    """Write what the jobs read: a few hundred megabytes."""
    make_content(folder / "ct", 32, with_png=False)
    shape = {"slices": _STORE_SLICES, "size": (_STORE_SIZE, _STORE_SIZE)}
    make_dataset(folder / "store", num_samples=_STORE_SAMPLES, samples_per_shard=40, facts=True, **shape)  # type: ignore[arg-type]


@contextmanager
def opened(job: Job, place: str, settings: Settings) -> Iterator[Loader]:
    """Open a job's loader with an empty cache, where it has one, and some settings."""
    with ExitStack() as stack:
        cache = None
        if job.cache:
            # What is under way when the loader closes is still published, by threads that end then.
            place_of_cache = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="shardflow-tuner-", ignore_cleanup_errors=True)
            )
            stack.callback(_wait_for_reads)
            cache = CacheConfig(directory=Path(place_of_cache), **job.cache)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shardflow-tuner-")))
        (folder / "blend.toml").write_text(f'[[component]]\ndataset = "{place}"\nrepeat = {job.repeat}\n')
        loader = Loader(
            open_blend(folder / "blend.toml", cache=cache),
            batch=BatchSpec(micro_batch_size=1, micro_batches_per_step=MICRO_BATCHES),
            seed=1,
            fields={"image": job.image},
            # Room for about eight micro-batches of CT: nobody lives on what was made long ago.
            config=LoaderConfig(prefetch_bytes=192 << 20),
        )
        stack.enter_context(loader)
        for name, value in settings.items():
            loader.tunables.set(name, value)
        yield loader


def _wait_for_reads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("shardflow-ahead"):
            thread.join(10)
