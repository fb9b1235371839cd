"""A batch becomes tensors: labels, weights, and no memory shared with the loader."""

from __future__ import annotations

import pytest
import torch

from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, LoaderConfig
from shardflow.sampling import BatchSpec
from shardflow.training.inputs import make_inputs
from shardflow.training.sequences import IGNORED_LABEL
from shardflow.training.text import ReportTokenizer
from tests.tiny_runs import NUM_VAL, TinyInput, tiny_fields


@pytest.fixture(scope="module")
def tokenizer(tiny: TinyInput) -> ReportTokenizer:
    return ReportTokenizer.load(tiny.tokenizer)


def batches(tiny: TinyInput) -> list[Batch]:
    loader = Loader(
        Dataset.open(tiny.dataset),
        split="val",
        batch=BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask"),
        seed=1,
        fields=tiny_fields(dtype=None),
    )
    with loader:
        return list(loader)


def test_labels_are_the_next_report_token_and_nothing_else(
    tiny: TinyInput, tokenizer: ReportTokenizer
) -> None:
    for batch in batches(tiny):
        inputs = make_inputs(batch, tokenizer, max_tokens=64, device=torch.device("cpu"))
        for slot in range(batch.num_slots):
            mask = inputs.token_mask_BT[slot]
            ids = inputs.token_ids_BT[slot][mask].tolist()
            labels = inputs.labels_BT[slot]
            assert labels[: len(ids) - 1].tolist() == ids[1:]
            assert (labels[len(ids) - 1 :] == IGNORED_LABEL).all()
            assert tokenizer.decode(ids) == batch["report"][slot]


def test_padding_slots_count_nothing(tiny: TinyInput, tokenizer: ReportTokenizer) -> None:
    made = [make_inputs(b, tokenizer, max_tokens=64, device=torch.device("cpu")) for b in batches(tiny)]
    last = made[-1]
    assert last.weights_B.tolist() == [1.0, 1.0, 1.0, 0.0]  # 11 samples in slots of 4
    assert sum(inputs.num_samples for inputs in made) == NUM_VAL
    labelled = (last.labels_BT != IGNORED_LABEL).sum(dim=1)
    assert last.num_tokens == float((labelled * last.weights_B).sum())
    assert not last.slice_mask_BK[3].any()


def test_images_stay_integers_on_their_way(tiny: TinyInput, tokenizer: ReportTokenizer) -> None:
    batch = batches(tiny)[0]
    inputs = make_inputs(batch, tokenizer, max_tokens=64, device=torch.device("cpu"))
    assert inputs.images_BKHW.dtype == torch.int16
    assert inputs.images_BKHW.shape == (4, 3, 16, 16)
    assert inputs.display_range is not None
    assert inputs.display_range.dtype == torch.float32


def test_on_a_cpu_images_are_not_copied_and_their_memory_stays(
    tiny: TinyInput, tokenizer: ReportTokenizer
) -> None:
    loader = Loader(
        Dataset.open(tiny.dataset),
        split="train",
        batch=BatchSpec(micro_batch_size=4, micro_batches_per_step=1),
        seed=1,
        fields=tiny_fields(),
        config=LoaderConfig(prefetch_bytes=1),
    )
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for batch in loader:
        image = batch["image"]
        inputs = make_inputs(batch, tokenizer, max_tokens=64, device=torch.device("cpu"))
        assert inputs.images_BKHW.data_ptr() == image.ctypes.data
        held.append((inputs.images_BKHW, inputs.images_BKHW.clone()))
        del batch, image, inputs
    assert len(held) > 4
    for images, before in held:  # no later batch was written over an earlier one
        assert torch.equal(images, before)
