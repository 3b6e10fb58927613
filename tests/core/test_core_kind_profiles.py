"""Profiles of device kinds survive a file, and whatever else is in one is refused in words."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.errors import ConfigError
from rex_ray.core.kind_profiles import profiles_from_json, profiles_to_json
from rex_ray.core.step_time import StepTimeBook
from rex_ray.core.types import LearntShape

T4 = LearntShape(device="T4", num_rows=(8.0, 16.0), own_s=(0.1, 0.2), weights=(10.0, 3.0))
V100 = LearntShape(device="V100", num_rows=(16.0,), own_s=(0.05,), weights=(7.0,))


def test_what_is_written_is_what_is_read():
    assert profiles_from_json(profiles_to_json([V100, T4])) == (T4, V100)
    assert profiles_from_json(profiles_to_json([])) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema 2 cannot be read"),
        ({"kinds": None}, "list of 'kinds'"),
        ({"kinds": [{}]}, "must name its 'device'"),
        ({"kinds": [{"device": "T4", "num_rows": [1], "own_s": [0.0], "weights": [1]}]}, "positive numbers as 'own_s'"),
        ({"kinds": [{"device": "T4", "num_rows": [1, 2], "own_s": [1], "weights": [1]}]}, "has 2 sizes, 1 times"),
        ({"kinds": [{"device": "T4", "num_rows": [], "own_s": [], "weights": []}]}, "has 0 sizes"),
        ({"kinds": [{"device": "T4", "num_rows": [True], "own_s": [1], "weights": [1]}]}, "'num_rows'"),
    ],
)
def test_what_is_no_profile_is_refused_in_words(change, words):
    document = json.loads(profiles_to_json([T4])) | change
    with pytest.raises(ConfigError, match=words):
        profiles_from_json(json.dumps(document))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["device", "num_rows", "own_s", "weights", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.binary(max_size=64) | st.builds(lambda kinds: json.dumps({"schema_version": 1, "kinds": kinds}), JSON))
def test_any_other_text_is_a_config_error_or_a_profile(text):
    try:
        shapes = profiles_from_json(text)
    except ConfigError:
        return
    StepTimeBook.empty(tuple(shape.device for shape in shapes) or ("T4",)).with_learnt(shapes)


def test_a_kind_that_a_group_has_measured_itself_is_not_overruled():
    book = StepTimeBook.empty(("T4", "V100"))
    for _ in range(8):
        book = book.observe([8, 8], [0.4, 0.1])
    own = book.shapes
    assert [shape.device for shape in own] == ["T4", "V100"]
    assert book.with_learnt([T4]).shapes == own
    learnt = StepTimeBook.empty(("T4", "V100")).with_learnt([T4, V100])
    assert learnt.is_complete
    assert learnt.shapes == (T4, V100)
