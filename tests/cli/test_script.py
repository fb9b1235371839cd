"""The installed console script in processes of its own: pipes, terminals, standard streams."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("shardflow")


def test_reader_that_leaves_early_is_no_error(dataset: Path) -> None:
    plan = f"{SCRIPT} plan {dataset} --split train --seed 1 --epoch 0 --micro-batch-size 1"
    plan += " --micro-batches-per-step 1 --world-size 1 --json"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {plan} | head -c 1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode in {0, 1, 141}
    assert done.stderr == ""


def test_a_full_disk_behind_standard_output_is_said(dataset: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [SCRIPT, "info", dataset],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("shardflow: standard output must take what is written to it, got ENOSPC")
    assert done.stderr.count("\n") == 1


def test_script_has_colours_on_a_terminal_only(dataset: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}
    }
    environment["TERM"] = "xterm-256color"
    piped = subprocess.run(
        [SCRIPT, "info", dataset], env=environment, capture_output=True, check=True, timeout=300
    )
    assert b"\x1b" not in piped.stdout
    leader, follower = pty.openpty()
    subprocess.run([SCRIPT, "info", dataset], env=environment, stdout=follower, check=True, timeout=300)
    os.close(follower)
    shown = os.read(leader, 65536)
    os.close(leader)
    assert b"\x1b[1m" in shown


def test_json_is_one_object_a_line(dataset: Path) -> None:
    done = subprocess.run(
        [SCRIPT, "verify", dataset, "--json"], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr == ""
    assert json.loads(done.stdout)["ok"] is True
