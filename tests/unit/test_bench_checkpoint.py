"""The arithmetic of the checkpoint benchmark, on histories made by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_sre.bench import checkpoint, checkpoint_reference, subprocesses
from nvrx_sre.bench import checkpoint_memory as memory
from nvrx_sre.bench import checkpoint_reading as reading
from nvrx_sre.bench.checkpoint import BenchConfig
from nvrx_sre.bench.checkpoint_memory import MemorySample
from nvrx_sre.bench.checkpoint_reading import Base, Save, Stamp
from nvrx_sre.bench.rows import Row
from nvrx_sre.cli.bench import command
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Event, Record, RestoredFrom, Role, Tier

S = 1_000_000_000
ROW = Row(bench="checkpoint", contestant="c", case="", ranks=2, n=1, median=1.0, p95=1.0, max=1.0, unit="s")
BASE = Base(step_s=1.0, optimizer_s=0.1, num_steps=9)


def at(seconds: float) -> int:
    """Nanoseconds."""
    return round(seconds * S)


def stamp(kind: str, step: int, begin: float, end: float, **values: float) -> Stamp:
    """A stamp; `optimizer` and `boundary` in seconds."""
    parts = {f"{name}_ns": at(values.pop(name)) for name in ("optimizer", "boundary") if name in values}
    rest = {name: int(value) for name, value in values.items()}
    return Stamp(kind=kind, step=step, start_ns=at(begin), end_ns=at(end), **parts, **rest)


def records(*timed: tuple[float, Event]) -> list[Record]:
    """A journal whose wall clock is 1000 s ahead of the monotonic one."""
    return [
        Record(run="b", epoch=1, generation=1, rank=None, seq=seq, time_ns=at(1000 + second), event=event)
        for seq, (second, event) in enumerate(timed)
    ]


def started(step: int, captured: float) -> schema.SaveStarted:
    """A save was handed over."""
    return schema.SaveStarted(step=step, tier=Tier.DURABLE, captured_ns=at(1000 + captured))


def committed(step: int) -> schema.SaveCommitted:
    """A save was renamed into place."""
    return schema.SaveCommitted(step=step, directory="d", size_bytes=1, seconds=1.0, captured_ns=0)


def verified(step: int) -> schema.SaveVerified:
    """A save was read back."""
    return schema.SaveVerified(step=step, directory="d", seconds=1.0, captured_ns=0)


def test_saves_come_from_the_journal_on_the_monotonic_clock() -> None:
    """A save that failed has no commit; one that had not ended is left out."""
    failed = schema.SaveFailed(step=20, tier=Tier.DURABLE, reason=schema.SaveFailure.STORAGE, message="")
    journal = records(
        (2, started(10, 1.5)),
        (5, committed(10)),
        (6, verified(10)),
        (7, started(20, 6.5)),
        (8, failed),
        (9, started(30, 9)),
    )
    assert reading.saves_of(journal, at(1000)) == [
        Save(step=10, captured_ns=at(1.5), started_ns=at(2), committed_ns=at(5), ended_ns=at(6)),
        Save(step=20, captured_ns=at(6.5), started_ns=at(7), committed_ns=0, ended_ns=at(8)),
    ]


def test_a_step_counts_as_alone_only_where_nothing_else_ran() -> None:
    """Neither beside the start of a standby nor beside a write; one that never got ready is busy to the end."""
    worker = schema.WorkerStarted(role=Role.STANDBY, pid=7, start_ticks=1, attempt=1)
    journal = records((0, worker), (3, schema.StandbyReady(pid=7)), (20, dataclasses.replace(worker, pid=8)))
    save = Save(step=1, captured_ns=at(10), started_ns=at(10), committed_ns=at(11), ended_ns=at(12))
    busy = [*reading.starting_spans(journal, at(1000)), (save.captured_ns, save.ended_ns)]
    costs = {1: 9.0, 4: 0.5, 5: 0.6, 6: 0.7, 7: 0.8, 11: 9.0, 13: 0.9, 21: 9.0}
    stamps = [stamp("pause", 0, begin, begin + cost / 10, optimizer=cost / 100) for begin, cost in costs.items()]
    base = reading.base_of(stamps, busy)
    assert base == Base(step_s=pytest.approx(0.075), optimizer_s=pytest.approx(0.0075), num_steps=4)
    with pytest.raises(InternalError, match="only 1 steps"):
        reading.base_of(stamps[:3], busy)


def test_blocked_holds_the_boundary_and_the_wait_of_the_optimizer() -> None:
    """On the slowest rank; what else the following steps took is inflation; the killed save is left out."""
    steps = [
        stamp("step", 5, 0, 1.5, boundary=0.5, due=1, optimizer=0.1),
        stamp("step", 6, 1.5, 3.0, optimizer=0.3),
        stamp("step", 7, 3.0, 4.1, optimizer=0.1),
        stamp("step", 10, 9, 10, boundary=0.5, due=1),
    ]
    slower = [dataclasses.replace(steps[0], boundary_ns=at(0.7)), *steps[1:]]
    blocked, inflation = reading.blocked_and_inflation([steps, slower], BASE, before_step=10)
    assert blocked == [pytest.approx(0.7 + 0.2)]
    assert inflation == [pytest.approx(0.5 + 0.1 - 0.2)]


def test_restores_are_told_apart_by_process_and_tier() -> None:
    """The replaced rank's restore is the fresh one; otherwise the slowest rank counts."""

    def restored(step: int, cost: float, pid: int) -> Stamp:
        return stamp("restored", step, 0, cost, pid=pid)

    def seconds_of(found: dict[str, list[Stamp]]) -> dict[str, list[float]]:
        return {kind: [item.duration_s for item in stamps] for kind, stamps in found.items()}

    ranks = [
        [restored(0, 9, 1), restored(5, 0.2, 1), restored(8, 0.3, 1), restored(9, 0.7, 3)],
        [restored(0, 9, 2), restored(5, 0.4, 2), restored(8, 0.5, 7), restored(9, 0.6, 4)],
    ]
    sources = [RestoredFrom.FRESH, RestoredFrom.HOT, RestoredFrom.HOT, RestoredFrom.DURABLE]
    assert seconds_of(reading.restores(ranks, sources)) == {
        "warm": [pytest.approx(0.4)],
        "fresh": [pytest.approx(0.5)],
        "durable": [pytest.approx(0.7)],
    }
    with pytest.raises(InternalError, match="did not all restore"):
        reading.restores(ranks, sources[:-1])


def test_parts_of_restores_add_up_in_their_note() -> None:
    """Medians by part, in the order in which they came; the rest has a name as well."""

    def restored(cost: float, plan: float, fill: float) -> Stamp:
        made = stamp("restored", 1, 0, cost)
        return dataclasses.replace(made, parts={"plan": plan, "fill": fill})

    stamps = [restored(0.06, 0.01, 0.045), restored(0.1, 0.02, 0.07), restored(0.05, 0.01, 0.04)]
    assert reading.parts_note(stamps) == "plan 10.0, fill 45.0, other 5.0 ms"


def test_memory_is_slots_and_what_a_run_without_saves_does_not_hold() -> None:
    """Each process at its own peak; other processes are not counted, and less than nothing is nothing."""

    def sample(rank: int, other_rank: int, writer: int, slots: int) -> MemorySample:
        return MemorySample(anonymous_bytes={1: rank, 2: other_rank, 3: writer, 4: 10_000}, slot_bytes=slots)

    without = memory.peaks_of([sample(100, 80, 50, 0), sample(90, 95, 40, 0)], {1, 2}, {3})
    assert without == memory.Peaks(slot_bytes=0, rank_bytes=195, writer_bytes=50)
    saving = memory.peaks_of([sample(120, 100, 80, 300), sample(110, 90, 60, 300)], {1, 2}, {3})
    used = memory.taken_by_saving(saving, without)
    assert (used.slot_bytes, used.rank_bytes, used.writer_bytes, used.total_bytes) == (300, 25, 30, 355)
    assert memory.taken_by_saving(without, saving).total_bytes == 0
    for pids in ({1, 9}, set[int]()):
        with pytest.raises(InternalError, match="no sample"):
            memory.peaks_of([sample(1, 1, 1, 1)], pids, {3})


def test_a_part_that_fails_costs_no_other_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is a row with the reason; those of the others are written as they come, and the exit code says it too."""
    written: list[list[str]] = []

    def fail(_: object) -> list[Row]:
        written.append([row["case"] for row in json.loads((tmp_path / "rows.json").read_text())])
        raise InternalError("no save was begun")

    parts = [
        ("first", lambda: [dataclasses.replace(ROW, case="first")]),
        ("second: ours", lambda: fail(None)),
        ("third", lambda: [dataclasses.replace(ROW, case="third")]),
    ]
    monkeypatch.setattr(checkpoint.Benchmark, "_parts", lambda self: iter(parts))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["checkpoint", "--json", "rows.json"])
    assert isinstance(done.exception, InternalError)
    assert "1 parts of the benchmark failed: second: ours: no save was begun" in str(done.exception)
    assert written == [["first", "cores"]]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["case"] for row in rows] == ["first", "second", "third", "cores"]
    lost = rows[1]
    assert (lost["contestant"], lost["n"], lost["note"]) == ("ours", 0, "failed: no save was begun")
    assert "third" in done.output


def test_stamps_are_read_back_and_a_silent_rank_is_an_error(tmp_path: Path) -> None:
    """One JSON line a stamp; copies are those of the slowest rank."""
    ranks = [[stamp("copy", 0, 0, 0.2, num_bytes=8)], [stamp("copy", 0, 0, 0.3, num_bytes=9)]]
    for rank, stamps in enumerate(ranks):
        (tmp_path / f"rank-{rank}.jsonl").write_text("".join(json.dumps(vars(item)) + "\n" for item in stamps))
    assert reading.read_stamps(tmp_path, 2) == ranks
    assert reading.copies(ranks) == ([pytest.approx(0.3)], 9)
    with pytest.raises(InternalError, match="rank 2"):
        reading.read_stamps(tmp_path, 3)


def test_the_state_is_about_500_mb() -> None:
    """What the targets are set for."""
    assert BenchConfig().state_bytes == pytest.approx(500e6, rel=0.02)
    with pytest.raises(UserError):
        BenchConfig(num_saves=0)


def test_an_absent_peer_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sample, and no figure that could be mistaken for one; an installed one is named with its version."""

    def version(name: str) -> str:
        raise checkpoint.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checkpoint.importlib.metadata, "version", version)
    row = checkpoint.absent_peer()
    assert row.n == 0 and row.note == "does not run: is not installed"
    monkeypatch.setattr(checkpoint.importlib.metadata, "version", lambda name: "0.4.1")
    monkeypatch.setattr(checkpoint, "_PEER_PROBE", "raise RuntimeError('no GPU')")
    assert checkpoint.absent_peer().note == "does not run: 0.4.1: RuntimeError: no GPU"


def test_references_read_and_checksum_what_they_say(tmp_path: Path) -> None:
    """Both take time, and a checksum of twice as much memory is scaled from what was measured."""
    (tmp_path / "a").write_bytes(os.urandom(1 << 20))
    assert checkpoint_reference.disk_read_s(tmp_path, 2) > 0
    assert checkpoint_reference.checksum_s(1 << 20, 2) > 0


def test_the_sampler_sees_slots_and_memory_of_descendants(tmp_path: Path) -> None:
    """A child with a slot file of its own; the sampler ends with its block."""
    code = (
        "import os, sys; fd = os.memfd_create('nvrx-hot-b-0'); os.posix_fallocate(fd, 0, 1 << 20);"
        "data = b'x' * (8 << 20); sys.stdout.write('ready'); sys.stdout.flush(); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.read(5) == b"ready"
    seen = threading.Event()
    with memory.MemorySampler(on_sample=seen.set) as sampler:
        assert seen.wait(60)
    child.communicate(b"")
    sample = sampler.samples[0]
    assert sample.slot_bytes == 1 << 20 and sample.anonymous_bytes[child.pid] > 8 << 20


def test_what_a_contestant_leaves_running_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orphan is found among our descendants and killed; its own children as well."""
    monkeypatch.setattr(subprocesses, "ORPHAN_S", 0.1)
    pid_file = tmp_path / "pid"
    command = [
        "sh",
        "-c",
        f"setsid sh -c 'echo $$ > {pid_file}; sleep 600' & until [ -s {pid_file} ]; do :; done; exit 3",
    ]
    assert subprocesses.run_to_end(command, tmp_path / "log", may_fail=True) == 3
    assert not Path(f"/proc/{pid_file.read_text().strip()}").exists()
