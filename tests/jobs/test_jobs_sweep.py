"""The sweep that users copy, under ``ray job submit``: trials of Ray Tune, each a training run with its own workers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from head import Head, started

from rex_ray.report.reading.load import load_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = """
import sweep

sweep.SEARCH = {{"policy": sweep.tune.grid_search({policies}), "global_batch_size": 64}}
sweep.main()
"""


def submitted(head: Head, project: Path, tmp_path: Path, name: str, policies: list[str], *options: str) -> str:
    """Submit the example with a smaller search, as a user would who imports it; return what was printed."""
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    (folder / "small.py").write_text(SMALL.format(policies=policies))
    command = ["python", "small.py", "--storage", str(tmp_path / "results"), "--num-epochs", "2", *options]
    code, output = head.submit(name, folder, *command)
    assert code == 0, output[-6000:]
    assert f"Job '{name}' succeeded" in output
    return output


@pytest.mark.long
def test_a_sweep_under_job_submit_runs_whole_trainings(head: Head, project: Path, tmp_path: Path) -> None:
    output = submitted(head, project, tmp_path, "sweep", ["bsp", "rex"], "--num-workers", "1", "--num-concurrent", "2")
    assert "FileNotFoundError" not in output
    for policy in ("bsp", "rex"):
        run = load_run(tmp_path / "results" / "runs" / f"{policy}-64")
        assert run.outcome == "finished"
        assert len(run.metrics) == 2
        assert run.metrics[-1].metrics["accuracy"] > 0.5
        assert re.search(rf"^{policy} +64 +2 +0\.[5-9]", output, flags=re.MULTILINE), "Tune heard of both epochs"


@pytest.mark.long
def test_a_sweep_outlives_the_folder_that_it_was_submitted_in(head: Head, project: Path, tmp_path: Path) -> None:
    """A second node in the head's session folder unpacks the project anew, over the one the driver stands in."""
    words = ["--address", head.address, "--num-cpus", "1", "--labels", "ray.io/accelerator-type=V100"]
    words += ["--object-store-memory", str(80 * 2**20)]
    with started(words, head.environment, head.folder / "shared.log"):
        output = submitted(head, project, tmp_path, "shared", ["bsp"], "--num-workers", "1", "--label-selector", "V100")
    assert "FileNotFoundError" not in output
    assert load_run(tmp_path / "results" / "runs" / "bsp-64").outcome == "finished"
