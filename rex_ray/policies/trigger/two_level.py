"""The slowdown trigger: a two-level rank test beside a fast path, on each rank's own time against what is normal.

A lasting slowdown is to be told from noise that remembers, from spikes and from bursts, within a few steps. Small
effects need a test over many samples; large ones do not: a handful of consecutive steps far beyond anything that the
rank's noise does is beyond doubt at once. So there are two speeds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from rex_ray.core.errors import ConfigError
from rex_ray.core.observations import AllocationApplied, StepObserved
from rex_ray.core.types import BoolArray, FloatArray, Problem, StepFlag, frozen
from rex_ray.policies.base import Finding
from rex_ray.policies.seams import Alarm, Model
from rex_ray.policies.trigger.baseline import BLOCK, Baseline
from rex_ray.policies.trigger.footing import FIRST, advance, meet_curve, rebase
from rex_ray.policies.trigger.levels import Changes, find_changes, run_lengths, two_level_signs
from rex_ray.policies.trigger.memory import (
    LONG,
    NUM_RECENT,
    SHORT,
    Footing,
    Limits,
    Past,
    TriggerState,
    Watch,
)
from rex_ray.policies.trigger.response import Response

__all__ = ["TwoLevelTrigger"]

_OUT_OF_REACH = 50.0
"""Log factor that no sample has: the limit of a rank that is not armed."""

_LONGEST_US = 86_400_000_000

_PRIOR_FAR, _PRIOR_SEEN, _PRIOR_RUNS, _PRIOR_AGAIN = 2.0, 20.0, 5.0, 0.05
"""What is assumed of far samples before enough were seen: two in 20, and of five of them one in 20 followed by another,
or as many as there are far samples at all where that is more."""

_MAX_FAR_RUN = 12
"""A rank whose disturbances last as long as this is left to the two-level test, which takes nine samples."""

_UNSETTLED = 1.3
"""How much wider limits are while a rank's usual time rests on a few samples: their error is .7 of one sample's."""

_KEEP_EVERY = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoLevelTrigger:
    """Raises an alarm when a rank's own time has changed by a factor that lasts.

    Two-level test (the paper's): with ``S`` the last 8, ``L`` the last 16 and ``F`` the 96 clean samples before those,
    a hit needs ``z(S, F) > min_z``, ``z(L, F) > min_z``, ``|median S - median F|`` beyond the rank's limit and Cliff's
    delta beyond ``min_delta``; ``num_hits`` hits in a row raise the alarm. Fast path: so many consecutive samples
    beyond ``fast_factor`` that the rank's noise, as it was seen so far, would feign it less than once in
    ``1 / max_false_rate`` steps of the group.

    Attributes:
        min_factor: smallest change that counts.
        num_sds: limit of the two-level test in robust sds of a median of 8.
        min_z: least statistic of both levels.
        min_delta: least Cliff's delta, for it no number of samples makes large.
        num_hits: hits in a row.
        fast_factor: smallest change that the fast path judges, if ``min_factor`` is no larger; 0 switches it off.
        fast_sds: limit of the fast path in robust sds of a sample.
        max_false_rate: false alarms of the fast path per step of the group.
        response: what is done about a change.
    """

    min_factor: float = 1.15
    num_sds: float = 5.0
    min_z: float = 3.09
    min_delta: float = 0.7
    num_hits: int = 2
    fast_factor: float = 1.15
    fast_sds: float = 4.5
    max_false_rate: float = 3e-5
    response: Response = field(default_factory=Response)

    def __post_init__(self) -> None:
        if not 1.0 < self.min_factor <= 4.0:
            raise ConfigError(f"trigger_min_factor must lie in (1, 4], e.g. 1.15, got {self.min_factor}")
        if self.num_hits < 1:
            raise ConfigError(f"trigger_hits must be at least 1, got {self.num_hits}")
        if self.num_sds <= 0 or self.fast_sds <= 0:
            raise ConfigError(f"trigger_num_sds must be positive, got {self.num_sds} and {self.fast_sds}")
        if self.fast_factor and not 1.0 < self.fast_factor <= 4.0:
            raise ConfigError(
                f"trigger_fast_factor must be 0 (off) or lie in (1, 4], e.g. 1.15, got {self.fast_factor}"
            )
        if not 0.0 < self.max_false_rate < 1.0:
            raise ConfigError(f"trigger_max_false_rate must lie in (0, 1), got {self.max_false_rate}")

    def init(self, problem: Problem, prior: TriggerState | None) -> TriggerState:
        """Begin with a worker group; of an earlier one only the lengths of events are kept."""
        n = problem.num_workers
        baseline = Baseline.empty(n)
        return TriggerState(
            num_clean=0,
            footing=None,
            watch=Watch.empty(n),
            baseline=baseline,
            limits=self._limits(baseline),
            past=Past.none(n, self.response.cooldown_steps, prior.past.lengths if prior else ()),
        )

    def observe(
        self, state: TriggerState, step: StepObserved, model: Model | None
    ) -> tuple[Alarm | Finding | None, TriggerState]:
        """Judge a step's own times; a step with a flag is no sample."""
        if step.flags != StepFlag.NONE:
            return None, state
        if state.footing is None or state.footing.version != step.allocation_version:
            state, footing = rebase(state, step, model)
            state = replace(state, limits=self._limits(state.baseline, footing))
        state, deviation = self._take(state, step)
        if state.past.is_review_due:
            return self.response.review(state)
        if state.watch.is_quiet and not (np.abs(deviation) > state.limits.off).any():
            if state.num_clean % _KEEP_EVERY == 0:
                return self.response.keep(state), state
            return None, state
        state, changes = self._judge(state, deviation)
        if changes is None:
            return None, state
        return self.response.answer(state, changes, step, model)

    def trusted(self, state: TriggerState) -> BoolArray | None:
        """Return whose newest times may be learnt from: those of suspects wait until it is known what they are."""
        if state.watch.is_quiet:
            return None
        return ~state.watch.suspect

    def applied(self, state: TriggerState, applied: AllocationApplied) -> TriggerState:
        """Take note of the time that shares took to arrive, and that they were decided before the newest steps."""
        return replace(state, past=self.response.applied(state.past, applied.step))

    def _take(self, state: TriggerState, step: StepObserved) -> tuple[TriggerState, FloatArray]:
        """Add a step's samples, and once in ``BLOCK`` steps those that have left the long window to the baseline."""
        assert state.footing is not None
        watch, footing, baseline, limits = state.watch, state.footing, state.baseline, state.limits
        own_us = step.own_us
        num_recent = np.minimum(watch.num_recent + 1, NUM_RECENT)
        if own_us.min() >= 1 and own_us.max() <= _LONGEST_US:
            sample = np.log(own_us) - footing.reference
        else:
            usable = (own_us >= 1) & (own_us <= _LONGEST_US)
            sample = np.where(usable, np.log(np.where(usable, own_us, 1)) - footing.reference, baseline.centre)
            num_recent[~usable] = 0
        newest = np.empty((1, 2, sample.size))
        newest[0, 0], newest[0, 1] = sample, step.data_us
        watch = Watch(
            recent=frozen(np.concatenate([watch.recent[1:], newest])),
            num_recent=frozen(num_recent),
            off=watch.off,
            far=watch.far,
            hits=watch.hits,
            lasting=watch.lasting,
            suspect=watch.suspect,
            is_quiet=watch.is_quiet,
        )
        num_clean = state.num_clean + 1
        if num_clean - footing.since == FIRST and footing.given.any():
            footing, watch = meet_curve(footing, watch, baseline, limits)
            sample = watch.recent[-1, 0]
        if footing.unsettled.any():
            footing, watch = advance(footing, watch, baseline, limits, state.past.level)
            sample = watch.recent[-1, 0]
            limits = self._limits(baseline, footing)
        if num_clean % BLOCK == 0:
            settled = (num_recent >= NUM_RECENT) & ~watch.suspect & (footing.unsettled == 0)
            baseline = baseline.absorb(watch.recent[:BLOCK, 0], watch.recent[:BLOCK, 1], settled, limits.off)
            limits = self._limits(baseline, footing)
        state = TriggerState(
            num_clean=num_clean, footing=footing, watch=watch, baseline=baseline, limits=limits, past=state.past
        )
        return state, sample - baseline.centre

    def _limits(self, baseline: Baseline, footing: Footing | None = None) -> Limits:
        armed = baseline.is_armed
        least = np.maximum(math.log(self.min_factor), 0.0 if footing is None else footing.guess)
        doubt = 1.0 if footing is None else np.where(footing.unsettled > 0, _UNSETTLED, 1.0)
        allowed = self.max_false_rate / armed.size
        # The larger the group, the farther out is what none of it does by chance; few blocks know their spread badly.
        sds = self.num_sds * _farther(allowed, self.max_false_rate / 4) * (1 + 2 / np.maximum(baseline.num_blocks, 1))
        off = np.minimum(np.maximum(doubt * sds * baseline.block_spread, least), np.maximum(least, math.log(2.0)))
        far = np.maximum(
            math.log(self.fast_factor or 2.0),
            doubt * self.fast_sds * np.maximum(baseline.spread, baseline.block_spread),
        )
        chance = (baseline.num_far + _PRIOR_FAR) / (baseline.num_seen + _PRIOR_SEEN)
        prior = np.maximum(_PRIOR_AGAIN, chance)
        again = (baseline.num_far_pairs + _PRIOR_RUNS * prior) / (baseline.num_far + _PRIOR_RUNS)
        run = 1 + np.ceil(np.log(np.minimum(allowed / chance, 1.0)) / np.log(np.minimum(again, 0.95)))
        return Limits(
            off=frozen(np.where(armed, off, _OUT_OF_REACH)),
            far=frozen(np.where(armed & bool(self.fast_factor), np.maximum(far, least), _OUT_OF_REACH)),
            far_run=frozen(np.minimum(np.maximum(run, 3), _MAX_FAR_RUN).astype(np.int64)),
        )

    def _judge(self, state: TriggerState, deviation: FloatArray) -> tuple[TriggerState, Changes | None]:
        """Look closer at a step that is not quiet: who is off, for how long, and whether it has become a change."""
        watch, limits, baseline = state.watch, state.limits, state.baseline
        off = run_lengths(watch.off, deviation, limits.off)
        far = run_lengths(watch.far, deviation, limits.far)
        over = (watch.far != 0) & (far * watch.far <= 0)
        lengths: tuple[int, ...] = ()
        if over.any():
            ended = np.where(over, np.abs(watch.far), 0)
            baseline = baseline.remember_runs(ended)
            lengths = tuple(int(run) for run in ended[ended >= limits.far_run])
        last = watch.recent[-SHORT:, 0] - baseline.centre
        up = np.count_nonzero(last > limits.off, axis=0)
        down = np.count_nonzero(last < -limits.off, axis=0)
        many = (np.maximum(up, down) >= SHORT // 2) & (watch.num_recent >= SHORT)
        hits = np.zeros_like(watch.hits)
        if many.any():
            sign = two_level_signs(watch, baseline, limits, many, min_z=self.min_z, min_delta=self.min_delta)
            hits = np.where(watch.hits * sign > 0, watch.hits + sign, sign)
        suspect = (off != 0) | many
        lasting = np.where(np.abs(deviation) > limits.off / 2, watch.lasting + 1, np.maximum(watch.lasting - 3, 0))
        is_quiet = not (suspect.any() or hits.any())
        watch = Watch(
            recent=watch.recent,
            num_recent=watch.num_recent,
            off=frozen(off),
            far=frozen(far),
            hits=frozen(hits),
            lasting=frozen(lasting * (not is_quiet)),
            suspect=frozen(suspect),
            is_quiet=is_quiet,
        )
        past = state.past.remember(lengths) if lengths else state.past
        state = TriggerState(
            num_clean=state.num_clean, footing=state.footing, watch=watch, baseline=baseline, limits=limits, past=past
        )
        fast = np.where(np.abs(far) >= limits.far_run, np.sign(far), 0)
        sure = np.where(np.abs(hits) >= self.num_hits, np.sign(hits), fast)
        if not sure.any() or state.num_clean < past.quiet_until:
            return state, None
        return state, find_changes(state, sure, np.where(fast != 0, np.minimum(np.abs(far), LONG), SHORT))


@lru_cache(maxsize=16)
def _farther(rate: float, usual: float) -> float:
    """Return how many times as far out a normal sample of such a rare chance is as one of the usual chance."""
    return float(ndtri(rate) / ndtri(usual))
