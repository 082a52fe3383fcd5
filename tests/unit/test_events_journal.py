"""The journal: order, torn lines, full queues, and a disk that refuses."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from nvrx_sre.core.errors import UserError
from nvrx_sre.core.limits import TelemetryLimits
from nvrx_sre.events import journal
from nvrx_sre.events.journal import JournalReader, JournalWriter, Snapshot, read_journal, repair
from nvrx_sre.events.journal_tail import JournalTail
from nvrx_sre.events.schema import Record
from tests.stories import RUN, STORIES, exception_story, lost_launcher_story

SYNC_S = 60.0


def write(directory: Path, records: list[Record]) -> None:
    """Write `records` through one writer an epoch."""
    for epoch in sorted({record.epoch for record in records}):
        writer = JournalWriter(directory, RUN, epoch)
        for record in records:
            if record.epoch == epoch:
                assert writer.append(record)
        assert writer.close(SYNC_S)
        assert (writer.num_dropped, writer.num_errors) == (0, 0)


@pytest.mark.parametrize("name", sorted(STORIES))
def test_what_was_written_is_read_back(tmp_path: Path, name: str) -> None:
    """All epochs, in order, equal to the last bit."""
    records = STORIES[name]().records
    write(tmp_path / "journal", records)
    assert list(read_journal(tmp_path / "journal")) == records


def test_segments_are_named_and_headed(tmp_path: Path) -> None:
    """One file an epoch, private, the first line says whose it is."""
    write(tmp_path, lost_launcher_story().records)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["00000001-000001.jsonl", "00000002-000001.jsonl"]
    assert json.loads(paths[1].read_text().splitlines()[0]) == {"schema": 1, "run": RUN, "epoch": 2}
    assert paths[0].stat().st_mode & 0o777 == 0o600


def test_sync_means_on_disk(tmp_path: Path) -> None:
    """After the barrier another process reads everything, before the writer is closed."""
    records = exception_story().records
    writer = JournalWriter(tmp_path, RUN, 1)
    for record in records:
        writer.append(record)
    assert writer.sync(SYNC_S)
    assert list(read_journal(tmp_path)) == records
    writer.close(SYNC_S)


def test_a_torn_last_line_is_left_out_and_counted(tmp_path: Path) -> None:
    """A launcher killed in the middle of a write loses that record only."""
    records = exception_story().records
    write(tmp_path, records)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-7])
    reader = JournalReader(tmp_path)
    assert list(reader) == records[:-1]
    assert reader.num_bad_lines == 1


def test_repair_cuts_the_torn_line_and_says_how_much(tmp_path: Path) -> None:
    """Repaired once, whole afterwards; a whole journal is left alone."""
    records = exception_story().records
    write(tmp_path, records)
    assert repair(tmp_path) == 0
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type": "RunSta')
    assert repair(tmp_path) == len(b'{"type": "RunSta')
    assert path.read_bytes() == whole
    assert repair(tmp_path / "missing") == 0


def test_a_damaged_or_unknown_line_costs_only_itself(tmp_path: Path) -> None:
    """Records of a newer schema and damaged lines are skipped and counted."""
    records = exception_story().records
    write(tmp_path, records)
    path = next(tmp_path.iterdir())
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"type": "FromTheFuture", "data": {}}\n'
    lines[5] = b"\x00\xff\n"
    path.write_bytes(b"".join(lines))
    reader = JournalReader(tmp_path)
    assert len(list(reader)) == len(records) - 2
    assert reader.num_bad_lines == 2


def test_a_full_queue_drops_and_counts_without_blocking(tmp_path: Path) -> None:
    """The queue is bounded; the rest of the journal stays readable."""
    (tmp_path / "journal").write_text("a file where the directory should be")
    writer = JournalWriter(tmp_path / "journal", RUN, 1, limits=TelemetryLimits(journal_queue_records=5))
    accepted = [writer.append(record) for record in exception_story().records[:9]]
    assert accepted == [True] * 5 + [False] * 4
    assert not writer.sync(0.01)
    assert writer.num_dropped == 4
    writer.close(0.01)


def test_the_writer_recovers_when_the_disk_does(tmp_path: Path) -> None:
    """While the disk refuses, records wait and errors are counted; then nothing is missing."""
    blocker = tmp_path / "journal"
    blocker.write_text("in the way")
    records = exception_story().records
    writer = JournalWriter(blocker, RUN, 1)
    errors: list[str] = []
    is_tried = threading.Event()

    def note(message: str) -> None:
        errors.append(message)
        is_tried.set()

    writer.on_error = note
    for record in records:
        writer.append(record)
    assert is_tried.wait(SYNC_S)
    assert not writer.sync(0.01)
    blocker.unlink()
    assert writer.sync(SYNC_S)
    assert writer.num_errors >= 1
    assert len(errors) == writer.num_errors
    assert list(read_journal(blocker)) == records
    writer.close(SYNC_S)


@pytest.mark.parametrize("most_bytes", [0, 100])
def test_a_disk_that_stays_full_gets_one_segment_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """Not one an attempt, which would push the older ones out; with and without room for a segment's header."""
    records = exception_story().records
    is_full, is_tried = threading.Event(), threading.Event()
    real_write = os.write

    def refuse(descriptor: int, content: bytes) -> int:
        if is_full.is_set() and len(content) > most_bytes:
            real_write(descriptor, bytes(content)[: len(content) // 2])
            raise OSError(28, "No space left on device")
        return real_write(descriptor, content)

    def count(_: str) -> None:
        if writer.num_errors >= 5:
            is_tried.set()

    monkeypatch.setattr(journal.os, "write", refuse)
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    writer = JournalWriter(tmp_path, RUN, 1)
    writer.on_error = count
    writer.append(records[0])
    assert writer.sync(SYNC_S)
    is_full.set()
    for record in records[1:]:
        writer.append(record)
    assert is_tried.wait(SYNC_S)
    is_full.clear()
    assert writer.sync(SYNC_S)
    assert len(list(tmp_path.iterdir())) == writer.num_segments == 2
    assert list(read_journal(tmp_path)) == records
    writer.close(SYNC_S)


def test_a_batch_written_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that failed half-way is repeated in a new segment; readers drop what repeats."""
    records = exception_story().records
    real_write, failed, is_full = os.write, [], threading.Event()

    def tear(descriptor: int, content: bytes) -> int:
        if is_full.is_set() and not failed:
            failed.append(real_write(descriptor, bytes(content)[: len(content) // 2]))
            raise OSError(28, "No space left on device")
        return real_write(descriptor, content)

    monkeypatch.setattr(journal.os, "write", tear)
    writer = JournalWriter(tmp_path, RUN, 1)
    writer.append(records[0])
    assert writer.sync(SYNC_S)
    is_full.set()
    for record in records[1:]:
        writer.append(record)
    assert writer.sync(SYNC_S)
    writer.close(SYNC_S)
    assert failed
    assert len(list(tmp_path.iterdir())) == 2
    assert list(read_journal(tmp_path)) == records


def lose_writes(writer: JournalWriter) -> None:
    """From now on the open segment takes writes, loses them, and says so at the fsync, as a broken disk does."""
    reader, pipe = os.pipe()
    os.dup2(pipe, writer._descriptor)
    os.close(pipe)
    os.set_blocking(reader, False)


def test_what_a_failed_fsync_may_have_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """True means on the disk, also for what had been written, and not synced, before the disk failed.

    The descriptor is that of a pipe here: writes succeed, fsync is refused, nothing reaches the file.
    """
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    records = exception_story().records
    writer = JournalWriter(tmp_path, RUN, 1)
    for record in records[:4]:
        writer.append(record)
    assert writer.sync(SYNC_S)
    lose_writes(writer)
    for record in records[4:]:
        writer.append(record)
    assert writer.sync(SYNC_S)
    assert writer.num_errors == 1
    assert list(read_journal(tmp_path)) == records
    assert writer.close(SYNC_S)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000001-000001.jsonl", "00000001-000002.jsonl"]


def test_half_of_what_is_written_again_does_not_hide_the_other_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync any part may be on the disk: the last records without those before them, say."""
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    records = exception_story().records
    real_fsync, failed = os.fsync, []

    def lose_the_middle(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        if len(lines) > 5 and not failed:
            failed.append(path.name)
            path.write_bytes(b"".join([*lines[:3], *lines[-1:]]))
            raise OSError(5, "Input/output error")
        real_fsync(descriptor)

    monkeypatch.setattr(journal.os, "fsync", lose_the_middle)
    writer = JournalWriter(tmp_path, RUN, 1)
    for record in records[:2]:
        writer.append(record)
    assert writer.sync(SYNC_S)
    for record in records[2:]:
        writer.append(record)
    assert writer.sync(SYNC_S)
    assert failed == ["00000001-000001.jsonl"]
    assert list(read_journal(tmp_path)) == records
    writer.close(SYNC_S)


def test_a_disk_that_never_syncs_gets_no_segment_an_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written again is taken away where it stood before; then nothing is missing, and nothing twice."""
    monkeypatch.setattr(journal, "RETRY_S", 0.001)
    records = exception_story().records
    real_fsync, is_broken, is_tried = os.fsync, threading.Event(), threading.Event()

    def refuse(descriptor: int) -> None:
        if is_broken.is_set() and Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_file():
            raise OSError(5, "Input/output error")
        real_fsync(descriptor)

    def count(_: str) -> None:
        if writer.num_errors >= 6:
            is_tried.set()

    monkeypatch.setattr(journal.os, "fsync", refuse)
    writer = JournalWriter(tmp_path, RUN, 1)
    writer.on_error = count
    writer.append(records[0])
    assert writer.sync(SYNC_S)
    is_broken.set()
    for record in records[1:]:
        writer.append(record)
    assert not writer.sync(0.01)
    assert is_tried.wait(SYNC_S)
    is_broken.clear()
    assert writer.sync(SYNC_S)
    assert len(list(tmp_path.iterdir())) == writer.num_segments == 2
    assert list(read_journal(tmp_path)) == records
    writer.close(SYNC_S)


def test_what_is_not_synced_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for a barrier for hours: the writer syncs by itself, on its own thread."""
    monkeypatch.setattr(journal, "MAX_UNSYNCED_RECORDS", 3)
    real_fsync, is_synced = os.fsync, threading.Event()

    def note(descriptor: int) -> None:
        real_fsync(descriptor)
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_file():
            is_synced.set()

    monkeypatch.setattr(journal.os, "fsync", note)
    writer = JournalWriter(tmp_path, RUN, 1)
    for record in exception_story().records:
        writer.append(record)
    assert is_synced.wait(SYNC_S)
    writer.close(SYNC_S)


def rotate_often(directory: Path, records: list[Record], limits: TelemetryLimits) -> list[int]:
    """Journal `records`, with a snapshot as soon as a segment is full; how many records each snapshot holds."""
    writer = JournalWriter(directory, RUN, 1, limits=limits)
    held = []
    for number, record in enumerate(records, 1):
        writer.append(record)
        assert writer.sync(SYNC_S)
        if writer.is_full:
            held.append(number)
            writer.rotate(Snapshot(last=(record.epoch, record.seq), folds={"count": {"shape": "1", "state": number}}))
            assert writer.sync(SYNC_S)
            assert not writer.is_full
    assert writer.close(SYNC_S)
    assert writer.num_segments == len(list(directory.iterdir()))
    return held


def test_a_full_segment_gives_way_to_one_that_begins_with_a_snapshot(tmp_path: Path) -> None:
    """Read as one journal, or from the newest snapshot that fits and what follows it."""
    records = exception_story().records
    held = rotate_often(tmp_path, records, TelemetryLimits(journal_segment_bytes=2_000))
    assert len(held) > 2
    assert list(read_journal(tmp_path)) == records
    reader = JournalReader(tmp_path, fits=lambda folds: folds["count"]["shape"] == "1")
    assert reader.snapshot is not None
    assert reader.snapshot.folds["count"]["state"] == held[-1]
    assert list(reader) == records[held[-1] :]
    assert reader.num_bad_lines == 0


def test_a_snapshot_that_does_not_fit_is_passed_over(tmp_path: Path) -> None:
    """An older one that fits serves; without any the journal is read from its beginning."""
    records = exception_story().records
    held = rotate_often(tmp_path, records, TelemetryLimits(journal_segment_bytes=2_000))
    older = JournalReader(tmp_path, fits=lambda folds: folds["count"]["state"] <= held[0])
    assert list(older) == records[held[0] :]
    none = JournalReader(tmp_path, fits=lambda _: False)
    assert none.snapshot is None
    assert list(none) == records


def test_a_torn_snapshot_costs_nothing(tmp_path: Path) -> None:
    """A launcher killed while it rotated: the snapshot before it and all records serve."""
    records = exception_story().records
    held = rotate_often(tmp_path, records, TelemetryLimits(journal_segment_bytes=2_000))
    newest = max(tmp_path.iterdir())
    lines = newest.read_bytes().splitlines(keepends=True)
    newest.write_bytes(lines[0] + lines[1][:-9])
    reader = JournalReader(tmp_path, fits=lambda _: True)
    assert reader.snapshot is not None
    assert reader.snapshot.folds["count"]["state"] == held[-2]
    assert list(reader) == records[held[-2] : held[-1]]
    assert repair(tmp_path) > 0
    assert list(read_journal(tmp_path)) == records[: held[-1]]


def test_c56_the_number_of_segments_is_bounded(tmp_path: Path) -> None:
    """The oldest go once a snapshot makes up for them; what is left begins with one."""
    records = exception_story().records
    held = rotate_often(tmp_path, records, TelemetryLimits(journal_segment_bytes=2_000, journal_segments=2))
    assert len(held) > 2
    assert len(list(tmp_path.iterdir())) == 2
    reader = JournalReader(tmp_path, fits=lambda _: True)
    assert list(reader) == records[held[-1] :]


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """One clear line: file, its version, ours; never a silent replay of half of it."""
    write(tmp_path, exception_story().records)
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 2', 1))
    with pytest.raises(UserError, match=rf"{path.name} has version 2.*reads up to 1"):
        list(read_journal(tmp_path))


def test_a_tail_reads_what_is_new_once(tmp_path: Path) -> None:
    """Half a line waits for its end; a new segment and a new epoch are followed."""
    records = exception_story().records
    whole = tmp_path / "whole"
    rotate_often(whole, records, TelemetryLimits(journal_segment_bytes=2_000))
    live = tmp_path / "live"
    live.mkdir()
    tail = JournalTail(live)
    seen: list[Record] = []
    for source in sorted(whole.iterdir()):
        content = source.read_bytes()
        for cut in (len(content) // 3, len(content) * 2 // 3, len(content)):
            (live / source.name).write_bytes(content[:cut])
            seen += tail.poll()
    assert seen == records
    assert tail.poll() == []
    again = [replace(record, epoch=2) for record in records[:3]]
    write(live, again)
    assert tail.poll() == again


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    """A record after the end is dropped and counted, never an error."""
    writer = JournalWriter(tmp_path, RUN, 1)
    writer.close(SYNC_S)
    assert not writer.append(exception_story().records[0])
    assert writer.num_dropped == 1


def test_a_snapshot_larger_than_a_segment_does_not_fill_it(tmp_path: Path) -> None:
    """Each record would begin a segment of its own otherwise, as large as the snapshot."""
    records = exception_story().records
    writer = JournalWriter(tmp_path, RUN, 1, limits=TelemetryLimits(journal_segment_bytes=100))
    writer.append(records[0])
    assert writer.sync(SYNC_S) and writer.is_full
    folds = {"large": {"shape": "1", "state": "x" * 10_000}}
    writer.rotate(Snapshot(last=(records[0].epoch, records[0].seq), folds=folds))
    writer.append(records[1])
    assert writer.sync(SYNC_S) and not writer.is_full
    for record in records[2:] * 10:
        writer.append(record)
    assert writer.sync(SYNC_S) and writer.is_full
    assert writer.close(SYNC_S)
