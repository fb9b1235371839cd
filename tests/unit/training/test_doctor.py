"""The doctor's rules: each finds what it is for, says the fix, and is silent where all is well."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shardflow.cli.main import main
from shardflow.errors import ConfigError
from shardflow.storage.cache.config import CacheConfig
from shardflow.training.config import (
    BatchConfig,
    DataConfig,
    DataLoadingConfig,
    RunConfig,
    TextConfig,
    TrainConfig,
)
from shardflow.training.doctor import (
    INVENTED,
    KNOWN,
    OLD_NAMES,
    RANGES,
    Environment,
    Finding,
    examine,
    inspect_environment,
    matching,
    refuse_unknown_names,
)

pytestmark = pytest.mark.fast

GIB = 1 << 30
HEALTHY = Environment(
    limits={"nofile": 65536, "memlock": None, "nproc": None},
    versions={"torch": "2.13.0+cpu", "pydicom": "3.0.2", "expat": "2.6.3"},
)


def problems(around: Environment) -> list[Finding]:
    return [finding for finding in examine(around) if finding.level != "ok"]


def with_variables(**variables: str) -> Environment:
    return replace(HEALTHY, variables=variables)


def settings(run: Path, *, prefetch_bytes: int = 1 << 28, threads: int = 2) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(dataset=str(run / "dataset")),
        batch=BatchConfig(micro_batch_size=1, micro_batches_per_step=8),
        text=TextConfig(tokenizer=run / "tokenizer"),
        run=RunConfig(output=run),
        loader=DataLoadingConfig(num_threads=threads, prefetch_bytes=prefetch_bytes),
        cache=CacheConfig(directory=run / "cache", max_bytes=10 * GIB),
    )


def test_healthy_machine_has_no_problem_and_says_what_was_looked_at() -> None:
    assert problems(HEALTHY) == []
    assert {finding.topic for finding in examine(HEALTHY)} >= {
        "ulimit -n",
        "/dev/shm",
        "CPU cores",
        "memory",
        "torch",
    }


# Variables, the level of what is found, its topic, and words of the line.
VARIABLES: list[tuple[dict[str, str], str, str, str]] = [
    ({"NCCL_TIMEOUT": "1800"}, "error", "NCCL_TIMEOUT", "timeouts.steady_s"),
    (
        {"TORCH_NCCL_BLOCKING_WAIT_TIMEOUT_MS": "1"},
        "error",
        "TORCH_NCCL_BLOCKING_WAIT_TIMEOUT_MS",
        "nothing reads it",
    ),
    ({"NCCL_SOCKET_IFNAMES": "eth0"}, "error", "NCCL_SOCKET_IFNAMES", "use NCCL_SOCKET_IFNAME"),
    (
        {"TORCH_NCCL_TRACE_BUFER_SIZE": "1"},
        "error",
        "TORCH_NCCL_TRACE_BUFER_SIZE",
        "use TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    ({"NCCL_ASYNC_ERROR_HANDLING": "3"}, "warning", "NCCL_ASYNC_ERROR_HANDLING", "use TORCH_NCCL_ASYNC"),
    ({"NCCL_IB_CUDA_SUPPORT": "1"}, "warning", "NCCL_IB_CUDA_SUPPORT", "NCCL_NET_GDR_LEVEL"),
    ({"NCCL_LL_THRESHOLD": "1"}, "warning", "NCCL_LL_THRESHOLD", "unset it"),
    ({"NCCL_IB_RETRY_CNT": "8"}, "error", "NCCL_IB_RETRY_CNT", "from 0 to 7"),
    ({"NCCL_IB_TIMEOUT": "0"}, "error", "NCCL_IB_TIMEOUT", "from 1 to 31"),
    ({"NCCL_IB_TIMEOUT": "many"}, "error", "NCCL_IB_TIMEOUT", "'many'"),
    ({"NCCL_IB_TIMEOUT": "22"}, "warning", "NCCL_IB_TIMEOUT", "120 s with NCCL_IB_RETRY_CNT=7"),
    ({"NCCL_DEBUG": "LOUD"}, "error", "NCCL_DEBUG", "one of VERSION"),
    ({"NCCL_DEBUG": "info"}, "warning", "NCCL_DEBUG", "WARN"),
    ({"NCCL_P2P_DISABLE": "1"}, "warning", "NCCL_P2P_DISABLE", "unset it"),
    ({"NCCL_DEBUG_FILE": "/tmp/nccl.log"}, "warning", "NCCL_DEBUG_FILE", "%h.%p"),
    ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "error", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "waits forever"),
    (
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_FR_BUFFER_SIZE": "2000"},
        "warning",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "flight recorder",
    ),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "error", "TORCH_NCCL_BLOCKING_WAIT", "production"),
    (
        {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"},
        "warning",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "size 0",
    ),
    ({"TORCH_NCCL_ENABLE_MONITORING": "0"}, "warning", "TORCH_NCCL_ENABLE_MONITORING", "unset"),
    (
        {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "8"},
        "error",
        "NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD",
        "at most 64",
    ),
    ({"NCCL_SOCKET_IFNAME": "ib"}, "error", "NCCL_SOCKET_IFNAME", "among lo, eth0"),
    ({"GLOO_SOCKET_IFNAME": "eth"}, "error", "GLOO_SOCKET_IFNAME", "correct it"),
    ({"NCCL_IB_HCA": "mlx5"}, "error", "NCCL_IB_HCA", "among none"),
    ({"RANK": "0", "WORLD_SIZE": "8"}, "warning", "RANK, WORLD_SIZE", "unset RANK WORLD_SIZE"),
    ({"PET_NNODES": "1:4"}, "error", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "leave and join"),
    ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, "warning", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "checkpoint"),
    ({"OMP_NUM_THREADS": "64"}, "warning", "OMP_NUM_THREADS", "lower it"),
]


@pytest.mark.parametrize(
    ("variables", "level", "topic", "words"),
    VARIABLES,
    ids=[f"{case[2]} {case[3]}" for case in VARIABLES],
)
def test_variable_is_found_with_its_fix(
    variables: Mapping[str, str], level: str, topic: str, words: str
) -> None:
    (finding,) = problems(with_variables(**variables))
    assert (finding.level, finding.topic) == (level, topic)
    assert words in f"{finding.must} {finding.found} {finding.fix}"


@pytest.mark.parametrize(
    "variables",
    [
        {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "7"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_FR_BUFFER_SIZE": "2000"},
        {"PET_NNODES": "1:4", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        {"PET_NNODES": "4", "PET_MAX_RESTARTS": "3"},
        {"RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"},
        {"NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p"},
        {"NCCLX_TIMEOUT": "1", "PATH": "/bin"},
    ],
    ids="+".join,
)
def test_sound_variables_are_left_alone(variables: dict[str, str]) -> None:
    assert problems(with_variables(**variables)) == []


def test_variable_of_a_plugin_is_allowed_by_name() -> None:
    around = with_variables(NCCL_MY_PLUGIN_MODE="1")
    assert [finding.topic for finding in problems(around)] == ["NCCL_MY_PLUGIN_MODE"]
    assert all(finding.level == "ok" for finding in examine(around, allowed=["NCCL_MY_PLUGIN_MODE"]))


def test_training_refuses_names_that_nothing_reads() -> None:
    with pytest.raises(ConfigError, match=r"NCCL_TIMEOUT must be unset: .*; use timeouts.steady_s"):
        refuse_unknown_names({"NCCL_TIMEOUT": "1800"})
    refuse_unknown_names({"NCCL_TIMEOUT": "1800", "SHARDFLOW_ALLOW_VARIABLES": "NCCL_X,NCCL_TIMEOUT"})
    refuse_unknown_names({"NCCL_DEBUG": "WARN", "NCCL_ASYNC_ERROR_HANDLING": "3", "HOME": "/"})


def test_tables_of_names_do_not_contradict_each_other() -> None:
    assert not KNOWN & (OLD_NAMES.keys() | INVENTED.keys())
    assert RANGES.keys() <= KNOWN
    assert all(not new or new.partition("=")[0] in KNOWN for new in OLD_NAMES.values())
    assert all(re.fullmatch(r"(TORCH_)?NCCL_[A-Z0-9_]+", name) for name in KNOWN)


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("=mlx5_1:1,mlx5_0:1", ["mlx5_0", "mlx5_1"]),
        ("^mlx5_1", ["mlx5_0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]),
    ],
)
def test_names_are_matched_as_nccl_does(pattern: str, hits: list[str]) -> None:
    assert matching(pattern, ("mlx5_0", "mlx5_1", "mlx5_10")) == hits


MACHINES: list[tuple[Environment, str, str, str]] = [
    (replace(HEALTHY, shm_bytes=64 << 20), "error", "/dev/shm", "--shm-size=256m"),
    (replace(HEALTHY, shm_bytes=None), "error", "/dev/shm", "none"),
    (replace(HEALTHY, shm_bytes=1 << 27), "warning", "/dev/shm", "remount"),
    (replace(HEALTHY, limits={"nofile": 1024}), "error", "ulimit -n", "at least 1026"),
    (replace(HEALTHY, limits={"nproc": 100}), "error", "ulimit -u", "100"),
    (replace(HEALTHY, num_cores=1.5), "warning", "CPU cores", "1.5 for 1 ranks"),
    (replace(HEALTHY, memory_bytes=GIB // 2), "error", "memory", "loader.prefetch_bytes"),
    (
        replace(HEALTHY, num_nodes=2, variables={"NCCL_SOCKET_IFNAME": "lo"}),
        "error",
        "NCCL_SOCKET_IFNAME",
        "the loopback",
    ),
    (
        replace(HEALTHY, num_nodes=2, interfaces=("lo", "eth0", "ib0")),
        "warning",
        "GLOO_SOCKET_IFNAME",
        "eth0, ib0",
    ),
    (
        replace(HEALTHY, hcas=("mlx5_1", "mlx5_10"), variables={"NCCL_IB_HCA": "mlx5_1"}),
        "warning",
        "NCCL_IB_HCA",
        "put = in front",
    ),
    (
        replace(HEALTHY, num_nodes=2, hcas=("mlx5_0",), limits={"memlock": 65536}),
        "error",
        "ulimit -l",
        "unlimited",
    ),
    (replace(HEALTHY, versions={"torch": "2.9.1"}), "error", "torch", "CVE-2026-24747"),
    (replace(HEALTHY, versions={"pydicom": "3.0.1"}), "error", "pydicom", "3.0.2"),
    (
        replace(HEALTHY, versions={"pylibjpeg-openjpeg": "2.5.0"}),
        "warning",
        "pylibjpeg-openjpeg",
        "OSV-2025-219",
    ),
    (replace(HEALTHY, versions={"expat": "2.5.0"}), "warning", "expat", "2.6.0"),
]


@pytest.mark.parametrize(
    ("around", "level", "topic", "words"), MACHINES, ids=[f"{case[2]} {case[3]}" for case in MACHINES]
)
def test_machine_is_found_wanting_with_its_fix(
    around: Environment, level: str, topic: str, words: str
) -> None:
    (finding,) = problems(around)
    assert (finding.level, finding.topic) == (level, topic)
    assert words in f"{finding.must} {finding.found} {finding.fix}"


def test_settings_of_the_run_ask_more_of_the_machine(tmp_path: Path) -> None:
    config = settings(tmp_path, prefetch_bytes=8 * GIB, threads=4)
    around = replace(
        HEALTHY,
        config=config,
        ranks_per_node=3,
        free_bytes={"run.output": GIB, "cache.directory": 11 * GIB},
        checkpoint_bytes=4 * GIB,
        memory_bytes=32 * GIB,
    )
    found = {finding.topic: finding for finding in problems(around)}
    assert set(found) == {"CPU cores", "memory", "run.output", "cache.directory", "ranks"}
    assert "14.0 GiB free" in found["cache.directory"].must
    assert "one for the loop, 4 for the loader" in found["CPU cores"].must
    assert "24.8 GiB" in found["memory"].must
    assert "8.0 GiB free: a new checkpoint of 4.0 GiB" in found["run.output"].must
    assert "11% of the work are padding micro-batches" in found["ranks"].found
    (ranks,) = [f for f in problems(replace(around, ranks_per_node=9)) if f.topic == "ranks"]
    assert ranks.level == "error"


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    around = inspect_environment(settings(tmp_path / "run"), ranks_per_node=1)
    assert "lo" in around.interfaces
    assert around.num_cores > 0
    assert 1 << 28 < around.memory_bytes < 1 << 50
    assert around.free_bytes["run.output"] > 0
    assert around.checkpoint_bytes is None
    (tmp_path / "run" / "cache").mkdir(parents=True)
    (tmp_path / "run" / "cache" / "block").write_bytes(b"x" * 5000)
    assert inspect_environment(settings(tmp_path / "run")).free_bytes["cache.directory"] > 5000
    assert around.versions["python"].startswith("3.")
    newest = tmp_path / "run" / "checkpoints" / "step-00000004"
    newest.mkdir(parents=True)
    (newest / "model.safetensors").write_bytes(b"x" * 1000)
    assert inspect_environment(settings(tmp_path / "run")).checkpoint_bytes == 1000


def test_command_tells_what_is_wrong_and_leaves_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in list(KNOWN | OLD_NAMES.keys()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    assert main(["doctor", "--ranks-per-node", "1", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "error   NCCL_TIMEOUT must be unset: nothing reads it, got it set; use timeouts.steady_s" in out
    assert main(["doctor", "--ranks-per-node", "1", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"level", "topic", "must", "found", "fix"} == lines[0].keys()
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    main(["doctor", "--allow", "NCCL_TIMEOUT", "--quiet"])
    assert "NCCL_TIMEOUT" not in capsys.readouterr().out
