"""A reduction's time by shape, and how it joins the workers' own times to a step's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.scenario import MeasuredShapes, NetworkModel, Overlap, Source, load_shapes

NOWHERE = Source(repo="-", commit="-", path="-")
LEVEL = MeasuredShapes(
    num_nodes=(1, 2, 4),
    gpus_per_node=(1, 4),
    reduce_s=((0.0, 1.0, 2.0), (0.5, 4.0, 3.0)),
    source=NOWHERE,
)
TIMES = st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.01, 10.0)), min_size=2, max_size=6)
OVERLAPS = st.builds(Overlap, first_bucket=st.floats(0, 1), last_bucket=st.floats(0, 1))


def test_measured_shapes_are_met_and_those_between_are_interpolated():
    assert [LEVEL.all_reduce_s(nodes, 1) for nodes in (1, 2, 4)] == [0.0, 1.0, 2.0]
    assert LEVEL.all_reduce_s(3, 1) == pytest.approx(1 + np.log2(1.5))
    assert LEVEL.all_reduce_s(4, 4) == 0.5
    assert LEVEL.all_reduce_s(8, 4) == LEVEL.all_reduce_s(16, 4) == 3.5, "fewer seconds on more nodes are levelled"
    assert LEVEL.all_reduce_s(4, 2) == pytest.approx((1.0 + 3.5) / 2)
    assert LEVEL.all_reduce_s(16, 1) == pytest.approx(4.0), "it goes on as between the last two"
    assert LEVEL.all_reduce_s(64, 32) == LEVEL.all_reduce_s(8, 4), "more per node than measured are no slower"


@pytest.mark.parametrize("workload", ["resnet18", "resnet50"])
def test_shipped_shapes_grow_with_nodes_and_are_nothing_alone(workload):
    shapes = load_shapes(workload)
    for per_node in (1, 2, 3, 4, 8):
        times = [shapes.all_reduce_s(per_node * nodes, per_node) for nodes in (1, 2, 3, 4, 8, 16, 32)]
        assert times == sorted(times)
    assert shapes.all_reduce_s(1, 1) == 0.0
    assert NetworkModel(shapes=shapes, gpus_per_node=4).all_reduce_s(4) < NetworkModel(shapes=shapes).all_reduce_s(4)


@pytest.mark.parametrize("workload", ["resnet18", "resnet50"])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 8])
def test_no_further_worker_makes_a_reduction_quicker_and_whole_nodes_keep_their_times(workload, per_node):
    shapes = load_shapes(workload)
    times = [shapes.all_reduce_s(workers, per_node) for workers in range(1, 40 * per_node)]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_a_node_filled_in_part_takes_no_less_than_those_before_it_and_no_more_than_a_whole_one():
    """As measured: 4 workers on two nodes .0667 s, and 5 on three .058 s."""
    shapes = load_shapes("resnet18")
    four, five, six = (shapes.all_reduce_s(workers, 2) for workers in (4, 5, 6))
    assert four == five == 0.0667
    assert five < six < 0.0724
    alone = [shapes.all_reduce_s(workers, 4) for workers in (2, 3, 4)]
    assert 0 < alone[0] < alone[1] < alone[2] == 0.0143


def test_unknown_clusters_are_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="did you mean 'resnet50 on T4'"):
        load_shapes("resnet5")
    with pytest.raises(ConfigError, match="gpus_per_node must be at least 1"):
        NetworkModel(gpus_per_node=0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Overlap(first_bucket=1.5)


@given(times=TIMES, overlap=OVERLAPS, reduce_s=st.floats(0.0, 5.0))
def test_an_overlap_saves_at_most_what_runs_beside_the_backward_pass(times, overlap, reduce_s):
    data_s, compute_s = np.array(times).T
    plain = float(NetworkModel(base_s=reduce_s, per_worker_s=0.0).step_s(data_s, compute_s))
    hidden = float(NetworkModel(base_s=reduce_s, overlap=overlap).step_s(data_s, compute_s))
    assert plain == pytest.approx(float((data_s + compute_s).max()) + reduce_s)
    assert plain - (1 - overlap.last_bucket) * reduce_s <= hidden + 1e-9
    assert hidden <= plain + 1e-9


@given(times=TIMES, overlap=OVERLAPS, reduce_s=st.floats(0.0, 5.0))
def test_it_is_cannikins_time_of_the_slowest_worker(times, overlap, reduce_s):
    network = NetworkModel(base_s=reduce_s, overlap=overlap)
    last_s = overlap.last_bucket * reduce_s
    done = [
        max(wait + work + last_s, wait + overlap.first_bucket * work + (reduce_s - last_s) + last_s)
        for wait, work in times
    ]
    assert float(network.step_s(*np.array(times).T)) == pytest.approx(max(done))


@given(times=TIMES, overlap=st.none() | OVERLAPS, reduce_s=st.floats(0.0, 5.0))
def test_the_slowest_worker_alone_decides_where_nobody_waits_for_data(times, overlap, reduce_s):
    network = NetworkModel(base_s=reduce_s, overlap=overlap)
    compute_s = np.array(times)[:, 1]
    slowest = network.step_of_slowest_s(compute_s.max(keepdims=True), len(times))
    assert slowest == pytest.approx(network.step_s(np.zeros(len(times)), compute_s))
