"""``shardflow bench --with-model``: the two ceilings of a training job, and how far it is from each."""

from __future__ import annotations

import os
import statistics
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pipelines.bench_cache import tier_shares
from pipelines.bench_model_advice import advise_job, short
from pipelines.common import human_bytes, show_facts, show_lines, show_table, step_progress, write_json
from shardflow.configs import load_config
from shardflow.errors import ConfigError
from shardflow.training.config import TrainConfig

if TYPE_CHECKING:
    from shardflow.training.headspace import Headspace, HeadspaceRound

__all__ = ["describe", "run_with_model"]

# What speaks of a dataset alone; a configuration says it in its own words.
_OF_A_DATASET = (
    "split",
    "subset",
    "threads",
    "mib",
    "need",
    "scratch",
    "cache_dir",
    "cache_mib",
    "cache_ram_mib",
)
_NAMES = {"loader": "data alone", "compute": "model alone", "together": "together"}


def run_with_model(arguments: Namespace) -> int:
    """Run the command; the exit code is 0, or an error is raised. Ranks other than 0 say nothing."""
    given = [name for name in _OF_A_DATASET if getattr(arguments, name)]
    if given:
        name = f"--{given[0].replace('_', '-')}"
        raise ConfigError(
            f"{name} must be left out with --with-model, got it; the configuration says what is read, and "
            "--set changes it."
        )
    config = load_config(TrainConfig, arguments.with_model, arguments.overrides)
    _check_dataset(arguments.dataset, config.data.dataset)
    # Torch takes seconds to import; a wrong setting is reported before that.
    from shardflow.training.headspace import HeadspaceOptions, measure_headspace

    options = HeadspaceOptions(num_rounds=arguments.repeats, num_steps=arguments.steps)
    is_first = os.environ.get("RANK", "0") == "0"
    busy = os.getloadavg()[0]
    with step_progress("measuring") if is_first else nullcontext() as progress:
        headspace = measure_headspace(config, options, progress)
    if headspace is None:
        return 0
    facts = describe(headspace, config, busy)
    facts["advice"] = advise_job(facts)
    if arguments.json:
        write_json(facts)
    else:
        _show(facts)
    return 0


def _check_dataset(named: str | None, configured: str) -> None:
    if named is None or named == configured:
        return
    if "://" in named or "://" in configured or os.path.realpath(named) != os.path.realpath(configured):
        raise ConfigError(
            "DATASET must be the configuration's data.dataset, got another one; leave it out, or add --set "
            "data.dataset=DATASET."
        )


def describe(headspace: Headspace, config: TrainConfig, busy: float) -> dict[str, Any]:
    """Turn rounds into rates and shares.

    Args:
        headspace: What was measured.
        config: The job's settings.
        busy: Load of the machine before.
    """
    results: dict[str, dict[str, Any]] = {name: _result(rounds) for name, rounds in headspace.rounds.items()}
    rates = {name: one["steps_per_s"] for name, one in results.items()}
    lower = "loader" if rates["loader"] < rates["compute"] else "compute"
    waited_s = sum(one.data_wait_s for one in headspace.rounds["together"])
    together_s = sum(one.seconds for one in headspace.rounds["together"])
    return {
        "device": headspace.device,
        "ranks": headspace.world_size,
        "precision": config.run.precision,
        "micro_batches_per_step": config.batch.micro_batches_per_step,
        "execution": config.loader.execution,
        "threads": config.loader.num_threads,
        "has_cache": config.cache.is_on,
        "processors": os.cpu_count(),
        "load_before": round(busy, 2),
        "repeats": len(headspace.rounds["together"]),
        "replayed_micro_batches": headspace.num_replayed,
        "replayed_bytes": headspace.replayed_bytes,
        "stages": {name: round(seconds, 6) for name, seconds in headspace.stages.items() if seconds},
        "tiers": tier_shares(headspace.tier_bytes) if config.cache.is_on else {},
        "results": results,
        "lower_ceiling": lower,
        "share_of_lower": round(rates["together"] / rates[lower], 4),
        "share_of_loader": round(rates["together"] / rates["loader"], 4),
        "share_of_compute": round(rates["together"] / rates["compute"], 4),
        "data_wait_share": round(min(1.0, waited_s / together_s), 4),
        "headspace": {
            "with_free_data": round(max(1.0, rates["compute"] / rates["together"]), 4),
            "with_free_compute": round(max(1.0, rates["loader"] / rates["together"]), 4),
        },
    }


def _result(rounds: Sequence[HeadspaceRound]) -> dict[str, Any]:
    step_s = [one.seconds / one.num_steps for one in rounds]
    median = statistics.median(step_s)
    samples = sum(one.num_samples for one in rounds) / sum(one.num_steps for one in rounds)
    return {
        "steps": [one.num_steps for one in rounds],
        "step_seconds": [round(value, 7) for value in step_s],
        "median_step_seconds": round(median, 7),
        "spread": round((max(step_s) - min(step_s)) / median, 4),
        "steps_per_s": 1 / median,
        "steps_per_s_range": [1 / max(step_s), 1 / min(step_s)],
        "samples_per_step": round(samples, 3),
        "samples_per_s": round(samples / median, 3),
    }


def _show(facts: dict[str, Any]) -> None:
    ranks = f"{facts['ranks']} {'rank' if facts['ranks'] == 1 else 'ranks'}"
    held = human_bytes(facts["replayed_bytes"])
    show_facts(
        [
            ("run", f"{ranks} on {facts['device']}, {facts['precision']}, {facts['repeats']} rounds"),
            ("data", f"{facts['threads']} threads, execution {facts['execution']}"),
            ("replayed", f"{facts['replayed_micro_batches']} micro-batches, {held}"),
        ]
    )
    show_table(
        "medians of the rounds",
        ("", "steps/s", "lowest", "highest", "samples/s", "ms a step", "together reaches"),
        [
            (
                _NAMES[name],
                short(one["steps_per_s"]),
                *(short(rate) for rate in one["steps_per_s_range"]),
                short(one["samples_per_s"]),
                f"{one['median_step_seconds'] * 1e3:,.1f}",
                "" if name == "together" else f"{facts[f'share_of_{name}']:.0%}",
            )
            for name, one in facts["results"].items()
        ],
    )
    if tiers := {name: share for name, share in facts["tiers"].items() if share}:
        found = ", ".join(f"{share:.0%} {name}" for name, share in tiers.items())
        show_lines(["", f"Data alone read its bytes from: {found}."])
    show_lines(["", *(f"- {line}" for line in facts["advice"])])
