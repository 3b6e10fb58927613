"""From what a policy proposes to what the group is told: between them stand the mode, a running switch, and sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, assert_never, cast

import numpy as np

from rex_ray.control.commands import ApplyAllocation, CancelSearch, RequestWorldSize, StartSearch, TellTrial
from rex_ray.control.notes import Decided, Deferred, Found, Refused
from rex_ray.control.outcome import Outcome, Rules
from rex_ray.control.phases import ControllerState, Group, Publication, Running, Switching
from rex_ray.core.changed import changed
from rex_ray.core.observations import Observation
from rex_ray.core.types import Allocation, Problem
from rex_ray.policies import base
from rex_ray.policies.base import ChangeGlobalBatch, Decision, Finding, Keep, Proposal, Reallocate, Search
from rex_ray.policies.limits import are_alike, least_rows

__all__ = ["ask", "cancel_searches", "fault_of", "publish", "publish_command"]


_SAME_RATE = 0.1
"""Part of the learning-rate factor by which proposals differ that are one and the same advice: noise scales move a
little at every look, and growth itself leaves a rate alone that is off by less."""


class _LazyGenerator:
    """Event ``k``'s generator, made when first drawn from: most policies never do, and making one costs 20 steps."""

    def __init__(self, seed: int, num_event: int) -> None:
        self._entropy = (seed, num_event)
        self._generator: np.random.Generator | None = None

    def __getattr__(self, name: str) -> Any:
        if self._generator is None:
            # The one maker of generators: from the seed and the event's number, so that a replay draws the same.
            self._generator = np.random.default_rng(self._entropy)  # noqa: TID251
        return getattr(self._generator, name)


def ask(rules: Rules, state: ControllerState, observation: Observation, **seen: Any) -> Outcome:
    """Show the policy an observation and act on its answer; ``seen`` is what the state takes from the observation."""
    rng = cast("np.random.Generator", _LazyGenerator(rules.seed, state.num_events))
    decision, policy_state = rules.policy.decide(state.policy_state, observation, rng)
    return _act(rules, changed(state, policy_state=policy_state, last_reason=decision.reason, **seen), decision)


def _act(rules: Rules, state: ControllerState, decision: Decision) -> Outcome:
    if decision.findings:
        return _tell(state, decision.findings).then(lambda told: _carry_out(rules, told, decision))
    return _carry_out(rules, state, decision)


def _carry_out(rules: Rules, state: ControllerState, decision: Decision) -> Outcome:
    match decision:
        case Keep():
            return Outcome(state=state)
        case Reallocate() | ChangeGlobalBatch():
            return _consider(rules, state, decision)
        case Search():
            return _start_search(rules, state, decision)
        case base.TellTrial():
            command = TellTrial(
                search_id=decision.search_id,
                trial=decision.trial,
                objective=decision.objective,
                own_s=decision.own_s,
            )
            return Outcome(state=state, commands=(command,) if decision.search_id in state.searches else ())
        case base.RequestWorldSize():
            note = Decided(step=state.last_step, kind="world_size", reason=decision.reason)
            resize = RequestWorldSize(num_workers=decision.num_workers, reason=decision.reason)
            return Outcome(state=state, commands=(resize,) if rules.mode == "auto" else (), notes=(note,))
        case _:
            assert_never(decision)


def _tell(state: ControllerState, findings: tuple[Finding, ...]) -> Outcome:
    """Note each part's judgement when it is a new one, and then ever more rarely."""
    newest, notes = dict(state.findings), []
    for finding in findings:
        verdict, count = newest.get(finding.part, ("", 0))
        count = count + 1 if verdict == finding.verdict else 1
        newest[finding.part] = (finding.verdict, count)
        if count & (count - 1) == 0:
            notes.append(Found(step=state.last_step, finding=finding, count=count))
    return Outcome(state=replace(state, findings=newest), notes=tuple(notes))


def _consider(rules: Rules, state: ControllerState, decision: Reallocate | ChangeGlobalBatch) -> Outcome:
    phase = state.phase
    proposal = decision.proposal
    if isinstance(phase, Switching):
        if _is(proposal, phase.pending.allocation):
            return Outcome(state=state)
        return _say_once(state, proposal, Deferred(step=state.last_step, reason=decision.reason, proposal=proposal))
    if not isinstance(phase, Running) or _is(proposal, phase.allocation):
        return Outcome(state=state)
    fixed_rows = phase.allocation.global_batch_size if isinstance(decision, Reallocate) else None
    if fault := fault_of(proposal, phase.group.problem, fixed_rows):
        refused = Refused(step=state.last_step, reason=f"{fault} ({decision.reason})", proposal=proposal)
        return _say_once(state, proposal, refused)
    search_id = decision.search_id if isinstance(decision, Reallocate) else None
    decided = Decided(
        step=state.last_step,
        kind=_kind_of(decision),
        reason=decision.reason,
        version=state.next_version if rules.mode == "auto" else None,
        proposal=proposal,
        predicted_gain=decision.predicted_gain,
        evidence=decision.evidence,
    )
    if rules.mode != "auto":
        return _say_once(state, proposal, decided)
    # Another learning rate changes no shares: what a search was asked is still the question.
    is_same = proposal.local_batch_sizes == phase.allocation.local_batch_sizes
    stale = () if search_id is not None or is_same else cancel_searches(state, "the shares change")
    state = replace(state, searches=()) if stale else state
    published = publish(state, phase, proposal, reason=decision.reason, predicted_gain=decision.predicted_gain)
    return replace(published, commands=(*stale, *published.commands), notes=(decided,))


def _kind_of(decision: Reallocate | ChangeGlobalBatch) -> str:
    """A search's shares are a trial while they are run to be timed, and a change once they promise something."""
    if isinstance(decision, ChangeGlobalBatch):
        return "change_global_batch"
    return "trial" if decision.search_id is not None and decision.predicted_gain is None else "reallocate"


def _say_once(state: ControllerState, proposal: Proposal, note: Decided | Deferred | Refused) -> Outcome:
    """Note what is not published, but not again at every step of a policy that keeps asking for much the same."""
    assert isinstance(state.phase, Running | Switching)
    about = "shares" if proposal.global_batch_size == state.phase.allocation.global_batch_size else "batch"
    said = state.unheeded.get(about)
    if said is not None and _is_like(said, proposal):
        return Outcome(state=state)
    return Outcome(state=replace(state, unheeded={**state.unheeded, about: proposal}), notes=(note,))


def _is_like(one: Proposal, other: Proposal) -> bool:
    is_same_rate = abs(other.lr_factor - one.lr_factor) <= _SAME_RATE * one.lr_factor
    return is_same_rate and are_alike(one.local_batch_sizes, other.local_batch_sizes)


def publish(
    state: ControllerState,
    phase: Running | Switching,
    proposal: Proposal,
    *,
    reason: str,
    predicted_gain: float | None = None,
    withdrawn: Publication | None = None,
) -> Outcome:
    """Give a proposal the next version and send it on its way."""
    allocation = Allocation(
        version=state.next_version, local_batch_sizes=proposal.local_batch_sizes, lr_factor=proposal.lr_factor
    )
    pending = Publication(
        allocation=allocation,
        reason=reason,
        decided_step=state.last_step,
        first_us=state.now_us,
        last_us=state.now_us,
        predicted_gain=predicted_gain,
        withdraws=withdrawn is not None,
    )
    switching = Switching(group=phase.group, allocation=phase.allocation, pending=pending, withdrawn=withdrawn)
    next_state = replace(state, phase=switching, next_version=state.next_version + 1, unheeded={})
    return Outcome(state=next_state, commands=(publish_command(phase.group, pending),))


def publish_command(group: Group, pending: Publication) -> ApplyAllocation:
    """The command that (again) publishes ``pending``."""
    return ApplyAllocation(generation=group.generation, allocation=pending.allocation, reason=pending.reason)


def _start_search(rules: Rules, state: ControllerState, decision: Search) -> Outcome:
    phase = state.phase
    if not isinstance(phase, Running) or rules.mode != "auto":
        return Outcome(state=state)
    problem = decision.problem
    question = f"{phase.group.generation}/{phase.allocation.version}/{problem.global_batch_size}/{problem.kind}/"
    if any(search_id.startswith(question) for search_id in state.searches):
        return Outcome(state=state)
    search_id = f"{question}{state.num_events}"
    command = StartSearch(search_id=search_id, seed=state.num_events, problem=problem)
    note = Decided(
        step=state.last_step,
        kind="search",
        reason=decision.reason,
        proposal=Proposal(local_batch_sizes=problem.plan, lr_factor=phase.allocation.lr_factor),
        evidence=decision.evidence,
    )
    # One search at a time: a newer question makes the older one's answer worthless.
    cancelled = cancel_searches(state, "another search begins")
    return Outcome(state=replace(state, searches=(search_id,)), commands=(*cancelled, command), notes=(note,))


def cancel_searches(state: ControllerState, reason: str) -> tuple[CancelSearch, ...]:
    """The commands that call off every search under way."""
    return tuple(CancelSearch(search_id=search_id, reason=reason) for search_id in state.searches)


def fault_of(proposal: Proposal, problem: Problem, fixed_rows: int | None = None) -> str | None:
    """Say why no group can run ``proposal``, or None.

    Args:
        proposal: shares that a policy asks for.
        problem: the group and its limits.
        fixed_rows: the sum that the shares must have; None: any up to the problem's largest global batch.
    """
    sizes = proposal.local_batch_sizes
    if len(sizes) != problem.num_workers:
        return f"{len(sizes)} shares for {problem.num_workers} workers"
    if min(sizes) < 0 or sum(sizes) < 1:
        return f"shares {sizes} are not row counts"
    if fixed_rows is not None and sum(sizes) != fixed_rows:
        return f"shares {sizes} sum to {sum(sizes)}, not to the global batch of {fixed_rows}"
    if sum(sizes) > max(problem.max_global_batch_size, problem.global_batch_size):
        return f"a global batch of {sum(sizes)} is above the largest allowed, {problem.max_global_batch_size}"
    multiple, least = problem.local_batch_multiple, least_rows(problem)
    for size, worker in zip(sizes, problem.workers, strict=True):
        if size % multiple:
            return f"rank {worker.rank}'s {size} rows are no multiple of {multiple}"
        if size < worker.min_local_batch_size and least <= sum(sizes):
            return f"rank {worker.rank} needs {worker.min_local_batch_size} rows at least, not {size}"
        if worker.max_local_batch_size is not None and size > worker.max_local_batch_size:
            return f"rank {worker.rank} cannot hold {size} rows, at most {worker.max_local_batch_size}"
    return None


def _is(proposal: Proposal, allocation: Allocation) -> bool:
    """Whether a proposal asks for what the allocation already is."""
    return proposal.local_batch_sizes == allocation.local_batch_sizes and proposal.lr_factor == allocation.lr_factor
