"""Which device a rank takes; Ascend with a stand-in for the package, in a process of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardflow.errors import ConfigError
from shardflow.training.distributed import backend_of, choose_device, code_digest
from tests.forks import rank_server, run

# What torch_npu does when it is imported, as far as choosing goes: it names the device, registers its module
# and the backend of its library. Exchanges of the stand-in go through gloo.
STAND_IN = """
import types
import torch
import torch.distributed as dist

torch.utils.rename_privateuse1_backend("npu")
chosen = []
npu = types.ModuleType("torch.npu")
npu.is_available = lambda: True
npu.device_count = lambda: 2
npu.set_device = lambda device: chosen.append(str(device))
npu.current_device = lambda: 0
torch._register_device_module("npu", npu)
dist.Backend.register_backend(
    "hccl",
    lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout),
    devices=["npu"],
)
"""

PROBE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from shardflow.errors import ConfigError
from shardflow.training.distributed import backend_of, choose_device
from shardflow.training.config import TimeoutConfig
from shardflow.training.distributed import join_ranks

found = {"auto": str(choose_device("auto", 0)), "second": str(choose_device("npu", 1))}
found["backend"] = backend_of(torch.device("npu", 1))
try:
    choose_device("npu", 2)
except ConfigError as error:
    found["third"] = error.message
wait = 30.0
with join_ranks("npu", TimeoutConfig(startup_s=wait, steady_s=wait, control_s=wait, hang_s=0)) as ranks:
    found["joined"] = [str(ranks.device), dist.get_backend(ranks.group), dist.get_backend(ranks.control)]
    found["numbers"] = ranks.all_gather_numbers([1.5], wait).tolist()
found["chosen"] = sys.modules["torch_npu"].chosen
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ascend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ascend")
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(STAND_IN, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "LOCAL_RANK"}}
    done = run(["-W", "default", "-c", PROBE, folder], env=environment, server=rank_server)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_ascend_is_chosen_where_its_package_is(ascend: dict[str, Any]) -> None:
    assert (ascend["auto"], ascend["second"], ascend["backend"]) == ("npu:0", "npu:1", "hccl")
    assert ascend["chosen"][:2] == ["npu:0", "npu:1"]


def test_ranks_of_ascend_join_by_its_library_and_meet_by_gloo(ascend: dict[str, Any]) -> None:
    assert ascend["joined"] == ["npu:0", "hccl", "gloo"]
    assert ascend["numbers"] == [[1.5]]


def test_more_ranks_than_npus_are_refused(ascend: dict[str, Any]) -> None:
    assert "'npu' must find one NPU for each rank of a machine, got 2 for local rank 2" in ascend["third"]


def test_an_npu_without_its_package_is_refused_with_its_name() -> None:
    with pytest.raises(ConfigError, match=r"got 0 for local rank 0.*install torch_npu"):
        choose_device("npu", 0)


def test_cpus_are_what_is_left() -> None:
    assert choose_device("cpu", 3) == torch.device("cpu")
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 1)) == "nccl"


def test_a_gpu_is_the_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match="got 2 for local rank 2"):
        choose_device("cuda", 2)


def test_other_code_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n")
    first = code_digest(tmp_path)
    (tmp_path / "room" / "a.py").write_text("x = 2\n")
    changed = code_digest(tmp_path)
    (tmp_path / "room" / "a.py").rename(tmp_path / "room" / "b.py")
    assert len({first, changed, code_digest(tmp_path), code_digest()}) == 4
