"""Descriptions as scanners and people write them, and the class of each."""

from __future__ import annotations

import pytest

from shardflow.packing.deid.allowlist import allow_technical, description_class

_CT = {
    "non_contrast": "Thorax native 1.0|CT W/O CONTRAST|CHEST WITHOUT CONTRAST|SANS INJECTION|Ohne KM"
    "|2.0 pre contrast|NONCON|平扫",
    "arterial": "Arterial Phase  1.0  B20f|Late arterial|Abdomen arteriell 2mm"
    "|phase artérielle|动脉期 1.25mm|ART",
    "portal_venous": "ABD/PEL PortalVenous 3.0|AX 5mm PV|70s portal|门静脉期|portal-venös",
    "venous": "C+ Venous Phase|venös 3.0|静脉期",
    "nephrographic": "Nephrographic phase",
    "excretory": "Urographic 5.0|Excretory",
    "delayed": "Delayed 5 min|Spätphase|Phase tardive|延迟期",
    "localizer": "LATERAL Scout|Topogram  0.6  T20s",
    "mip": "COR MIP|Thick MIPs",
    "volume_rendering": "3D VR|VRT",
    "perfusion": "Perfusion CBF|Tmax",
    "angiography": "CTA HEAD",
    "subtraction": "DSA",
    "attenuation_map": "CTAC 3.75 Thick|CT_AC",
    "": "Art+Ven 1.0 B30f|LUNG 1.25|Chest w/o|Early Arterial / Portal|Dr. Doe late visit arterial|LATERALIS"
    "|W/WO CONTRAST|WITH AND WITHOUT CONTRAST|W & W/O CONTRAST|WB SKELETAL SURVEY"
    "|Metal Art. Red.|sub mm lung",
}
_MR = {
    "t1": "AX T1 FLAIR|t1_mprage_sag|3D_BRAVO|T1W_TFE|T1 POST GAD",
    "t2": "T2W_TSE|t2_tse_tra",
    "t2_star": "T2*_GRE|AX GRE|T2 star|Ax T2*",
    "pd": "pd_tse_fs",
    "flair": "ax_T2_FLAIR fs|AX T2FLAIR|t2_tirm_tra_dark-fluid",
    "stir": "STIR cor",
    "dwi": "ep2d_diff_TRACEW|DTI 64 dir|Ax DWI",
    "adc": "ep2d_diff_3scan_trace_ADC|eADC",
    "swi": "Ax SWI",
    "angiography": "TOF 3D",
    "localizer": "localizer",
    "attenuation_map": "MRAC",
    "": "field map|Sagittal",
}
_PET = {
    "attenuation_corrected": "[WB_CTAC] Body|PET AC 3D|PET WB (AC)|Attn Corrected",
    "not_attenuation_corrected": "WB uncorrected NAC|No AC|PET NAC|non-attenuation corrected"
    "|PET WB not corrected|NON-CORRECTED|WB w/o AC|WB ohne AC",
    "": "WB 3D|ACCESSORY|Decay corrected",
}


@pytest.mark.parametrize(
    ("modality", "expected", "description"),
    [
        (modality, expected or None, one)
        for modality, classes in (("CT", _CT), ("MR", _MR), ("PT", _PET))
        for expected, descriptions in classes.items()
        for one in descriptions.split("|")
    ],
)
def test_a_description_has_the_class_of_its_words(
    modality: str, expected: str | None, description: str
) -> None:
    assert description_class(modality, description) == expected
    assert description_class(modality, description.upper()) == expected
    assert description_class("CR", description) is None


def test_no_word_of_a_description_leaves() -> None:
    found = allow_technical({"Modality": ("CT",), "SeriesDescription": ("Doe^Jane 1954 arterial",)})
    assert found == {"modality": "CT", "description_class": "arterial"}
    assert allow_technical({"Modality": ("CT",), "SeriesDescription": ("Doe^Jane",)}) == {"modality": "CT"}
    assert allow_technical({"SeriesDescription": ("arterial",)}) == {}


def test_corrections_of_a_pet_are_words_of_a_closed_list() -> None:
    found = allow_technical({"CorrectedImage": ("DECY", "attn", "Doe")})
    assert found == {"corrected_image": ["DECY", "ATTN"]}
