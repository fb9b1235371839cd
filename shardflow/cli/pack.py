"""Commands that pack a dataset: ``pack`` of anything, ``pack-text`` of texts and conversations."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO

from shardflow.cli.common import add_job_settings, add_json, interruptible, show_lines, told_languages
from shardflow.config import dump_config, load_config
from shardflow.errors import ConfigError, ShardflowError
from shardflow.logs import (
    LINE_EVERY_S,
    configure_logging,
    counted,
    describe_exception,
    human_bytes,
    time_left,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from shardflow.packing import PackMode, PackSummary
    from shardflow.packing.corpora.config import FieldsConfig
    from shardflow.packing.corpora.job import CorpusSummary

DESCRIPTION: Final = """\
Packs folders of DICOM files, and the reports that name their studies, into a dataset. FILE names
their folders and the output; copy pipelines/recipes/pack_folders.toml to begin one. A FILE with [fields] is
one of texts or conversations, and is packed as shardflow pack-text does.

Run the same command again to resume a stopped job. That is no --append, which makes the next version
of a dataset that is finished. The key that makes all surrogates is made in private_dir at the first run: keep
it. The last line of standard output is one JSON object; progress goes to standard error.
"""
EXAMPLES: Final = """\
examples:
  shardflow pack --config my-recipe.toml --print-config
  shardflow pack --config my-recipe.toml
  shardflow pack --config my-recipe.toml --dry-run
  shardflow pack --config my-recipe.toml --append
  shardflow pack --config my-recipe.toml --task 0/8
  shardflow pack --config my-recipe.toml --merge
  shardflow pack --config my-recipe.toml --set execution.num_processes=8 --set output=/data/packed

exit codes: 0 done, or already done; 1 an error: run it again; 2 a setting is wrong; 3 more inputs are
quarantined than allowed; 4 tasks are missing before --merge; 130 stopped by a signal: run it again to go on.
"""

_EXIT_FAILED: Final = 1
_EXIT_CONFIGURATION: Final = 2
_EXIT_INTERRUPTED: Final = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow pack``."""
    add_job_settings(parser)
    parser.add_argument(
        "--engine",
        choices=("local", "ray"),
        help="where packing processes run; the same as --set execution.engine=...",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--append", action="store_true", help="take new inputs into the dataset's next version"
    )
    kinds.add_argument(
        "--retry", action="store_true", help="try what is quarantined again, for the dataset's next version"
    )
    kinds.add_argument(
        "--task",
        metavar="I/N",
        help="pack one of N parts (from 0) of a first version, beside the others; publish nothing",
    )
    kinds.add_argument(
        "--merge", action="store_true", help="publish what all the tasks have packed, or name those that miss"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="read headers and say what would be packed; write no dataset"
    )
    parser.add_argument(
        "--json", action="store_true", help="write nothing but the JSON line on standard output"
    )


def run(args: argparse.Namespace) -> int:
    """Run the job; returns the exit code."""
    if _is_of_lines(args.config):
        _refuse_studies_options(args)
        return run_text(args)
    from shardflow.packing.engines.forking import prepare_to_fork, process_server

    prepare_to_fork()
    from shardflow.packing import ArrayTask, PackConfig, pack  # needs pydicom, which the training image lacks
    from shardflow.packing.handlers import load_ahead

    configure_logging(withhold_foreign_text=True)
    try:
        engine = [] if args.engine is None else [f"execution.engine={args.engine}"]
        config = load_config(PackConfig, args.config, [*args.overrides, *engine])
        if args.print_config:
            print(dump_config(config), end="")
            return 0
        load_ahead(config)
        with process_server(), interruptible(), make_progress() as progress:
            mode: PackMode = "append" if args.append else "retry" if args.retry else "pack"
            array_task = None if args.task is None else ArrayTask.parse(args.task)
            summary = pack(
                config,
                progress,
                mode=mode,
                is_dry_run=args.dry_run,
                array_task=array_task,
                is_merge=args.merge,
            )
    except ConfigError as error:
        code = _fail("configuration_error", error.message, _EXIT_CONFIGURATION, as_json=args.json)
        if error.path and sys.stderr.isatty():
            # Only on a terminal: a redirected stream is a log, and logs hold no input path.
            sys.stderr.write(f"shardflow: the path is {error.path}\n")
        return code
    except ShardflowError as error:
        again = "" if "run the job again" in error.message else "; run the job again"
        return _fail("error", f"{error.message} What was packed is kept{again}.", _EXIT_FAILED)
    except KeyboardInterrupt:
        text = "stopped by a signal; what was packed is kept: run the job again to resume."
        return _fail("interrupted", text, _EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the last place where an error may show its text
        return _fail("error", f"internal error: {describe_exception(error)}", _EXIT_FAILED)
    if not args.json:
        print("\n".join(_describe(summary)))
    print(json.dumps(summary.to_json()))
    return summary.exit_code


def _is_of_lines(config: str) -> bool:
    """Return whether a file has the settings of a corpus job: only those have ``[fields]``."""
    try:
        with Path(config).expanduser().open("rb") as file:
            return "fields" in tomllib.load(file)
    except (OSError, ValueError):
        return False  # reading the settings says what is wrong


def _refuse_studies_options(args: argparse.Namespace) -> None:
    for name in ("engine", "retry", "task", "merge", "dry_run"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} applies to jobs that pack studies, but this file has [fields], "
                "so it packs lines of text; leave the option out."
            )


def _fail(status: str, message: str, code: int, *, as_json: bool = True) -> int:
    if as_json:
        print(json.dumps({"status": status, "error": message}))
        sys.stdout.flush()
    sys.stderr.write(f"shardflow: {message}\n")
    return code


def _describe(summary: PackSummary) -> Iterator[str]:
    """Describe the summary for people."""
    inputs = summary.inputs
    if summary.status == "task_done":
        yield f"The {summary.num_shards} shards of this task are complete; --merge publishes those of all."
        return
    yield f"{inputs['total']:,} inputs: {_outcomes(inputs)}."
    if summary.num_known_inputs:
        yield f"{summary.num_known_inputs} inputs are known, and stay as they are."
    yield from _reasons(summary.reasons)
    match summary.status:
        case "quarantine_limit":
            yield "Too many inputs are quarantined: nothing is published; what was packed is kept."
            yield "See inputs-*.jsonl in private_dir; repair inputs, or raise policy.max_quarantined_share."
            return
        case "already_packed":
            yield "This dataset is already packed."
        case "nothing_new":
            yield "There is nothing to do: the dataset stays at this version."
        case "tasks_missing":
            tasks = ", ".join(map(str, summary.missing_tasks))
            yield f"Nothing is published: these tasks have to run before, with --task I/N: {tasks}."
            return
        case "planned":
            yield from summary.notes
            yield (
                f"Dry run: {summary.num_slices} slices, {summary.num_shards} new shards of about "
                f"{summary.num_bytes} bytes, samples: {_splits(summary.splits)}. Pixels were not read."
            )
            return
        case _:
            slices, shards = counted(summary.num_slices, "slice"), counted(summary.num_shards, "shard")
            yield f"{slices} in {shards}, samples: {_splits(summary.splits)}."
            if summary.reports:
                yield f"Reports by language: {told_languages(summary.reports)}."
            yield from summary.notes
    yield f"dataset_id {summary.dataset_id}"


TEXT_DESCRIPTION: Final = """\
Packs files of JSON lines (.jsonl, .jsonl.gz, .jsonl.zst), JSON and Parquet into a dataset: texts to learn
language from, or conversations with their images (messages, LLaVA, ShareGPT, Alpaca, documents, preferences,
scores, prompts with answers). FILE says where they lie, which field is what, and where the dataset goes; copy
pipelines/recipes/pack_corpus.toml to begin one.

Texts are scrubbed unless [deid] says otherwise. Run the same command again to go on where a stopped job was:
finished parts stay. That is no --append: it takes new files into the next version of a dataset that is
finished. The last line of standard output is one JSON object; progress goes to standard error.
"""
TEXT_EXAMPLES: Final = """\
examples:
  shardflow pack-text --config my-corpus.toml --print-config
  shardflow pack-text --config my-corpus.toml
  shardflow pack-text --config my-corpus.toml --append
  shardflow pack-text --config my-corpus.toml --set fields.kind=conversations
  shardflow pack-text --config my-corpus.toml --set deid.text=keep --set output=/data/corpus

exit codes: 0 done, or already done; 1 an error: run it again; 2 a setting is wrong; 3 more lines are
quarantined than allowed; 130 stopped by a signal: run it again to go on.
"""


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow pack-text``."""
    add_job_settings(parser)
    parser.add_argument(
        "--append", action="store_true", help="take new files into the dataset's next version"
    )
    add_json(parser)


def run_text(arguments: argparse.Namespace) -> int:
    """Run ``shardflow pack-text``; the exit code is 0, or 3 if too much is quarantined."""
    from shardflow.packing.engines.forking import prepare_to_fork, process_server

    prepare_to_fork()
    from shardflow.packing.corpora.config import CorpusConfig
    from shardflow.packing.corpora.job import pack_corpus

    configure_logging(withhold_foreign_text=True)
    config = load_config(CorpusConfig, arguments.config, arguments.overrides)
    if arguments.print_config:
        print(dump_config(config), end="")
        return 0
    with process_server(), interruptible(), make_progress() as progress:
        summary = pack_corpus(config, progress, mode="append" if arguments.append else "pack")
    if not arguments.json:
        show_lines(_describe_texts(summary, config.fields))
    print(json.dumps(summary.to_json()))
    return summary.exit_code


def _looked_for(fields: FieldsConfig) -> str:
    """Name the fields that lines must have, from the settings; nothing of a line."""
    if fields.kind == "text":
        key = f" and [fields] key = {fields.key!r}" if fields.key else ""
        return f"lines must have [fields] text = {fields.text!r}{key}"
    return (
        f"lines must have turns ([fields] turns = {fields.turns!r}), each with its role and its content "
        f"(role = {fields.role!r}, content = {fields.content!r}), or another form of a conversation"
    )


def _describe_texts(summary: CorpusSummary, fields: FieldsConfig) -> Iterator[str]:
    """Describe the summary for people."""
    yield f"{counted(summary.inputs['total'], 'line')}: {_outcomes(summary.inputs)}."
    yield from _reasons(summary.reasons)
    if "MISSING_FIELD" in summary.reasons:
        yield f"MISSING_FIELD: {_looked_for(fields)}."
    if summary.bad_lines:
        yield f"{summary.bad_lines} in private_dir lists them: file, line, reason, and what to do."
    match summary.status:
        case "quarantine_limit":
            yield "Too many lines are quarantined: nothing is published; finished parts are kept."
            yield "Correct [fields] or the files, or raise policy.max_quarantined_share."
            return
        case "already_packed":
            yield "This corpus is already packed."
        case "nothing_new":
            yield "There is nothing to do: the dataset stays at this version."
        case _:
            shards = counted(summary.num_shards, "shard")
            yield f"{shards}, {human_bytes(summary.num_bytes)}, samples: {_splits(summary.splits)}."
            if summary.forms:
                yield f"Conversations by form: {_splits(summary.forms)}."
    yield f"dataset_id {summary.dataset_id}"


def _outcomes(inputs: Mapping[str, int]) -> str:
    return ", ".join(f"{inputs[name]:,} {name}" for name in ("packed", "skipped", "quarantined"))


def _reasons(reasons: Mapping[str, int]) -> Iterator[str]:
    """List why inputs were not packed, the most frequent reason first."""
    if reasons:
        ranked = sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        yield "Not packed: " + ", ".join(f"{count:,} {reason}" for reason, count in ranked) + "."


def _splits(splits: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in splits.items()) or "none"


_TITLES: Final = {
    "archive": "fetching from the archive",
    "headers": "reading headers",
    "reports": "linking reports",
    "studies": "packing studies",
    "inputs": "looking at the files",
    "duplicates": "looking for duplicates",
    "parts": "packing parts",
    "index": "numbering shards",
    "outcomes": "writing the outcomes of lines",
    "shards": "writing shards again",
    "samples": "writing the samples table",
    "ledger": "writing the ledger",
    "facts": "writing the tables of facts",
    "page": "writing the page (report.html)",
    "manifest": "publishing the manifest",
    "upload": "sending the rest to the object store",
    "done": "done",
}


_PACE_LINES: Final = 6
"""Lines over which the pace is taken."""


class LineProgress:
    """Plain lines: one for each phase, and one every ten seconds of a long one.

    The remaining time is that of the pace of the last minute, from the first unit on: processes take a while
    to start, and a job that is resumed rushes through what an earlier run has done. While some units are
    late, it is a lower bound.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._title = ""
        self._total = self._count = 0
        self._said_at = 0.0
        self._marks: deque[tuple[float, int]] = deque(maxlen=_PACE_LINES)

    def phase(self, name: str, total: int) -> None:
        """Begin a phase."""
        self._title, self._total, self._count = _TITLES[name], total, 0
        self._marks.clear()
        self._say(f"{self._title} ({total})" if total else self._title)

    def advance(self, count: int = 1, *, has_late: bool = False) -> None:
        """Finish units of the phase."""
        self._count += count
        now = time.monotonic()
        if not self._marks:
            self._marks.append((now, self._count))
        if now - self._said_at >= LINE_EVERY_S:
            since, before = self._marks[0]
            rest = time_left(self._count - before, self._total - before, now - since, is_least=has_late)
            self._marks.append((now, self._count))
            self._say(f"{self._title}: {self._count} of {self._total}{rest}")

    def note(self, text: str) -> None:
        """Write a message."""
        self._say(text)

    def _say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._stream.write(f"{text}\n")
        self._stream.flush()


@contextmanager
def make_progress(stream: TextIO | None = None) -> Iterator[BarProgress | LineProgress]:
    """Show bars on a terminal, and lines on anything else."""
    target = stream if stream is not None else sys.stderr
    if not target.isatty():
        yield LineProgress(target)
        return
    # A job without a terminal need not wait for it.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[least]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=target)) as bars:
        yield BarProgress(bars)


class BarProgress:
    """A bar for each phase, with counts and the remaining time."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def phase(self, name: str, total: int) -> None:
        """Begin a phase; the previous bar is full."""
        if self._task is not None:
            (task,) = (task for task in self._bars.tasks if task.id == self._task)
            self._bars.update(self._task, total=task.total or 1, completed=task.total or 1)
        self._task = (
            None if name == "done" else self._bars.add_task(_TITLES[name], total=total or None, least="")
        )

    def advance(self, count: int = 1, *, has_late: bool = False) -> None:
        """Finish units of the phase."""
        if self._task is not None:
            self._bars.update(self._task, advance=count, least="at least" if has_late else "")

    def note(self, text: str) -> None:
        """Write a message above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)
