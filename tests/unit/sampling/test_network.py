"""The mixed-radix network is a bijection, and no ties between its numbers can be seen."""

from __future__ import annotations

from math import sqrt

import numpy as np
import numpy.typing as npt
import pytest

from shardflow.sampling.permutation import MAX_SIZE, MixedRadixNetwork
from shardflow.seeds import derive


@pytest.mark.fast
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 12, 100, 4097, 8192, 8193, 99_999])
def test_bijection_on_its_rectangle(size: int) -> None:
    network = MixedRadixNetwork(size, key=3)
    domain = network.left * network.right
    assert size <= domain < size + sqrt(size) + 1
    numbers = np.arange(domain, dtype=np.uint64)
    mapped = numbers.copy()
    network.forward_array(mapped)
    assert np.array_equal(np.sort(mapped), numbers)


@pytest.mark.fast
@pytest.mark.parametrize("size", [5, 50, 4097, 10**6, 2**40, MAX_SIZE - 1, MAX_SIZE])
def test_array_and_integer_arithmetic_agree(size: int) -> None:
    """Two implementations: wrapping 64-bit words, and Python integers that cannot wrap."""
    network = MixedRadixNetwork(size, key=2**64 - 1)
    domain = network.left * network.right
    numbers = sorted({0, 1, domain // 3, domain // 2, domain - 2, domain - 1})
    mapped = np.array(numbers, np.uint64)
    network.forward_array(mapped)
    assert mapped.tolist() == [network.forward_int(number) for number in numbers]
    assert all(0 <= number < domain for number in mapped.tolist())
    assert len(set(mapped.tolist())) == len(numbers)


@pytest.mark.fast
def test_blocks_do_not_show() -> None:
    """An array is mapped in blocks of 8192; the cut must not matter, nor an empty array."""
    network = MixedRadixNetwork(10**7, key=1)
    numbers = np.arange(8192 * 2 + 5, dtype=np.uint64)
    whole = numbers.copy()
    network.forward_array(whole)
    for start, stop in ((0, 8192), (8191, 8193), (16384, 16389), (7, 7)):
        part = numbers[start:stop].copy()
        network.forward_array(part)
        assert np.array_equal(part, whole[start:stop])


def _deviation(counts: npt.NDArray[np.int64]) -> float:
    """Chi-square of counts that should be equal, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    return (chi_square - (counts.size - 1)) / sqrt(2 * (counts.size - 1))


@pytest.mark.parametrize("size", [25, 100])
def test_neighbouring_numbers_are_not_tied_over_the_keys(size: int) -> None:
    """Where two neighbours go, over many keys: every pair of places is as likely; four rounds fail this."""
    num_keys = 40_000
    joint = np.zeros((size, size), np.int64)
    differences = np.zeros(size, np.int64)
    for i in range(num_keys):
        network = MixedRadixNetwork(size, derive(11, "test", i))
        first, second = network.forward_int(0), network.forward_int(1)
        joint[first, second] += 1
        differences[(second - first) % size] += 1
    assert np.trace(joint) == 0
    assert abs(_deviation(joint[~np.eye(size, dtype=bool)])) < 4
    assert abs(_deviation(differences[1:])) < 4
