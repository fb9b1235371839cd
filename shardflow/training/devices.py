"""The device of a rank and the library that its gradients travel by: CPU, NVIDIA GPU, Ascend NPU.

Ascend needs the package ``torch_npu``, which teaches torch the device ``npu`` and the backend ``hccl`` when
it is imported; that is done here and nowhere else, where it is wanted or nothing else is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Final

import torch

from shardflow.errors import ConfigError

__all__ = ["backend_of", "choose_device", "device_name", "prefer_determinism"]

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
    """Return what the device is for people: the model of a GPU, else its kind."""
    return str(getattr(torch, device.type).get_device_name(device)) if device.type in _NAMES else device.type


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
