"""The Grafana dashboard is sound, and shows every metric that is emitted and no other."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from rex_ray.train.prometheus import METRICS

DASHBOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana" / "rex_ray.json").read_text())
PANELS = DASHBOARD["panels"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def expressions() -> list[str]:
    found = [target["expr"] for panel in PANELS for target in panel["targets"]]
    found += [note["expr"] for note in DASHBOARD["annotations"]["list"] if "expr" in note]
    return found


def test_it_has_the_form_of_rays_own_dashboards_and_their_data_source():
    ray = pytest.importorskip("ray.dashboard.modules.metrics.grafana_dashboard_factory")
    text, uid = ray.generate_train_grafana_dashboard()
    theirs = json.loads(text)
    assert DASHBOARD["schemaVersion"] == theirs["schemaVersion"]
    assert DASHBOARD["uid"] != uid
    source = next(variable for variable in theirs["templating"]["list"] if variable["name"] == "datasource")
    assert (VARIABLES["datasource"]["type"], VARIABLES["datasource"]["query"]) == (source["type"], source["query"])
    assert all(panel["datasource"] == "${datasource}" for panel in PANELS)
    assert {panel["datasource"] for panel in theirs["panels"] if panel["type"] != "row"} == {"${datasource}"}
    assert {"title", "uid", "panels", "templating", "time", "annotations"} <= DASHBOARD.keys()


def test_panels_are_told_apart_and_do_not_overlap():
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        assert panel["description"]
    for one, other in combinations([panel["gridPos"] for panel in PANELS], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)


def test_every_metric_shown_is_emitted_and_every_one_emitted_is_shown():
    named = {name for expression in expressions() for name in re.findall(r"\bray_(\w+)", expression)}
    assert named == set(METRICS)


def test_every_expression_asks_for_the_chosen_runs_only_and_for_tags_that_there_are():
    assert {"run", "SessionName"} <= VARIABLES.keys()
    for expression in expressions():
        names = re.findall(r"ray_(\w+)\{([^}]*)\}", expression)
        assert names, expression
        for name, filters in names:
            assert 'run=~"$run"' in filters
            assert 'SessionName=~"$SessionName"' in filters
            by = re.search(r"by \(([^)]*)\)", expression)
            if by is not None:
                assert set(by[1].split(", ")) == set(METRICS[name][1])
    for panel in PANELS:
        for target in panel["targets"]:
            tags = set(METRICS[re.findall(r"ray_(\w+)", target["expr"])[0]][1])
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= tags


def test_brackets_of_expressions_are_balanced():
    for expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing)
