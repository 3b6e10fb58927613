"""Device profiles, noise, slowdowns, networks, noise scales: the world that a simulator or an emulation plays. Pure."""

from __future__ import annotations

from rex_ray.scenario.cluster import format_cluster, parse_cluster
from rex_ray.scenario.episodes import (
    Episode,
    random_episodes,
    rotating_episodes,
    sleeping_epochs,
    slowdown_factor,
)
from rex_ray.scenario.learning import LearningCurve, learning_names, load_learning
from rex_ray.scenario.network import MeasuredShapes, NetworkModel, Overlap, load_network, load_shapes
from rex_ray.scenario.noise import NoiseModel, RecordedNoise
from rex_ray.scenario.optimum import true_optimum
from rex_ray.scenario.profiles import (
    DeviceProfile,
    Source,
    device_names,
    load_profile,
    optimal_split,
    profile_names,
    workload_names,
)
from rex_ray.scenario.shapes import StepTimeShape
from rex_ray.scenario.timeline import OwnTime, WorkerTimeline, own_times

__all__ = [
    "DeviceProfile",
    "Episode",
    "LearningCurve",
    "MeasuredShapes",
    "NetworkModel",
    "NoiseModel",
    "Overlap",
    "OwnTime",
    "RecordedNoise",
    "Source",
    "StepTimeShape",
    "WorkerTimeline",
    "device_names",
    "format_cluster",
    "learning_names",
    "load_learning",
    "load_network",
    "load_profile",
    "load_shapes",
    "optimal_split",
    "own_times",
    "parse_cluster",
    "profile_names",
    "random_episodes",
    "rotating_episodes",
    "sleeping_epochs",
    "slowdown_factor",
    "true_optimum",
    "workload_names",
]
