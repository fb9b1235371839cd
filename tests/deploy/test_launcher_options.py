"""What the cluster files tell the launcher are options of torchrun, what they tell the job are the job's."""

from __future__ import annotations

import shlex

import pytest
from torch.distributed.run import parse_args

from shardflow.cli import train
from shardflow.cli.main import build_parser
from tests.conftest import REPOSITORY
from tests.deploy.manifests import DEPLOY, pod

KUBERNETES = pod("shardflow-train")["containers"][0]["command"][2]
SLURM = (DEPLOY / "slurm" / "train.sbatch").read_text(encoding="utf-8")
VALUES = {"$SLURM_JOB_NUM_NODES": "2", "${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}": "2"}


@pytest.mark.parametrize(
    ("script", "image_config"), [(KUBERNETES, True), (SLURM, False)], ids=["kubernetes", "slurm"]
)
def test_options_are_known(script: str, image_config: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = [VALUES.get(word, word) for word in shlex.split(script.replace("\\\n", " "), comments=True)]
    words = words[words.index("shardflow") + 1 :]
    words = words[: words.index("$@")] if "$@" in words else words
    arguments = build_parser("train").parse_args([*words, *([] if image_config else ["--config=a.toml"])])
    own = [*train.torchrun_options(arguments), "-m", "shardflow.training"]
    options = parse_args(own)  # type: ignore[no-untyped-call] # leaves the process over an unknown option
    assert (options.nnodes, options.nproc_per_node) == ("2", "2")
    assert options.rdzv_backend == "c10d"
    assert options.max_restarts == 0  # restarts are the scheduler's
    assert (options.module, options.standalone) == (True, False)
    if image_config:
        arguments.config = REPOSITORY / "docker" / "train.toml"
        arguments.print_config = True
        assert train.run(arguments) == 0
        assert "num_epochs = 4" in capsys.readouterr().out
