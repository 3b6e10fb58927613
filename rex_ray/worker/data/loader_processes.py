"""A rank's loader processes, or this process in their place: torch's DataLoader, and how its processes begin."""

from __future__ import annotations

import hashlib
import logging
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from rex_ray.core.errors import ConfigError, DataError, RexError
from rex_ray.worker.data.copied_settings import Settings, settings_of
from rex_ray.worker.data.dataloader import num_processes

__all__ = ["LoaderProcesses"]

_log = logging.getLogger("rex_ray")

_MOST_NAMED_CHANGES = 4


class LoaderProcesses:
    """Has ``reader`` answer each of ``requests`` with a whole batch, pass after pass.

    Args:
        reader: collates too, in whichever process it is read; keeps the user's data set as ``dataset``.
        requests: what the reader's ``__getitems__`` is asked, in order.
        options: the user's DataLoader options, without ``collate_fn``.
        rank: whose processes.
    """

    def __init__(self, reader: Any, requests: Iterable[list[Any]], options: dict[str, Any], rank: int) -> None:
        self._reader = reader
        self._requests = requests
        self._options = dict(options)
        self._has_processes = num_processes(options) > 0
        if self._has_processes:
            # Starting loader processes anew for each epoch costs more than a small epoch.
            self._options.setdefault("persistent_workers", True)
            self._options["worker_init_fn"] = _InitProcess(options.get("worker_init_fn"), rank)
        self._loader: DataLoader[Any] | None = self._made()
        self._copied: Settings | None = None

    def begin(self) -> Iterator[Any]:
        """Begin a pass; what an earlier one has drawn is dropped.

        Raises:
            ConfigError: the data set, or what was given with it, cannot be sent to a process.
            DataError: the system starts no process.
        """
        assert self._loader is not None
        if not self._has_processes:
            return iter(self._loader)
        settings = settings_of(self._reader.dataset)
        if self._copied is not None and settings != self._copied:
            _log.info("the data set was changed (%s): its loader processes begin anew", _told(self._copied, settings))
            self._loader = self._made()
        self._copied = settings
        try:
            return iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"the {type(self._reader.dataset).__name__} cannot be sent to a loader process ({error}): give it, its "
                "collate_fn and its worker_init_fn functions and classes of a module's top level in place of lambdas "
                "and local ones, open files and connections in the process that reads them, or set "
                "multiprocessing_context='fork' or num_workers=0"
            ) from error
        except RexError:
            raise
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"rank {self._options['worker_init_fn'].rank}: the {self._options['num_workers']} loader processes "
                f"cannot be started ({error}): use fewer num_workers"
            ) from error

    def stop(self) -> None:
        """Let go of the processes."""
        self._loader = self._copied = None

    def _made(self) -> DataLoader[Any]:
        return DataLoader(self._reader, batch_sampler=self._requests, collate_fn=_as_it_is, **self._options)


class _InitProcess:
    """What a loader process does first.

    It shows the user's data set instead of the reader around it, and has random numbers of its rank's own: torch seeds
    it from the training process's generator, which ``torch.manual_seed(0)`` in the loop makes alike on all ranks.

    Args:
        users: called last.
        rank: whose process.
    """

    def __init__(self, users: Callable[[int], None] | None, rank: int) -> None:
        self._users = users
        self.rank = rank

    def __call__(self, process: int) -> None:
        info: Any = get_worker_info()
        # The info refuses to be changed, but what a user looks for there, to divide a stream, is the user's own.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self.rank:  # the first rank's are those of plain torch
            digest = hashlib.sha256(f"{info.seed}/{self.rank}".encode()).digest()
            seed = int.from_bytes(digest[:8], "big") >> 1
            object.__setattr__(info, "seed", seed)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 - the generator that users' transforms draw from
        if self._users is not None:
            self._users(process)


def _as_it_is(batch: Any) -> Any:
    return batch


def _told(before: Settings, after: Settings) -> str:
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return ", ".join(changed[:_MOST_NAMED_CHANGES]) + (", ..." if len(changed) > _MOST_NAMED_CHANGES else "")
