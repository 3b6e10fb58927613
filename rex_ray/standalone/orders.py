"""What rank 0 and the control server's process say to one another over its pipes: lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError
from rex_ray.core.kind_profiles import profiles_from_json, profiles_to_json
from rex_ray.core.types import LearntShape

__all__ = ["Orders", "line", "said"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a control server is told when it starts, and again when it is started anew.

    Attributes:
        config: what to adapt and how.
        journal_dir: of the journal; if it holds one, the server goes on from it.
        host: address to listen on.
        port: likewise; 0: any free one.
        token: the run's.
        num_ranks: size of the group.
        learnt: what is known of kinds of device from earlier jobs.
        memory: what an earlier controller of the run knew.
    """

    config: RexConfig
    journal_dir: Path
    host: str
    port: int
    token: str
    num_ranks: int
    learnt: tuple[LearntShape, ...] = ()
    memory: str | None = None

    def to_line(self) -> bytes:
        """Return the orders as a line.

        Raises:
            ConfigError: the configuration holds what no configuration file could.
        """
        try:
            return line(
                {
                    "config": self.config.to_mapping(),
                    "journal_dir": str(self.journal_dir),
                    "host": self.host,
                    "port": self.port,
                    "token": self.token,
                    "num_ranks": self.num_ranks,
                    "learnt": profiles_to_json(self.learnt),
                    "memory": self.memory,
                }
            )
        except TypeError as error:
            raise ConfigError(
                f"the configuration holds a value that cannot be written ({error}): use plain numbers, texts, lists "
                "and mappings in policy_options"
            ) from error

    @classmethod
    def from_line(cls, data: bytes) -> Orders:
        """Read them back.

        Raises:
            ValueError: they are none.
        """
        values = said(data)
        return cls(
            config=RexConfig.from_mapping(values["config"]),
            journal_dir=Path(values["journal_dir"]),
            host=values["host"],
            port=values["port"],
            token=values["token"],
            num_ranks=values["num_ranks"],
            learnt=profiles_from_json(values["learnt"].encode()),
            memory=values["memory"],
        )


def line(document: Mapping[str, Any]) -> bytes:
    """Return a document as a line."""
    return json.dumps(document).encode() + b"\n"


def said(data: bytes) -> dict[str, Any]:
    """Return the document in a line.

    Raises:
        ValueError: there is none.
    """
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError(f"a line holds a {type(document).__name__}")  # noqa: TRY004 - the line is what is wrong
    return document
