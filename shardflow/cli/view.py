"""``shardflow view``: a local web viewer of a dataset."""

from __future__ import annotations

import argparse
import contextlib
import threading

from shardflow.cli.common import add_dataset, interruptible, natural_number, open_dataset, show_lines
from shardflow.errors import ConfigError
from shardflow.viewing import Viewer

DESCRIPTION = """\
Serves a page on this machine: lists and searches studies, scrolls and windows slices, shows the report with
its findings marked and the slices that show them, three planes of volumes, regions, inputs that were not
packed, and the samples of any step of an epoch, with --fields also the crops that it takes. Voxels are read
from the shards on demand. Nothing is written, and no other server is contacted.

The page shows pixels and text of patients, unless it says GENERATED. Requests need a token, which is part of
the printed address, because other users of this machine reach its ports too; --no-token leaves it out where
there are none. The connection is not encrypted: instead of another address (--host), prefer a tunnel.
"""
EXAMPLES = """\
examples:
  shardflow view my-dataset
  shardflow view my-dataset --port 8765
  shardflow view my-dataset --fields my-fields.toml
"""
_DEFAULT_PORT = 8765
_MOST_PORT = 65_535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow view``."""
    add_dataset(parser)
    parser.add_argument(
        "--fields", metavar="FILE", help="show the crops that the volumes of this TOML file of fields take"
    )
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (127.0.0.1)"
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="let every user of this machine read; only on this machine's own address",
    )
    parser.add_argument(
        "--port",
        metavar="P",
        type=natural_number,
        default=_DEFAULT_PORT,
        help=f"port to listen on; 0 for any free one ({_DEFAULT_PORT})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command until it is interrupted; the exit code is 0, or an error is raised."""
    if arguments.port > _MOST_PORT:
        raise ConfigError(f"--port must be at most {_MOST_PORT}, got {arguments.port}.")
    dataset = open_dataset(arguments.dataset, with_studies=True)
    steps = None
    if arguments.fields is not None:
        from shardflow.fields.registry import read_fields
        from shardflow.loading.crops import StepCrops

        steps = StepCrops(dataset, read_fields(arguments.fields))
    # A second signal must not interrupt the shutdown, in which current requests are answered.
    with (
        contextlib.suppress(KeyboardInterrupt),
        interruptible(),
        Viewer(
            dataset, host=arguments.host, port=arguments.port, steps=steps, token=not arguments.no_token
        ) as viewer,
    ):
        show_lines([f"{viewer.url} shows {dataset.samples.num_samples:,} samples; Ctrl-C ends it."])
        threading.Event().wait()
    return 0
