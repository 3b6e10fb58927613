"""Everything that a run of the demo depends on, and who may be compared in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from rex_ray.config import RexConfig
from rex_ray.core.errors import ConfigError, nearest_name_hint
from rex_ray.demo.data import DIGITS_TRAIN_ROWS, DataName
from rex_ray.demo.script import ScriptedEvent, episodes_of
from rex_ray.policies.registry import policy_names
from rex_ray.scenario import NoiseModel, StepTimeShape, load_network
from rex_ray.worker.emulation import EmulationSpec

__all__ = ["Contestant", "DemoSettings", "ScenarioName", "contestant"]

ScenarioName: TypeAlias = Literal["static", "transient", "growth", "tiles"]

_ABLATIONS: Mapping[str, dict[str, Any]] = {
    "rex-no-trigger": {"trigger": "off"},
    "rex-no-search": {"search": "off"},
}
"""Methods with one part left out, beside the registered policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A row of the demo's table: a policy with options, under a name of its own."""

    label: str
    policy: str
    options: dict[str, Any] = field(default_factory=dict)


def contestant(label: str) -> Contestant:
    """Return who is meant by a name on the command line.

    Raises:
        ConfigError: nobody; names the nearest.
    """
    if label in _ABLATIONS:
        return Contestant(label=label, policy="rex", options=dict(_ABLATIONS[label]))
    known = (*policy_names(), *_ABLATIONS)
    if label not in known:
        raise ConfigError(f"unknown policy {label!r}{nearest_name_hint(label, known)}")
    return Contestant(label=label, policy=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Everything that the demo's figures depend on.

    Attributes:
        scenario: its name.
        workers: workers per kind of device.
        num_epochs: at the static scenario's batch of six steps each.
        global_batch_size: rows per step over all workers at the start.
        growth_factor: the global batch may grow to so many times that; 1 keeps it.
        learning_rate: of SGD with momentum 0.9.
        target_accuracy: on the test rows.
        data: see ``data.load_data``.
        data_dir: folder of Fashion-MNIST's files, None where it is not used.
        num_rows: training rows that are used, None: all.
        repeats: passes over them that count as one epoch: evaluations come as rarely.
        workload: profile that the workers' own times are stretched to.
        network: kind of device whose public cluster gives the all-reduce time. The profiles' T4 cluster needs 97 ms
            for four workers, which would hide a part of what a split can change; the default is a fast network.
        time_scale: real seconds per emulated second: slow enough for four workers on two cores to keep up.
        noise_sd: relative sd of own times, with memory (a dedicated machine's is 1 %).
        shape: structure that the profiles' smooth curves lack.
        script: slowdowns.
        seed: of the order of the rows, of the weights, of the noise and of the controller.
    """

    scenario: ScenarioName = "static"
    workers: Mapping[str, int] = field(default_factory=lambda: {"T4": 2, "V100": 2})
    num_epochs: int = 40
    global_batch_size: int = 256
    growth_factor: int = 1
    learning_rate: float = 0.025
    target_accuracy: float = 0.95
    data: DataName = "digits"
    data_dir: str | None = None
    num_rows: int | None = None
    repeats: int = 1
    workload: str = "resnet50"
    network: str = "A100"
    time_scale: float = 0.5
    noise_sd: float = 0.01
    shape: StepTimeShape = field(default_factory=StepTimeShape)
    script: tuple[ScriptedEvent, ...] = ()
    seed: int = 0

    def emulation(self) -> EmulationSpec:
        """The world that the workers play."""
        return EmulationSpec(
            workload=self.workload,
            time_scale=self.time_scale,
            noise=NoiseModel(sd=self.noise_sd),
            episodes=episodes_of(self.script),
            network=load_network(self.workload, self.network),
            shape=self.shape,
            seed=self.seed,
        )

    def rex_config(self, who: Contestant) -> RexConfig:
        """The configuration of one run."""
        return RexConfig(
            global_batch_size=self.global_batch_size,
            policy=who.policy,
            policy_options=dict(who.options),
            seed=self.seed,
            max_global_batch_size=self.growth_factor * self.global_batch_size,
        )

    def loop_config(self) -> dict[str, Any]:
        """What the training loop is told."""
        return {
            "num_epochs": self.num_epochs,
            "learning_rate": self.learning_rate,
            "seed": self.seed,
            "data": self.data,
            "data_dir": self.data_dir,
            "num_rows": self.num_rows,
            "repeats": self.repeats,
        }

    def check(self, policies: Sequence[str]) -> tuple[Contestant, ...]:
        """Return who is compared, after refusing what cannot work, before the cluster starts.

        Raises:
            ConfigError: names the value and the remedy.
        """
        if not policies:
            raise ConfigError(f"no policy was given; choose some of {', '.join((*policy_names(), *_ABLATIONS))}")
        contestants = tuple(contestant(label) for label in policies)
        if self.num_epochs < 1:
            raise ConfigError(f"the demo needs at least one epoch, got {self.num_epochs}")
        self.emulation().check(self.workers)
        num_workers = sum(self.workers.values())
        for event in self.script:
            if event.rank is not None and event.rank >= num_workers:
                raise ConfigError(
                    f"scenario {self.scenario!r} slows rank {event.rank}, and there are {num_workers} workers; give at "
                    f"least {event.rank + 1} by --workers"
                )
        rows = DIGITS_TRAIN_ROWS if self.data == "digits" else self.num_rows
        for who in contestants:
            self.rex_config(who).check_group(num_workers, rows)
        return contestants

    def sentence(self) -> str:
        """What is real and what is emulated."""
        cluster = " + ".join(f"{count} {device}" for device, count in self.workers.items())
        rows = {
            "digits": "scikit-learn's digits",
            "fashion-mnist": f"{self.num_rows or 60_000:,} rows of Fashion-MNIST",
            "generated": f"{self.num_rows or 0:,} generated rows, for want of Fashion-MNIST",
        }[self.data]
        return (
            f"Real: the Ray workers, gloo, the data ({rows}), the gradients, the controller. Emulated: "
            f"{cluster}, by letting each worker sleep until its step took as long as {self.workload} takes on its "
            "device by public measurements (rex_ray/scenario/profiles.toml), then for the all-reduce of an "
            f"{self.network} cluster; all times scaled by {self.time_scale:g}.{self._disturbances()}"
        )

    def _disturbances(self) -> str:
        text = ""
        if self.shape.tile_rows > 1:
            text += f" On top: every device computes whole tiles of {self.shape.tile_rows} rows."
        if self.script:
            text += f" Scripted: {'; '.join(event.sentence() for event in self.script)}."
        return text
