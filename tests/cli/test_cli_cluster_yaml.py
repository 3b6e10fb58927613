"""The cluster file that we ship is one that Ray's launcher accepts, and its labels are those that the library reads."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rex_ray.config import RexConfig

CLUSTER_FILE = Path(__file__).parents[2] / "cluster.yaml"


@pytest.fixture
def cluster() -> dict[str, Any]:
    return yaml.safe_load(CLUSTER_FILE.read_text())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    spec = find_spec("ray")  # locates the package without importing Ray
    assert spec is not None
    assert spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def test_cluster_yaml_meets_rays_own_schema(cluster: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(cluster, schema)


def test_the_schema_check_can_fail(cluster: dict[str, Any], schema: dict[str, Any]) -> None:
    cluster["available_node_types"]["worker-t4"]["lables"] = {}
    with pytest.raises(jsonschema.ValidationError, match="lables"):
        jsonschema.validate(cluster, schema)


def test_every_gpu_node_type_names_its_device_under_the_default_label(cluster: dict[str, Any]) -> None:
    label = RexConfig(global_batch_size=1024).device_label
    kinds = {
        node["labels"][label] for node in cluster["available_node_types"].values() if node["resources"].get("GPU", 0)
    }
    assert kinds == {"T4", "V100"}


def test_the_head_holds_no_device_and_the_counts_fit_the_maximum(cluster: dict[str, Any]) -> None:
    nodes = dict(cluster["available_node_types"])
    head = nodes.pop(cluster["head_node_type"])
    assert "GPU" not in head["resources"]
    assert sum(node["min_workers"] for node in nodes.values()) <= cluster["max_workers"]
