"""``training``: a session under plain torchrun, with a control server beside rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from rex_ray.config import RexConfig
from rex_ray.core.errors import LinkError, first_line
from rex_ray.hosting.carried_link import CarriedLink
from rex_ray.hosting.control_service import log_to_stderr
from rex_ray.hosting.looking import chosen_watchers, looked_on, plain_settings
from rex_ray.hosting.memory_file import earlier_memory
from rex_ray.hosting.profile_files import profiles_to_begin_with
from rex_ray.standalone.agreeing import Meeting, agreed, side_group
from rex_ray.standalone.control_process import ControlProcess
from rex_ray.standalone.folder_reporter import FolderReporter
from rex_ray.standalone.handshake import new_token
from rex_ray.standalone.launch import Launch, listening_host
from rex_ray.standalone.orders import Orders
from rex_ray.standalone.run_files import digest_of, journal_of_launch, launch_ended
from rex_ray.standalone.tcp_transport import TcpTransport, asker
from rex_ray.watch.backlog import Mark
from rex_ray.watch.seams import RunInfo, Watcher
from rex_ray.worker.group.side_group import distributed
from rex_ray.worker.opening import open_session
from rex_ray.worker.saving.snapshots import SnapshotPlace
from rex_ray.worker.session import Session

__all__ = ["training"]

logger = logging.getLogger("rex_ray")

_FINISH_LIMIT_S: Final = 15.0
_CLOSE_LIMIT_S: Final = 5.0


@contextlib.contextmanager
def training(
    config: RexConfig,
    *,
    output: str | os.PathLike[str],
    device: str | None = None,
    num_to_keep: int | None = 2,
    backend: str | None = None,
    control_address: str | None = None,
    loggers: Sequence[Watcher] = (),
    verbose: bool = True,
) -> Iterator[Session]:
    """Open this rank's session under torchrun; inside, ``rex_ray.get_session()`` returns it, too.

    ``torch.distributed`` is initialised if it is not, and left again then. Training resumes from the newest whole save
    in ``output``, also with another number of ranks. Every rank must pass the same ``config`` and ``output``.

    Args:
        config: what to adapt, within which limits. ``device_label`` and ``placement_timeout_s`` say nothing here.
        output: the run's folder, for saves, journal and profiles. Rank 0 writes to it; where it may move to another
            machine, the folder must be on storage that all of them see.
        device: kind of this rank's device, e.g. ``"T4"``; default: ``REX_RAY_DEVICE``, else the GPU's name.
        num_to_keep: so many of the newest saves are kept; None: all.
        backend: ``torch.distributed`` backend; default NCCL where there are GPUs and gloo elsewhere.
        control_address: address of rank 0's machine at which the control server listens; default:
            ``REX_RAY_CONTROL_ADDRESS``, else loopback on one machine and ``MASTER_ADDR`` on several.
        loggers: who is shown the run while it goes on, in rank 0's process, e.g.
            ``rex_ray.loggers.TensorBoardLogger()``; other ranks ignore them.
        verbose: also show a progress line and a log line for every decision; see ``RexTrainer``.

    Raises:
        ConfigError: not started by torchrun, a configuration that cannot work or differs between ranks, a folder or an
            address that cannot be used; before anything is trained.
        LinkError: ranks, or the control server, did not answer within their limits.
    """
    _log_somewhere()
    watchers = chosen_watchers(loggers, verbose=verbose)
    launch = Launch.from_environment()
    config.check_group(launch.world_size)
    torch_device = _torch_device(launch)
    kind = launch.device_kind(device, torch.cuda.get_device_name(torch_device) if torch_device.type == "cuda" else None)
    run_folder = Path(output).expanduser().absolute()
    options = config.worker_options()
    reporter = FolderReporter(run_folder, num_to_keep, options.storage_retry_s)
    with _process_group(launch, torch_device, backend, config.collective_timeout_s), contextlib.ExitStack() as stack:
        control = _Control(config, run_folder / "rex_ray", launch, control_address, watchers)
        stack.enter_context(control)
        with side_group(config.collective_timeout_s) as group:
            meeting = agreed(group, {**config.to_mapping(), "output": str(run_folder)}, control.open)
        transport = TcpTransport(meeting.address, meeting.token, launch.rank)
        place = SnapshotPlace(run=meeting.run, node=socket.gethostname())
        generation = ""
        try:
            with open_session(
                options=options,
                device=kind,
                node=socket.gethostname(),
                link=CarriedLink(transport, launch.rank, launch.world_size),
                reporter=reporter,
                torch_device=torch_device,
                snapshots=place,
            ) as session:
                generation = session.generation
                yield session
        except Exception as error:
            if generation:
                transport.lost(generation, first_line(error))
            if not launch.may_restart:
                place.remove()
            raise


class _Control:
    """Rank 0's control server, for as long as the block lasts; on other ranks nothing."""

    def __init__(
        self, config: RexConfig, run_dir: Path, launch: Launch, address: str | None, watchers: Sequence[Watcher]
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._launch = launch
        self._address = address
        self._watchers = watchers
        self._process: ControlProcess | None = None
        self._held = contextlib.ExitStack()

    def open(self) -> Meeting:
        """Start the server.

        Raises:
            ConfigError: the folder or the address cannot be used, or profiles cannot be read.
            LinkError: the server does not start.
        """
        config, launch = self._config, self._launch
        learnt = profiles_to_begin_with(config.learn_from, self._run_dir)
        memory = earlier_memory(self._run_dir) if config.learn_from is None else None
        digest = digest_of(config.to_mapping())
        journal = journal_of_launch(self._run_dir, launch.identity, digest)
        orders = Orders(
            config=config,
            journal_dir=journal.directory,
            host=listening_host(launch, self._address),
            port=0,
            token=new_token(),
            num_ranks=launch.world_size,
            learnt=learnt,
            memory=memory,
        )
        self._process = ControlProcess(orders)
        self._held.callback(self._process.close, _CLOSE_LIMIT_S)
        port = self._process.start()
        run = RunInfo(
            name=self._run_dir.parent.name,
            # Each life is begun by watchers of its own, who go on where the dead one's left off.
            run_id=f"{journal.run}-{launch.restart}",
            policy=config.policy,
            settings=plain_settings(config, launch.world_size),
            run_dir=str(self._run_dir),
        )
        ask = asker((orders.host, port), orders.token)
        self._held.enter_context(looked_on(ask, self._watchers, run, Mark.of_this_life()))
        return Meeting(address=(orders.host, port), token=orders.token, run=journal.run)

    def __enter__(self) -> _Control:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._held:
            # torchrun starts the ranks again, and they go on with the journal.
            if not (isinstance(error, Exception) and self._launch.may_restart):
                self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        if self._process is None:
            return
        reason = "finished" if error is None else "interrupted"
        if isinstance(error, Exception):
            reason = f"failed: {first_line(error)}"
        if self._process.finish(reason, _FINISH_LIMIT_S) is None:
            logger.warning("the control server did not end the journal in time; it lacks its last seconds")
        launch_ended(self._run_dir)


@contextlib.contextmanager
def _process_group(launch: Launch, device: torch.device, backend: str | None, limit_s: float) -> Iterator[None]:
    """Have a process group; one that the user has made stays the user's.

    Raises:
        LinkError: the ranks did not find together.
    """
    if distributed():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    try:
        # torchrun's store may outlive a restart, with the dead ranks' addresses in it (torch 2.14): each life has keys
        # of its own.
        c10d: Any = dist  # its stores have no types
        store, rank, world_size = next(c10d.rendezvous("env://", timeout=timedelta(seconds=limit_s)))
        dist.init_process_group(
            chosen,
            store=c10d.PrefixStore(f"rex_ray/life-{launch.restart}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=limit_s),
        )
    except (RuntimeError, ValueError) as error:  # torch's own errors are both
        raise LinkError(
            f"the ranks did not form a process group over {chosen} at {os.environ.get('MASTER_ADDR')}:"
            f"{os.environ.get('MASTER_PORT')} within {limit_s:g} s: {first_line(error)}"
        ) from error
    failed = True
    try:
        yield
        failed = False
    finally:
        # After a failure a collective may be under way that never ends; the process ends with its error instead.
        if not failed:
            dist.destroy_process_group()


def _torch_device(launch: Launch) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


def _log_somewhere() -> None:
    """Have our lines seen where the user has set nothing up; else they go where the user's go."""
    if not logging.getLogger().handlers:
        log_to_stderr()
