"""A damaged, foreign or cut journal is read for what it was, or refused as a CodecError: never anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from control_worlds import Restless, started, step_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.control.codec import CodecError
from rex_ray.control.events import Ticked
from rex_ray.control.journal import EVENTS_FILE
from rex_ray.control.journalled import JournalledController
from rex_ray.control.reading import Recent, read_journal
from rex_ray.control.replay import restore
from rex_ray.control.vocabulary import CODEC


@cache
def some_journal() -> dict[str, bytes]:
    journalled, chunks = JournalledController.begin(policy="restless", custom_policy=Restless(every=8))
    files: dict[str, bytes] = {}

    def append(more):
        for name, data in more:
            files[name] = files.get(name, b"") + data

    append(chunks)
    append(journalled.handle(started(step=1)).chunks)
    for step in range(1, 60):
        append(journalled.handle(step_of(step, 1)).chunks)
        append(journalled.handle(Ticked(now_us=step * 300_000)).chunks)
    append(journalled.flush())
    return files


def is_a_prefix(files: dict[str, bytes]) -> bool:
    """Whether what is read of the files is how the true journal begins; False where they are refused."""
    true = [json.dumps(CODEC.encode(event)) for event in read_journal(some_journal()).events]
    try:
        read = [json.dumps(CODEC.encode(event)) for event in read_journal(files).events]
    except CodecError:
        return False
    assert read == true[: len(read)]
    return True


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes_are_noticed_wherever_they_are(data):
    files = dict(some_journal())
    name = data.draw(st.sampled_from(sorted(files)))
    damaged = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    is_a_prefix(files | {name: bytes(damaged)})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_file_that_ends_anywhere_leaves_a_prefix_or_is_refused(data):
    files = dict(some_journal())
    for name in sorted(files):
        files[name] = files[name][: data.draw(st.integers(0, len(files[name])))]
    is_a_prefix(files)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from([EVENTS_FILE, "steps-00001.bin", "steps-00002.bin", "notes.txt"]), st.binary()))
def test_foreign_files_are_refused(files):
    with pytest.raises(CodecError):
        read_journal(files)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["$", "value", "items", "data", "k"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(json_values)
def test_any_json_is_a_value_of_ours_or_a_codec_error(value):
    try:
        CODEC.decode(value)
    except CodecError:
        return


@settings(max_examples=60, deadline=None)
@given(json_values, st.sampled_from(["header", "event", "commands", "notes", "k"]))
def test_a_line_of_any_json_is_read_or_refused(value, key):
    line = json.dumps({"k": 0, key: value}).encode() + b"\n"
    files = some_journal()
    first, _, _ = files[EVENTS_FILE].partition(b"\n")
    try:
        read_journal({EVENTS_FILE: first + b"\n" + line})
    except CodecError:
        return


def test_a_journal_that_leads_elsewhere_is_nothing_to_go_on_from():
    journal = replace(read_journal(some_journal()), snapshots=())
    assert restore(Recent.of(journal), Restless(every=8), must_agree=True).state.num_events == len(journal.entries)
    with pytest.raises(CodecError, match="does not lead to what it led to"):
        restore(Recent.of(journal), Restless(every=5), must_agree=True)
