"""What the shell offers after a Tab: names that rex_ray knows, and folders that hold a run.

Each is a function of the word so far. None of them may raise or print: a shell has nowhere to show it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["clusters", "contestants", "disturbances", "noises", "policies", "runs", "scenarios", "workloads"]

_MOST_RUNS = 100


def policies(incomplete: str) -> list[str]:
    """Return policies by name."""
    from rex_ray.policies.registry import policy_names  # noqa: PLC0415

    return _beginning(incomplete, policy_names())


def contestants(incomplete: str) -> list[str]:
    """Return what ``demo`` can compare."""
    return sorted({*policies(incomplete), *_beginning(incomplete, ("rex-no-trigger", "rex-no-search"))})


def scenarios(incomplete: str) -> list[str]:
    """Return the demo's scenarios."""
    return _beginning(incomplete, ("static", "transient", "growth", "tiles"))


def workloads(incomplete: str) -> list[str]:
    """Return workloads with public step times."""
    from rex_ray.scenario import workload_names  # noqa: PLC0415

    return _beginning(incomplete, workload_names())


def clusters(incomplete: str) -> list[str]:
    """Return the last entry of ``COUNTxDEVICE,...`` with every kind that it may become."""
    from rex_ray.scenario import device_names  # noqa: PLC0415

    done, comma, entry = incomplete.rpartition(",")
    count, times, kind = entry.partition("x")
    if not (times and count.isdecimal()):
        count, times, kind = "", "", entry
    kinds = [name for name in device_names() if name.startswith(kind)]
    return [f"{done}{comma}{count}{times}{name}" for name in sorted(kinds)]


def noises(incomplete: str) -> list[str]:
    """Return kinds of noise."""
    return _beginning(incomplete, ("quiet", "dedicated", "shared"))


def disturbances(incomplete: str) -> list[str]:
    """Return kinds of disturbance."""
    return _beginning(incomplete, ("none", "random:1", "lbb"))


def runs(incomplete: str) -> list[str]:
    """Return folders of runs below the folder that is being typed, at most two levels down; else the shell's files."""
    typed, begun = incomplete.rpartition("/")[::2]
    base = Path(f"{typed}/") if incomplete.startswith("/") or typed else Path()
    try:
        children = [path for path in sorted(base.iterdir()) if path.name.startswith(begun) and path.is_dir()]
        found = [
            path
            for child in children
            for path in (child, *sorted(child.iterdir()))
            if (path / "rex_ray" / "journal").is_dir()
        ]
    except OSError:
        return []
    return [str(path) for path in found[:_MOST_RUNS]]


def _beginning(incomplete: str, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
