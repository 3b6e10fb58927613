from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from experiments.calibration import __main__ as calibration
from experiments.calibration._bounds import Budget, Result
from experiments.calibration._figures import CHARTS, Chart, draw
from experiments.calibration._goals import FIGURES, bounds_of, verdicts

PUBLISHED = (
    "gns_bias_max_pct, growth_false_pct, growth_power_8_pct, resplit_false_per_10k_ar07_4,"
    " resplit_false_per_10k_ar07_16, resplit_false_per_10k_ar07_64, resplit_false_per_10k_spike2_16,"
    " trigger_delay_median_1p5x50, trigger_delay_p95_1p5x50, trigger_miss_1p5x50_pct, split_mismatches,"
    " ax_worst_ratio_to_exact, ax_tile32_ratio_to_optimum, controller_us_per_worker_step_4,"
    " controller_us_per_worker_step_1024, split_ms_1024, ax_decision_s"
)


def whole(name):
    """A module that measures every figure it owes, each as 0.5, with bounds."""
    names = [figure.name for figure in FIGURES if figure.module == name]

    def measure(budget: Budget) -> Result:
        rows = [{"figure": figure, "low": 0.25, "high": 0.75, "num_runs": budget.scaled(1000, 10)} for figure in names]
        return Result(figures=dict.fromkeys(names, 0.5), tables={"bounds": rows}, notes=[f"seed {budget.seed}"])

    return measure


def calibrate(tmp_path, *arguments, loader=whole):
    path = tmp_path / "out" / "calibration.json"
    code = calibration.main(["--json", str(path), *arguments], loader)
    return code, json.loads(path.read_text()), path


def test_the_published_figures_are_exactly_these():
    assert ", ".join(figure.name for figure in FIGURES) == PUBLISHED
    assert {figure.module for figure in FIGURES} == set(calibration.MODULES)


def test_every_module_is_measured_in_order_and_written(tmp_path, capsys):
    code, document, _ = calibrate(tmp_path, "--quick", "--seed", "7")
    assert code == 0
    assert list(document["modules"]) == ["gns", "growth", "trigger", "split", "search", "cost"]
    assert document["figures"] == dict.fromkeys((figure.name for figure in FIGURES), 0.5)
    assert document["settings"] == {"quick": True, "seed": 7, "level": 0.95}
    assert document["tables"]["gns.bounds"][0]["num_runs"] == 10
    assert document["notes"][0] == "gns: seed 7"
    assert document["machine"]["cpu"]
    assert document["command"].startswith("python -m experiments.calibration --json ")
    printed = capsys.readouterr().out
    for word in ("gns_bias_max_pct", "goal", "<= 25", "0.75", "[ "):
        assert word in printed


def test_only_what_is_asked_for_runs_in_the_usual_order(tmp_path, capsys):
    code, document, _ = calibrate(tmp_path, "--only", "trigger,growth")
    assert code == 0
    assert list(document["modules"]) == ["growth", "trigger"]
    assert "split_mismatches" not in capsys.readouterr().out.split("calibration")[-1]


@pytest.mark.parametrize("only", ["grwth", "", "growth,tigger"])
def test_a_module_that_there_is_not_is_named_before_anything_runs(tmp_path, only, capsys):
    with pytest.raises(SystemExit):
        calibrate(tmp_path, "--only", only)
    assert "there are: gns, growth" in capsys.readouterr().err


def test_a_missing_module_and_a_failing_one_cost_only_themselves(tmp_path, capsys):
    def loader(name):
        if name == "gns":
            raise calibration.MissingModuleError("there is no gns yet")
        if name == "trigger":
            return lambda budget: 1 / 0
        return whole(name)

    code, document, _ = calibrate(tmp_path, loader=loader)
    assert code == 1
    states = {name: module["status"] for name, module in document["modules"].items()}
    assert states == {
        "gns": "missing", "growth": "ok", "trigger": "failed", "split": "ok", "search": "ok", "cost": "ok",
    }  # fmt: skip
    assert "ZeroDivisionError" in document["modules"]["trigger"]["error"]
    assert {"gns_bias_max_pct", "trigger_delay_p95_1p5x50"}.isdisjoint(document["figures"])
    assert "ax_decision_s" in document["figures"]
    assert {row["figure"]: row["met"] for row in document["verdicts"]}["gns_bias_max_pct"] == "not measured"
    assert "trigger: failed: ZeroDivisionError" in capsys.readouterr().out


@pytest.mark.parametrize("result", [
    Result(figures={"gns_bias_max_pct": float("nan")}),
    Result(tables={"t": [{"a": 1}, {"b": 2}]}),
    Result(tables={"t": [{"a": float("inf")}]}),
    Result(tables={"t": [{"a": object()}]}),
])  # fmt: skip
def test_findings_that_the_json_cannot_hold_fail_their_module_alone(tmp_path, result):
    code, document, _ = calibrate(tmp_path, loader=lambda name: whole(name) if name != "gns" else lambda budget: result)
    assert code == 1
    assert document["modules"]["gns"]["status"] == "failed"
    assert len(document["figures"]) == len(FIGURES) - 1


def test_a_figure_of_another_module_or_an_unpublished_one_stays_apart(tmp_path):
    figures = {"gns_bias_max_pct": 0.5, "split_mismatches": 3.0, "extra": np.float64(2.0)}
    code, document, _ = calibrate(tmp_path, "--only", "gns", loader=lambda name: lambda budget: Result(figures))
    assert code == 0
    assert document["figures"] == {"gns_bias_max_pct": 0.5}
    assert document["other_figures"] == {"split_mismatches": 3.0, "extra": 2.0}


def test_numbers_of_numpy_are_written_as_numbers(tmp_path):
    rows = [{"a": np.int64(3), "b": np.float64(0.5), "c": np.bool_(True)}]
    _, document, _ = calibrate(tmp_path, "--only", "gns", loader=lambda name: lambda b: Result({}, {"t": rows}))
    assert document["tables"]["gns.t"] == [{"a": 3, "b": 0.5, "c": True}]


def test_an_interrupted_run_keeps_what_it_had_measured(tmp_path):
    def loader(name):
        if name == "split":
            raise KeyboardInterrupt
        return whole(name)

    path = tmp_path / "c.json"
    with pytest.raises(KeyboardInterrupt):
        calibration.main(["--json", str(path)], loader)
    assert list(json.loads(path.read_text())["modules"]) == ["gns", "growth", "trigger"]


def test_a_real_module_is_found_and_a_wrong_name_is_missing():
    assert callable(calibration.load("cost"))
    with pytest.raises(calibration.MissingModuleError, match="nonsense"):
        calibration.load("nonsense")


def test_a_goal_within_the_bounds_is_met_or_missed_with_doubt():
    def met(value, low, high):
        tables = {"t": [{"figure": "growth_false_pct", "low": low, "high": high}]}
        figures = {} if value is None else {"growth_false_pct": value}
        return next(row["met"] for row in verdicts(figures, tables) if row["figure"] == "growth_false_pct")

    assert met(2.0, 1.0, 4.9) == "yes"
    assert met(4.0, 3.0, 6.0) == "yes?"
    assert met(5.5, 4.5, 6.0) == "no?"
    assert met(7.0, 6.0, 8.0) == "no"
    assert met(4.0, None, None) == "yes"
    assert met(None, None, None) == "not measured"
    assert bounds_of("growth_false_pct", {"t": [{"figure": "growth_false_pct"}]}) is None


CASES = Chart(name="c", title="Cases & more", table="m.t", kind="cases", value="v", label=("kind", "n"), low="lo", high="hi", goal=1.0)  # fmt: skip  # noqa: E501
LINES = Chart(name="l", title="Lines", table="m.t", kind="lines", value="v", label=("kind",), x="n", low="lo", high="hi", log_x=True)  # fmt: skip  # noqa: E501
ROWS = [
    {"kind": kind, "n": n, "v": v, "lo": v / 2, "hi": 2 * v}
    for kind in ("ar .7", "spikes <2 %>")
    for n, v in ((4, 0.0), (16, 0.5), (64, 3.0))
]


@pytest.mark.parametrize("chart", [CASES, LINES])
def test_a_drawing_is_a_whole_file_that_shows_every_row(chart):
    svg = draw({"m.t": ROWS}, [chart])[chart.name]
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == len(ROWS)
    assert "nan" not in svg
    assert "inf" not in svg


def test_every_chart_is_drawn_from_a_module_that_there_is_and_has_a_file_of_its_own():
    assert {chart.table.partition(".")[0] for chart in CHARTS} <= set(calibration.MODULES)
    assert len({chart.name for chart in CHARTS}) == len(CHARTS)


def test_what_was_not_measured_is_not_drawn():
    assert draw({}, [CASES, LINES]) == {}
    assert draw({"m.t": [{"v": None, "kind": "a", "n": 1}]}, [CASES]) == {}
    assert draw({"m.t": [{"v": 1.0, "kind": "a"}]}, [CASES]) == {}
    one = [{"kind": "a", "n": 4, "v": 0.0, "lo": None, "hi": None}]
    assert all("nan" not in svg for svg in draw({"m.t": one}, [CASES, LINES]).values())
