"""The quick form of `experiments.scale` answers every question; how long anything takes is for its full form."""

from __future__ import annotations

import json

import pytest

from experiments import scale
from experiments._harness import main


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict:
    path = tmp_path_factory.mktemp("scale") / "scale.json"
    main("scale", scale.measure, ["--quick", "--json", str(path)])
    return json.loads(path.read_text())


def test_every_size_and_policy_has_its_cost(document):
    rows = document["tables"]["scale"]
    assert [(row["workers"], row["policy"]) for row in rows] == [(n, p) for n in scale.WORKERS for p in scale.POLICIES]
    for row in rows:
        name = f"{row['policy']}_{row['workers']}"
        assert document["figures"][f"controller_us_{name}"] == row["controller_us"] > 0
        assert document["figures"][f"engine_us_{name}"] == row["engine_us"] > 0
        assert (row["allocations"] > 1) == (row["policy"] == "rex")


def test_figures_alone_keep_little_of_a_step(document):
    for row in document["tables"]["scale_memory"]:
        assert row["peak_mib"] > 0
        # Whole steps of 64 workers would add 2.5 KiB each.
        assert row["growth_bytes_per_step"] < 1024


def test_the_whole_training_uses_all_rows_and_reaches_the_batch_by_itself(document):
    (row,) = document["tables"]["scale_training"]
    figures = document["figures"]
    assert row["epochs"] == document["settings"]["imagenet16_epochs"] == 2
    assert figures["imagenet16_mean_batch"] * figures["imagenet16_num_steps"] == pytest.approx(2 * 1_281_167, rel=1e-3)
    assert figures["imagenet16_largest_batch"] > document["settings"]["imagenet16_reference_batch"] == 256
    assert figures["imagenet16_wall_s"] > 0
