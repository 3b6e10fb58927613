"""One short run of the demo on a real Ray cluster, looked at from all sides."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rex_ray.control.journal import Journal
from rex_ray.control.replay import controller_for, replay
from rex_ray.core.errors import ConfigError
from rex_ray.demo.comparison import run_demo
from rex_ray.demo.scenarios import make_settings
from rex_ray.demo.settings import DemoSettings
from rex_ray.report.reading.load import load_journal
from rex_ray.sim import compare_decisions, feed_recorded

REQUIRED = {
    "policy",
    "time_to_target_s",
    "median_step_s",
    "imbalance",
    "rii",
    "local_batch_sizes",
    "reallocations",
    "rows_seen_exactly_once",
    "full_time_s",
    "first_reaction_steps",
    "false_reallocations",
    "gap_to_oracle_pct",
}


@pytest.fixture(scope="module")
def demo_dir(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("demo")
    printed = io.StringIO()
    settings = make_settings("static", workers={"T4": 1, "V100": 1}, quick=True)
    run_demo(settings, ("rex",), output, Console(file=printed, width=100))
    (output / "printed.txt").write_text(printed.getvalue())
    return output


@pytest.fixture(scope="module")
def summary(demo_dir) -> dict:
    return json.loads((demo_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def journal(summary) -> Journal:
    return load_journal(Path(summary["runs"][0]["run_dir"]))


pytestmark_ray = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]


class TestAShortRun:
    pytestmark = pytestmark_ray

    def test_every_row_is_seen_exactly_once_in_every_epoch(self, summary):
        (run,) = summary["runs"]
        assert run["rows_seen_exactly_once"] is True
        assert run["num_epochs"] == summary["settings"]["num_epochs"]
        assert run["num_steps"] == 6 * run["num_epochs"]

    def test_summary_has_the_promised_fields_and_what_it_depends_on(self, summary):
        (run,) = summary["runs"]
        assert run.keys() >= REQUIRED
        assert summary["settings"]["workers"] == {"T4": 1, "V100": 1}
        assert summary["settings"]["seed"] == 0

    def test_the_split_is_found_and_near_the_emulated_clusters_optimum(self, summary):
        (run,) = summary["runs"]
        assert sum(run["local_batch_sizes"]) == 256
        assert run["reallocations"] >= 1
        assert run["steps_to_split"] is not None
        assert run["steps_to_split"] <= 40
        assert 0.95 < run["ratio_to_optimum"] < 1.25

    def test_the_journal_replays_to_identical_commands(self, journal):
        report = replay(journal)
        assert report.num_commands > 0
        assert report.is_identical, report.differences[:3]

    def test_the_virtual_time_engine_decides_the_same_in_the_same_order(self, journal):
        recorded = feed_recorded(controller_for(journal.header), journal.events)
        assert recorded.differences == ()
        assert len(recorded.decisions) >= 2
        assert compare_decisions(journal.notes, recorded.notes) is None

    def test_what_is_printed_says_what_is_emulated_and_ends_with_the_summary(self, demo_dir):
        lines = (demo_dir / "printed.txt").read_text().splitlines()
        assert "Emulated: 1 T4 + 1 V100" in " ".join(lines[:4])
        assert any("epoch   8/8" in line for line in lines)
        assert lines[-1] == str(demo_dir / "summary.json")


@pytest.fixture(scope="module")
def transient(tmp_path_factory) -> dict:
    output = tmp_path_factory.mktemp("transient")
    return run_demo(make_settings("transient", quick=True), ("rex",), output, Console(file=io.StringIO(), width=100))


@pytest.mark.long
class TestAWorkerThatSlowsDown:
    """The quick transient scenario, with the whole method."""

    pytestmark = pytestmark_ray

    def test_the_slow_worker_is_relieved_while_it_is_slow_and_the_others_are_left_alone(self, transient):
        (run,) = transient["runs"]
        slow, cluster = run["events"]
        assert slow["kind"] == "slowdown"
        # On a quiet machine within 15 steps; a busy one must still see it before half the event is over.
        assert run["first_reaction_steps"] == slow["reaction_steps"] <= 20
        assert slow["lag_steps"] >= 1
        assert cluster["kind"] == "cluster-wide"
        assert run["gap_to_oracle_pct"] > 0
        assert run["full_time_s"] > run["oracle_s"]

    def test_every_row_is_seen_once_and_the_journal_replays_to_the_same_commands(self, transient):
        (run,) = transient["runs"]
        assert run["rows_seen_exactly_once"] is True
        report = replay(load_journal(Path(run["run_dir"])))
        assert report.is_identical, report.differences[:3]


@pytest.mark.parametrize(
    ("policies", "options", "words"),
    [
        (("rxe",), {}, "unknown policy 'rxe'.*did you mean 'rex'"),
        ((), {}, "no policy was given"),
        (("rex",), {"workers": {"T4": 1, "V10": 1}}, "'V10'.*did you mean 'V100'"),
        (("rex",), {"workers": {"T4": 300}}, "global_batch_size=256 is below num_workers=300"),
        (("rex",), {"num_epochs": 0}, "at least one epoch"),
        (("rex",), {"scenario": "transiet"}, "unknown scenario 'transiet'.*did you mean 'transient'"),
        (("rex",), {"scenario": "transient", "workers": {"T4": 2}}, "slows rank 2, and there are 2 workers"),
        (("rex-no-triger",), {}, "did you mean 'rex-no-trigger'"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(tmp_path, policies, options, words):
    with pytest.raises(ConfigError, match=words):
        run_demo(make_settings(**{"scenario": "static"} | options), policies, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_sentence_names_profile_network_and_scale():
    sentence = DemoSettings(time_scale=0.25).sentence()
    assert "2 T4 + 2 V100" in sentence
    assert "resnet50" in sentence
    assert "0.25" in sentence
