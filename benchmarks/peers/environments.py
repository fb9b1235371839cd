"""Each peer in an environment of its own, at the version that is written here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Peer", "environment", "installed", "made"]

TORCH = "torch==2.13.0"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer: its module here, and what is installed for it."""

    name: str
    module: str
    requirement: str | None
    """Pinned; None for shardflow, which runs in this interpreter's environment."""


PEERS = {
    "shardflow": Peer("shardflow", "peer_shardflow", None),
    "webdataset": Peer("webdataset", "peer_webdataset", "webdataset==1.0.2"),
    "mosaic": Peer("MosaicML Streaming", "peer_mosaic", "mosaicml-streaming==0.13.0"),
    "litdata": Peer("LitData", "peer_litdata", "litdata==0.2.76"),
    "energon": Peer("Megatron-Energon", "peer_energon", "megatron-energon==7.4.1"),
}


def environment(key: str, folder: Path, *extras: str) -> Path:
    """Make the peer's environment, with further requirements, unless it is there; return its interpreter."""
    requirement = PEERS[key].requirement
    return Path(sys.executable) if requirement is None else made(folder / key, requirement, *extras)


def made(folder: Path, *requirements: str) -> Path:
    """Make an environment with torch and requirements, unless it is there; return its interpreter."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        uv = Path(sys.executable).with_name("uv")
        # uv does not read pip's find-links, where a machine may keep a build of torch.
        links = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "")}
        variables = {**os.environ, **{name: value for name, value in links.items() if value}}
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True)
        subprocess.run(
            [uv, "pip", "install", "--quiet", "--python", python, TORCH, *requirements],
            check=True,
            env=variables,
        )
        (folder / "made").touch()
    return python


def installed(python: Path, names: list[str]) -> dict[str, str]:
    """Ask an environment for the versions of some distributions."""
    code = "import importlib.metadata as m, sys; print(*(m.version(n) for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.split(), strict=True))
