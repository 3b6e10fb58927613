"""``rex-ray doctor``: what it says of a cluster, and the exit code that a script reads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from cards import T4

from rex_ray.cli import main
from rex_ray.core.errors import ConfigError
from rex_ray.train import preflight
from rex_ray.train.examination import Examination, NodeFacts, Probe, chosen_nodes, findings_of

LABEL = "ray.io/accelerator-type"


def node(name: str, label: str | None = "T4", *, cpus: float = 4.0, gpus: float = 1.0) -> NodeFacts:
    return NodeFacts(node_id=name * 8, label=label, num_cpus=cpus, num_gpus=gpus)


def examined(*probes: Probe, nodes: tuple[NodeFacts, ...] = (), **more: Any) -> Examination:
    found = Examination(nodes=nodes or tuple(probe.node for probe in probes), probes=probes, **more)
    return dataclasses.replace(found, findings=tuple(findings_of(found, LABEL)))


TWO_T4 = (Probe(node=node("a"), facts=T4), Probe(node=node("b"), facts=dataclasses.replace(T4, host="b")))
OTHER_NCCL = Probe(node=node("b", "V100"), facts=dataclasses.replace(T4, host="b", kind="V100", nccl="2.18.3"))


def run(found: Examination, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(preflight, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(preflight, "examine", lambda label, timeout: found)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    return int(ended.value.code or 0)


def test_a_sound_cluster_is_a_table_a_time_and_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    found = examined(*TWO_T4, backend="nccl", all_reduce_s=0.0031)
    assert run(found, monkeypatch) == 0
    said = capsys.readouterr().out
    assert said.count("Tesla T4") == 2
    assert "all-reduce of 4 MiB over nccl among 2 workers took 3.1 ms" in said
    assert "verdict: fine" in said


def test_f11_a_mix_of_versions_is_exit_code_1_and_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(examined(TWO_T4[0], OTHER_NCCL, backend="nccl", all_reduce_s=0.1), monkeypatch) == 1
    said = capsys.readouterr().out
    assert "warning: NCCL differs: 2.21.5 on rank 0, 2.18.3 on rank 1. Ranks with two versions hang" in said


def test_a_reduction_that_failed_cannot_work_and_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examined(
        *TWO_T4, backend="nccl", all_reduce_error="the probes' all-reduce over nccl did not end within 9 s"
    )
    assert run(found, monkeypatch, "--json") == 2
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "cannot work"
    assert said["findings"][0]["severity"] == "fatal"
    assert said["probes"][0]["facts"]["nccl"] == "2.21.5"


def test_nodes_without_a_label_are_a_warning_only_beside_nodes_that_have_one() -> None:
    bare = Probe(node=node("c", None), facts=dataclasses.replace(T4, kind="Tesla T4"))
    assert examined(*TWO_T4, bare).verdict == "warnings"
    (finding,) = (f for f in examined(*TWO_T4, bare).findings if f.severity == "warning")
    assert "1 of 3 nodes have no label ray.io/accelerator-type (cccccccc" in finding.text
    assert "ray start --labels" in finding.text
    assert examined(bare).verdict == "fine"


def test_a_node_that_could_not_be_looked_at_is_named_and_nothing_to_train_on_is_fatal() -> None:
    silent = Probe(node=node("d"), error="no probe started within 30 s; all its GPUs may be in use")
    assert examined(TWO_T4[0], silent).verdict == "warnings"
    assert "dddddddd (T4) could not be looked at: no probe started" in examined(TWO_T4[0], silent).findings[0].text
    assert examined(silent).verdict == "cannot work"
    assert examined(nodes=(node("e", cpus=0.0, gpus=0.0),)).verdict == "cannot work"


def test_one_node_per_kind_is_probed_and_two_where_there_is_one_kind() -> None:
    head = node("h", None, cpus=0.0, gpus=0.0)
    t4, v100, idle = [node(n) for n in "abc"], [node("d", "V100")], node("e", "V100", gpus=0.0)
    assert chosen_nodes([head, *t4]) == t4[:2]
    assert chosen_nodes([head, *t4, *v100, idle]) == [t4[0], v100[0], idle]
    assert chosen_nodes([head]) == []


def test_without_a_cluster_one_line_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nmore")

    monkeypatch.setattr(preflight.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(preflight.ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=r"no running Ray cluster .*ray start --head.*--address local") as raised,
        preflight.connected(None),
    ):
        pass
    assert "\n" not in str(raised.value)
