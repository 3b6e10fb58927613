from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rex_ray.core.changed import changed

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Generic[T]):
    inner: T
    count: int = 0
    names: tuple[str, ...] = ()


FIELDS = {"inner": st.integers() | st.none(), "count": st.integers(), "names": st.tuples(st.text())}


@given(st.builds(Memory, **FIELDS), st.fixed_dictionaries({}, optional=FIELDS))
def test_a_changed_copy_is_what_replace_makes_and_leaves_the_old_one_alone(memory, changes):
    before = dataclasses.asdict(memory)
    copy = changed(memory, **changes)
    assert copy == replace(memory, **changes)
    assert copy is not memory
    assert dataclasses.asdict(memory) == before
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.count = 1


def test_a_field_that_there_is_not_is_named():
    with pytest.raises(TypeError, match=r"Memory has no field 'cuont', 'b'"):
        changed(Memory(inner=None), cuont=1, b=2)


def test_a_class_without_slots_is_refused():
    @dataclass(frozen=True)
    class Loose:
        a: int
        b: int = 3

    with pytest.raises(TypeError, match="Loose has no slots"):
        changed(Loose(1), a=2)
