"""``shardflow plan``: the micro-batches of an epoch, and the rank that runs each of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardflow.cli.common import (
    CommandParser,
    add_json,
    add_unit,
    add_where,
    named_fields,
    natural_number,
    open_dataset,
    positive_number,
    show_lines,
    show_table,
    write_json,
)
from shardflow.cli.plan_tables import (
    class_numbers,
    component_numbers,
    fields_report,
    show_components,
    show_fields_report,
    title_of,
)
from shardflow.config import parse_byte_size
from shardflow.errors import ConfigError
from shardflow.logs import human_bytes

if TYPE_CHECKING:
    from shardflow.fields.registry import FieldSet
    from shardflow.loading.rows.selection import Selection
    from shardflow.sampling import BatchSpec, EpochPlan, PlanMeasures, PlanSummary, RankSchedule
    from shardflow.sampling.measures import BlendMix

DESCRIPTION = """\
Plans one epoch of a split, a part of it (--where), or a blend of datasets (--blend). The samples of a step
depend on dataset, seed, epoch and batch spec only, never on the world size. A micro-batch has a fixed size
(--micro-batch-size), or is filled to a budget of tokens that are estimated from the bytes of the reports
(--max-tokens).

With --fields, what the fields of a file deliver of the split, from tables alone: samples without content, and
for each role the images that a field delivers and leaves out; then the share of all stored images that some
field delivers, and the roles of the rest. With the options of steps it plans those of a loader with these
fields: --max-tokens then charges for what they deliver, as CostRule(counts_delivered=True) does, and
--image-tokens-per-slice is what a picture, tile or region costs. --transform adds the time that a transform
takes for a sample, and the share of it for which it holds the GIL: where that is large, more threads help
little, and loader.execution = "workers" does.

With --json, one line a micro-batch: step, rank, micro (its number within the step; from M on it is a
padding micro-batch without samples), keys and weights, and of a blend components, from 0. A padding slot has
key null and weight 0; a repeated sample weighs 1. What fields deliver is one line, and only without steps.
"""
EXAMPLES = """\
examples:
  shardflow plan my-dataset --split train --seed 7 --epoch 0 \\
      --micro-batch-size 2 --micro-batches-per-step 4 --world-size 2
  shardflow plan my-dataset --split train --seed 7 --epoch 0 --max-tokens 4096 \\
      --micro-batches-per-step 4 --world-size 2 --summary --compare "lanes=2"
  shardflow plan my-dataset --split train --fields my-fields.toml
  shardflow plan my-dataset --split train --fields my-fields.toml --seed 7 --epoch 0 --max-tokens 4096 \\
      --image-tokens-per-slice 16 --micro-batches-per-step 4 --world-size 2 --summary
"""
# Repeated here so that --help needs no NumPy; a test compares them with those of sampling.
OVER_BUDGET: Final = ("alone", "skip", "truncate")
TAILS: Final = ("drop", "repeat", "mask")
MISSING_CLASSES: Final = ("error", "drop", "own")
_OF_SAMPLING: Final = ("weights", "balance", "missing_class", "epoch_samples", "limit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``shardflow plan``."""
    parser.add_argument(
        "dataset", metavar="DATASET", nargs="?", help="folder or file:// address of a packed dataset"
    )
    number, count = natural_number, positive_number
    add = parser.add_argument
    add("--blend", metavar="FILE", help="plan a blend file instead of a dataset and its split")
    add("--view", metavar="NAME", help="plan an entity view of the dataset (full_study: its studies)")
    add("--split", metavar="S", help="split to plan, such as train, or several: train+val")
    add_where(parser)
    add("--weights", metavar="COLUMN", help="draw samples by these weights, such as quality.weight")
    add("--balance", metavar="COLUMN", help="draw each class of this column equally often")
    add(
        "--missing-class",
        choices=MISSING_CLASSES,
        help="with --balance: samples without a class are refused, left out, or a class of their own (error)",
    )
    add("--epoch-samples", type=count, metavar="N", help="draws of an epoch (as many as samples)")
    add("--limit", type=count, metavar="N", help="only the N samples whose keys come first")
    add(
        "--fields",
        metavar="FILE",
        help="count, and charge for, what the fields of this TOML file deliver; default: those of a loader",
    )
    add_unit(parser)
    add(
        "--transform",
        metavar="MODULE:FUNCTION",
        help="with --fields: time this transform on some samples, and measure how long it holds the GIL",
    )
    add("--seed", type=number, metavar="N", help="run-level seed")
    add("--epoch", type=number, metavar="E", help="epoch, counted from 0")
    add_batch_arguments(parser)
    add("--world-size", type=count, metavar="W", help="data-parallel ranks, at most M")
    add("--ranks-per-node", type=count, metavar="R", help="ranks of a node (8, or all of fewer)")
    add("--from-step", type=number, default=0, metavar="K", help="first step of the lines (0)")
    add("--steps", type=number, metavar="N", help="number of steps of the lines (all that follow)")
    add("--summary", action="store_true", help="what the plan does to ranks, nodes and caches, in numbers")
    add(
        "--compare",
        metavar="SETTINGS",
        help='with --summary: other settings beside these, such as "lanes=8 window=64MiB world-size=56"',
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised."""
    forms_steps = _check_options(arguments)
    whole = selection = _selection(arguments)
    fields, report = None, None
    if arguments.fields is not None:
        from shardflow.loading.binding import bind_fields
        from shardflow.loading.rows.windows import select_parts
        from shardflow.telemetry import StageCounters

        named = named_fields(arguments.fields)
        whole = select_parts(whole, named)
        selection, fields = bind_fields(whole, named, StageCounters())
        if not (forms_steps and arguments.json):
            report = fields_report(whole, selection, fields, arguments.transform)
    if not forms_steps:
        if arguments.json:
            write_json(report)
        elif report is not None:
            show_fields_report(whole, report)
        return 0
    selection = _sampled(selection, arguments)
    if arguments.summary:
        numbers = measured(selection, fields, arguments)
        if report is not None:
            show_fields_report(whole, report)
        show_summary(selection, numbers, arguments)
        return 0
    plan, schedule, selection = planned(selection, fields, arguments)
    steps = _steps(plan.num_steps, arguments.from_step, arguments.steps)
    if arguments.json:
        num_crops = 1 if fields is None else fields.num_crops
        for line in micro_batches(selection, plan, schedule, steps, num_crops):
            write_json(line)
        return 0
    if report is not None:
        show_fields_report(whole, report)
    show_lines([title_of(selection), *plan.summary(schedule).lines()])
    show_components(selection, arguments.epoch)
    return 0


_OF_STEPS: Final = ("seed", "epoch", "micro_batches_per_step", "world_size")
_ASKS_FOR_STEPS: Final = (
    *_OF_STEPS,
    "micro_batch_size",
    "max_tokens",
    "lanes",
    "window",
    "ranks_per_node",
    "steps",
    "summary",
    "compare",
)


def _check_options(arguments: argparse.Namespace) -> bool:
    """Return whether steps are requested; --fields alone requests none.

    Raises:
        ConfigError: An option is missing, or two do not go together.
    """
    if arguments.compare and not arguments.summary:
        raise ConfigError("--compare must come with --summary, got it alone; add --summary.")
    values = {name: getattr(arguments, name) for name in _ASKS_FOR_STEPS}
    given = [_option(name) for name, value in values.items() if value is not None and value is not False]
    missing = [_option(name) for name in _OF_STEPS if getattr(arguments, name) is None]
    if arguments.transform is not None and arguments.fields is None:
        raise ConfigError("--transform changes samples made of fields; add --fields FILE.")
    if arguments.fields is not None:
        _check_charged(arguments)
        if not given:
            return False
        if arguments.transform is not None:
            raise ConfigError(f"--transform is timed without steps, got {given[0]} too; leave one out.")
    if missing:
        instead = "--fields FILE to count what fields deliver"
        if arguments.fields is not None:
            instead = f"leave out {given[0]} to count what the fields deliver and form no steps"
        raise ConfigError(
            f"the following arguments are required: {', '.join(missing)}; or {instead}; see: shardflow plan "
            "--help"
        )
    return True


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_charged(arguments: argparse.Namespace) -> None:
    """Refuse to charge for stored slices if fields define what is delivered.

    Raises:
        ConfigError: ``--max-slices`` is given.
    """
    if arguments.max_slices:
        raise ConfigError(
            "--max-slices charges for stored slices, but --fields charges for delivered content; leave out "
            "--max-slices, and set --image-tokens-per-slice for each picture, tile or region delivered."
        )


def _selection(arguments: argparse.Namespace) -> Selection:
    """Open the samples to plan.

    Raises:
        ConfigError: Neither or both of a dataset and a blend are given, or there is no such split.
    """
    from shardflow.loading.rows.blend_file import open_blend
    from shardflow.loading.rows.selection import FULL_STUDY, open_view
    from shardflow.loading.rows.windows import select_samples

    named = {"DATASET": arguments.dataset, "--split": arguments.split}
    if arguments.blend is not None:
        alone = {
            **named,
            "--view": arguments.view,
            "--unit": arguments.unit,
            "--where": arguments.where,
            "--keys": arguments.keys,
            **{_option(name): getattr(arguments, name) for name in _OF_SAMPLING},
        }
        for name, value in alone.items():
            if value is not None:
                raise ConfigError(
                    f"{name} must be left out with --blend, got {value!r}; put it into the blend file."
                )
        return open_blend(arguments.blend)
    for name, value in named.items():
        if value is None:
            raise ConfigError(f"{name} must be given, got none; name one, or a blend file with --blend.")
    if arguments.dataset.endswith(".toml"):
        raise ConfigError("DATASET must be a folder, got a .toml file; name a blend file with --blend.")
    dataset = open_view(open_dataset(arguments.dataset), arguments.view or FULL_STUDY)
    if not set(arguments.split.split("+")) <= set(dataset.samples.splits):
        known = ", ".join(sorted(dataset.samples.splits))
        raise ConfigError(f"--split must be one of {known}, got {arguments.split!r}.")
    return select_samples(
        dataset,
        arguments.split,
        unit=arguments.unit or "study",
        where=arguments.where,
        keys=arguments.keys,
        fields=None if arguments.fields is None else named_fields(arguments.fields),
    )


def _sampled(selection: Selection, arguments: argparse.Namespace) -> Selection:
    """Return the samples, weighted as the options require."""
    from shardflow.loading.rows.weighting import sampled
    from shardflow.sampling import Sampling

    given = {name: getattr(arguments, name) for name in _OF_SAMPLING}
    return sampled(selection, Sampling(**{name: one for name, one in given.items() if one is not None}))


def micro_batches(
    selection: Selection, plan: EpochPlan, schedule: RankSchedule, steps: range, num_crops: int
) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of some steps: by step, then in canonical order, padding micro-batches last.

    A sample fills ``num_crops`` neighboring slots.
    """
    for step in steps:
        for slot in range(schedule.num_micro_batches_per_rank):
            for rank in range(schedule.world_size):
                micro = schedule.micro(rank, slot)
                batch = plan.micro_batch(step, micro)
                slots = batch.rows.repeat(num_crops)
                rows = slots[slots >= 0]
                found = iter(selection.keys(rows))
                line = {
                    "step": step,
                    "rank": rank,
                    "micro": micro,
                    "keys": [next(found) if row >= 0 else None for row in slots.tolist()],
                    "weights": batch.weights.repeat(num_crops).tolist(),
                }
                if selection.is_blend:
                    components = iter(selection.components_of(rows).tolist())
                    line["components"] = [next(components) if row >= 0 else -1 for row in slots.tolist()]
                yield line


def _steps(num_steps: int, first: int, count: int | None) -> range:
    """Return the steps to show.

    Raises:
        ConfigError: The first step is past the end of the epoch.
    """
    if first > num_steps:
        raise ConfigError(f"--from-step must be at most {num_steps}, the steps of the epoch, got {first}.")
    return range(first, num_steps if count is None else min(num_steps, first + count))


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
"""Options that say how tokens count towards --max-tokens, and their defaults."""
_RANKS_PER_NODE = 8


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a batch spec."""
    number, count = natural_number, positive_number
    add = parser.add_argument
    add("--micro-batch-size", type=count, metavar="B", help="samples in a micro-batch; or --max-tokens")
    add("--micro-batches-per-step", type=count, metavar="M", help="micro-batches in a step")
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


def planned(
    selection: Selection, fields: FieldSet | None, arguments: argparse.Namespace
) -> tuple[EpochPlan, RankSchedule, Selection]:
    """Plan the epoch that the options describe, and assign it to ranks.

    Args:
        selection: The samples.
        fields: Fields that a token budget charges for; None charges for what is stored.
        arguments: The options.

    Returns:
        The plan, its ranks, and the samples with the sizes that are delivered.
    """
    from shardflow.loading.binding import batch_of_samples, charge_for_delivered
    from shardflow.sampling import RankSchedule

    lanes = arguments.lanes
    if lanes is None and (arguments.max_tokens is not None or arguments.window is not None):
        lanes = _AUTO
    spec = _spec(arguments, lanes=1 if lanes == _AUTO else int(lanes or 0))
    if fields is not None:
        selection, spec = charge_for_delivered(selection, fields, spec)
        spec = batch_of_samples(spec, fields.num_crops)
    plan = selection.plan(spec, seed=arguments.seed, epoch=arguments.epoch, auto_lanes=lanes == _AUTO)
    # Without --ranks-per-node, lines are dealt to ranks in turn; the summary always has nodes.
    ranks_per_node = arguments.ranks_per_node or (_ranks_per_node(arguments) if arguments.summary else 0)
    schedule = RankSchedule(
        spec.micro_batches_per_step,
        arguments.world_size,
        lanes=plan.spec.lanes,
        ranks_per_node=ranks_per_node,
    )
    return plan, schedule, selection


_Numbers = tuple["PlanSummary", "PlanMeasures", "BatchSpec", "BlendMix | None"]


def measured(
    selection: Selection, fields: FieldSet | None, arguments: argparse.Namespace
) -> dict[str, _Numbers]:
    """Return the numbers of a plan, and of the plan to compare it with, if any."""
    from shardflow.sampling import measure_plan
    from shardflow.sampling.measures import measure_mix

    settings = {"this": arguments}
    if arguments.compare:
        settings["other"] = _changed(arguments)
    numbers: dict[str, _Numbers] = {}
    for name, chosen in settings.items():
        plan, schedule, charged = planned(selection, fields, chosen)
        layout = charged.layout(plan.spec)
        measures = measure_plan(plan, layout, schedule, ranks_per_node=_ranks_per_node(chosen))
        numbers[name] = plan.summary(schedule), measures, plan.spec, measure_mix(plan)
    return numbers


def show_summary(
    selection: Selection, numbers: Mapping[str, _Numbers], arguments: argparse.Namespace
) -> None:
    """Show the numbers of one plan, or of two side by side."""
    if arguments.json:
        for name, (summary, measures, spec, mix) in numbers.items():
            line: dict[str, Any] = {
                "settings": name,
                "plan": summary.to_json(),
                "measured": measures.to_json(),
                "text_tokens": _text_tokens(spec),
            }
            if classes := class_numbers(selection, arguments.epoch):
                line["classes"] = classes
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
    """Return the source of the text's token counts; None if no budget uses them."""
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
        "pooled": "-" if lanes is None else _percent(lanes.remainder_share),
        "shards": f"{found.num_shards:,}",
        "shards open": f"{found.num_shards if lanes is None else lanes.num_shards_open:,}",
        "shards a node reads": "-" if found.shards_per_node is None else f"{found.shards_per_node:,.1f}",
        "bytes a node reads": human_bytes(round(found.bytes_per_node)),
        "shuffle, 1 is full": _ratio(found.neighbor_spread),
        **mixed,
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _spec(arguments: argparse.Namespace, *, lanes: int) -> BatchSpec:
    from shardflow.sampling import BatchSpec, CostRule, TokenBudget
    from shardflow.sampling.spec import DEFAULT_WINDOW_BYTES
    from shardflow.training.tokenizing import tokenizer_digest

    if (arguments.micro_batch_size is None) == (arguments.max_tokens is None):
        found = "neither" if arguments.max_tokens is None else "both"
        raise ConfigError(f"one of --micro-batch-size and --max-tokens must be given, got {found}.")
    budget = None
    if arguments.max_tokens is None:
        for name, default in _OF_BUDGET.items():
            if getattr(arguments, name) != default:
                raise ConfigError(
                    f"{_option(name)} must come with --max-tokens, got it without; leave it out."
                )
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
                counts_delivered=arguments.fields is not None,
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
    """Return the options with those of ``--compare`` applied."""
    parser = CommandParser(add_help=False, allow_abbrev=False)
    add_batch_arguments(parser)
    parser.add_argument("--world-size", type=positive_number)
    parser.add_argument("--ranks-per-node", type=positive_number)
    for action in parser._actions:
        action.required = False
    settings = [f"--{word.removeprefix('--')}" for word in arguments.compare.replace(",", " ").split()]
    names = {setting.partition("=")[0] for setting in settings}
    changed = vars(arguments).copy()
    # A budget and a size take each other's place.
    if "--max-tokens" in names:
        changed["micro_batch_size"] = None
    if "--micro-batch-size" in names:
        changed |= {"max_tokens": None, **_OF_BUDGET}
    try:
        found = parser.parse_args(settings, argparse.Namespace(**changed))
    except ConfigError as error:
        problem = error.message.partition("; see: ")[0]
        raise ConfigError(
            f'--compare takes settings of a plan such as "lanes=8 window=64MiB": {problem}.'
        ) from None
    if found.fields is not None:
        _check_charged(found)
    return found


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
