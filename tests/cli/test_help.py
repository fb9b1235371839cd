"""``--help`` of every command and job: its purpose, examples that are valid, exit codes, lines that fit."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from pipelines.demo import __main__ as demo
from shardflow.cli import common, plan, synth
from shardflow.cli import main as cli
from shardflow.cli.common import HelpFormatter
from shardflow.format.facts.units import UNITS
from shardflow.sampling.budget import OVER_BUDGET
from shardflow.sampling.spec import TAILS
from shardflow.synthetic import DEFAULT_PATHOLOGIES, PATHOLOGIES

pytestmark = pytest.mark.fast

JOBS = {
    "python -m pipelines.demo": demo.build_parser,
}
PARSERS = {f"shardflow {name}": parser for name, parser in cli.command_parsers().items()}
PARSERS |= {name: build() for name, build in JOBS.items()}


def _examples(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Commands below the word ``example`` of the closing part, as argument lists."""
    text = (parser.epilog or "").replace("\\\n", " ")
    return [
        shlex.split(line)
        for line in text.partition("example")[2].splitlines()
        if re.match(r"  (?:shardflow|python|torchrun) ", line)
    ]


@pytest.mark.parametrize("name", PARSERS)
def test_help_says_what_it_is_for_and_what_each_option_does(name: str) -> None:
    parser = PARSERS[name]
    assert parser.prog == name
    assert len(parser.description or "") > 50
    silent = [action.dest for action in parser._actions if not action.help]
    assert not silent


@pytest.mark.parametrize("name", PARSERS)
def test_help_has_examples_that_the_parser_takes(name: str) -> None:
    examples = _examples(PARSERS[name])
    assert examples, f"{name} --help shows no example"
    for example in examples:
        words = name.split()
        start = example.index(words[-1]) + 1
        PARSERS[name].parse_args(example[start:])


@pytest.mark.parametrize("name", JOBS)
def test_help_of_a_job_says_how_it_ends(name: str) -> None:
    assert "exit codes: 0 " in " ".join(JOBS[name]().format_help().split())


def test_help_of_the_whole_names_every_command_and_exit_code() -> None:
    text = " ".join(cli.build_parser().format_help().split())
    for name in PARSERS:
        assert name.removeprefix("shardflow ") in text or "demo" in name
    assert "Exit codes: 0 done; 1 damage" in text
    assert "130 stopped by a signal" in text


@pytest.mark.parametrize("name", ["shardflow", *PARSERS])
def test_paragraphs_of_help_fit_a_terminal_of_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = PARSERS.get(name) or cli.build_parser()
    assert parser.formatter_class is HelpFormatter
    # Examples and tables, which are indented, are as wide as they are written.
    too_long = [line for line in parser.format_help().splitlines() if len(line) > 80 and line[0] != " "]
    assert not too_long


def test_paragraphs_are_filled_and_tables_are_kept() -> None:
    parser = argparse.ArgumentParser(
        prog="x", description="one\ntwo\n\ntable:\n  a   1\n  b   2\n", formatter_class=HelpFormatter
    )
    assert "\none two\n\ntable:\n  a   1\n  b   2\n" in parser.format_help()


def test_choices_of_plan_are_those_of_the_sampling() -> None:
    assert plan.OVER_BUDGET == OVER_BUDGET
    assert plan.TAILS == TAILS
    assert common.UNITS == UNITS


def test_help_of_synth_lists_every_oddity_with_its_chance() -> None:
    listed = dict(re.findall(r"^  ([a-z-]+) +(\d+) % ", synth.EXAMPLES, re.MULTILINE))
    assert listed == {name: str(DEFAULT_PATHOLOGIES.get(name, 0)) for name in PATHOLOGIES}
