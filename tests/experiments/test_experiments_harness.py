from __future__ import annotations

import json

import numpy as np
import pytest

from experiments._harness import Findings, Settings, bootstrap_median, main, to_document


def measure(settings: Settings) -> Findings:
    """Measures nothing."""
    return Findings(
        figures={"answer": 42, "seed": settings.seed},
        tables={"rows": [{"name": "a", "ok": True, "value": None}, {"name": "b", "ok": False, "value": 1.5}]},
        settings={"num_pairs": 3},
    )


def test_main_writes_the_five_keys_and_prints_the_tables(tmp_path, capsys):
    path = tmp_path / "new" / "out.json"
    main("nothing", measure, ["--quick", "--seed", "7", "--json", str(path)])
    document = json.loads(path.read_text())
    assert document["name"] == "nothing"
    assert document["command"] == f"python -m experiments.nothing --quick --seed 7 --json {path}"
    assert document["settings"] == {"quick": True, "seed": 7, "num_pairs": 3}
    assert document["figures"] == {"answer": 42.0, "seed": 7.0}
    assert document["tables"]["rows"][0] == {"name": "a", "ok": True, "value": None}
    printed = capsys.readouterr().out
    assert "rows" in printed
    assert "answer" in printed


def test_a_figure_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match=r"'bad'.*'x'.*nan"):
        to_document("x", "", Settings(), Findings(figures={"bad": float("nan")}))


def test_rows_with_different_columns_are_refused():
    with pytest.raises(ValueError, match="different columns"):
        to_document("x", "", Settings(), Findings(figures={}, tables={"t": [{"a": 1}, {"b": 1}]}))


def test_bootstrap_interval_covers_the_true_median_about_95_times_in_100():
    rng = np.random.default_rng(1)
    hits = 0
    for k in range(300):
        _, low, high = bootstrap_median(rng.normal(1.0, 0.1, size=40), seed=k, num_resamples=500)
        hits += low <= 1.0 <= high
    # Binomial(300, .95) lies in 270..297 with probability above .999; the percentile interval is slightly narrow.
    assert 265 <= hits <= 298


def test_bootstrap_refuses_what_has_no_median():
    with pytest.raises(ValueError, match="finite"):
        bootstrap_median(np.array([]), seed=0)
    with pytest.raises(ValueError, match="finite"):
        bootstrap_median(np.array([1.0, np.nan]), seed=0)
