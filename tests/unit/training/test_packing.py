"""Samples in one sequence: each computed as if it were alone, and the loss is that of padded rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardflow.format import Dataset
from shardflow.loading import Batch, Loader
from shardflow.sampling import BatchSpec
from shardflow.training.inputs import MicroInputs, make_inputs
from shardflow.training.models.reference import ReportModel, build_model
from shardflow.training.sequences import IGNORED_LABEL, Packing, pack_row, weighted_token_loss
from shardflow.training.text import ReportTokenizer
from tests.tiny_runs import TinyInput, tiny_config, tiny_fields

CPU = torch.device("cpu")


def packing_of(slice_mask: np.ndarray, num_tokens: list[int]) -> tuple[Packing, dict[str, np.ndarray]]:
    token_mask = np.arange(max(num_tokens))[None] < np.array(num_tokens)[:, None]
    ids = np.arange(token_mask.size).reshape(token_mask.shape)
    labels = np.where(token_mask, ids + 1, IGNORED_LABEL)
    row = pack_row(slice_mask, ids, token_mask, labels, np.arange(len(ids)).astype(np.float32))
    tensors = {name: torch.from_numpy(array) for name, array in row.arrays.items()}
    return Packing.of(tensors, longest=row.longest), row.arrays


@pytest.mark.fast
@given(
    st.lists(
        st.tuples(st.lists(st.booleans(), min_size=3, max_size=3), st.integers(1, 6)), min_size=1, max_size=5
    )
)
def test_every_element_stands_once_in_its_own_sample(samples: list[tuple[list[bool], int]]) -> None:
    mask = np.array([slices for slices, _ in samples])
    packing, arrays = packing_of(mask, [num_tokens for _, num_tokens in samples])
    num_looked_at = max(2, int(mask.sum()))
    assert packing.slice_index_N[: int(mask.sum())].tolist() == np.flatnonzero(mask).tolist()
    assert len(packing.slice_index_N) == num_looked_at
    at = 0
    next_slice, next_text = 1, 1 + num_looked_at
    for number, (slices, num_tokens) in enumerate(samples):
        length = 1 + sum(slices) + num_tokens
        here = slice(at, at + length)
        expected = [
            0,
            *range(next_slice, next_slice + sum(slices)),
            *range(next_text, next_text + num_tokens),
        ]
        assert packing.source_S[here].tolist() == expected
        assert packing.position_S[here].tolist() == list(range(length))
        assert packing.segment_S[here].tolist() == [number] * length
        assert packing.study_start_U[number] == at
        next_slice, next_text, at = next_slice + sum(slices), next_text + num_tokens, at + length
    assert len(packing.source_S) % 8 == 0
    assert len(packing.source_S) - at < 8
    assert not packing.source_S[at:].any()
    assert packing.study_start_U[-1] == len(packing.source_S)
    assert packing.longest == int(packing.study_start_U.diff().max())
    assert packing.source_S[packing.text_place_T].tolist() == list(range(1 + num_looked_at, next_text))
    assert arrays["weights"].tolist() == [
        float(number) for number, (_, num_tokens) in enumerate(samples) for _ in range(num_tokens)
    ]


@pytest.mark.fast
def test_nobody_sees_another_sample_or_what_follows() -> None:
    packing, _ = packing_of(np.array([[True, False], [True, True]]), [2, 3])
    visible = packing.attention_mask(torch.float32, additive=False)[0, 0]
    for here in range(len(visible)):
        for there in range(len(visible)):
            same = packing.segment_S[here] == packing.segment_S[there]
            assert bool(visible[here, there]) == (bool(same) and there <= here)
    additive = packing.attention_mask(torch.float32, additive=True)[0, 0]
    assert torch.equal(additive == 0, visible)
    assert torch.equal(additive.softmax(-1) > 0, visible)


def exact_model(tiny: TinyInput, tokenizer: ReportTokenizer, **settings: object) -> ReportModel:
    config = tiny_config(tiny, tiny.folder / "unused")
    model = build_model(
        dataclasses.replace(config.model, dropout=0.0, **settings),  # type: ignore[arg-type]
        config.image,
        num_places=3,
        vocab_size=tokenizer.vocab_size,
        max_tokens=24,
        seed=1,
    )
    return model.double()


def batches(tiny: TinyInput, split: str = "val") -> list[Batch]:
    loader = Loader(
        Dataset.open(tiny.dataset),
        split=split,
        batch=BatchSpec(micro_batch_size=4, micro_batches_per_step=1, tail="mask"),
        seed=1,
        fields=tiny_fields(),
    )
    with loader:
        return list(loader)


def loss_and_gradients(model: ReportModel, inputs: MicroInputs) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = weighted_token_loss(model(*inputs.model_arguments), inputs.labels_BT, inputs.weights_B)
    torch.autograd.backward(loss)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return float(loss.detach()), gradients


# Not eager Llama: its softmax is in float32 whatever the model is in, and so its rounding.
@pytest.mark.parametrize(("language", "attention"), [("gpt2", "sdpa"), ("gpt2", "eager"), ("llama", "sdpa")])
def test_the_loss_and_its_gradient_are_those_of_padded_rows(
    tiny: TinyInput, language: str, attention: str
) -> None:
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    model = exact_model(tiny, tokenizer, language=language)
    model.language.set_attn_implementation(attention)  # type: ignore[operator]
    for batch in batches(tiny):  # the last one holds a padding slot
        padded = make_inputs(batch, tokenizer, max_tokens=24, device=CPU)
        packed = make_inputs(batch, tokenizer, max_tokens=24, device=CPU, packed=True)
        assert (packed.num_tokens, packed.num_samples) == (padded.num_tokens, padded.num_samples)
        expected, expected_gradients = loss_and_gradients(model, padded)
        loss, gradients = loss_and_gradients(model, packed)
        assert abs(loss - expected) <= 1e-12 * abs(expected)
        for name, gradient in expected_gradients.items():
            assert (gradients[name] - gradient).abs().max() < 1e-12, name


def test_a_packed_sample_does_not_see_its_neighbours(tiny: TinyInput) -> None:
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    model = exact_model(tiny, tokenizer)
    inputs = make_inputs(batches(tiny)[0], tokenizer, max_tokens=24, device=CPU, packed=True)
    assert inputs.packing is not None
    second = inputs.packing.segment_S[inputs.packing.text_place_T] == 1
    (before,) = model(*inputs.model_arguments)
    inputs.token_ids_BT[0, ~second] = 5
    inputs.images_BKHW[[0, 2, 3]] = 77
    (after,) = model(*inputs.model_arguments)
    assert torch.equal(after[second], before[second])
    assert not torch.equal(after[~second], before[~second])


def test_packed_logits_are_no_view_of_which_fsdp2_would_warn(tiny: TinyInput) -> None:
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    inputs = make_inputs(batches(tiny)[0], tokenizer, max_tokens=24, device=CPU, packed=True)
    logits = exact_model(tiny, tokenizer)(*inputs.model_arguments)
    assert logits.shape[:2] == inputs.token_ids_BT.shape
    assert not logits._is_view()


def test_a_packed_filler_runs_through_everything_with_gradients_of_zero(tiny: TinyInput) -> None:
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    model = exact_model(tiny, tokenizer)
    batch = batches(tiny)[0]
    batch.arrays["weight"][:], batch["image_mask"][:], batch["report"][:] = 0, 0, [""] * 4
    inputs = make_inputs(batch, tokenizer, max_tokens=24, device=CPU, packed=True)
    assert inputs.num_tokens == 0
    loss, gradients = loss_and_gradients(model, inputs)
    assert loss == 0
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


def test_only_slices_that_are_there_go_through_the_tower(tiny: TinyInput) -> None:
    tokenizer = ReportTokenizer.load(tiny.tokenizer)
    model = exact_model(tiny, tokenizer)
    looked_at: list[int] = []
    model.vision.register_forward_pre_hook(
        lambda _, __, given: looked_at.append(len(given["pixel_values"])), with_kwargs=True
    )
    batch = batches(tiny)[0]
    batch["image_mask"][:, 1:] = 0
    for packed in (False, True):
        model(*make_inputs(batch, tokenizer, max_tokens=24, device=CPU, packed=packed).model_arguments)
    assert looked_at == [12, 4]
