"""Processes that load beside the trainer: the same micro-batches, errors that come through, clean ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardflow as sf
from shardflow.errors import (
    LoaderProcessError,
    NotFoundError,
    SampleError,
    ShardflowError,
    StateError,
    WaitTimeoutError,
)
from shardflow.format import Dataset
from shardflow.loading import Batch, Loader, World
from shardflow.loading.process import LoaderProcess
from shardflow.sampling import BatchSpec, TokenBudget
from tests.factories import make_dataset
from tests.integration.loader_support import digest_of, flip_bit, hooked, loader_threads, locate, open_loader
from tests.integration.loader_transforms import fail_oddly, stall

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = BatchSpec(micro_batch_size=2, micro_batches_per_step=2, tail="mask")
RAGGED = BatchSpec(
    budget=TokenBudget(max_tokens=64, max_samples=3), micro_batches_per_step=2, tail="mask", lanes=2
)
FIELDS: Mapping[str, sf.Field] = {
    "image": sf.Slices(num_slices=4, size=(32, 32), sampling="random"),
    "report": sf.Text(),
}
NATIVE: Mapping[str, sf.Field] = {"image": sf.Slices(), "report": sf.Text()}
TRANSFORMS = "tests.integration.loader_transforms"
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("dataset") / "a"
    return make_dataset(folder, num_samples=40, samples_per_shard=16, facts=True)


@pytest.fixture
def own_url(url: str, tmp_path: Path) -> str:
    """A dataset that a test may damage."""
    return str(shutil.copytree(url, tmp_path / "own"))


def _loader(dataset: Dataset | str, spec: BatchSpec = SPEC, fields: Any = FIELDS, **settings: Any) -> Loader:
    return open_loader(dataset, spec, fields, **{"execution": "process", **settings})


def _digests(batches: Iterable[Batch]) -> list[str]:
    return [digest_of(batch) for batch in batches]


def _pids(loader: Loader) -> list[int]:
    processes = loader._runtime.processes
    return processes.pids if processes is not None else []


def _named_memory(pid: int) -> list[str]:
    """What a process maps or holds open that has a name and would stay behind."""
    links = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
    mapped = Path(f"/proc/{pid}/maps").read_text().splitlines()
    assert any("memfd:shardflow-batches" in line for line in mapped)
    return [name for name in [*links, *mapped] if "/dev/shm" in name]


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


# ---- the same micro-batches ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "spec", "transform"),
    [(FIELDS, SPEC, f"{TRANSFORMS}:jitter"), (NATIVE, RAGGED, None), ({"report": sf.Text()}, SPEC, None)],
    ids=["slices changed", "native, ragged", "text"],
)
def test_every_execution_yields_the_same_bytes_in_the_same_order(
    url: str, fields: Any, spec: BatchSpec, transform: str | None
) -> None:
    world = World(rank=1, world_size=2)
    found = {}
    for execution in ("threads", "process", "workers"):
        with _loader(url, spec, fields, world=world, execution=execution, transform=transform) as loader:
            epochs = [_digests(loader), _digests(loader)]
            found[execution] = epochs
            assert [len(digests) for digests in epochs] == [loader.num_micro_batches_in(e) for e in (0, 1)]
            assert loader.epoch == 2
    assert found["threads"][0] != found["threads"][1]
    assert found["process"] == found["threads"]
    assert found["workers"] == found["threads"]


@pytest.mark.parametrize("execution", ["workers"])
def test_a_state_goes_on_in_another_execution(url: str, execution: str) -> None:
    with _loader(url, execution="threads") as whole:
        expected = _digests(whole)
    with _loader(url, execution=execution) as loader:
        iterator = iter(loader)
        received = _digests(next(iterator) for _ in range(6))
        state = loader.state_dict()
    with _loader(url, execution="threads") as other:
        other.load_state_dict(state)
        assert received + _digests(other) == expected
    with _loader(url, execution=execution) as again:
        again.load_state_dict(state)
        assert received + _digests(again) == expected


def test_batches_may_be_kept(url: str) -> None:
    with _loader(url, execution="threads") as loader:
        expected = _digests(loader)
    with _loader(url) as loader:
        kept = list(loader)
        assert len({batch.buffer.ctypes.data for batch in kept}) == len(expected)
        for _ in loader:  # another epoch does not touch them
            pass
        loader.close()  # nor does the end of the process
        assert _digests(kept) == expected


def test_an_iteration_that_was_broken_off_leaves_nothing_in_the_next(url: str) -> None:
    with _loader(url, execution="threads") as loader:
        expected = _digests(loader)
    with _loader(url, prefetch_bytes=1 << 20) as loader:
        for num_taken in (1, 3, 0, 2):
            iterator = iter(loader)
            for _ in range(num_taken):
                next(iterator)
            loader.load_state_dict(_loader(url, execution="threads").state_dict())
            with pytest.raises(StateError):
                next(iterator)
        assert len(_pids(loader)) == 1
        assert _digests(loader) == expected


def test_counters_come_to_the_trainer(url: str) -> None:
    found = []
    for execution in ("threads", "process"):
        with _loader(url, execution=execution) as loader:
            for _ in loader:
                pass
            totals = loader.counters.totals
            found.append([totals(name).num_items for name in ("read", "decode", "collate", "wait")])
            found[-1].append(totals("read").num_bytes)
    assert found[0] == found[1]
    assert min(found[0]) > 0


# ---- errors --------------------------------------------------------------------------------------


def _damage(url: str) -> None:
    dataset = Dataset.open(url)
    path, offset, _ = locate(dataset, dataset.splits["train"][3], "s000.i0001")
    flip_bit(path, offset + 40)


def test_a_bad_sample_is_masked_and_told(own_url: str) -> None:
    _damage(own_url)
    found = []
    for execution in ("threads", "process"):
        with _loader(own_url, fields=NATIVE, execution=execution) as loader:
            found.append((_digests(loader), loader.masks()))
    assert found[0] == found[1]
    assert [row["reason"] for row in found[0][1]] == ["CHECKSUM_MISMATCH"]
    with _loader(own_url, fields=NATIVE) as again:
        again.load_masks(found[0][1])
        assert _digests(again) == found[0][0]


def test_errors_have_their_class_and_sentence(own_url: str) -> None:
    _damage(own_url)

    def message(kind: type[BaseException], execution: str, source: Any = own_url, **settings: Any) -> str:
        with _loader(source, execution=execution, **settings) as loader, pytest.raises(kind) as caught:
            for _ in loader:
                pass
        if execution != "threads":
            assert any("loader process" in note for note in caught.value.__notes__)
        assert not loader_threads()
        return str(caught.value)

    for kind, settings in (
        (SampleError, {"fields": NATIVE, "on_bad_sample": "raise"}),
        # Every sample fails, so one thread alone decides which of them is named.
        (SampleError, {"transform": f"{TRANSFORMS}:fail", "num_threads": 1}),
    ):
        assert message(kind, "process", **settings) == message(kind, "threads", **settings)
    assert "OddError" in message(LoaderProcessError, "workers", hooked(own_url, fail_oddly)[0])
    next((Path(own_url) / "shards").glob("train-*.tar")).unlink()
    assert message(NotFoundError, "process") == message(NotFoundError, "threads")


def test_a_wait_that_takes_too_long_names_what_the_process_waits_for(url: str) -> None:
    said = ""
    for timeout_s in (2.0, 8.0, 30.0):  # on a busy machine the start alone may take the first of them
        dataset, _ = hooked(url, stall)
        with _loader(dataset, wait_timeout_s=timeout_s) as loader, pytest.raises(WaitTimeoutError) as caught:
            next(iter(loader))
        said = str(caught.value)
        if "stage read of shard train-" in said:
            break
    assert "stage read of shard train-" in said
    assert "tier local" in said


def test_a_process_that_stands_still_is_named(url: str) -> None:
    with _loader(url, wait_timeout_s=DEADLINE_S, prefetch_bytes=1) as loader:
        iterator = iter(loader)
        next(iterator)
        (pid,) = _pids(loader)
        os.kill(pid, signal.SIGSTOP)
        try:
            processes = loader._runtime.processes
            assert processes is not None
            processes._wait_timeout_s = 0.5
            with pytest.raises(WaitTimeoutError, match="loader process 0 gives no answer"):
                for _ in iterator:
                    pass
        finally:
            os.kill(pid, signal.SIGCONT)


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["process", "workers"])
def test_a_killed_process_is_an_error_at_once_and_iter_starts_another(url: str, execution: str) -> None:
    with _loader(url, execution="threads") as loader:
        expected = _digests(loader)
    with _loader(url, execution=execution, prefetch_bytes=1) as loader:
        iterator = iter(loader)
        kept = [next(iterator), next(iterator)]  # one of each process
        pid = _pids(loader)[-1]
        assert not _named_memory(pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LoaderProcessError, match="SIGKILL"):
            for _ in iterator:
                pass
        with pytest.raises(StateError):
            next(iterator)
        assert _digests(kept) == expected[:2]  # its memory is still there
        state = loader.position.step
        assert _digests(loader) == expected[2 * state :]
        assert pid not in _pids(loader)


def test_signals_to_the_whole_group_do_not_end_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start_iteration, signals = LoaderProcess.start_iteration, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def signalled(self: LoaderProcess, *arguments: Any) -> None:
        # Its Python has hardly begun, and none of our code runs in it.
        for number in signals:
            os.kill(self.pid, number)
        start_iteration(self, *arguments)

    monkeypatch.setattr(LoaderProcess, "start_iteration", signalled)
    with _loader(url, prefetch_bytes=1) as loader:
        iterator = iter(loader)
        next(iterator)
        for number in signals:
            os.kill(_pids(loader)[0], number)
        assert len(list(iterator)) == len(loader) - 1
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


_TRAINER = """
import sys, time
import shardflow as sf
loader = sf.Loader(
    sf.open(sys.argv[1]), split="train", seed=5,
    batch=sf.BatchSpec(micro_batch_size=2, micro_batches_per_step=2),
    fields={"image": sf.Slices(num_slices=4, size=(32, 32)), "report": sf.Text()},
    config=sf.LoaderConfig(execution=sys.argv[2], wait_timeout_s=300.0),
)
iterator = iter(loader)
kept = next(iterator)
print(*loader._runtime.processes.pids, flush=True)
if sys.argv[3] == "sleep":
    time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("execution", "then"), [("process", "sleep"), ("workers", "sleep"), ("process", "end")]
)
def test_processes_end_with_a_trainer_that_is_killed_and_leave_no_memory(
    url: str, tmp_path: Path, execution: str, then: str
) -> None:
    # The script has no `if __name__ == "__main__"`: nothing imports it a second time.
    script = tmp_path / "trainer.py"
    script.write_text(_TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script), url, execution, then],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    with trainer.stdout:
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == (1 if execution == "process" else 2)
    if then == "sleep":
        assert not _named_memory(pids[0])
        trainer.kill()
    assert trainer.wait(DEADLINE_S) == (-signal.SIGKILL if then == "sleep" else 0)
    for pid in pids:
        _wait_for_end(pid)


def test_close_and_the_end_of_the_loader_end_the_processes(url: str) -> None:
    loader = _loader(url)
    iterator = iter(loader)
    assert not _pids(loader)  # nothing runs before the first micro-batch
    next(iterator)
    pids = _pids(loader)
    loader.close()
    iterator = iter(loader)
    next(iterator)
    pids += _pids(loader)
    assert len(set(pids)) == 2
    del loader, iterator
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_a_forked_child_cannot_take_its_parents_micro_batches(url: str) -> None:
    with _loader(url) as loader, _loader(url, execution="threads") as expected:
        iterator = iter(loader)
        first = next(iterator)
        pid = os.fork()
        if not pid:
            del first  # the child's copy says nothing about the parent's
            try:
                next(iterator)
            except ShardflowError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert _digests([first, *iterator]) == _digests(expected)


def test_descriptors_and_memory_stand_still(url: str) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with _loader(url, prefetch_bytes=1 << 20) as loader:
        for _ in range(2):
            for batch in loader:
                assert np.isfinite(batch.info.weight).all()
        before = descriptors()
        for _ in range(3):
            for batch in loader:
                assert batch.num_slots
        assert descriptors() == before
