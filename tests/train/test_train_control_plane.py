"""One driver at a time trains under a name and storage, on any cluster that both know."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.fs
import pytest
from train_harness import assert_nothing_left

from rex_ray.core.errors import ConfigError
from rex_ray.train.arrow_store import store_of
from rex_ray.train.control_plane import queue_of
from rex_ray.train.local_cluster import LocalCluster

pytestmark = pytest.mark.ray


def test_of_drivers_that_begin_one_run_at_once_one_has_it_and_its_end_is_the_next_ones_turn(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    store = store_of(str(tmp_path), None, "mine")
    begin, refused = threading.Barrier(3), threading.Semaphore(0)

    def drive() -> str:
        begin.wait(timeout=30)
        try:
            with queue_of(store, limit_s=0.3):
                for _ in range(2):
                    assert refused.acquire(timeout=30)
                return "had it"
        except ConfigError as error:
            refused.release()
            return str(error)

    with ThreadPoolExecutor(3) as drivers:
        told = sorted(future.result() for future in [drivers.submit(drive) for _ in range(3)])
    assert told[2] == "had it"
    assert all(f"a run is under way in {tmp_path}/mine on this cluster" in text for text in told[:2])
    with queue_of(store) as queue:
        queue.put("a batch")
        with queue_of(store_of(str(tmp_path), None, "another"), limit_s=0.0):
            pass
        # The same path, on different parts of a file system.
        parts = [pyarrow.fs.SubTreeFileSystem(f"{tmp_path}/{part}", pyarrow.fs.LocalFileSystem()) for part in "ab"]
        with queue_of(store_of("runs", parts[0], "mine")), queue_of(store_of("runs", parts[1], "mine"), limit_s=0.0):
            pass
    assert_nothing_left()
