"""How images may be turned, bent and brightened: what a modality allows, keyed draws, and NumPy that does it.

Packing makes stored variants with it, training draws for the device with it; neither torch nor pixels of a
dataset are known here.
"""

from shardflow.augmentation.allowance import ALLOWED, Allowance, names_a_side
from shardflow.augmentation.draws import Draw, Wanted, draw_sample, source_affine
from shardflow.augmentation.warp import Warp, change_intensity

__all__ = [
    "ALLOWED",
    "Allowance",
    "Draw",
    "Wanted",
    "Warp",
    "change_intensity",
    "draw_sample",
    "names_a_side",
    "source_affine",
]
