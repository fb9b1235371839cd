"""Diffusion volumes of makers that write b-values into private elements: a stack for each b-value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pydicom.dataset import FileDataset

from shardflow.packing.header_rows import HeaderRow
from shardflow.packing.sources.dicom.headers import read_header
from shardflow.packing.sources.dicom.stacks import build_studies
from tests.dicom_factory import make_study

pytestmark = pytest.mark.fast

_B_VALUES = (0, 500, 1000)
_NUM_SLICES = 4


def _siemens(dataset: FileDataset, b_value: int) -> None:
    block = dataset.private_block(0x0019, "SIEMENS MR HEADER", create=True)
    block.add_new(0x0C, "IS", str(b_value))
    if b_value:
        block.add_new(0x0E, "FD", [0.6, 0.8, 0.0])


def _ge(dataset: FileDataset, b_value: int) -> None:
    acquisition = dataset.private_block(0x0019, "GEMS_ACQU_01", create=True)
    for element, value in zip((0xBB, 0xBC, 0xBD), ("0.6", "0.8", "0"), strict=True):
        acquisition.add_new(element, "DS", value)
    numbers = dataset.private_block(0x0043, "GEMS_PARM_01", create=True)
    numbers.add_new(0x39, "IS", [str(1_000_000_000 + b_value), "8", "0", "0"])


def _philips(dataset: FileDataset, b_value: int) -> None:
    block = dataset.private_block(0x2001, "Philips Imaging DD 001", create=True)
    block.add_new(0x03, "FL", float(b_value))
    directions = dataset.private_block(0x2005, "Philips MR Imaging DD 001", create=True)
    for element in (0xB0, 0xB1, 0xB2):
        directions.add_new(element, "FL", 0.5)


def _stacks(
    folder: Path, write: Callable[[FileDataset, int], None]
) -> tuple[list[tuple[int, tuple[str, ...]]], str]:
    """Pack four positions with three b-values; numbers rise by b-value within each position."""

    def change(dataset: FileDataset, index: int) -> None:
        position, repeat = divmod(index, len(_B_VALUES))
        dataset.ImagePositionPatient = [0.0, 0.0, 2.5 * position]
        # Numbers that fall at every second position: the order of numbers would mix the volumes.
        dataset.InstanceNumber = 3 * position + (repeat if position % 2 else 2 - repeat) + 1
        write(dataset, _B_VALUES[repeat])

    made = make_study(folder, modality="MR", num_slices=_NUM_SLICES * len(_B_VALUES), change=change)
    headers = [read_header(path, file_index=at) for at, path in enumerate(made.files)]
    assert not any(isinstance(header, Exception) for header in headers)
    (study,) = build_studies(headers).studies  # type: ignore[arg-type]
    stacks = [(len(stack.slices), stack.flags) for stack in study.stacks]
    rows = "".join(str(HeaderRow(0, "x", header).to_json()) for header in headers)  # type: ignore[arg-type]
    return stacks, rows


@pytest.mark.parametrize("write", [_siemens, _ge, _philips])
def test_each_b_value_is_a_stack(tmp_path: Path, write: Callable[[FileDataset, int], None]) -> None:
    stacks, _ = _stacks(tmp_path, write)
    assert [(count, "split_by_diffusion_b_value" in flags) for count, flags in stacks] == [
        (_NUM_SLICES, True)
    ] * len(_B_VALUES)


def test_an_element_of_an_unknown_block_is_not_read(tmp_path: Path) -> None:
    """What another maker keeps at the same place may be anything, a name as well."""

    def write(dataset: FileDataset, b_value: int) -> None:
        block = dataset.private_block(0x0019, "SOMEBODY ELSE", create=True)
        block.add_new(0x0C, "LO", f"DOE^JANE{b_value}")

    stacks, rows = _stacks(tmp_path, write)
    assert all("split_by_order" in flags for _, flags in stacks)
    assert "DOE" not in rows


def test_text_in_the_place_of_a_b_value_is_none(tmp_path: Path) -> None:
    def write(dataset: FileDataset, b_value: int) -> None:
        block = dataset.private_block(0x0019, "SIEMENS MR HEADER", create=True)
        block.add_new(0x0C, "LO", f"DOE^JANE{b_value}")
        block.add_new(0x0E, "FD", [np.nan] * 3)

    stacks, rows = _stacks(tmp_path, write)
    assert all("split_by_order" in flags for _, flags in stacks)
    assert "DOE" not in rows
