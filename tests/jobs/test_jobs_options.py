"""What a workload's command line says on a cluster: elastic groups, patience with the cloud, storage for all nodes."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rex_ray.core.errors import ConfigError
from workloads.arguments import Parser
from workloads.base import _num_workers, add_common_arguments, checked


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_common_arguments(parser, global_batch_size=128, num_epochs=1)
    return checked(parser, words)


def test_a_group_is_elastic_only_when_asked_to_be() -> None:
    assert _num_workers(parsed("--num-workers", "4")) == 4
    assert _num_workers(parsed("--num-workers", "4", "--min-workers", "4")) == 4
    assert _num_workers(parsed("--num-workers", "4", "--min-workers", "2")) == (2, 4)


def test_fewest_workers_above_the_most_are_refused() -> None:
    with pytest.raises(ConfigError, match="--min-workers 5 is above --num-workers 4"):
        parsed("--num-workers", "4", "--min-workers", "5")


def test_the_wait_for_nodes_is_the_runs_own() -> None:
    assert parsed("--placement-timeout", "900").rex_config.placement_timeout_s == 900.0
    with pytest.raises(ConfigError, match="placement-timeout"):
        parsed("--placement-timeout", "0")


def test_an_address_is_kept_and_a_folder_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed("--storage", "s3://bucket/runs").storage == "s3://bucket/runs"
    monkeypatch.chdir(tmp_path)
    assert parsed("--storage", "runs").storage == str(tmp_path / "runs")
