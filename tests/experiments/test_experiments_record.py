"""What an experiment leaves in the repository is whole, small, and the same bytes for the same runs."""

from __future__ import annotations

import csv
import gzip
import re
from dataclasses import replace

import pytest

from experiments import static, transient
from experiments._harness import Findings, Settings
from experiments._matrix import Played
from experiments.lab import tasks
from experiments.lab.cells import TRACE, Cell
from experiments.lab.charts import metric_chart, times_chart
from experiments.lab.fixed import BATCH_OPTION, FIXED, PILOT_SEEDS
from experiments.lab.headline import HEADLINE, figures_of
from experiments.lab.play import play
from experiments.lab.record import record
from experiments.lab.study import Study
from experiments.lab.tables import Comparison
from rex_ray.core.errors import ConfigError

METHODS = ("bsp", "cannikin", "rex", "oracle", "oracle_delayed", "best_fixed_equal")


@pytest.fixture(scope="module")
def compared():
    """A trace of a second or so, and a training that is not one: its curves are made up."""
    cells = [
        Cell(
            method=method,
            workload="bert",
            cluster="2xT4,2xV100",
            global_batch_size=48,
            seed=seed,
            charges="measured",
            options={BATCH_OPTION: 48} if method in FIXED else {},
        )
        for seed in (0, 1)
        for method in METHODS
    ]
    results = [play(cell) for cell in cells]
    trained = [replace(cell, learner="digits") for cell in cells]
    looks = [
        replace(
            result,
            evaluated_s=tuple(result.total_s * k / 4 for k in (1, 2, 3, 4)),
            metrics=(0.5, 0.8, 0.91, 0.92 - 0.001 * cell.seed),
            final_metric=0.92 - 0.001 * cell.seed,
            tta_s=0.75 * result.total_s,
        )
        for cell, result in zip(trained, results, strict=True)
    ]
    return Comparison(cells=[*trained, *cells], results=[*looks, *results])


@pytest.fixture
def study(compared):
    findings = Findings(figures={"x": 1.0}, tables={"times": compared.times(), "resources": compared.resources()})
    return Study(findings=findings, comparison=compared, headline=compared.worlds()[0], target=0.9)


def test_a_record_is_whole_and_the_same_bytes_twice(study, tmp_path):
    for folder in ("one", "two"):
        record(tmp_path / folder, "static", "python -m experiments.static --json x", Settings(), study)
    files = {file.name for file in (tmp_path / "one").iterdir()}
    assert files == {
        *("metric.png", "times.png", "worlds.png", "ledger.png"),
        *("cells.csv", "curves.csv.gz", "findings.json", "README.md", "index.html"),
    }
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert sum(file.stat().st_size for file in (tmp_path / "one").iterdir()) < 1_000_000
    rows = list(csv.DictReader((tmp_path / "one" / "cells.csv").open()))
    assert len(rows) == len(study.comparison.cells)
    assert float(rows[0]["tta_s"]) == pytest.approx(study.comparison.results[0].tta_s, rel=1e-5)
    with gzip.open(tmp_path / "one" / "curves.csv.gz", "rt") as stream:
        curves = list(csv.DictReader(stream))
    assert len(curves) == 2 * len(METHODS) * 4
    # Each is found among the cells by what it is.
    assert {(row["learner"], row["cluster"], row["disturbance"]) for row in curves} == {
        ("digits", "2xT4,2xV100", "none")
    }
    page = (tmp_path / "one" / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert re.search(r"(src|href)=\"(?!data:)", page) is None
    assert "python -m experiments.static --json x" in (tmp_path / "one" / "README.md").read_text()


def test_variants_of_an_experiment_are_drawn_too_and_without_an_oracle_the_first_is_the_reference(compared, tmp_path):
    pairs = [
        (cell, result)
        for cell, result in zip(compared.cells, compared.results, strict=True)
        if cell.learner == TRACE and cell.method in {"bsp", "rex"}
    ]
    played = Played({cell.key: result for cell, result in pairs})
    own = played.comparison(("rex" if cell.method == "rex" else "min_gain=0.1", cell) for cell, _ in pairs)
    world = own.worlds()[0]
    assert own.methods(world) == ["rex", "min_gain=0.1"]
    axes = times_chart(own, world).axes[0]
    assert axes.get_xlabel() == "time to the target, rex = 1"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["min_gain=0.1"]
    study = Study(findings=Findings(figures={"x": 1.0}), comparison=own, headline=world)
    record(tmp_path, "sensitivity", "python", Settings(), study)
    rows = list(csv.DictReader((tmp_path / "cells.csv").open()))
    assert {row["charges"] for row in rows} == {"measured"}, "what was played is what is written"


def test_perplexity_is_drawn_as_it_is_with_the_better_higher_up(compared):
    world = compared.worlds()[0]
    results = [replace(r, metrics=(90.0, 60.0, 39.0, 38.0), final_metric=38.0) for r in compared.results]
    drawn = metric_chart(Comparison(cells=compared.cells, results=results), world, 40.0, metric="perplexity").axes[0]
    assert drawn.get_ylabel() == "test perplexity"
    assert drawn.get_title(loc="left").endswith("to 40")
    low, high = drawn.get_ylim()
    assert low > 40
    assert high < 38


def test_the_tables_have_a_row_per_world_and_method_and_the_oracles_beside(compared):
    rows = compared.times()
    assert [(row["training"], row["method"]) for row in rows] == [
        (training, method) for training in ("digits", "bert trace") for method in METHODS
    ]
    by_method = {row["method"]: row for row in rows if row["training"] == "bert trace"}
    assert by_method["oracle"]["vs_oracle"] == by_method["bsp"]["vs_bsp"] == 1.0
    assert by_method["rex"]["vs_oracle"] > 1.0 > by_method["rex"]["vs_bsp"]
    assert by_method["rex"]["vs_balanced"] is None
    resources = {row["method"]: row for row in compared.resources()}
    assert resources["bsp"]["B"] == "48"
    assert resources["rex"]["charged_pct"] > resources["bsp"]["charged_pct"] == 0.0
    assert resources["bsp"]["changes"] == "never"


def test_figures_have_the_names_of_the_goals_and_leave_out_what_was_missed(compared):
    world = compared.worlds()[0]
    figures = figures_of(compared, world, "")
    assert {
        *("tta_ratio_rex_bsp", "tta_ratio_rex_best_fixed_equal", "tta_ratio_rex_oracle", "ratio_rex_oracle_delayed"),
        *("accuracy_delta_points", "accuracy_delta_lo90", "rii_bsp", "rii_rex", "overhead_pct"),
    } == set(figures)
    assert figures["accuracy_delta_points"] == pytest.approx(0.0)
    missed = [
        replace(result, tta_s=None) if cell.method == "oracle" else result
        for cell, result in zip(compared.cells, compared.results, strict=True)
    ]
    figures = figures_of(Comparison(cells=compared.cells, results=missed), world, "_a,b:1")
    assert "tta_ratio_rex_bsp_a_b_1" in figures
    assert not any("oracle_a" in name for name in figures)


@pytest.mark.parametrize("experiment", [static, transient])
def test_the_headline_matrices_have_what_they_promise(experiment):
    cells = experiment.cells_of(Settings(), "cifar10")
    assert len({cell.key for cell in cells}) == len(cells)
    assert not {cell.seed for cell in cells} & set(PILOT_SEEDS)
    real = [cell for cell in cells if cell.learner != TRACE]
    assert {cell.cluster for cell in real} == {HEADLINE}
    assert len({cell.seed for cell in real if cell.method == "rex"}) >= 10
    assert {cell.search for cell in real if cell.method == "rex"} == {"helper"}
    assert {cell.cluster for cell in cells} == {f"{k}xT4,{k}xV100{kind}" for k in (2, 4) for kind in ("", "-gavel")}
    # Whole seeds first.
    order = [cell.seed for cell in cells]
    assert order == sorted(order)
    methods = {cell.method for cell in cells}
    assert {"bsp", "dlb", "lb_bsp", "omnilearn", "pollux", "growth10", "cannikin", "rex"} <= methods
    assert {"oracle", "oracle_delayed", "best_fixed_equal", "best_fixed_balanced"} <= methods
    quick = experiment.cells_of(Settings(quick=True), "digits")
    assert {cell.seed for cell in quick} == {0, 1}


def test_data_that_are_at_hand_and_damaged_are_not_changed_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "SHARED", tmp_path)

    def refused(name):
        if name in {"cifar10", "fashion_mnist"}:
            raise ConfigError("damaged or not there")

    monkeypatch.setattr(tasks, "load_task", refused)
    assert tasks.real_task(quick=False) == "digits"
    (tmp_path / "cifar10_jpeg.npz").touch()
    with pytest.raises(ConfigError, match="damaged"):
        tasks.real_task(quick=False)
    assert tasks.real_task(quick=True) == "digits"
