"""The settings of a plan as options, and ``shardflow plan --summary``: two of them side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipelines.plan_blend import component_numbers, show_components, title_of
from pipelines.surface import human_bytes, natural_number, positive_number, show_lines, show_table, write_json
from shardflow.configs import parse_byte_size
from shardflow.epochs import (
    BatchSpec,
    CostRule,
    EpochPlan,
    PlanMeasures,
    PlanSummary,
    RankSchedule,
    TokenBudget,
    measure_plan,
)
from shardflow.epochs.budget import OVER_BUDGET
from shardflow.epochs.mix import BlendMix, measure_mix
from shardflow.epochs.spec import DEFAULT_WINDOW_BYTES, TAILS
from shardflow.errors import ConfigError
from shardflow.loading.selection import Selection
from shardflow.training.tokenizing import tokenizer_digest

__all__ = ["add_batch_arguments", "planned", "show_summary"]

_AUTO = "auto"
_OF_BUDGET = {
    "max_samples": 64,
    "packed": False,
    "over_budget": "alone",
    "max_text_tokens": 0,
    "tokenizer": None,
    "image_tokens_per_slice": 0,
    "max_slices": 0,
    "quadratic_tokens": 0,
}
"""What says how --max-tokens are counted, and what it is where nothing is said."""
_RANKS_PER_NODE = 8


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a batch spec is made of."""
    number, count = natural_number, positive_number
    add = parser.add_argument
    add("--micro-batch-size", type=count, metavar="B", help="samples in a micro-batch; or --max-tokens")
    add("--micro-batches-per-step", required=True, type=count, metavar="M", help="micro-batches in a step")
    add("--max-tokens", type=count, metavar="T", help="tokens in a micro-batch, padding counted")
    add("--max-samples", type=count, metavar="N", help="samples of it, whatever their length (64)")
    add("--packed", action="store_true", help="sequences are packed: --max-tokens counts no padding")
    add(
        "--over-budget",
        choices=OVER_BUDGET,
        help="a sample longer than --max-tokens is a micro-batch of its own, left out, or cut (alone)",
    )
    add("--max-text-tokens", type=number, metavar="T", help="where the text is cut (nowhere)")
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="fill by its counts of the reports (see: shardflow tokenize), not by an estimate from bytes",
    )
    add("--image-tokens-per-slice", type=number, metavar="T", help="tokens of a slice (0)")
    add("--max-slices", type=number, metavar="K", help="slices that the view takes (0)")
    add(
        "--quadratic-tokens",
        type=number,
        metavar="T",
        help="length at which attention costs as much as all the rest; 0 leaves it out (0)",
    )
    add(
        "--lanes",
        type=_lanes,
        metavar="L",
        help="lanes to mix samples in, or auto (0; auto with --max-tokens)",
    )
    parser.set_defaults(**_OF_BUDGET)
    add("--window", type=_window, metavar="w", help="bytes of a lane that are mixed at a time (1GiB)")
    add(
        "--tail",
        choices=TAILS,
        default="drop",
        help="what becomes of samples that do not fill the last step (drop)",
    )


def planned(selection: Selection, arguments: argparse.Namespace) -> tuple[EpochPlan, RankSchedule]:
    """Plan the epoch that the options describe, and deal it to ranks."""
    lanes = arguments.lanes
    if lanes is None and (arguments.max_tokens is not None or arguments.window is not None):
        lanes = _AUTO
    spec = _spec(arguments, lanes=1 if lanes == _AUTO else int(lanes or 0))
    plan = selection.plan(spec, seed=arguments.seed, epoch=arguments.epoch, auto_lanes=lanes == _AUTO)
    # The lines of a plan that nobody gave nodes for are dealt like cards, the summary always has nodes.
    ranks_per_node = arguments.ranks_per_node or (_ranks_per_node(arguments) if arguments.summary else 0)
    schedule = RankSchedule(
        spec.micro_batches_per_step,
        arguments.world_size,
        lanes=plan.spec.lanes,
        ranks_per_node=ranks_per_node,
    )
    return plan, schedule


def show_summary(selection: Selection, arguments: argparse.Namespace) -> None:
    """Show the numbers of one plan, or of two side by side."""
    settings = {"this": arguments}
    if arguments.compare:
        settings["other"] = _changed(arguments)
    numbers = {}
    for name, chosen in settings.items():
        plan, schedule = planned(selection, chosen)
        layout = selection.layout(plan.spec)
        measures = measure_plan(plan, layout, schedule, ranks_per_node=_ranks_per_node(chosen))
        numbers[name] = plan.summary(schedule), measures, plan.spec, measure_mix(plan)
    if arguments.json:
        for name, (summary, measures, spec, mix) in numbers.items():
            line: dict[str, Any] = {
                "settings": name,
                "plan": summary.to_json(),
                "measured": measures.to_json(),
                "text_tokens": _text_tokens(spec),
            }
            if mix is not None:
                line |= {"mix": mix.to_json(), "components": component_numbers(selection, arguments.epoch)}
            write_json(line)
        return
    columns = {name: _column(*found) for name, found in numbers.items()}
    rows = [(row, *(column[row] for column in columns.values())) for row in columns["this"]]
    show_lines([title_of(selection)])
    show_components(selection, arguments.epoch)
    show_table(f"epoch {arguments.epoch}, seed {arguments.seed}", ["", *columns], rows)


def _text_tokens(spec: BatchSpec) -> str | None:
    """Return where the tokens of the text come from; None where no budget counts them."""
    if spec.budget is None or not spec.budget.cost.text_tokens_per_1000_bytes:
        return None
    return "counted" if spec.budget.cost.tokenizer else "estimated"


def _column(
    summary: PlanSummary, found: PlanMeasures, spec: BatchSpec, mix: BlendMix | None
) -> dict[str, str]:
    """Return the numbers for people; every column has the same rows."""
    lanes = summary.lanes
    mixed = {}
    if mix is not None:
        mixed = {
            "mix of a step off by, mean": _percent(mix.mean_deviation),
            "mix of a step off by, most": _percent(mix.max_deviation),
        }
    return {
        "samples": f"{summary.num_samples:,}",
        "steps": f"{summary.num_steps:,}",
        "steps walked for this": _percent(found.walked_share),
        "micro-batches a step": f"{summary.micro_batches_per_step:,}",
        "dropped": f"{summary.num_dropped:,}",
        "of them skipped by rule": f"{summary.num_skipped:,}",
        "repeated": f"{summary.num_repeated:,}",
        "padding slots of the tail": f"{summary.num_padding_slots:,}",
        "over the budget": "-" if not summary.max_tokens or lanes is None else f"{lanes.num_over_budget:,}",
        "tokens of the text": _text_tokens(spec) or "-",
        "padding among tokens": _percent(found.padding_share),
        "budget used": _percent(found.budget_used),
        "imbalance, mean": _ratio(found.imbalance),
        "imbalance, 99 %": _ratio(found.imbalance_p99),
        "imbalance, worst step": _ratio(found.imbalance_max),
        "steps of at most 1.05": _percent(found.balanced_share),
        "ranks": f"{summary.world_size:,}",
        "efficiency": _percent(summary.efficiency),
        "nodes": f"{found.num_nodes:,}",
        "lanes": "-" if lanes is None else f"{lanes.lanes:,}",
        "pooled": "-" if lanes is None else _percent(lanes.pooled_share),
        "shards": f"{found.num_shards:,}",
        "shards open": f"{found.num_shards if lanes is None else lanes.num_shards_open:,}",
        "shards a node reads": "-" if found.shards_per_node is None else f"{found.shards_per_node:,.1f}",
        "bytes a node reads": human_bytes(round(found.bytes_per_node)),
        "shuffle, 1 is full": _ratio(found.neighbour_spread),
        **mixed,
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spec(arguments: argparse.Namespace, *, lanes: int) -> BatchSpec:
    if (arguments.micro_batch_size is None) == (arguments.max_tokens is None):
        found = "neither" if arguments.max_tokens is None else "both"
        raise ConfigError(f"one of --micro-batch-size and --max-tokens must be given, got {found}.")
    budget = None
    if arguments.max_tokens is None:
        for name, default in _OF_BUDGET.items():
            if getattr(arguments, name) != default:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} must come with --max-tokens, got it without; leave it out.")
    else:
        budget = TokenBudget(
            max_tokens=arguments.max_tokens,
            max_samples=arguments.max_samples,
            padded=not arguments.packed,
            over_budget=arguments.over_budget,
            cost=CostRule(
                max_text_tokens=arguments.max_text_tokens,
                image_tokens_per_slice=arguments.image_tokens_per_slice,
                max_slices=arguments.max_slices,
                quadratic_tokens=arguments.quadratic_tokens,
                tokenizer=tokenizer_digest(arguments.tokenizer) if arguments.tokenizer else "",
            ),
        )
    return BatchSpec(
        micro_batch_size=arguments.micro_batch_size or 0,
        budget=budget,
        micro_batches_per_step=arguments.micro_batches_per_step,
        tail=arguments.tail,
        lanes=lanes,
        window_bytes=arguments.window or DEFAULT_WINDOW_BYTES,
    )


def _changed(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the options with the settings of ``--compare`` in their place."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, argument_default=argparse.SUPPRESS)
    add_batch_arguments(parser)
    parser.add_argument("--world-size", type=positive_number)
    parser.add_argument("--ranks-per-node", type=positive_number)
    words = arguments.compare.replace(",", " ").split()
    known = {action.dest: action for action in parser._actions}
    changed: dict[str, Any] = vars(arguments).copy()
    names = {word.removeprefix("--").partition("=")[0] for word in words}
    # A budget and a size take each other's place.
    if "max-tokens" in names:
        changed["micro_batch_size"] = None
    if "micro-batch-size" in names:
        changed |= {"max_tokens": None, **_OF_BUDGET}
    for word in words:
        name, separator, value = word.removeprefix("--").partition("=")
        action = known.get(name.replace("-", "_"))
        if action is None or (action.nargs != 0) != bool(separator):
            raise ConfigError(
                f'--compare must hold settings of a plan such as "lanes=8 window=64MiB", got {word!r}.'
            )
        changed[action.dest] = _value(action, name, value)
    return argparse.Namespace(**changed)


def _value(action: argparse.Action, name: str, text: str) -> Any:
    if action.nargs == 0:
        return True
    try:
        value = action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--compare: {name} {error}.") from None
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"--compare: {name} must be one of {', '.join(action.choices)}, got {text!r}.")
    return value


def _ranks_per_node(arguments: argparse.Namespace) -> int:
    found: int = arguments.ranks_per_node or min(_RANKS_PER_NODE, arguments.world_size)
    return found


def _lanes(text: str) -> int | str:
    return text if text == _AUTO else natural_number(text)


def _window(text: str) -> int:
    try:
        value = parse_byte_size(text)
    except (ConfigError, ValueError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a size of at least 1 byte such as 256MiB, got {text!r}")
    return value
