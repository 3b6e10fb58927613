"""Cannikin: the batch of the best goodput under the exact split on straight lines, once per epoch.

Nie, Maghakian and Liu, *Training DNN models over heterogeneous clusters with optimal performance* (arXiv:2402.05302),
built on AdaptDL. A worker's time is linear in its rows, data, forward and backward pass each; the reduction starts
with the first bucket within the backward pass and ends ``T_u`` after the last gradient, or ``T_o + T_u`` after the
first bucket if that is later. The best split makes all workers finish together, is solved for each candidate batch,
and the batch of the best goodput is taken, each epoch anew. The first epoch runs equal shares, the second shares in
proportion to speed, since a line needs two sizes.

What differs, or is left open. Records here hold when the last gradient is ready, not the first bucket: a third of a
worker's own time is assumed to come before it, the same on all. Then the slowest worker by own time is the last by
both laws, so the split is exact on own times, and overlap matters to goodput alone (``AffineModel.whole_s``). Rows
are whole, by the exact solver instead of a continuous solution rounded. Candidates and the least gain are AdaptDL's
(50 batches, 5 %). The noise scale for unequal shares is this library's, not the paper's weighted estimate: it is
unbiased as well. Lines are least squares over the newest eight allocations, of which older epochs count half each;
sizes within 5 % count as one. Growth decides as soon as its epoch's noise scale is known; ``decide_steps`` sets
another period. A worker's line is its own, so a restart measures anew.
"""

from __future__ import annotations

from rex_ray.policies.bsp import NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.growth.by_noise_scale import LRChoice
from rex_ray.policies.growth.state import GrowthState
from rex_ray.policies.pollux import goodput_growth
from rex_ray.policies.split.affine import AffineSplit, AffineState

__all__ = ["cannikin"]


def cannikin(
    *, min_gain: float = 0.05, num_points: int = 50, decide_steps: int = 0, lr_rule: LRChoice = "auto"
) -> Composition[GrowthState, AffineState, None, None]:
    """Goodput-optimal batches under the exact split on straight lines.

    Args:
        min_gain: least gain in goodput, as a fraction.
        num_points: batches compared.
        decide_steps: optimizer steps between two decisions on the batch; 0: once per epoch.
        lr_rule: how the learning rate follows the batch, see ``NoiseScaleGrowth``.

    Raises:
        ConfigError: a value that cannot work.
    """
    growth = goodput_growth(
        "cannikin", min_gain=min_gain, num_points=num_points, decide_steps=decide_steps, lr_rule=lr_rule
    )
    return Composition(name="cannikin", growth=growth, split=AffineSplit(), trigger=NoTrigger(), search=NoSearch())
