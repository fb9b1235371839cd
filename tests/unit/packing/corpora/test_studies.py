"""Places of conversations in packed studies become pictures, or have a reason."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydicom import dcmread

import shardflow as sf
from shardflow.errors import ConfigError
from shardflow.format import Dataset
from shardflow.packing.corpora.config import (
    ConversationsConfig,
    CorpusSplitsConfig,
    FieldsConfig,
    LineError,
    LineReason,
    StudiesConfig,
)
from shardflow.packing.corpora.content import ContentMaker
from shardflow.packing.corpora.studies import check_splits_of
from tests.dicom_factory import make_study
from tests.pack_case import PackCase
from tests.unit.packing.corpora.test_mapping import KEY, make_config

NUM_SLICES = 6
RANGE = [-150.0, 250.0]


def volume(number: int) -> NDArray[np.int16]:
    return np.random.default_rng(number).integers(-1000, 1000, (NUM_SLICES, 9, 7)).astype(np.int16)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Studies with a volume, a radiograph in color, two regions and a finding."""
    folder = tmp_path_factory.mktemp("studies") / "packed"
    slices = [
        {"slice": 1, "box_px": [1.0, 2.0, 3.0, 4.0]},
        {"slice": 4, "box_px": [1.5, 1.0, 5.2, 6.0]},
    ]
    with sf.ShardWriter(folder) as writer:
        for number in range(4):
            sample = {
                "__key__": f"study{number}",
                "s000.b2nd": volume(number),
                "s001.b2nd": np.full((1, 4, 5, 3), (10, 20, 30), np.uint8),
                "study.json": {
                    "series": [
                        {"modality": "CT", "unit": "HU", "display_range": RANGE},
                        {"modality": "XC", "unit": None, "display_range": None},
                    ]
                },
                "annotations.json": {
                    "format_version": 1,
                    "rois": [{"roi": 3, "series": 0, "slices": slices}],
                },
                "alignment.json": {
                    "format_version": 1,
                    "entities": [{"entity": 2, "series": 0, "slices": [2, 3, 5], "weights": [0.2, 1.0, 0.6]}],
                },
            }
            writer.write(sample, split="val" if number == 3 else "train")
    return folder


def pack(dataset: Path | None, *places: dict[str, Any], **settings: Any) -> tuple[str, dict[str, bytes]]:
    """Pack a conversation about places; return its split and its members."""
    studies = None if dataset is None else StudiesConfig(dataset=dataset, **settings)
    maker = ContentMaker(
        make_config(
            fields=FieldsConfig(kind="conversations"),
            conversations=ConversationsConfig(studies=studies),
            splits=CorpusSplitsConfig(parts={"train": 1, "val": 0}),
        ),
        KEY,
    )
    asked = [*({"type": "image", **place} for place in places), {"type": "text", "text": "Effusion?"}]
    line = {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "No."}]}
    record = maker.read(line)
    return maker.identify(line, record, "file", 0).split, dict(maker.fields(line, record))


def pixels(members: dict[str, bytes]) -> list[NDArray[Any]]:
    names = [name for name in members if name.startswith("image.")]
    return [np.asarray(Image.open(io.BytesIO(members[name]))) for name in names]


def shown(plane: NDArray[Any], low: float, high: float) -> NDArray[np.float64]:
    return np.clip((plane.astype(np.float64) - low) / (high - low), 0, 1) * 255


def test_slices_are_shown_in_their_display_range(dataset: Path) -> None:
    split, members = pack(dataset, {"study": "study1", "slices": [2, 4]}, {"study": "study1", "series": 1})
    assert split == "train"
    about = json.loads(members["conversation.json"])
    assert [part.get("image") for part in about["messages"][0]["content"]] == [0, 1, 2, None]
    shape = {"rows": 9, "columns": 7, "unit": "HU", "window": RANGE}
    assert about["images"] == [
        {"member": "image.000.png", **shape},
        {"member": "image.001.png", **shape},
        {"member": "image.002.png", "rows": 4, "columns": 5},
    ]
    first, second, color = pixels(members)
    assert np.abs(first - shown(volume(1)[2], *RANGE)).max() <= 1
    assert np.abs(second - shown(volume(1)[3], *RANGE)).max() <= 1
    assert (color == (10, 20, 30)).all()


def test_windows_regions_findings_and_numbers_of_slices(dataset: Path) -> None:
    for window, (low, high) in (("lung", (-1350, 150)), ([40, 80], (0, 80))):
        (plane,) = pixels(pack(dataset, {"study": "study0", "slices": [0, 1], "window": window})[1])
        assert np.abs(plane - shown(volume(0)[0], low, high)).max() <= 1
    # The slice where the region is largest, cut to the pixels that its box touches.
    (plane,) = pixels(pack(dataset, {"study": "study0", "region": 3})[1])
    assert np.abs(plane - shown(volume(0)[4, 1:6, 1:6], *RANGE)).max() <= 1
    both = pixels(pack(dataset, {"study": "study0", "region": 3, "slices": 2})[1])
    assert np.abs(both[0] - shown(volume(0)[1, 1:6, 1:6], *RANGE)).max() <= 1
    (plane,) = pixels(pack(dataset, {"study": "study0", "finding": 2})[1])
    assert np.abs(plane - shown(volume(0)[3], *RANGE)).max() <= 1
    best = pixels(pack(dataset, {"study": "study0", "finding": 2, "slices": 2})[1])
    assert np.abs(best[1] - shown(volume(0)[5], *RANGE)).max() <= 1
    assert len(pixels(pack(dataset, {"study": "study0", "slices": 3})[1])) == 3


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([{"study": "study9", "slices": 1}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0"}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0", "series": 2, "slices": 1}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0", "slices": [4, 10**12]}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0", "region": 1}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0", "finding": 0}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0", "finding": 2, "series": 1}], LineReason.UNKNOWN_STUDY),
        ([{"study": "study0", "slices": [2, 1]}], LineReason.WRONG_TYPE),
        ([{"study": "study0", "slices": 0}], LineReason.WRONG_TYPE),
        ([{"study": "study0", "slices": 1, "window": "OKONKWO"}], LineReason.WRONG_TYPE),
        ([{"study": "study0", "slices": 1, "window": [40, 0]}], LineReason.WRONG_TYPE),
        ([{"study": True}], LineReason.WRONG_TYPE),
        ([{"study": "study0", "slices": 1}, {"study": "study3", "slices": 1}], LineReason.SPLITS_DIFFER),
    ],
)
def test_what_the_studies_do_not_have_has_a_reason(
    dataset: Path, places: list[dict[str, Any]], expected: LineReason
) -> None:
    with pytest.raises(LineError) as caught:
        pack(dataset, *places)
    assert caught.value.reason is expected


def test_without_a_dataset_no_study_is_known() -> None:
    with pytest.raises(LineError, match="UNKNOWN_STUDY"):
        pack(None, {"study": "study0", "slices": 1})


def test_conversations_go_where_their_studies_are(dataset: Path) -> None:
    assert pack(dataset, {"study": "study3", "slices": 1})[0] == "val"
    check_splits_of(Dataset.open(dataset), {"train": 1, "val": 0})
    with pytest.raises(ConfigError, match=r"splits\.parts has no val"):
        check_splits_of(Dataset.open(dataset), {"train": 1, "test": 1})


def test_identifiers_of_the_source_name_studies_and_images(tmp_path: Path) -> None:
    case = PackCase(tmp_path)
    case.prepare()
    made = [make_study(case.dicom / f"{n}", patient=f"P{n}", num_slices=3, seed=n) for n in range(3)]
    case.pack("splits={train = 1}")
    for study in made:
        by_study = {"study": study.study_instance_uid, "slices": [1, 2], "window": [40, 400]}
        settings = {"on": "study_instance_uid", "private_dir": case.private}
        (found,) = pixels(pack(case.output, by_study, **settings)[1])
        assert np.abs(found - shown(study.modality_units[1], -160, 240)).max() <= 1
        for place, path in enumerate(study.files):
            by_image = {"study": str(dcmread(path).SOPInstanceUID), "window": "soft"}
            settings["on"] = "sop_instance_uid"
            (found,) = pixels(pack(case.output, by_image, **settings)[1])
            assert np.abs(found - shown(study.modality_units[place], -160, 240)).max() <= 1
    with pytest.raises(ConfigError, match="private folder"):
        pack(case.output, {"study": "1"}, on="study_instance_uid")
