"""Runs in which exactly one thing is slow, drawn from a seed: what, how much, and on what samples.

All times follow from ``severity``: how many times as long a step takes as it would if it only computed.
Loading that takes ``severity`` times as long as computing makes the loop wait for ``1 - 1 / severity`` of the
step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.verdict.slowness import TRANSFORM, Slowness

__all__ = ["CAUSES", "RANK_CAUSES", "SAMPLE_SIZES", "Scenario", "draw"]

CAUSES: Final[dict[str, str]] = {
    "throttled store": "storage-bound",
    "slow codec": "decode-bound",
    "slow transform": "transform-bound",
    "tiny queue": "prefetch-starved",
    "busy trainer": "trainer-busy",
    "busy processors": "cpu-oversubscribed",
    "nothing": "compute-bound",
    "slow rank": "straggler",
    "slow collective": "exchange-bound",
    "nothing, two ranks": "compute-bound",
}
"""What is made slow, and the verdict on it."""
RANK_CAUSES: Final = ("slow rank", "slow collective", "nothing, two ranks")
"""Those of two ranks."""
SAMPLE_SIZES: Final[dict[str, tuple[int, tuple[int, int], str]]] = {
    "small": (24, (1, 4), "b2nd"),
    "middle": (64, (2, 5), "b2nd"),
    "large": (160, (1, 3), "png16"),
}
"""Rows and columns of slices, the half-open range of their number, and the codec, by name of the dataset."""

_SLICES: Final = 3
"""Most slices of a sample that a model sees."""
_BATCH_BYTES: Final = 65536
"""Of a micro-batch: the least that a buffer has."""
_MICRO_BATCHES: Final = 2
"""In one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One run."""

    seed: int
    cause: str
    severity: float
    samples: str
    """A key of `SAMPLE_SIZES`."""
    micro_batch_size: int
    num_threads: int
    settings: tuple[str, ...]
    """More settings of the run."""
    slowness: Slowness
    slow_rank: Slowness
    """That of rank 1, where there are two."""

    @property
    def expected(self) -> str:
        """The verdict."""
        return CAUSES[self.cause]


_Values = dict[str, float | int | bool]


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A scenario under way."""

    drawn: random.Random
    samples: str
    micro_batch_size: int
    num_threads: int
    severity: float
    step_s: float
    """Of computing in one step of a rank."""
    slow: _Values
    late: _Values
    settings: list[str]

    @property
    def step_samples(self) -> int:
        return _MICRO_BATCHES * self.micro_batch_size

    @property
    def loading_s(self) -> float:
        """What a sample may take of a thread for loading to take ``severity`` times as long as computing."""
        return self.severity * self.step_s * self.num_threads / self.step_samples


def draw(seed: int, cause: str) -> Scenario:
    """Draw a run in which this is slow."""
    drawn = random.Random(f"{seed} {cause}")
    step_s = drawn.uniform(0.04, 0.08)
    draft = _Draft(
        drawn=drawn,
        samples=drawn.choice(sorted(SAMPLE_SIZES)),
        micro_batch_size=drawn.choice((1, 2, 4)),
        num_threads=drawn.choice((1, 2, 3)),
        severity=drawn.uniform(2.0, 5.0),
        step_s=step_s,
        slow={"compute_s": step_s / _MICRO_BATCHES, "compute_works": drawn.random() < 0.3},
        late={},
        settings=[],
    )
    # A few micro-batches: what is made while the first step warms up must not last for the whole run.
    draft.settings.append(f"loader.prefetch_bytes={_BATCH_BYTES * 2 * (draft.num_threads + 1)}")
    _DRAWS[cause](draft)
    return Scenario(
        seed=seed,
        cause=cause,
        severity=draft.severity,
        samples=draft.samples,
        micro_batch_size=draft.micro_batch_size,
        num_threads=draft.num_threads,
        settings=tuple(draft.settings),
        slowness=Slowness(**draft.slow),  # type: ignore[arg-type]
        slow_rank=Slowness(**{**draft.slow, **draft.late}),  # type: ignore[arg-type]
    )


def _store(draft: _Draft) -> None:
    """A link that all threads share, or a latency of each read."""
    if draft.drawn.random() < 0.5:
        size, (fewest, most), _ = SAMPLE_SIZES[draft.samples]
        # Pixels are noise, so they take two bytes each, whatever the codec.
        sample_bytes = 2 * size * size * min(_SLICES, (fewest + most - 1) / 2)
        draft.slow["link_bytes_per_s"] = draft.step_samples * sample_bytes / (draft.severity * draft.step_s)
    else:
        draft.slow["read_s"] = draft.loading_s


def _codec(draft: _Draft) -> None:
    """Threads that wait may be many, as for a device that decodes; those that work need a processor each."""
    draft.slow["slice_works"] = works = draft.drawn.random() < 0.5
    if works:
        draft.num_threads = 1
        draft.slow["compute_works"] = False
    _, (fewest, most), _ = SAMPLE_SIZES[draft.samples]
    draft.slow["slice_s"] = draft.loading_s / min(_SLICES, (fewest + most - 1) / 2)


def _transform(draft: _Draft) -> None:
    draft.slow["sample_s"] = draft.loading_s
    draft.settings.append(f"data.transform={TRANSFORM}")


def _queue(draft: _Draft) -> None:
    """One sample of many takes long: threads would have the time for it if they might begin it early."""
    num_micro_batches = draft.drawn.randint(4, 8)
    compute_s = num_micro_batches * draft.step_s / _MICRO_BATCHES
    draft.slow["every"] = num_micro_batches * draft.micro_batch_size
    draft.slow["sample_s"] = draft.drawn.uniform(0.7, 0.9) * compute_s * draft.num_threads
    draft.settings.append(f"data.transform={TRANSFORM}")
    draft.settings.append(f"loader.prefetch_bytes={draft.drawn.choice((1, 4096))}")


def _trainer(draft: _Draft) -> None:
    draft.slow["python_s"] = (draft.severity - 1.0) * draft.step_s / _MICRO_BATCHES


def _processors(draft: _Draft) -> None:
    draft.slow |= {"num_burners": draft.drawn.randint(5, 8), "compute_works": True}


def _nothing(draft: _Draft) -> None:
    draft.slow["compute_s"] = draft.severity * draft.step_s / _MICRO_BATCHES


def _rank(draft: _Draft) -> None:
    draft.slow["compute_works"] = False
    # Of a step's two micro-batches each rank has one.
    draft.slow["compute_s"] = draft.step_s
    draft.late["late_s"] = (draft.severity - 1.0) * draft.step_s


def _collective(draft: _Draft) -> None:
    draft.slow |= {"compute_works": False, "compute_s": draft.step_s}
    draft.slow["exchange_s"] = (draft.severity - 1.0) * draft.step_s


def _nothing_of_ranks(draft: _Draft) -> None:
    draft.slow |= {"compute_works": False, "compute_s": draft.severity * draft.step_s}


_DRAWS: Final[dict[str, Callable[[_Draft], None]]] = dict(
    zip(
        CAUSES,
        (
            _store,
            _codec,
            _transform,
            _queue,
            _trainer,
            _processors,
            _nothing,
            _rank,
            _collective,
            _nothing_of_ranks,
        ),
        strict=True,
    )
)
