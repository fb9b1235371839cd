"""Console script ``shardflow``: the table of commands, and one way to fail.

Exit codes: 0 done; 1 damage, or a mistake inside shardflow; 2 a setting or an argument is wrong; 3 (pack)
more was quarantined than allowed. An error is one line on standard error, and with ``--json`` also
``{"error": ...}`` on standard output.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from shardflow._version import __version__
from shardflow.cli.common import CommandParser, HelpFormatter
from shardflow.errors import ConfigError, PlanError, ProofError, ShardflowError, SignatureError
from shardflow.logs import describe_exception

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_INTERRUPTED = 130
_EXIT_STOPPED = 75  # of training: start again later


@dataclass(frozen=True, slots=True)
class Command:
    """An entry of the command table; its module is imported when the command is used."""

    module: str
    """Holds ``DESCRIPTION``, ``EXAMPLES``, ``add_arguments``, which declares the options, and ``run``, which
    returns the exit code."""
    summary: str
    part: str = ""
    """In a module of several commands, part of these names: ``REMOVE_DESCRIPTION``, ``run_remove``."""

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Import the module, and give the parser the command's options, texts and function."""
        module = import_module(self.module)
        upper, lower = (f"{self.part.upper()}_", f"_{self.part}") if self.part else ("", "")
        parser.description = getattr(module, f"{upper}DESCRIPTION")
        parser.epilog = getattr(module, f"{upper}EXAMPLES")
        getattr(module, f"add{lower}_arguments")(parser)
        parser.set_defaults(run=getattr(module, f"run{lower}"))


# In the order in which a newcomer meets them.
COMMANDS: Final = {
    "synth": Command("shardflow.cli.synth", "generate studies, reports and their truth, for tests and demos"),
    "pack": Command("shardflow.cli.pack", "pack DICOM studies and reports into a dataset"),
    "pack-text": Command("shardflow.cli.pack", "pack texts and conversations into a dataset", "text"),
    "index": Command(
        "shardflow.cli.copy",
        "make a dataset of WebDataset tars that others wrote, without copying them",
        "index",
    ),
    "info": Command("shardflow.cli.info", "show what a dataset holds"),
    "verify": Command("shardflow.cli.versions", "check every byte against index and manifest"),
    "sign": Command(
        "shardflow.cli.versions", "sign a dataset with an SSH key, for readers that trust it", "sign"
    ),
    "view": Command(
        "shardflow.cli.view", "look into a dataset in a browser: studies, slices, reports, findings"
    ),
    "preview": Command("shardflow.cli.view", "draw slices of a study beside its report (PNG)", "preview"),
    "report": Command(
        "shardflow.cli.report", "write one page about a dataset, a training run, or two runs (HTML)"
    ),
    "copy": Command("shardflow.cli.copy", "copy a dataset between stores, every byte checked"),
    "columns": Command(
        "shardflow.cli.info",
        "list what expressions and fields may name: facts and attached tables",
        "columns",
    ),
    "attach": Command("shardflow.cli.attach", "add tables beside a dataset: the facts of its series"),
    "reports": Command(
        "shardflow.cli.review", "write findings for review, or phrases that no lexicon knows", "reports"
    ),
    "review": Command(
        "shardflow.cli.review", "write rows of a table for a person, and read corrections back into it"
    ),
    "stats": Command(
        "shardflow.cli.info",
        "intensities, spacings and shapes of a split, to choose a normalization from",
        "stats",
    ),
    "folds": Command(
        "shardflow.cli.attach",
        "deal studies into folds of cross-validation, no person in two of them",
        "folds",
    ),
    "train-tokenizer": Command(
        "shardflow.cli.tokenize",
        "make a tokenizer from the reports of a dataset",
        "train",
    ),
    "tokenize": Command("shardflow.cli.tokenize", "add the token ids of all texts for one tokenizer"),
    "entities": Command(
        "shardflow.cli.attach",
        "make a view whose samples are findings with the slices that show them",
        "entities",
    ),
    "plan": Command(
        "shardflow.cli.plan", "show an epoch before its first step: steps, micro-batches, samples"
    ),
    "doctor": Command("shardflow.cli.train", "check this machine and environment before training", "doctor"),
    "train": Command(
        "shardflow.cli.train", "train a vision-language model on a dataset, on any number of GPUs"
    ),
    "serve": Command("shardflow.cli.serve", "make micro-batches for training on other machines"),
    "generate": Command(
        "shardflow.cli.generate", "write the reports or answers of a trained model, and compare them"
    ),
    "ledger": Command(
        "shardflow.cli.runs",
        "which samples made a run, and which steps drew a sample; compare two runs",
        "ledger",
    ),
    "goodput": Command(
        "shardflow.cli.runs", "where a run's time went: useful steps, waits, restarts, lost work", "goodput"
    ),
    "top": Command(
        "shardflow.cli.top", "a run in the terminal: rates, where a step's time goes, ranks, verdict"
    ),
    "verdict": Command(
        "shardflow.cli.runs", "say what a training run is bound by, and what to do about it", "verdict"
    ),
    "metrics": Command(
        "shardflow.cli.runs", "serve a run's numbers to Prometheus, from its folder", "metrics"
    ),
    "remove": Command(
        "shardflow.cli.versions",
        "take studies or patients out of a dataset, for good",
        "remove",
    ),
    "compact": Command(
        "shardflow.cli.versions",
        "write shards again without removed samples",
        "compact",
    ),
    "bench": Command(
        "shardflow.cli.bench", "measure how fast a dataset is read, what limits it, and what would help"
    ),
    "completion": Command(
        "shardflow.cli.main", "print a script that completes the command line in a shell", "completion"
    ),
}
EXTRAS: Final = {
    "pack": "ahocorasick cv2 edfio highdicom imagecodecs nibabel pyarrow pydicom rapidfuzz",
    "view": "PIL",
    "wfdb": "wfdb",
    "train": "safetensors tensorboard tokenizers torch transformers",
    "remote": "obstore",
    "ray": "ray",
    "prometheus": "prometheus_client",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "lora": "peft",
    "metrics": "sacrebleu",
}
"""Optional dependencies by the extra that installs them, as import names."""
_DESCRIPTION = """\
Packs medical studies into plain WebDataset shards, and streams them, exactly, to GPUs.
The usual way: synth (or own data) -> pack -> info, verify, preview, report -> plan -> train.
"""
_EPILOG = """\
Each command explains itself: shardflow COMMAND --help

Exit codes: 0 done; 1 damage, or a failure; 2 a setting or an argument is wrong, or an extra is not
installed; 3 (pack) more inputs are quarantined than allowed; 75 (train) stopped with a checkpoint; 130
stopped by a signal. An error is one line on standard error. Colors are left out where standard output is no
terminal, or NO_COLOR is set.
"""
# What decides whether two machines can give the same bytes, or run at all.
_VERSIONS_SHOWN = (
    "numpy",
    "blosc2",
    "imagecodecs",
    "opencv-python-headless",
    "pillow",
    "pydicom",
    "torch",
    "transformers",
)


class _Version(argparse.Action):
    """``--version``: versions of shardflow and its main dependencies, looked up only on request."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(_describe_versions())
        parser.exit()


def _describe_versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    found = [f"Python {platform.python_version()}"]
    for package in _VERSIONS_SHOWN:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    return f"shardflow {__version__} (dataset format 1; {', '.join(found)})"


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the command line.

    Args:
        only: The only command whose options are declared, which imports its module; all by default.
    """
    parser = CommandParser(
        prog="shardflow",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.command = only or ""
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions that matter, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary, formatter_class=HelpFormatter)
        if only in {None, name}:
            command.declare(subparser)
    return parser


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, in the order of ``--help``."""
    (commands,) = (
        action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(commands.choices)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if argv is None and name == "train":
        # As process 1 of a container a job ignores every signal that it does not handle, imports or not.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_STOPPED))
    as_json = "--json" in arguments
    try:
        _check_command(name)
        parsed = build_parser(name).parse_args(arguments)
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except (ConfigError, PlanError, ProofError, SignatureError) as error:
        return _fail(error.message, EXIT_CONFIGURATION, as_json=as_json)
    except ShardflowError as error:
        return _fail(error.message, EXIT_FAILED, as_json=as_json)
    except ModuleNotFoundError as error:
        extra = extra_of(error)
        if extra is None:
            return _fail(f"internal error: {describe_exception(error)}", EXIT_FAILED, as_json=as_json)
        message = f"shardflow {name} needs the extra '{extra}': pip install 'shardflow[{extra}]'"
        return _fail(message, EXIT_CONFIGURATION, as_json=as_json)
    except BrokenPipeError:
        # The reader of a pipe, such as head, has what it wanted.
        _abandon_output()
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last place to give a mistake of ours one exit code
        if isinstance(error, OSError) and (reason := _why_output_is_lost()) is not None:
            _abandon_output()
            message = f"standard output must take what is written to it, got {reason}; make room, and repeat."
            return _fail(message, EXIT_FAILED, as_json=False)
        return _fail(f"internal error: {describe_exception(error)}", EXIT_FAILED, as_json=as_json)
    return code


def _check_command(name: str) -> None:
    if name and name not in COMMANDS:
        begun = [command for command in COMMANDS if command.startswith(name)]
        near = begun[0] if begun else difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"There is no command {name!r}; did you mean {near}? All of them: shardflow --help")


def extra_of(error: ModuleNotFoundError) -> str | None:
    """Return the extra that installs a missing module; None if it is no optional dependency."""
    package = (error.name or "").partition(".")[0]
    return next((extra for extra, packages in EXTRAS.items() if package in packages.split()), None)


def _why_output_is_lost() -> str | None:
    """Return why standard output fails, such as a full disk behind it; None if it works."""
    try:
        # Python has dropped what it could not write, so only another byte shows the error.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "an error")
    return None


def _abandon_output() -> None:
    """Discard buffered output: Python would report the same error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": message}))
    print(f"shardflow: {message}", file=sys.stderr)
    return code


COMPLETION_DESCRIPTION = """\
Prints a script that completes commands, options, choices and files.

  bash  add to ~/.bashrc:            eval "$(shardflow completion bash)"
  zsh   in ~/.zshrc after compinit:  eval "$(shardflow completion zsh)"
  fish  once, and after an update:   shardflow completion fish > ~/.config/fish/completions/shardflow.fish
"""
COMPLETION_EXAMPLES = """\
examples:
  shardflow completion bash
  shardflow completion fish
"""
_FILES: Final = frozenset({"FILE"})
_FOLDERS: Final = frozenset({"DATASET", "DIR", "FOLDER", "OUT", "RUN"})


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow completion``."""
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "fish", "zsh"), help="bash, fish, zsh")


def run_completion(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0."""
    import shtab

    parser = build_parser()
    _mark_paths(parser)
    sys.stdout.write(shtab.complete(parser, shell=arguments.shell))
    return 0


def _mark_paths(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments that are files and folders for shtab, by their names in --help."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark_paths(command)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
