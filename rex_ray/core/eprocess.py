"""A test that may be looked at after every block for ever, and still errs in one run of twenty at most.

A test at level .05 that is repeated in a run of hundreds of looks will err sooner or later. A bet against the null
hypothesis cannot: by Ville's inequality a gambler who starts with 1 in a game that is not in his favour ever holds
1/alpha with a probability of alpha at most (Shafer 2021; Ramdas et al. 2023, arXiv:2210.01948). The bet is on the
*sign* of each block's statistic, so heavy tails are harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rex_ray.core.errors import ConfigError
from rex_ray.core.types import FloatArray

__all__ = ["SignBet"]

# Wealth beyond this proves nothing more; less than the game allows is allowed.
_MOST_WEALTH = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class SignBet:
    """Bets on positive signs at several assumed chances at once.

    A share of the stake, ``1 / (t (t + 1))``, is kept back until look ``t``: evidence that begins late pays as well,
    which a single bet from the first look on would have lost its stake to. The shares sum to 1, so the bound holds.

    Attributes:
        null_chance: largest chance of a positive sign under the null. Half where the statistic is symmetric; sums over
            four steps of a noise-scale statistic are skewed and have up to .53 (see ``docs/methods.md``).
        assumed_chances: chances of a positive sign that are bet on, in equal parts.
    """

    null_chance: float = 0.55
    assumed_chances: tuple[float, ...] = (0.7, 0.85, 0.97)

    def __post_init__(self) -> None:
        if not 0 < self.null_chance < 1 or not all(self.null_chance < chance < 1 for chance in self.assumed_chances):
            raise ConfigError(
                f"a bet on signs needs chances above the null's and below 1, got {self.assumed_chances} against "
                f"{self.null_chance}"
            )

    def begin(self, shape: tuple[int, ...] = ()) -> FloatArray:
        """Return the wealth at stake before the first look: none yet; shape ``[..., num chances]``."""
        return np.zeros((*shape, len(self.assumed_chances)))

    def bet(self, wealth: FloatArray, num_bets: int, statistic: npt.ArrayLike) -> FloatArray:
        """Return the wealth after one more look.

        Args:
            wealth: what ``begin`` or the last look left, shape ``[..., num chances]``.
            num_bets: looks before this one.
            statistic: the block's statistic, shape ``[...]``; 0 and what is not finite is no bet won or lost.
        """
        sign = np.sign(np.nan_to_num(np.asarray(statistic, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0))
        chances = np.asarray(self.assumed_chances)
        won, lost = chances / self.null_chance, (1 - chances) / (1 - self.null_chance)
        sign = sign[..., None]
        factor = np.where(sign > 0, won, np.where(sign < 0, lost, 1.0))
        stake = 1.0 / ((num_bets + 1) * (num_bets + 2))
        after: FloatArray = np.minimum((wealth + stake) * factor, _MOST_WEALTH)
        return after

    def p_value(self, wealth: FloatArray, num_bets: int) -> FloatArray:
        """Return the anytime-valid p: one over the gambler's wealth, with what he has kept back, at most 1."""
        held = wealth.mean(axis=-1) + 1.0 / (num_bets + 1)
        p_value: FloatArray = np.minimum(1.0, 1.0 / held)
        return p_value
