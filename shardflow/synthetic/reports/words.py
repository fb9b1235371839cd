"""What generated reports are made of: names of findings, places and sentences around them."""

from __future__ import annotations

from shardflow.synthetic.draws import Draws
from shardflow.synthetic.lesions import Lesion
from shardflow.synthetic.patients import Region

__all__ = [
    "ABSENT_FINDINGS",
    "HISTORIES",
    "NORMAL_SENTENCES",
    "SYNONYMS",
    "indefinite",
    "place_of",
    "place_words",
]

SYNONYMS: dict[str, tuple[str, ...]] = {
    "brain metastasis": ("metastasis", "brain metastasis", "metastatic lesion"),
    "calcified granuloma": ("calcified granuloma", "calcified nodule"),
    "ground-glass nodule": ("ground-glass nodule", "ground glass nodule", "GGN"),
    "hepatic cyst": ("cyst", "hepatic cyst", "simple cyst"),
    "hepatic hemangioma": ("hemangioma", "hepatic hemangioma"),
    "hepatic metastasis": ("metastasis", "hepatic metastasis", "hypodense metastatic lesion"),
    "intracranial hemorrhage": ("intraparenchymal hemorrhage", "hemorrhage", "hematoma"),
    "lacunar infarct": ("lacunar infarct", "old lacune"),
    "lytic bone lesion": ("lytic lesion", "lytic bone lesion"),
    "meningioma": ("meningioma",),
    "pulmonary nodule": ("nodule", "pulmonary nodule", "solid nodule", "lung nodule"),
    "renal calculus": ("calculus", "renal stone", "renal calculus", "nonobstructing stone"),
    "renal cyst": ("cyst", "renal cyst", "simple cyst"),
    "sclerotic bone lesion": ("sclerotic lesion", "sclerotic focus", "bone island"),
    "splenic cyst": ("cyst", "splenic cyst"),
    "white matter lesion": ("white matter lesion", "white matter focus", "T2 hyperintense focus"),
}
"""How a lesion is called; the truth keeps the label."""

ABSENT_FINDINGS: dict[Region, tuple[str, ...]] = {
    "chest": (
        "pleural effusion",
        "pneumothorax",
        "consolidation",
        "pericardial effusion",
        "hilar lymphadenopathy",
        "pulmonary edema",
        "acute rib fracture",
    ),
    "abdomen": (
        "ascites",
        "free air",
        "bowel obstruction",
        "hydronephrosis",
        "biliary dilatation",
        "retroperitoneal lymphadenopathy",
        "acute pancreatitis",
    ),
    "head": (
        "midline shift",
        "hydrocephalus",
        "mass effect",
        "acute territorial infarct",
        "extra-axial fluid collection",
        "skull fracture",
    ),
    "spine": (
        "cord compression",
        "spinal canal stenosis",
        "compression fracture",
        "epidural collection",
        "marrow edema",
    ),
}
"""Findings that no generated patient has."""

HISTORIES: dict[Region, tuple[str, ...]] = {
    "chest": ("pneumonia", "asthma", "smoking", "right breast cancer"),
    "abdomen": ("cholecystectomy", "appendectomy", "colon cancer", "hypertension"),
    "head": ("stroke", "migraine", "seizures", "lung cancer"),
    "spine": ("low back pain", "lumbar fusion", "osteoporosis", "prostate cancer"),
}

NORMAL_SENTENCES: dict[Region, tuple[str, ...]] = {
    "chest": (
        "The heart is normal in size.",
        "The trachea and central airways are patent.",
        "The aorta is of normal caliber.",
        "The thyroid is unremarkable.",
    ),
    "abdomen": (
        "The gallbladder is unremarkable.",
        "The pancreas enhances normally.",
        "The adrenal glands are unremarkable.",
        "The bowel is of normal caliber.",
    ),
    "head": (
        "The ventricles and sulci are normal for age.",
        "The orbits are unremarkable.",
        "The mastoid air cells are clear.",
        "The basal cisterns are patent.",
    ),
    "spine": (
        "Vertebral body heights are maintained.",
        "Alignment is normal.",
        "The conus terminates at a normal level.",
        "The paraspinal soft tissues are unremarkable.",
    ),
}

_SHORT_PLACES = {
    "left lower lobe": "LLL",
    "left upper lobe": "LUL",
    "right lower lobe": "RLL",
    "right middle lobe": "RML",
    "right upper lobe": "RUL",
    "lower pole of the left kidney": "left lower pole",
    "lower pole of the right kidney": "right lower pole",
    "upper pole of the left kidney": "left upper pole",
    "upper pole of the right kidney": "right upper pole",
}
_SEGMENTS = {(-1, 1): "VIII", (-1, -1): "VI", (1, 1): "IVa", (1, -1): "IVb"}


def indefinite(phrase: str) -> str:
    """Put ``a`` or ``an`` in front."""
    vowels = phrase[0].lower() in "aeiou" or phrase.startswith(("8 ", "8.", "11 ", "18 ", "80 "))
    return f"{'an' if vowels else 'a'} {phrase}"


def place_of(lesion: Lesion) -> str:
    """Say where a lesion lies, without the article."""
    x, y, z = lesion.host_value
    if lesion.organ == "lung":
        return f"{lesion.side} {_lobe(lesion.side, y, z)}"
    if lesion.organ == "liver":
        return f"hepatic segment {_SEGMENTS[1 if x > 0 else -1, 1 if z > 0 else -1]}"
    if lesion.organ == "kidney":
        pole = "upper pole" if z > 0.3 else "lower pole" if z < -0.3 else "interpolar region"
        return f"{pole} of the {lesion.side} kidney"
    if lesion.organ == "vertebra":
        return f"{lesion.level} vertebral body"
    if lesion.organ == "brain":
        lobe = "frontal" if y < -0.3 else "occipital" if y > 0.55 else "parietal" if z > 0.1 else "temporal"
        return f"{lesion.side} {lobe} lobe"
    return "spleen"


def place_words(draws: Draws, lesion: Lesion) -> str:
    """Say the same in a drawn way."""
    place = place_of(lesion)
    if draws.chance(30):
        return _SHORT_PLACES.get(place, place)
    return place


def _lobe(side: str, y: float, z: float) -> str:
    """Name a lobe by height and depth within the lung."""
    if z > 0.25:
        return "upper lobe"
    if y < -0.1 and z > -0.5:
        return "middle lobe" if side == "right" else "upper lobe"
    return "lower lobe"
