"""One optimizer step: rates of layers, the gradient of its micro-batches, the update, the average of weights.

With L the sum of the weighted losses of all micro-batches of the step and N their weighted targets (tokens
or labels), the gradient is that of L / N. DDP and FSDP2 average over ranks, so each rank's loss is multiplied
by the world size first; N is known only after the last micro-batch, so `Updates` divides the sum by it before
clipping (docs/adr/0050).

`Updates` also owns the handling of non-finite gradients, and the loss scale of fp16. Every rank sees the same
norm (that of the exchanged gradient), so all take the same branch without a message. Invariant: a skipped
step leaves weights, moments and the optimizer's count as they were.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from shardflow.errors import ConfigError, TrainingError
from shardflow.seeds import derive
from shardflow.training.distributed import gather_whole, local_part, no_sync, unwrap
from shardflow.training.hooks import LoopHook, StepReport
from shardflow.training.inputs import StepInputs
from shardflow.training.rates import OptimizerConfig

COMPUTE_TYPES: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By ``run.precision``: the type to compute in, or None for that of the weights."""
_LOWEST_SCALE: Final = 2.0**-24
_HIGHEST_SCALE: Final = 2.0**24
_GROWTH_STEPS: Final = 1_000


def build_optimizer(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW; matrices decay, vectors (biases, norms, the start embedding) do not.

    Each group has a ``scale``, the factor of the learning rate that `set_learning_rate` applies.

    Raises:
        ConfigError: Settings of layers or names that the model does not have.
    """
    scales = learning_rate_scales(model, settings)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for is_matrix in (True, False):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (parameter.ndim >= 2) == is_matrix:
                groups.setdefault((is_matrix, scales[name]), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": settings.weight_decay if is_matrix else 0.0, "scale": scale}
            for (is_matrix, scale), group in groups.items()
        ],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group: the step's, times the group's scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["scale"]


def learning_rate_scales(model: nn.Module, settings: OptimizerConfig) -> dict[str, float]:
    """Return the factor of the learning rate of each parameter, by its name.

    Raises:
        ConfigError: No parameter's name begins so, or the model has no repeated layers to decay over.
    """
    names = [name for name, _ in model.named_parameters()]
    scales = dict.fromkeys(names, 1.0)
    if settings.layer_decay < 1.0:
        for name, num_behind in _layers_behind(model, names).items():
            scales[name] = settings.layer_decay**num_behind
    for beginning in settings.learning_rate_scales:
        if not any(name.startswith(beginning) for name in names):
            raise ConfigError(
                f"optimizer.learning_rate_scales: no parameter name begins with {beginning!r}; {names[0]} is "
                "one of them."
            )
    for name in names:
        fitting = [beginning for beginning in settings.learning_rate_scales if name.startswith(beginning)]
        if fitting:
            scales[name] *= settings.learning_rate_scales[max(fitting, key=len)]
    return scales


def _layers_behind(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return how many layers further the output is, of the parameters of stacks of layers and before them.

    A stack is an outermost list of at least two modules of one class that have parts of their own; it belongs
    to the largest part of the model that has no other one, such as an encoder. What comes before it there, in
    the order in which parameters were registered, are its embeddings.
    """
    stacks: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList | nn.Sequential) and not is_inner and _are_layers([*module]):
            stacks[name] = [f"{name}.{child}." for child, _ in module.named_children()]
    if not stacks:
        raise ConfigError(
            "optimizer.layer_decay needs a model with repeated layers, got one without; name its parts in "
            "optimizer.learning_rate_scales."
        )
    found: dict[str, int] = {}
    for stack, layers in stacks.items():
        words = stack.split(".")
        parts = ["".join(f"{word}." for word in words[:length]) for length in range(len(words) + 1)]
        part = next(part for part in parts if sum(f"{name}.".startswith(part) for name in stacks) == 1)
        is_before = True
        for name in (name for name in names if name.startswith(part)):
            number = next((number for number, layer in enumerate(layers) if name.startswith(layer)), None)
            is_before = is_before and number is None
            if number is not None or is_before:
                found[name] = len(layers) - (-1 if number is None else number)
    return found


def _are_layers(modules: Sequence[nn.Module]) -> bool:
    return len(modules) > 1 and len({type(one) for one in modules}) == 1 and any(modules[0].children())


class WeightAverage:
    """Exponential moving average of the trained weights (Polyak and Juditsky 1992).

    It is an entry of the optimizer's state, beside the moments: so it is a share where weights are, and a
    checkpoint holds it, by parameter name, for any number of ranks. Buffers are not averaged.

    Args:
        optimizer: Of the weights.
        decay: Share of the average that a step keeps; 0 keeps none.
    """

    ENTRY: Final = "ema"

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self._optimizer, self._decay = optimizer, decay

    def update(self) -> None:
        """Move the average towards the weights, after a step that changed them."""
        if not self._decay:
            return
        averages, weights = [], []
        for parameter, state in self._optimizer.state.items():
            if self.ENTRY in state:
                averages.append(local_part(state[self.ENTRY]))
                weights.append(local_part(parameter.detach()))
            else:
                state[self.ENTRY] = parameter.detach().clone()
        if averages:
            torch._foreach_lerp_(averages, weights, 1.0 - self._decay)

    def forget_unused(self) -> None:
        """Drop the average of a checkpoint where this run keeps none."""
        if not self._decay:
            for state in self._optimizer.state.values():
                state.pop(self.ENTRY, None)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the average in the place of the weights inside the block; the weights return bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, state in self._optimizer.state.items():
            if self.ENTRY in state:
                weights, average = local_part(parameter), local_part(state[self.ENTRY])
                kept = weights.clone()
                weights.copy_(average)
                average.copy_(kept)


def seed_micro_batch(seed: int, epoch: int, step: int, micro: int) -> None:
    """Key the model's random numbers (dropout) by the micro-batch.

    Whichever rank runs it draws the same numbers, so another world size trains the same model, and a
    checkpoint needs no generator states.
    """
    torch.manual_seed(derive(seed, "model-randomness", epoch, step, micro))


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Iterable[tuple[int, StepInputs]],
    *,
    num_micro_batches: int,
    world_size: int,
    position: tuple[int, int, int],
    autocast: torch.dtype | None,
    loss_scale: float = 1.0,
    exchange_each: bool = False,
    hooks: LoopHook | None = None,
) -> StepReport:
    """Run this rank's micro-batches of a step; then ``grad`` holds the gradient of the *sum* over all ranks.

    Args:
        model: The model as the ranks hold it together; its gradients must be None or zero.
        micro_batches: Number within the step and inputs of each, padding ones included, in order.
        num_micro_batches: How many ``micro_batches`` gives; gradients are exchanged in the last one only.
        world_size: Ranks of the model's process group.
        position: Seed, epoch and step, the key of the random numbers.
        autocast: Type to compute in, or None for that of the weights.
        loss_scale: Another factor of the gradients, but not of the sums that are returned.
        exchange_each: Exchange gradients after every micro-batch instead, to keep no whole ones.
        hooks: Called around each forward and backward.

    Returns:
        The rank's report with its loss, tokens and samples.

    Raises:
        TrainingError: another number of micro-batches came.
    """
    seed, epoch, step = position
    hooks = hooks or LoopHook()
    losses: list[torch.Tensor] = []
    num_tokens = num_samples = 0.0
    for slot, (micro, inputs) in enumerate(micro_batches):
        seed_micro_batch(seed, epoch, step, micro)
        is_exchanged = exchange_each or slot == num_micro_batches - 1
        with contextlib.nullcontext() if is_exchanged else no_sync(model):
            hooks.on_forward()
            loss = compute_loss(model, inputs, autocast)
            hooks.on_backward(is_exchanged=is_exchanged)
            torch.autograd.backward(loss * (world_size * loss_scale))
            hooks.on_backward_end()
        losses.append(loss.detach())
        num_tokens += inputs.num_tokens
        num_samples += inputs.num_samples
    if len(losses) != num_micro_batches:
        raise TrainingError(
            f"the loader delivered {len(losses)} of this rank's {num_micro_batches} micro-batches (epoch "
            f"{epoch}, step {step}); this is a bug of the loader."
        )
    # One wait for the device a step, not one a micro-batch.
    return StepReport(
        loss=float(torch.stack(losses).double().sum()), num_tokens=num_tokens, num_samples=num_samples
    )


def warm_up(model: nn.Module, inputs: StepInputs, *, autocast: torch.dtype | None) -> None:
    """Run one forward and backward of weight 0, so that gradient buckets have their final layout at step 0.

    DistributedDataParallel rebuilds its buckets after the first backward, in the order in which gradients
    became ready; an all-reduce adds the ranks in an order that depends on an element's place in its bucket.
    Without this, a fresh run's first step and a resumed run's first step use the initial layout and all
    others the rebuilt one, and weights differ in the last bits from three ranks on (docs/adr/0051).
    Weights, buffers, optimizer and random numbers are as before; gradients are None.

    Args:
        model: The model, just wrapped.
        inputs: Any micro-batch of the run's shapes, all weights 0.
        autocast: As in the steps.

    Raises:
        TrainingError: a parameter took no part; the first exchange of a step would hang or fail.
    """
    device = inputs.weights_B.device
    devices = [] if device.type == "cpu" else [device]
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        torch.autograd.backward(compute_loss(model, inputs, autocast))
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    idle = [name for name, p in unwrap(model).named_parameters() if p.requires_grad and p.grad is None]
    if idle:
        raise TrainingError(
            f"{len(idle)} parameters got no gradient, {idle[0]} among them, but every trained parameter must "
            "take part in every step; use it in the forward, or set requires_grad to false."
        )
    model.zero_grad(set_to_none=True)


def compute_loss(
    model: nn.Module,
    inputs: StepInputs,
    autocast: torch.dtype | None,
    keep: Callable[[StepInputs, Any], None] | None = None,
) -> torch.Tensor:
    """Return the sum of the weighted losses of a micro-batch.

    Args:
        model: The model.
        inputs: The micro-batch.
        autocast: Type to compute in, or None for that of the weights.
        keep: Called with the inputs and what the model returned for them.
    """
    with torch.autocast(inputs.weights_B.device.type, dtype=autocast, enabled=autocast is not None):
        output = inputs.forward(model)
    if keep is not None:
        keep(inputs, output)
    return inputs.loss(output)


class Updates:
    """Updates of the weights from the gradients of one run.

    Args:
        model: Its parameters hold the gradients; whole or shares.
        optimizer: Its optimizer.
        settings: The table ``[optimizer]``.
        is_scaled: Whether the loss is scaled, for fp16.

    Attributes:
        loss_scale: What the next step's loss is multiplied by.
        num_skipped: Steps of the whole run that changed nothing because of their gradient.
        average: The moving average of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: OptimizerConfig,
        *,
        is_scaled: bool = False,
    ) -> None:
        self.loss_scale = settings.initial_loss_scale if is_scaled else 1.0
        self.num_skipped = 0
        self.average = WeightAverage(optimizer, settings.ema_decay)
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._is_scaled = is_scaled
        self._good_steps = 0
        self._skipped_in_a_row = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; JSON values."""
        return {
            "loss_scale": self.loss_scale if self._is_scaled else None,
            "good_steps": self._good_steps,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state; that of another precision has no loss scale, an old one nothing."""
        if self._is_scaled and state.get("loss_scale") is not None:
            self.loss_scale, self._good_steps = float(state["loss_scale"]), int(state["good_steps"])
        self.num_skipped = int(state.get("num_skipped", 0))
        self._skipped_in_a_row = int(state.get("skipped_in_a_row", 0))

    def apply(self, num_tokens: float, *, loss: float, where: str) -> float | None:
        """Divide the summed gradient by the step's tokens, clip it and update the weights; then forget it.

        Args:
            num_tokens: Weighted tokens of the step over all ranks.
            loss: The step's summed loss over all ranks, without the scale.
            where: Names the step in an error.

        Returns:
            The norm before clipping; None where nothing changed, because the gradient was not finite or the
            step had no tokens (AdamW would decay weights and coast on its momentum even with a zero
            gradient).

        Raises:
            TrainingError: the gradient is not finite, and the settings do not let the step be skipped;
                weights and optimizer are as they were.
        """
        try:
            return self._apply(num_tokens, loss, where)
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _apply(self, num_tokens: float, loss: float, where: str) -> float | None:
        if num_tokens == 0.0:
            return None
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(num_tokens * self.loss_scale)
        norm = gather_whole(nn.utils.get_total_norm(gradients))
        if not bool(torch.isfinite(norm)):
            self._skip(loss, where)
            return None
        nn.utils.clip_grads_with_norm_(parameters, self._settings.max_gradient_norm, norm)
        self._optimizer.step()
        self.average.update()
        self._skipped_in_a_row = 0
        self._good_steps += 1
        if self._is_scaled and self._good_steps >= _GROWTH_STEPS:
            self.loss_scale, self._good_steps = min(self.loss_scale * 2.0, _HIGHEST_SCALE), 0
        return float(norm)

    def _skip(self, loss: float, where: str) -> None:
        self.num_skipped += 1
        if self._is_scaled and math.isfinite(loss) and self.loss_scale > _LOWEST_SCALE:
            # The forward was sound, so the backward overflowed; that is no mistake of the run.
            self.loss_scale, self._good_steps = self.loss_scale / 2.0, 0
            return
        self._skipped_in_a_row += 1
        settings = self._settings
        if settings.on_nonfinite == "raise" or self._skipped_in_a_row > settings.max_skipped_steps:
            times = f" {self._skipped_in_a_row} times in a row" if self._skipped_in_a_row > 1 else ""
            raise TrainingError(
                f"the gradient is not finite{times} ({where}); lower optimizer.learning_rate, or look at "
                "this step's samples in the run ledger."
            )
