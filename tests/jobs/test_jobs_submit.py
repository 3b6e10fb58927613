"""``ray job submit`` for real: a head with a dashboard, jobs that succeed, fail and are stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from head import Head, started, wait_for

from rex_ray.control.events import RunEnded
from rex_ray.report.reading.load import load_journal, load_run

# Commands import Ray, and workers torch, while other tests' processes are about.
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def fashion_mnist(images: Path, storage: Path, *options: str) -> list[str]:
    command = ["python", "-m", "workloads.fashion_mnist", "--data-dir", str(images), "--storage", str(storage)]
    return [*command, "--num-workers", "2", *options]


def test_job_submit_trains_and_its_logs_tell_the_story(head: Head, project: Path, images: Path, tmp_path: Path) -> None:
    options = ["--num-epochs", "2", "--global-batch-size", "16", "--policy", "dlb", "--label-selector", "in(T4,V100)"]
    code, output = head.submit("good", project, *fashion_mnist(images, tmp_path, *options))
    assert code == 0, output[-4000:]
    assert "Job 'good' succeeded" in output
    assert "Reporting training result" in output
    assert "'accuracy': 1.0" in output
    run = load_run(tmp_path / "fashion_mnist-dlb")
    assert run.outcome == "finished"
    (group,) = run.groups
    assert group.num_rows.sum() == 2 * 203  # every row once per epoch
    wait_for(lambda: not head.jobs_processes(), 60.0, "the job's processes are gone")


def test_job_submit_of_what_cannot_work_fails_with_its_own_words(
    head: Head, project: Path, images: Path, tmp_path: Path
) -> None:
    code, output = head.submit("bad", project, *fashion_mnist(images, tmp_path, "--global-batch-size", "1"))
    assert code == 1
    assert "Job 'bad' failed" in output
    assert "Job entrypoint command failed with exit code 2" in output
    assert "error: global_batch_size=1 is below num_workers=2" in output
    assert "Traceback" not in output


@pytest.mark.long
def test_job_submit_is_ended_by_job_stop_and_leaves_nothing(
    head: Head, project: Path, images: Path, tmp_path: Path
) -> None:
    endless = fashion_mnist(images, tmp_path, "--num-epochs", "100000", "--global-batch-size", "16")
    code, output = head.submit("endless", project, *endless, wait=False)
    assert code == 0, output
    journal = tmp_path / "fashion_mnist-rex" / "rex_ray" / "journal" / "events.jsonl"
    wait_for(lambda: journal.exists() and "MetricReported" in journal.read_text(), 240.0, "the first epoch")
    stopped = head.ray("job", "stop", "endless")
    assert stopped.returncode == 0
    assert "Job 'endless' was stopped" in stopped.stdout
    assert load_journal(tmp_path / "fashion_mnist-rex").events[-1] == RunEnded(reason="interrupted")
    wait_for(lambda: not head.jobs_processes(), 60.0, "the job's processes are gone")
    groups = head.ray("list", "placement-groups", "--filter", "state!=REMOVED")
    assert "No resource in the cluster" in groups.stdout, groups.stdout
    status = head.ray("job", "status", "endless")
    assert "was stopped" in status.stdout


@pytest.mark.long
def test_two_own_machines_make_a_cluster_that_the_doctor_and_job_submit_know(
    head: Head, project: Path, images: Path, tmp_path: Path
) -> None:
    """``ray start --address --labels`` on a second machine, which here is a second node with a folder of its own."""
    words = ["--address", head.address, "--num-cpus", "2", "--labels", "ray.io/accelerator-type=V100"]
    words += ["--object-store-memory", str(80 * 2**20), "--temp-dir", str(head.folder / "second")]
    with started(words, head.environment, head.folder / "second.log"):
        rex_ray = [sys.executable, "-c", "from rex_ray.cli import main; main()"]
        examined = head.command(*rex_ray, "doctor", "--address", head.address, "--timeout", "200", "--json")
        found = json.loads(examined.stdout[examined.stdout.index("{") :])
        assert sorted(probe["label"] for probe in found["probes"]) == ["T4", "V100"]
        assert found["all_reduce_s"] > 0
        options = ["--num-epochs", "1", "--global-batch-size", "16", "--label-selector", "V100"]
        code, output = head.submit("elsewhere", project, *fashion_mnist(images, tmp_path, *options))
        assert code == 0, output[-4000:]
        (group,) = load_run(tmp_path / "fashion_mnist-rex").groups
        assert group.devices == ("V100", "V100")
