"""The arithmetic of the recovery benchmark, on histories made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvrx_sre.bench import recovery, subprocesses
from nvrx_sre.bench.recovery import BenchConfig, Measured, Pace, Recovery, Stamp
from nvrx_sre.core.errors import InternalError, UserError
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record, StepKind, StepsCommitted

S = 1_000_000_000


def _record(event: schema.Event, seq: int) -> Record:
    return Record(run="b", epoch=1, generation=1, rank=None, seq=seq, time_ns=seq, event=event)


def _steps(
    first: int, last: int, started_s: float, committed_s: float, kind: StepKind = StepKind.NEW
) -> StepsCommitted:
    return StepsCommitted(
        kind=kind,
        first_step=first,
        last_step=last,
        started_ns=round(started_s * S),
        committed_ns=round(committed_s * S),
        step_s=0.0,
        data_s=0.0,
        checkpoint_block_s=0.0,
        evaluate_s=0.0,
        tokens=0,
        loss=None,
        hot_sealed_step=0,
        hot_captured=0,
        hot_skipped=0,
    )


def test_overhead_leaves_out_the_steps_done_again() -> None:
    """Total minus the redone steps and the first new one, at the median fault-free step."""
    events: list[schema.Event] = [
        schema.GenerationFormed(world_size=2, go_ns=0, pids=[1, 2]),
        _steps(1, 1, 0.0, 5.0),
        _steps(2, 11, 5.0, 6.0),
        schema.FaultInjected(spec="sigkill@0:12", step=12, passes=1, injected_ns=round(6.1 * S)),
        schema.RankReplaced(old_pid=1, new_pid=3, warm=True),
        schema.RolledBack(step=9, high_water=11, source=schema.RestoredFrom.HOT),
        schema.GenerationFormed(world_size=2, go_ns=0, pids=[3, 2]),
        _steps(10, 11, 6.5, 6.9, StepKind.REDONE),
        schema.ProgressResumed(step=12, committed_ns=round(7.1 * S), first_step_started_ns=0),
    ]
    measured = recovery.from_records(_record(event, number) for number, event in enumerate(events))
    assert measured.step_s == pytest.approx(0.1)
    assert measured.recoveries == (Recovery(total_s=pytest.approx(1.0), redone_steps=2),)
    assert measured.overheads_s() == [pytest.approx(1.0 - 3 * 0.1)]
    assert measured.note == "1 of 1 replacements by a warm standby"


def test_a_run_without_a_recovery_is_no_measurement() -> None:
    """A benchmark never reports on nothing."""
    with pytest.raises(InternalError, match="no recovery"):
        recovery.from_records([_record(_steps(1, 1, 0.0, 1.0), 1)])


def test_the_median_counts_steps_not_aggregates() -> None:
    """One aggregate of many steps outweighs several of one."""
    assert recovery.weighted_median([(0.9, 1), (0.8, 1), (0.1, 20)]) == 0.1


def test_the_peers_stamps_give_the_same_quantities() -> None:
    """The slowest rank's first new step ends a recovery; saves are left out of the median step."""

    def rank(offset_ns: int, *, faulty: bool) -> list[Stamp]:
        before = [Stamp(kind="step", step=step, ns=step * S + offset_ns) for step in range(1, 5)]
        fault = [Stamp(kind="fault", step=5, ns=5 * S)] if faulty else []
        after = [Stamp(kind="step", step=step, ns=(16 + step) * S + offset_ns) for step in range(3, 7)]
        return [*before, *fault, Stamp(kind="restored", step=2, ns=18 * S), *after]

    measured = recovery.from_stamps([rank(0, faulty=False), rank(500, faulty=True)], save_every=2)
    assert measured.recoveries == (Recovery(total_s=pytest.approx(16.0000005), redone_steps=2),)
    assert measured.step_s == pytest.approx(1.0)


def test_a_peer_that_never_came_back_is_an_error() -> None:
    """A missing recovery must not look like a fast one."""
    stamps = [Stamp(kind="step", step=1, ns=1), Stamp(kind="fault", step=2, ns=2)]
    with pytest.raises(InternalError, match="did not come back"):
        recovery.from_stamps([stamps], save_every=5)


def test_rows_hold_overhead_and_raw_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case has its row and its `total` row, for both contestants."""
    measured = Measured(recoveries=(Recovery(total_s=1.0, redone_steps=4),), step_s=0.1, note="n")
    monkeypatch.setattr(recovery, "_calibrate", lambda *_: Pace(step_s=0.1, standby_s=3.0))
    monkeypatch.setattr(recovery, "_run_ours", lambda *_: measured)
    monkeypatch.setattr(recovery, "_run_peer", lambda *_: measured)
    rows = recovery.measure(BenchConfig(num_faults=1, num_peer_faults=1))
    assert [(row.contestant, row.case, round(row.median, 6)) for row in rows] == [
        (contestant, name, value)
        for case in ("exception", "sigkill")
        for contestant in ("nvrx-sre", "torchrun")
        for name, value in ((case, 0.5), (f"{case} total", 1.0))
    ]


def test_stamps_are_read_back(tmp_path: Path) -> None:
    """One JSON line a stamp."""
    path = tmp_path / "rank-0.jsonl"
    path.write_text(json.dumps({"kind": "step", "step": 3, "ns": 7}) + "\n")
    assert recovery.read_stamps(path) == [Stamp(kind="step", step=3, ns=7)]


def test_a_benchmark_of_nothing_is_refused() -> None:
    """At least one fault and one rank."""
    with pytest.raises(UserError):
        BenchConfig(num_faults=0)


def test_a_failing_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """The reason is in the error, not in a file that is removed."""
    with pytest.raises(InternalError, match="exit code 3: because"):
        subprocesses.run_to_end(["sh", "-c", "echo because; exit 3"], tmp_path / "log")


def test_the_pace_sets_faults_apart() -> None:
    """Twice a standby's warm-up between kills; a default where none became ready."""
    records = [
        _record(schema.WorkerStarted(role=schema.Role.STANDBY, pid=1, start_ticks=1, attempt=1), 0),
        _record(_steps(1, 10, 0.0, 1.0), 1),
        _record(schema.StandbyReady(pid=1), 3 * S),
    ]
    pace = recovery.pace_of(records)
    assert (pace.step_s, pace.standby_s, pace.gap_steps("sigkill")) == (pytest.approx(0.1), 3.0, 60)
    assert recovery.pace_of(records[:2]).standby_s == recovery.STANDBY_S
    with pytest.raises(InternalError, match="no step"):
        recovery.pace_of(records[:1])
