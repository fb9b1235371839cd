"""The step on one rank: sums, not means; a step without tokens; random numbers keyed by the micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.parallel import DistributedDataParallel

from shardflow.errors import TrainingError
from shardflow.training.config import ParallelConfig, TimeoutConfig
from shardflow.training.distributed import Ranks, join_ranks, shard
from shardflow.training.inputs import MicroInputs
from shardflow.training.step import accumulate_gradients, seed_micro_batch, warm_up

VOCAB_SIZE = 7


class TextOnly(nn.Module):
    """The smallest model with the reference model's arguments; dropout makes random numbers matter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(VOCAB_SIZE, 5)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(5, VOCAB_SIZE))
        self.double()

    def forward(
        self, images: object, slices: object, window: object, ids: torch.Tensor, mask: object
    ) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids))
        return logits


class Counting(TextOnly):
    """A model with state that every forward changes, as batch normalisation has."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout)
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(
        self, images: object, slices: object, window: object, ids: torch.Tensor, mask: object
    ) -> torch.Tensor:
        self.count += 1
        return super().forward(images, slices, window, ids, mask)


def micro_inputs(number: int, weights: tuple[float, ...] = (1.0, 1.0), num_tokens: int = 3) -> MicroInputs:
    generator = torch.Generator().manual_seed(number)
    size = (len(weights), num_tokens)
    labels = torch.randint(0, VOCAB_SIZE, size, generator=generator)
    return MicroInputs(
        images_BKHW=torch.zeros(0),
        slice_mask_BK=torch.zeros(0),
        display_range=torch.zeros(0),
        token_ids_BT=torch.randint(0, VOCAB_SIZE, size, generator=generator),
        token_mask_BT=torch.ones(size, dtype=torch.bool),
        labels_BT=labels,
        weights_B=torch.tensor(weights),
        num_tokens=num_tokens * sum(weights),
        num_samples=sum(weights),
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    wait = 30.0
    with join_ranks("cpu", TimeoutConfig(startup_s=wait, steady_s=wait, control_s=wait, hang_s=0)) as lone:
        yield lone


def wrap(model: TextOnly, ranks: Ranks) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=ranks.group)


def accumulate(
    model: DistributedDataParallel, micros: list[MicroInputs], step: int = 0
) -> tuple[float, float]:
    sums = accumulate_gradients(
        model,
        list(enumerate(micros)),
        num_micro_batches=len(micros),
        world_size=1,
        position=(5, 0, step),
        autocast=None,
    )
    return sums.loss, sums.num_tokens


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


def test_gradient_is_that_of_the_mean_over_all_tokens_of_the_step(ranks: Ranks) -> None:
    micros = [micro_inputs(0, num_tokens=2), micro_inputs(1, (1.0, 0.0), num_tokens=9), micro_inputs(2)]
    model = TextOnly()
    loss, num_tokens = accumulate(wrap(model, ranks), micros)
    assert num_tokens == 2 * 2 + 9 + 2 * 3
    plain = copy.deepcopy(model)
    plain.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for micro in micros:
        log_likelihood = plain(None, None, None, micro.token_ids_BT, None).log_softmax(-1)
        picked = log_likelihood.gather(-1, micro.labels_BT[..., None])[..., 0]
        total = total - (picked.sum(1) * micro.weights_B).sum()
    torch.autograd.backward(total / num_tokens)
    assert loss == pytest.approx(float(total.detach()), abs=1e-12)
    for mine, expected in zip(gradients(model), gradients(plain), strict=True):
        assert (mine / num_tokens - expected).abs().max() < 1e-12


def test_weights_and_tokens_of_a_micro_batch_decide_not_its_place(ranks: Ranks) -> None:
    micros = [micro_inputs(number, num_tokens=number + 2) for number in range(3)]
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        model = TextOnly()
        accumulate(wrap(model, ranks), [micros[number] for number in order])
        results.append(gradients(model))
    for first, second in zip(*results, strict=True):
        assert (first - second).abs().max() < 1e-12


def test_random_numbers_are_those_of_the_micro_batch(ranks: Ranks) -> None:
    """Whatever was drawn before, and whatever ran before on this rank."""

    def gradient(micro: int, step: int, noise: int) -> torch.Tensor:
        model = TextOnly(dropout=0.5)
        torch.manual_seed(noise)
        accumulate_gradients(
            wrap(model, ranks),
            [(micro, micro_inputs(0))],
            num_micro_batches=1,
            world_size=1,
            position=(5, 0, step),
            autocast=None,
        )
        return gradients(model)[0]

    assert torch.equal(gradient(3, 2, noise=1), gradient(3, 2, noise=2))
    assert not torch.equal(gradient(3, 2, noise=1), gradient(2, 2, noise=1))
    assert not torch.equal(gradient(3, 2, noise=1), gradient(3, 1, noise=1))


def test_gradients_are_exchanged_in_the_last_micro_batch_only(ranks: Ranks) -> None:
    wrapped = wrap(TextOnly(), ranks)
    exchanges: list[bool] = []
    wrapped.module.register_forward_hook(
        lambda *_: exchanges.append(bool(wrapped.require_backward_grad_sync))
    )
    accumulate(wrapped, [micro_inputs(number) for number in range(3)])
    assert exchanges == [False, False, True]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # the toy model returns a view
@pytest.mark.parametrize(("exchange_each", "expected"), [(False, 1), (True, 3)])
def test_a_sharded_model_exchanges_once_a_step_or_after_each_micro_batch(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, exchange_each: bool, expected: int
) -> None:
    exchanges = []
    real = vars(_fsdp_param_group)["foreach_reduce"]

    def counted(*args: Any, **kwargs: Any) -> Any:
        exchanges.append(len(args))
        return real(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
    model = shard(TextOnly(), ranks, ParallelConfig(), compute=None)
    accumulate_gradients(
        model,
        [(number, micro_inputs(number)) for number in range(3)],
        num_micro_batches=3,
        world_size=1,
        position=(5, 0, 0),
        autocast=None,
        exchange_each=exchange_each,
    )
    assert len(exchanges) == expected  # one group of parameters: the model has no blocks


def test_seeds_differ_by_every_part_of_the_position() -> None:
    drawn = set()
    for position in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
        seed_micro_batch(*position)
        drawn.add(float(torch.rand(())))
    assert len(drawn) == 5


def test_missing_micro_batch_is_an_error(ranks: Ranks) -> None:
    with pytest.raises(TrainingError, match="delivered 1 of this rank's 2 micro-batches"):
        accumulate_gradients(
            wrap(TextOnly(), ranks),
            [(0, micro_inputs(0))],
            num_micro_batches=2,
            world_size=1,
            position=(5, 0, 0),
            autocast=None,
        )


def test_warm_up_leaves_everything_as_it_was(ranks: Ranks) -> None:
    model = Counting(dropout=0.5)
    wrapped = wrap(model, ranks)
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    warm_up(wrapped, micro_inputs(0, weights=(0.0,)), autocast=None)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_warm_up_names_a_parameter_that_takes_no_part(ranks: Ranks) -> None:
    model = TextOnly()
    model.idle = nn.Linear(2, 2)
    with pytest.raises(TrainingError, match=r"2 parameters got no gradient, idle\.weight"):
        warm_up(wrap(model, ranks), micro_inputs(0, weights=(0.0,)), autocast=None)
