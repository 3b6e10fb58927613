"""The command line of ``python -m experiments.chaos``: seeds over processes, and what is left of a broken law."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from experiments._harness import Findings, Row, Settings, main, parsed_apart
from experiments.chaos.mishaps import FAULTS
from experiments.chaos.seeds import run_all, shrunk
from experiments.chaos.world import Outcome
from workloads.arguments import Parser, whole

__all__ = ["command", "measure"]

_EVENTS, _SEEDS = 1_000_000, 100
_QUICK_EVENTS, _QUICK_SEEDS = 50_000, 10


def measure(
    settings: Settings, *, num_events: int | None, num_seeds: int | None, without: frozenset[str] = frozenset()
) -> Findings:
    """Have the control plane go through random faults, seed by seed, and count the invariants that break."""
    num_events = num_events or (_QUICK_EVENTS if settings.quick else _EVENTS)
    num_seeds = num_seeds or (_QUICK_SEEDS if settings.quick else _SEEDS)
    per_seed = max(1, num_events // num_seeds)
    seeds = range(settings.seed, settings.seed + num_seeds)
    outcomes = run_all(seeds, per_seed, without, min(os.cpu_count() or 1, num_seeds))
    broken = [outcome for outcome in outcomes if outcome.broken is not None]
    for outcome in broken[:3]:
        _tell(outcome, per_seed, without)
    struck = sum((Counter(outcome.struck) for outcome in outcomes), Counter())
    faults: list[Row] = [{"fault": fault, "times": struck[fault]} for fault in FAULTS]
    return Findings(
        figures={
            "events": sum(outcome.num_events for outcome in outcomes),
            "seeds": len(outcomes),
            "invariants_broken": len(broken),
            "checks": sum(outcome.num_checks for outcome in outcomes),
            "journalled_events": sum(outcome.num_journalled for outcome in outcomes),
            "restarts_of_the_control_actor": sum(outcome.num_restarts for outcome in outcomes),
            "worker_groups": sum(outcome.num_groups for outcome in outcomes),
            "steps": sum(outcome.num_steps for outcome in outcomes),
            "faults": struck.total(),
            "most_state_bytes": max(outcome.most_state_bytes for outcome in outcomes),
            "most_journal_bytes_an_event": max(outcome.bytes_an_event for outcome in outcomes),
        },
        tables={"faults": faults},
        settings={"events_a_seed": per_seed},
    )


def _tell(outcome: Outcome, num_events: int, without: frozenset[str]) -> None:
    least, left_out = shrunk(outcome, num_events, without)
    say = partial(print, file=sys.stderr)
    say(f"seed {outcome.seed} broke an invariant after {outcome.num_events} events: {outcome.broken}")
    command = f"python -m experiments.chaos --events {num_events} --seeds 1 --seed {outcome.seed} --json FILE"
    say(f"  again: {command}{_option(without)}")
    kept = [fault for fault in FAULTS if fault not in left_out]
    say(f"  with no other faults than {', '.join(kept) or 'none'} it is {least.broken}:")
    say(f"  {command}{_option(left_out)}")
    for line in least.trace:
        say(f"    {line}")


def _option(without: frozenset[str]) -> str:
    return f" --without '{','.join(sorted(without))}'" if without else ""


def _parser() -> Parser:
    parser = Parser(add_help=False, allow_abbrev=False)  # --seed is no short --seeds
    parser.add_argument("--events", type=whole(1), help=f"events over all seeds (default: {_EVENTS:,})")
    parser.add_argument("--seeds", type=whole(1), help=f"how many seeds, from --seed on (default: {_SEEDS})")
    parser.add_argument("--without", default="", help="kinds of fault to leave out, separated by commas")
    return parser


def command(argv: Sequence[str] | None = None) -> None:
    """Parse the options of this experiment, and hand the rest on."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    own, _ = parsed_apart(parser, arguments)
    without = frozenset(fault for fault in own.without.split(",") if fault)
    if unknown := without.difference(FAULTS):
        parser.error(f"--without: unknown faults {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")

    def chaos(settings: Settings) -> Findings:
        """Have the control plane go through random faults, seed by seed, and count the invariants that break."""
        return measure(settings, num_events=own.events, num_seeds=own.seeds, without=without)

    main("chaos", chaos, arguments, apart=[parser])


if __name__ == "__main__":
    command()
