"""``shardflow generate``: texts from a trained model, and their scores against references."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shardflow.cli.common import add_run, positive_number
from shardflow.cli.train import add_torchrun_arguments, launch, torchrun_options
from shardflow.training.__main__ import answered, report_code

DESCRIPTION: Final = """\
Writes the report of each study of a split, or the last answer of each conversation, with the model and the
processor of a run: greedily, one JSON object a line with sample_key, text, reference and is_finished, in the
order of the plan, the same on any number of processes. FILE appears when it is complete, and only its owner
may read it.

The last line of standard output is one JSON object with counts and scores against the references: F1 of the
14 classes of CheXpert as the report reader finds them in both texts (an uncertain finding counts as one), and
BLEU and chrF of sacrebleu where shardflow[metrics] is installed.
"""
EXAMPLES: Final = """\
examples:
  shardflow generate my-run --out answers.jsonl
  shardflow generate my-run --split test --max-new-tokens 256 --out answers.jsonl --nproc-per-node 8
  shardflow generate my-run --split test --no-reference --out reports.jsonl

The model must fit one device, also where it was trained in shards. Exit codes as of `shardflow train`.
"""
_MAX_NEW_TOKENS: Final = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow generate``."""
    _add_job_arguments(parser)
    add_torchrun_arguments(parser)


def _add_job_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--split", default="", help="split of the run's dataset (data.eval_split)")
    parser.add_argument(
        "--checkpoint", metavar="NAME", default="", help="checkpoint of the run (the newest sound one)"
    )
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=positive_number,
        default=_MAX_NEW_TOKENS,
        help=f"tokens of a text, at most ({_MAX_NEW_TOKENS})",
    )
    parser.add_argument(
        "--no-reference",
        action="store_true",
        help="samples need no report or answer, and nothing is compared",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the job, under torchrun where one of its options is given; returns the exit code."""
    options = torchrun_options(arguments)
    if not options:
        return _run(arguments)
    own = [f"--out={arguments.out}", f"--max-new-tokens={arguments.max_new_tokens}"]
    own += [f"--split={arguments.split}"] if arguments.split else []
    own += [f"--checkpoint={arguments.checkpoint}"] if arguments.checkpoint else []
    own += ["--no-reference"] if arguments.no_reference else []
    return launch([*options, "-m", "shardflow.cli.generate", *own, "--", str(arguments.folder)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m shardflow.cli.generate")
    _add_job_arguments(parser)
    code = _run(parser.parse_args(argv))
    report_code(code)
    return code


def _run(arguments: argparse.Namespace) -> int:
    def work(rank: int) -> int:
        # As training does: OpenMP would take every processor of the machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Torch takes seconds to import, and --help does without.
        from shardflow.training.jobs.generating import GenerateSettings, generate

        settings = GenerateSettings(
            run=arguments.folder,
            output=arguments.out,
            split=arguments.split,
            checkpoint=arguments.checkpoint,
            max_new_tokens=arguments.max_new_tokens,
            has_reference=not arguments.no_reference,
        )
        summary = generate(settings)
        if rank == 0:
            print(json.dumps(summary), flush=True)
        return 0

    return answered(work)


if __name__ == "__main__":
    sys.exit(main())
