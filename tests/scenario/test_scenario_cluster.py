"""A cluster in one line of text: what is written is what is meant, and a slip of the pen is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.scenario import device_names
from rex_ray.scenario.cluster import MAX_WORKERS, format_cluster, parse_cluster


def test_ranks_follow_the_order_written():
    assert parse_cluster("2xT4,1xV100") == ("T4", "T4", "V100")
    assert parse_cluster(" V100-gavel , 2 x T4") == ("V100-gavel", "T4", "T4")
    assert parse_cluster("2080Ti,2*2080Ti") == ("2080Ti",) * 3


@given(st.lists(st.sampled_from(device_names()), min_size=1, max_size=40))
def test_formatting_and_parsing_are_inverse(devices):
    assert parse_cluster(format_cluster(devices)) == tuple(devices)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is not COUNTxDEVICE"),
        ("4xT4,", "'' is not COUNTxDEVICE"),
        ("T4=4", "'T4=4' is not COUNTxDEVICE; write for example 4xT4,4xV100"),
        ("-1xT4", "is not COUNTxDEVICE"),
        ("4xT4 4xV100", "is not COUNTxDEVICE"),
        ("0xT4", "a count must be at least 1"),
        ("4xV10", "unknown device 'V10' (did you mean 'V100'?)"),
        ("4xt4", "unknown device 't4' (did you mean 'T4'?)"),
        ("4xH100", "(did you mean 'V100'?); there are step times of 2080Ti, A100, "),
        ("4xZZZ", "unknown device 'ZZZ' (known: 2080Ti, "),
        (f"{MAX_WORKERS}xT4,T4", f"more than {MAX_WORKERS} workers"),
        ("9" * 5000 + "xT4", f"more than {MAX_WORKERS} workers"),
    ],
)
def test_what_is_not_a_cluster_is_named_with_the_remedy(text, said):
    with pytest.raises(ConfigError) as raised:
        parse_cluster(text)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 300


def test_kinds_of_the_callers_own_are_known_instead_of_those_with_a_profile():
    assert parse_cluster("2xZ9,T4", known=("Z9", "T4")) == ("Z9", "Z9", "T4")
    with pytest.raises(ConfigError, match="unknown device 'V100'"):
        parse_cluster("V100", known=("Z9", "T4"))
