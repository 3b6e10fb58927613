"""Written and read back, a value is the same; what is not in the closed list is refused when it is written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, IntFlag

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rex_ray.control.codec import Codec, CodecError
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.types import Allocation, Problem, StepFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    left: object
    right: object = None


class Colour(Enum):
    RED = "red"


class Bits(IntFlag):
    A = 1
    B = 2


SMALL = Codec([Node, Colour, Bits])

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([Colour.RED, Bits.A | Bits.B, Bits(0)])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text(max_size=2)), inner, max_size=3)
        | st.builds(Node, left=inner, right=inner)
    ),
    max_leaves=12,
)
arrays = hnp.arrays(
    st.sampled_from([np.int64, np.int32, np.uint8, np.float64, np.bool_]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


def through_text(value: object, codec: Codec = SMALL) -> object:
    return codec.decode(json.loads(json.dumps(codec.encode(value), allow_nan=False)))


def kinds(value: object) -> object:
    """The value with every leaf's type, so that 1, True and 1.0 differ."""
    if isinstance(value, tuple):
        return tuple(kinds(item) for item in value)
    if isinstance(value, dict):
        return {key: kinds(item) for key, item in value.items()}
    if isinstance(value, Node):
        return ("Node", kinds(value.left), kinds(value.right))
    return type(value), value


@settings(max_examples=60)
@given(values)
def test_any_value_of_the_vocabulary_survives_the_text(value):
    assert kinds(through_text(value)) == kinds(value)


@given(arrays)
def test_arrays_keep_type_shape_and_every_bit_and_come_back_read_only(array):
    back = through_text(array)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, np.ascontiguousarray(array).tobytes())
    assert not back.flags.writeable


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_floats_that_json_does_not_know_survive_too(odd):
    assert repr(through_text((odd, 1.0))) == repr((odd, 1.0))


@pytest.mark.parametrize("stranger", [{1, 2}, [1], object(), 1j, np.int64(3), np.array(["text"]), Allocation])
def test_strangers_are_refused_when_written_and_the_place_is_named(stranger):
    with pytest.raises(CodecError, match=r"value\.left\[1\]"):
        SMALL.encode(Node(left=(0, stranger)))


def test_a_look_alike_of_a_known_class_is_a_stranger():
    @dataclass(frozen=True)
    class Node:
        left: object

    with pytest.raises(CodecError, match="Node"):
        SMALL.encode(Node(left=1))
    with pytest.raises(CodecError, match="two classes"):
        Codec([Node, type("Node", (), {})])


def test_an_unknown_class_or_field_in_a_file_is_named():
    with pytest.raises(CodecError, match="did you mean 'Allocation'"):
        CODEC.decode({"$": "Alocation"})
    with pytest.raises(CodecError, match="Allocation"):
        CODEC.decode({"$": "Allocation", "version": 1, "local_batch_sizes": [1], "synchrony": 2})
    with pytest.raises(CodecError, match="O"):
        CODEC.decode({"$": "array", "dtype": "|O", "shape": [1], "data": ""})


def test_fields_added_later_take_their_defaults():
    old = {"$": "Allocation", "version": 3, "local_batch_sizes": [4, 5]}
    assert CODEC.decode(old) == Allocation(version=3, local_batch_sizes=(4, 5), lr_factor=1.0)
    problem = CODEC.encode(Problem(workers=(), global_batch_size=8, max_global_batch_size=8, dataset_size=9))
    assert problem.pop("local_batch_multiple") == CODEC.decode(problem).local_batch_multiple == 1
    assert CODEC.decode(CODEC.encode(StepFlag.WARM_UP | StepFlag.PARTIAL)) is StepFlag.WARM_UP | StepFlag.PARTIAL
