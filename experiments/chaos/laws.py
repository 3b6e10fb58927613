"""What must hold whatever happens: the invariants of ``docs/architecture.md``, each by its name."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rex_ray.control.commands import ApplyAllocation
from rex_ray.control.notes import Applied
from rex_ray.control.phases import ControllerState, Running, Switching
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Allocation
from rex_ray.hosting.control_host import ControlHost
from rex_ray.policies.base import Policy
from rex_ray.worker.data.sampler import Plan

__all__ = ["LawBroken", "Laws"]

_KEPT_STEPS = 20_000
_KEPT_LINES = 40
_REPUBLISH_US, _WITHDRAW_US, _WITHDRAW_STEPS = 2_000_000, 30_000_000, 32
MOST_STATE_BYTES = 400_000
MOST_BYTES_AN_EVENT = 1500
MOST_PENDING_STEPS, MOST_WAITING_STEPS, MOST_WAITING_RECORDS = 1025, 512, 4096


class LawBroken(BaseException):
    """An invariant does not hold. No ``Exception``: the code under test must not take it for a fault of its own."""

    def __init__(self, law: str, what: str) -> None:
        super().__init__(f"{law}: {what}")
        self.law = law


class Laws:
    """Remembers what really happened, and compares.

    Args:
        knows_shares: whether the policy's state begins with the shares that it believes to be applied.
    """

    def __init__(self, knows_shares: bool) -> None:
        self._knows_shares = knows_shares
        self._truth: dict[tuple[str, int], tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self._order: deque[tuple[str, int]] = deque()
        self._ran: dict[str, set[int]] = {}
        self._published: dict[int, Allocation] = {}
        self.is_live = False
        self.trace: deque[str] = deque(maxlen=_KEPT_LINES)
        self.num_checks = 0
        self.most_state_bytes = 0
        self.most_bytes_an_event = 0.0

    def check(self, law: str, holds: bool, what: str) -> None:
        """Have a law hold.

        Raises:
            LawBroken: it does not.
        """
        self.num_checks += 1
        if not holds:
            raise LawBroken(law, what)

    def say(self, now_s: float, what: str) -> None:
        """Write a line of the trace, of which the newest are kept."""
        self.trace.append(f"{now_s:10.3f} s  {what}")

    # --- the group

    def step(self, generation: str, plans: Sequence[Plan], own_us: Sequence[int]) -> None:
        """All ranks run a step."""
        first = plans[0]
        for plan in plans:
            self.check("one step, one plan", plan == first, f"step {first.step}: {plan} beside {first}")
        version = first.allocation.version
        self._truth[generation, first.step] = (version, first.num_rows, tuple(own_us))
        self._order.append((generation, first.step))
        if len(self._order) > _KEPT_STEPS:
            self._truth.pop(self._order.popleft(), None)
        self._ran.setdefault(generation, set()).add(version)

    def epoch(self, epoch: int, counts: np.ndarray) -> None:
        """An epoch is complete."""
        wrong = np.flatnonzero(counts != 1)
        self.check(
            "rows exactly once", wrong.size == 0, f"epoch {epoch}: rows {wrong[:8].tolist()} {counts[wrong[:8]]}"
        )

    # --- the controller

    def observed(self, state: ControllerState, step: StepObserved) -> None:
        """The policy is shown a step."""
        group = getattr(state.phase, "group", None)
        running = None if group is None else group.generation
        self.check("no stale evidence", step.generation == running, f"step of {step.generation}, {running} runs")
        seen = (step.allocation_version, tuple(step.num_rows.tolist()), tuple(step.compute_us.tolist()))
        true = self._truth.get((step.generation, step.step))
        self.check("no stale evidence", true is None or seen == true, f"step {step.step}: {seen} shown, {true} ran")

    def published(self, allocation: Allocation) -> None:
        """An allocation leaves the control actor."""
        known = self._published.get(allocation.version)
        if known is not None:
            self.check("versions keep their meaning", known == allocation, f"{allocation} was {known}")
        newest = max(self._published, default=0)
        rises = allocation.version >= newest
        self.check("versions rise", rises, f"version {allocation.version} left after {newest}")
        self._published[allocation.version] = allocation

    def turn(self, host: ControlHost, *, ticked: bool) -> None:
        """The control actor did something."""
        state = host._controller.controller.state
        phase = state.phase
        if self._knows_shares and isinstance(phase, Running | Switching):
            known, runs = state.policy_state[0], phase.allocation.local_batch_sizes  # type: ignore[index]
            self.check("a decision is a proposal", known == runs, f"the policy believes {known}, {runs} is applied")
        if isinstance(phase, Running | Switching):
            version, ran = phase.allocation.version, self._ran.get(phase.group.generation, set())
            self.check("applied is what ran", version in ran, f"version {version} is applied, {sorted(ran)[-4:]} ran")
        if not ticked:
            return
        pending = getattr(phase, "pending", None)
        if pending is None:
            return
        quiet_us, waited_us = state.now_us - pending.last_us, state.now_us - pending.first_us
        self.check("published again", quiet_us < _REPUBLISH_US, f"nothing published for {quiet_us} us")
        if isinstance(phase, Switching) and not pending.withdraws:
            most_us = max(_WITHDRAW_US, _WITHDRAW_STEPS * state.step_us)
            self.check("withdrawn in time", waited_us < most_us, f"a switch is pending for {waited_us} us")

    def restored(self, host: ControlHost) -> None:
        """A control actor is back from its journal."""
        state = host._controller.controller.state
        newest = max(self._published, default=0)
        self.check(
            "journal before emit", state.next_version > newest, f"version {newest} had left, and the journal knows not"
        )

    def bounded(self, host: ControlHost, outboxes: Sequence[Any]) -> None:
        """Memory is bounded."""
        controller = host._controller
        state_bytes = len(json.dumps(CODEC.encode(controller.controller.state)))
        self.most_state_bytes = max(self.most_state_bytes, state_bytes)
        self.check("bounded memory", state_bytes <= MOST_STATE_BYTES, f"the state takes {state_bytes} bytes")
        pending = len(controller._assembler._pending) if controller._assembler else 0
        self.check("bounded memory", pending <= MOST_PENDING_STEPS, f"{pending} steps wait in the assembler")
        waiting = len(controller._writer._steps)
        self.check("bounded memory", waiting <= MOST_WAITING_STEPS, f"{waiting} steps wait for the journal")
        for outbox in outboxes:
            records = len(outbox._waiting)
            self.check("bounded memory", records <= MOST_WAITING_RECORDS, f"{records} records wait to be sent")
        reasons = len(host.status().dropped)
        self.check("bounded memory", reasons <= 32, f"{reasons} reasons to drop")

    # --- the end

    def settled(self, host: ControlHost, generation: str, in_force: Allocation, last_step: int) -> None:
        """All faults have ceased for a while: the group runs what was decided last, and is observed."""
        state, phase = host._controller.controller.state, host._controller.controller.phase
        self.check("never wedged", isinstance(phase, Running), f"the controller is {type(phase).__name__}")
        assert isinstance(phase, Running)
        runs = phase.group.generation
        self.check("never wedged", runs == generation, f"the controller believes in {runs}, {generation} runs")
        self.check("never wedged", phase.allocation == in_force, f"{in_force} runs, {phase.allocation} is believed")
        self.check("never wedged", host.published == in_force, f"{in_force} runs, {host.published} was published")
        self.check("never wedged", last_step - state.last_step < 200, f"step {last_step}, seen up to {state.last_step}")
        self.check("never wedged", host.status().gap is None, f"{host.status().gap}")

    def journal(self, files: Mapping[str, bytes], policy: Policy[Any]) -> int:
        """The journal tells the run: return how many events it holds."""
        journal = read_journal(files)
        report = replay(journal, policy)
        self.check("replay", report.is_identical, f"{[str(d) for d in report.differences[:2]]}")
        told = {c.allocation.version: c.allocation for c in journal.commands if isinstance(c, ApplyAllocation)}
        for version, meaning in self._published.items():
            self.check(
                "journal before emit",
                told.get(version) == meaning,
                f"{meaning} left, the journal has {told.get(version)}",
            )
        num_applied = sum(isinstance(note, Applied) for note in journal.notes)
        self.check("the run moved", num_applied > 0, "no switch was ever applied")
        num_bytes = sum(map(len, files.values()))
        self.most_bytes_an_event = max(self.most_bytes_an_event, num_bytes / max(1, len(journal.entries)))
        self.check(
            "bounded memory",
            self.most_bytes_an_event <= MOST_BYTES_AN_EVENT,
            f"{self.most_bytes_an_event:.0f} bytes of journal an event",
        )
        return len(journal.entries)
