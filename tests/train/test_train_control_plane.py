"""One driver at a time trains under a name and storage, on any cluster that both know."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_harness import assert_nothing_left

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError
from rex_ray.train.arrow_store import store_of
from rex_ray.train.control_plane import control_plane, wait_for_its_turn
from rex_ray.train.local_cluster import LocalCluster

pytestmark = pytest.mark.ray


def test_a_second_run_under_one_name_is_refused_before_it_touches_the_first_ones_files(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    store = store_of(str(tmp_path), None, "mine")
    wait_for_its_turn(store, limit_s=0.0)
    journal = tmp_path / "journal"
    journal.mkdir()
    with control_plane(RexConfig(global_batch_size=8), "a" * 12, store, journal, (), None, None):
        with pytest.raises(ConfigError, match=rf"a run is under way in {tmp_path}/mine on this cluster"):
            wait_for_its_turn(store, limit_s=0.3)
        wait_for_its_turn(store_of(str(tmp_path), None, "another"), limit_s=0.0)
    # The first one's end is the second one's turn, without a second try.
    wait_for_its_turn(store)
    assert_nothing_left()
