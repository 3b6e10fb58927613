"""Where a configuration's values come from: defaults, then a file, then the environment, then whoever calls.

The environment counts only where it is asked for, by ``RexConfig.load``: a configuration that is written in code is
never changed from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rex_ray.config.checks import RULES, problems_of
from rex_ray.config.plain_yaml import read_document, read_value
from rex_ray.core.errors import ConfigError, nearest_name_hint

__all__ = ["ENVIRONMENT_PREFIX", "RESERVED", "Layers"]

ENVIRONMENT_PREFIX = "REX_RAY_"
"""Of every variable that overrides a key."""

RESERVED = frozenset({"REX_RAY_CONTROL_ADDRESS", "REX_RAY_DEVICE"})
"""Variables of ours that are none of the configuration: they tell a process of a group where it is."""

_NESTED = "__"
_MOST_UNKNOWN = 10
_OPTIONS = "policy_options"


@dataclass(slots=True, kw_only=True)
class Layers:
    """Values gathered so far, each with its origin; later layers lie above earlier ones.

    Attributes:
        defaults: by key; a key that is missing here has to come from a layer.
        values: by key, of all layers but the defaults.
        origins: where each of ``values`` comes from, in words; an option of the policy has an entry of its own.
        problems: what could not even be read, in words.
    """

    defaults: Mapping[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add_file(self, path: str | Path) -> None:
        """Add what a YAML file holds; what is wrong with it becomes a problem.

        Raises:
            ConfigError: the file cannot be read, or is no YAML mapping.
        """
        try:
            document = read_document(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # ValueError: no text, or no YAML
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(f"cannot read the configuration {str(path)!r}: {why}") from error
        if not isinstance(document.value, Mapping):
            held = "nothing" if document.value is None else type(document.value).__name__
            raise ConfigError(
                f"the configuration {str(path)!r} must map names to values, such as 'global_batch_size: 256'; "
                f"it holds {held}"
            )
        self.add_mapping(document.value, {key: f"{path}:{line}" for key, line in document.lines.items()}, str(path))

    def add_mapping(
        self, values: Mapping[Any, Any], origins: Mapping[tuple[str, ...], str] | None = None, origin: str = ""
    ) -> None:
        """Add plain values by key.

        Args:
            values: of a file, of a command line or of code.
            origins: where each of them comes from, where that is finer than ``origin``.
            origin: in words; empty where the value itself says enough.
        """
        unknown = [key for key in values if key not in RULES]
        for key in unknown[:_MOST_UNKNOWN]:
            hint = nearest_name_hint(str(key), RULES)
            hint = "" if any(problem.endswith(hint) for problem in self.problems) else hint  # the list of all, once
            where = (origins or {}).get((str(key),), origin)
            self.problems.append(_placed(where, f"unknown key {key!r} in the configuration{hint}"))
        if len(unknown) > _MOST_UNKNOWN:
            self.problems.append(
                _placed(
                    origin, f"{len(unknown) - _MOST_UNKNOWN} more unknown keys: is this a configuration of RexConfig?"
                )
            )
        for key, value in values.items():
            where = (origins or {}).get((str(key),), origin)
            if key not in RULES:
                continue
            self._set(key, value, where)
            if isinstance(value, Mapping):
                for name in value:
                    self.origins[key, str(name)] = (origins or {}).get((key, str(name)), where)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Add ``REX_RAY_<KEY>`` and ``REX_RAY_POLICY_OPTIONS__<OPTION>``, whose values are read as in a file.

        A name that begins so and means nothing becomes a problem: it was surely meant to do something.
        """
        ours = sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX) and name not in RESERVED)
        for variable in ours:  # POLICY_OPTIONS sorts before POLICY_OPTIONS__MIN_GAIN, which changes a part of it
            key, nested, option = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition(_NESTED)
            if key not in RULES or (nested and (key != _OPTIONS or not option)):
                known = [f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in RULES]
                self.problems.append(
                    f"unknown variable {variable} in the environment{nearest_name_hint(variable, known)}"
                )
                continue
            text = environ[variable]
            try:
                value = read_value(text)
            except ValueError as error:
                self.problems.append(f"{variable}: {text!r} cannot be read as a value: {error}")
                continue
            if not text.strip():
                self.problems.append(f"{variable} is empty: give it a value, or unset it")
            elif not nested:
                self.add_mapping({key: value}, origin=variable)
            elif isinstance(present := self.values.get(_OPTIONS, {}), Mapping):
                self.values[_OPTIONS] = {**present, option: value}
                self.origins.setdefault((_OPTIONS,), variable)
                self.origins[_OPTIONS, option] = variable

    def effective(self) -> dict[str, Any]:
        """Return a value for every key.

        Raises:
            ConfigError: all that is wrong, each with its place; a line per problem.
        """
        found = [*self.problems]
        missing = [name for name in RULES if name not in self.defaults and name not in self.values]
        if missing:
            found.append("the configuration lacks global_batch_size: rows per optimizer step over all workers")
        values = {name: self.values.get(name, self.defaults.get(name, 1)) for name in RULES}
        found += [
            _placed(self.origin_of(problem.key), problem.text)
            for problem in problems_of(values)
            if problem.key[0] not in missing  # what stands in for a missing value is not to blame
        ]
        if found:
            raise ConfigError("\n".join(found))
        return values

    def origin_of(self, key: Iterable[str]) -> str:
        """Return where a key's value, or an option's, comes from in words; empty for a default."""
        place = tuple(key)
        return self.origins.get(place) or self.origins.get(place[:1], "")

    def _set(self, key: str, value: Any, origin: str) -> None:
        for place in [place for place in self.origins if place[0] == key]:
            del self.origins[place]
        self.values[key] = value
        self.origins[(key,)] = origin


def _placed(origin: str, text: str) -> str:
    return f"{origin}: {text}" if origin else text
