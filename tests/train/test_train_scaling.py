"""What no cluster could ever give is refused when the trainer is made, and not waited for."""

from __future__ import annotations

from typing import Any

import pytest
from ray.train import ScalingConfig

from rex_ray import ConfigError, RexConfig, RexTrainer
from rex_ray.train.scaling import check_scaling, resources_per_worker

LABEL = "ray.io/accelerator-type"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"placement_strategy": "STRICT_PAK"}, r"unknown placement_strategy 'STRICT_PAK' \(did you mean 'STRICT_PACK'"),
        ({"placement_strategy": None}, "unknown placement_strategy None .known: PACK, SPREAD, STRICT_PACK"),
        ({"resources_per_worker": {"CPU": -1}}, "'CPU' must be a number of zero or more, and finite, got -1"),
        ({"resources_per_worker": {"CPU": float("nan")}}, "'CPU' must be a number .* got nan"),
        ({"resources_per_worker": {"CPU": "1"}}, "'CPU' must be a number .* got '1'"),
        ({"resources_per_worker": {"memory": True}}, "'memory' must be a number .* got True"),
        ({"resources_per_worker": {}}, r"resources_per_worker=\{\} asks for nothing"),
        ({"resources_per_worker": {"CPU": 0}}, r"resources_per_worker=\{'CPU': 0\} asks for nothing"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 1.5}}, "1.5 GPUs per worker: more than one must be a whole"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, "0.5 GPU for each of 2 workers puts several on one"),
        ({"label_selector": {LABEL: "in(T4,V100"}}, "Invalid label selector value .*write for example 'T4', '!T4' or"),
        ({"label_selector": {LABEL: "in()"}}, "Invalid label selector value"),
        ({"label_selector": {LABEL: ["T4", "V100"]}}, r"must map label names to text, got .*'in\(T4,V100\)'"),
        ({"label_selector": {LABEL: 4}}, "must map label names to text"),
        ({"label_selector": "T4"}, "must map label names to text, got 'T4'"),
        ({"label_selector": {"": "T4"}}, "Invalid label key name"),
        ({"label_selector": [{LABEL: "T4"}, {LABEL: None}]}, "must map label names to text"),
        (
            {"num_workers": 1, "use_tpu": True, "accelerator_type": "TPU-V4"},
            "use_tpu=True.*rex_ray trains on CPUs and CUDA devices",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(asked: dict[str, Any], said: str) -> None:
    scaling = ScalingConfig(**{"num_workers": 2, **asked})
    with pytest.raises(ConfigError, match=said):
        RexTrainer(lambda: None, rex_config=RexConfig(global_batch_size=64), scaling_config=scaling)


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, "gloo"),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.5}, "placement_strategy": "STRICT_SPREAD"}, None),
        ({"use_gpu": True, "resources_per_worker": {"GPU": 0.6}}, None),
        ({"num_workers": 1, "use_gpu": True, "resources_per_worker": {"GPU": 0.5}}, None),
        ({"use_gpu": True, "resources_per_worker": {"CPU": 0, "GPU": 2}}, None),
        ({"resources_per_worker": {"CPU": 0.5, "memory": 1e9}}, None),
        ({"label_selector": [{LABEL: "!in(T4, V100)"}, {}]}, None),
    ],
)
def test_what_can_work_is_let_through(asked: dict[str, Any], backend: str | None) -> None:
    check_scaling(ScalingConfig(**{"num_workers": 2, **asked}), backend)


def test_what_a_worker_takes_is_what_ray_train_reserves() -> None:
    assert resources_per_worker(ScalingConfig(num_workers=2)) == {"CPU": 1.0}
    assert resources_per_worker(ScalingConfig(num_workers=2, use_gpu=True)) == {"GPU": 1.0}
    assert resources_per_worker(ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 4})) == {
        "CPU": 4.0,
        "GPU": 1.0,
    }
    asked = ScalingConfig(num_workers=2, accelerator_type="T4")
    assert resources_per_worker(asked) == {"CPU": 1.0, "accelerator_type:T4": 0.001}
