"""What torchrun tells its processes, and what of it is the same after it has started them again."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rex_ray.core.errors import ConfigError

__all__ = ["ADDRESS_VARIABLE", "DEVICE_VARIABLE", "Launch", "listening_host"]

DEVICE_VARIABLE: Final = "REX_RAY_DEVICE"
"""Kind of device of this machine's workers: one name, or one per local rank, separated by commas."""

ADDRESS_VARIABLE: Final = "REX_RAY_CONTROL_ADDRESS"
"""Where rank 0's control server listens, and the others find it."""

_NEEDED: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process's place in a launch.

    Attributes:
        rank: of this process.
        world_size: number of processes.
        local_rank: of this process on its machine.
        is_one_node: whether all are on one machine.
        master: address that the others reach rank 0's machine by.
        identity: the same for all lives of one ``torchrun``, another for the next unless ``--rdzv-id`` names it.
        may_restart: whether torchrun starts the processes again if one of them fails now.
        restart: how often it has.
    """

    rank: int
    world_size: int
    local_rank: int
    is_one_node: bool
    master: str
    identity: str
    may_restart: bool
    restart: int

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Launch:
        """Read what torchrun says.

        Raises:
            ConfigError: this process was not started by torchrun; names the command that does.
        """
        given = os.environ if environment is None else environment
        missing = [name for name in _NEEDED if not given.get(name)]
        if missing:
            script = " ".join([sys.argv[0] or "train.py", *sys.argv[1:]])
            raise ConfigError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, so nobody says who trains "
                f"along. Start this script with:  torchrun --standalone --nproc-per-node=2 {script}"
            )
        world_size = _number(given, "WORLD_SIZE", at_least=1)
        restart = _number(given, "TORCHELASTIC_RESTART_COUNT", default=0)
        return cls(
            rank=_number(given, "RANK"),
            world_size=world_size,
            local_rank=_number(given, "LOCAL_RANK"),
            is_one_node=_number(given, "LOCAL_WORLD_SIZE", default=world_size) == world_size,
            master=given["MASTER_ADDR"],
            identity=_identity(given),
            may_restart=_number(given, "TORCHELASTIC_MAX_RESTARTS", default=0) > restart,
            restart=restart,
        )

    def device_kind(self, given: str | None, gpu_name: str | None) -> str:
        """Return the kind of this worker's device: what was given, else the environment's, else the GPU's name.

        Args:
            given: the user's argument, None or empty for none.
            gpu_name: of the GPU, None without one.

        Raises:
            ConfigError: the environment's list is too short for this worker.
        """
        if given:
            return given
        listed = [name.strip() for name in os.environ.get(DEVICE_VARIABLE, "").split(",")]
        if listed == [""]:
            return gpu_name or "cpu"
        if len(listed) == 1:
            return listed[0]
        if self.local_rank >= len(listed) or not listed[self.local_rank]:
            raise ConfigError(
                f"{DEVICE_VARIABLE}={','.join(listed)!r} names no device for local rank {self.local_rank}: give one "
                "name for all, or one per process of this machine"
            )
        return listed[self.local_rank]


def listening_host(launch: Launch, given: str | None) -> str:
    """Return the address at which rank 0's control server listens.

    Loopback as long as all ranks are on one machine: nobody else should be able to try the port. Beyond that, the one
    interface that the others reach rank 0 by anyway, never all of them.

    Args:
        launch: rank 0's.
        given: the user's argument, None for none.
    """
    chosen = given or os.environ.get(ADDRESS_VARIABLE)
    if chosen:
        return chosen
    return "127.0.0.1" if launch.is_one_node else launch.master


def _identity(given: Mapping[str, str]) -> str:
    """The rendezvous' own name, or where it has none, this machine's agent: its number and when it was started."""
    run_id = given.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return re.sub(r"[^\w.-]", "_", run_id)[:64]
    agent = os.getppid()
    try:
        # The 22nd field; the second, a name in brackets, may hold blanks.
        began = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        began = "0"
    return f"{socket.gethostname()}-{agent}-{began}"


def _number(given: Mapping[str, str], name: str, *, at_least: int = 0, default: int | None = None) -> int:
    text = given.get(name, "" if default is None else str(default))
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < at_least:
        raise ConfigError(f"{name}={text!r} must be a whole number of at least {at_least}, as torchrun sets it")
    return number
