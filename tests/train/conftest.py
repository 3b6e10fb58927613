"""One local Ray cluster for all tests of the Ray side: it takes longer to start than most of them to run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rex_ray import local_cluster
from rex_ray.train.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Workers import the loops from here, and what these import from the folder above and the repository's root.
        here = Path(__file__).parent
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here), *map(str, here.parents[:2])]), prepend=os.pathsep)
        # A CPU on the head node: Tune's trials run there.
        with local_cluster({"T4": 1, "V100": 1}, head_cpus=1) as running:
            yield running
