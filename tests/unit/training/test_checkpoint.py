"""Checkpoints: whole or absent, and never believed without a digest."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardflow.errors import CheckpointError
from shardflow.training.checkpoint import files as module
from shardflow.training.checkpoint import tensors as tensor_files
from shardflow.training.checkpoint.files import CheckpointFolder, read_checkpoint

FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def write(
    folder: CheckpointFolder,
    step: int,
    *,
    state: dict[str, Any],
    model: dict[str, torch.Tensor],
    optimizer: dict[str, torch.Tensor],
) -> str:
    unfinished = folder.begin(step)
    files = folder.write_part(unfinished, step, model=model, optimizer=optimizer)
    return folder.publish(unfinished, step, state=state, files=files)


def save(folder: CheckpointFolder, step: int, **state: Any) -> str:
    return write(
        folder,
        step,
        state={"global_step": step, "share": 0.1, **state},
        model={"weight": torch.arange(6.0).reshape(2, 3) + step},
        optimizer={"weight.exp_avg": torch.ones(2, 3), "weight.step": torch.tensor(float(step))},
    )


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints", keep_last=2)


def test_what_was_saved_comes_back(folder: CheckpointFolder) -> None:
    assert save(folder, 12, masks=[{"row": 3}]) == "step-00000012"
    checkpoint, problems = folder.newest_sound()
    assert checkpoint is not None
    assert (checkpoint.name, problems) == ("step-00000012", [])
    assert checkpoint.state == {"global_step": 12, "share": 0.1, "masks": [{"row": 3}]}
    assert torch.equal(checkpoint.model["weight"], torch.arange(6.0).reshape(2, 3) + 12)
    assert checkpoint.optimizer["weight.step"].shape == ()
    assert (folder.path / "latest").read_text() == "step-00000012\n"
    assert sorted(entry.name for entry in (folder.path / "step-00000012").iterdir()) == list(FILES)


def test_optimizer_without_state_is_no_mistake(folder: CheckpointFolder) -> None:
    write(folder, 0, state={}, model={"weight": torch.zeros(1)}, optimizer={})
    checkpoint, _ = folder.newest_sound()
    assert checkpoint is not None
    assert checkpoint.optimizer == {}


def test_only_the_last_ones_are_kept(folder: CheckpointFolder) -> None:
    for step in (2, 4, 100000000, 6):
        save(folder, step)
    assert folder.names() == ["step-100000000", "step-00000006"]
    assert sorted(entry.name for entry in folder.path.iterdir()) == [
        "latest",
        "step-00000006",
        "step-100000000",
    ]


def test_files_have_the_mode_that_the_umask_allows(folder: CheckpointFolder) -> None:
    name = save(folder, 1)
    modes = {file: stat.S_IMODE((folder.path / name / file).stat().st_mode) for file in FILES}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found(folder: CheckpointFolder, file: str) -> None:
    path = folder.path / save(folder, 1) / file
    sound = path.read_bytes()
    for position in range(len(sound)):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="step-00000001"):
            read_checkpoint(path.parent)
    path.write_bytes(sound)
    read_checkpoint(path.parent)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["cut", "longer", "missing", "empty"])
def test_damaged_newest_falls_back_to_the_one_before_by_name(
    folder: CheckpointFolder, file: str, damage: str
) -> None:
    save(folder, 2)
    path = folder.path / save(folder, 4) / file
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-1], "longer": content + b"\0", "empty": b""}.get(damage, b""))
    if damage == "missing":
        path.unlink()
    checkpoint, problems = folder.newest_sound()
    assert checkpoint is not None
    assert checkpoint.name == "step-00000002"
    (problem,) = problems
    assert "step-00000004" in problem
    assert file in problem
    assert str(folder.path) not in problem


def test_no_tensor_file_is_parsed_before_its_digest_is_right(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(folder, 1)
    for path in (folder.path / name).glob("*.safetensors"):  # all: they are read side by side
        path.write_bytes(b"\xff" * path.stat().st_size)
    parsed: list[object] = []
    monkeypatch.setattr(tensor_files, "parse_entries", parsed.append)
    with pytest.raises(CheckpointError, match="digest"):
        read_checkpoint(folder.path / name)
    assert parsed == []


def test_other_format_version_is_refused(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT_VERSION", 3)
    name = save(folder, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="format version 1 or 2, found 3"):
        read_checkpoint(folder.path / name)


def test_step_that_is_reached_again_takes_the_damaged_ones_place(folder: CheckpointFolder) -> None:
    name = save(folder, 4)
    (folder.path / name / "model.safetensors").write_bytes(b"")
    save(folder, 4)
    assert read_checkpoint(folder.path / name).state["global_step"] == 4
    assert folder.names() == [name]


CALLS = ("mkdir", "write_tensors", "fsync_directory", "rename", "write_atomic")


@pytest.mark.parametrize("call", CALLS)
def test_kill_at_any_point_leaves_a_sound_checkpoint(
    folder: CheckpointFolder, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The named call is the last thing the process does; a fresh start must find the old or the new one."""
    save(folder, 2)

    class Killed(BaseException):
        pass

    def killed(*args: Any, **kwargs: Any) -> None:
        raise Killed

    def killed_after(real: Callable[..., Any]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            raise Killed

        return run

    owner: Any = Path if call in {"mkdir", "rename"} else module
    for replacement in (killed, killed_after(getattr(owner, call))):
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, replacement)
            with pytest.raises(Killed):
                save(folder, 4)
        checkpoint, problems = folder.newest_sound()
        assert checkpoint is not None
        assert problems == []
        assert checkpoint.name in {"step-00000002", "step-00000004"}
        latest = (folder.path / "latest").read_text().strip()
        assert latest in folder.names()
    folder.remove_unfinished()
    assert not [entry for entry in folder.path.iterdir() if entry.name.startswith(".unfinished")]
    save(folder, 4)
    assert folder.names()[0] == "step-00000004"


def test_every_file_is_synced_before_the_folder_gets_its_name(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append("fsync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def rename(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(folder, 4)
    folder_name = next(event.split()[1] for event in events if event.startswith("fsync .unfinished"))
    renamed = events.index("rename step-00000004")
    assert {f"fsync {file}" for file in FILES} | {f"fsync {folder_name}"} <= set(events[:renamed])
    assert events[renamed + 1] == "fsync checkpoints"
    assert any("latest" in event for event in events[renamed + 2 :])


def test_full_disk_is_named_and_leaves_the_earlier_checkpoint(folder: CheckpointFolder) -> None:
    save(folder, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(CheckpointError, match="step-00000004 could not be written"):
            save(folder, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(entry.name for entry in folder.path.iterdir()) == ["latest", "step-00000002"]
    read_checkpoint(folder.path / "step-00000002")


def test_damaged_checkpoints_that_were_passed_over_never_push_out_sound_ones(
    folder: CheckpointFolder,
) -> None:
    """They have larger numbers than what the run writes next; they would outlive it."""
    for step in (10, 18, 20):
        write(CheckpointFolder(folder.path, keep_last=3), step, state={}, model={}, optimizer={})
    for step in (18, 20):
        (folder.path / f"step-{step:08d}" / "state.json").write_bytes(b"")
    folder.resume_from("step-00000010")
    assert folder.names() == ["step-00000010"]
    assert (folder.path / "latest").read_text() == "step-00000010\n"
    save(folder, 12)
    assert folder.names() == ["step-00000012", "step-00000010"]
    # What may still be of use to somebody stays.
    assert len(list(folder.path.glob("damaged-step-*"))) == 2


def test_latest_is_put_right_after_a_kill_before_it_moved(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, 2)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "_point_latest", lambda name: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save(folder, 4)
    assert (folder.path / "latest").read_text() == "step-00000002\n"
    folder.resume_from("step-00000004")
    assert (folder.path / "latest").read_text() == "step-00000004\n"
    assert folder.names() == ["step-00000004", "step-00000002"]
