"""A run is found from any of its folders, and read back whole."""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path

import pytest

from rex_ray.control.codec import CodecError
from rex_ray.control.step_files import MAGIC, SNAPSHOT, pack_record, payload_at, places
from rex_ray.core.errors import ConfigError
from rex_ray.report.page.html import render_html
from rex_ray.report.reading.load import find_journal, load_journal, load_run, run_name


@pytest.mark.parametrize("inside", [".", "rex_ray", "rex_ray/journal"])
def test_a_run_may_be_named_by_any_of_its_folders(recorded_run: Path, inside: str) -> None:
    journal = find_journal(recorded_run / inside)
    assert journal == recorded_run / "rex_ray" / "journal"
    assert run_name(journal) == "mixed-rex"


def test_an_earlier_journal_of_a_run_is_told_apart(recorded_run: Path, tmp_path: Path) -> None:
    earlier = tmp_path / "run" / "rex_ray" / "journal-1"
    shutil.copytree(recorded_run / "rex_ray" / "journal", earlier)
    assert run_name(find_journal(earlier)) == "run (journal-1)"
    assert run_name(tmp_path) == tmp_path.name


def test_a_folder_that_holds_one_run_stands_for_it_and_several_are_named(recorded_run: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded_run, tmp_path / "one")
    assert find_journal(tmp_path) == tmp_path / "one" / "rex_ray" / "journal"
    shutil.copytree(recorded_run, tmp_path / "two")
    with pytest.raises(ConfigError, match=r"holds 2 runs, give one of them: .*one, .*two"):
        find_journal(tmp_path)


def test_a_folder_without_a_journal_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no journal \(rex_ray/journal/events.jsonl\)"):
        find_journal(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        find_journal(tmp_path / "missing")


def test_a_damaged_journal_is_named_among_many(recorded_run: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded_run, tmp_path / "one")
    lines = tmp_path / "one" / "rex_ray" / "journal" / "events.jsonl"
    lines.write_bytes(lines.read_bytes().replace(b'"seed":1', b'"seed":2'))
    with pytest.raises(CodecError, match=r"one/rex_ray/journal: events.jsonl is damaged: line 1"):
        load_journal(tmp_path / "one")
    lines.write_bytes(b"")
    with pytest.raises(CodecError, match=r"one/rex_ray/journal: events.jsonl holds no header"):
        load_journal(tmp_path / "one")


def test_a_name_that_is_no_text_can_be_written_into_a_page(recorded_run: Path, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"bad\xff<b>")
    shutil.copytree(recorded_run, odd)
    run = load_run(odd)
    assert run.name == "bad\\xff<b>"
    assert "bad\\xff&lt;b&gt;" in render_html(run).encode().decode()


def test_a_recorded_run_is_read_whole(recorded_run: Path) -> None:
    run = load_run(recorded_run)
    assert (run.name, run.policy, run.outcome) == ("mixed-rex", "rex", "finished")
    (group,) = run.groups
    assert group.steps.tolist() == list(range(44))
    assert group.devices == ("T4", "T4", "V100", "V100")
    assert group.num_rows.sum() == 4 * 670
    assert int(group.partial.sum()) == 4
    assert [point.epoch for point in run.metrics] == [0, 1, 2, 3]
    assert run.settings["global batch"] == "64 rows, at most 512"


def test_the_split_that_rex_found_shows_with_its_gain(recorded_run: Path) -> None:
    run = load_run(recorded_run)
    better = [decision for decision in run.decisions if decision.kind == "reallocate"]
    assert better
    first, last = better[0], better[-1]
    assert first.before == (16, 16, 16, 16)
    assert first.applied_at_step is not None
    assert first.applied_at_step > first.decided_at_step
    assert last.after[2] > last.after[0]  # the V100 takes a quarter of the T4's time per row
    assert all(decision.reason for decision in run.decisions)
    page = render_html(run)
    assert "16\u00a0/\u00a016\u00a0/\u00a016\u00a0/\u00a016" in page


def test_a_torn_end_is_read_up_to_it_and_said(recorded_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "torn"
    shutil.copytree(recorded_run, run)
    events = run / "rex_ray" / "journal" / "events.jsonl"
    events.write_bytes(events.read_bytes()[:-20])
    data = load_run(run)
    assert data.outcome == "unfinished"
    assert any("torn" in notice for notice in data.notices)


def test_a_journal_of_another_version_is_read_without_its_snapshots(recorded_run: Path, tmp_path: Path) -> None:
    """What a policy remembers changes between versions; what happened, and what was decided, does not."""
    run = tmp_path / "older"
    shutil.copytree(recorded_run, run)
    path = run / "rex_ray" / "journal" / "steps-00001.bin"
    data = path.read_bytes()
    first = places(path.name, data, [])[0]
    assert first.kind == SNAPSHOT
    text = zlib.decompress(payload_at(path.name, data, first)).decode()
    older = zlib.compress(text.replace("num_events", "events_so_far").encode())
    path.write_bytes(MAGIC + pack_record(SNAPSHOT, older) + data[first.end :])
    journal = load_journal(run)
    assert len(journal.entries) == len(load_journal(recorded_run).entries)
    assert any("another memory" in remark for remark in journal.ignored)
    assert load_run(run).groups[0].steps.tolist() == list(range(44))
