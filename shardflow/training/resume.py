"""Where a run starts: its own newest sound checkpoint, another run's, or step 0.

Rank 0 decides, everybody follows. Owns the run folder's lock (two jobs must not write into one run) and the
refusal of a checkpoint that belongs to another model; that it belongs to another seed, dataset or batch
spec is the loader's to say, when it is given its state.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from shardflow.errors import CheckpointError, ConfigError, StateError
from shardflow.training.building import folder_digest
from shardflow.training.checkpoint import STATE_FILE, Checkpoint, CheckpointFolder, read_checkpoint
from shardflow.training.config import AugmentSettings, ImageSettings, RunSettings, TrainConfig
from shardflow.training.ledger import next_attempt
from shardflow.training.text import ReportTokenizer

_LOGGER = logging.getLogger(__name__)
_OPTIONAL = {"model.path digest", "model.frozen", "lora.rank"}
"""Bindings that are there only where the setting is; one that a checkpoint has must not be taken away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartDecision:
    """What rank 0 tells the others; plain JSON values."""

    attempt: int
    """Number of this start of the job, from 1."""
    checkpoint: str | None
    """Absolute folder to resume from; None for a fresh start."""
    damaged: tuple[str, ...]
    """A sentence for each newer checkpoint that was passed over."""

    def to_json(self) -> dict[str, Any]:
        """Return the decision as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` wrote."""
        return cls(attempt=value["attempt"], checkpoint=value["checkpoint"], damaged=tuple(value["damaged"]))


def decide_start(run: RunSettings, folder: CheckpointFolder) -> StartDecision:
    """Find where the run starts; only on rank 0, which holds the lock, before anybody waits in a collective.

    Newer checkpoints that are damaged are set aside, so that they are never taken for the run's newest.

    Raises:
        ConfigError: ``run.resume`` names no folder, or is ``never`` and the run has checkpoints.
        CheckpointError: the run has checkpoints and none of them is sound; or the named one is damaged.
    """
    attempt = next_attempt(run.output)
    own = folder.names()
    if run.resume == "never" and own:
        raise ConfigError(
            f"run.output must hold no checkpoint where run.resume is 'never', got {len(own)}, {own[0]} "
            "the newest; choose another folder, or resume with 'auto'."
        )
    if own:
        sound, problems = folder.newest_sound()
        if sound is None:
            raise CheckpointError(
                f"one of the run's {len(own)} checkpoints must be sound, got: {' '.join(problems)} Restore "
                "one, or start a new run in another folder."
            )
        for problem in problems:
            _LOGGER.warning("%s Falling back to %s.", problem, sound.name)
        folder.go_on_from(sound.name)
        return StartDecision(
            attempt=attempt, checkpoint=str(folder.path / sound.name), damaged=tuple(problems)
        )
    if run.resume in {"auto", "never"}:
        return StartDecision(attempt=attempt, checkpoint=None, damaged=())
    foreign = Path(run.resume).expanduser().resolve()
    if not (foreign / STATE_FILE).is_file():
        found = "a folder without a checkpoint" if foreign.is_dir() else "no folder"
        raise ConfigError(
            f"run.resume must be 'auto', 'never' or a checkpoint folder, got {found} of the name "
            f"{foreign.name!r}; correct it."
        )
    read_checkpoint(foreign)
    return StartDecision(attempt=attempt, checkpoint=str(foreign), damaged=())


def model_bindings(config: TrainConfig, tokenizer: ReportTokenizer) -> dict[str, Any]:
    """Collect the settings that the tensors of a checkpoint only fit together with."""
    bindings: dict[str, Any] = {}
    for table in ("model", "image", "augment"):
        for name, value in asdict(getattr(config, table)).items():
            bindings[f"{table}.{name}"] = list(value) if isinstance(value, tuple) else value
    # Recomputing activations changes memory, not results; compiling changes time.
    del bindings["model.activation_checkpointing"]
    del bindings["image.compile"]
    for name in ("path", "weights", "frozen"):
        del bindings[f"model.{name}"]
    if config.model.path is not None:
        bindings["model.path digest"] = folder_digest(config.model.path)
        bindings["text.prompt"] = config.text.prompt
    if config.model.frozen:
        bindings["model.frozen"] = list(config.model.frozen)
    if config.lora.rank:
        bindings |= {"lora.rank": config.lora.rank, "lora.alpha": config.lora.alpha}
        bindings["lora.targets"] = list(config.lora.targets)
    bindings["batch.packed"] = config.batch.packed
    bindings["text.max_tokens"] = config.text.max_tokens
    bindings["text.tokenizer digest"] = tokenizer.digest
    return bindings


def check_bindings(checkpoint: Checkpoint, bindings: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that was trained with another model or view.

    Raises:
        StateError: naming the first setting that differs.
    """
    # Checkpoints that were written before there was a choice did what its default does.
    saved = {**_chosen_later(), **checkpoint.state["bindings"]}
    for name in [*bindings, *sorted(_OPTIONAL & saved.keys() - bindings.keys())]:
        value = bindings.get(name)
        if saved.get(name) != value:
            raise StateError(
                f"{name} must be that of checkpoint {checkpoint.name}, {saved.get(name)!r}, got {value!r}; "
                "set it back, or start a new run in another folder."
            )


def _chosen_later() -> dict[str, Any]:
    """Return the defaults of settings that are younger than the first checkpoints."""
    image, augment = asdict(ImageSettings()), asdict(AugmentSettings())
    younger = [
        name for name in image if name not in {"num_slices", "rows", "columns", "slice_choice", "dtype"}
    ]
    defaults = {f"image.{name}": image[name] for name in younger}
    defaults |= {f"augment.{name}": value for name, value in augment.items()}
    defaults["batch.packed"] = False
    return {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}


class RunLock:
    """Keeps a second job out of the run folder for as long as this process lives.

    The kernel frees it when the process ends, however it ends, so a restart after SIGKILL finds it free.

    Raises:
        ConfigError: Another job holds it, or the folder cannot be written.
    """

    def __init__(self, run: Path) -> None:
        self._descriptor = -1
        try:
            run.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"run.output must be a folder that can be written, got {type(error).__name__} "
                f"({os.strerror(error.errno or 0)}); correct it."
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                "run.output must belong to one running job, got a folder that another job holds; stop that "
                "job, or choose another folder."
            ) from None
        except OSError as error:
            _LOGGER.warning(
                "run.output cannot be locked (%s); start no second job in it", os.strerror(error.errno or 0)
            )

    def release(self) -> None:
        """Let another job in."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
