"""U-Net for volumes, small and without anything that depends on the batch.

Source:
    Cicek et al., "3D U-Net", MICCAI 2016. As in nnU-Net (Isensee et al., 2021) norms are of instances, and
    strided convolutions stand in for pooling, transposed ones for interpolation: every kernel has a
    deterministic form on a GPU too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from shardflow.errors import ConfigError

_SLOPE = 0.01


class UNet3d(nn.Module):
    """U-Net of regions of any size: sides are padded to what the levels divide, and cut again.

    Args:
        num_channels: Channels of its input.
        num_outputs: Logits of each voxel.
        widths: Channels of each level, the first at full resolution.

    Raises:
        ConfigError: Widths are none.
    """

    def __init__(self, num_channels: int, num_outputs: int, widths: Sequence[int] = (16, 32, 64)) -> None:
        super().__init__()
        if not widths or min(widths) < 1:
            raise ConfigError(f"widths are numbers of channels, such as [16, 32, 64], got {widths!r}.")
        pairs = list(itertools.pairwise(widths))
        self.first = _block(num_channels, widths[0], stride=1)
        self.down = nn.ModuleList(_block(above, below, stride=2) for above, below in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose3d(below, above, 2, stride=2) for above, below in pairs)
        self.merge = nn.ModuleList(_block(2 * above, above, stride=1) for above, _ in pairs)
        self.last = nn.Conv3d(widths[0], num_outputs, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the logits of each voxel, ``(B, num_outputs, D, H, W)``.

        Args:
            image: ``(B, num_channels, D, H, W)``.
        """
        sides, multiple = image.shape[2:], 2 ** len(self.down)
        missing = [-side % multiple for side in sides]
        levels = [self.first(functional.pad(image, (0, missing[2], 0, missing[1], 0, missing[0])))]
        for down in self.down:
            levels.append(down(levels[-1]))
        found = levels.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            found = merge(torch.cat([levels.pop(), up(found)], dim=1))
        logits: torch.Tensor = self.last(found)
        return logits[:, :, : sides[0], : sides[1], : sides[2]]


def _block(num_inputs: int, width: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(*_layers(num_inputs, width, stride), *_layers(width, width, 1))


def _layers(num_inputs: int, width: int, stride: int) -> list[nn.Module]:
    # A group for each channel is an instance norm, which also takes regions of a single voxel.
    return [
        nn.Conv3d(num_inputs, width, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(width, width),
        nn.LeakyReLU(_SLOPE),
    ]
