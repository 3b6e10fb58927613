"""What a save decides of a part against what the script says now: its settings come back with its state.

torch loads an optimizer's learning rate and a schedule's length like everything else, without a word. Settings that a
script has changed since are then without effect, and the state of another kind of optimizer or schedule is taken in as
far as it goes, to fail at the first step or to train at a rate that nobody chose.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler

from rex_ray.core.errors import ConfigError
from rex_ray.worker.model.scheduling import ReferenceScheduler

__all__ = ["Settings", "in_words", "refuse_other_kind", "settings_of"]

Settings: TypeAlias = dict[str, Any]
"""Values by name, such as ``lr`` or ``group 1's lr``."""

_MOST_TOLD: Final = 6
_GROUP: Final = re.compile(r"^group \d+'s ")
# How an update is computed; not what it is.
_HOW: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
# What schedules write into an optimizer's groups, and what those that do so move there.
_OF_SCHEDULES: Final = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
_CYCLED: Final = frozenset({"lr", "momentum", "betas"})
# What an optimizer of another library holds beside these may be its state, and change by itself.
_COMMON: Final = frozenset({"lr", "weight_decay", "momentum", "betas", "eps"})
# How far a schedule is.
_PROGRESS: Final = frozenset({"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose"})


def settings_of(part: Any, state: Any = None, *, rate_moves: bool = False) -> Settings:
    """Return what an optimizer or a schedule of torch's is set to; nothing of any other part.

    Of an optimizer of another library, all names are returned, and values of those that every one has.

    Args:
        part: tells which it is.
        state: a state that was saved of it; None: it is asked for its own.
        rate_moves: a schedule moves the rate; one that does not keep where it began tells nothing of the script.
    """
    found: Settings = {}
    if isinstance(part, torch.optim.Optimizer):
        groups = part.param_groups if state is None else _get(state, "param_groups", ())
        for number, group in enumerate(groups):
            prefix = f"group {number}'s " if len(groups) > 1 else ""
            _add_group(prefix, group, found, is_of_torch=_is_of_torch(part))
            if rate_moves and "initial_lr" not in group:
                found.pop(f"{prefix}lr", None)
    else:
        scheduler = part.wrapped if isinstance(part, ReferenceScheduler) else part
        if isinstance(scheduler, LRScheduler) and _is_of_torch(scheduler):
            _add_schedule("", scheduler.state_dict() if state is None else _get(state, "scheduler", state), found)
    return found


def refuse_other_kind(name: str, part: Any, given: Settings, then: Settings) -> None:
    """Refuse the state of another kind of optimizer or schedule.

    Versions of torch add a setting, or leave one out. Another kind does both.

    Args:
        name: what the part is called.
        part: as the script made it.
        given: its settings.
        then: those of the state.

    Raises:
        ConfigError: it is of another kind.
    """
    own, saved = _names_of_kind(given), _names_of_kind(then)
    lacks, has = own - saved, saved - own
    if lacks and has:
        kind = type(getattr(part, "wrapped", part)).__name__
        raise ConfigError(
            f"the {name} is of kind {kind}, and the save was made with another "
            f"({_named(has)} in place of {_named(lacks)}); resume with that one, or give the run another name to begin "
            "anew"
        )


def in_words(name: str, given: Settings, then: Settings) -> str | None:
    """Return which settings of the script are without effect, None if none is."""
    changed = [
        f"{key}={_plain(given[key])!r} (it goes on with {_plain(then[key])!r})"
        for key in given
        if key in then and _plain(given[key]) != _plain(then[key])
    ]
    if not changed:
        return None
    told = ", ".join(changed[:_MOST_TOLD]) + (f" and {len(changed) - _MOST_TOLD} more" * (len(changed) > _MOST_TOLD))
    return (
        f"settings of the {name} are without effect, since it comes back as it was saved: {told}. Set them on it after "
        "it was prepared to have them from here on, or give the run another name to begin anew"
    )


def _names_of_kind(settings: Settings) -> set[str]:
    """Return the names that tell a kind: not how many groups there are, nor what a schedule has begun to move."""
    return {_GROUP.sub("", key) for key in settings} - _CYCLED


def _is_of_torch(part: Any) -> bool:
    """Whether a part is of a kind whose state is known to be told from its settings here."""
    return type(part).__module__.startswith("torch.")


def _add_group(prefix: str, group: Mapping[str, Any], found: Settings, *, is_of_torch: bool) -> None:
    cycled = _CYCLED if group.keys() & {"max_lr", "max_momentum"} else frozenset()
    for key, value in group.items():
        if key not in _HOW | _OF_SCHEDULES | cycled:
            # A schedule moves the rate, and keeps the one that the optimizer was made with.
            made_with = group.get("initial_lr", value) if key == "lr" else value
            found[prefix + key] = made_with if is_of_torch or key in _COMMON else None


def _add_schedule(prefix: str, state: Any, found: Settings) -> None:
    if not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                _add_schedule(f"{prefix}schedule {number + 1}'s ", inner, found)
        elif (key == "_milestones" or not key.startswith("_")) and key not in _PROGRESS:
            found[prefix + key] = value


def _get(state: Any, name: str, otherwise: Any) -> Any:
    return state.get(name, otherwise) if isinstance(state, Mapping) else otherwise


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _named(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_MOST_TOLD])
