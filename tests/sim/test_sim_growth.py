"""Growth in whole simulated runs: through the controller, the journal and back."""

from __future__ import annotations

import numpy as np
import pytest

from rex_ray.control.controller import Controller
from rex_ray.control.journalled import JournalledController
from rex_ray.control.notes import Decided, Found
from rex_ray.control.reading import read_journal
from rex_ray.control.replay import replay
from rex_ray.control.vocabulary import CODEC
from rex_ray.policies.registry import make_policy
from rex_ray.sim import Scenario, SimulatedRun, StepNorms, compare_decisions, feed_recorded, mixed_cluster, simulate
from rex_ray.sim.gradients import NoisyGradients

ALONE = {"search": "off", "trigger": "off"}


class Noisy:
    """A learner that learns nothing: norms of a set noise scale at every fourth step."""

    is_done = False

    def __init__(self, noise_scale: float, seed: int = 0) -> None:
        self.noise_scale = noise_scale
        self.gradients = NoisyGradients(seed=seed)

    def norms(self, step, num_rows):
        if step % 4:
            return None
        weighted, reduced = self.gradients.draw(step, self.noise_scale, num_rows)
        groups = np.array([int(rows > 0) for rows in num_rows])
        return StepNorms(weighted_sq_norm=weighted, num_groups=groups, global_sq_norm=reduced)

    def advance(self, num_rows, lr_factor):
        pass


def cluster(seed: int = 0) -> Scenario:
    return mixed_cluster(
        ("T4", "T4", "V100", "V100"), "resnet50", global_batch_size=128, steps_per_epoch=400, seed=seed
    )


def play(noise_scale: float, num_steps: int, seed: int = 0, **options) -> SimulatedRun:
    controller = Controller(make_policy("rex", ALONE | options))
    return simulate(controller, cluster(seed), num_steps=num_steps, learner=Noisy(noise_scale, seed))


def batches(run: SimulatedRun) -> list[int]:
    sizes = [allocation.global_batch_size for _, allocation in run.allocations]
    return [size for index, size in enumerate(sizes) if index == 0 or size != sizes[index - 1]]


@pytest.mark.parametrize("seed", range(3))
def test_the_batch_grows_where_the_noise_and_the_clock_allow_and_rests_then(seed):
    run = play(8000.0, 1500, seed)
    assert batches(run)[-1] >= 512
    assert batches(run) == sorted(batches(run))
    assert len(run.allocations) <= 12
    assert batches(play(64.0, 800, seed)) == [128]


def test_a_growing_run_replays_from_its_journal_to_the_last_decision():
    options = ALONE | {"growth_min_gain": 0.02}
    run = play(8000.0, 500, growth_min_gain=0.02)
    assert len(batches(run)) > 1
    journalled, chunks = JournalledController.begin(policy="rex", policy_options=options)
    files: dict[str, bytes] = {}
    for chunk in (*chunks, *(c for event in run.events for c in journalled.handle(event).chunks), *journalled.flush()):
        files[chunk[0]] = files.get(chunk[0], b"") + chunk[1]
    journal = read_journal(files)
    assert replay(journal).is_identical
    assert CODEC.encode(journal.notes) == CODEC.encode(run.notes)
    fed = feed_recorded(Controller(make_policy("rex", options)), run.events)
    assert fed.differences == ()
    assert compare_decisions(run.notes, fed.notes) is None


def test_the_journal_holds_every_change_with_its_figures_and_why_nothing_changed():
    run = play(8000.0, 600)
    decided = [note for note in run.notes if isinstance(note, Decided) and note.kind == "change_global_batch"]
    assert decided
    for note in decided:
        assert {"noise_scale", "lr_factor", "num_blocks"} <= set(note.evidence)
        assert "'adascale'" in note.reason
    found = [note.finding for note in run.notes if isinstance(note, Found) and note.finding.part == "growth"]
    assert {"noise scale unknown", "settling"} <= {finding.verdict for finding in found}


def test_advice_is_noted_and_never_followed():
    run = play(8000.0, 400, growth="advise")
    assert batches(run) == [128]
    advice = [note.finding for note in run.notes if isinstance(note, Found) and note.finding.verdict == "advises"]
    assert advice
    assert advice[0].proposal.global_batch_size > 128


def test_a_cool_down_only_delays_growth():
    prompt, late = play(8000.0, 900), play(8000.0, 1300, cooldown_steps=60)
    common = min(len(batches(prompt)), len(batches(late)))
    assert common >= 2
    assert np.array_equal(batches(prompt)[:2], batches(late)[:2])
