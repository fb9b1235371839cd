"""Cases of `test_transform_libraries` with torchvision, which runs them in a process of their own.

The wheel of torchvision that registries offer is built for torch with CUDA. Beside a torch without it, the
schemas of two operators, which no transform uses, are missing at its import; they are declared here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

try:
    from torchvision.transforms import v2
except RuntimeError:
    _LIBRARY: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        _LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from torchvision.transforms import v2

import torchvision

import shardflow as sf
from shardflow.errors import ConfigError
from tests.field_cases import make_case_dataset
from tests.integration.test_transform_libraries import SPECS, _check_matching, _images, _loader, _sample


def random_views() -> Any:
    return v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomVerticalFlip(0.5), v2.RandomCrop((9, 11))])


def test_image_mask_and_boxes_move_together() -> None:
    transform = sf.adapters.torchvision(random_views()).for_fields(SPECS)
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        found = transform(_sample(seed))
        assert found["image"].shape == (1, 9, 11)
        assert found["image"].dtype == np.uint8
        _check_matching(found)
        seen.add(found["image"].tobytes())
    assert len(seen) > 3


def test_pixels_of_16_bits_become_floats_and_lose_nothing() -> None:
    transform = sf.adapters.torchvision(v2.Compose([v2.CenterCrop((8, 8))])).for_fields(SPECS)
    sample = {**_sample(0), "pair": np.arange(2 * 12 * 16, dtype=np.uint16).reshape(2, 1, 12, 16) + 60_000}
    found = transform(sample)["pair"]
    assert found.dtype == np.float32
    assert np.array_equal(found, sample["pair"][:, :, 2:10, 4:12])


def test_a_bare_transform_is_wrapped_and_a_random_one_needs_worker_processes(tmp_path: Path) -> None:
    dataset = make_case_dataset(tmp_path / "a", num_samples=14)
    plain = _images(_loader(dataset, None))
    fixed = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.CenterCrop((8, 8))])
    with pytest.raises(ConfigError, match="execution='workers'"):
        _loader(dataset, random_views())
    # Drawn or not, it consumes the global generator, which the probe sees.
    with pytest.raises(ConfigError, match="execution='workers'"):
        _loader(dataset, fixed)
    for key, image in _images(_loader(dataset, v2.CenterCrop((8, 8)), num_threads=3)).items():
        assert np.array_equal(image, plain[key][:, 2:10, 4:12])
    name = "tests.integration.torchvision_cases:random_view"
    places = set()
    for key, image in _images(_loader(dataset, name, execution="workers", num_threads=1)).items():
        found = [
            (top, left)
            for top in range(4)
            for left in range(6)
            if np.array_equal(image, plain[key][:, top : top + 9, left : left + 11])
        ]
        assert len(found) == 1
        places.update(found)
    assert len(places) > 1


random_view = sf.adapters.torchvision(v2.Compose([v2.RandomCrop((9, 11))]))


def test_the_older_transforms_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"take the one of torchvision\.transforms\.v2"):
        sf.adapters.torchvision(torchvision.transforms.CenterCrop(3))
