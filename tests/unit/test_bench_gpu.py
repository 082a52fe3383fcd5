"""The arithmetic of the GPU benchmark, on histories made by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nvrx_sre.bench import gpu
from nvrx_sre.bench import gpu_reading as reading
from nvrx_sre.bench.gpu import BenchConfig, Benchmark, fault_specs, quick
from nvrx_sre.bench.recovery_reading import Measured, Recovery
from nvrx_sre.bench.rows import Row
from nvrx_sre.cli.main import main
from nvrx_sre.core.errors import InternalError
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record
from nvrx_sre.faults.plan import FaultSpec

S = 1_000_000_000


class History:
    """A run made by hand: time goes on with its steps."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.now_s = 0.0
        self._step = 0

    def add(self, event: schema.Event) -> None:
        record = Record(
            run="b", epoch=1, generation=1, rank=None, seq=len(self.records), time_ns=round(self.now_s * S), event=event
        )
        self.records.append(record)

    def steps(self, num_steps: int, step_s: float, *, captured: int = 0, block_s: float = 0.0) -> None:
        """So many steps that were recorded together."""
        started_s, self.now_s = self.now_s, self.now_s + num_steps * step_s
        self.add(
            schema.StepsCommitted(
                kind=schema.StepKind.NEW,
                first_step=self._step + 1,
                last_step=self._step + num_steps,
                started_ns=round(started_s * S),
                committed_ns=round(self.now_s * S),
                step_s=0.0,
                data_s=0.0,
                checkpoint_block_s=block_s,
                evaluate_s=0.0,
                tokens=0,
                loss=None,
                hot_sealed_step=0,
                hot_captured=captured,
                hot_skipped=0,
            )
        )
        self._step += num_steps


@pytest.fixture
def history() -> History:
    """Warm-up, a choice, three rounds of a capture and what follows, a write beside slower steps."""
    made = History()
    made.steps(5, 1.0)
    made.steps(10, 0.1)
    made.add(schema.HotIntervalChosen(every_steps=10, cost_s=0.02, step_s=0.1, reason="measured"))
    for _ in range(3):
        made.steps(1, 0.11, captured=1, block_s=0.01)
        made.steps(3, 0.105)
        made.steps(6, 0.1)
    made.add(schema.SaveStarted(step=45, tier=schema.Tier.DURABLE, captured_ns=0))
    made.steps(10, 0.2)
    made.add(schema.SaveWritten(step=45, size_bytes=20 * S, seconds=10.0))
    made.steps(10, 0.2)
    made.add(schema.SaveVerified(step=45, directory="d", seconds=4.0, captured_ns=0))
    made.steps(1, 0.11, captured=1, block_s=0.03)
    return made


def named(rows: list[Row]) -> dict[str, Row]:
    return {row.case: row for row in rows}


def test_a_capture_costs_what_all_steps_took_longer_than_those_free_of_it(history: History) -> None:
    """The captured step and those beside the drain are in the mean; steps beside a write are in neither."""
    found = reading.steady_of(history.records)
    assert [item.num_steps for item in found.free] == [6, 6, 6]
    assert reading.mean_step_s(found.free) == pytest.approx(0.1)
    assert reading.mean_step_s(found.hot) == pytest.approx((3 * (0.11 + 0.315 + 0.6) + 0.11) / 31)
    assert [item.num_steps for item in found.writing] == [10, 10]


def test_rows_of_a_steady_run_say_whether_targets_were_met(history: History) -> None:
    """Cost, blocked time, steps beside a write and rates, each with its verdict."""
    rows = named(gpu.steady_rows(2, reading.steady_of(history.records)))
    cost = rows["hot captures, cost of training time"]
    assert cost.median == pytest.approx(0.0268, abs=1e-3) and "MISSED" in cost.note and "20.0 ms a capture" in cost.note
    assert rows["loop blocked by a capture"].max == 0.03 and "met" in rows["loop blocked by a capture"].note
    assert rows["durable save, steps longer by"].median == pytest.approx(0.947, abs=0.01)
    assert rows["durable save, written"].median == 2.0 and rows["durable save, read back"].median == 5.0


def test_every_interval_that_was_in_force_is_told(history: History) -> None:
    """Captures may cost what they do by an earlier choice than the last; one that is confirmed is told once."""
    for cost_s in (0.02, 0.016):
        history.add(schema.HotIntervalChosen(every_steps=8, cost_s=cost_s, step_s=0.1, reason="measured"))
    cost = named(gpu.steady_rows(2, reading.steady_of(history.records)))["hot captures, cost of training time"]
    assert cost.note.startswith("every 10, then 8 steps;") and "16.0 ms a capture, 0.0200 of a step" in cost.note


def test_a_run_without_a_choice_is_no_measurement(history: History) -> None:
    """Captures that are only probed for say nothing of what they cost in the long run."""
    history.records = [record for record in history.records if not isinstance(record.event, schema.HotIntervalChosen)]
    with pytest.raises(InternalError, match="chose no interval"):
        reading.steady_of(history.records)
    history.add(schema.HotIntervalChosen(every_steps=0, cost_s=0.0, step_s=0.0, reason="no memory for slots"))
    with pytest.raises(InternalError, match="captures nothing: no memory for slots"):
        reading.steady_of(history.records)


def measured(*totals_s: float, redone: int = 0, detected_s: float = 0.0) -> Measured:
    recoveries = tuple(
        Recovery(total_s=total_s, redone_steps=redone, marks_s={"detected": detected_s, "go": 0.2, "restored": 0.5})
        for total_s in totals_s
    )
    return Measured(recoveries=recoveries, step_s=0.1, note="no process replaced")


def test_recoveries_are_told_apart_by_the_plan() -> None:
    """In the order of steps, whatever the order of the specs."""
    found = reading.by_kind(measured(1.0, 3.0, 1.2), ["sigkill@0:20", "exception@1:10", "exception@0:30"])
    assert found["exception"].totals_s() == [1.0, 1.2] and found["sigkill"].totals_s() == [3.0]
    with pytest.raises(InternalError, match="2 faults were planned and 1 recovered"):
        reading.by_kind(measured(1.0), ["sigkill@0:20", "exception@1:10"])


def test_fault_rows_leave_out_what_was_trained_again() -> None:
    """The first step of the next generation is in, the steps between the captured state and the fault are not."""
    rows = named(gpu.fault_rows("exception", 2, measured(1.3, 1.4, 1.9, redone=2)))
    row = rows["exception, fault to first step"]
    assert row.median == pytest.approx(1.2) and row.max == pytest.approx(1.7)
    assert "median at most 1.2 s: met" in row.note and "p95 at most 1.5 s: MISSED" in row.note
    assert rows["exception, fault to first new step"].median == 1.4


def test_hangs_are_counted_from_their_detection() -> None:
    """How long a step may take is the user's choice; how late it was seen is ours."""
    rows = named(gpu.fault_rows("hang", 2, measured(4.5, detected_s=3.2)))
    assert rows["hang, detected after its deadline"].median == pytest.approx(0.2)
    assert rows["hang, detection to first step"].median == pytest.approx(1.3)


def test_ends_are_compared_bit_for_bit_or_within_the_tolerance() -> None:
    """A digest that differs is named; a loss that was not to be compared is no row with figures."""
    wanted: dict[str, Any] = {"loss_digest": "a", "samples_digest": "b", "state_digest": "c"}
    assert "all: met" in gpu.digest_row(2, wanted, wanted, 3).note
    row = gpu.digest_row(2, wanted, {**wanted, "state_digest": "d"}, 3)
    assert row.median == 2 and "different: state_digest" in row.note and "MISSED" in row.note
    assert "met" in gpu.loss_row(2, 2.0, 2.05, 3).note
    assert "MISSED" in gpu.loss_row(2, 2.0, 2.2, 3).note
    assert gpu.loss_row(2, None, 2.2, 3).n == 0


def test_memory_is_that_of_the_rank_that_grew_most() -> None:
    """What an allocator keeps may grow by a tenth, all else may not; the first generation is left out."""

    def counts(*sizes: int) -> list[dict[str, int]]:
        return [{"threads": 9, "reserved_bytes": size, "shared_bytes": size} for size in sizes]

    flat, grown = counts(1, 100, 100, 100, 105), counts(1, 100, 100, 100, 125)
    notes = {row.case: row.note for row in gpu.memory_rows(2, {"rank-0": flat})}
    assert notes["restarts, reserved"].endswith("within 10 %: met")
    assert notes["restarts, shared"] == "4 restarts; rank-0: first 100, last 105 bytes; target flat: MISSED"
    rows = named(gpu.memory_rows(2, {"rank-0": flat, "rank-1": grown}))
    assert "rank-1: " in rows["restarts, reserved"].note and "MISSED" in rows["restarts, reserved"].note
    assert "met" in rows["restarts, threads"].note


@pytest.mark.parametrize("config", [BenchConfig(), quick(gpu.PARTS)])
def test_planned_faults_leave_room_for_what_they_need(config: BenchConfig) -> None:
    """Each kind as often as was asked for, within the run, the next one after a kill when a standby is ready."""
    specs = [FaultSpec.parse(spec) for spec in fault_specs(config)]
    counts = {kind: sum(spec.kind.value == kind for spec in specs) for kind in ("exception", "sigkill", "hang")}
    assert counts == {"exception": config.exceptions, "sigkill": config.kills, "hang": config.hangs}
    assert specs[-1].step < config.steps
    for spec, later in itertools.pairwise(specs):
        gap = config.kill_gap_steps if spec.kind.value == "sigkill" else config.gap_steps
        assert later.step - spec.step == gap


def test_a_part_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a row with the reason, and what was measured before it is handed over."""
    bench = Benchmark(replace(quick(("steady", "memory")), folder=tmp_path), lambda _: None, lambda _: None)
    ends = {**dict.fromkeys(gpu.DIGESTS, "a"), "final_loss": 1.0}

    def fake(command: list[str], log: Path) -> None:
        run_dir = log.with_suffix("")
        run_dir.mkdir()
        if run_dir.name == "steady":
            raise InternalError("it went wrong")
        (run_dir / "summary.json").write_text(json.dumps(ends))
        (tmp_path / "census" / "rank-0.jsonl").write_text('{"threads": 3}\n' * 4)

    monkeypatch.setattr(gpu, "run_to_end", fake)
    bench.run()
    assert bench.failed == ["steady: it went wrong"]
    assert [(row.case, row.n) for row in bench.rows] == [
        ("steady", 0),
        ("restarts, threads", 3),
        ("same end as without faults", 1),
    ]


def test_a_folder_that_is_not_there_is_found_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten minutes of measuring must not end in a path that cannot be written."""
    assert main(["bench", "gpu", "--json", "/nowhere/gpu.json"]) == 78
    assert "there is no folder /nowhere; " in capsys.readouterr().err


def test_the_large_model_wants_a_device_for_each_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a smaller machine it would take its memory and come to nothing: one line instead."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(["bench", "gpu"]) == 78
    assert "needs 2 GPUs and this machine has 1" in capsys.readouterr().err
    gpu.check_start(BenchConfig(ranks=1))
    gpu.check_start(quick(gpu.PARTS))


def test_runs_are_kept_in_a_folder_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one with earlier runs these would be gone on with, and be finished already."""
    (tmp_path / "steady").mkdir()
    assert main(["bench", "gpu", "--quick", "--folder", str(tmp_path)]) == 78
    assert f"{tmp_path} is not an empty folder" in capsys.readouterr().err
    gpu.check_start(replace(quick(gpu.PARTS), folder=tmp_path / "steady"))
