"""The controller's whole memory stays as large as it is, however long a run and whatever happens in it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np

from rex_ray.control.controller import Controller
from rex_ray.control.vocabulary import CODEC
from rex_ray.policies.registry import make_policy
from rex_ray.scenario import Episode, NoiseModel, random_episodes
from rex_ray.sim import Scenario, StepNorms, mixed_cluster, simulate

MIXED = ("T4", "T4", "V100", "V100")


@dataclass(slots=True)
class Watcher:
    """Gradients whose noise scale wanders from below the batch to far above it; and every 250 steps a look at the
    controller's size. Never done."""

    controller: Controller
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))
    num_steps: int = 0
    sizes: list[int] = field(default_factory=list)
    is_done: bool = False

    def norms(self, step: int, num_rows) -> StepNorms | None:
        if step % 4:
            return None
        rows = np.array(num_rows, dtype=np.float64)
        phi = 256 * 4.0 ** np.sin(step / 700)
        spread = phi * self.rng.chisquare(20, size=rows.size) / 20
        return StepNorms(
            weighted_sq_norm=spread + rows,
            num_groups=np.ones(rows.size, dtype=np.int64),
            global_sq_norm=1.0 + float(spread.mean() / rows.sum()),
        )

    def advance(self, num_rows: int, lr_factor: float) -> None:
        self.num_steps += 1
        if self.num_steps % 250 == 0:
            self.sizes.append(len(json.dumps(CODEC.encode(self.controller.state))))


def eventful(num_steps: int) -> Scenario:
    """Slowdowns long and short, of one worker and of all, one that flaps, noise with spikes: every part has work."""
    flapping = tuple(Episode(rank=1, start_step=start, num_steps=12, factor=2.0) for start in range(700, 1500, 24))
    drawn = random_episodes(num_workers=4, num_steps=num_steps, per_1000_worker_steps=2.4, seed=3)
    whole = tuple(
        Episode(rank=None, start_step=start, num_steps=150, factor=1.7) for start in range(400, num_steps, 1500)
    )
    return mixed_cluster(
        MIXED,
        "resnet50",
        global_batch_size=256,
        noise=NoiseModel.shared(),
        episodes=(*flapping, *drawn, *whole),
        seed=4,
    )


def test_e12_the_memory_of_rex_is_flat_over_an_eventful_run():
    controller = Controller(make_policy("rex"))
    watcher = Watcher(controller)
    simulate(controller, eventful(5000), num_steps=5000, learner=watcher)
    early, late = watcher.sizes[:8], watcher.sizes[8:]
    assert len(late) == 12
    assert max(late) <= 1.05 * max(early)
    # How many forecasts stand differs from look to look by some 5 % of the whole; none of it adds up.
    assert np.mean(late[6:]) <= 1.03 * np.mean(late[:6])
