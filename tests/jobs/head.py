"""A head with a dashboard as ``ray start --head`` makes it, for jobs: in processes of its own, on the loopback only."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from rex_ray.train.local_cluster import QUIET_ENVIRONMENT

LOOPBACK_RAY = Path(__file__).with_name("loopback_ray.py")
# The first start of Ray on a busy machine; on a quiet one it takes ten seconds.
START_LIMIT_S = 180.0
START_TRIES = 3
# Processes of Ray's that outlive jobs.
RESIDENTS = ("DashboardAgent", "RuntimeEnvAgent", "IDLE", "_AutoscalingCoordinatorActor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A running head.

    Attributes:
        process: of ``ray start --head --block``.
        address: for ``ray.init`` and ``ray start --address``.
        environment: in which to speak to it.
        folder: of its session.
    """

    process: subprocess.Popen[bytes]
    address: str
    environment: Mapping[str, str]
    folder: Path

    def command(self, *words: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run a command that knows of the head; stdout and stderr are one."""
        return subprocess.run(
            words,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def ray(self, *words: str, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run ``ray ...``."""
        return self.command(sys.executable, str(LOOPBACK_RAY), *words, limit_s=limit_s)

    def submit(self, job_id: str, folder: Path, *entrypoint: str, wait: bool = True) -> tuple[int, str]:
        """Run ``ray job submit``; return its exit code and what it printed."""
        flags = ["--submission-id", job_id, "--working-dir", str(folder), *([] if wait else ["--no-wait"])]
        done = self.ray("job", "submit", *flags, "--", *entrypoint)
        return done.returncode, done.stdout

    def jobs_processes(self) -> list[str]:
        """Return titles of the processes below the head that are there for some job."""
        titles = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                titles.append(" ".join(process.cmdline()))
        return [title for title in titles if title.startswith("ray::") and not any(name in title for name in RESIDENTS)]


def wait_for(what: Callable[[], object], limit_s: float, named: str) -> None:
    """Wait until ``what`` gives something true."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, f"{named}: not within {limit_s:g} s"
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def started(words: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Have a node of ``ray start ... --block``, until it is ended as a system's shutdown would end it."""
    for _ in range(START_TRIES):
        process = _begun(words, environment, log)
        # Ray gives a node 30 s to come up, which no setting changes and a busy machine exceeds.
        if process.poll() is None or "timed out during startup" not in log.read_text():
            break
        _ended(process)
    try:
        assert process.poll() is None, log.read_text()[-4000:]
        yield process
    finally:
        _ended(process)


def _begun(words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    # The agent's port is a fixed one unless told otherwise, and a node whose agent finds it taken does not start.
    (agent,) = _free_ports(1)
    own = ["--block", "--node-ip-address", "127.0.0.1", "--dashboard-agent-listen-port", str(agent)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(LOOPBACK_RAY), "start", *own, *words],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(lambda: process.poll() is not None or "block forever" in log.read_text(), START_LIMIT_S, "ray start")
    except BaseException:
        _ended(process)
        raise
    return process


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a node and all that it started; of one that gave up, its session's processes are left to find."""
    family = [each for each in psutil.process_iter() if _is_of_session(each, process.pid)]
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15.0)
    process.kill()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def _is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session != process.pid
    except ProcessLookupError:
        return False


@contextlib.contextmanager
def running_head(*, num_cpus: int, labels: str) -> Iterator[Head]:
    """Have a head that asks for a token, as Ray does by default where one exists."""
    folder = Path(tempfile.mkdtemp(prefix="rexj-", dir="/tmp"))  # sockets lie below it: a short path
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard, client = _free_ports(3)
    environment = {
        **os.environ,
        **QUIET_ENVIRONMENT,
        # A job's `python` is the first that the head finds, as in a virtual environment that was activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        # Three seconds by default, and then SIGKILL.
        "RAY_JOB_STOP_WAIT_TIME_S": "60",
    }
    environment.pop("RAY_ADDRESS", None)
    words = ["--head", "--port", str(gcs), "--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)]
    words += ["--ray-client-server-port", str(client)]
    words += ["--num-cpus", str(num_cpus), "--labels", labels, "--object-store-memory", str(80 * 2**20)]
    try:
        with started(words, environment, folder / "head.log") as process:
            yield Head(process=process, address=f"127.0.0.1:{gcs}", environment=environment, folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
