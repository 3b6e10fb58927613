"""Growth by a tenth: while the noise scale is above the batch, every decision adds 10 %, in equal shares.

This is what the REX paper says of Pollux, which does something else (see ``pollux``). It resembles SimiGrad's rule
(Qin et al., NeurIPS'21), which JABAS takes over: every 100 steps the gradients of two halves of the workers are
compared, and the batch is multiplied by 1.1 where their cosine similarity is below a target, else by .9, the learning
rate following the root of the batch.

What is done here: the noise scale stands for the similarity, since both say how much of a gradient is noise (two
halves of a batch ``B`` are as similar as ``1 / (1 + 2 phi / B)``; ``phi > B`` is a similarity below a third); a
decision is taken at every block of four measured steps, which are 4 steps in the first 40 of each batch and 16 later
on; nothing shrinks, as the REX paper has it; the learning rate follows AdaScale's gain, ``lr_rule="sqrt"`` gives the
other. No goodput is asked: the batch grows to what the noise allows, whatever a step then costs.
"""

from __future__ import annotations

from rex_ray.core.errors import ConfigError
from rex_ray.policies.bsp import NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.growth.by_noise_scale import LRChoice, NoiseScaleGrowth
from rex_ray.policies.growth.rules import GrowTenPercent
from rex_ray.policies.growth.state import GrowthState
from rex_ray.policies.split.fixed import EqualSplit, EqualSplitState

__all__ = ["growth10"]


def growth10(
    *, factor: float = 1.1, lr_rule: LRChoice = "auto"
) -> Composition[GrowthState, EqualSplitState, None, None]:
    """Growth by a fixed factor while the noise scale is above the batch, in equal shares.

    Args:
        factor: new batch over the old one.
        lr_rule: how the learning rate follows the batch, see ``NoiseScaleGrowth``.

    Raises:
        ConfigError: a value that cannot work.
    """
    if not 1.0 < factor <= 2.0:
        raise ConfigError(f"option 'factor' of policy 'growth10' must be in (1, 2], got {factor}")
    growth = NoiseScaleGrowth(rule=GrowTenPercent(factor=factor), lr_rule=lr_rule)
    return Composition(name="growth10", growth=growth, split=EqualSplit(), trigger=NoTrigger(), search=NoSearch())
