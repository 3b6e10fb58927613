"""The manifests for KubeRay: what can be known of them without a Kubernetes.

That their fields are those of the CRD (KubeRay 1.7, ``ray.io/v1``) was checked against its OpenAPI schema, which is not
copied here; what is checked here are the rules that KubeRay's operator adds, Ray's own reading of the groups, which
is what its autoscaler works from, and the commands inside.
"""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rex_ray.config import RexConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
LABEL = RexConfig(global_batch_size=1024).device_label
# Of the CRD, those that are used or likely to be: one that is misspelt is dropped by Kubernetes without an error.
CLUSTER_FIELDS = {
    "rayVersion",
    "authOptions",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "labels", "resources", "rayStartParams"}
GROUP_FIELDS |= {"template", "priority", "idleTimeoutSeconds"}
JOB_FIELDS = {"entrypoint", "runtimeEnvYAML", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
JOB_FIELDS |= {"preRunningDeadlineSeconds", "activeDeadlineSeconds", "submitterConfig", "rayClusterSpec"}


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.fixture(params=["raycluster.yaml", "rayjob.yaml"])
def spec(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The spec of a cluster: a manifest's own, or the one that a job brings."""
    found = manifest(request.param)["spec"]
    return found.get("rayClusterSpec", found)


@pytest.fixture
def job() -> dict[str, Any]:
    return manifest("rayjob.yaml")["spec"]


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def test_kinds_versions_and_names_are_the_operators() -> None:
    kinds = {"raycluster.yaml": "RayCluster", "rayjob.yaml": "RayJob"}
    for name, kind in kinds.items():
        found = manifest(name)
        assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", found["metadata"]["name"])


def test_no_field_is_unknown(spec: dict[str, Any], job: dict[str, Any]) -> None:
    assert set(spec) <= CLUSTER_FIELDS
    assert set(job) <= JOB_FIELDS
    for group in groups(spec):
        assert set(group) <= GROUP_FIELDS
        assert set(group["template"]) <= {"metadata", "spec"}


def test_two_groups_of_workers_are_labelled_with_their_card(spec: dict[str, Any]) -> None:
    assert [group["labels"][LABEL] for group in spec["workerGroupSpecs"]] == ["T4", "V100"]
    for group in spec["workerGroupSpecs"]:
        resources = group["template"]["spec"]["containers"][0]["resources"]
        assert resources["limits"] == resources["requests"]  # a guaranteed pod is the last to be evicted
        assert resources["limits"]["nvidia.com/gpu"] == "1"
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["minReplicas"] < group["maxReplicas"]  # elastic


def test_a_group_keeps_to_the_rules_of_the_operator(spec: dict[str, Any]) -> None:
    """Labels in one place, resources in one place, and no restart of pods that the autoscaler replaces."""
    qualified = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
    for group in groups(spec):
        parameters = group["rayStartParams"]
        assert "labels" not in parameters
        assert not (group.get("resources") and parameters.keys() & {"num-cpus", "num-gpus", "memory", "resources"})
        assert group["template"]["spec"].get("restartPolicy", "Never") == "Never"
        for key, value in group.get("labels", {}).items():
            assert qualified.fullmatch(key)
            assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", value)


def test_the_start_parameters_and_labels_are_ones_that_ray_start_takes(spec: dict[str, Any]) -> None:
    from ray._private.label_utils import parse_node_labels_string
    from ray.scripts.scripts import start

    options = {option for parameter in start.params for option in parameter.opts}
    for group in groups(spec):
        assert {f"--{name}" for name in group["rayStartParams"]} <= options
        labels = group.get("labels", {})
        # The operator joins them so, sorted by key.
        assert parse_node_labels_string(",".join(f"{key}={labels[key]}" for key in sorted(labels))) == labels


def test_rays_autoscaler_reads_cards_labels_and_counts_off_the_groups(spec: dict[str, Any]) -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    config = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "rex-ray", "namespace": "default"}, "spec": spec}
    )
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    jsonschema.validate(config, json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text()))
    types = config["available_node_types"]
    assert types.pop(config["head_node_type"])["resources"]["CPU"] == 0
    assert {node["labels"][LABEL]: (node["resources"]["GPU"], node["max_workers"]) for node in types.values()} == {
        "T4": (1, 2),
        "V100": (1, 2),
    }


def test_spot_pods_tolerate_what_keeps_others_off_spot_nodes(spec: dict[str, Any]) -> None:
    for group in spec["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        tolerated = {toleration["key"] for toleration in pod["tolerations"]}
        is_spot = group["labels"]["ray.io/market-type"] == "spot"
        assert is_spot == ("cloud.google.com/gke-spot" in pod["nodeSelector"])
        assert is_spot == ("cloud.google.com/gke-spot" in tolerated)
        assert "nvidia.com/gpu" in tolerated


def test_every_mount_has_its_volume_and_all_pods_share_the_results(spec: dict[str, Any]) -> None:
    for group in groups(spec):
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        assert mounts["shared"] == "/mnt/shared"


def test_ray_is_the_same_version_everywhere(spec: dict[str, Any]) -> None:
    image = re.search(r"FROM rayproject/ray:([\d.]+)-", (FOLDER / "Dockerfile").read_text())
    assert image is not None
    assert image.group(1) == spec["rayVersion"]
    for name in ("cluster.yaml", "deploy/gcp.yaml"):
        assert f"rayproject/ray:{spec['rayVersion']}-" in (ROOT / name).read_text()
    assert len({group["template"]["spec"]["containers"][0]["image"] for group in groups(spec)}) == 1


def test_nobody_runs_anything_without_the_token(spec: dict[str, Any]) -> None:
    assert spec["authOptions"] == {"mode": "token"}


def test_a_job_takes_its_cluster_down_and_is_not_tried_for_ever(job: dict[str, Any]) -> None:
    assert job["shutdownAfterJobFinishes"] is True
    assert job["ttlSecondsAfterFinished"] >= 0
    assert 0 < job["backoffLimit"] <= 5
    assert 0 < job["preRunningDeadlineSeconds"] < job["activeDeadlineSeconds"]


def test_a_jobs_runtime_environment_is_one_that_ray_takes(job: dict[str, Any]) -> None:
    from ray.runtime_env import RuntimeEnv

    environment = RuntimeEnv(**yaml.safe_load(job["runtimeEnvYAML"]))
    assert environment["working_dir"] == "local:///opt/rex_ray"
    assert "/opt/rex_ray" in (FOLDER / "Dockerfile").read_text()


@pytest.mark.parametrize("where", ["rayjob.yaml", "cluster.yaml", "gcp.yaml"])
def test_the_command_is_one_that_the_workload_takes(where: str, job: dict[str, Any]) -> None:
    from workloads.arguments import Parser
    from workloads.base import add_common_arguments, checked

    if where == "rayjob.yaml":
        command = job["entrypoint"]
    else:
        text = (ROOT / where if where == "cluster.yaml" else ROOT / "deploy" / where).read_text()
        lines = [line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#   ")]
        command = re.search(r"-- (python .*?) (?:ray|$)", " ".join(lines).replace("\\ ", "")).group(1)  # type: ignore[union-attr]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "workloads.cifar"]
    parser = Parser()
    parser.add_argument("--data-dir")
    add_common_arguments(parser, global_batch_size=128, num_epochs=60)
    options = checked(parser, [word if word != "/mnt/shared/runs" else "s3://bucket/runs" for word in words[3:]])
    assert (options.min_workers, options.num_workers, options.label_selector) == (2, 4, "in(T4,V100)")
    assert options.placement_timeout_s >= 600  # machines take minutes to start


def test_the_image_holds_nothing_that_git_ignores() -> None:
    # A clone in which `make demo` ran has gigabytes of packages in .venv, which `COPY . ` would take along.
    left_out = {line.removeprefix("**/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    ignored = {line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line}
    assert ignored | {".git"} <= left_out
