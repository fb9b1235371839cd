"""Tasks that misbehave, for the tests of the process pool; imported inside packing processes."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import stat
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardflow.errors import ConfigError, StorageError
from shardflow.packing.engines.base import step
from shardflow.packing.engines.worker import Handler


class _MallocFacts(ctypes.Structure):
    """``struct mallinfo`` of glibc (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def is_large_block_mapped() -> bool:
    """Whether glibc maps 20 MiB by themselves, to be unmapped when they are freed."""
    library = ctypes.CDLL(None)
    library.mallinfo.restype = _MallocFacts
    library.malloc.restype = ctypes.c_void_p
    before = library.mallinfo().hblks
    library.malloc(20 << 20)
    return bool(library.mallinfo().hblks > before)


def make_handler(setup: Mapping[str, Any]) -> Handler:
    """Answer the tasks below."""
    if setup.get("broken"):
        raise ConfigError("the setup must not be broken.")
    if setup.get("dies"):
        os._exit(7)
    if setup.get("imports"):
        importlib.import_module("blosc2")
    return _answer


def _answer(kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    match kind:
        case "echo":
            return {"payload": dict(payload), "pid": os.getpid()}
        case "limits":
            return {"limits": Path("/proc/self/limits").read_text(encoding="ascii"), "pid": os.getpid()}
        case "modules":
            return {"modules": sorted(sys.modules)}
        case "surroundings":
            descriptors = {}
            for one in Path("/proc/self/fd").iterdir():
                with suppress(OSError):  # that of the listing
                    descriptors[one.name] = str(one.readlink())
            return {"environment": dict(os.environ), "descriptors": descriptors}
        case "large block":
            return {"is_mapped": is_large_block_mapped()}
        case "hang":
            time.sleep(3600)
        case "steps":
            for _ in range(payload["number"]):
                step()
                until = time.process_time() + payload["seconds"]
                while time.process_time() < until:
                    pass
            if payload["hangs"]:
                time.sleep(3600)
            return {}
        case "burn":
            while True:
                pass
        case "eat":
            return {"size": len([bytearray(1 << 26) for _ in range(1 << 10)])}
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(payload["code"])
        case "raise":
            raise ValueError("DOE^JANE 19700101")
        case "storage":
            raise StorageError("writing must succeed, got: no space.")
        case "print":
            sys.stdout.write("DOE^JANE")
            sys.stdout.flush()
            os.write(2, b"DOE^JANE")
            warnings.warn("DOE^JANE", stacklevel=1)
            return {}
        case "write":
            path = Path(payload["path"])
            path.write_bytes(bytes(payload["num_bytes"]))
            return {"size": path.stat().st_size}
        case "ignore":
            return {"ignored": [signal.getsignal(number) is signal.SIG_IGN for number in (2, 15, 1)]}
        case "junk":
            for descriptor in range(4096):
                with suppress(OSError):
                    if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                        os.write(descriptor, b"\xff" * 64)
            time.sleep(3600)
    raise ValueError(kind)
