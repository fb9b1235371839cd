"""Data servers on the machines of a Ray cluster, which starts a server again where one is lost.

Each server is an actor that Ray restarts without end, on another machine if its own is gone. A restarted
server has another address, so the addresses are in a file, which loaders read again every few seconds
(``servers = ["@FILE"]``). All machines see datasets, token and certificate under the same paths. Imported
only if Ray is asked for (extra ``ray``).
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from shardflow.errors import ConfigError, ShardflowError, os_reason
from shardflow.loading.service_main import ServerOptions
from shardflow.processes import handler_kept
from shardflow.storage.local import write_atomic

_LOOK_S: Final = 1.0
_ANSWER_S: Final = 10.0


class ServingActor:
    """Data server inside a Ray worker.

    Args:
        options: Of the server; the host is the worker's own, and the port any free one.
    """

    def __init__(self, options: ServerOptions) -> None:
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._problem = ""
        try:
            self._server = replace(options, host=host, port=0).open()  # several may share a machine
        except ShardflowError as error:  # Ray would restart it without end, and log its text
            self._problem = error.message
        self._host = f"[{host}]" if ":" in host else host

    def address(self) -> tuple[str, str]:
        """Return the address of the server, and why there is none."""
        return ("", self._problem) if self._problem else (f"{self._host}:{self._server.port}", "")


def connect(address: str) -> None:
    """Join a Ray cluster.

    Args:
        address: ``HOST:PORT`` or ``auto``.

    Raises:
        ConfigError: The cluster cannot be reached.
    """
    try:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "critical"}
        with handler_kept(signal.SIGTERM):
            ray.init(address=address, **quiet)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The Ray cluster of --ray cannot be reached ({os_reason(error)}); is it `auto`, or HOST:PORT?"
        ) from None


def serve_on_ray(options: ServerOptions, *, num_servers: int, file: Path) -> None:
    """Keep data servers running on the cluster that this process joined; they end with the call.

    Args:
        options: Of each server.
        num_servers: How many, spread over the machines.
        file: Gets the addresses of the servers that answer, one a line.

    Raises:
        ConfigError: A server cannot start with these options.
        KeyboardInterrupt: A signal ended it.
    """
    actors: list[Any] = []
    try:
        kind: Any = ray.remote(ServingActor)
        settings = {
            "max_restarts": -1,
            "max_task_retries": -1,
            "num_cpus": options.num_threads,
            "scheduling_strategy": "SPREAD",
        }
        actors = [kind.options(**settings).remote(options) for _ in range(num_servers)]
        written: list[str] | None = None
        while True:
            found = [one for one in map(_address, actors) if one]
            if found != written:
                write_atomic(file, ["".join(f"{one}\n" for one in found).encode()], replace=True)
                written = found
            time.sleep(_LOOK_S)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.shutdown()


def _address(actor: Any) -> str:
    """Return where a server listens; empty while it is starting, or its machine is gone."""
    try:
        address, problem = ray.get(actor.address.remote(), timeout=_ANSWER_S)
    except (RayError, GetTimeoutError):
        return ""
    if problem:
        raise ConfigError(f"A data server cannot start: {problem}")
    return str(address)
