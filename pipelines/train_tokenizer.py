"""Make a tokenizer: ``python -m pipelines.train_tokenizer --dataset DATASET --output FOLDER``.

Trains a byte-level BPE on the reports of one split of a packed dataset; the same reports give the same
files. Exit codes: 0 done, 1 failed, 2 an argument is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelines.help_text import CommandParser, HelpFormatter
from pipelines.surface import open_dataset, step_progress
from shardflow.errors import ConfigError, ShardflowError
from shardflow.logs import configure_logging

__all__ = ["build_parser", "main"]

DESCRIPTION = """\
Makes a tokenizer (byte-level BPE) from the reports of one split of a packed dataset. The same reports give
the same files. It holds pieces of the reports that it was made from: guard it like them.
"""
EPILOG = """\
example:
  python -m pipelines.train_tokenizer --dataset my-dataset --vocab-size 1024 --output my-tokenizer

exit codes: 0 done; 1 failed, the log says why; 2 an argument is wrong.
"""

_LOGGER = logging.getLogger(__name__)


def build_parser() -> argparse.ArgumentParser:
    """Build the command line of the job."""
    parser = CommandParser(
        prog="python -m pipelines.train_tokenizer",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--dataset", required=True, metavar="DATASET", help="folder of a packed dataset")
    parser.add_argument("--split", default="train", help="whose reports to learn from (default: train)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="tokens (default: 4096)")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where to write it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the last line of standard output is a JSON summary.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    configure_logging()
    try:
        arguments = build_parser().parse_args(argv)
        dataset = open_dataset(arguments.dataset)
        from shardflow.training.text import train_tokenizer  # transformers takes seconds to import

        with step_progress("reading reports") as progress:
            tokenizer = train_tokenizer(
                dataset, arguments.split, arguments.vocab_size, arguments.output, progress
            )
    except ShardflowError as error:
        _LOGGER.error("%s", error.message)  # noqa: TRY400 - the sentence says it, a traceback would hide it
        return 2 if isinstance(error, ConfigError) else 1
    print(json.dumps({"vocab_size": tokenizer.vocab_size, "digest": tokenizer.digest}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
