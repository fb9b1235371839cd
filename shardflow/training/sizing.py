"""What a sharded run needs, by arithmetic: memory of a GPU, bytes of a node, seconds of a checkpoint.

For planning on paper before machines are asked for (docs/training.md); a run measures the same
things. Weights, gradients and both moments of AdamW are float32 and shared by all GPUs; layers are gathered
and computed in half precision; activations are recomputed in the backward, so that only each layer's input
is kept. Needs no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardflow.errors import ConfigError

_STATE_BYTES = 16
"""Of a parameter: weight, gradient and two moments in float32."""
_SAVED_BYTES = 12
"""Of a parameter in a checkpoint: all but the gradient."""
_HALF = 2
_LAYER_BYTES_PER_ELEMENT = 34
"""Of a transformer layer's activations in half precision, for each token and element of the width, without
the attention matrix, which flash attention does not keep (Korthikanti et al. 2022, equation 1)."""
_LOGIT_BYTES = 10
"""Of a logit: half precision, its float32 copy, and the gradient of that."""
_FLOPS_PER_PARAMETER = 8
"""For each token: 2 forward, 2 again when it is recomputed, 4 backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeModel:
    """The numbers of a model that its memory follows from."""

    num_parameters: int
    num_layers: int
    width: int
    vocab_size: int
    has_tied_embeddings: bool = False

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and the head, which are gathered for the whole step."""
        return self.vocab_size * self.width * (1 if self.has_tied_embeddings else 2)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return max(0, self.num_parameters - self.embedding_parameters) // self.num_layers


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What a GPU runs at a time, and a step holds."""

    samples_per_micro_batch: int
    slices_per_sample: int
    tokens_per_slice: int
    text_tokens: int
    """Longest row of a report; logits are computed for these alone."""
    micro_batches_per_step: int
    bytes_per_slice: int
    """As stored, such as 150,000 for a CT slice of 512 x 512 in ``b2nd``."""

    @property
    def tokens_per_sample(self) -> int:
        """Places of a sample in the sequence."""
        return self.slices_per_sample * self.tokens_per_slice + self.text_tokens

    @property
    def tokens_per_micro_batch(self) -> int:
        """Places of a micro-batch."""
        return self.samples_per_micro_batch * self.tokens_per_sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What the run is on."""

    num_gpus: int
    gpus_per_node: int = 8
    flops_per_s: float = 4e14
    """That a GPU does in training, not on its data sheet: 40 % of the peak is good."""
    host_copy_bytes_per_s: float = 2e10
    """From a GPU to pinned memory of its host."""
    storage_bytes_per_s: float = 2e9
    """That a node writes to the storage of the run folder."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.num_gpus % self.gpus_per_node:
            raise ConfigError(
                f"num_gpus must be a multiple of gpus_per_node ({self.gpus_per_node}), got {self.num_gpus}; "
                "plan whole nodes."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedsOfAGpu:
    """Bytes of one GPU under FSDP2."""

    state: int
    """Its share of weights, gradients and moments."""
    gathered: int
    """Embeddings, head, and two layers at a time: one computes, the next one arrives."""
    gradient_of_a_layer: int
    """A layer's whole gradient in float32 before it is shared out; all layers' with whole accumulation."""
    activations: int
    """The input of each layer, and all of one layer that is recomputed."""
    logits: int

    @property
    def total(self) -> int:
        """All together; leave a tenth of a GPU for kernels, communication and fragmentation."""
        return sum(asdict(self).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedsOfANode:
    """What one node's storage and links carry."""

    step_s: float
    samples_per_s: float
    data_bytes_per_s: float
    """Of stored slices, from the dataset or its cache."""
    gathered_bytes_per_s: float
    """That each GPU receives for gathered layers, forward and backward, and sends for gradients."""
    checkpoint_bytes: int
    """That the node writes."""
    checkpoint_stall_s: float
    """Of training, for the copy to host memory."""
    checkpoint_write_s: float
    """Beside the steps."""


def gpu_needs(
    model: LargeModel, step: StepShape, hardware: Hardware, *, accumulates_whole: bool = False
) -> NeedsOfAGpu:
    """Work out the memory of a GPU.

    Args:
        model: The model.
        step: What a GPU runs at a time.
        hardware: How many share the model.
        accumulates_whole: ``parallel.accumulation = "whole"`` with more than one micro-batch a rank.

    Example:
        >>> model = LargeModel(num_parameters=32_800_000_000, num_layers=64, width=5120, vocab_size=152_064)
        >>> step = StepShape(
        ...     samples_per_micro_batch=2,
        ...     slices_per_sample=32,
        ...     tokens_per_slice=256,
        ...     text_tokens=512,
        ...     micro_batches_per_step=256,
        ...     bytes_per_slice=150_000,
        ... )
        >>> round(gpu_needs(model, step, Hardware(num_gpus=64)).total / 1e9, 1)
        31.2
    """
    tokens, samples = step.tokens_per_micro_batch, step.samples_per_micro_batch
    layer_gradient = 4 * model.layer_parameters
    return NeedsOfAGpu(
        state=_STATE_BYTES * -(-model.num_parameters // hardware.num_gpus),
        gathered=_HALF * (model.embedding_parameters + 2 * model.layer_parameters),
        gradient_of_a_layer=4 * model.num_parameters if accumulates_whole else layer_gradient,
        activations=tokens * model.width * (_HALF * model.num_layers + _LAYER_BYTES_PER_ELEMENT),
        logits=_LOGIT_BYTES * samples * step.text_tokens * model.vocab_size,
    )


def node_needs(model: LargeModel, step: StepShape, hardware: Hardware) -> NeedsOfANode:
    """Work out what a node's storage and links carry.

    Args:
        model: The model.
        step: What a step holds.
        hardware: How fast it computes and writes.
    """
    rounds = -(-step.micro_batches_per_step // hardware.num_gpus)
    micro_batch_s = (
        _FLOPS_PER_PARAMETER * model.num_parameters * step.tokens_per_micro_batch / hardware.flops_per_s
    )
    step_s = rounds * micro_batch_s
    num_nodes = hardware.num_gpus // hardware.gpus_per_node
    samples_per_s = step.micro_batches_per_step * step.samples_per_micro_batch / step_s / num_nodes
    saved = _SAVED_BYTES * model.num_parameters
    return NeedsOfANode(
        step_s=step_s,
        samples_per_s=samples_per_s,
        data_bytes_per_s=samples_per_s * step.slices_per_sample * step.bytes_per_slice,
        # Each micro-batch: layers in half precision twice, gradients in float32 once.
        gathered_bytes_per_s=(2 * _HALF + 4) * model.num_parameters / micro_batch_s,
        checkpoint_bytes=saved // num_nodes,
        checkpoint_stall_s=saved / hardware.num_gpus / hardware.host_copy_bytes_per_s,
        checkpoint_write_s=saved / num_nodes / hardware.storage_bytes_per_s,
    )
