"""Reads and plans a dataset as macOS or Windows would have to: ``other_systems SYSTEM DATASET [EXECUTION]``.

What these systems do not have is taken away before shardflow is imported: modules, functions and constants of
`os`, `mmap` and `signal`, and everything below /proc and /sys. The paths that this cannot show are those that
behave in another way under the same name. Prints a digest of the plan and of an epoch's batches as JSON.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import importlib
import io
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_MACOS = {
    "os": (
        *("memfd_create", "MFD_CLOEXEC", "posix_fadvise", "posix_fallocate", "RWF_NOWAIT", "pipe2"),
        *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "copy_file_range", "eventfd"),
    ),
    "mmap": ("MADV_HUGEPAGE", "MADV_NOHUGEPAGE", "MADV_DONTFORK", "MAP_POPULATE"),
    "signal": ("sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGRTMAX", "SIGPWR"),
}
_WINDOWS = {
    "os": (
        *_MACOS["os"],
        *(
            "fork",
            "forkpty",
            "getuid",
            "geteuid",
            "getgid",
            "getpgid",
            "killpg",
            "setsid",
            "sysconf",
            "uname",
        ),
        *(
            "pread",
            "preadv",
            "pwrite",
            "pwritev",
            "readv",
            "writev",
            "statvfs",
            "fstatvfs",
            "fchmod",
            "mkfifo",
        ),
        *("O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "chown", "nice", "getloadavg"),
    ),
    "mmap": (*_MACOS["mmap"], "PROT_READ", "PROT_WRITE", "MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS"),
    "signal": (
        *_MACOS["signal"],
        *("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGKILL", "SIGSTOP", "SIGCHLD", "SIGALRM", "SIGQUIT"),
        *("pthread_sigmask", "pthread_kill", "setitimer", "alarm", "pause", "sigwait"),
    ),
}
SYSTEMS = {"macos": (_MACOS, ()), "windows": (_WINDOWS, ("fcntl", "resource", "pwd", "grp", "termios"))}
_KERNEL = ("/proc", "/sys")
_PLAN = (
    *("--split=train", "--seed=7", "--epoch=0", "--world-size=2"),
    *("--micro-batch-size=2", "--micro-batches-per-step=2"),
)


def hide(system: str) -> None:
    """Take away what a system does not have; libraries of others know their systems, and keep it."""
    for module in (
        "asyncio",
        "multiprocessing.resource_tracker",
        "subprocess",
        "tempfile",
        "blosc2",
        "cv2",
        "numpy",
    ):
        importlib.import_module(module)

    names, modules = SYSTEMS[system]
    for place, gone in ((os, names["os"]), (mmap, names["mmap"]), (signal, names["signal"])):
        for name in gone:
            if hasattr(place, name):
                delattr(place, name)
    for module_name in modules:
        sys.modules[module_name] = None  # type: ignore[assignment] # an import of it fails
    for owner, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "scandir"), (os, "listdir")):
        setattr(owner, name, _without_kernel(getattr(owner, name)))


def _without_kernel(real: Callable[..., Any]) -> Callable[..., Any]:
    def opened(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and str(path).startswith(_KERNEL):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(path, *arguments, **options)

    return opened


def read_and_plan(dataset: str, execution: str) -> dict[str, Any]:
    """Use everything that reading and planning are."""
    import shardflow as sf
    from shardflow.cli.main import main

    opened = sf.open(dataset)
    fields = {"image": sf.Slices(num_slices=2, size=(16, 16)), "report": sf.Text()}
    spec = sf.BatchSpec.simple(global_batch_size=4, micro_batch_size=2)
    config = sf.LoaderConfig(execution=execution)  # type: ignore[arg-type]
    digest = hashlib.sha256()
    with sf.Loader(
        opened, split="train", batch=spec, seed=7, fields=fields, where="facts.num_slices >= 1", config=config
    ) as loader:
        keys = []
        for batch in loader:
            keys.append(list(batch.sample_keys))
            digest.update(batch["image"].tobytes())
            digest.update("".join(batch["report"]).encode())
        state = loader.state_dict()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        codes = [
            main(["info", dataset, "--json"]),
            main(["verify", dataset]),
            main(["plan", dataset, *_PLAN]),
        ]
    return {
        "codes": codes,
        "keys": keys,
        "batches": digest.hexdigest(),
        "state": state,
        "sample": sorted(opened[0]),
        "verified": sf.verify(dataset).is_whole,
    }


if __name__ == "__main__":
    if sys.argv[1] != "linux":
        hide(sys.argv[1])
    print(json.dumps(read_and_plan(sys.argv[2], *(sys.argv[3:] or ["threads"])), sort_keys=True))  # noqa: T201
