"""Runs a script as its user would, but on an emulated cluster of a slow and a fast worker: ``SCRIPT ARGUMENTS...``."""

from __future__ import annotations

import runpy
import sys

from rex_ray import local_cluster

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    with local_cluster({"T4": 1, "V100": 1}, log_to_driver=True):
        runpy.run_path(sys.argv[0], run_name="__main__")
