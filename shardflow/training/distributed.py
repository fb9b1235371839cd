"""Ranks of a run: devices, stop signals, process groups, and the model on several ranks.

Owns the process groups and their timeouts. There are two groups: the *gradient group* (NCCL on GPUs, gloo on
CPUs), which runs nothing but the model's own collectives, and a gloo *control group* for everything else:
barriers that name who is missing, and small JSON facts. Invariant: no unbounded work happens inside a
collective; a rank prepares first (data, model, checkpoint), then waits for the others at `Ranks.barrier`,
whose deadline names the missing ranks.

SIGTERM and SIGUSR1 ask the run to finish its step, write a checkpoint and stop; schedulers send one of them
before they take a machine away. The handler only sets a flag; the ranks look at it once a step, together,
because a rank that stopped alone would hang the others. A repeated signal changes nothing.

Each rank holds the whole model (DDP) or a share of it (FSDP2). Both average gradients over ranks, so a step
is the same sum under either (docs/adr/0050, 0051). Blocks are the layers that a transformers model lists as
not to be split. Ascend NPUs need the package ``torch_npu``, which registers the device ``npu`` and the
backend ``hccl`` when it is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from shardflow.errors import ConfigError, RanksDisagreeError, ShardflowError, WaitTimeoutError
from shardflow.logs import counted
from shardflow.training.config import ParallelConfig, TimeoutConfig
from shardflow.training.doctor import refuse_unknown_names
from shardflow.training.health.monitor import HealthMonitor

if TYPE_CHECKING:  # a second to import, which only runs that share their model take
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_NAMES: Final = {"cuda": "GPU", "npu": "NPU"}
_ASCEND: Final = "torch_npu"


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Choose this rank's device and make it the current one.

    Args:
        wanted: ``"cpu"``, ``"cuda"``, ``"npu"``, or ``"auto"``: a GPU, else an NPU, else the CPU.
        local_rank: Number of this rank on its machine.

    Raises:
        ConfigError: the device that is wanted is absent, or there are fewer than ranks on this machine.
    """
    kind = _first_present() if wanted == "auto" else wanted
    if kind == "cpu":
        return torch.device("cpu")
    num_devices = _num_devices(kind)
    if local_rank >= num_devices:
        missing = f", or install {_ASCEND}" if kind == "npu" and _ascend() is None else ""
        raise ConfigError(
            f"run.device '{kind}' must find one {_NAMES[kind]} for each rank of a machine, got {num_devices} "
            f"for local rank {local_rank}; start at most {num_devices} ranks here, or set run.device to "
            f"'cpu'{missing}."
        )
    device = torch.device(kind, local_rank)
    getattr(torch, kind).set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Return the name of the library that gradients travel by between such devices."""
    return _BACKENDS[device.type]


def device_name(device: torch.device) -> str:
    """Return a readable name of the device: the model of a GPU, else its kind."""
    return str(getattr(torch, device.type).get_device_name(device)) if device.type in _NAMES else device.type


def code_digest(folder: Path = Path(__file__).parents[1]) -> str:
    """Return a digest of the Python sources of shardflow: ranks of other code would not make equal steps."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def prefer_determinism() -> None:
    """Have torch choose kernels that give the same bits each time, in this process from now on.

    An operation without such a kernel runs as it is, with torch's warning. Before the first use of a GPU:
    cuBLAS reads its variable then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def _first_present() -> str:
    return next((kind for kind in ("cuda", "npu") if _num_devices(kind)), "cpu")


def _num_devices(kind: str) -> int:
    module: Any = torch.cuda if kind == "cuda" else _ascend()
    return int(module.device_count()) if module is not None and module.is_available() else 0


def _ascend() -> Any:
    """Return ``torch.npu``, or None where ``torch_npu`` is not installed."""
    if importlib.util.find_spec(_ASCEND) is None:
        return None
    importlib.import_module(_ASCEND)
    return getattr(torch, "npu", None)


STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Stop request to this process, and the signal that made it."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    @property
    def is_set(self) -> bool:
        """A stop signal has arrived."""
        return self.signal_name is not None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the stop signals inside the block, then give them back; for the main thread only."""
        former = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name


_LOGGER = logging.getLogger(__name__)
_MISSING_RANKS = re.compile(r"Ranks? ((?:\d+)(?:, \d+)*) failed to pass")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among the data-parallel ranks of the run."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup
    """Gradient group."""
    control: dist.ProcessGroup
    """Gloo group for barriers and small facts, on CPUs in any case."""
    timeouts: TimeoutConfig
    health: HealthMonitor = field(default_factory=HealthMonitor)
    """Receives the phases of this rank."""

    def barrier(self, phase: str, timeout_s: float) -> None:
        """Wait until every rank has reached ``phase``.

        Raises:
            WaitTimeoutError: ranks are missing after ``timeout_s``; rank 0 names them.
        """
        try:
            with self.health.together(f"waiting for all ranks: {phase}"):
                dist.monitored_barrier(
                    group=self.control, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True
                )
        except RuntimeError as error:
            raise WaitTimeoutError(self._describe_missing(phase, timeout_s, str(error))) from None

    def _describe_missing(self, phase: str, timeout_s: float, text: str) -> str:
        match = _MISSING_RANKS.search(text)
        if match is None:
            found = f"at least one is missing (seen by rank {self.rank})"
            remedy = "the log of rank 0 names them"
        else:
            names = f"ranks {match[1]}" if "," in match[1] else f"rank {match[1]}"
            found, remedy = f"no sign of {names}", "check the last lines of its log"
        return (
            f"not all {self.world_size} ranks reached the phase '{phase}' within {timeout_s:g} s, {found}; "
            f"{remedy}."
        )

    def all_gather_json(self, value: Any) -> list[Any]:
        """Give every rank the JSON value of every rank, in rank order.

        Raises:
            WaitTimeoutError: a rank did not give its value within ``timeouts.control_s``, or is gone.
        """
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([payload.numel()]), self.timeouts.control_s)
        # Gloo gathers equal sizes only; the padding is cut off again.
        padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        padded[: payload.numel()] = payload
        return [
            json.loads(part[: int(size)].numpy().tobytes())
            for part, size in zip(self._gather(padded, self.timeouts.control_s), sizes, strict=True)
        ]

    def agree(self, phase: str, facts: Mapping[str, Any]) -> None:
        """Compare facts between all ranks; one that differed would hang the others in a collective.

        Args:
            phase: What is about to begin, for the message.
            facts: JSON values that must be equal on all ranks.

        Raises:
            RanksDisagreeError: on every rank, naming each differing fact, its values and the ranks that hold
                them.
        """
        problem = find_disagreement(self.all_gather_json(dict(facts)))
        if problem is not None:
            raise RanksDisagreeError(
                f"the ranks disagree before {phase}: {problem}; start every rank with the same "
                "configuration, dataset and code."
            )

    def broadcast(self, value: Any) -> Any:
        """Give every rank the JSON value of rank 0; the others' ``value`` is ignored."""
        return self.all_gather_json(value if self.rank == 0 else None)[0]

    def all_gather_numbers(
        self, values: Sequence[float] | NDArray[np.float64] | torch.Tensor, timeout_s: float
    ) -> torch.Tensor:
        """Give every rank the numbers of every rank.

        A gather and not a sum: every rank then adds in the same order, and sees the largest as well as the
        total.

        Returns:
            ``(world_size, len(values))`` float64 on the CPU, in rank order.

        Raises:
            WaitTimeoutError: a rank did not give its numbers within ``timeout_s``, or is gone.
        """
        return torch.stack(self._gather(torch.as_tensor(values, dtype=torch.float64), timeout_s))

    def _gather(self, own: torch.Tensor, timeout_s: float) -> list[torch.Tensor]:
        """Exchange tensors of one shape on the control group."""
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._exchange(timeout_s):
            work = dist.all_gather(gathered, own, group=self.control, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=timeout_s))
        return gathered

    def reduce_integers(self, values: torch.Tensor, rank: int, *, is_largest: bool = False) -> None:
        """Add up integers of all ranks on one of them, in place; elsewhere they are undefined afterwards.

        Args:
            values: Integers on the CPU, of one shape on all ranks.
            rank: Gets the result.
            is_largest: Whether to find the largest of each in place of the sum.

        Raises:
            WaitTimeoutError: a rank did not give its numbers within ``timeouts.control_s``, or is gone.
        """
        operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        with self._exchange(self.timeouts.control_s):
            work = dist.reduce(values, rank, op=operation, group=self.control, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=self.timeouts.control_s))

    @contextlib.contextmanager
    def _exchange(self, timeout_s: float) -> Iterator[None]:
        """Run an exchange on the control group; every one comes through here."""
        try:
            with self.health.together("exchanging facts with all ranks"):
                yield
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"an exchange of all ranks did not finish within {timeout_s:g} s ({type(error).__name__} on "
                f"rank {self.rank}); look for a rank that ended or hangs."
            ) from None

    def enter_steady_state(self) -> None:
        """Shorten the gradient group's timeout; the first exchange, which builds the connections, is done."""
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeouts.steady_s), self.group)


def find_disagreement(facts_by_rank: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe which facts differ; None if none does.

    Example:
        >>> find_disagreement([{"num_steps": 12}, {"num_steps": 11}, {"num_steps": 12}])
        'num_steps 12 on ranks 0, 2 but 11 on rank 1'
    """
    names = sorted({name for facts in facts_by_rank for name in facts})
    problems = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, facts in enumerate(facts_by_rank):
            value = json.dumps(facts[name], sort_keys=True) if name in facts else "nothing"
            holders.setdefault(value, []).append(rank)
        if len(holders) > 1:
            problems.append(
                f"{name} " + " but ".join(f"{value} on {_rank_list(r)}" for value, r in holders.items())
            )
    return "; ".join(problems) or None


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


@contextlib.contextmanager
def join_ranks(wanted_device: str, timeouts: TimeoutConfig, *, traces: Path | None = None) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or be the only rank where it did not.

    ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are read here, once.

    Args:
        wanted_device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"npu"``.
        timeouts: Joining is bounded by ``timeouts.startup_s``.
        traces: Folder for NCCL's flight recorder: what each rank's collectives were at when one of them
            timed out. Settings of it in the environment win.

    Yields:
        The ranks; the groups are taken down at the end of the block unless it fails.

    Raises:
        ConfigError: no such device, or a variable of NCCL or torch is set that neither reads.
        WaitTimeoutError: not all ranks joined in time.
    """
    device = choose_device(wanted_device, int(os.environ.get("LOCAL_RANK", "0")))
    backend = backend_of(device)
    if backend == "nccl":
        refuse_unknown_names(os.environ)
        _set_flight_recorder(traces)
    _init_default_group(backend, timeouts.startup_s)
    is_alone = dist.get_world_size() == 1
    group = dist.group.WORLD
    if group is None:  # never after a successful init; for the type checker
        raise ShardflowError("the default process group must exist after joining, got none; this is a bug.")
    try:
        ranks = Ranks(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=device,
            group=group,
            control=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeouts.control_s)),
            timeouts=timeouts,
        )
        of = f"{ranks.rank} of {ranks.world_size} on {device}"
        _LOGGER.info("joined as rank %s with %s, %s", of, backend, counted(torch.get_num_threads(), "thread"))
        yield ranks
    except BaseException:
        # Several ranks leave their groups alone: others may be stuck in a collective that an orderly shutdown
        # would wait for. The process ends, its connections close, and the others notice at once.
        if is_alone:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _set_flight_recorder(traces: Path | None) -> None:
    """Turn the flight recorder on; torch reads the variables when the group is made (ProcessGroupNCCL.hpp).

    It has an older and a newer name for its size and for its file, and takes the first that is set.
    """
    wanted = {("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "2000"}
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        wanted[names] = str(traces / "nccl-trace-rank-")
    for names, value in wanted.items():
        if not any(name in os.environ for name in names):
            os.environ.update(dict.fromkeys(names, value))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def _init_default_group(backend: str, timeout_s: float) -> None:
    timeout = timedelta(seconds=timeout_s)
    if "RANK" not in os.environ:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
        return
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=timeout))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _store_of_start(store, rank, world_size, timeout_s)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    except dist.DistStoreError as error:
        raise WaitTimeoutError(
            f"not all ranks joined within {timeout_s:g} s ({type(error).__name__}); start every rank, check "
            "that it reaches the rendezvous address, or raise timeouts.startup_s."
        ) from None


_POLL_S: Final = 0.05


def _store_of_start(store: Store, rank: int, world_size: int, timeout_s: float) -> Store:
    """Return a part of torchrun's store that is new with each start of the ranks.

    torchrun keeps one store for all its restarts, in which a restarted rank would find the addresses of
    killed ones and connect to nobody (pytorch #135712). Nothing in the environment numbers the starts: the
    restarts that it counts are those of one machine. So each rank leaves a name that it made up, rank 0
    answers every name with its own, and what all of them have got names their part of the store. Names of
    killed ranks are answered too, to no effect.

    Raises:
        DistStoreError: Not all ranks came within ``timeout_s``.
    """
    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"shardflow/rank/{rank}", own)
        first = store.get(f"shardflow/answer/{own}").decode()
        store.add(f"shardflow/joined/{first}", 1)
        return PrefixStore(first, store)
    names = [f"shardflow/rank/{other}" for other in range(1, world_size)]
    answered: set[bytes] = set()
    deadline = time.monotonic() + timeout_s
    while store.add(f"shardflow/joined/{own}", 0) < len(names):
        if time.monotonic() > deadline:
            raise dist.DistStoreError("ranks are missing")
        for name in store.multi_get(names) if store.check(names) else ():
            if name not in answered:
                store.set(f"shardflow/answer/{name.decode()}", own)
                answered.add(name)
        time.sleep(_POLL_S)
    return PrefixStore(own, store)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers of a model, inner ones first."""
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in names]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place; parameter names stay, and equal blocks share one compilation."""
    for block in blocks_of(model):
        block.compile()


def shard(
    model: nn.Module, ranks: Ranks, settings: ParallelConfig, *, compute: torch.dtype | None
) -> nn.Module:
    """Leave each rank its rows of every parameter; exchanges nothing yet.

    Args:
        model: The model, changed in place: without values on the meta device, or with the same weights on
            every rank on the CPU, from where blocks move to the device one by one.
        ranks: The ranks of the run.
        settings: The table ``[parallel]``.
        compute: Type that layers are gathered and computed in, or None for that of the weights. Gradients
            are added up in float32 or the wider type of the weights.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type, mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=None if compute is None else torch.float32
    )
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)
    # Intensities go up to thousands and have no place in half precision; the model windows them first.
    fully_shard(model, mesh=mesh, mp_policy=replace(policy, cast_forward_inputs=False))
    return model


def replicate(model: nn.Module, ranks: Ranks) -> DistributedDataParallel:
    """Wrap a model that every rank holds as a whole; a collective."""
    return DistributedDataParallel(
        model,
        device_ids=None if ranks.device.type == "cpu" else [ranks.device.index],
        process_group=ranks.group,
        # No buffer of the model changes in training, so there is nothing to send around before every forward.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Run backwards whose gradients stay on the rank until one outside the block."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif _is_sharded(model):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def settle(model: nn.Module) -> None:
    """Release the parameters that a forward without a backward left gathered."""
    for module in model.modules():
        if _is_sharded(module):
            module.reshard()


def _is_sharded(module: nn.Module) -> TypeGuard[FSDPModule]:
    # What nobody has imported, no module is an instance of.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_share(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor is this rank's rows of one that `shard` has cut."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor that is sharded, else the tensor."""
    return tensor.to_local() if is_share(tensor) else tensor


def gather_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole on every rank; a collective where it is a share."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
