"""LB-BSP: at iteration barriers, rows move from the straggler to the leader.

Chen et al., *Semi-dynamic load balancing: efficient distributed learning in non-dedicated environments* (SoCC'20,
arXiv:1806.02508). Its full text was not at hand: this follows its abstract and public descriptions, and an original may
do otherwise what they leave open. It sizes batches in two ways. On CPUs shares are proportional to a speed that a
recurrent network predicts. On GPUs nothing is predicted: some rows ``Delta`` go from the slowest worker to the fastest,
again and again, and fewer once they go to and fro. The second way is the one here.

Choices of ours: a window of 10 clean steps, whose mean times are compared, since one
step's are noise; the first ``Delta``, an eighth of an equal share; it is halved when a move would take the last one
of either worker back, and begins anew where the gap is more than such a move could close (a worker has slowed down);
at one row to and fro, or a gap of at most 5 %, nothing moves. A change takes effect some steps after it was decided. A
restart goes on with the shares resumed from, else equal ones.
"""

from __future__ import annotations

from rex_ray.core.errors import ConfigError
from rex_ray.policies.bsp import FixedBatch, NoSearch, NoTrigger
from rex_ray.policies.composition import Composition
from rex_ray.policies.split.moving import MoveMemory, MoveRows
from rex_ray.policies.split.windowed import WindowedSplit, WindowedState, check_window

__all__ = ["lb_bsp"]


def lb_bsp(
    *, window: int = 10, first_share: float = 0.125, min_gap: float = 0.05
) -> Composition[None, WindowedState[MoveMemory], None, None]:
    """Semi-dynamic load balancing at a fixed global batch.

    Args:
        window: clean steps between two moves.
        first_share: rows of the first move, as a fraction of an equal share.
        min_gap: a straggler behind the leader by no more than this fraction is left alone.

    Raises:
        ConfigError: a value that cannot work.
    """
    check_window("lb_bsp", window)
    if not 0.0 < first_share <= 1.0:
        raise ConfigError(f"option 'first_share' of policy 'lb_bsp' must be a fraction in (0, 1], got {first_share}")
    if not 0.0 <= min_gap < 1.0:
        raise ConfigError(f"option 'min_gap' of policy 'lb_bsp' must be a fraction in [0, 1), got {min_gap}")
    split = WindowedSplit(rule=MoveRows(window=window, first_share=first_share, min_gap=min_gap))
    return Composition(name="lb_bsp", growth=FixedBatch(), split=split, trigger=NoTrigger(), search=NoSearch())
