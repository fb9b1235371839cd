"""The command ``shardflow completion``: a script of shtab that completes the command line in a shell."""

from __future__ import annotations

import argparse
import sys
from typing import Final

import shtab

DESCRIPTION: Final = """\
Prints a script that completes commands, options, choices and files.

  bash  add to ~/.bashrc:            eval "$(shardflow completion bash)"
  zsh   in ~/.zshrc after compinit:  eval "$(shardflow completion zsh)"
  fish  once, and after an update:   shardflow completion fish > ~/.config/fish/completions/shardflow.fish
"""
EXAMPLES: Final = """\
examples:
  shardflow completion bash
  shardflow completion fish
"""
_FILES: Final = frozenset({"FILE"})
_FOLDERS: Final = frozenset({"DATASET", "DIR", "FOLDER", "OUT", "RUN"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow completion``."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "fish", "zsh"), help="bash, fish, zsh")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0."""
    from shardflow.cli.main import build_parser

    parser = build_parser()
    _mark_paths(parser)
    sys.stdout.write(shtab.complete(parser, shell=arguments.shell))
    return 0


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    """Tell shtab which arguments are files and folders, by what --help calls them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark_paths(command)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
