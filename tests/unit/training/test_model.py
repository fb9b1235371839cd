"""The model: what is masked has no influence, and every parameter takes part."""

from __future__ import annotations

import pytest
import torch

from shardflow.errors import ConfigError
from shardflow.training.config import ImageConfig, ModelConfig
from shardflow.training.device.images import window_images
from shardflow.training.models.reference import ReportModel, build_model
from shardflow.training.sequences import IGNORED_LABEL, weighted_token_loss

VOCAB_SIZE, MAX_TOKENS = 300, 12


def build(language: str = "gpt2", *, num_slices: int = 4, seed: int = 1, **settings: object) -> ReportModel:
    sizes: dict[str, object] = {
        "vision_width": 16,
        "vision_layers": 1,
        "vision_heads": 2,
        "language_width": 16,
        "language_layers": 2,
        "language_heads": 2,
        "dropout": 0.0,
        **settings,
    }
    model = build_model(
        ModelConfig(language=language, patch_size=8, **sizes),  # type: ignore[arg-type]
        ImageConfig(rows=16, columns=8),
        num_places=num_slices,
        vocab_size=VOCAB_SIZE,
        max_tokens=MAX_TOKENS,
        seed=seed,
    )
    return model.double()


class Inputs:
    """Two samples: four slices and nine tokens, one slice and three tokens."""

    def __init__(self, num_slices: int = 4, num_tokens: int = 9) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(-1000, 1000, (2, 4, 16, 8), generator=generator)[:, :num_slices].to(
            torch.int16
        )
        self.slice_mask = torch.tensor([[True] * 4, [True, False, False, False]])[:, :num_slices]
        self.display_range = torch.tensor([[-160.0, 240.0], [-1000.0, 400.0]])
        self.token_ids = torch.randint(3, VOCAB_SIZE, (2, 9), generator=generator)[:, :num_tokens]
        self.token_mask = torch.tensor([[True] * 9, [True] * 3 + [False] * 6])[:, :num_tokens]

    def run(self, model: ReportModel) -> torch.Tensor:
        logits: torch.Tensor = model(
            self.images, self.slice_mask, self.display_range, self.token_ids, self.token_mask
        )
        return logits


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> ReportModel:
    return build(request.param)


def test_logits_stand_at_the_text_positions(model: ReportModel) -> None:
    assert Inputs().run(model).shape == (2, 9, VOCAB_SIZE)


def test_padded_slices_and_tokens_have_no_influence(model: ReportModel) -> None:
    inputs = Inputs()
    expected = inputs.run(model)[1, :3]
    inputs.images[1, 1:] = 31000
    inputs.token_ids[1, 3:] = 7
    assert torch.equal(inputs.run(model)[1, :3], expected)


def test_sample_is_computed_as_if_it_were_alone(model: ReportModel) -> None:
    """A study of one slice in a batch of four slices equals a study of one slice."""
    together = Inputs().run(model)[1, :3]
    alone = Inputs(num_slices=1, num_tokens=3).run(model)[1]
    assert (together - alone).abs().max() < 1e-12


def test_images_and_text_have_influence(model: ReportModel) -> None:
    expected = Inputs().run(model)
    for name in ("images", "token_ids", "display_range"):
        inputs = Inputs()
        getattr(inputs, name)[0] = getattr(inputs, name)[0].flip(0)
        assert not torch.equal(inputs.run(model)[0, -1], expected[0, -1]), name


def test_text_cannot_look_ahead(model: ReportModel) -> None:
    expected = Inputs().run(model)[0, :4]
    inputs = Inputs()
    inputs.token_ids[0, 4:] = 5
    assert torch.equal(inputs.run(model)[0, :4], expected)


@pytest.mark.parametrize("language", ["gpt2", "llama"])
def test_filler_runs_through_everything_with_gradients_of_zero(language: str) -> None:
    model = build(language)
    inputs = Inputs()
    inputs.images.zero_()
    inputs.slice_mask.zero_()
    inputs.token_mask.zero_()
    inputs.display_range.zero_()
    labels = torch.full((2, 9), IGNORED_LABEL)
    labels[:, 0] = 3  # the end token of an empty report
    torch.autograd.backward(weighted_token_loss(inputs.run(model), labels, torch.zeros(2)))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("language", ["gpt2", "llama"])
def test_micro_batch_without_images_trains_the_text_and_leaves_the_tower_alone(language: str) -> None:
    model = build(language)
    inputs = Inputs()
    inputs.slice_mask.zero_()
    torch.autograd.backward(weighted_token_loss(inputs.run(model), inputs.token_ids, torch.ones(2)))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith(("vision.", "projection.")):
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name
    assert model.start_embedding.grad is not None
    assert float(model.start_embedding.grad.abs().sum()) > 0


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(123)
    first = build().state_dict()
    torch.manual_seed(456)
    second, other = build().state_dict(), build(seed=2).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["projection.weight"], other["projection.weight"])


def test_recomputed_activations_give_the_same_gradients() -> None:
    gradients = []
    for recompute in (False, True):
        model = build(activation_checkpointing=recompute, dropout=0.2)
        torch.manual_seed(9)
        torch.autograd.backward(Inputs().run(model).square().sum())
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert recomputed is not None
        assert torch.allclose(plain, recomputed, rtol=1e-12, atol=1e-14)


def test_window_maps_the_display_range_and_clips() -> None:
    images = torch.tensor([[[[-32768, -160, 40, 240, 32767]]]], dtype=torch.int16)
    mask = torch.ones(1, 1, dtype=torch.bool)
    windowed = window_images(images, mask, torch.tensor([[-160.0, 240.0]]), torch.float64)
    assert windowed.flatten().tolist() == [-1.0, -1.0, 0.0, 1.0, 1.0]


def test_window_survives_an_empty_range_and_garbage_in_padding() -> None:
    images = torch.tensor([[[[float("nan")]], [[5.0]]]])
    mask = torch.tensor([[False, True]])
    windowed = window_images(images, mask, torch.tensor([[5.0, 5.0]]), torch.float32)
    assert windowed.flatten().tolist() == [0.0, -1.0]


def test_more_positions_than_memory_are_an_error_of_configuration() -> None:
    with pytest.raises(
        ConfigError, match=r"1000000000005 positions must fit .* lower fields\.image\.num_slices or text"
    ):
        build_model(
            ModelConfig(language="gpt2", patch_size=8),
            ImageConfig(rows=16, columns=8),
            num_places=4,
            vocab_size=VOCAB_SIZE,
            max_tokens=10**12,
            seed=1,
        )
