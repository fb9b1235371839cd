"""What each tissue looks like: Hounsfield units in four contrast phases, signal in seven MR weightings.

The numbers are round textbook values for a phantom that looks right, not measurements. Radiographs use the CT
column without contrast: attenuation relative to water is ``1 + HU / 1000``.
"""

from __future__ import annotations

__all__ = ["CT_PHASES", "LESION_CONTRASTS", "MR_WEIGHTINGS", "TISSUES", "attenuation", "contrast_index"]

CT_PHASES = ("native", "arterial", "portal", "delayed")
MR_WEIGHTINGS = ("t1", "t2", "flair", "dwi-b0", "dwi-b1000", "t1-contrast")
_CONTRASTS = CT_PHASES + MR_WEIGHTINGS

_Row = tuple[float, float, float, float, float, float, float, float, float, float]

TISSUES: dict[str, _Row] = {
    #              native arterial portal delayed  t1   t2   flair b0  b1000  t1c
    "air": (-1000, -1000, -1000, -1000, 2, 2, 2, 2, 1, 2),
    "bile": (6, 6, 7, 8, 230, 960, 300, 700, 60, 230),
    "blood": (42, 310, 165, 110, 60, 50, 60, 60, 10, 520),
    "bowel": (32, 45, 70, 60, 300, 380, 300, 300, 60, 420),
    "brain-gray": (38, 40, 44, 43, 480, 600, 590, 480, 210, 500),
    "brain-white": (29, 30, 34, 33, 620, 440, 450, 380, 190, 635),
    "cartilage": (70, 72, 78, 78, 260, 180, 200, 150, 30, 280),
    "cord": (38, 38, 40, 40, 480, 360, 380, 300, 160, 490),
    "cortical-bone": (950, 950, 950, 950, 15, 15, 15, 10, 5, 15),
    "csf": (8, 8, 8, 8, 140, 1000, 80, 900, 40, 140),
    "disc": (85, 85, 88, 88, 330, 560, 420, 350, 60, 340),
    "fat": (-100, -100, -98, -98, 920, 640, 560, 60, 20, 920),
    "gland": (15, 20, 25, 25, 420, 450, 350, 200, 40, 500),
    "heart": (44, 225, 150, 108, 260, 210, 240, 200, 40, 430),
    "kidney": (34, 145, 178, 150, 330, 540, 420, 500, 190, 640),
    "liver": (58, 72, 114, 92, 480, 270, 300, 260, 70, 640),
    "lung": (-860, -858, -855, -856, 14, 18, 15, 12, 3, 16),
    "lung-border": (-430, -430, -430, -430, 300, 200, 200, 60, 15, 320),
    "mediastinum": (-10, 0, 15, 10, 640, 420, 400, 120, 30, 660),
    "meninges": (55, 70, 88, 85, 380, 320, 340, 260, 80, 820),
    "muscle": (55, 58, 66, 64, 320, 170, 210, 150, 40, 380),
    "pancreas": (42, 112, 92, 76, 520, 310, 330, 280, 80, 640),
    "rib": (430, 430, 430, 430, 300, 200, 180, 60, 15, 310),
    "skin": (10, 12, 18, 18, 380, 260, 260, 90, 20, 420),
    "spleen": (48, 122, 120, 98, 330, 470, 420, 480, 230, 600),
    "spongy-bone": (190, 192, 198, 196, 560, 360, 340, 130, 30, 590),
    "table-top": (40, 40, 40, 40, 2, 2, 2, 2, 1, 2),
    "table": (-740, -740, -740, -740, 2, 2, 2, 2, 1, 2),
    "water": (6, 6, 6, 6, 150, 1000, 120, 880, 30, 150),
}
"""Value of every tissue in every contrast, in the order of `CT_PHASES` and then `MR_WEIGHTINGS`."""

LESION_CONTRASTS: dict[str, _Row] = {
    "brain metastasis": (33, 44, 66, 62, 380, 720, 820, 560, 330, 900),
    "calcified granuloma": (380, 380, 380, 380, 60, 50, 60, 40, 10, 60),
    "ground-glass nodule": (-610, -600, -595, -598, 90, 120, 110, 80, 20, 100),
    "hepatic cyst": (5, 5, 6, 6, 150, 990, 300, 760, 40, 150),
    "hepatic hemangioma": (38, 150, 142, 128, 330, 760, 600, 620, 200, 800),
    "hepatic metastasis": (38, 50, 66, 72, 310, 460, 480, 480, 330, 420),
    "intracranial hemorrhage": (70, 70, 71, 71, 700, 240, 640, 200, 260, 700),
    "lacunar infarct": (16, 16, 17, 17, 230, 880, 260, 780, 60, 230),
    "lytic bone lesion": (35, 60, 72, 70, 250, 560, 520, 420, 300, 620),
    "meningioma": (52, 90, 118, 112, 430, 640, 690, 500, 280, 960),
    "pulmonary nodule": (42, 60, 72, 70, 320, 380, 360, 300, 180, 480),
    "renal calculus": (620, 620, 620, 620, 20, 15, 20, 10, 5, 20),
    "renal cyst": (7, 7, 8, 8, 150, 1000, 160, 820, 40, 150),
    "sclerotic bone lesion": (760, 760, 760, 760, 60, 60, 70, 40, 20, 90),
    "splenic cyst": (8, 8, 9, 9, 150, 980, 200, 780, 40, 150),
    "white matter lesion": (21, 21, 23, 23, 430, 840, 900, 620, 300, 450),
}
"""The same for each kind of lesion."""


def contrast_index(contrast: str) -> int:
    """Return the column of a phase or weighting."""
    return _CONTRASTS.index(contrast)


def attenuation(tissue_hu: float) -> float:
    """Return the attenuation relative to water."""
    return max(0.0, 1 + tissue_hu / 1000)
