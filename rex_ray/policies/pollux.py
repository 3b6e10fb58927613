"""Pollux's agent: the batch of the best goodput once per pass, in equal shares, with AdaScale.

Qiao et al., *Pollux: co-adaptive cluster scheduling for goodput-optimized deep learning* (OSDI'21), and its release
AdaptDL (github.com/petuum/adaptdl, ``goodput.py``, ``speedup.py``, ``torch/data.py``, ``torch/_metrics.py``). At each
pass over the data its agent compares 50 batches, in equal ratios from ``M0`` to the largest allowed, by throughput
times efficiency, and takes the best if that is more than 1.05 times the present one's. Throughput is the fitted model
of ``core.throughput``, efficiency ``(phi + M0) / (phi + B)``; the learning rate follows AdaScale's gain, its root
under Adam. (The cluster's scheduler, which moves workers between jobs, is no part of this.)

The model's seven parameters: with a worker per machine ``alpha_r`` and ``beta_r`` are never seen and vanish;
``beta_n`` shows only beside ``alpha_n`` until groups of several sizes have run, and its prior keeps it near 0;
``alpha_c`` is half of the time while one batch alone was run.

What differs, or is left open. Pollux knows equal workers only, and its first rank's times: here a gradient's time is
the slowest worker's and the rest of a step is the reduction, which is the reading that favours it on mixed clusters.
The fit is made when a decision is due, not every 30 s. The first pass decides as soon as the noise scale is known,
not at its end; ``decide_steps`` sets another period, in optimizer steps. The noise scale is this library's, which for
equal shares is the same estimate, smoothed otherwise (``growth.pool``). Shares differ by a row where the batch is no
multiple of the workers; a batch that does not fit the smallest worker is no candidate, and none is above a sixteenth
of the data set. Batches never accumulate. Mean times are kept over restarts.
"""

from __future__ import annotations

from rex_ray.core.errors import ConfigError
from rex_ray.policies.bsp import NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.growth.beside_whole_steps import BesideWholeSteps
from rex_ray.policies.growth.by_noise_scale import LRChoice, NoiseScaleGrowth
from rex_ray.policies.growth.rules import GoodputOptimal
from rex_ray.policies.growth.state import GrowthState
from rex_ray.policies.split.throughput import ThroughputSplit, ThroughputState

__all__ = ["goodput_growth", "pollux"]


def goodput_growth(
    method: str, *, min_gain: float, num_points: int, decide_steps: int, lr_rule: LRChoice
) -> BesideWholeSteps:
    """Build growth to the best goodput on a split's model of whole steps, for the policy ``method``.

    Raises:
        ConfigError: a value that cannot work.
    """
    if min_gain < 0.0:
        raise ConfigError(f"option 'min_gain' of policy {method!r} must be a fraction of at least 0, got {min_gain}")
    if num_points < 2:
        raise ConfigError(f"option 'num_points' of policy {method!r} must be at least 2 batches, got {num_points}")
    rule = GoodputOptimal(min_gain=min_gain, num_points=num_points)
    return BesideWholeSteps(inner=NoiseScaleGrowth(rule=rule, lr_rule=lr_rule), decide_steps=decide_steps)


def pollux(
    *, min_gain: float = 0.05, num_points: int = 50, decide_steps: int = 0, lr_rule: LRChoice = "auto"
) -> Composition[GrowthState, ThroughputState, None, None]:
    """Goodput-optimal batches in equal shares.

    Args:
        min_gain: least gain in goodput, as a fraction.
        num_points: batches compared.
        decide_steps: optimizer steps between two decisions; 0: once per pass over the data.
        lr_rule: how the learning rate follows the batch, see ``NoiseScaleGrowth``.

    Raises:
        ConfigError: a value that cannot work.
    """
    growth = goodput_growth(
        "pollux", min_gain=min_gain, num_points=num_points, decide_steps=decide_steps, lr_rule=lr_rule
    )
    return Composition(name="pollux", growth=growth, split=ThroughputSplit(), trigger=NoTrigger(), search=NoSearch())
