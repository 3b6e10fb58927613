"""Growth asks for the times of batches that never ran seldom, since they are dear: not at every look."""

from __future__ import annotations

from dataclasses import dataclass, field

from growth_worlds import AffineModel, World

from rex_ray.policies.growth.blocks import BLOCK_STEPS
from rex_ray.policies.growth.by_noise_scale import NoiseScaleGrowth
from rex_ray.policies.growth.state import FORECAST_LOOKS


@dataclass(frozen=True)
class Counting(AffineModel):
    """An affine model that keeps what it was asked."""

    asked: list[int] = field(default_factory=list)

    def step_time_s(self, global_batch_size: int) -> float | None:
        self.asked.append(global_batch_size)
        return super().step_time_s(global_batch_size)


def test_a_batch_is_asked_about_once_in_so_many_looks():
    model = Counting(fixed_s=0.01, row_s=1e-3)  # a larger batch saves next to nothing
    world = World(NoiseScaleGrowth(), phi=lambda step, rows: 0.2 * rows, model=model, truth=AffineModel(0.01, 1e-3))
    world.run(20 * FORECAST_LOOKS * BLOCK_STEPS)
    assert world.sizes == [128]
    asked_most = max(model.asked.count(rows) for rows in set(model.asked))
    assert 15 <= asked_most <= 21


def test_other_shares_and_another_batch_are_asked_about_at_once():
    model = Counting()
    world = World(NoiseScaleGrowth(), phi=lambda step, rows: 1e5, model=model).run(40 * BLOCK_STEPS)
    assert world.sizes[-1] > 128
    assert world.state.forecast_look > world.state.num_looks - FORECAST_LOOKS
    assert world.rows in world.state.forecast or not world.state.forecast
