"""What a DataLoader that a script has made already says of its data, once the session decides who gets which rows."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from rex_ray.core.errors import ConfigError
from rex_ray.worker.user_warning import warn

__all__ = ["evaluation_data", "training_data"]

_COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "in_order")
"""Options that mean the same whoever chooses the rows."""

_COPIED_IF_SET = ("multiprocessing_context", "prefetch_factor", "persistent_workers")
"""... and which a DataLoader refuses, or the session sets otherwise, where the script did not ask for them."""


def training_data(given: Any, options: dict[str, Any], global_batch_size: int) -> tuple[Any, dict[str, Any]]:
    """Return the data set to train on, and DataLoader options: what was given, or what a DataLoader says of both.

    Its batch size is a check only: the allocation decides.

    Args:
        given: a data set of any kind, or a DataLoader.
        options: given beside it; they come before the DataLoader's own.
        global_batch_size: rows per step over all ranks that the run begins with.

    Raises:
        ConfigError: a DataLoader that chooses rows in a way that would be lost: a sampler of its own, no shuffling,
            batches that the data set makes.
    """
    if not isinstance(given, DataLoader):
        return given, options
    loader = given
    batch_size = _batch_size(loader, "session.loader")
    sampler, num_replicas = loader.sampler, 1
    if isinstance(sampler, DistributedSampler):
        num_replicas = sampler.num_replicas
    if not isinstance(loader.dataset, IterableDataset):
        _refuse_lost_order(sampler)
    if loader.drop_last:
        warn(
            "the DataLoader that became the training loader has drop_last=True; here every row is seen once per "
            "epoch, also those of its last batch, which is weighted by its real rows"
        )
    if batch_size * num_replicas != global_batch_size:
        warn(
            f"the DataLoader that became the training loader has batch_size={batch_size}"
            + (f" on {num_replicas} ranks" if num_replicas > 1 else "")
            + f", and the run's global_batch_size is {global_batch_size} rows over all workers, which is what counts; "
            "a schedule made for len() of that DataLoader ends elsewhere"
        )
    return loader.dataset, _options(loader) | options


def evaluation_data(given: Any, local_batch_size: int, options: dict[str, Any]) -> tuple[Any, int, dict[str, Any]]:
    """Return the data set to evaluate with, rows per batch, and options: what was given, or what a DataLoader says.

    Raises:
        ConfigError: a DataLoader that leaves rows out or repeats some, or has batches of its own.
    """
    if not isinstance(given, DataLoader):
        return given, local_batch_size, options
    loader = given
    batch_size = _batch_size(loader, "session.eval_loader")
    if loader.drop_last:
        raise ConfigError(
            "the DataLoader given to session.eval_loader has drop_last=True, and here every row is evaluated once; "
            "leave drop_last out, or cut the data set with torch.utils.data.Subset"
        )
    sampler = loader.sampler
    every_row_once = isinstance(sampler, (InOrder, DistributedSampler)) or _is_plain_shuffle(sampler)
    if not isinstance(loader.dataset, IterableDataset) and not every_row_once:
        raise ConfigError(
            f"the DataLoader given to session.eval_loader has a {type(sampler).__name__}, whose choice of rows would "
            "be lost: every row is evaluated once; choose rows with torch.utils.data.Subset"
        )
    return loader.dataset, batch_size, _options(loader) | options


def _batch_size(loader: DataLoader[Any], call: str) -> int:
    if loader.batch_size is None or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise ConfigError(
            f"the DataLoader given to {call} has batches of its own (batch_size=None, or a batch_sampler), and the "
            "session decides how many rows a rank gets; make it with batch_size=..., or give the data set itself"
        )
    return int(loader.batch_size)


def _refuse_lost_order(sampler: object) -> None:
    """Refuse what the session's own order, a new shuffle of all rows per epoch, would silently replace."""
    if _is_plain_shuffle(sampler) or (isinstance(sampler, DistributedSampler) and sampler.shuffle):
        return
    if isinstance(sampler, (InOrder, DistributedSampler)):
        raise ConfigError(
            "the DataLoader given to session.loader does not shuffle, and each epoch has an order of its own here, "
            "drawn from RexConfig.seed; make it with shuffle=True (of several DataLoaders, session.prepare takes the "
            "first for training)"
        )
    raise ConfigError(
        f"the DataLoader given to session.loader has a {type(sampler).__name__}, whose choice of rows would be lost: "
        "every row is seen once per epoch in one global order; wrap the data set to choose rows"
    )


def _is_plain_shuffle(sampler: object) -> bool:
    if type(sampler) is not RandomSampler:
        return False
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    options = {name: getattr(loader, name) for name in _COPIED if hasattr(loader, name)}
    return options | {name: value for name in _COPIED_IF_SET if (value := getattr(loader, name))}
