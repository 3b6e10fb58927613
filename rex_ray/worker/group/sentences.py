"""What is said of a wait that failed or lasts, and of a rank that leaves."""

from __future__ import annotations

from dataclasses import dataclass

from rex_ray.core.errors import first_line
from rex_ray.worker.group.account import Account
from rex_ray.worker.group.last_words import error_text, seconds_text

__all__ = ["FailedWait", "farewell", "long_wait"]

# A backend may give up a little before its limit.
_NEARLY = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedWait:
    """A wait for other ranks that did not end well.

    Attributes:
        rank: who waited.
        what: for what.
        waited_s: how long.
        limit_s: its limit, if it has one that is known.
        error: what the backend says of it.
    """

    rank: int
    what: str
    waited_s: float
    limit_s: float | None = None
    error: BaseException | None = None

    @property
    def timed_out(self) -> bool:
        """Whether it ended by its limit; else it broke."""
        passed_limit = self.limit_s is not None and self.waited_s >= _NEARLY * self.limit_s
        return passed_limit or "timed out" in str(self.error).lower()

    def sentence(self, account: Account | None) -> str:
        """Return it in one sentence.

        Args:
            account: what the others last said, None where that is not known.
        """
        if account is None or not account.text:
            return (
                f"{self._head()} and got no answer; every rank must make this call at the same place of its loop, and "
                "a rank that died is named in its own log"
            )
        advice = ""
        if account.disagree:
            advice = "; every rank must make the same calls at the same places of its loop"
        elif not account.missing:
            advice = "; every rank is there, so they cannot reach one another"
        return f"{self._head()}: {account.text}{advice}"

    def _head(self) -> str:
        waited, limit = seconds_text(self.waited_s), "" if self.limit_s is None else f" (limit {self.limit_s:g} s)"
        if self.timed_out or self.error is None:
            return f"rank {self.rank} waited {waited} for {self.what}{limit}"
        said = first_line(self.error)
        return f"rank {self.rank} waited for {self.what}, which broke after {waited}{limit}, saying {said!r}"


def long_wait(rank: int, what: str, waited_s: float, account: Account) -> str:
    """Return what is said of a wait that goes on."""
    return f"rank {rank} has waited {seconds_text(waited_s)} for {what}: {account.text}"


def farewell(error: BaseException | None) -> str:
    """Return a rank's last word, to follow "rank 2".

    Args:
        error: what ended training there; None: its loop is done.
    """
    return "has ended its loop" if error is None else f"left after {error_text(error)}"
