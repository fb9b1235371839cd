"""The feed works ahead of the steps; the position is where the steps are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from shardflow.format import Dataset
from shardflow.loading import Loader, LoaderConfig
from shardflow.loading.tensors import Parcel
from shardflow.sampling import BatchSpec
from shardflow.telemetry import StageCounters
from shardflow.training.device.transfer import Transfer
from shardflow.training.hooks import LoopHook
from shardflow.training.inputs import DeviceFeed, InputMaker, MicroInputs, step_inputs
from shardflow.training.ledger import LedgerMicroBatch
from shardflow.training.text import ReportTokenizer
from tests.tiny_runs import TinyInput, tiny_fields


class Watched(Transfer):
    """Notes what the feed does, in order."""

    def __init__(self) -> None:
        super().__init__(StageCounters())
        self.events: list[str] = []

    def ask(self) -> None:
        self.events.append("ask")
        super().ask()

    def send(self, arrays: Any) -> Parcel:
        self.events.append("send")
        return super().send(arrays)

    def receive(self, parcel: Parcel) -> dict[str, torch.Tensor]:
        self.events.append("receive")
        return super().receive(parcel)


def open_loader(tiny: TinyInput, per_step: int = 2, prefetch_bytes: int = 1 << 20) -> Loader:
    return Loader(
        Dataset.open(tiny.dataset),
        split="train",
        batch=BatchSpec(micro_batch_size=2, micro_batches_per_step=per_step),
        seed=1,
        fields=tiny_fields(),
        config=LoaderConfig(prefetch_bytes=prefetch_bytes),
    )


def maker(tiny: TinyInput, transfer: Transfer) -> InputMaker:
    return InputMaker(ReportTokenizer.load(tiny.tokenizer), max_tokens=24, transfer=transfer)


class Noting(LoopHook):
    """Notes the phases of a step and what was taken."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.taken: list[LedgerMicroBatch] = []

    def on_data_wait(self) -> None:
        self.phases.append("wait")

    def on_micro_batch(self, entry: LedgerMicroBatch, *, is_last: bool) -> None:
        self.phases.append("compute")
        self.taken.append(entry)

    def on_look_ahead(self) -> None:
        self.phases.append("read ahead")

    def on_look_ahead_end(self) -> None:
        self.phases.append("compute")


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("per_step", [1, 2])
def test_the_position_counts_what_steps_took(tiny: TinyInput, looks_ahead: bool, per_step: int) -> None:
    with open_loader(tiny, per_step) as loader, open_loader(tiny, per_step) as plain:
        feed = DeviceFeed(loader, maker(tiny, Watched()), looks_ahead=looks_ahead)
        expected = [tuple(batch.sample_keys) for batch in plain]
        found = []
        for step in range(loader.num_steps):
            assert loader.position.step == step
            one = Noting()
            micros = [micro for micro, _ in step_inputs(feed, per_step, one)]
            assert micros == list(range(per_step))
            found += [entry.keys for entry in one.taken]
        assert found == expected
        assert (loader.position.epoch, loader.position.step) == (1, 0)
        assert feed.take() is None


def test_a_run_that_stops_goes_on_with_what_was_sent_ahead(tiny: TinyInput) -> None:
    with open_loader(tiny) as loader, open_loader(tiny) as again:
        feed = DeviceFeed(loader, maker(tiny, Watched()), looks_ahead=True)
        list(step_inputs(feed, 2))
        state = loader.state_dict()
        expected = feed.take()
        assert expected is not None
        feed.close()
        again.load_state_dict(state)
        resumed = DeviceFeed(again, maker(tiny, Watched()), looks_ahead=False).take()
        assert resumed is not None
        assert resumed.entry == expected.entry
        assert isinstance(resumed.inputs, MicroInputs)
        assert isinstance(expected.inputs, MicroInputs)
        assert torch.equal(resumed.inputs.images_BKHW, expected.inputs.images_BKHW)


def test_the_next_step_is_sent_when_this_ones_work_is_launched(tiny: TinyInput) -> None:
    with open_loader(tiny) as loader:
        transfer = Watched()
        feed = DeviceFeed(loader, maker(tiny, transfer), looks_ahead=True)
        noted = Noting()
        for _ in step_inputs(feed, 2, noted):
            transfer.events.append("compute")
        assert noted.phases == ["wait", "compute", "wait", "compute", "read ahead", "compute"]
        first = ["ask", "send", "receive", "compute"]
        assert transfer.events == [*first, *first, "ask", "send"]
        transfer.events.clear()
        assert feed.take() is not None
        assert transfer.events == ["ask", "receive"]


def test_a_bad_sample_is_counted_with_its_step(tiny: TinyInput, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was only sent ahead is in no checkpoint, its masks neither."""
    with open_loader(tiny) as loader:
        batches = iter(loader)
        monkeypatch.setattr(
            "shardflow.loading.batch.Batch.quarantined", property(lambda batch: [f"bad of {batch.step}"])
        )
        recorded: list[Any] = []
        monkeypatch.setattr(loader._quarantine, "record", lambda rows, *_: recorded.extend(rows))
        for _ in range(3):
            assert batches.fetch() is not None
        batches.count_fetched()
        batches.count_fetched()
        assert recorded == ["bad of 0", "bad of 0"]
        assert loader.position.step == 1


def test_a_batch_is_not_kept_after_it_was_sent(tiny: TinyInput) -> None:
    """On a device its memory goes back to the loader at once."""

    class Copying(Transfer):
        def send(self, arrays: dict[str, NDArray[Any]]) -> Parcel:  # type: ignore[override]
            return Parcel({name: torch.tensor(array) for name, array in arrays.items()})

    with open_loader(tiny, prefetch_bytes=1) as loader:
        feed = DeviceFeed(loader, maker(tiny, Copying(StageCounters())), looks_ahead=True)
        held = [feed.take() for _ in range(loader.num_steps * 2)]
        assert all(held)
        assert loader.num_buffers_allocated < len(held)


def test_settings_change_between_steps_under_a_feed_that_is_one_ahead(tiny: TinyInput) -> None:
    """The execution too: what was sent ahead is handed out next, and nothing comes twice or not at all."""
    with open_loader(tiny) as loader, open_loader(tiny) as plain:
        feed = DeviceFeed(loader, maker(tiny, Watched()), looks_ahead=True)
        expected = [tuple(batch.sample_keys) for batch in plain]
        found, handed_over = [], []
        for step in range(loader.num_steps):
            one = Noting()
            list(step_inputs(feed, 2, one))
            found += [entry.keys for entry in one.taken]
            loader.tunables.set("loader.num_threads", 1 + step % 2)
            if step in (0, 2):
                loader.tunables.set("loader.execution", ("process", "", "threads")[step])
            handed_over.append(feed.apply_pending())
            if step < loader.num_steps - 1:
                assert loader.position.step == step + 1
        assert found == expected
        assert handed_over[:3] == [True, False, loader.num_steps > 3]
        assert feed.take() is None
