"""``shardflow ledger``: the samples of each step of a run."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from shardflow.cli.common import add_json, natural_number, positive_number, show_lines, write_json
from shardflow.errors import ConfigError
from shardflow.format.keys import SAMPLE_KEY_PATTERN
from shardflow.logs import counted
from shardflow.monitoring.history import read_settings
from shardflow.monitoring.lines import refuse_dataset
from shardflow.training.ledger import LedgerStep, compare_ledgers, read_records
from shardflow.training.ledger_index import (
    Draws,
    LedgerIndex,
    check_whole,
    keys_of_person,
    keys_of_shard,
    open_versions,
    read_step,
)

DESCRIPTION = """\
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
EXAMPLES = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
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
