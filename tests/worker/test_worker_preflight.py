"""The look at every worker before training: which mixes are named, one precision for all, and a reduction in time."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cards import V100
from gloo_group import GlooGroup
from scripted import MemoryReporter, Rows, ScriptedLink, opened, two_layers

from rex_ray.core.errors import ConfigError, LinkError
from rex_ray.worker.link import IncidentRecord
from rex_ray.worker.preflight import facts as facts_module
from rex_ray.worker.preflight import look as look_module
from rex_ray.worker.preflight.facts import WorkerFacts, collect
from rex_ray.worker.preflight.judging import common_dtype, judge, refuse_dtype
from rex_ray.worker.preflight.table import COLUMNS, text_table

A100 = dataclasses.replace(V100, host="b", kind="A100", device_name="A100-SXM4-40GB", capability="8.0", bf16=True)
CPU = dataclasses.replace(
    V100, kind="cpu", device_type="cpu", device_name=None, capability=None, driver=None, nccl=None, fp16=False
)


def told(workers: Sequence[WorkerFacts]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.text) for finding in judge(workers)]


def test_workers_that_are_alike_are_not_talked_about() -> None:
    assert told([A100, A100, A100]) == []
    assert told([CPU]) == []


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("torch", "2.7.1+cu124", "torch differs: 2.6 on ranks 0 and 2, 2.7 on rank 1"),
        ("nccl", "2.26.2", "NCCL differs: 2.21.5 on ranks 0 and 2, 2.26.2 on rank 1"),
        ("cuda", "12.8", "CUDA differs: 12.4 on ranks 0 and 2, 12.8 on rank 1"),
        ("rex_ray", "0.2.0", "rex_ray differs: 0.1.0 on ranks 0 and 2, 0.2.0 on rank 1"),
        ("python", "3.12.1", "Python differs: 3.11 on ranks 0 and 2, 3.12 on rank 1"),
    ],
)
def test_f11_versions_that_differ_are_a_warning_that_names_ranks_and_remedy(field: str, value: str, says: str) -> None:
    ((severity, text),) = told([A100, dataclasses.replace(A100, **{field: value}), A100])
    assert severity == "warning"
    assert text.startswith(says)
    assert "version" in text or "build" in text


def test_what_may_differ_is_no_warning() -> None:
    patch = dataclasses.replace(A100, torch="2.6.1+cu124", python="3.11.9", host="c", memory_bytes=80 * 2**30)
    assert told([A100, patch]) == []
    assert told([A100, dataclasses.replace(A100, driver="550.54.15")])[0][0] == "note"


def test_gpus_beside_cpus_cannot_train_together() -> None:
    severity, text = told([A100, CPU])[0]
    assert severity == "fatal"
    assert "cuda on rank 0, cpu on rank 1" in text


def test_f12_one_precision_is_chosen_that_all_compute_natively_and_the_reason_is_named() -> None:
    assert common_dtype([A100, A100]) == "bfloat16"
    assert common_dtype([A100, V100]) == "float16"
    assert common_dtype([CPU, CPU]) is None
    assert common_dtype([dataclasses.replace(CPU, bf16=True)]) == "bfloat16"
    assert common_dtype([V100, dataclasses.replace(V100, fp16=False)]) is None
    ((severity, text),) = told([A100, V100])
    assert severity == "note"
    assert text.startswith(
        "rank 1 (V100) computes no bfloat16 natively, so session.autocast(dtype='auto') uses float16"
    )


def test_f12_a_precision_that_a_gpu_only_emulates_is_refused_with_its_rank() -> None:
    refuse_dtype([A100, V100], "float16")
    refuse_dtype([CPU], "bfloat16")  # to try things out
    with pytest.raises(ConfigError, match=r"bfloat16 was asked for, and rank 1 \(V100\) .* all ranks have float16"):
        refuse_dtype([A100, V100], "bfloat16")


def test_the_table_has_a_line_per_worker_and_every_column() -> None:
    header, *rows = text_table([V100, CPU]).splitlines()
    assert all(column in header for column in COLUMNS)
    assert len(rows) == 2
    assert "Tesla V100-SXM2-16GB" in rows[0]
    assert "16.0 GiB" in rows[0]
    assert "fp16" in rows[0]
    assert "fp32 only" in rows[1]


def test_this_process_reports_itself() -> None:
    found = collect("here", torch.device("cpu"))
    assert (found.kind, found.device_type, found.torch) == ("here", "cpu", torch.__version__)
    assert (found.memory_bytes or 0) > 2**20
    assert found.nccl is None


# --- real ranks

REPORTS = {0: A100, 1: dataclasses.replace(V100, nccl="2.18.3"), 2: A100}


def test_a_resumed_run_tells_of_its_look_at_the_step_where_it_goes_on() -> None:
    reporter, link = MemoryReporter(), ScriptedLink()
    with opened(reporter=reporter) as session:
        model = two_layers()
        net, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in session.epochs(1):
            for _, inputs, targets in session.loader(Rows(36)):
                F.mse_loss(net(inputs), targets).backward()
                optimizer.step()
            session.report({})
    with opened(link, MemoryReporter(reporter.saves[-1][1]), preflight_timeout_s=10.0):
        pass
    told = [(r.kind, r.step) for r in link.records if isinstance(r, IncidentRecord)]
    assert told == [("preflight", 3)]


def with_reports(rank: int, monkeypatched: dict[int, WorkerFacts]) -> None:
    facts_module.collect = lambda kind, device: monkeypatched[rank]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def all_starts(rank: int) -> dict[str, Any]:
    """Open sessions on workers that report a mixed cluster, on some that do not fit, and on a network that hangs."""
    real, reduce, heard = facts_module.collect, look_module._reduced_twice, Lines()
    logger = logging.getLogger("rex_ray")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    found: dict[str, Any] = {}
    try:
        with_reports(rank, REPORTS)
        mixed_start(rank, found)
        found["lines"] = heard.lines
        with_reports(rank, {0: A100, 1: CPU, 2: A100})
        with refused(found, "unlike"), opened(preflight_timeout_s=10.0):
            pass
        facts_module.collect = real
        with refused(found, "types"), opened() as session:
            model = two_layers() if rank else two_layers().float()
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        look_module._reduced_twice = lambda device: time.sleep(3.0 * (rank == 1)) or reduce(device)
        began_s = time.monotonic()
        with refused(found, "hangs"), opened(preflight_timeout_s=1.5, collective_timeout_s=3.0):
            pass
        found["took_s"] = time.monotonic() - began_s
        for thread in threading.enumerate():
            if thread.name == "rex_ray-preflight":  # it uses the group of whatever comes next
                thread.join(20.0)
    finally:
        facts_module.collect, look_module._reduced_twice = real, reduce
        logger.removeHandler(heard)
    return found


def mixed_start(rank: int, found: dict[str, Any]) -> None:
    link = ScriptedLink((4, 4, 4))
    with opened(link, preflight_timeout_s=10.0) as session:
        model = two_layers().float()
        ddp, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _, inputs, targets in session.loader(Rows(24)):
            with session.autocast():
                outputs = ddp(inputs.float())
            found["dtype"] = str(outputs.dtype)
            F.mse_loss(outputs.float(), targets.float()).backward()
            found["gradient"] = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        for name, asked in (("explicit", torch.bfloat16), ("odd", torch.int8)):
            with refused(found, name):
                session.autocast(asked)
        with refused(found, "mixed"):
            session.autocast(torch.float16 if rank == 1 else torch.bfloat16)
    found["incidents"] = [r.message for r in link.records if isinstance(r, IncidentRecord)]


@contextlib.contextmanager
def refused(found: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except (ConfigError, LinkError) as error:
        found[name] = str(error)


@pytest.fixture(scope="module")
def starts(ranks: GlooGroup) -> list[dict[str, Any]]:
    return ranks.run(all_starts, limit_s=80.0)


@pytest.mark.dist
class TestAtStart:
    def test_f11_rank_0_logs_the_table_and_the_mix_and_journals_both_once(self, starts: Any) -> None:
        lines = "\n".join(starts[0]["lines"])
        assert "INFO workers:\nrank  host" in lines
        assert "WARNING NCCL differs: 2.21.5 on ranks 0 and 2, 2.18.3 on rank 1" in lines
        assert "INFO an all-reduce of 4 MiB took" in lines
        (incident,) = starts[0]["incidents"]
        assert "NCCL differs" in incident
        assert "Tesla V100-SXM2-16GB" in incident
        assert [start["incidents"] for start in starts[1:]] == [[], []]
        assert not any("workers:" in line for start in starts[1:] for line in start["lines"])

    def test_f12_auto_is_one_dtype_on_all_ranks_said_once_and_gradients_keep_the_models(self, starts: Any) -> None:
        assert {start["dtype"] for start in starts} == {"torch.float16"}
        assert all(start["gradient"] == {"torch.float32"} for start in starts)
        lines = starts[0]["lines"]
        assert [line for line in lines if "autocast:" in line] == ["INFO autocast: float16 on all ranks"]

    def test_f12_what_one_rank_lacks_or_asks_for_alone_is_refused_on_all(self, starts: Any) -> None:
        for start in starts:
            assert "rank 1 (V100)" in start["explicit"]
            assert "bfloat16 on ranks 0 and 2, float16 on rank 1" in start["mixed"]
            assert "int8" in start["odd"]

    def test_f12_gradients_of_different_types_are_refused_on_all_ranks(self, starts: Any) -> None:
        for start in starts:
            assert "4 x float32 on rank 0, 4 x float64 on ranks 1 and 2" in start["types"]

    def test_workers_that_cannot_train_together_are_refused_on_all_ranks(self, starts: Any) -> None:
        assert all("some workers have a GPU and some do not" in start["unlike"] for start in starts)

    def test_f11_a_reduction_that_hangs_though_all_are_there_ends_in_time_and_says_what_to_look_at(
        self, starts: Any
    ) -> None:
        message = starts[0]["hangs"]
        assert message.startswith("rank 0 waited 1.5 s for the preflight's all-reduce over gloo (limit 1.5 s): ")
        assert "ranks 1 and 2 wait as well; every rank is there, so they cannot reach one another" in message
        assert "GLOO_SOCKET_IFNAME" in message
        assert starts[0]["took_s"] < 40.0  # and not the minutes that a backend would take
