"""How command lines explain themselves: the layout of ``--help``, and one line for a wrong argument.

Paragraphs are as wide as the terminal, examples and tables as they are written.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import NoReturn

from shardflow.errors import ConfigError

__all__ = ["CommandParser", "HelpFormatter"]


class CommandParser(argparse.ArgumentParser):
    """argparse that fails the way every other error does, instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError: the command line itself is wrong."""
        raise ConfigError(f"{message}; see: {self.prog} --help")


class HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs; keeps every paragraph that has an indented line, because its lines mean something."""

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
