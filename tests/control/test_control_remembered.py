"""What one controller knew, the next one of the same run begins with: as if it had never been gone."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace

import numpy as np
import pytest
from control_worlds import problem_of
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.control.codec import CodecError
from rex_ray.control.controller import Controller
from rex_ray.control.events import GroupStarted, Ticked
from rex_ray.control.remembered import memory_text, remembered
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.observations import StepObserved
from rex_ray.core.types import Allocation, StepFlag, read_only
from rex_ray.policies.registry import make_policy, policy_names

ROWS = 64
PROBLEM = problem_of(num_workers=3, rows=ROWS)


def experienced(name: str, num_steps: int = 150) -> Controller:
    """A controller that has seen a noisy, uneven group for a while."""
    controller = Controller(make_policy(name, {}), seed=3)
    rng = np.random.default_rng(3)
    (command,) = controller.handle(GroupStarted(generation="a", problem=PROBLEM))
    running = command.allocation
    for step in range(num_steps):
        rows = np.array(running.local_batch_sizes)
        own_us = np.rint((5_000 + np.array([900, 400, 300]) * rows) * (1 + 0.02 * rng.standard_normal(3)))
        noise = rng.chisquare(5, 3) / 5 * 2000
        observed = StepObserved(
            generation="a",
            epoch=step // 50,
            step=step,
            allocation_version=running.version,
            num_rows=read_only(rows, np.int64),
            data_us=read_only(np.zeros(3), np.int64),
            compute_us=read_only(own_us, np.int64),
            sync_us=read_only(own_us.max() - own_us, np.int64),
            step_us=read_only(np.full(3, own_us.max()), np.int64),
            flags=StepFlag.NONE,
            loss=1.0,
            weighted_sq_norm=read_only(noise + rows, np.float64),
            num_groups=read_only(rows > 0, np.int64),
            global_sq_norm=float(1.0 + noise.mean() / rows.sum()),
        )
        for command in controller.handle(observed):
            if hasattr(command, "allocation"):
                running = command.allocation
        controller.handle(Ticked(now_us=step * 100_000))
    return controller


def resumed(step: int, shares: tuple[int, ...]) -> GroupStarted:
    allocation = Allocation(version=9, local_batch_sizes=shares)
    return GroupStarted(generation="b", problem=PROBLEM, step=step, allocation=allocation)


@pytest.mark.parametrize("name", policy_names())
def test_f2_a_new_controller_with_the_memory_begins_as_the_old_one_would_have_gone_on(name: str) -> None:
    old = experienced(name)
    memory = memory_text(old.policy, old.state.policy_state, ROWS)
    event = resumed(150, (10, 24, 30))
    fresh, blank = Controller(make_policy(name, {}), seed=3), Controller(make_policy(name, {}), seed=3)
    gone_on, begun = old.handle(event), fresh.handle(replace(event, memory=memory))
    assert gone_on[-1].allocation.local_batch_sizes == begun[-1].allocation.local_batch_sizes
    assert CODEC.encode(fresh.state.policy_state) == CODEC.encode(old.state.policy_state)
    blank.handle(event)
    if name in {"rex", "pollux"}:  # they learn; were this equal, the law above would say nothing
        assert CODEC.encode(blank.state.policy_state) != CODEC.encode(fresh.state.policy_state)


def test_a_controller_that_knows_something_takes_no_memory() -> None:
    old = experienced("rex")
    other = memory_text(old.policy, experienced("rex", 20).state.policy_state, ROWS)
    event = resumed(150, (10, 24, 30))
    twin = experienced("rex")
    old.handle(event)
    twin.handle(replace(event, memory=other))
    assert CODEC.encode(twin.state.policy_state) == CODEC.encode(old.state.policy_state)


def test_memory_of_another_policy_options_batch_or_version_is_refused() -> None:
    old = experienced("rex", 20)
    text = memory_text(old.policy, old.state.policy_state, ROWS)
    assert CODEC.encode(remembered(old.policy, text, ROWS)) == CODEC.encode(old.state.policy_state)
    with pytest.raises(CodecError, match="not of policy 'dlb'"):
        remembered(make_policy("dlb", {}), text, ROWS)
    with pytest.raises(CodecError, match="under these options"):
        remembered(make_policy("rex", {"min_gain": 0.3}), text, ROWS)
    with pytest.raises(CodecError, match="began with 64 rows, not 65"):
        remembered(old.policy, text, 65)
    document = json.loads(zlib.decompress(base64.b64decode(text)))
    newer = base64.b64encode(zlib.compress(json.dumps(document | {"schema": 99}).encode())).decode()
    with pytest.raises(CodecError, match="version 99"):
        remembered(old.policy, newer, ROWS)


@given(st.one_of(st.text(), st.binary().map(lambda data: base64.b64encode(zlib.compress(data)).decode())))
def test_what_is_no_memory_is_a_codec_error_and_a_controller_begins_without(text: str) -> None:
    with pytest.raises(CodecError):
        remembered(make_policy("rex", {}), text, ROWS)
    controller, blank = Controller(make_policy("rex", {}), seed=0), Controller(make_policy("rex", {}), seed=0)
    event = resumed(5, (10, 24, 30))
    controller.handle(replace(event, memory=text))
    blank.handle(event)
    assert CODEC.encode(controller.state.policy_state) == CODEC.encode(blank.state.policy_state)


@given(st.integers(1, 400))
def test_a_cut_memory_is_refused(length: int) -> None:
    old = experienced("bsp", 3)
    text = memory_text(old.policy, old.state.policy_state, ROWS)
    with pytest.raises(CodecError):
        remembered(old.policy, text[: min(length, len(text) - 1)], ROWS)
