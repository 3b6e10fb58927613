"""The demo's scenarios: which cluster, which data, what happens to it, and who is compared by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.demo.data import find_fashion_mnist
from rex_ray.demo.script import ScriptedEvent
from rex_ray.demo.settings import DemoSettings, ScenarioName
from rex_ray.scenario import StepTimeShape

__all__ = ["DEFAULT_POLICIES", "make_settings", "scenario_names"]

DEFAULT_POLICIES: Mapping[ScenarioName, tuple[str, ...]] = {
    "static": ("bsp", "dlb", "rex"),
    "transient": ("bsp", "dlb", "rex-no-trigger", "rex"),
    "growth": ("bsp", "rex"),
    "tiles": ("bsp", "rex-no-search", "rex"),
}


def scenario_names() -> tuple[str, ...]:
    """Return the scenarios that there are."""
    return get_args(ScenarioName)


def make_settings(
    scenario: str,
    *,
    quick: bool = False,
    seed: int = 0,
    workers: Mapping[str, int] | None = None,
    num_epochs: int | None = None,
    data_dir: Path | None = None,
) -> DemoSettings:
    """Return a scenario's settings.

    Args:
        scenario: one of ``scenario_names()``.
        quick: a few epochs: it shows the way the scenario works.
        seed: of everything random.
        workers: workers per kind of device, default the scenario's, two kinds of two.
        num_epochs: default: what the scenario needs.
        data_dir: folder of Fashion-MNIST's idx files, for ``growth``; default: the usual places.

    Raises:
        ConfigError: no such scenario, no Fashion-MNIST in ``data_dir``, or a ``data_dir`` where none is used.
    """
    if scenario not in scenario_names():
        raise ConfigError(f"unknown scenario {scenario!r}{nearest_name_hint(scenario, scenario_names())}")
    make = {"static": _static, "transient": _transient, "growth": _growth, "tiles": _tiles}[scenario]
    settings = replace(make(quick), seed=seed)
    if workers:
        settings = replace(settings, workers=dict(workers))
    if num_epochs is not None:
        settings = replace(settings, num_epochs=num_epochs)
    if data_dir is not None and settings.data != "generated":
        raise ConfigError(f"scenario {scenario!r} trains on {settings.data}, not on {data_dir}: leave out --data-dir")
    if settings.data == "generated":
        folder = find_fashion_mnist(data_dir)
        if folder is not None:
            settings = replace(settings, data="fashion-mnist", data_dir=str(folder), target_accuracy=0.83)
        elif data_dir is not None:
            raise ConfigError(f"{data_dir} does not hold the four idx files of Fashion-MNIST (raw or .gz)")
    return settings


def _static(quick: bool) -> DemoSettings:
    return DemoSettings(num_epochs=8 if quick else 40)


def _transient(quick: bool) -> DemoSettings:
    """Steps of 100 ms and more; between events the group has time to come back, and epochs end in quiet times."""
    if quick:
        script = (
            ScriptedEvent(rank=2, factor=3.0, onset_step=45, num_steps=30),
            ScriptedEvent(rank=None, factor=1.5, onset_step=100, num_steps=15),
        )
        return DemoSettings(scenario="transient", num_epochs=1, repeats=22, time_scale=0.42, script=script)
    events = (
        ScriptedEvent(rank=2, factor=2.0, onset_step=60, num_steps=60),
        ScriptedEvent(rank=0, factor=3.0, onset_step=170, num_steps=60),
        ScriptedEvent(rank=None, factor=1.5, onset_step=258, num_steps=30),
        ScriptedEvent(rank=3, factor=2.0, onset_step=320, num_steps=20, repeats=3, pause_steps=20),
    )
    return DemoSettings(scenario="transient", num_epochs=3, repeats=27, time_scale=0.42, script=events)


def _growth(quick: bool) -> DemoSettings:
    """A small batch under steps whose time hardly depends on it: where growing pays most."""
    return DemoSettings(
        scenario="growth",
        workers={"T4": 2, "A100": 2},
        num_epochs=1 if quick else 5,
        global_batch_size=32,
        growth_factor=8,
        learning_rate=0.01,
        target_accuracy=0.70,
        data="generated",
        num_rows=20_000,
        workload="resnet18",
        time_scale=1.0,
    )


def _tiles(quick: bool) -> DemoSettings:
    """Devices that compute whole tiles of 32 rows: a smooth curve through a few sizes cannot know the stairs."""
    return DemoSettings(
        scenario="tiles",
        num_epochs=1 if quick else 2,
        repeats=32,
        time_scale=0.45,
        shape=StepTimeShape(tile_rows=32),
    )
