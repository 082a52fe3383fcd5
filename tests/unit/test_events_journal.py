"""The journal: order, torn lines, full queues, and a disk that refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvrx_sre.core.limits import TelemetryLimits
from nvrx_sre.events import journal
from nvrx_sre.events.journal import JournalReader, JournalWriter, read_journal, repair
from nvrx_sre.events.schema import Record
from tests.stories import RUN, STORIES, exception_story, lost_launcher_story

SYNC_S = 10.0


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
    for record in records:
        writer.append(record)
    assert not writer.sync(0.05)
    blocker.unlink()
    assert writer.sync(SYNC_S)
    assert writer.num_errors >= 1
    assert writer.last_error
    assert list(read_journal(blocker)) == records
    writer.close(SYNC_S)


def test_a_batch_written_twice_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that failed half-way is repeated in a new segment; readers drop what repeats."""
    records = exception_story().records
    real_write, failed = os.write, []

    def tear(descriptor: int, content: bytes) -> int:
        if len(content) > 200 and not failed:
            failed.append(real_write(descriptor, bytes(content)[: len(content) // 2]))
            raise OSError(28, "No space left on device")
        return real_write(descriptor, content)

    monkeypatch.setattr(journal.os, "write", tear)
    writer = JournalWriter(tmp_path, RUN, 1)
    for record in records:
        writer.append(record)
    assert writer.sync(SYNC_S)
    writer.close(SYNC_S)
    assert failed
    assert len(list(tmp_path.iterdir())) == 2
    assert list(read_journal(tmp_path)) == records


def test_segments_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run is many files, read as one journal."""
    monkeypatch.setattr(journal, "MAX_SEGMENT_BYTES", 2_000)
    monkeypatch.setattr(journal, "MAX_BATCH_RECORDS", 4)
    records = exception_story().records
    write(tmp_path, records)
    assert len(list(tmp_path.iterdir())) > 2
    assert list(read_journal(tmp_path)) == records


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    """A record after the end is dropped and counted, never an error."""
    writer = JournalWriter(tmp_path, RUN, 1)
    writer.close(SYNC_S)
    assert not writer.append(exception_story().records[0])
    assert writer.num_dropped == 1
