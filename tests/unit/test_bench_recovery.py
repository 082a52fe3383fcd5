"""The arithmetic of the recovery benchmark, on histories made by hand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nvrx_sre.bench import recovery, recovery_leak, recovery_ours, recovery_ranks, subprocesses
from nvrx_sre.bench import recovery_reading as reading
from nvrx_sre.bench.peer_training import PeerOptions
from nvrx_sre.bench.recovery import Benchmark
from nvrx_sre.bench.recovery_cases import CASES, BenchConfig, Counts, quick, same_count
from nvrx_sre.bench.recovery_census import holdings
from nvrx_sre.bench.recovery_peers import FT_LAUNCHER, IN_PROCESS, PEERS, SHORTEST, TORCHRUN, Peer, PeerRun
from nvrx_sre.bench.recovery_reading import Measured, Pace, Recovery, Stamp
from nvrx_sre.bench.rows import Row
from nvrx_sre.cli.main import main
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
    measured = reading.from_records(_record(event, number) for number, event in enumerate(events))
    assert measured.step_s == pytest.approx(0.1)
    assert [(item.total_s, item.redone_steps) for item in measured.recoveries] == [(pytest.approx(1.0), 2)]
    assert measured.overheads_s() == [pytest.approx(1.0 - 3 * 0.1)]
    assert measured.note == "1 of 1 replacements by a warm standby"


def test_a_run_without_a_recovery_is_no_measurement() -> None:
    """A benchmark never reports on nothing."""
    with pytest.raises(InternalError, match="no recovery"):
        reading.from_records([_record(_steps(1, 1, 0.0, 1.0), 1)])


def test_the_median_counts_steps_not_aggregates() -> None:
    """One aggregate of many steps outweighs several of one."""
    assert reading.weighted_median([(0.9, 1), (0.8, 1), (0.1, 20)]) == 0.1


def test_the_peers_stamps_give_the_same_quantities() -> None:
    """The slowest rank's first new step ends a recovery; saves are left out of the median step."""

    def rank(offset_ns: int, *, faulty: bool) -> list[Stamp]:
        before = [Stamp(kind="step", step=step, ns=step * S + offset_ns) for step in range(1, 5)]
        fault = [Stamp(kind="fault", step=5, ns=5 * S)] if faulty else []
        after = [Stamp(kind="step", step=step, ns=(16 + step) * S + offset_ns) for step in range(3, 7)]
        return [*before, *fault, Stamp(kind="restored", step=2, ns=18 * S), *after]

    measured = reading.from_stamps([rank(0, faulty=False), rank(500, faulty=True)], save_every=2)
    assert measured.recoveries == (Recovery(total_s=pytest.approx(16.0000005), redone_steps=2),)
    assert measured.step_s == pytest.approx(1.0)


def test_a_peer_that_never_came_back_is_an_error() -> None:
    """A missing recovery must not look like a fast one."""
    stamps = [Stamp(kind="step", step=1, ns=1), Stamp(kind="fault", step=2, ns=2)]
    with pytest.raises(InternalError, match="did not come back"):
        reading.from_stamps([stamps], save_every=5)


def test_stamps_are_read_back(tmp_path: Path) -> None:
    """One JSON line a stamp."""
    path = tmp_path / "rank-0.jsonl"
    path.write_text(json.dumps({"kind": "step", "step": 3, "ns": 7}) + "\n")
    assert reading.read_stamps(path) == [Stamp(kind="step", step=3, ns=7)]


def test_a_benchmark_of_nothing_is_refused() -> None:
    """At least one fault and one rank."""
    with pytest.raises(UserError):
        BenchConfig(counts=Counts(hangs=0))
    with pytest.raises(UserError):
        BenchConfig(ranks=(2, 0))


def test_a_failing_run_shows_the_end_of_its_log(tmp_path: Path) -> None:
    """The reason is in the error, not in a file that is removed."""
    with pytest.raises(InternalError, match="exit code 3: because"):
        subprocesses.run_to_end(["sh", "-c", "echo because; exit 3"], tmp_path / "log")


def test_the_pace_sets_faults_apart() -> None:
    """More than a standby's warm-up between kills; a default where none became ready."""
    records = [
        _record(schema.WorkerStarted(role=schema.Role.STANDBY, pid=1, start_ticks=1, attempt=1), 0),
        _record(_steps(1, 10, 0.0, 1.0), 1),
        _record(schema.StandbyReady(pid=1), 3 * S),
    ]
    pace = reading.pace_of(records)
    assert (pace.step_s, pace.standby_s) == (pytest.approx(0.1), 3.0)
    assert recovery_ours.plan("sigkill", 4, 3, pace) == (["sigkill@0:20", "sigkill@3:70", "sigkill@0:120"], 170)
    assert recovery_ours.plan("exception", 2, 2, pace) == (["exception@0:20", "exception@1:26"], 32)
    assert reading.pace_of(records[:2]).standby_s == reading.STANDBY_S
    with pytest.raises(InternalError, match="no step"):
        reading.pace_of(records[:1])


def test_survivors_of_a_collective_are_kept_waiting_first() -> None:
    """The delay stands before the exception, at the same point of the same step."""
    specs, _ = recovery_ours.plan("collective", 2, 1, Pace(step_s=0.1, standby_s=1.0))
    assert specs == ["slow@0:20=10.0x/forward", "exception@0:20/forward"]


def test_a_recovery_is_timed_from_the_exception_not_from_the_delay_before_it() -> None:
    """And its marks are kept: the first of each kind after the fault."""
    events: list[tuple[schema.Event, float]] = [
        (_steps(1, 1, 0.0, 1.0), 1.0),
        (_steps(2, 11, 1.0, 2.0), 2.0),
        (_injected("slow@1:12=10.0x/forward", 2.0), 2.0),
        (_injected("exception@1:12/forward", 3.0), 3.0),
        (schema.TeardownFinished(kept=[0, 1], killed=[]), 3.02),
        (schema.GenerationFormed(world_size=2, go_ns=round(3.03 * S), pids=[1, 2]), 3.05),
        (
            schema.StateRestored(step=11, source=schema.RestoredFrom.HOT, restored_ns=round(3.04 * S), seconds=0.01),
            3.06,
        ),
        (schema.ProgressResumed(step=12, committed_ns=round(3.2 * S), first_step_started_ns=0), 3.2),
    ]
    records = [replace(_record(event, number), time_ns=round(at_s * S)) for number, (event, at_s) in enumerate(events)]
    measured = reading.from_records(records)
    (found,) = measured.recoveries
    assert found.total_s == pytest.approx(0.2)
    assert found.marks_s == {name: pytest.approx(value) for name, value in _MARKS_S.items()}
    assert measured.overheads_s(after="go") == [pytest.approx(0.2 - 0.1 - 0.03)]
    assert recovery.marks_note(measured) == "ms after the fault: torn down 20, go 30, restored 40, first step 200"


_MARKS_S = {"torn down": 0.02, "go": 0.03, "restored": 0.04}


def _injected(spec: str, at_s: float) -> schema.FaultInjected:
    return schema.FaultInjected(spec=spec, step=12, passes=1, injected_ns=round(at_s * S))


# --- parts and their rows -------------------------------------------------------------------------------------


def _measured(total_s: float = 1.0, detected_s: float = 0.3) -> Measured:
    found = Recovery(total_s=total_s, redone_steps=4, marks_s={"detected": detected_s})
    return Measured(recoveries=(found,), step_s=0.1, note="n")


def _bench(monkeypatch: pytest.MonkeyPatch, config: BenchConfig, kept: list[int] | None = None) -> Benchmark:
    """A benchmark whose runs are made up; `kept` grows by the number of rows that were handed over."""
    monkeypatch.setattr(recovery_ours, "calibrate", lambda *_: Pace(step_s=0.1, standby_s=3.0))
    monkeypatch.setattr(recovery_ours, "run_case", lambda *_: _measured(detected_s=1.1))
    monkeypatch.setattr(recovery_ours, "run_collective", lambda *_: _measured())
    monkeypatch.setattr(recovery, "run_peer", lambda *_: _measured(4.0))
    monkeypatch.setattr(Peer, "missing", lambda _: "")
    monkeypatch.setattr(Peer, "version", lambda peer: f"{peer.name} 1")
    return Benchmark(config, lambda _: None, lambda rows: None if kept is None else kept.append(len(rows)))


def _row(rows: Sequence[Row], contestant: str, case: str) -> Row:
    (found,) = [row for row in rows if (row.contestant, row.case) == (contestant, case)]
    return found


def test_rows_hold_overhead_total_and_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours against its target, a peer against ours; a peer that cannot do a case says so."""
    bench = _bench(monkeypatch, BenchConfig(ranks=(2,), cases=("exception", "sigkill")))
    bench.run()
    assert bench.failed == []
    ours = _row(bench.rows, "nvrx-sre", "exception")
    assert (ours.median, _row(bench.rows, "nvrx-sre", "exception total").median) == (pytest.approx(0.5), 1.0)
    assert ours.note.startswith("target median at most 0.08 s: MISSED; step 100.0 ms, median 4 steps redone")
    assert "total 4.0 x ours; target at least 3 x: met" in _row(bench.rows, SHORTEST.name, "exception").note
    assert "target at least 10 x: MISSED" in _row(bench.rows, IN_PROCESS.name, "exception total").note
    refused = _row(bench.rows, SHORTEST.name, "sigkill")
    assert (refused.n, refused.note) == (0, f"{SHORTEST.name} 1 replaces no process: it goes on with fewer ranks")


def test_a_hang_is_judged_from_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detection past the deadline, and what came after detection."""
    bench = _bench(monkeypatch, BenchConfig(ranks=(2, 4), cases=("hang",)))
    bench.run()
    late = _row(bench.rows, "nvrx-sre", "hang detection past the deadline")
    assert (late.median, late.ranks) == (pytest.approx(0.1), 2)
    assert late.note.startswith("target every one at most 0.2 s: met")
    assert _row(bench.rows, "nvrx-sre", "hang after detection").median == pytest.approx(1.0 - 0.5 - 1.1)
    assert "heartbeat limit 3 s" in _row(bench.rows, FT_LAUNCHER.name, "hang").note


def test_timeouts_of_the_group_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long one against the short one."""
    bench = _bench(monkeypatch, BenchConfig(ranks=(2,), cases=("collective",)))
    bench.run()
    assert "target" not in _row(bench.rows, "nvrx-sre", "collective, group timeout 5 s").note
    long = _row(bench.rows, "nvrx-sre", "collective, group timeout 60 s")
    assert long.note.endswith("total 1.00 x that at 5 s; target within 20 %: met")


def test_a_part_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row says why, rows are handed over after every part, and the failure is told at the end."""
    kept: list[int] = []
    bench = _bench(monkeypatch, BenchConfig(ranks=(2,), cases=("exception",)), kept)

    def run_peer(peer: Peer, _: PeerRun) -> Measured:
        if peer is SHORTEST:
            raise InternalError("it never came back")
        return _measured()

    monkeypatch.setattr(recovery, "run_peer", run_peer)
    bench.run()
    assert kept == [2, 4, 5, 7]
    assert _row(bench.rows, SHORTEST.name, "exception").note == "failed: it never came back"
    assert bench.failed == [f"exception, 2 ranks, {SHORTEST.name}: it never came back"]


def test_a_failed_part_is_told_by_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is on the screen and in the file all the same."""

    def calibrate(*_: object) -> Pace:
        raise InternalError("no step was taken")

    _bench(monkeypatch, BenchConfig())
    monkeypatch.setattr(recovery_ours, "calibrate", calibrate)
    path = tmp_path / "rows.json"
    arguments = ["bench", "recovery", "--case", "exception", "--ranks", "2", "--peer-faults", "1", "--json", str(path)]
    assert main(arguments) == 70
    kept = {(row["contestant"], row["case"]): row["n"] for row in json.loads(path.read_text())}
    assert kept["nvrx-sre", "exception"] == 0 and kept[TORCHRUN.name, "exception"] == 1
    shown = capsys.readouterr()
    assert "1 parts of the benchmark failed: exception, 2 ranks, nvrx-sre: no step was taken" in shown.err
    assert TORCHRUN.name in shown.out


def test_one_size_has_no_law(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No exponent that is not a number reaches a file of rows."""
    monkeypatch.setattr(recovery_ranks, "calibrate", lambda *_: Pace(step_s=0.1, standby_s=3.0))
    monkeypatch.setattr(recovery_ranks, "run_case", lambda *_: _measured())
    rows = recovery_ranks.measured_rows("nvrx-sre", tmp_path, BenchConfig(sizes=(2,)))
    assert [row.ranks for row in rows] == [2]


def test_a_peer_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark runs without it."""
    bench = _bench(monkeypatch, BenchConfig(ranks=(2,), cases=("exception",)))
    monkeypatch.setattr(Peer, "missing", lambda peer: "is not installed" if peer.needs_nvrx else "")
    bench.run()
    assert [(row.contestant, row.note) for row in bench.rows if row.n == 0] == [
        (peer.name, "is not installed") for peer in (IN_PROCESS, SHORTEST)
    ]


def test_no_peer_runs_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--peer-faults 0`."""
    config = BenchConfig(counts=same_count(1, 0), cases=("exception", "sigkill", "hang", "collective"))
    bench = _bench(monkeypatch, config)
    bench.run()
    assert {row.contestant for row in bench.rows} == {"nvrx-sre"}


def test_victims_take_turns_under_every_contestant() -> None:
    """Rank 0 first, then the last rank."""
    argv = PeerRun(out=Path("o"), case="exception", ranks=4, num_faults=3).arguments()
    options, rest = PeerOptions.from_argv([*argv, "--heartbeat"])
    assert rest == ["--heartbeat"]
    assert [options.faults_of(rank, 4) for rank in range(4)] == [[25, 85], [], [], [55]]
    assert options.faults_of(0, 1) == [25, 55, 85]
    assert recovery_ours.victims(3, 4) == [0, 3, 0]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_peer_has_a_command_or_a_reason(peer: Peer) -> None:
    """No case is claimed and refused; the command carries the plan."""
    assert not set(peer.cases) & set(peer.cannot)
    assert set(peer.cases) | set(peer.cannot) <= set(CASES)
    command = peer.command(PeerRun(out=Path("o"), case=peer.cases[0], ranks=3, num_faults=2))
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[command.index("--fault-steps") + 1 :][:2] == ["25", "55"]


def test_the_quick_benchmark_asks_every_question() -> None:
    """It is the same benchmark, smaller."""
    assert quick().cases == CASES
    assert TORCHRUN.missing() == ""


# --- what is held ---------------------------------------------------------------------------------------------


def _counts(**changes: int) -> dict[str, int]:
    return {"threads": 5, "fds": 20, "sockets": 4, "shared_bytes": 1000, "rss_bytes": 10_000} | changes


def test_a_leak_is_seen_in_the_process_that_has_it() -> None:
    """One descriptor more at the end is one too many; memory may grow by a tenth; the first generation is left out."""
    grown = [_counts(fds=20 + number // 40, rss_bytes=10_000 + 20 * number) for number in range(61)]
    counted = {"rank-0": [_counts(threads=9)] * 61, "launcher": [_counts(threads=90), *grown[1:]]}
    measured = Measured(
        recoveries=tuple(Recovery(total_s=0.1 + 0.001 * number, redone_steps=0) for number in range(60)),
        step_s=0.05,
        note="",
    )
    notes = {row.case: row.note for row in recovery_leak.leak_rows("nvrx-sre", 2, measured, counted)}
    assert notes["leak fds"] == "launcher: first 20, last 21 fds; target flat: MISSED"
    assert notes["leak threads"].endswith("target flat: met")
    assert notes["leak rss"] == "launcher: first 1.021e+04, last 1.101e+04 bytes; target within 10 %: met"
    assert notes["leak total"] == "first 0.1095, last 0.1495 s; target within 1.2x: MISSED"


def test_too_few_restarts_say_nothing() -> None:
    """Two ends need two values."""
    with pytest.raises(InternalError, match="less than two"):
        recovery_leak.ends([1.0])


def test_holdings_are_those_of_the_process() -> None:
    """One more descriptor is one more, and a socket is told apart."""
    before = holdings(os.getpid())
    read, write = os.pipe()
    try:
        after = holdings(os.getpid())
    finally:
        os.close(read)
        os.close(write)
    assert (after["fds"], after["sockets"]) == (before["fds"] + 2, before["sockets"])
    assert after["rss_bytes"] > 10_000_000 and after["threads"] >= 1


def test_simulated_cost_is_told_with_its_law() -> None:
    """A row a size, and one of the growth."""
    *sizes, law = recovery_ranks.simulated_rows("nvrx-sre", 32)
    assert [row.ranks for row in sizes] == [2, 4, 8, 16, 32]
    assert sizes[-1].median > 0 and law.note.startswith("packets ~ hosts^")


def test_measured_cost_is_told_with_its_law(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Overheads that double with the ranks grow with exponent 1."""
    monkeypatch.setattr(recovery_ranks, "calibrate", lambda *_: Pace(step_s=0.1, standby_s=3.0))

    def run_case(run_dir: Path, case: str, ranks: int, num_faults: int, pace: Pace) -> Measured:
        return replace(_measured(total_s=0.5 + 0.1 * ranks), note=f"{case} {num_faults} {run_dir} {pace}")

    monkeypatch.setattr(recovery_ranks, "run_case", run_case)
    rows = recovery_ranks.measured_rows("nvrx-sre", tmp_path, BenchConfig(sizes=(2, 4, 8)))
    assert [row.median for row in rows] == [pytest.approx(value) for value in (0.2, 0.4, 0.8, 1.0)]
    assert rows[0].note.startswith("step 100.0 ms, 2 ranks on ")


def test_a_census_finds_its_launcher(tmp_path: Path) -> None:
    """The ancestor whose parent is the benchmark; here this process's own parent's child, which is this process."""
    script = (
        "import os, subprocess, sys\n"
        "code = 'import sys; from pathlib import Path; from nvrx_sre.bench.recovery_census import Census; '\n"
        "code += 'Census(folder=Path(sys.argv[1]), bench_pid=int(sys.argv[2])).take(0)'\n"
        "subprocess.run([sys.executable, '-c', code, *sys.argv[1:]], check=True)\n"
    )
    subprocesses.run_to_end([sys.executable, "-c", script, str(tmp_path), str(os.getpid())], tmp_path / "log")
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["launcher.jsonl", "rank-0.jsonl"]
    launcher, rank = (json.loads((tmp_path / name).read_text()) for name in ("launcher.jsonl", "rank-0.jsonl"))
    assert launcher["rss_bytes"] < rank["rss_bytes"]
