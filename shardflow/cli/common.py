"""Shared parts of the commands: options, opening a dataset, text and JSON output, progress, stop signals."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO

from shardflow.errors import ConfigError, StorageError
from shardflow.logs import LINE_EVERY_S, time_left

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from shardflow.fields.conversations.field import Conversation
    from shardflow.fields.field import Field
    from shardflow.format import Dataset

# Repeated here so that --help needs no NumPy; a test compares them with those of the format.
UNITS: Final = ("study", "series", "image", "window", "entity")


class CommandParser(argparse.ArgumentParser):
    """Parser that fails as every other error does, instead of printing its usage and exiting."""

    command = ""
    """The command whose help covers what the parser of all commands does not know."""

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError`: the command line itself is wrong."""
        raise ConfigError(f"{message}; see: {' '.join(filter(None, (self.prog, self.command)))} --help")


class HelpFormatter(argparse.HelpFormatter):
    """Formatter that fills paragraphs, and keeps the lines of those with an indented line."""

    def add_argument(self, action: argparse.Action) -> None:
        """Make room for the commands, which argparse indents once more than it counts."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = textwrap.dedent(text).strip("\n").split("\n\n")
        return "\n\n".join(self._fill_paragraph(paragraph, width, indent) for paragraph in paragraphs)

    def _fill_paragraph(self, paragraph: str, width: int, indent: str) -> str:
        if "\n  " in f"\n{paragraph}":
            return textwrap.indent(paragraph, indent)
        return textwrap.fill(paragraph, width, initial_indent=indent, subsequent_indent=indent)


class Pace:
    """Progress as a line every ten seconds: nothing for short work, no silence in long work."""

    def __init__(self, label: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            label: The activity, such as ``verifying shards``.
            stream: Where lines go.
            clock: Monotonic clock in seconds.
        """
        self._label = label
        self._stream = stream
        self._clock = clock
        self._started_s = self._said_s = clock()

    def advance(self, done: int, total: int) -> None:
        """Record the amount done and the total; write a line if one is due."""
        now_s = self._clock()
        if now_s - self._said_s < LINE_EVERY_S:
            return
        self._said_s = now_s
        rest = time_left(done, total, now_s - self._started_s)
        self._stream.write(f"{self._label}: {done} of {total}{rest}\n")
        self._stream.flush()


@contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM, which schedulers send, end the job as Ctrl-C does; later signals are ignored."""
    is_stopping = False

    def stop(*_: Any) -> None:
        # Not SIG_IGN: of a second signal that is pending already, Python would show a traceback.
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


_WIDEST = 1000


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument of commands that read a dataset."""
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="folder of a packed dataset, or its address: s3:// gs:// az:// http(s):// file://",
    )


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument of commands that read a training run."""
    parser.add_argument("folder", type=Path, metavar="RUN", help="folder of a training run")


def add_threads(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add ``--threads``, by default one a processor."""
    parser.add_argument(
        "--threads", metavar="N", type=positive_number, default=os.cpu_count() or 1, help=meaning
    )


def add_job_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--set``, which give a packing job's settings, and ``--print-config``."""
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML file of the job's settings")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="TABLE.KEY=VALUE",
        help="change one setting; may be given several times",
    )
    parser.add_argument("--print-config", action="store_true", help="show every setting in force, and exit")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="write JSON for tools instead of text for people")


def add_where(parser: argparse.ArgumentParser) -> None:
    """Add ``--where`` and ``--keys``."""
    parser.add_argument(
        "--where",
        metavar="EXPRESSION",
        help="only samples for which this is true: \"facts.modality == 'CT' and any(series.rows > 512)\"; of "
        "series and images \"modality == 'CT'\". shardflow columns lists the names",
    )
    parser.add_argument("--keys", metavar="FILE", help="only samples whose keys this file lists, one a line")


def add_unit(parser: argparse.ArgumentParser) -> None:
    """Add ``--unit``, which defines what a sample is."""
    parser.add_argument(
        "--unit",
        choices=UNITS,
        help="a sample is a study, a series, an image, a window of a field with center = 'grid', or a "
        "finding of the entity view (study)",
    )


def existing_dataset(url: str) -> str:
    """Return the address; a missing dataset is reported as such, not as a damaged one.

    Raises:
        ConfigError: There is no such folder, it holds no dataset, or no store has the scheme of the address.
            No request is sent to a remote store.
    """
    from shardflow.format import manifest
    from shardflow.storage import LocalStore, open_store

    try:
        store = open_store(url)
    except StorageError as error:
        raise ConfigError(f"DATASET: {error.message}") from None
    # An empty text would be the folder one happens to be in.
    if isinstance(store, LocalStore):
        if not (url and Path(store.url).is_dir()):
            raise ConfigError(
                f"DATASET must be an existing folder, got {url!r}; make one with: shardflow pack."
            )
        if not manifest.versions(store):
            raise ConfigError(
                f"DATASET must hold a manifest-NNNNNN.json, found none in {url!r}; is the path right, and "
                "did packing finish?"
            )
    return url


def open_dataset(url: str, *, version: int | None = None, with_studies: bool = False) -> Dataset:
    """Open a dataset.

    Args:
        url: Folder or address.
        version: The manifest version; the newest by default.
        with_studies: Refuse shards that others wrote, which hold no studies.

    Raises:
        ConfigError: There is no such dataset or version, or it lacks required studies.
        ManifestError: No manifest is at the address, or one that cannot be trusted.
    """
    from shardflow.format import Dataset, manifest
    from shardflow.storage import open_store

    existing_dataset(url)
    if version is not None and version not in (found := manifest.versions(open_store(url))):
        raise ConfigError(
            f"DATASET has no version {version}; it has: {', '.join(map(str, found)) or 'none'}."
        )
    dataset = Dataset.open(url, version=version)
    if with_studies and dataset.is_foreign:
        raise ConfigError(
            "DATASET must hold studies, got shards that others wrote; this command reads what "
            "`shardflow pack` writes."
        )
    return dataset


def natural_number(text: str) -> int:
    """Parse an integer of at least 0, for argparse."""
    return _number(text, at_least=0)


def positive_number(text: str) -> int:
    """Parse an integer of at least 1, for argparse."""
    return _number(text, at_least=1)


def _number(text: str, *, at_least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = at_least - 1
    if value < at_least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {at_least}, got {text!r}")
    return value


def write_json(value: Any) -> None:
    """Write one JSON object as one line of standard output."""
    sys.stdout.write(json.dumps(value, ensure_ascii=True) + "\n")


def choose_samples(
    dataset: Dataset, split: str | None, where: str | None, keys: str | None
) -> tuple[NDArray[np.int64], int]:
    """Return the rows that ``--split``, ``--where`` and ``--keys`` select.

    Returns:
        The rows, ``(n,)``, and the number of others that lack a value that ``--where`` compares.

    Raises:
        ConfigError: One of them cannot be read, or no sample is left.
    """
    import numpy as np

    # The loader takes a moment to import, and only a selection needs it.
    from shardflow.loading.rows.selection import choose_rows

    split = split or "+".join(name for name, span in dataset.splits.items() if span)
    chosen = choose_rows(dataset, split, where, keys)
    rows = chosen.rows
    return np.asarray(rows) if isinstance(rows, range) else rows.span(0, len(rows)), chosen.num_missing


def write_result(arguments: argparse.Namespace, facts: Any, lines: Iterable[str]) -> None:
    """Write the result of a command: facts with ``--json``, else lines for people."""
    if arguments.json:
        write_json(facts)
    else:
        show_lines(lines)


def _console() -> Console:
    # Rich takes as long to import as all else that a short command needs.
    from rich.console import Console

    # soft_wrap: a line cut at 80 columns is of no use to grep.
    return Console(highlight=False, soft_wrap=True)


def show_lines(lines: Iterable[str]) -> None:
    """Print lines of plain text."""
    for line in lines:
        _console().print(line, markup=False)


def told_languages(reports: Mapping[str, Mapping[str, int]]) -> str:
    """Describe the counts of reports by language, and by rules if there are several.

    Args:
        reports: `shardflow.format.keys.REPORT_COUNTS` of a manifest.
    """
    languages = sorted(reports["languages"].items(), key=lambda item: (-item[1], item[0]))
    counts = ", ".join(f"{count:,} {name}" for name, count in languages)
    rules = reports.get("rules", {})
    by_rules = ", ".join(f"{count:,} by {name}" for name, count in sorted(rules.items()))
    mixed = [f"read by {len(rules)} sets of rules: {by_rules}"] if len(rules) > 1 else []
    unread = [f"{count:,} not read whole ({reason})" for reason, count in sorted(reports["unread"].items())]
    return "; ".join([counts, *unread, *mixed])


def show_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Print aligned ``name  value`` lines."""
    from rich.markup import escape

    pairs = [(name, str(value)) for name, value in facts]
    width = max((len(name) for name, _ in pairs), default=0)
    console = _console()
    for name, value in pairs:
        console.print(f"[bold]{name:<{width}}[/]  {escape(value)}")


def named_fields(name: str) -> Mapping[str, Field] | None:
    """Return the fields that ``--fields`` names: those of a TOML file; None of ``default``.

    Raises:
        ConfigError: The file is not valid.
    """
    # Field types take a moment to import; --help does not wait for them.
    from shardflow.fields.registry import read_fields

    return None if name == "default" else read_fields(name)


def conversation_field(fields: Mapping[str, Field]) -> tuple[str, Conversation]:
    """Return the only field of conversations among those of a file, and its name.

    Raises:
        ConfigError: There is none, or several.
    """
    from shardflow.fields.conversations.field import Conversation

    named = [(name, one) for name, one in fields.items() if isinstance(one, Conversation)]
    if len(named) != 1:
        raise ConfigError(
            f"--fields must hold one field of type 'conversation', got {len(named)}; correct it."
        )
    return named[0]


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a small table: the first column is text, the others are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row))
    console = _console()
    # As wide as it is: numbers cut at 80 columns are of no use, in a log or to anyone.
    wanted = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.width = max(console.width, wanted)
    console.print()
    console.print(table)


@contextmanager
def step_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of the block and its remaining time on standard error.

    A terminal gets a bar, which disappears at the end of the block; a log gets a line every ten seconds.

    Yields:
        A function that takes the amount done and the total.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        pace = Pace(label, sys.stderr)
        yield pace.advance
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield advance
