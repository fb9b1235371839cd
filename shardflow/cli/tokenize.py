"""``shardflow tokenize`` and ``shardflow train-tokenizer``: token ids beside a dataset, and tokenizers."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from shardflow.cli.common import (
    UNITS,
    add_dataset,
    add_json,
    add_threads,
    conversation_field,
    named_fields,
    open_dataset,
    positive_number,
    step_progress,
    write_result,
)
from shardflow.errors import ConfigError
from shardflow.fields.units import open_unit
from shardflow.loading.rows.selection import FULL_STUDY, open_view

DESCRIPTION = """\
Writes the token ids of each report, and how many there are, into tokens/<tokenizer>/<dataset_id>/ of the
dataset; no shard is touched. Each tokenizer has a folder of its own. A plan with `--tokenizer` and a
training run with `batch.text_tokens = "counted"` fill token budgets by the counts instead of an estimate from
bytes; a loader with `tokens` maps the ids, and nothing is tokenized while one trains.

With --processor the conversations are rendered by a model's own processor, and the tokens and pictures of
each are counted, into conversations/<processor>/<dataset_id>/: token budgets and packed sequences of
conversations are filled by these counts. Shards that an earlier version of the dataset has keep theirs. With
--max-tokens as well, conversations of more tokens are split at their turns, and each part is counted, for
fields with `split_long`. With --fields the conversations are those that the template of a field makes, one of
each row: of studies, or with --unit of series, images or findings.

Ids are text for whoever has the tokenizer: guard them like the reports. Start a stopped job again to
resume it. Needs the package tokenizers: pip install 'shardflow[train]'.
"""
EXAMPLES = """\
examples:
  shardflow tokenize my-dataset --tokenizer my-tokenizer
  shardflow tokenize my-dataset --tokenizer my-tokenizer/tokenizer.json --threads 8 --json
  shardflow tokenize my-dataset --tokenizer my-tokenizer --view entity
  shardflow tokenize my-dataset --processor Qwen2.5-VL-7B-Instruct --threads 8
  shardflow tokenize my-dataset --processor Qwen2.5-VL-7B-Instruct --max-tokens 8192
  shardflow tokenize my-studies --processor Qwen2.5-VL-7B-Instruct --fields sft.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow tokenize``."""
    add_dataset(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="tokenizer.json, or the folder that holds it",
    )
    which.add_argument(
        "--processor",
        metavar="DIR",
        type=Path,
        help="folder of a model's processor: count its tokens of conversations",
    )
    parser.add_argument(
        "--view",
        metavar="NAME",
        default=FULL_STUDY,
        help="tokenize the texts of an entity view's rows (full_study: whole reports)",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=positive_number,
        help="with --processor: split conversations of more than N tokens (whole ones alone)",
    )
    parser.add_argument(
        "--fields",
        metavar="FILE",
        help="with --processor: count what the template of these fields makes; a training file has some too",
    )
    parser.add_argument("--unit", choices=UNITS, default="study", help="with --fields: what a row is (study)")
    parser.add_argument(
        "--where", metavar="EXPR", help="with --unit series or image: which of them are rows, as for a loader"
    )
    add_threads(parser, "shards tokenized at once, or processes that render (one a core)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    from shardflow.training.tokenizing import TextTokenizer, tokenize_dataset

    if arguments.processor is not None:
        return _count(arguments)
    if arguments.max_tokens is not None or arguments.fields is not None:
        raise ConfigError(
            "--max-tokens and --fields are for conversations, which --processor counts; leave them out."
        )
    dataset = open_view(open_dataset(arguments.dataset), arguments.view)
    tokenizer = TextTokenizer(arguments.tokenizer)
    with step_progress("shards") as on_shard:
        done = tokenize_dataset(dataset, tokenizer, num_threads=arguments.threads, on_shard=on_shard)
    amount = f"{done.num_tokens:,} tokens in {done.num_samples:,} samples of {done.num_shards:,} shards"
    kept = f", {done.num_shards_kept:,} done before" if done.num_shards_kept else ""
    write_result(arguments, asdict(done), [amount + kept, f"tokenizer {done.tokenizer}"])
    return 0


def _count(arguments: argparse.Namespace) -> int:
    """Count the tokens of conversations."""
    from shardflow.training.tokenizing import count_dataset

    dataset, fields, name = open_dataset(arguments.dataset), None, ""
    if arguments.fields is not None:
        fields = named_fields(arguments.fields) or {}
        name, field = conversation_field(fields)
        if field.template is None or arguments.max_tokens is not None:
            raise ConfigError(
                f"The field {name!r} has no template, so its conversations are stored; leave out --fields."
                if field.template is None
                else "--max-tokens splits stored conversations; leave it out, or --fields."
            )
        dataset = open_view(dataset, arguments.view)
        dataset = open_unit(dataset, arguments.unit, arguments.where)
    elif arguments.view != FULL_STUDY or arguments.unit != "study" or arguments.where is not None:
        raise ConfigError(
            "Stored conversations are those of studies; leave out --view, --unit and --where, or name the "
            "--fields of a template."
        )
    with step_progress("shards") as on_shard:
        done = count_dataset(
            dataset,
            arguments.processor,
            split_at=arguments.max_tokens,
            fields=fields,
            name=name,
            num_processes=arguments.threads,
            on_shard=on_shard,
        )
    amount = f"{done.num_tokens:,} tokens and {done.num_images:,} images in {done.num_samples:,} samples"
    kept = (
        f", {done.num_shards_kept:,} of {done.num_shards:,} shards done before"
        if done.num_shards_kept
        else ""
    )
    lines = [amount + kept, f"longest {done.longest:,} tokens", f"processor {done.processor}"]
    if arguments.max_tokens is not None:
        lines.insert(1, f"{done.num_split:,} conversations split into {done.num_parts:,} parts")
    if done.num_empty:
        what = "have no conversation that can be rendered"
        if fields is not None:
            what = "make none: they lack what the template names, or cannot be read or rendered"
        lines.insert(1, f"{done.num_empty:,} samples {what}")
    write_result(arguments, asdict(done), lines)
    return 0


TRAIN_DESCRIPTION = """\
Makes a tokenizer (byte-level BPE) from the reports of one split of a packed dataset. The same reports give
the same files. It holds pieces of the reports that it was made from: guard it like them. The last line of
standard output is one JSON object.
"""
TRAIN_EXAMPLES = """\
example:
  shardflow train-tokenizer --dataset my-dataset --vocab-size 1024 --output my-tokenizer
"""


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow train-tokenizer``."""
    parser.add_argument("--dataset", required=True, metavar="DATASET", help="folder of a packed dataset")
    parser.add_argument("--split", default="train", help="whose reports to learn from (default: train)")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="tokens (default: 4096)")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where to write it")


def run_train(arguments: argparse.Namespace) -> int:
    """Run ``shardflow train-tokenizer``."""
    dataset = open_dataset(arguments.dataset)
    from shardflow.training.text import train_tokenizer  # transformers takes seconds to import

    with step_progress("reading reports") as progress:
        tokenizer = train_tokenizer(
            dataset, arguments.split, arguments.vocab_size, arguments.output, progress
        )
    print(json.dumps({"vocab_size": tokenizer.vocab_size, "digest": tokenizer.digest}))
    return 0
