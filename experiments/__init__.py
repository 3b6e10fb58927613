"""Experiments: each module answers one question and is run as ``python -m experiments.NAME --json FILE``."""
