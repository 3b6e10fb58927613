"""``rex-ray audit``: how often the trigger is wrong on a run's own times, and whether its alarms meant anything."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rex_ray.cli.learnt import learnt_book
from rex_ray.control.journal import Journal
from rex_ray.control.notes import Decided
from rex_ray.core.errors import ConfigError
from rex_ray.core.rates import poisson_interval
from rex_ray.policies.bsp import NoTrigger
from rex_ray.policies.registry import make_policy
from rex_ray.policies.seams import Trigger
from rex_ray.report.reading.load import find_journal, load_journal, run_name
from rex_ray.sim.audit import LASTING, MIN_STEPS, Alarms, Audit, OwnTimes, audit, own_times

__all__ = ["audit_document", "print_audit"]

_FEWEST_COPIES, _MOST_COPIES, _STEPS_IN_ALL = 39, 199, 200_000
_FEWEST_BLOCKS = 4
_LEVEL = 0.05
_PER = 10_000


def audit_document(run: Path, *, num_copies: int | None, block_steps: int, seed: int) -> dict[str, Any]:
    """Audit a run and return what came of it as plain values.

    Args:
        run: see ``report.load.find_journal``.
        num_copies: permuted copies; None: as many as some seconds allow, 39 at least.
        block_steps: steps that stay together.
        seed: of the permutations.

    Raises:
        ConfigError: no journal, one too short to say anything, or blocks too long for it.
    """
    journal = load_journal(run)
    name = run_name(find_journal(run))
    trigger, whose = _trigger(journal)
    groups = own_times(journal.events, learnt_book(journal))
    _check(name, groups, block_steps)
    total = sum(len(group.factors) for group in groups)
    copies = num_copies or min(max(_STEPS_IN_ALL // total, _FEWEST_COPIES), _MOST_COPIES)
    found = audit(trigger, groups, block_steps=block_steps, num_copies=copies, seed=seed)
    assert found is not None  # the check left a group that is long enough
    return {
        "run": name,
        "policy": journal.header.policy,
        "trigger": whose,
        "num_workers": max(len(group.devices) for group in groups),
        "num_steps": found.num_steps,
        "num_worker_steps": found.num_worker_steps,
        "noise_sd": found.spread,
        "noise_correlation": found.correlation,
        "block_steps": block_steps,
        "num_copies": copies,
        "seed": seed,
        "resplits_in_the_run": _resplits(journal),
        "measured": _counts(found.measured, found.num_worker_steps),
        "permuted": _counts(found.false, copies * found.num_worker_steps),
        "noise_alone": _counts(sum(found.alone, Alarms()), copies * found.num_worker_steps),
        "alarms_per_copy": [copy.num_alarms for copy in found.copies],
        "p_value": found.p_value,
        "is_more_than_noise": _is_more(found),
        "verdict": _verdict(found),
    }


def print_audit(found: Mapping[str, Any], console: Console) -> None:
    """Print what ``audit_document`` returned."""
    console.print(
        f"{escape(found['run'])}: {found['policy']}, {found['num_steps']:,} clean steps of {found['num_workers']} "
        f"workers; noise of {100 * found['noise_sd']:.1f} %, correlation {found['noise_correlation']:.2f} from step "
        "to step",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("order of the steps", "alarms", "re-splits", "per 10k worker-steps", "95 % bounds", box=None)
    for name, row in (
        ("as measured", found["measured"]),
        (f"{found['num_copies']} permuted copies", found["permuted"]),
        (f"{found['num_copies']} of noise alone", found["noise_alone"]),
    ):
        table.add_row(
            name,
            f"{row['num_alarms']:,}",
            f"{row['num_resplits']:,}",
            f"{row['alarms_per_10k']:.2f}",
            f"{row['alarms_per_10k_low']:.2f} to {row['alarms_per_10k_high']:.2f}",
        )
    console.print(table)
    console.print(escape(found["verdict"]), soft_wrap=True, highlight=False)
    for line in _assumptions(found):
        console.print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def _trigger(journal: Journal) -> tuple[Trigger[Any], str]:
    """Return the run's trigger, else that of ``rex`` with its defaults, and whose it is in words."""
    policy: Any = make_policy(journal.header.policy, journal.header.policy_options)
    while hasattr(policy, "inner"):
        policy = policy.inner
    own = getattr(policy, "trigger", None)
    if own is not None and not isinstance(own, NoTrigger):
        return own, "the run's own, with its options"
    policy = make_policy("rex")
    while hasattr(policy, "inner"):
        policy = policy.inner
    return policy.trigger, "that of rex with its defaults: the run had none"


def _check(name: str, groups: tuple[OwnTimes, ...], block_steps: int) -> None:
    longest = max((len(group.factors) for group in groups), default=0)
    if longest < MIN_STEPS:
        raise ConfigError(
            f"{name} is too short to audit: {longest} clean steps in its longest worker group, and the trigger's "
            f"windows need {MIN_STEPS} before they say anything; audit a longer run"
        )
    if longest < _FEWEST_BLOCKS * block_steps:
        raise ConfigError(
            f"--block {block_steps} leaves fewer than {_FEWEST_BLOCKS} blocks of the {longest} clean steps of {name}: "
            f"use at most {longest // _FEWEST_BLOCKS}"
        )


def _counts(alarms: Alarms, num_worker_steps: int) -> dict[str, float]:
    exposure = num_worker_steps / _PER
    low, high = poisson_interval(alarms.num_alarms, exposure)
    return {
        "num_alarms": alarms.num_alarms,
        "num_resplits": alarms.num_resplits,
        "alarms_per_10k": alarms.num_alarms / exposure,
        "alarms_per_10k_low": low,
        "alarms_per_10k_high": high,
        "resplits_per_10k": alarms.num_resplits / exposure,
    }


def _resplits(journal: Journal) -> int:
    """Return how often the run itself moved rows on its trigger's word; only its decisions bear these figures."""
    said = (note for note in journal.notes if isinstance(note, Decided))
    return sum(note.kind == "reallocate" and "num_lasting" in note.evidence for note in said)


def _is_more(found: Audit) -> bool:
    return found.measured.num_alarms > 0 and found.p_value <= _LEVEL


def _verdict(found: Audit) -> str:
    measured, mean = found.measured.num_alarms, found.false.num_alarms / len(found.copies)
    alone = sum(found.alone, Alarms()).num_alarms / len(found.alone)
    if measured == 0 and mean == 0:
        return "Quiet: no alarm in the order that was measured, and none in any copy."
    if measured == 0:
        return f"No alarm in the order that was measured; its copies raise {mean:.1f} on average, all of them false."
    if _is_more(found):
        return (
            f"The order that was measured raises {measured} alarms, its copies {mean:.1f} on average, noise alone "
            f"{alone:.1f} (p = {found.p_value:.3f}): there were changes of speed that lasted."
        )
    how = "no more" if measured <= max(mean, alone) else "not clearly more"
    return (
        f"The order that was measured raises {measured} alarms, {how} than its copies do or noise alone ({mean:.1f} "
        f"and {alone:.1f} on average, p = {found.p_value:.3f}): nothing here says that these alarms were about changes "
        "of speed that last. A higher "
        "trigger_min_factor or trigger_num_sds makes the trigger slower to believe."
    )


def _assumptions(found: Mapping[str, Any]) -> tuple[str, ...]:
    whose = f"trigger: {found['trigger']}; the run itself moved rows on its word {found['resplits_in_the_run']} times"
    copies = (
        f"copies: blocks of {found['block_steps']} steps in another order, workers of a kind dealt anew in each; "
        f"changes of speed that lasted {LASTING} steps or more divided out, shorter ones are left in and count as false"
    )
    times = (
        "times relative to the run's own step-time curves at the rows of each step; flagged steps left out; the bounds "
        "take copies as independent"
    )
    noise = (
        "noise alone: drawn at the run's own strength and memory, workers independent of one another; p is the larger "
        "of the two chances of as many alarms"
    )
    return whose, copies, noise, times
