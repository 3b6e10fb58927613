"""A probe per kind of node on a real Ray cluster: it finds the kinds, reduces in time and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from train_harness import assert_nothing_left

from rex_ray.train.local_cluster import LocalCluster
from rex_ray.train.preflight import connected, examine

pytestmark = pytest.mark.ray


def test_the_doctor_finds_every_kind_of_node_times_a_reduction_and_leaves_nothing(cluster: LocalCluster) -> None:
    with connected(None):
        found = examine(cluster.device_label, timeout_s=60.0)
    # The head has a CPU for Tune and no label.
    assert sorted(worker.kind for worker in found.workers) == [*sorted(cluster.devices), "cpu"]
    assert {worker.torch for worker in found.workers} == {torch.__version__}
    assert found.backend == "gloo"
    assert found.all_reduce_error is None
    assert 0.0 < (found.all_reduce_s or 0.0) < 60.0
    assert [finding.severity for finding in found.findings] == ["warning"]
    assert "have no label" in found.findings[0].text
    assert_nothing_left()
