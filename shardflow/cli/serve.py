"""``shardflow serve``: a data server that makes micro-batches for training runs on other machines."""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from shardflow.cli.common import existing_dataset, interruptible, positive_number, show_lines
from shardflow.config import parse_byte_size
from shardflow.errors import ConfigError

if TYPE_CHECKING:
    from shardflow.loading.service_main import ServerOptions

DESCRIPTION = """\
Makes micro-batches for loaders with execution = "service", on this machine or on a Ray cluster. It keeps no
position: any server makes any micro-batch of any run over its datasets, so servers may come and go.

Requests need a token, because other users of this machine reach its ports too: that of --token-file, or a new
one that is printed; --no-token leaves it out where there are none. They are answered on this machine alone,
unless --listen names another address: that needs --token-file, and should have a certificate. A run brings
settings, never code: functions of your own are imported by name, from the packages of --allow, and must be
the same files on both sides.
"""
EXAMPLES = """\
examples:
  shardflow serve /data/chest --token-file token
  shardflow serve /data/chest /data/ct --listen 0.0.0.0:8815 --token-file token --tls-cert cert.pem \\
    --tls-key key.pem
  shardflow serve /data/chest --ray auto --servers 8 --addresses /shared/servers --token-file token
"""
_LISTEN = "127.0.0.1:8815"
_MAX_BYTES = "1GiB"
_THREADS = 2
_IDLE_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow serve``."""
    parser.add_argument(
        "datasets",
        metavar="DATASET",
        nargs="+",
        help="folders of packed datasets, or their addresses; of a blend all of its components",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default=_LISTEN, help=f"where to answer; port 0 for any ({_LISTEN})"
    )
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument(
        "--token-file", metavar="FILE", default="", help="file with the token that loaders send"
    )
    tokens.add_argument(
        "--no-token",
        action="store_true",
        help="answer every user of this machine; only on this machine's own address",
    )
    parser.add_argument(
        "--tls-cert", metavar="FILE", default="", help="certificate chain (PEM): answer over TLS"
    )
    parser.add_argument("--tls-key", metavar="FILE", default="", help="its private key (PEM)")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=positive_number,
        default=_THREADS,
        help=f"threads that read and decode ({_THREADS})",
    )
    parser.add_argument(
        "--max-bytes",
        metavar="SIZE",
        default=_MAX_BYTES,
        help=f"most memory of batches that are made or sent ({_MAX_BYTES})",
    )
    parser.add_argument(
        "--allow",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="package or module that runs may name transforms of; may be given several times",
    )
    parser.add_argument(
        "--idle-s",
        metavar="S",
        type=positive_number,
        default=_IDLE_S,
        help=f"forget a run that nobody asked for so long ({_IDLE_S})",
    )
    parser.add_argument("--cache", metavar="DIR", default="", help="keep what was read in this folder")
    parser.add_argument("--cache-bytes", metavar="SIZE", default="0", help="its size, such as 500GB")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="start servers on this Ray cluster (auto, or HOST:PORT), on any free ports",
    )
    parser.add_argument(
        "--servers", metavar="N", type=positive_number, default=1, help="with --ray: how many (1)"
    )
    parser.add_argument(
        "--addresses",
        metavar="FILE",
        type=Path,
        help='with --ray: file for the servers of loaders, ["@FILE"]',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it is interrupted; the exit code is 0, or an error is raised."""
    from shardflow.loading.service_main import ServerOptions
    from shardflow.monitoring.prometheus import parse_address

    host, port = parse_address(arguments.listen, "--listen")
    options = ServerOptions(
        datasets=tuple(map(existing_dataset, arguments.datasets)),
        host=host,
        port=port,
        token_file=arguments.token_file,
        has_token=not arguments.no_token,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        num_threads=arguments.threads,
        max_bytes=parse_byte_size(arguments.max_bytes),
        allowed=tuple(arguments.allow),
        idle_s=arguments.idle_s,
        cache_directory=arguments.cache,
        cache_bytes=parse_byte_size(arguments.cache_bytes),
    )
    # A second signal must not interrupt the shutdown, in which current requests are answered.
    with contextlib.suppress(KeyboardInterrupt), interruptible():
        if arguments.ray is not None:
            _serve_on_ray(arguments, options)
        else:
            server = options.open()
            try:
                place = f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}"
                lines = [f"Serving {len(options.datasets)} dataset(s) at {place}; Ctrl-C ends it."]
                if server.token and not arguments.token_file:
                    lines.append(f"Loaders need the token {server.token}, in the file of server_token_file.")
                show_lines(lines)
                threading.Event().wait()
            finally:
                server.close()
    return 0


def _serve_on_ray(arguments: argparse.Namespace, options: ServerOptions) -> None:
    if arguments.addresses is None:
        raise ConfigError("--ray needs --addresses FILE, on a file system that trainers see.")
    if not arguments.token_file:
        raise ConfigError(
            "--ray needs --token-file FILE, on a file system that servers and trainers see; write one with "
            "`openssl rand -hex 24 > FILE`."
        )
    try:
        from shardflow.loading.service_ray import connect, serve_on_ray
    except ImportError:
        raise ConfigError("--ray needs Ray; install shardflow[ray].") from None
    connect(arguments.ray)
    show_lines([f"Addresses of servers are in {arguments.addresses}; Ctrl-C ends them."])
    serve_on_ray(options, num_servers=arguments.servers, file=arguments.addresses)
