"""``rex-ray simulate``: the production controller in virtual time to a workload's target, beside the oracle."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.cli.entries import enter_once
from rex_ray.cli.simulated_journal import make_folder, write_journal
from rex_ray.cli.words import duration, network_line, range_text, rows_by_device, shares_text
from rex_ray.cli.worlds import World
from rex_ray.config.plain_yaml import read_value
from rex_ray.control.journal import Header
from rex_ray.control.journalled import library_versions
from rex_ray.control.notes import Decided
from rex_ray.control.replay import controller_for
from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.policies.registry import policy_options
from rex_ray.report.page.tables import format_gain
from rex_ray.sim import Scenario, SimulatedRun, TraceLearner, oracle_run, simulate
from rex_ray.sim.gradients import NoisyGradients

__all__ = ["options_by_policy", "print_simulation", "simulation_document"]

# The reference batch takes the most steps; more means that a method has lost its way.
_PATIENCE = 3
_DELAY_STEPS = 10
_COLUMNS = ("steps", "batch", "step", "RII", "changes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One run, in figures; ``None`` where the target was not reached, and where a figure has no meaning.

    ``num_changes`` counts new shares put in place; ``num_rate_changes`` new factors on the learning rate alone.
    """

    policy: str
    seed: int
    time_to_target_s: float | None
    ratio_to_oracle: float | None
    total_s: float
    num_steps: int
    smallest_batch: int
    largest_batch: int
    median_step_s: float
    rii: float
    num_changes: int | None = None
    num_rate_changes: int | None = None
    decisions: tuple[dict[str, Any], ...] = ()
    journal: str | None = None


def options_by_policy(policies: Sequence[str], entries: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of every policy from ``NAME=VALUE`` entries; each goes to those policies that have it.

    Raises:
        ConfigError: an entry that is none or contradicts another, an unknown policy, or an option that no policy here
            has.
    """
    found: dict[str, dict[str, Any]] = {policy: {} for policy in policies}
    known = {policy: policy_options(policy) for policy in found}
    seen: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not name or not equals:
            raise ConfigError(f"--option {entry!r} is not NAME=VALUE; write for example --option trigger=off")
        try:
            value = read_value(text)
        except ValueError as error:
            raise ConfigError(f"--option {entry!r} has no value that can be read: {error}") from error
        if not text.strip():
            raise ConfigError(f"--option {entry!r} is empty: give it a value, or leave it out")
        enter_once(seen, "--option", name, value, repr)
        takers = [policy for policy, options in known.items() if name in options]
        if not takers:
            every = {option for options in known.values() for option in options}
            raise ConfigError(f"no option {name!r} of {', '.join(found)}{nearest_name_hint(name, every)}")
        for policy in takers:
            found[policy][name] = value
    return found


def simulation_document(
    world: World,
    options: Mapping[str, Mapping[str, Any]],
    *,
    seeds: Sequence[int],
    journal: Path | None = None,
) -> dict[str, Any]:
    """Run every policy on every seed and return what came of it as plain values.

    Args:
        world: what is played.
        options: of every policy, by its name.
        seeds: of noise, episodes, gradient norms and the controller.
        journal: folder for ``POLICY-SEED/rex_ray/journal`` of each run; None writes none.

    Raises:
        ConfigError: a name that there is not, a value that cannot work, or a folder that cannot be written.
    """
    if journal is not None:
        make_folder(journal)
    runs: list[_Run] = []
    controls: list[_Run] = []
    for seed in seeds:
        scenario = world.scenario(seed)
        oracle = _oracle(world, scenario, seed)
        controls.append(oracle)
        if world.disturbance != "none":
            controls.append(_oracle(world, scenario, seed, late_for=oracle))
        for policy, chosen in options.items():
            header = Header(
                seed=seed,
                mode="auto",
                policy=policy,
                policy_options=dict(chosen),
                environment=library_versions() | {"world": f"simulated: {world.workload} on {world.cluster}"},
            )
            runs.append(_play(world, scenario, header, oracle.total_s, journal))
    return {
        "world": asdict(world) | {"global_batch_size": world.reference_batch_size, "target": world.learning.target},
        "seeds": list(seeds),
        "runs": [asdict(run) for run in runs],
        "controls": [asdict(run) for run in controls],
    }


def print_simulation(found: Mapping[str, Any], console: Console, *, decisions: bool = False) -> None:
    """Print what ``simulation_document`` returned: one row per policy, medians over seeds."""
    world = found["world"]
    console.print(
        f"{world['workload']} on {world['cluster']} in virtual time, to {world['target']}; reference batch "
        f"{world['global_batch_size']} rows, {_seeds_text(found['seeds'])}",
        soft_wrap=True,
        highlight=False,
    )
    several = len(found["seeds"]) > 1
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("who", "to target", "ratio", *(["range"] if several else []), *_COLUMNS):
        table.add_column(name, no_wrap=True)
    by_name: dict[str, list[dict[str, Any]]] = {}
    for run in (*found["runs"], *found["controls"]):
        by_name.setdefault(run["policy"], []).append(run)
    for name, runs in by_name.items():
        table.add_row(name, *_cells(runs))
    console.print(table)
    if several:
        console.print("[dim]medians over seeds; range: the smallest and the largest ratio[/]", soft_wrap=True)
    console.print(
        "[dim]ratio: to the oracle's time, who knows every curve, slowdown and noise scale[/]", soft_wrap=True
    )
    console.print(
        "[dim]RII: the part of the cluster's peak rate that goes unused; changes: of shares, not those of the "
        "learning rate alone[/]",
        soft_wrap=True,
    )
    for line in _assumptions(world):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)
    for run in found["runs"]:
        if run["journal"]:
            console.print(f"journal: {escape(run['journal'])}", soft_wrap=True, highlight=False)
    if decisions:
        for name, runs in by_name.items():
            if runs[0]["num_changes"] is not None:
                _print_decisions(name, runs[0], world["global_batch_size"], console)


def _play(world: World, scenario: Scenario, header: Header, oracle_s: float, journal: Path | None) -> _Run:
    learner = TraceLearner(
        learning=world.learning,
        reference_batch_size=world.reference_batch_size,
        gradients=NoisyGradients(seed=header.seed),
    )
    run = simulate(controller_for(header), scenario, num_steps=_PATIENCE * world.num_steps, learner=learner)
    num_rows = sum(int(step.num_rows.sum()) for step in run.steps)
    batches = [allocation.global_batch_size for _, allocation in run.allocations]
    changes = sum(old.local_batch_sizes != new.local_batch_sizes for (_, old), (_, new) in pairwise(run.allocations))
    tta_s = run.total_s if learner.is_done else None
    folder = None
    if journal is not None:
        folder = str(write_journal(journal / f"{header.policy}-{header.seed}", header, run.events).parents[1])
    return _Run(
        policy=header.policy,
        seed=header.seed,
        time_to_target_s=tta_s,
        ratio_to_oracle=None if tta_s is None else tta_s / oracle_s,
        total_s=run.total_s,
        num_steps=len(run.steps),
        smallest_batch=min(batches),
        largest_batch=max(batches),
        median_step_s=float(np.median(run.step_s)),
        rii=_rii(scenario, num_rows, run.total_s),
        num_changes=changes,
        num_rate_changes=len(run.allocations) - 1 - changes,
        decisions=_decisions(world.devices, run),
        journal=folder,
    )


def _oracle(world: World, scenario: Scenario, seed: int, late_for: _Run | None = None) -> _Run:
    """Play the oracle, or the one that hears late of what ``late_for`` knew at once."""
    run = oracle_run(
        scenario.timelines,
        scenario.network,
        world.learning,
        world.reference_batch_size,
        delay_steps=0 if late_for is None else _DELAY_STEPS,
        dataset_size=scenario.problem.dataset_size,
        local_batch_multiple=scenario.problem.local_batch_multiple,
    )
    return _Run(
        policy="oracle" if late_for is None else "oracle_delayed",
        seed=seed,
        time_to_target_s=run.total_s,
        ratio_to_oracle=1.0 if late_for is None else run.total_s / late_for.total_s,
        total_s=run.total_s,
        num_steps=len(run.step_s),
        smallest_batch=int(run.global_batch_size.min()),
        largest_batch=int(run.global_batch_size.max()),
        median_step_s=float(np.median(run.step_s)),
        rii=_rii(scenario, int(run.global_batch_size.sum()), run.total_s),
    )


def _rii(scenario: Scenario, num_rows: int, total_s: float) -> float:
    """Return the part of what all devices could do at their best sizes that was not done."""
    peak = sum(line.profile.peak_rows_per_s for line in scenario.timelines)
    return 1.0 - num_rows / (total_s * peak)


def _decisions(devices: Sequence[str], run: SimulatedRun) -> tuple[dict[str, Any], ...]:
    said = [note for note in run.notes if isinstance(note, Decided) and note.kind != "first"]
    return tuple(
        {
            "step": note.step,
            "kind": note.kind,
            "local_batch_sizes": None if note.proposal is None else list(note.proposal.local_batch_sizes),
            "rows_by_device": None
            if note.proposal is None
            else rows_by_device(devices, note.proposal.local_batch_sizes),
            "lr_factor": None if note.proposal is None else note.proposal.lr_factor,
            "predicted_gain": note.predicted_gain,
            "reason": note.reason,
        }
        for note in said
    )


def _cells(runs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    times = [run["time_to_target_s"] for run in runs if run["time_to_target_s"] is not None]
    ratios = [run["ratio_to_oracle"] for run in runs if run["ratio_to_oracle"] is not None]
    missed = len(runs) - len(times)
    reached = (
        [duration(statistics.median(times)), f"{statistics.median(ratios):.3f}"] if not missed else ["not reached", ""]
    )
    if len(runs) > 1:
        reached.append(f"{missed} of {len(runs)} missed" if missed else f"{min(ratios):.2f}-{max(ratios):.2f}")
    changes = [run["num_changes"] for run in runs]
    return (
        *reached,
        f"{statistics.median(run['num_steps'] for run in runs):,.0f}",
        range_text(min(run["smallest_batch"] for run in runs), max(run["largest_batch"] for run in runs), "-"),
        f"{1000 * statistics.median(run['median_step_s'] for run in runs):.0f} ms",
        f"{statistics.median(run['rii'] for run in runs):.2f}",
        "" if None in changes else f"{statistics.median(changes):.0f}",
    )


def _print_decisions(name: str, run: Mapping[str, Any], first_batch: int, console: Console) -> None:
    if not run["decisions"]:
        console.print(f"{name}, seed {run['seed']}: no decisions")
        return
    console.print(f"{name}, seed {run['seed']}: decisions in order")
    batch = first_batch
    for decision in run["decisions"]:
        shares, gain = decision["rows_by_device"], decision["predicted_gain"]
        what = [decision["kind"].replace("_", " ")]
        if decision["kind"] == "change_global_batch":
            before, batch = batch, sum(decision["local_batch_sizes"])
            what = ["change learning rate"] if batch == before else what
        what += [] if shares is None else [shares_text(shares)]
        what += [] if gain is None else [f"predicted {format_gain(gain)}"]
        console.print(
            f"  step {decision['step']}: {'; '.join(what)}\n    [dim]{escape(decision['reason'])}[/]",
            soft_wrap=True,
            highlight=False,
        )


def _seeds_text(seeds: Sequence[int]) -> str:
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def _assumptions(world: Mapping[str, Any]) -> list[str]:
    disturbed = f"noise {world['noise']}, disturbance {world['disturbance']}; {network_line(world['network'])}"
    played = (
        "step times and noise scales are public measurements, progress follows from them; a search finds no helper "
        "here, so the exact split stands; shares take effect 10 steps after a decision"
    )
    late = [] if world["disturbance"] == "none" else ["oracle_delayed learns of every slowdown 10 steps late"]
    return [disturbed, played, *late]
