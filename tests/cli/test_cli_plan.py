"""``rex-ray plan``: what is attainable, for people and for programs, and what it says where it cannot."""

from __future__ import annotations

import json

import pytest

from rex_ray.cli import main
from rex_ray.scenario import parse_cluster
from rex_ray.sim.limits import cluster_limits


def run_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    out, err = capsys.readouterr()
    code = stopped.value.code
    return code if isinstance(code, int) else 0, out, err


def test_limits_for_people_name_figures_assumptions_and_sources(capsys):
    code, out, _ = run_plan(
        capsys, "--limits", "--cluster", "4xT4,4xV100", "--workload", "resnet50", "--global-batch-size", "256"
    )
    assert code == 0
    found = cluster_limits(parse_cluster("4xT4,4xV100"), "resnet50", reference_batch_size=256)
    assert "resnet50 on 4xT4,4xV100, to validation accuracy 75 %" in out
    assert f"{found.oracle_s / 3600:.2f}" in out
    assert f"{100 * found.saving(found.bsp_s[256]):.1f} %" in out
    assert f"{100 * found.saving(found.best_fixed_equal.time_s):.1f} %" in out
    assert "does not fit" in out
    assert "all-reduce between T4 nodes" in out
    assert "growth to at most 2048" in out
    for source in found.sources:
        assert f"{source.repo} {source.path}" in out


def test_limits_for_programs_have_every_field(capsys):
    code, out, _ = run_plan(capsys, "--limits", "-c", "2xT4,2xV100", "-w", "resnet18", "-b", "256", "--json")
    assert code == 0
    found = json.loads(out)
    direct = cluster_limits(parse_cluster("2xT4,2xV100"), "resnet18", reference_batch_size=256)
    assert found["oracle_s"] == direct.oracle_s
    assert found["best_fixed_balanced"] == {
        "global_batch_size": direct.best_fixed_balanced.global_batch_size,
        "time_s": direct.best_fixed_balanced.time_s,
    }
    assert {int(batch): time_s for batch, time_s in found["bsp_s"].items()} == direct.bsp_s
    assert all(set(source) == {"repo", "commit", "path"} for source in found["sources"])


def test_a_plan_without_limits_splits_one_batch(capsys):
    code, out, _ = run_plan(capsys, "-c", "4xT4,4xV100", "-w", "resnet50", "-b", "256", "--json")
    assert code == 0
    found = json.loads(out)
    balanced, equal = found["balanced"], found["equal"]
    assert sum(balanced["local_batch_sizes"]) == sum(equal["local_batch_sizes"]) == 256
    assert equal["local_batch_sizes"] == [32] * 8
    assert balanced["step_s"] < equal["step_s"]
    assert balanced["imbalance"] < equal["imbalance"]
    code, out, _ = run_plan(capsys, "-c", "4xT4,4xV100", "-w", "resnet50", "-b", "256")
    assert code == 0
    assert "T4 32, V100 32" in out


def test_equal_shares_that_do_not_fit_are_said_to(capsys):
    code, out, _ = run_plan(capsys, "-c", "T4,V100", "-w", "resnet50", "-b", "500", "--network", "none")
    assert code == 0
    assert "do not fit the smallest device" in out
    assert "takes no time" in out


def test_like_workers_are_in_balance_to_the_last_digit(capsys):
    code, out, _ = run_plan(capsys, "-c", "300xT4", "-w", "bert")
    assert code == 0
    assert "-0.0" not in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-c", "4xT4,4xV10", "-w", "resnet50", "--limits"], "unknown device 'V10' (did you mean 'V100'?)"),
        (["-c", "4:T4", "-w", "resnet50", "--limits"], "is not COUNTxDEVICE; write for example 4xT4,4xV100"),
        (["-c", "2xT4", "-w", "resnet5", "--limits"], "did you mean 'resnet50'?"),
        (["-c", "2xP100", "-w", "bert", "--limits"], "no public source measured 'bert' on 'P100'"),
        (["-c", "2xK80", "-w", "lstm", "--limits"], "no public source measured the noise scale of 'lstm'"),
        (["-c", "2xT4", "-w", "resnet50", "--network", "K80"], "no measured all-reduce times of 'resnet50' on 'K80'"),
        (
            ["-c", "2xT4", "-w", "resnet50", "-b", "500"],
            "500 rows does not fit 2xT4: 2 workers take at least a row each",
        ),
        (["-c", "2xK80", "-w", "lstm", "--network", "none"], "give --global-batch-size"),
    ],
)
def test_what_has_no_profile_is_one_clear_line(capsys, arguments, said):
    code, out, err = run_plan(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err
