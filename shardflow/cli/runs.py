"""Commands that read a training run: ``goodput``, ``verdict``, ``metrics``, and ``ledger`` of its samples."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardflow.cli.common import (
    add_json,
    add_run,
    natural_number,
    positive_number,
    show_lines,
    show_table,
    write_json,
)
from shardflow.errors import ConfigError
from shardflow.format.keys import SAMPLE_KEY_PATTERN
from shardflow.logs import counted
from shardflow.monitoring import MetricsServer, read_metrics_text, require_prometheus
from shardflow.monitoring.goodput import goodput_of
from shardflow.monitoring.history import MetricsTail, RunFile, damage_note, read_settings, refuse_dataset
from shardflow.monitoring.verdict.judging import judge_each
from shardflow.telemetry import Verdict
from shardflow.viewing.web import new_token, read_token

if TYPE_CHECKING:
    from shardflow.training.ledger import LedgerStep
    from shardflow.training.ledger_index import Draws

GOODPUT_DESCRIPTION = """\
Splits the time of a training run, over all its starts, into steps that count, waiting for data, checkpoints,
evaluations, restarts, and work that a later start did again. The share of useful steps is the number that
people compare (goodput, effective training time ratio). Time before the first start had joined its ranks is
not known and not counted.
"""
GOODPUT_EXAMPLES = """\
examples:
  shardflow goodput run
  shardflow goodput run --json
"""
_PARTS = (
    ("steps that count", "useful_s"),
    ("waiting for data in them", "data_wait_s"),
    ("standing still for checkpoints", "checkpoint_s"),
    ("evaluations", "evaluation_s"),
    ("starts and restarts", "restart_s"),
    ("work done again", "lost_s"),
    ("between all that", "other_s"),
)


def add_goodput_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow goodput``."""
    add_run(parser)
    add_json(parser)


def run_goodput(arguments: argparse.Namespace) -> int:
    """Run ``shardflow goodput``."""
    tail = MetricsTail(arguments.folder)
    found = goodput_of(tail.read())
    values = {**found.to_json(), "damaged_lines": tail.num_damaged}
    if arguments.json:
        write_json(values)
        return 0
    starts = counted(found.num_starts, "start")
    steps = f"{counted(found.num_steps, 'step')} that count, {found.num_lost_steps} done again"
    show_lines([f"{found.useful_share:.1%} useful of {found.wall_s:,.1f} s in {starts}; {steps}."])
    total = found.wall_s or 1.0
    rows = [(name, f"{values[key]:,.1f}", f"{values[key] / total:.1%}") for name, key in _PARTS]
    show_table("where the time went", ("", "s", "share"), rows)
    show_lines(filter(None, [damage_note(tail.num_damaged)]))
    return 0


VERDICT_DESCRIPTION = """\
Judges what a run measured (metrics.jsonl in its folder): whether its steps wait for storage, decoding,
copies, gradients or a slow rank, or compute. Each finding comes with its share of the step, its numbers, and
advice that names a setting with its old and new value. Gains are estimates.
"""
VERDICT_EXAMPLES = """\
examples:
  shardflow verdict runs/first
  shardflow verdict runs/first --json
"""
_LEAST_GAIN = 0.01


def add_verdict_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow verdict``."""
    add_run(parser)
    add_json(parser)


def run_verdict(arguments: argparse.Namespace) -> int:
    """Run ``shardflow verdict``."""
    file = RunFile(arguments.folder)
    now, phases = _judge(judge_each(file.intervals(), config=read_settings(arguments.folder)))
    if not now:
        raise ConfigError(
            f"A verdict needs the measurements of a few steps; the {file.num_intervals} intervals of this "
            "RUN are too few. Wait until it has run longer, and check monitor.interval_s."
        )
    if arguments.json:
        rows = [{"first_step": first, "last_step": last, "code": one.code} for first, last, one in phases]
        verdicts = [one.to_json() for one in now]
        write_json({"verdicts": verdicts, "stretches": rows, "damaged_lines": file.num_damaged})
        return 0
    for verdict in now:
        show_lines([verdict.text, *(_advice_line(one.text, one.gain) for one in verdict.advice)])
    shown = [(one.code, f"{first:,}", f"{last:,}", f"{one.share:.0%}") for first, last, one in phases]
    show_table("what came first over the run", ("", "from step", "to step", "of the step"), shown)
    show_lines(filter(None, [damage_note(file.num_damaged)]))
    return 0


def _advice_line(text: str, gain: float) -> str:
    return f"  - {text}" + (f" (about {gain:.0%} faster)" if gain >= _LEAST_GAIN else "")


def _judge(found: Iterable[list[Verdict]]) -> tuple[list[Verdict], list[tuple[int, int, Verdict]]]:
    """Return the last verdicts, and the phases of the run: first and last step, newest leading verdict."""
    now: list[Verdict] = []
    phases: list[tuple[int, int, Verdict]] = []
    last = -1
    for now in found:
        first = now[0]
        if phases and phases[-1][2].code == first.code:
            phases[-1] = (phases[-1][0], first.global_step, first)
        else:
            phases.append((last + 1, first.global_step, first))
        last = first.global_step
    return now, phases


METRICS_DESCRIPTION = """\
Serves the numbers of a training run under /metrics, as a run with [monitor] prometheus does itself: for a run
that was started without it, from another machine that sees its folder, and on after the run has ended. The
folder may still be empty. Only numbers are served. Scrapers need a token, because other users of this machine
reach its ports too: the one in the printed address, which is new at each start, or that of --token-file, for
a scrape configuration; with --no-token none.
"""
METRICS_EXAMPLES = """\
examples:
  shardflow metrics run
  shardflow metrics run --token-file scrape.token
  shardflow metrics run --listen 0.0.0.0:9464 --token-file scrape.token
  shardflow metrics run --once
"""
_LISTEN = "127.0.0.1:9464"


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow metrics``."""
    add_run(parser)
    parser.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        default=_LISTEN,
        help=f"where to serve; port 0 for any free one ({_LISTEN})",
    )
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument(
        "--token-file", metavar="FILE", help="ask scrapers for the token in this file, not for a new one"
    )
    tokens.add_argument("--no-token", action="store_true", help="serve everybody who reaches the address")
    parser.add_argument(
        "--once",
        action="store_true",
        help="write the numbers to standard output instead, and exit: for a textfile collector",
    )


def run_metrics(arguments: argparse.Namespace) -> int:
    """Run ``shardflow metrics`` until it is stopped."""
    require_prometheus("shardflow metrics")
    if not arguments.folder.is_dir():
        raise ConfigError("RUN must be an existing folder, got none of that name; correct it.")
    refuse_dataset(arguments.folder)
    if arguments.once:
        sys.stdout.write(read_metrics_text(arguments.folder))
        return 0
    if arguments.token_file is not None:
        token = read_token(arguments.token_file, "--token-file")
    else:
        token = "" if arguments.no_token else new_token()
    with MetricsServer(arguments.folder, arguments.listen, asked_by="--listen", token=token) as server:
        show_lines([f"Metrics are at {server.url} until Ctrl-C."])
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    return 0


LEDGER_DESCRIPTION = """\
Reads the committed steps of a training run: those that its newest checkpoint counts, each once, as the
attempt that was kept ran them.

`show` lists them, `diff` compares two runs step by step. A RUN is a run folder, or a file of lines that
`show --json` wrote; with --compact these hold a digest of each step in place of its samples.

`where` finds the steps that drew a sample, a person's samples or a shard's, or what a step drew.
`prove-removed` proves that no step drew a person or a sample: after `shardflow remove`, of a run on the new
version, or of the steps after --after-step. Both take a run folder, and make an index in it on first use (20
bytes a draw), which later calls bring up to date. Persons and shards are looked up in all versions of the
run's dataset that exist; a person is named by its surrogate, the column facts.patient_key.

Exit code 0: done; for diff: every step has the same samples in the same micro-batches with the same weights;
for prove-removed: proven. 1: the runs differ, the person is not removed, or a ledger has a gap.
"""
LEDGER_EXAMPLES = """\
examples:
  shardflow ledger show run
  shardflow ledger show run --json --compact
  shardflow ledger diff run another-run
  shardflow ledger diff cluster-a.jsonl run --json
  shardflow ledger where run --sample 5jicxviub5i5kpsyutetodb5d4
  shardflow ledger where run --patient 3wbq6uqhxyvqkq2cgnbxq4xjfa --dataset my-dataset
  shardflow ledger where run --step 1200
  shardflow ledger prove-removed run --patient 3wbq6uqhxyvqkq2cgnbxq4xjfa
"""
EXIT_DIFFERENT = 1
_ACTIONS = ("show", "diff", "where", "prove-removed")
_WANTED = "one of --sample, --patient, --shard and --step"
_SEARCHING = ("sample", "patient", "shard", "step", "after_step", "dataset", "index_dir")
_OPTIONS = {
    "show": (),
    "diff": (),
    "where": _SEARCHING,
    "prove-removed": ("sample", "patient", "after_step", "dataset", "index_dir"),
}


def add_ledger_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and options of ``shardflow ledger``."""
    parser.add_argument("action", choices=_ACTIONS, metavar="ACTION", help=", ".join(_ACTIONS))
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="one run, or two to compare")
    parser.add_argument(
        "--compact", action="store_true", help="show: a digest a step in place of its samples"
    )
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--sample", action="append", metavar="KEY", help="where, prove-removed: this sample; may be repeated"
    )
    wanted.add_argument(
        "--patient", metavar="SURROGATE", help="where, prove-removed: all samples of a person"
    )
    wanted.add_argument("--shard", metavar="NAME", help="where: all samples of a shard, such as train-000012")
    wanted.add_argument("--step", type=natural_number, metavar="K", help="where: what global step K drew")
    parser.add_argument(
        "--after-step",
        type=natural_number,
        metavar="K",
        help="where, prove-removed: only global steps after K",
    )
    parser.add_argument(
        "--dataset", metavar="DATASET", help="look up persons and shards here, not in the run's data.dataset"
    )
    parser.add_argument(
        "--index-dir", type=Path, metavar="DIR", help="keep the index here, not in the run folder"
    )
    parser.add_argument(
        "--limit",
        type=positive_number,
        default=20,
        metavar="N",
        help="diff, where: differences or draws that are described; all are counted (20)",
    )
    add_json(parser)


def run_ledger(arguments: argparse.Namespace) -> int:
    """Run ``shardflow ledger``; the exit code is 0, or 1 if the runs differ or nothing is proven."""
    action, options = arguments.action, _OPTIONS[arguments.action]
    num_runs = 2 if action == "diff" else 1
    if len(arguments.runs) != num_runs:
        raise ConfigError(
            f"ledger {action} takes {counted(num_runs, 'RUN')}, got {len(arguments.runs)}; see "
            "shardflow ledger --help."
        )
    for run in arguments.runs:
        refuse_dataset(run)  # its ledger is that of packing
    for name in _SEARCHING:
        if getattr(arguments, name) is not None and name not in options:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is not an option of ledger {action}; leave it out.")
    if action in ("where", "prove-removed"):
        return _search(arguments)
    ledgers = [_read_ledger(path) for path in arguments.runs]
    if action == "show":
        _show_ledger(ledgers[0], arguments)
        return 0
    return _diff_ledgers(ledgers[0], ledgers[1], arguments)


def _search(arguments: argparse.Namespace) -> int:
    # The ledger opens datasets, which the other commands of this module need not import.
    from shardflow.training.ledger_index import LedgerIndex, check_whole

    (run,) = arguments.runs
    if not run.is_dir():
        raise ConfigError(
            f"ledger {arguments.action} takes the folder of a run, got {run.name!r}; correct it."
        )
    if arguments.step is not None:
        return _show_step(run, arguments)
    keys, newest = _wanted(run, arguments)
    after = -1 if arguments.after_step is None else arguments.after_step
    if arguments.action == "prove-removed":
        check_whole(run, after + 1)
    draws = LedgerIndex(run, arguments.index_dir).find(keys, after_step=after, limit=arguments.limit)
    if arguments.action == "where":
        _show_draws(draws, len(keys), arguments)
        return 0
    return _prove(draws, len(keys), newest, arguments)


def _show_step(run: Path, arguments: argparse.Namespace) -> int:
    from shardflow.training.ledger_index import read_step

    record = read_step(run, arguments.step)
    if record is None:
        raise ConfigError(
            f"the run has no committed step {arguments.step}; give one that a checkpoint counts."
        )
    if arguments.json:
        write_json(record.to_json(compact=False))
    else:
        _show_ledger([record], arguments)
    return 0


def _wanted(run: Path, arguments: argparse.Namespace) -> tuple[list[str], int | None]:
    """Return the requested sample keys, and the newest version if it holds samples of a person."""
    from shardflow.training.ledger_index import keys_of_person, keys_of_shard, open_versions

    if arguments.sample:
        bad = [key for key in arguments.sample if not SAMPLE_KEY_PATTERN.fullmatch(key)]
        if bad:
            raise ConfigError(
                f"--sample takes sample keys, of lowercase letters and digits; {len(bad)} of "
                f"{len(arguments.sample)} are not valid keys. Copy them from `shardflow ledger show`."
            )
        return sorted({*arguments.sample}), None
    if arguments.patient is None and arguments.shard is None:
        what = "--sample or --patient" if arguments.action == "prove-removed" else _WANTED
        raise ConfigError(f"ledger {arguments.action} needs {what}.")
    url = arguments.dataset or read_settings(run).get("data.dataset")
    if not isinstance(url, str) or url.endswith(".toml"):
        raise ConfigError(
            "patients and shards are looked up in a dataset, and the run does not name a single one; give it "
            "with --dataset."
        )
    found = open_versions(url)
    if arguments.shard is not None:
        return keys_of_shard(found, arguments.shard), None
    return keys_of_person(found, arguments.patient)


def _show_draws(draws: Draws, num_keys: int, arguments: argparse.Namespace) -> None:
    if arguments.json:
        write_json({"num_samples": num_keys, **asdict(draws)})
        return
    lines = [
        f"step {one.global_step} (epoch {one.epoch}, step {one.step}): micro-batch {one.micro}, slot "
        f"{one.slot}: {one.sample_key}" + ("" if one.weight > 0 else ", masked")
        for one in draws.described
    ]
    if draws.num_draws > len(lines):
        lines.append(f"... and {draws.num_draws - len(lines):,} more")
    lines.append(_counts(draws, num_keys))
    show_lines(lines)


def _counts(draws: Draws, num_keys: int) -> str:
    samples = counted(num_keys, "sample")
    steps = counted(draws.num_committed_steps, "committed step")
    if not draws.num_draws:
        return f"no draw of {samples} in {steps}"
    masked = f", {draws.num_masked} of them masked" if draws.num_masked else ""
    return (
        f"{counted(draws.num_draws, 'draw')} of {samples} in {draws.num_steps:,} of {steps}, from step "
        f"{draws.first_step} to step {draws.last_step}{masked}"
    )


def _prove(draws: Draws, num_keys: int, newest: int | None, arguments: argparse.Namespace) -> int:
    is_proven = not draws.num_draws and newest is None
    if arguments.json:
        write_json(
            {"proven": is_proven, "in_newest_version": newest, "num_samples": num_keys, **asdict(draws)}
        )
    else:
        after = "" if arguments.after_step is None else f" after step {arguments.after_step}"
        lines = [f"{'proven' if is_proven else 'not proven'}: {_counts(draws, num_keys)}{after}"]
        if arguments.sample and is_proven:
            lines.append("keys are compared as they were given: see that none is misspelled")
        if newest is not None:
            lines.append(
                f"version {newest} of the dataset still holds samples of this person: shardflow remove takes "
                "them out"
            )
        show_lines(lines)
    return 0 if is_proven else EXIT_DIFFERENT


def _read_ledger(path: Path) -> list[LedgerStep]:
    from shardflow.training.ledger import read_records

    if not path.exists():
        raise ConfigError(
            f"RUN must be a run folder or a file of ledger lines, got {path.name!r}; correct it."
        )
    return read_records(path)


def _show_ledger(records: list[LedgerStep], arguments: argparse.Namespace) -> None:
    if arguments.json:
        for record in records:
            write_json(record.to_json(compact=arguments.compact))
        return
    num_samples = sum(record.num_samples for record in records)
    lines = [f"{counted(len(records), 'committed step')}, {counted(num_samples, 'sample')}"]
    for record in records:
        what = f"digest {record.digest}" if arguments.compact else " ".join(record.keys)
        lines.append(f"step {record.global_step} (epoch {record.epoch}, step {record.step}): {what}")
    show_lines(lines)


def _diff_ledgers(first: list[LedgerStep], second: list[LedgerStep], arguments: argparse.Namespace) -> int:
    from shardflow.training.ledger import compare_ledgers

    differences = list(compare_ledgers(first, second))
    described = differences[: arguments.limit]
    kinds = Counter(difference.kind for difference in differences)
    first_step = differences[0].global_step if differences else None
    if arguments.json:
        write_json(
            {
                "equal": not differences,
                "num_steps": [len(first), len(second)],
                "first_difference": first_step,
                "differences": dict(sorted(kinds.items())),
                "described": [
                    {"kind": d.kind, "global_step": d.global_step, "text": d.text} for d in described
                ],
            }
        )
    elif not differences:
        show_lines([f"equal: {counted(len(first), 'step')}, the same samples in the same micro-batches"])
    else:
        lines = [f"step {d.global_step}: {d.kind}: {d.text}" for d in described]
        if len(differences) > len(described):
            lines.append(f"... and {len(differences) - len(described)} more")
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"different in {counted(len(differences), 'step')}, from step {first_step} on: {found}")
        show_lines(lines)
    return EXIT_DIFFERENT if differences else 0
