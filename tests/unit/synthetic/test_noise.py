"""Noise is the same in every version, and has the shape it claims."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from shardflow.synthetic.draws import Kernel, bell_noise, filtered_noise, hashed_bits

pytestmark = pytest.mark.fast


def test_the_hash_is_splitmix64() -> None:
    # The published first outputs of SplitMix64 with seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert hashed_bits(1234567, 4).tolist() == expected


def test_noise_is_frozen(golden: Callable[[str, object], None]) -> None:
    digests = {
        kernel: hashlib.sha256(
            np.round(filtered_noise(99, 37, 41, kernel, 100.0) * 1000).astype("<i4").tobytes()
        ).hexdigest()
        for kernel in ("smooth", "standard", "sharp")
    }
    golden("synthetic-noise", {"bell": bell_noise(99, 3, 5).tolist(), **digests})


@pytest.mark.parametrize("kernel", ["smooth", "standard", "sharp"])
def test_the_deviation_is_the_one_asked_for(kernel: Kernel) -> None:
    noise = filtered_noise(5, 400, 300, kernel, 20.0)
    assert noise.dtype == np.float32
    assert noise.shape == (400, 300)
    assert noise.std() == pytest.approx(20.0, rel=0.02)
    assert abs(noise.mean()) < 0.5


def test_kernels_shape_the_neighbourhood() -> None:
    def neighbours(kernel: Kernel) -> float:
        noise = filtered_noise(6, 300, 300, kernel, 1.0)
        return float((noise[:, 1:] * noise[:, :-1]).mean())

    assert neighbours("smooth") > 0.5
    assert abs(neighbours("standard")) < 0.02
    assert neighbours("sharp") < -0.05


def test_odd_numbers_of_pixels_are_filled() -> None:
    assert bell_noise(1, 3, 3).shape == (3, 3)
    assert np.array_equal(bell_noise(1, 3, 3).ravel(), bell_noise(1, 1, 10).ravel()[:9])
    assert not np.array_equal(bell_noise(1, 8, 8), bell_noise(2, 8, 8))
