"""``shardflow pack-text``: JSONL and Parquet texts into a dataset."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardflow.cli.common import add_job_settings, add_json, counted, human_bytes, interruptible, show_lines
from shardflow.cli.pack import make_progress

if TYPE_CHECKING:
    from shardflow.packing.corpora.job import CorpusSummary

DESCRIPTION = """\
Packs files of JSON lines (.jsonl, .jsonl.gz, .jsonl.zst) and Parquet files into a dataset of texts: texts to
learn language from, instruction pairs, dialogues, preferences. FILE says where they lie, which field is what,
and where the dataset goes; copy pipelines/recipes/pack_corpus.toml to begin one.

Texts are scrubbed unless [deid] says otherwise. Run the same command again to go on where a stopped job was:
finished parts stay. That is no --append: it takes new files into the next version of a dataset that is
finished. The last line of standard output is one JSON object; progress goes to standard error.
"""
EXAMPLES = """\
examples:
  shardflow pack-text --config my-corpus.toml --print-config
  shardflow pack-text --config my-corpus.toml
  shardflow pack-text --config my-corpus.toml --append
  shardflow pack-text --config my-corpus.toml --set fields.kind=dialogue --set fields.turns=messages
  shardflow pack-text --config my-corpus.toml --set deid.text=keep --set output=/data/corpus

exit codes: 0 done, or already done; 1 an error: run it again; 2 a setting is wrong; 3 more lines are
quarantined than allowed; 130 stopped by a signal: run it again to go on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow pack-text``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    add_job_settings(parser)
    parser.add_argument(
        "--append", action="store_true", help="take new files into the dataset's next version"
    )
    parser.add_argument("--print-config", action="store_true", help="show every setting in force, and exit")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 0, or 3 where too much is quarantined.
    """
    from shardflow.config import dump_config, load_config
    from shardflow.logs import configure_logging
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.corpora.job import pack_corpus

    configure_logging(withhold_foreign_text=True)
    config = load_config(CorpusConfig, arguments.config, arguments.overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    with interruptible(), make_progress() as progress:
        summary = pack_corpus(config, progress, mode="append" if arguments.append else "pack")
    if not arguments.json:
        show_lines(_describe(summary))
    print(json.dumps(summary.to_json()))
    return summary.exit_code


def _describe(summary: CorpusSummary) -> Iterator[str]:
    """Say the summary in words."""
    inputs = summary.inputs
    counts = ", ".join(f"{inputs[name]:,} {name}" for name in ("packed", "skipped", "quarantined"))
    yield f"{counted(inputs['total'], 'line')}: {counts}."
    if summary.reasons:
        ranked = sorted(summary.reasons.items(), key=lambda item: (-item[1], item[0]))
        yield "Not packed: " + ", ".join(f"{count:,} {reason}" for reason, count in ranked) + "."
    match summary.status:
        case "quarantine_limit":
            yield "Too many lines are quarantined: nothing is published; finished parts stand."
            yield "Correct [fields] or the files, or raise policy.max_quarantined_share."
            return
        case "already_packed":
            yield "This corpus is already packed."
        case "nothing_new":
            yield "There is nothing to do: the dataset stays at this version."
        case _:
            splits = ", ".join(f"{count:,} {split}" for split, count in summary.splits.items())
            shards = counted(summary.num_shards, "shard")
            yield f"{shards}, {human_bytes(summary.num_bytes)}, samples: {splits}."
    yield f"dataset_id {summary.dataset_id}"
