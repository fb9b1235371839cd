"""``shardflow completion``: a script that completes commands, options and files in bash, zsh or fish.

The script is made from the parser itself and needs no Python when the Tab key is hit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = [
    "SHELLS",
    "SUMMARY",
    "Command",
    "Option",
    "add_arguments",
    "describe_commands",
    "run",
    "write_script",
]

SUMMARY = "print a script that completes the command line in a shell"
DESCRIPTION = """\
Prints a script that completes commands, options, choices and files.

  bash  add to ~/.bashrc:            source <(shardflow completion bash)
  zsh   add to ~/.zshrc:             source <(shardflow completion zsh)
  fish  once, and after an update:   shardflow completion fish > ~/.config/fish/completions/shardflow.fish
"""
EXAMPLES = """\
examples:
  shardflow completion bash
  shardflow completion fish
"""
SHELLS: Final = ("bash", "fish", "zsh")
Takes = Literal["nothing", "value", "choice", "file", "folder"]
_FOLDERS: Final = frozenset({"DATASET", "OUT", "FOLDER"})
_GLOBAL: Final = ("--help", "--version")
# Split at line ends only: names may hold spaces. Without mapfile, which the bash of macOS lacks.
_BASH_FILES: Final = "local IFS=$'\\n'; COMPREPLY=($(compgen -{} -- \"$current\"));"


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of a command, or (without flags) what stands at a place."""

    flags: tuple[str, ...]
    help: str
    takes: Takes
    choices: tuple[str, ...]
    name: str
    """What a value is called in ``--help``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command and all that may follow it."""

    name: str
    help: str
    options: tuple[Option, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow completion``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0."""
    commands = [
        _describe_pack(command) if command.name == "pack" else command
        for command in describe_commands(arguments.parser())
    ]
    sys.stdout.write(write_script(arguments.shell, commands))
    return 0


def describe_commands(parser: argparse.ArgumentParser) -> list[Command]:
    """Read the commands and their options off a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return [
                Command(name=name, help=helps.get(name, ""), options=tuple(map(_describe, each._actions)))
                for name, each in sorted(action.choices.items())
            ]
    return []


def _describe_pack(command: Command) -> Command:
    """Add the options of packing, whose parser is its own; without them where pydicom is not installed."""
    try:
        from pipelines.pack import add_arguments as add_pack_arguments
    except ImportError:
        return command
    parser = argparse.ArgumentParser(prog="shardflow pack")
    add_pack_arguments(parser)
    return Command(name=command.name, help=command.help, options=tuple(map(_describe, parser._actions)))


def _describe(action: argparse.Action) -> Option:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    choices = tuple(str(choice) for choice in action.choices or ())
    takes: Takes = "value"
    if action.nargs == 0:
        takes = "nothing"
    elif choices:
        takes = "choice"
    elif name == "FILE":
        takes = "file"
    elif name in _FOLDERS:
        takes = "folder"
    help_text = (action.help or "").replace("%%", "%")
    return Option(flags=tuple(action.option_strings), help=help_text, takes=takes, choices=choices, name=name)


def write_script(shell: str, commands: Sequence[Command]) -> str:
    """Write the script of a shell of `SHELLS`."""
    return {"bash": _bash, "fish": _fish, "zsh": _zsh}[shell](commands)


def _bash(commands: Sequence[Command]) -> str:
    values, words, places = [], [], []
    for command in commands:
        flags = [flag for option in command.options for flag in option.flags]
        words.append(f'    {command.name}) words="{" ".join(flags)}" ;;')
        for option in command.options:
            if option.flags and option.takes != "nothing":
                cases = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
                values.append(f"    {cases}) {_bash_reply(option)} return ;;")
            elif not option.flags and option.takes != "value":
                # bash does not count what stands where: the first such argument speaks for all.
                places.append(f"    {command.name}) {_bash_reply(option)} return ;;")
    lines = [
        "# Completion of shardflow for bash; written by: shardflow completion bash",
        "_shardflow() {",
        '  local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}"',
        '  local command="${COMP_WORDS[1]}" words=""',
        "  COMPREPLY=()",
        '  if [ "$COMP_CWORD" -eq 1 ]; then',
        f'    words="{" ".join([*(command.name for command in commands), *_GLOBAL])}"',
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "    return",
        "  fi",
        '  case "$command $previous" in',
        *values,
        "  esac",
        '  case "$command" in',
        *words,
        "  esac",
        '  if [ "${current#-}" != "$current" ]; then',
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "    return",
        "  fi",
        '  case "$command" in',
        *_first_of_each(places),
        "  esac",
        "}",
        "complete -o filenames -F _shardflow shardflow",
    ]
    return "\n".join(lines) + "\n"


def _first_of_each(lines: Sequence[str]) -> list[str]:
    return list({line.split(")", 1)[0]: line for line in reversed(lines)}.values())[::-1]


def _bash_reply(option: Option) -> str:
    match option.takes:
        case "choice":
            return f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$current"));'
        case "file":
            return _BASH_FILES.format("f")
        case "folder":
            return _BASH_FILES.format("d")
    return ""


def _zsh(commands: Sequence[Command]) -> str:
    lines = [
        "#compdef shardflow",
        "# Completion of shardflow for zsh; written by: shardflow completion zsh",
        "_shardflow() {",
        "  if (( CURRENT == 2 )); then",
        "    local -a commands=(",
        *(f"      {_quoted(f'{command.name}:{command.help}')}" for command in commands),
        "    )",
        "    _describe command commands",
        f"    compadd -- {' '.join(_GLOBAL)}",
        "    return",
        "  fi",
        "  shift words",
        "  (( CURRENT-- ))",
        '  case "$words[1]" in',
    ]
    for command in commands:
        lines += [f"    {command.name})", "      _arguments -s \\"]
        lines += [f"        {spec} \\" for option in command.options for spec in _zsh_specs(option)]
        lines += ["        && return ;;"]
    lines += ["  esac", "}"]
    # Sourced, the function is announced; found as a file on fpath, it is called.
    lines += ['if [ "$funcstack[1]" = "_shardflow" ]; then', '  _shardflow "$@"', "else"]
    lines += ["  (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"]
    lines += ["  compdef _shardflow shardflow", "fi"]
    return "\n".join(lines) + "\n"


def _zsh_specs(option: Option) -> list[str]:
    action = {
        "choice": f"({' '.join(option.choices)})",
        "file": "_files",
        "folder": "_files -/",
        "value": " ",
        "nothing": "",
    }[option.takes]
    value = "" if option.takes == "nothing" else f":{option.name}:{action}"
    if not option.flags:
        return [_quoted(value)]
    text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    return [_quoted(f"{flag}[{text}]{value}") for flag in option.flags]


def _fish(commands: Sequence[Command]) -> str:
    lines = [
        "# Completion of shardflow for fish; written by: shardflow completion fish",
        "complete -c shardflow -f",
    ]
    lines += [
        f"complete -c shardflow -n __fish_use_subcommand -l {flag.removeprefix('--')}" for flag in _GLOBAL
    ]
    for command in commands:
        lines.append(
            f"complete -c shardflow -n __fish_use_subcommand -a {command.name} -d {_quoted(command.help)}"
        )
        condition = f"complete -c shardflow -n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            value = {
                "choice": f"-a {_quoted(' '.join(option.choices))}",
                "file": "-F",
                "folder": "-a '(__fish_complete_directories)'",
                "value": "",
                "nothing": "",
            }[option.takes]
            if not option.flags:
                if value:
                    lines.append(f"{condition} {value}")
                continue
            flags = " ".join(
                f"-l {flag.removeprefix('--')}" if flag.startswith("--") else f"-s {flag.removeprefix('-')}"
                for flag in option.flags
            )
            # -x: a value, and no file.
            needs = {"nothing": "", "file": " -r"}.get(option.takes, " -x")
            lines.append(f"{condition} {flags}{needs} {value} -d {_quoted(option.help)}".replace("  ", " "))
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
