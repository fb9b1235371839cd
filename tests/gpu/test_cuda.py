"""What only a GPU can show: copies beside computation, memory that is not reused too soon, waits by events.

``make test-gpu`` runs these; every other target leaves them out.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from shardflow.errors import ConfigError
from shardflow.fields.augmentation import Draw
from shardflow.fields.volumes.augmentation import IndexMap, VolumeAugmentSettings
from shardflow.fields.volumes.resampling import Interpolation
from shardflow.loading.tensors import to_tensors
from shardflow.telemetry import StageCounters
from shardflow.training.device.images import ImageParameters, ImagePipeline, stack_draws
from shardflow.training.device.transfer import CudaTransfer, open_transfer
from shardflow.training.device.volumes import Places, changed
from shardflow.training.interval import DeviceClock, LastGradient

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def arrays(number: int, num_bytes: int = 4 * MIB) -> dict[str, np.ndarray]:
    return {
        "image": np.full(num_bytes // 2, number, np.int16),
        "row": np.arange(number, number + 3),
        "mask": np.array([True, False]),
    }


def test_what_arrives_is_what_was_sent(device: torch.device) -> None:
    transfer = open_transfer(device, ring_bytes=8 * MIB, counters=StageCounters())
    for number in range(50):  # many times around the ring
        tensors = transfer.receive(transfer.send(arrays(number)))
        for name, array in arrays(number).items():
            assert tensors[name].device == device
            assert np.array_equal(tensors[name].cpu().numpy(), array), (number, name)


def test_nothing_is_written_over_while_the_device_is_behind(device: torch.device) -> None:
    """The host runs ahead through the ring and the allocator; every sum must still be of its own batch."""
    transfer = CudaTransfer(device, ring_bytes=9 * MIB, counters=StageCounters())
    slow = torch.randn(4096, 4096, device=device)
    sums = []
    for number in range(30):
        source = arrays(number)
        parcel = transfer.send(source)
        source["image"][:] = -1  # send has taken what it needs
        tensors = transfer.receive(parcel)
        for _ in range(4):
            slow = slow @ slow
            slow = slow / slow.norm()
        sums.append(tensors["image"].double().mean())
        del tensors, parcel  # without record_stream the next copy could take this memory
    assert [float(value) for value in sums] == [float(number) for number in range(30)]


def test_batches_of_users_arrive_whole_while_the_device_is_behind(device: torch.device) -> None:
    slow = torch.randn(4096, 4096, device=device)
    sums = []
    for number in range(100):  # around the ring, with the host ahead of the device
        source = arrays(number)
        tensors = to_tensors({**source, "views": [source["image"][:5], None], "report": ["a"]}, "cuda")
        source["image"][:] = -1
        for _ in range(4):
            slow = slow @ slow
            slow = slow / slow.norm()
        sums.append((tensors["image"].double().mean(), tensors["views"][0].double().mean()))
        assert tensors["report"] == ["a"]
        del tensors
    assert [(float(one), float(other)) for one, other in sums] == [(float(n), float(n)) for n in range(100)]
    assert to_tensors({"row": np.arange(3)}, pin_memory=True)["row"].is_pinned()
    with pytest.raises(ConfigError, match="cuda:99"):
        to_tensors({}, "cuda:99")


def test_copies_run_beside_computation(device: torch.device) -> None:
    counters = StageCounters()
    transfer = CudaTransfer(device, ring_bytes=256 * MIB, counters=counters)
    work = torch.randn(8192, 8192, device=device)
    transfer.receive(transfer.send(arrays(0, 64 * MIB)))
    torch.cuda.synchronize()
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    for _ in range(40):
        work = work @ work
        work = work / work.norm()
    done.record()
    parcel = transfer.send(arrays(1, 64 * MIB))
    parcel.arrived.synchronize()
    is_done = done.query()  # type: ignore[no-untyped-call]
    assert not is_done  # the copy passed the computation that was launched before it
    torch.cuda.synchronize()
    transfer.drain()
    assert counters.totals("copy").num_bytes >= 128 * MIB


def test_the_wait_is_the_time_in_which_the_device_had_nothing_to_do(device: torch.device) -> None:
    counters = StageCounters()
    transfer = CudaTransfer(device, ring_bytes=64 * MIB, counters=counters)
    transfer.receive(transfer.send(arrays(0)))
    torch.cuda.synchronize()
    transfer.drain()
    transfer.ask()
    time.sleep(0.3)  # the loader is slow, and the device idle
    transfer.receive(transfer.send(arrays(1)))
    assert transfer.drain() >= 0.25
    work = torch.randn(8192, 8192, device=device)
    for _ in range(100):
        work = work @ work
        work = work / work.norm()
    launched = time.perf_counter()
    transfer.ask()
    transfer.receive(transfer.send(arrays(2)))
    waited_s = transfer.drain()
    assert waited_s < time.perf_counter() - launched  # the device had work meanwhile
    assert counters.totals("data_wait").num_items == 2


def test_the_parts_of_a_step_are_timed_on_the_device_and_nothing_waits_for_it(device: torch.device) -> None:
    layers = [torch.nn.Linear(4096, 4096, bias=False, device=device) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    inputs = torch.randn(4096, 4096, device=device)
    counters = StageCounters()
    clock = DeviceClock(counters, device)
    last = LastGradient(model, clock)
    model(inputs).sum().backward()
    torch.cuda.synchronize()
    began: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    ended: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    began.record()
    for _ in range(3):
        clock.on_forward()
        loss = model(inputs).sum()
        clock.on_backward(is_exchanged=True)
        last.on_backward(is_exchanged=True)
        loss.backward()
        last.on_backward_end()
        clock.on_backward_end()
        clock.on_optimizer()
        model.zero_grad(set_to_none=False)
        clock.on_optimizer_end()
    ended.record()
    torch.cuda.synchronize()
    clock.on_loss()
    names = ("forward", "backward", "exchange", "optimizer")
    assert [counters.totals(name).num_items for name in names] == [3, 3, 3, 3]
    seconds = [counters.totals(name).seconds for name in names]
    # The backward is two products a layer, and the stages are all that the device did.
    assert seconds[1] > seconds[0] > seconds[2]
    assert 0.5 < sum(seconds) / (began.elapsed_time(ended) / 1000) <= 1.01


def test_one_larger_than_the_ring_arrives_too(device: torch.device) -> None:
    transfer = CudaTransfer(device, ring_bytes=MIB, counters=StageCounters())
    for number in (1, 2):
        tensors = transfer.receive(transfer.send(arrays(number, 8 * MIB)))
        assert float(tensors["image"].double().mean()) == number


def test_images_are_those_of_a_cpu_and_compile(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(-1000, 2000, (2, 4, 96, 80), generator=generator).to(torch.int16)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])
    affine, intensity = stack_draws([Draw(rotate_deg=10, zoom=1.1), Draw(gain=1.1)], rows=64, columns=48)
    pipeline = ImagePipeline(64, 48)

    def parameters(where: torch.device) -> ImageParameters:
        return ImageParameters(
            display_range=torch.tensor([[-160.0, 240.0], [0.0, 1000.0]], device=where),
            is_standardized_B=torch.tensor([False, True], device=where),
            affine_B23=torch.from_numpy(affine).to(where),
            intensity_B3=torch.from_numpy(intensity).to(where),
            content_box_BK4=torch.tensor([[[0, 0, 96, 80]] * 4, [[8, 0, 80, 80]] * 4], device=where),
        )

    expected = pipeline(images, mask, parameters(torch.device("cpu")))
    there = images.to(device), mask.to(device), parameters(device)
    assert torch.allclose(pipeline(*there).cpu(), expected, atol=1e-3)
    compiled = torch.compile(pipeline, fullgraph=True)
    assert torch.allclose(compiled(*there).cpu(), expected, atol=1e-3)


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_volumes_are_augmented_as_on_the_cpu(device: torch.device, mode: Interpolation) -> None:
    """Which voxel is nearest is equal in every bit, whatever the device."""
    settings = VolumeAugmentSettings.preset(
        "strong", roi_size=(40, 44, 36), rotate_prob=1.0, elastic_prob=1.0
    )
    region = torch.randn((2, 64, 60, 56), generator=torch.Generator().manual_seed(3))
    for slot in range(4):
        place = (1, 2, 3, slot)
        index_map = IndexMap.of(
            settings.draw(7, place), np.diag([2.0, 0.7, 0.7, 1.0]), region.shape[1:], settings
        )
        tone = settings.draw_intensity(7, "ct", place)
        found = []
        for where in (torch.device("cpu"), device):
            values = Places(index_map, region.shape[1:], where).sample(region.to(where), mode, -1.0)
            found.append(values.cpu() if mode == "nearest" else changed(values, tone).cpu())
        if mode == "nearest":
            assert torch.equal(*found)
        else:
            torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
