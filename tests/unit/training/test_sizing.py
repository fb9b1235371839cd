"""The arithmetic of large models: what it says of known cases, and that the page repeats it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from shardflow.errors import ConfigError
from shardflow.training.sizing import Hardware, LargeModel, StepShape, gpu_needs, node_needs

pytestmark = pytest.mark.fast

PAGE = Path(__file__).resolve().parents[3] / "docs" / "training.md"
MODEL = LargeModel(num_parameters=32_800_000_000, num_layers=64, width=5120, vocab_size=152_064)


def shape(samples: int = 2, slices: int = 32, micro_batches: int = 256) -> StepShape:
    return StepShape(
        samples_per_micro_batch=samples,
        slices_per_sample=slices,
        tokens_per_slice=256,
        text_tokens=512,
        micro_batches_per_step=micro_batches,
        bytes_per_slice=150_000,
    )


def rows_of_page() -> dict[int, list[float]]:
    """Return the rows of the page's table, by their number of GPUs."""
    (table,) = re.findall(
        r"^\| GPUs \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    rows = [[float(cell) for cell in line.strip(" |").split("|")] for line in table.splitlines()]
    return {int(row[0]): row[1:] for row in rows}


@pytest.mark.parametrize("num_gpus", [16, 64, 256])
def test_the_page_says_what_the_arithmetic_says(num_gpus: int) -> None:
    hardware = Hardware(num_gpus=num_gpus)
    gpu, node = gpu_needs(MODEL, shape(), hardware), node_needs(MODEL, shape(), hardware)
    planned = [
        gpu.total / 1e9,
        node.step_s,
        node.data_bytes_per_s / 1e6,
        node.gathered_bytes_per_s / 1e9,
        node.checkpoint_bytes / 1e9,
    ]
    assert rows_of_page()[num_gpus] == pytest.approx(planned, abs=0.051)


def test_state_is_shared_and_nothing_else() -> None:
    one, other = (gpu_needs(MODEL, shape(), Hardware(num_gpus=n)) for n in (64, 128))
    assert one.state == 2 * other.state == 16 * MODEL.num_parameters // 64
    assert one.total - one.state == other.total - other.state


def test_whole_gradients_do_not_fit_anywhere() -> None:
    needs = gpu_needs(MODEL, shape(), Hardware(num_gpus=64), accumulates_whole=True)
    assert needs.gradient_of_a_layer == 4 * MODEL.num_parameters > 100e9


def test_layers_and_embeddings_make_the_model() -> None:
    whole = MODEL.embedding_parameters + MODEL.num_layers * MODEL.layer_parameters
    assert 0 <= MODEL.num_parameters - whole < MODEL.num_layers
    tied = LargeModel(
        num_parameters=10**9, num_layers=10, width=1000, vocab_size=10_000, has_tied_embeddings=True
    )
    assert tied.embedding_parameters == 10**7


def test_a_step_takes_its_operations() -> None:
    hardware = Hardware(num_gpus=64, flops_per_s=1e15)
    needs = node_needs(MODEL, shape(), hardware)
    operations = 8 * MODEL.num_parameters * 256 * shape().tokens_per_micro_batch
    assert needs.step_s == pytest.approx(operations / (64 * 1e15))
    assert needs.samples_per_s == pytest.approx(256 * 2 / needs.step_s / 8)


def test_a_number_of_gpus_that_does_not_divide_the_step_waits_for_fillers() -> None:
    even, odd = (node_needs(MODEL, shape(), Hardware(num_gpus=n)) for n in (128, 136))
    assert odd.step_s == even.step_s
    assert math.isclose(odd.samples_per_s * 17, even.samples_per_s * 16)


def test_half_the_slices_are_half_the_data_and_fewer_activations() -> None:
    many, few = (shape(slices=n) for n in (32, 16))
    hardware = Hardware(num_gpus=64)
    assert gpu_needs(MODEL, few, hardware).activations < 0.55 * gpu_needs(MODEL, many, hardware).activations
    assert few.tokens_per_sample == 16 * 256 + 512


def test_parts_of_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"multiple of gpus_per_node \(8\), got 12"):
        Hardware(num_gpus=12)
