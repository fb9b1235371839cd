"""Weights & Biases: offline, in the run folder, unless the environment says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shardflow.monitoring.sinks import Record, Scalar, new_name

__all__ = ["WandbSink"]

_STEP: Final = "global_step"
_START_S: Final = 120.0


class WandbSink:
    """Writes to W&B.

    The variables of its own library hold: ``WANDB_MODE`` (``offline`` where it is not set), ``WANDB_PROJECT``
    (``shardflow``), ``WANDB_ENTITY``, ``WANDB_BASE_URL``, ``WANDB_API_KEY``. What it would find out by itself
    is left out: machine, user, command line, code, console, the state of git.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: Path, name: str, settings: Mapping[str, Scalar]) -> str:
        """Begin, or go on; see `Sink`."""
        # Read as the library is imported; and it reports its own errors over the network.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        name = name or new_name()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shardflow"),
            dir=run,
            id=name,
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(
                mode=os.environ.get("WANDB_MODE", "offline"),
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                save_code=False,
                silent=True,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                # Of a machine that trains: its processors are taken, and nobody waits for this thread.
                x_service_wait=_START_S,
            ),
        )
        # Steps that a restart does again come a second time, which its own count of steps does not allow.
        self._run.define_metric("*", step_metric=_STEP)
        return name

    def write(self, records: Sequence[Record]) -> None:
        """Take numbers; see `Sink`."""
        for record in records:
            self._run.log({_STEP: record.global_step, **record.values})

    def close(self) -> None:
        """End, with the process that the library has started."""
        import wandb

        self._run.finish()
        wandb.teardown()
