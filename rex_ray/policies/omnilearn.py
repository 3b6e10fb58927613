"""OmniLearn: a proportional controller equalises the workers' times, with a dead-band.

Tyagi and Sharma, *OmniLearn: a framework for distributed deep learning over heterogeneous clusters* (TPDS 2025,
arXiv:2503.17469; first in *Taming resource heterogeneity in distributed ML training with dynamic batching*, ACSOS'20,
arXiv:2305.12213). A worker's error is its time less the mean, ``t_i - mean(t)``; its batch changes by minus the error
times its throughput ``b_i / t_i``, which is ``b_i' = b_i mean(t) / t_i``. Times are smoothed exponentially since the
last change, and small changes are not made (a dead-band of .2).

What is left open, and what is done here: the weight of a new step (.2), and when to look (every 10 clean steps); that
the batches sum to the global batch (largest remainder, within the workers' bounds, which are those of memory too);
the dead-band is of the group, since one worker's rows cannot change alone: the largest change that the bounds leave
counts. The paper's scaling of learning rates and its asynchronous form are not taken over. A restart goes on with the
shares resumed from, else equal ones.
"""

from __future__ import annotations

from rex_ray.core.errors import ConfigError
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.split.proportional import Proportional
from rex_ray.policies.split.windowed import WindowedSplit, WindowedState, check_window

__all__ = ["omnilearn"]


def omnilearn(
    *, window: int = 10, smoothing: float = 0.2, dead_band: float = 0.2
) -> Composition[None, WindowedState[None], None, None]:
    """Proportional control of the shares at a fixed global batch.

    Args:
        window: clean steps between two looks.
        smoothing: weight of the newest step in the smoothed times.
        dead_band: changes of no more than this fraction, on every worker, are not made.

    Raises:
        ConfigError: a value that cannot work.
    """
    check_window("omnilearn", window, smoothing)
    if not 0.0 <= dead_band < 1.0:
        raise ConfigError(f"option 'dead_band' of policy 'omnilearn' must be a fraction in [0, 1), got {dead_band}")
    split = WindowedSplit(rule=Proportional(window=window, smoothing=smoothing, dead_band=dead_band))
    return Composition(name="omnilearn", growth=FixedBatch(), split=split, trigger=NoTrigger(), search=NoSearch())
