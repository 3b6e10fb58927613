"""The cluster files that we ship are ones that Ray's launcher accepts, and their labels are those that we read."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rex_ray.config import RexConfig

ROOT = Path(__file__).parents[2]
LABEL = RexConfig(global_batch_size=1024).device_label


@pytest.fixture(params=["cluster.yaml", "deploy/gcp.yaml"])
def cluster(request: pytest.FixtureRequest) -> dict[str, Any]:
    return yaml.safe_load((ROOT / request.param).read_text())


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    spec = find_spec("ray")  # locates the package without importing Ray
    assert spec is not None
    assert spec.origin is not None
    return json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())


def device_types(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: node for name, node in cluster["available_node_types"].items() if node["resources"].get("GPU", 0)}


def test_a_cluster_file_meets_rays_own_schema(cluster: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(cluster, schema)


def test_the_schema_check_can_fail(cluster: dict[str, Any], schema: dict[str, Any]) -> None:
    cluster["available_node_types"]["worker-t4"]["lables"] = {}
    with pytest.raises(jsonschema.ValidationError, match="lables"):
        jsonschema.validate(cluster, schema)


def test_rays_launcher_fills_a_cluster_file_in_and_accepts_it(cluster: dict[str, Any]) -> None:
    """What ``ray up`` does before it speaks to the cloud."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    before = copy.deepcopy(cluster)
    filled = prepare_config(cluster)
    validate_config(filled)
    assert (
        filled["available_node_types"]["worker-t4"]["labels"] == (before["available_node_types"]["worker-t4"]["labels"])
    )
    assert filled["max_workers"] == before["max_workers"] == 4


def test_every_node_type_with_a_device_names_it_and_how_it_is_rented(cluster: dict[str, Any]) -> None:
    labels = [node["labels"] for node in device_types(cluster).values()]
    assert {each[LABEL] for each in labels} == {"T4", "V100"}
    assert {each["ray.io/market-type"] for each in labels} == {"spot", "on-demand"}


def test_a_node_type_is_a_spot_one_exactly_where_its_label_says_so(cluster: dict[str, Any]) -> None:
    for node in device_types(cluster).values():
        config = node["node_config"]
        is_spot = (
            config.get("InstanceMarketOptions") == {"MarketType": "spot"}
            or config.get("scheduling", {}).get("provisioningModel") == "SPOT"
        )
        assert is_spot == (node["labels"]["ray.io/market-type"] == "spot")


def test_a_spot_type_has_the_same_machine_on_demand_to_fall_back_on(cluster: dict[str, Any]) -> None:
    nodes = device_types(cluster)
    spot, fall_back = copy.deepcopy(nodes["worker-t4"]), copy.deepcopy(nodes["worker-t4-on-demand"])
    assert spot.get("priority", 0) > fall_back.pop("priority")
    for node in (spot, fall_back):
        node["labels"].pop("ray.io/market-type")
        for market in ("InstanceMarketOptions", "scheduling"):
            node["node_config"].pop(market, None)
    assert spot == fall_back


def test_the_head_holds_no_device_and_the_counts_fit_the_maximum(cluster: dict[str, Any]) -> None:
    nodes = dict(cluster["available_node_types"])
    head = nodes.pop(cluster["head_node_type"])
    assert "GPU" not in head["resources"]
    assert sum(node["min_workers"] for node in nodes.values()) <= cluster["max_workers"]
    assert {kind for node in nodes.values() for kind in [node["labels"][LABEL]] if node["max_workers"] >= 2} == (
        {"T4", "V100"}
    )


def test_nothing_but_ssh_reaches_the_dashboard(cluster: dict[str, Any]) -> None:
    """Whoever reaches it runs what they like."""
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]
