"""A workload's configuration: its own default, a file, the environment, its options; the later one wins."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rex_ray import ConfigError
from workloads.arguments import Parser
from workloads.base import add_common_arguments, checked


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_common_arguments(parser, global_batch_size=128, num_epochs=5)
    return checked(parser, words)


def test_the_later_layer_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rex.yaml"
    file.write_text("policy: dlb\nseed: 3\nwarm_up_steps: 5\n")
    assert parsed().rex_config.global_batch_size == 128
    assert parsed().policy == "rex"
    options = parsed("--config", str(file))
    assert (options.policy, options.seed, options.rex_config.warm_up_steps) == ("dlb", 3, 5)
    monkeypatch.setenv("REX_RAY_SEED", "4")
    monkeypatch.setenv("REX_RAY_GLOBAL_BATCH_SIZE", "512")
    assert parsed("--config", str(file)).seed == 4
    assert parsed().rex_config.global_batch_size == 512
    options = parsed("--config", str(file), "--seed", "0", "--policy", "bsp")
    assert (options.seed, options.policy, options.rex_config.seed) == (0, "bsp", 0)


@pytest.mark.parametrize(
    ("text", "said"), [("sede: 1\n", ":1: unknown key 'sede'"), ("global_batch_size: 1\n", "below num_workers=2")]
)
def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "rex.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        parsed("--config", str(file))
