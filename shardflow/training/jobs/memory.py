"""Memory of a run: what a rank holds on any number of GPUs, and what micro-batches take on this machine.

The plan is computed on the meta device before there are any GPUs. Weights, gradients and optimizer follow
from the shapes of the parameters and from how `parallel.strategy` shares them, to the byte. Activations are
those tensors that autograd saves in a forward pass of one micro-batch in its largest shapes, where nothing is
computed and nothing allocated; with activation checkpointing those between the layers, and all of one layer.
Masks of all pairs of tokens are among them, as packed sequences and Gemma 3 have, where attention takes them.
What kernels, communication and the allocator take besides is not known: leave a tenth free.

The curve is measured. `measure_memory_curve` starts this module as a process (``python -m
shardflow.training.jobs.memory RUN.toml``), which builds the run's model and optimizer, and takes one step
with 1, 2, 4, ... samples in the largest shapes that the settings allow: all slices, the longest text. It
prints a line for each size and ends after 64 samples, when half of the memory is in use, or when a size does
not fit; running out of memory does not affect the caller. A line through the points proposes the size of a
micro-batch, which never changes during a run: it is part of the plan.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError, TrainingError
from shardflow.fields.conversations.field import Conversation
from shardflow.logs import counted
from shardflow.telemetry.process import available_bytes
from shardflow.training.config import ModelConfig, TrainConfig
from shardflow.training.data import sample_inputs
from shardflow.training.distributed import blocks_of, choose_device, compile_blocks
from shardflow.training.inputs import map_tensors
from shardflow.training.model_fields import CONVERSATION_FIELD, num_places
from shardflow.training.models.building import build_report_model
from shardflow.training.models.weights import Answers, hold_frozen, parameters_on_meta
from shardflow.training.step import COMPUTE_TYPES, WeightAverage, build_optimizer, compute_loss
from shardflow.training.tasks.task import RunSettings
from shardflow.training.text import ReportTokenizer

_MOMENTS = 2
"""Of AdamW."""
_MASK_PLACE = 3
"""Of the mask among the arguments of attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes that a rank holds, at their peak."""

    world_size: int
    weights_bytes: int
    """In float32, buffers and frozen ones too, those of ``model.frozen_dtype`` in that type, and those
    of ``model.quantize`` in 4.5 bits."""
    gradients_bytes: int
    optimizer_bytes: int
    """Two moments of what is trained, and the average of ``optimizer.ema_decay``."""
    copies_bytes: int
    """Weights in the type that is computed in: gathered layers under ``fsdp2``, what autocast keeps else."""
    activations_bytes: int
    """Of a micro-batch."""

    @property
    def total_bytes(self) -> int:
        """Sum of all."""
        return sum(getattr(self, one.name) for one in fields(self) if one.name.endswith("_bytes"))

    def text(self) -> str:
        """Describe it in a line, in GB of 10^9 bytes."""
        parts = ", ".join(
            f"{one.name.removesuffix('_bytes')} {getattr(self, one.name) / 1e9:.3g}"
            for one in fields(self)
            if one.name.endswith("_bytes")
        )
        return f"{counted(self.world_size, 'GPU')}: {self.total_bytes / 1e9:.3g} GB of each ({parts})"

    def to_json(self) -> dict[str, int]:
        """Return all numbers."""
        return {**asdict(self), "total_bytes": self.total_bytes}


def plan_memory(config: TrainConfig, world_sizes: Sequence[int]) -> list[RankMemory]:
    """Compute what a rank holds, for each number of ranks.

    Args:
        config: All settings; of a folder as ``model.path`` only ``config.json`` and the processor are read.
        world_sizes: Numbers of GPUs.

    Raises:
        ConfigError: The task has neither conversations nor reports, a batch spec of reports has a token
            budget, or the settings fit no model.
    """
    settings = config.model
    if settings.path is not None:
        settings = replace(settings, weights="random")
    # Recomputing hides from autograd what a layer saves, which is counted here.
    settings = replace(settings, activation_checkpointing=False)
    if settings.attn_implementation.startswith("fl"):
        # Kernels of devices, which save what sdpa saves, but take no masks of packed sequences.
        settings = replace(settings, attn_implementation="sdpa")
        config = replace(config, batch=replace(config.batch, packed=False))
    case = _of_conversations if config.task.has_conversations else _of_reports
    model, references, inputs = case(config, settings)
    compute = COMPUTE_TYPES[config.run.precision] or torch.float32
    activations_bytes = _activations(config, model, inputs, compute)
    for one in (model, *references):
        hold_frozen(one, settings.frozen_dtype, settings.quantize)
    return [_of_rank(config, model, references, compute, activations_bytes, size) for size in world_sizes]


_Case: TypeAlias = tuple[nn.Module, Sequence[nn.Module], Any]
"""What is trained, what is run beside it, and a micro-batch of the largest shapes."""


def _of_reports(config: TrainConfig, settings: ModelConfig) -> _Case:
    num_samples = config.batch.micro_batch_size
    if not config.task.has_reports or num_samples is None:
        what = "a token budget" if config.task.has_reports else f"task.type {config.task.type!r}"
        raise ConfigError(
            "memory is planned for conversations, and for reports in micro-batches of "
            f"batch.micro_batch_size, got {what}; try sizes, and watch the device."
        )
    with torch.device("meta"):
        model, _ = build_report_model(
            settings,
            ReportTokenizer.load(config.text.folder),
            image=config.image,
            num_places=num_places(config.image_field),
            text=config.text,
            lora=config.lora,
            seed=config.run.seed,
        )
    inputs = sample_inputs(
        config.image_field,
        config.image,
        config.augment,
        torch.device("cpu"),
        packed=config.batch.packed,
        num_samples=num_samples,
        num_tokens=config.text.max_tokens,
        is_full=True,
    )
    return model, (), map_tensors(inputs, lambda one: one.to("meta"))


def _of_conversations(config: TrainConfig, settings: ModelConfig) -> _Case:
    # Imports transformers.
    from shardflow.training.tasks.conversations import ConversationTask

    field = config.fields[CONVERSATION_FIELD]
    assert isinstance(field, Conversation)  # noqa: S101 - checked when the settings were read
    task = ConversationTask(config.task, settings, config.lora, field)
    task.open(RunSettings(name="", batch=config.batch, fields=config.fields, seed=config.run.seed))
    with parameters_on_meta():  # positions and grids of pictures are computed from buffers with values
        model = task.build_model(None)
    return model, task.references, task.largest_inputs()


def _of_rank(
    config: TrainConfig,
    model: nn.Module,
    references: Sequence[nn.Module],
    compute: torch.dtype,
    activations_bytes: int,
    world_size: int,
) -> RankMemory:
    parallel = config.parallel
    is_sharded = parallel.strategy == "fsdp2"
    parameters = list(model.parameters())
    held = [parameter for one in (model, *references) for parameter in one.parameters()]
    buffers = [buffer for one in (model, *references) for buffer in one.buffers()]
    trained = [one for one in parameters if one.requires_grad]
    sharers = world_size if is_sharded else 1
    num_trained = sum(_share(one, sharers) for one in trained)
    num_whole = sum(one.numel() for one in trained)
    gathers_each = not is_sharded or parallel.accumulation == "sharded"
    num_states = _MOMENTS + (config.optimizer.ema_decay > 0)
    item = torch.float32.itemsize
    return RankMemory(
        world_size=world_size,
        weights_bytes=sum(_share(one, sharers) * one.element_size() for one in held)
        + sum(one.nbytes for one in buffers),
        gradients_bytes=item * (num_trained if gathers_each else num_whole),
        optimizer_bytes=item * num_states * num_trained,
        copies_bytes=_copies(model, compute, is_sharded, keeps_all=not parallel.reshard_after_forward),
        activations_bytes=activations_bytes,
    )


def _share(parameter: torch.Tensor, sharers: int) -> int:
    """Return the most elements of a parameter that a rank holds: rows in equal pieces, rounded up."""
    if sharers == 1 or not parameter.ndim:
        return parameter.numel()
    return -(-parameter.shape[0] // sharers) * (parameter.numel() // max(1, parameter.shape[0]))


def _copies(model: nn.Module, compute: torch.dtype, is_sharded: bool, *, keeps_all: bool) -> int:
    """Return the bytes of weights in the type of the compute, beside those that a rank holds."""
    if not is_sharded:
        is_cast = compute is not torch.float32
        return sum(one.numel() for one in model.parameters() if one.ndim >= 2) * compute.itemsize * is_cast
    blocks = [sum(one.numel() for one in block.parameters()) for block in _outermost(blocks_of(model))]
    whole = sum(one.numel() for one in model.parameters())
    # What is in no block stays gathered; of the blocks one is in use while the next one comes.
    gathered = whole if keeps_all else whole - sum(blocks) + sum(sorted(blocks)[-2:])
    return gathered * compute.itemsize


def _outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if id(block) not in inner]


def _activations(config: TrainConfig, model: nn.Module, inputs: Any, compute: torch.dtype) -> int:
    """Return the bytes that autograd saves in a micro-batch of the largest shapes."""
    is_recomputed = config.model.activation_checkpointing
    counter = _SavedBytes(model, item_bytes=compute.itemsize)
    recomputed = _outermost(blocks_of(model)) if is_recomputed else []
    with counter.counting(recomputed), _Kernels(counter), Answers(answer=True), torch.enable_grad():
        # Answers are yes: every slot is full, and every mask true.
        inputs.loss(inputs.forward(model))
    return counter.peak_bytes


class _FusedAttention(torch.autograd.Function):
    """What a fused kernel of attention saves: its inputs, its output, and the logarithm of each row's sum.

    A mask of booleans becomes one of numbers that are added, in every layer anew.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        *batch, num_heads, length, _ = query.shape
        # As kernels lay it out: what follows takes it without a copy.
        output = query.new_empty((*batch, length, num_heads, value.shape[-1])).transpose(-2, -3)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        if mask is not None and mask.dtype is torch.bool:
            mask = query.new_empty(mask.shape)
        ctx.save_for_backward(query, key, value, output, sums, *(() if mask is None else (mask,)))
        return output


class _Kernels(TorchFunctionMode):
    """What devices compute otherwise than the meta device does.

    Attention is fused, not step by step, and a cross-entropy is computed, and saved, in float32.
    """

    def __init__(self, counter: _SavedBytes) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            mask = (kwargs or {}).get("attn_mask") if len(args) <= _MASK_PLACE else args[_MASK_PLACE]
            return _FusedAttention.apply(*args[:_MASK_PLACE], mask)  # type: ignore[no-untyped-call]
        if function is torch.nn.functional.cross_entropy and torch.is_grad_enabled():
            self._counter.add_wide(args[0].numel())
        return function(*args, **(kwargs or {}))


class _SavedBytes:
    """Counter of the bytes that autograd saves, each storage once and no parameter.

    Args:
        model: Of the forward passes.
        item_bytes: Size of a number that is float32 here.

    Attributes:
        peak_bytes: All that is saved; of layers that are recomputed what they get, and all of the largest.
    """

    def __init__(self, model: nn.Module, *, item_bytes: int) -> None:
        self._item_bytes = item_bytes
        # Storages are kept, so that no other one gets the address of one that is gone.
        self._seen = {one.untyped_storage()._cdata: one.untyped_storage() for one in model.parameters()}
        self._saved_bytes = self._begun_bytes = self._largest_bytes = self._dropped_bytes = 0

    @property
    def peak_bytes(self) -> int:
        return self._saved_bytes - self._dropped_bytes + self._largest_bytes

    def add_wide(self, num_items: int) -> None:
        """Count numbers that are saved in float32 whatever the rest is."""
        self._saved_bytes += num_items * (torch.float32.itemsize - self._item_bytes)

    @contextmanager
    def counting(self, recomputed: Sequence[nn.Module]) -> Iterator[None]:
        """Count the forward passes inside the block; ``recomputed`` layers keep only what they get."""
        handles = [
            handle
            for layer in recomputed
            for handle in (
                layer.register_forward_pre_hook(self._begin, with_kwargs=True),
                layer.register_forward_hook(self._end),
            )
        ]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            is_cast = tensor.dtype is torch.float32
            self._saved_bytes += storage.nbytes() * self._item_bytes // 4 if is_cast else storage.nbytes()
        return tensor

    def _begin(self, _: nn.Module, given: Any, named: Any) -> None:
        for tensor in tree_leaves((given, named)):
            if isinstance(tensor, torch.Tensor):
                self._save(tensor)
        self._begun_bytes = self._saved_bytes

    def _end(self, *_: Any) -> None:
        own_bytes = self._saved_bytes - self._begun_bytes
        self._dropped_bytes += own_bytes
        self._largest_bytes = max(self._largest_bytes, own_bytes)


MARGIN: Final = 0.1
"""Of the memory that stays free: kernels, communication, fragments of the allocator."""
_TIMEOUT_S: Final = 900.0
_RANK_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SIZES: Final = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCurve:
    """Memory of micro-batches by their size, and how many samples fit."""

    device: str
    points: tuple[tuple[int, int], ...]
    """Sizes that were run, and the peak memory of each: of the device, or of the process on a CPU."""
    fixed_bytes: int
    """Weights, gradients, optimizer, libraries."""
    sample_bytes: int
    """Additional bytes of each sample of a micro-batch."""
    room_bytes: int
    """Memory that a rank may fill, less the margin."""
    largest: int
    """Samples of the largest micro-batch that fits; 0 for none."""
    proposed: int
    """Largest micro-batch size that keeps the samples of a step; 0 for none."""
    proposed_micro_batches: int
    """Micro-batches of a step with it."""

    def text(self) -> str:
        """Describe the proposal in a sentence."""
        each = f"{self.fixed_bytes / 1e9:.3g} GB and {self.sample_bytes / 1e9:.3g} GB a sample"
        if not self.proposed:
            return f"not one sample fits into {self.room_bytes / 1e9:.3g} GB: the model takes {each}"
        return (
            f"{self.largest} samples fit into {self.room_bytes / 1e9:.3g} GB ({each}); with steps of as many "
            f"samples as now: batch.micro_batch_size = {self.proposed}, batch.micro_batches_per_step = "
            f"{self.proposed_micro_batches}"
        )


def fit_memory(points: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of no sample and of each one: a least-squares line, raised above all points.

    Args:
        points: Sizes and bytes, at least one pair; of a single one all bytes are attributed to the samples.

    Example:
        >>> fit_memory([(size, 100 + 20 * size) for size in (1, 2, 4)])
        (100, 20)
    """
    sizes, peaks = np.array(points, float).T
    if len(points) == 1:
        return 0, int(peaks[0] // sizes[0])
    slope = max(float(np.polyfit(sizes, peaks, 1)[0]), 1.0)
    return max(0, round(float((peaks - slope * sizes).max()))), round(slope)


def measure_memory_curve(config: TrainConfig, *, ranks_per_node: int = 1) -> MemoryCurve:
    """Measure a run's model on this machine.

    Args:
        config: All settings; its device, precision and shapes count.
        ranks_per_node: Ranks that share the memory of the node, on CPUs.

    Raises:
        ConfigError: The settings have a token budget, or share the model among ranks.
        TrainingError: Not even one sample could be run; the message has the last line of the process.
    """
    batch = config.batch
    if not config.task.has_reports:
        raise ConfigError(
            "a micro-batch size is proposed for tasks of reports only; try sizes, and watch the device."
        )
    if batch.micro_batch_size is None:
        raise ConfigError(
            "no micro-batch size can be proposed for a token budget, as the curve counts samples; set "
            "batch.micro_batch_size in place of batch.max_tokens."
        )
    if config.parallel.strategy != "ddp":
        raise ConfigError(
            f"a micro-batch size is proposed for parallel.strategy 'ddp' only, got "
            f"'{config.parallel.strategy}'; one process alone cannot hold a share of the model."
        )
    room_bytes, device, points = _run_sizes(config)
    if device == "cpu":
        room_bytes //= max(1, ranks_per_node)
    room_bytes = int(room_bytes * (1 - MARGIN))
    fixed, each = fit_memory(points)
    largest = max(0, (room_bytes - fixed) // each)
    per_step = batch.micro_batch_size * batch.micro_batches_per_step
    proposed = max((size for size in range(1, min(largest, per_step) + 1) if per_step % size == 0), default=0)
    return MemoryCurve(
        device=device,
        points=tuple(points),
        fixed_bytes=fixed,
        sample_bytes=each,
        room_bytes=room_bytes,
        largest=largest,
        proposed=proposed,
        proposed_micro_batches=per_step // proposed if proposed else 0,
    )


def _run_sizes(config: TrainConfig) -> tuple[int, str, list[tuple[int, int]]]:
    environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="shardflow-memory-") as folder:
        path = Path(folder) / "run.toml"
        path.write_text(dump_config(config), encoding="utf-8")
        command = [sys.executable, "-m", "shardflow.training.jobs.memory", str(path)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
            text, errors = done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:  # what it has measured by then counts
            text, errors = _text(error.stdout), _text(error.stderr)
    room_bytes, device, points = 0, "", []
    for line in text.splitlines():
        found = json.loads(line)
        if "room_bytes" in found:
            room_bytes, device = int(found["room_bytes"]), str(found["device"])
        else:
            points.append((found["size"], found["peak_bytes"]))
    if not points:
        last = (errors.strip().splitlines() or ["nothing"])[-1]
        raise TrainingError(
            f"not one sample could be trained to measure memory: {last} Lower the sizes of [fields.image], "
            "[image], [text] or [model]."
        )
    return room_bytes, device, points


def _text(output: str | bytes | None) -> str:
    whole = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return whole[: whole.rfind("\n") + 1]


def main(path: str) -> int:
    """Measure in this process, and print JSON lines."""
    config = load_config(TrainConfig, path)
    device = choose_device(config.run.device, 0)
    peak = _PeakOfDevice(device) if device.type != "cpu" else _PeakOfProcess()
    _print(room_bytes=peak.room_bytes(), device=device.type)
    model, _ = build_report_model(
        config.model,
        ReportTokenizer.load(config.text.folder),
        image=config.image,
        num_places=num_places(config.image_field),
        text=config.text,
        lora=config.lora,
        seed=config.run.seed,
    )
    if config.run.compile:
        compile_blocks(model)
    model.to(device)
    optimizer = build_optimizer(model, config.optimizer)
    average = WeightAverage(optimizer, config.optimizer.ema_decay)
    room_bytes = peak.room_bytes()
    for size in _SIZES:
        inputs = sample_inputs(
            config.image_field,
            config.image,
            config.augment,
            device,
            packed=config.batch.packed,
            num_samples=size,
            num_tokens=config.text.max_tokens,
            is_full=True,
        )
        peak.begin()
        try:
            loss = compute_loss(model, inputs, COMPUTE_TYPES[config.run.precision])
            torch.autograd.backward(loss)
            optimizer.step()
            average.update()
            optimizer.zero_grad(set_to_none=True)
            peak_bytes = peak.end()
        except (torch.OutOfMemoryError, MemoryError):
            break
        finally:
            del inputs
        del loss
        _print(size=size, peak_bytes=peak_bytes)
        if peak_bytes > room_bytes // 2:
            break
    return 0


class _PeakOfDevice:
    """Peak bytes of tensors on an accelerator, with what the allocator reserves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = getattr(torch, device.type)

    def room_bytes(self) -> int:
        """Return what this process may fill: free memory, and what it holds."""
        free, _ = self._module.mem_get_info(self._device)
        return int(free + self._module.memory_reserved(self._device))

    def begin(self) -> None:
        """Reset the peak."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def end(self) -> int:
        """Return the peak since `begin`."""
        self._module.synchronize(self._device)
        return int(self._module.max_memory_reserved(self._device))


class _PeakOfProcess:
    """Peak resident bytes of this process (proc(5), VmHWM, which 5 in clear_refs resets)."""

    def room_bytes(self) -> int:
        """Return what it may fill: available memory, and what it holds."""
        return available_bytes() + _status("VmRSS:")

    def begin(self) -> None:
        """Reset the peak."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def end(self) -> int:
        """Return the peak since `begin`."""
        return _status("VmHWM:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _print(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
