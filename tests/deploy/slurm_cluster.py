"""A real SLURM on this machine: a controller and two virtual nodes; nothing of it stays."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.packages import find_program, install_programs

__all__ = ["Cluster", "free_port", "install_slurm", "running_cluster"]

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
NOT_INSTALLABLE = "SLURM cannot be installed"
NUM_NODES = 2
READY_S = 300.0

# Unlike a real cluster's: no control groups, no accounting, a scheduler that looks at once, nodes that claim
# more processors than there are.
_SETTINGS = """
ClusterName=shardflow-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,sched_interval=1,bf_interval=1
SchedulerTimeSlice=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=60
CompleteWait=0
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=1000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=1000
PartitionName=normal Nodes=one,two Default=YES PriorityTier=1
PartitionName=urgent Nodes=one,two PriorityTier=10
"""


def install_slurm() -> None:
    """Make SLURM's programs available, or skip the test."""
    install_programs(PROGRAMS, PACKAGES, otherwise=NOT_INSTALLABLE)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Cluster:
    """What tests ask of the cluster: SLURM's own commands."""

    folder: Path

    def run(self, *command: str, **variables: str) -> str:
        """Run one of SLURM's commands and return what it prints."""
        done = subprocess.run(
            command,
            env=self.environment() | variables,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, options: Sequence[str], arguments: Sequence[str], **variables: str) -> str:
        """Submit a batch script; the number of the job."""
        shown = self.run("sbatch", "--parsable", *options, str(script), *arguments, **variables)
        return shown.strip().partition(";")[0]

    def facts(self, job: str) -> dict[str, str]:
        """What SLURM says of a job, by name: JobState, Restarts, ExitCode, and so on."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "--oneliner", job)))

    def start_soon(self, job: str) -> None:
        """Shorten the two minutes that a job waits which was put back into the queue.

        To seconds, not to nothing: a node refuses a job for the rest of the second in which it has killed it.
        """
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")

    def num_idle(self) -> int:
        """How many nodes nothing runs on."""
        shown = self.run("sinfo", "--noheader", "--Node", "--partition=normal", "--format=%T")
        return shown.split().count("idle")

    def log(self) -> str:
        """The newest lines of every daemon."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in logs)

    def environment(self) -> dict[str, str]:
        """Variables with which SLURM's commands find this cluster."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the cluster in a folder of a short path (sockets); everything it started ends with the block."""
    install_slurm()
    cluster = Cluster(folder)
    (folder / "state").mkdir()
    settings = _SETTINGS.format(
        folder=folder, host=socket.gethostname(), ports=[free_port() for _ in range(3)]
    )
    (folder / "slurm.conf").write_text(settings, encoding="utf-8")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    daemons: list[subprocess.Popen[bytes]] = []

    def start(program: str, *arguments: str) -> None:
        with (folder / "daemons.log").open("ab") as log:
            daemons.append(
                subprocess.Popen(
                    [str(find_program(program)), *arguments],
                    env=cluster.environment(),
                    stdout=log,
                    stderr=log,
                )
            )

    try:
        options = ("socket", "pid-file", "log-file", "seed-file")
        files = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in options]
        start("munged", "--foreground", "--force", f"--key-file={key}", *files)
        _wait_until((folder / "munge.socket").exists, cluster)
        start("slurmctld", "-D", "-c")
        for node in ("one", "two"):
            start("slurmd", "-D", "-c", "-N", node)
        _wait_until(lambda: _is_ready(cluster), cluster)
        yield cluster
    finally:
        _end(cluster, daemons)


def _is_ready(cluster: Cluster) -> bool:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):  # the controller does not answer yet
        return cluster.num_idle() == NUM_NODES
    return False


def _wait_until(holds: Callable[[], bool], cluster: Cluster) -> None:
    deadline = time.monotonic() + READY_S
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"SLURM was not ready within {READY_S} s\n{cluster.log()}")
        time.sleep(0.1)


def _end(cluster: Cluster, daemons: Sequence[subprocess.Popen[bytes]]) -> None:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        cluster.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", f"--user={os.geteuid()}")
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in reversed(daemons):
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    # slurmd leaves what it started for jobs to itself: that is meant for a restart of slurmd, not for us.
    for pid in _processes_of(cluster):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _processes_of(cluster: Cluster) -> list[int]:
    """Every process that carries this cluster's settings: slurmstepd, and what runs below it."""
    mark = f"SLURM_CONF={cluster.folder / 'slurm.conf'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
