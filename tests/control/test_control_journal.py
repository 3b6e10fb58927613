"""A journal says exactly what happened, whenever its driver died; from it a controller is checked and brought back."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import UserDict
from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from control_worlds import Restless, allocations_in, problem_of, record_of, started, step_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rex_ray.control.codec import CodecError
from rex_ray.control.columns import decode_steps, encode_steps
from rex_ray.control.commands import ApplyAllocation, Command
from rex_ray.control.events import Event, MetricReported, RunEnded, StepObserved, TelemetryGap, Ticked, WorkerLost
from rex_ray.control.journal import EVENTS_FILE, Chunk, Header, JournalWriter
from rex_ray.control.journalled import JournalledController, Turn
from rex_ray.control.phases import Ended
from rex_ray.control.reading import Recent, read_journal, read_recent
from rex_ray.control.replay import replay, restore
from rex_ray.control.vocabulary import CODEC
from rex_ray.core.errors import ConfigError, IllegalEventError
from rex_ray.core.types import StepFlag

SECOND = 1_000_000


class Disk:
    """A driver's files and what it emitted; ``chunks`` are what it appended, in order."""

    def __init__(self):
        self.chunks: list[Chunk] = []
        self.emitted: list[tuple[int, Command]] = []

    def take(self, turn: Turn) -> None:
        self.chunks.extend(turn.chunks)
        self.emitted.extend((len(self.chunks), command) for command in turn.commands)

    def files(self, num_chunks: int | None = None, torn: int = 0) -> dict[str, bytes]:
        """The files after the first ``num_chunks`` appends, of the last of which only ``torn`` bytes were written."""
        chunks = self.chunks if num_chunks is None else self.chunks[:num_chunks]
        whole = chunks if not torn else chunks[:-1]
        files: dict[str, bytes] = {}
        for name, data in whole:
            files[name] = files.get(name, b"") + data
        if torn:
            name, data = chunks[-1]
            files[name] = files.get(name, b"") + data[:torn]
        return files


def some_events(num_steps: int = 90) -> list[Event]:
    """A run with two groups, switches, ticks, metrics and steps that fill every column."""
    events: list[Event] = [started()]
    for step in range(num_steps):
        norms = np.array([1.0, 2.5]) * (step + 1) / 7 if step % 4 == 0 else None
        events.append(
            replace(
                step_of(step, 1, own_us=(50_000 + step % 7, 49_000 - step % 5), flags=StepFlag(step % 3 == 0)),
                weighted_sq_norm=norms,
                num_groups=None if norms is None else np.array([1, 2]),
                global_sq_norm=0.1 * step if step % 4 == 0 else None,
                loss=None if step % 5 == 0 else 1.0 / (step + 1),
                peak_memory_bytes=np.array([2**40 + step, -1]) if step % 2 else None,
            )
        )
        if step % 10 == 9:
            events.append(Ticked(now_us=step * SECOND // 4))
        if step == 40:
            events.append(MetricReported(generation="g", epoch=0, step=40, elapsed_us=9, metrics={"accuracy": 0.5}))
    events.append(WorkerLost(generation="g", rank=1, reason="drawn"))
    events.append(started("h", num_workers=3, step=60))
    events += [step_of(step, 2, generation="h", rows=(30, 1, 1), own_us=(9, 9, 9)) for step in range(60, 75)]
    events.append(TelemetryGap(generation="h", last_step=74, waited_us=10 * SECOND))
    events.append(RunEnded(reason="finished"))
    return events


def run(events: list[Event], **options) -> tuple[JournalledController, Disk]:
    journalled, chunks = JournalledController.begin(policy="restless", custom_policy=Restless(every=8), **options)
    disk = Disk()
    disk.take(Turn(chunks=chunks))
    for event in events:
        disk.take(journalled.handle(event))
    disk.take(Turn(chunks=journalled.flush()))
    return journalled, disk


@cache
def one_run() -> tuple[JournalledController, Disk]:
    return run(some_events())


def encoded(value: object) -> str:
    """A fingerprint: the text itself is long, and only its equality matters."""
    return hashlib.sha256(json.dumps(CODEC.encode(value)).encode()).hexdigest()


# --- columns ----------------------------------------------------------------------------------------------------------


@st.composite
def step_lists(draw: st.DrawFn) -> list[StepObserved]:
    n, count = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    times = st.one_of(st.integers(0, 10**5), st.integers(0, 2**62 // 8))
    column = st.lists(times, min_size=n, max_size=n).map(lambda values: np.array(values, dtype=np.int64))
    floats = st.floats(allow_nan=False, allow_infinity=False)
    norms = st.lists(floats, min_size=n, max_size=n).map(np.array)
    return [
        StepObserved(
            generation="g",
            epoch=draw(st.integers(0, 9)),
            step=draw(st.integers(0, 10**9)),
            allocation_version=draw(st.integers(0, 10**6)),
            num_rows=draw(column),
            data_us=draw(column),
            compute_us=draw(column),
            sync_us=draw(column),
            step_us=draw(column),
            weighted_sq_norm=draw(st.none() | norms),
            num_groups=draw(st.none() | column),
            num_norm_steps=draw(st.integers(1, 2)),
            global_sq_norm=draw(st.none() | floats),
            loss=draw(st.none() | floats),
            peak_memory_bytes=draw(st.none() | column),
            flags=StepFlag(draw(st.integers(0, 31))),
        )
        for _ in range(count)
    ]


@settings(max_examples=15)
@given(step_lists())
def test_any_steps_survive_the_columns_to_the_last_bit(steps):
    back = decode_steps(encode_steps(range(7, 7 + len(steps)), steps))
    assert [number for number, _ in back] == list(range(7, 7 + len(steps)))
    assert [encoded(step) for _, step in back] == [encoded(step) for step in steps]
    assert not back[0][1].step_us.flags.writeable


# Three steps of two ranks as they were written before columns knew ``num_norm_steps``; the second one has norms.
OLD_BLOCK = (
    "c)NW|qtz>AVPL3MN>9y8ElMl_IT4syl_16xCFW&=jL`umhMdyeJRmz7IoOj@i;x^(jB2@|8S!38Eyz#KppH>!p+bR4m{CT7Vdx2p0;8~`cVit"
    "RRP&4}%90crhqc_G$VAM-jUwYPi(iV2!&6fjqMHkkW>`Z!H?cSy$Tcw_Sfk-K3zr*ln2xh1Hbgbwf*7ZwH51TMwUG&SGg5(O#MTNhGB7dV0ZeG}"
    "7>YSixla4=na02%qQ$_7%@`QCFb^!p$j*;lo`VZQv*XYoV1(a(WblK<-hm0LOD@=BiamJnz~0^-0D<3f&;"
)


def test_a_block_from_before_estimates_over_two_steps_reads_as_it_was_written():
    numbers, steps = zip(*decode_steps(base64.b85decode(OLD_BLOCK)), strict=True)
    assert numbers == (7, 8, 9)
    assert [step.num_norm_steps for step in steps] == [1, 1, 1]
    assert [step.num_rows.tolist() for step in steps] == [[33, 95]] * 3
    assert [step.global_sq_norm for step in steps] == [None, 0.25, None]
    assert steps[1].weighted_sq_norm.tolist() == [1.5, 2.5]
    assert [step.flags for step in steps] == [StepFlag.AFTER_GAP, StepFlag.NONE, StepFlag.NONE]


def test_columns_take_about_eleven_bytes_a_worker_step():
    rng = np.random.default_rng(0)
    steps = []
    for step in range(512):
        own = (np.array([228_000, 227_000, 229_000, 228_500]) * (1 + 0.01 * rng.standard_normal(4))).astype(np.int64)
        data = rng.integers(80, 400, 4)
        wall = own.max() + 92_000 + rng.integers(0, 60)
        steps.append(
            StepObserved(
                generation="g",
                epoch=step // 200,
                step=step,
                allocation_version=3,
                num_rows=np.array([33, 33, 95, 95]),
                data_us=data,
                compute_us=own - data,
                sync_us=wall - own - rng.integers(0, 300, 4),
                step_us=np.full(4, wall),
                loss=float(f"{rng.random():.9g}"),
                weighted_sq_norm=None if step % 4 else np.round(rng.random(4), 9),
                num_groups=None if step % 4 else np.ones(4, dtype=np.int64),
                global_sq_norm=None if step % 4 else float(f"{rng.random():.9g}"),
            )
        )
    per_worker_step = len(encode_steps(range(512), steps)) / (512 * 4)
    as_json = sum(len(json.dumps(CODEC.encode(step))) for step in steps) / (512 * 4)
    assert per_worker_step < 12.5
    assert as_json / per_worker_step > 6


# --- journal, replay, restore -----------------------------------------------------------------------------------------


def test_a_journal_holds_every_event_command_and_note():
    events = some_events()
    journalled, disk = run(events)
    journal = read_journal(disk.files())
    assert encoded(journal.events) == encoded(tuple(events))
    assert journal.commands == tuple(command for _, command in disk.emitted)
    assert len(allocations_in(journal.commands)) > 3, "a journal without switches proves little"
    assert journal.notes
    assert journal.ignored == ()
    assert (journal.header.policy, journal.header.mode, journal.header.seed) == ("restless", "auto", 0)
    assert {"numpy", "scipy", "python", "machine"} <= set(journal.header.environment)
    assert encoded(restore(Recent.of(journal), Restless(every=8)).state) == encoded(journalled.controller.state)


def test_replay_finds_the_same_commands_and_any_that_were_changed():
    _, disk = one_run()
    journal = read_journal(disk.files())
    report = replay(journal, Restless(every=8))
    assert report.is_identical
    assert report.num_events == len(journal.entries)

    at = next(k for k, entry in enumerate(journal.entries) if entry.commands and isinstance(entry.event, StepObserved))
    entry = journal.entries[at]
    (command,) = entry.commands
    assert isinstance(command, ApplyAllocation)
    first, *rest = command.allocation.local_batch_sizes
    other = replace(
        command, allocation=replace(command.allocation, local_batch_sizes=(first - 1, *rest[:-1], rest[-1] + 1))
    )
    forged = replace(
        journal, entries=(*journal.entries[:at], replace(entry, commands=(other,)), *journal.entries[at + 1 :])
    )
    report = replay(forged, Restless(every=8))
    assert [difference.number for difference in report.differences] == [at]
    assert "local_batch_sizes[0]" in report.differences[0].what
    # Another policy is another story.
    assert not replay(journal, Restless(every=5)).is_identical


def test_figures_count_as_equal_within_a_billionth_and_integers_only_when_equal():
    _, disk = one_run()
    journal = read_journal(disk.files())
    at = next(
        k
        for k, entry in enumerate(journal.entries)
        if any(hasattr(n, "predicted_gain") for n in entry.notes) and isinstance(journal.entries[k].event, StepObserved)
    )
    for factor, same in ((1 + 1e-12, True), (1 + 1e-6, False)):
        entry = journal.entries[at]
        notes = tuple(
            replace(note, predicted_gain=note.predicted_gain * factor)
            if getattr(note, "predicted_gain", None) is not None
            else note
            for note in entry.notes
        )
        nudged = replace(
            journal, entries=(*journal.entries[:at], replace(entry, notes=notes), *journal.entries[at + 1 :])
        )
        assert replay(nudged, Restless(every=8)).is_identical == same


def test_replay_names_other_versions_and_unknown_policies():
    _, disk = one_run()
    journal = read_journal(disk.files())
    report = replay(journal, Restless(every=8), environment={"numpy": "0.0.1"})
    assert any("numpy" in remark and "0.0.1" in remark for remark in report.remarks)
    with pytest.raises(ConfigError, match="restless"):
        replay(journal)


def test_before_a_command_leaves_everything_up_to_its_event_is_written():
    """The law behind every restore: what the group was told is in the journal."""
    _, disk = one_run()
    for num_chunks, command in disk.emitted:
        journal = read_journal(disk.files(num_chunks))
        assert journal.commands[-1] == command
        assert journal.entries[-1].commands[-1] == command


def test_a_step_block_is_written_before_any_line_with_a_later_number():
    _, disk = one_run()
    highest_step, highest_line = -1, -1
    journal = read_journal(disk.files())
    for count in range(1, len(disk.chunks) + 1):
        name, data = disk.chunks[count - 1]
        if name == EVENTS_FILE:
            numbers = [json.loads(line).get("k", -1) for line in data.splitlines()]
            highest_line = max([highest_line, *numbers])
            due = [
                k
                for k, entry in enumerate(journal.entries)
                if isinstance(entry.event, StepObserved) and k < highest_line
            ]
            assert not due or highest_step >= max(due)
        else:
            blocks = read_journal(
                {
                    EVENTS_FILE: disk.files()[EVENTS_FILE],
                    **{key: value for key, value in disk.files(count).items() if key != EVENTS_FILE},
                }
            )
            highest_step = max(
                (k for k, entry in enumerate(blocks.entries) if isinstance(entry.event, StepObserved)), default=-1
            )


@settings(max_examples=15)
@given(data=st.data())
def test_a_driver_killed_at_any_byte_leaves_a_consistent_prefix_that_a_new_one_continues(data):
    events = some_events()
    _, disk = one_run()
    num_chunks = data.draw(st.integers(2, len(disk.chunks)))
    torn = data.draw(st.integers(0, len(disk.chunks[num_chunks - 1][1]) - 1))
    files = disk.files(num_chunks, torn)
    journal = read_journal(files)
    kept = len(journal.entries)
    assert encoded(journal.events) == encoded(tuple(events[:kept]))
    assert replay(journal, Restless(every=8)).is_identical
    emitted_before = [command for at, command in disk.emitted if at <= num_chunks - bool(torn)]
    assert list(journal.commands[: len(emitted_before)]) == emitted_before

    resumed, turn = JournalledController.resume(files, custom_policy=Restless(every=8))
    again = Disk()
    again.chunks = [*((name, content) for name, content in files.items()), *turn.chunks]
    if not isinstance(resumed.controller.phase, Ended):
        for event in events[kept:]:
            again.take(resumed.handle(event))
        again.take(Turn(chunks=resumed.flush()))
    whole = read_journal(again.files())
    assert encoded(whole.events) == encoded(tuple(events))
    assert len(whole.headers) == 2
    assert replay(whole, Restless(every=8)).is_identical
    assert encoded(restore(Recent.of(whole), Restless(every=8)).state) == encoded(one_run()[0].controller.state)


def test_three_drivers_one_after_another_write_one_journal():
    events = some_events()
    journalled, chunks = JournalledController.begin(policy="restless", custom_policy=Restless(every=8))
    disk = Disk()
    disk.take(Turn(chunks=chunks))
    for death in (33, 33, 71):
        while journalled.controller.state.num_events < death:
            disk.take(journalled.handle(events[journalled.controller.state.num_events]))
        # Whatever it still held back dies with it.
        journalled, turn = JournalledController.resume(disk.files(), custom_policy=Restless(every=8))
        disk.take(turn)
        assert journalled.controller.state.num_events <= death
    for event in events[journalled.controller.state.num_events :]:
        disk.take(journalled.handle(event))
    journal = read_journal(disk.files())
    assert encoded(journal.events) == encoded(tuple(events))
    assert replay(journal, Restless(every=8)).is_identical
    assert [header.driver for header in journal.headers] == [0, 1, 2, 3]


def test_a_restored_controller_publishes_again_what_no_step_has_shown():
    journalled, chunks = JournalledController.begin(policy="restless", custom_policy=Restless())
    disk = Disk()
    for turn in (Turn(chunks=chunks), journalled.handle(started()), journalled.handle(step_of(0, 1, rows=(31, 1)))):
        disk.take(turn)
    _, turn = JournalledController.resume(disk.files(), custom_policy=Restless())
    assert allocations_in(turn.commands) == [journalled.controller.phase.pending.allocation]


def test_step_files_are_rotated_and_each_opens_with_a_snapshot():
    events = [started(), *(step_of(step, 1) for step in range(400))]
    journalled, chunks = JournalledController.begin(policy="bsp")
    journalled._writer.max_file_bytes = 1500
    disk = Disk()
    disk.take(Turn(chunks=chunks))
    for event in events:
        disk.take(journalled.handle(event))
        if isinstance(event, StepObserved) and event.step % 20 == 19:
            disk.take(Turn(chunks=journalled.flush()))
    files = disk.files()
    assert len(files) > 3
    journal = read_journal(files)
    assert len(journal.snapshots) >= len(files) - 1
    assert encoded(journal.events) == encoded(tuple(events))
    last, state = journal.snapshots[-1]
    assert state.num_events == last
    assert encoded(restore(Recent.of(journal)).state) == encoded(journalled.controller.state)


def without_checksums(lines: bytes) -> bytes:
    """The lines as older versions wrote them."""
    return re.sub(rb',"crc":\d+\}', b"}", lines)


def test_lines_without_checksums_are_read_as_they_always_were():
    files = dict(one_run()[1].files())
    files[EVENTS_FILE] = without_checksums(files[EVENTS_FILE])
    assert encoded(read_journal(files).events) == encoded(tuple(some_events()))


@pytest.mark.parametrize("damage", ["byte", "digit", "line", "number", "scalar", "foreign", "newer", "empty"])
def test_damage_that_no_death_explains_is_refused_by_name(damage):
    files = dict(one_run()[1].files())
    steps = next(name for name in files if name != EVENTS_FILE)
    if damage == "byte":
        files[steps] = files[steps][:200] + bytes([files[steps][200] ^ 1]) + files[steps][201:]
    elif damage == "line":
        lines = files[EVENTS_FILE].split(b"\n")
        files[EVENTS_FILE] = b"\n".join([lines[0], lines[1][:-9], *lines[2:]])
    elif damage == "number":
        files[EVENTS_FILE] = without_checksums(files[EVENTS_FILE]).replace(b'{"k":1,', b'{"q":1,')
    elif damage == "digit":
        files[EVENTS_FILE] = files[EVENTS_FILE].replace(b'"num_workers":2', b'"num_workers":3')
        files[EVENTS_FILE] = files[EVENTS_FILE].replace(b'"version":2', b'"version":3')
    elif damage == "scalar":
        files[EVENTS_FILE] += b"12\n"
    elif damage == "foreign":
        files[steps] = b"PK\x03\x04 something else entirely"
    elif damage == "newer":
        files[EVENTS_FILE] = without_checksums(files[EVENTS_FILE]).replace(
            b'"schema_version":1', b'"schema_version":99'
        )
    else:
        files = {}
    with pytest.raises(
        CodecError,
        match={
            "byte": "checksum",
            "digit": "does not match its checksum",
            "line": "line 2",
            "number": "does not number its event",
            "scalar": "no object",
            "foreign": "no step file",
            "newer": "version 99",
            "empty": "no header",
        }[damage],
    ):
        read_journal(files)


# --- the journalled controller as a driver's one place ----------------------------------------------------------------


class Asked(UserDict[str, bytes]):
    """Files that remember which of them were read."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> bytes:
        self.names.add(name)
        return super().__getitem__(name)


@cache
def long_run() -> tuple[JournalledController, Disk]:
    """Many small files with many snapshots each, and a tick a step."""
    journalled, chunks = JournalledController.begin(policy="restless", custom_policy=Restless(every=7))
    journalled._writer.max_file_bytes, journalled._writer.snapshot_steps = 8_000, 20
    disk = Disk()
    disk.take(Turn(chunks=chunks))
    for event in (started(), *(event for k in range(600) for event in (step_of(k, 1), Ticked(now_us=k * SECOND)))):
        disk.take(journalled.handle(event))
    disk.take(Turn(chunks=journalled.flush()))
    return journalled, disk


def test_a_new_driver_reads_what_is_since_the_newest_snapshot_however_long_the_run_was():
    journalled, disk = long_run()
    files = Asked(disk.files())
    resumed, turn = JournalledController.resume(files, custom_policy=Restless(every=7))
    assert encoded(resumed.controller.state) == encoded(journalled.controller.state)
    assert len(files) > 5
    assert files.names == {EVENTS_FILE, max(files.keys() - {EVENTS_FILE})}
    whole = read_journal(disk.files())
    first = turn.entries[0].number
    assert len(turn.entries) < 100 < first
    assert encoded(tuple(entry.event for entry in turn.entries)) == encoded(whole.events[first:])
    # Of what came before, everything that anybody was told, and no step or tick that told nobody anything.
    told = [(entry.number, encoded(entry.notes)) for entry in whole.entries[:first] if entry.notes]
    assert [(earlier.number, encoded(earlier.notes)) for earlier in turn.earlier if earlier.notes] == told
    assert [earlier.number for earlier in turn.earlier if not earlier.notes] == []


@settings(max_examples=25)
@given(data=st.data())
def test_what_a_new_driver_reads_is_the_end_of_the_whole_whatever_byte_the_last_one_died_at(data):
    _, disk = long_run()
    num_chunks = data.draw(st.integers(2, len(disk.chunks)))
    torn = data.draw(st.integers(0, len(disk.chunks[num_chunks - 1][1]) - 1))
    files = disk.files(num_chunks, torn)
    recent, whole = read_recent(files), read_journal(files)
    first = 0 if recent.state is None else recent.state.num_events
    assert encoded(tuple(entry.event for entry in recent.entries)) == encoded(whole.events[first:])
    restored, folded = (restore(of, Restless(every=7)).state for of in (recent, Recent.of(whole)))
    assert encoded(restored) == encoded(folded)


def test_a_snapshot_behind_the_event_that_a_later_driver_came_back_from_is_nobodys():
    journalled, disk = long_run()
    last = journalled.controller.state.num_events - 1
    header = Header(seed=0, mode="auto", policy="restless", first_event=50, driver=1)
    lines = JournalWriter(header=header, state=journalled.controller.state).flush(journalled.controller.state)
    files = disk.files()
    recent = read_recent(files | {EVENTS_FILE: files[EVENTS_FILE] + lines[0][1]})
    assert recent.state is not None
    assert recent.state.num_events <= 50 < last
    assert len(recent.entries) == 50 - recent.state.num_events


def test_damage_that_no_new_driver_needs_to_read_does_not_stop_it():
    _, disk = long_run()
    files = disk.files()
    files["steps-00001.bin"] = files["steps-00001.bin"][:200] + b"?" + files["steps-00001.bin"][201:]
    with pytest.raises(CodecError, match=r"steps-00001.bin is damaged"):
        read_journal(files)
    resumed, _ = JournalledController.resume(files, custom_policy=Restless(every=7))
    assert encoded(resumed.controller.state) == encoded(long_run()[0].controller.state)


def test_records_become_steps_and_an_ended_run_drops_what_comes_late():
    journalled, _ = JournalledController.begin(policy="bsp")
    assert journalled.add([record_of(0, 0)]) == Turn()
    (command,) = journalled.handle(started()).commands
    version = command.allocation.version
    both = [record_of(rank, step, allocation_version=version) for step in range(3) for rank in range(2)]
    journalled.add([*both, record_of(0, 3, allocation_version=version, generation="older")])
    assert journalled.controller.state.last_step == 2
    journalled.handle(RunEnded(reason="finished"))
    assert journalled.add([record_of(0, 3, allocation_version=version)]) == Turn()
    assert journalled.dropped == {"record without a group": 2, "stale generation": 1}
    with pytest.raises(IllegalEventError):
        journalled.handle(Ticked(now_us=1))


def test_ticks_bring_gaps_and_bound_what_a_death_can_lose():
    journalled, _ = JournalledController.begin(policy="bsp")
    (command,) = journalled.handle(started()).commands
    chunks = []
    for second in range(1, 40):
        records = [record_of(rank, second - 1, allocation_version=command.allocation.version) for rank in range(2)]
        chunks.append(journalled.add(records).chunks if second <= 25 else ())
        chunks.append(journalled.handle(Ticked(now_us=second * SECOND)).chunks)
    files = Disk()
    files.chunks = [(EVENTS_FILE, b"")]
    assert sum(bool(some) for some in chunks) >= 3
    assert journalled.controller.state.last_reason.startswith("no complete step")


def test_an_illegal_event_leaves_no_trace_in_the_journal():
    journalled, chunks = JournalledController.begin(policy="bsp")
    disk = Disk()
    disk.take(Turn(chunks=chunks))
    disk.take(journalled.handle(started()))
    disk.take(journalled.handle(step_of(4, 1)))
    with pytest.raises(IllegalEventError):
        journalled.handle(step_of(4, 1))
    disk.take(Turn(chunks=journalled.flush()))
    assert len(read_journal(disk.files()).entries) == 2


def test_a_resumed_driver_never_writes_into_a_step_file_that_exists():
    journalled, chunks = JournalledController.begin(policy="bsp")
    disk = Disk()
    for turn in (Turn(chunks=chunks), journalled.handle(started()), Turn(chunks=journalled.flush())):
        disk.take(turn)
    resumed, turn = JournalledController.resume(disk.files() | {"steps-00007.bin": b"", "steps-copy.bin": b""})
    resumed.add([record_of(rank, 0) for rank in range(2)])
    assert {name for name, _ in (*turn.chunks, *resumed.flush())} == {EVENTS_FILE, "steps-00008.bin"}


def test_a_resumed_driver_takes_records_from_the_next_step_on():
    journalled, chunks = JournalledController.begin(policy="bsp")
    disk = Disk()
    disk.take(Turn(chunks=chunks))
    disk.take(journalled.handle(started()))
    disk.take(journalled.add([record_of(rank, step) for step in range(5) for rank in range(2)]))
    disk.take(Turn(chunks=journalled.flush()))
    resumed, _ = JournalledController.resume(disk.files())
    resumed.add([record_of(rank, step) for step in range(3, 8) for rank in range(2)])
    assert resumed.controller.state.last_step == 7
    assert resumed.dropped == {"late": 4}
    # Steps whose records died with the queue are given up after 32 more.
    resumed.add([record_of(rank, step) for step in range(20, 60) for rank in range(2)])
    assert resumed.controller.state.last_step == 59


def test_every_class_of_the_contracts_is_in_the_vocabulary():
    """A class that was forgotten would fail in the middle of a run; here it fails at once."""
    from typing import get_args

    from rex_ray.control import commands, events, notes, phases

    for union in (commands.Command, events.Event, notes.Note, phases.Phase):
        for cls in get_args(union):
            assert cls.__name__ in CODEC._classes
    assert {field.name for field in fields(StepObserved)} >= {"num_rows", "loss"}
    assert problem_of().num_workers == 2
