"""A warning names the line of the user's own that it is about, however deep in the library it is found."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from scripted import Rows, ScriptedLink, opened
from test_worker_gradients import two_layers
from torch.utils.data import DataLoader

from rex_ray.worker.user_warning import warn


def in_module(name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function of a module of that name that calls another."""
    names: dict[str, object] = {"__name__": name, "call": call}
    exec(compile("def step():\n    call()\n", f"/somewhere/{name}.py", "exec"), names)
    function: Callable[[], None] = names["step"]  # type: ignore[assignment]
    return function


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_frames_of_the_library_and_of_torch_are_passed_over(depth: int) -> None:
    call: Callable[[], None] = partial(warn, "told")
    for level in range(depth):
        call = in_module("torch.nn.modules" if level % 2 else "rex_ray.worker.hooks", call)
    with pytest.warns(UserWarning, match="told") as told:
        call()
    assert told[0].filename == __file__


def test_the_innermost_line_that_is_not_the_librarys_is_named() -> None:
    with pytest.warns(UserWarning, match="told") as told:
        in_module("somebodys", partial(warn, "told"))()
    assert told[0].filename == "/somewhere/somebodys.py"


def test_a_loop_is_warned_at_its_own_lines() -> None:
    net = two_layers()
    with opened(ScriptedLink()) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = session.loader(DataLoader(Rows(24), batch_size=3, shuffle=True, drop_last=True))
        net, optimizer = session.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _, inputs, targets in loader:
            (net(inputs) - targets).square().mean().backward()
            optimizer.step()
    ours = [warning for warning in told if "rex_ray" in str(warning.filename) or warning.filename == __file__]
    assert len(ours) == 2, "of drop_last, of the batch size"
    assert {warning.filename for warning in ours} == {__file__}
