"""Real ranks, real faults, and an unfaulted run as the oracle: after any recovery all three digests are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_sre.events.schema import (
    CheckpointRejected,
    FaultDetected,
    IncidentClosed,
    Layer,
    RankReplaced,
    RestoredFrom,
    RunFinished,
    SaveCommitted,
    StateRestored,
)
from tests.integration.launched import Ended, finish, start, train

DIGESTS = ("loss_digest", "samples_digest", "state_digest")


@pytest.fixture(scope="session", params=[2, 4])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Ended]:
    """(ranks, the run without faults)."""
    nproc = int(request.param)
    ended = train(tmp_path_factory.mktemp("oracle") / "run", "--nproc", str(nproc))
    assert ended.exit_code == 0, ended.explain()
    return nproc, ended


def assert_same_as(oracle: Ended, ended: Ended) -> None:
    """The faulted run finished with the oracle's losses, samples and state."""
    assert ended.exit_code == 0, ended.explain()
    for name in DIGESTS:
        assert ended.summary[name] == oracle.summary[name], f"{name} differs\n{ended.explain()}"
    assert ended.summary["loss_mismatches"] == 0
    assert ended.summary["steps"] == oracle.summary["steps"]


def one_incident(ended: Ended) -> IncidentClosed:
    """The only incident of the run, recovered."""
    closed = [event for _, event in ended.events(IncidentClosed)]
    assert len(closed) == 1, ended.explain()
    assert closed[0].verdict == "recovered"
    return closed[0]


@pytest.mark.parametrize("spec", ["exception@1:12", "exception@0:13/backward", "hang@1:12", "hang@0:12/collective"])
def test_in_process_recovery_keeps_every_process(oracle: tuple[int, Ended], tmp_path: Path, spec: str) -> None:
    """An exception or an interruptible hang costs no process, on rank 0 as well as on another."""
    nproc, unfaulted = oracle
    ended = train(tmp_path / "run", "--nproc", str(nproc), "--fault", spec)
    assert_same_as(unfaulted, ended)
    assert one_incident(ended).layer is Layer.IN_PROCESS
    assert not ended.events(RankReplaced), ended.explain()
    assert one_incident(ended).rollback_steps <= 1


@pytest.mark.parametrize("rank", [0, 1])
def test_c48_a_killed_rank_costs_one_new_process(oracle: tuple[int, Ended], tmp_path: Path, rank: int) -> None:
    """SIGKILL of any rank, rank 0 included: one replacement, survivors keep their processes."""
    nproc, unfaulted = oracle
    ended = train(tmp_path / "run", "--nproc", str(nproc), "--fault", f"sigkill@{rank}:12")
    assert_same_as(unfaulted, ended)
    assert one_incident(ended).layer is Layer.WORKER
    replaced = ended.events(RankReplaced)
    assert [record.rank for record, _ in replaced] == [rank], ended.explain()
    assert replaced[0][1].warm


def test_c47_one_fault_names_the_culprit(tmp_path: Path) -> None:
    """4 ranks, SIGKILL of rank 2: one fault, rank 2, signal 9; its victims' errors are not faults."""
    ended = train(tmp_path / "run", "--nproc", "4", "--fault", "sigkill@2:12")
    assert ended.exit_code == 0, ended.explain()
    faults = ended.events(FaultDetected)
    assert [(record.rank, event.fault, event.signal) for record, event in faults] == [(2, "killed", 9)], ended.explain()


@pytest.mark.parametrize("spec", ["sigstop@1:12", "hang_native@1:12", "hang_gil@0:12"])
def test_c30_a_frozen_rank_is_replaced_within_its_deadline(tmp_path: Path, spec: str) -> None:
    """A rank that cannot be interrupted is killed past its grace; survivors do not wait for the group's timeout."""
    ended = train(tmp_path / "run", "--nproc", "2", "--fault", spec)
    assert ended.exit_code == 0, ended.explain()
    incident = one_incident(ended)
    assert (incident.fault, incident.layer) == ("hang", Layer.WORKER)
    assert len(ended.events(RankReplaced)) == 1
    assert incident.outage_s is not None and incident.outage_s < 60


def test_c27_a_stuck_main_thread_is_a_hang_although_it_is_alive(tmp_path: Path) -> None:
    """Liveness goes on, progress does not: the fault is a hang, the culprit is the rank behind, stacks are kept."""
    ended = train(tmp_path / "run", "--nproc", "2", "--fault", "hang@1:12")
    assert ended.exit_code == 0, ended.explain()
    [(record, fault)] = ended.events(FaultDetected)
    assert (record.rank, fault.fault, fault.detector) == (1, "hang", "deadline"), ended.explain()


def test_the_demos_faults_one_after_another(oracle: tuple[int, Ended], tmp_path: Path) -> None:
    """Exception, SIGKILL of rank 0, hang, then a truncated newest checkpoint and the loss of the node."""
    nproc, unfaulted = oracle
    faults = ["exception@1:5", "sigkill@0:10", "hang@1:14", "corrupt_checkpoint@1:20", "node_kill@0:21"]
    arguments = [item for fault in faults for item in ("--fault", fault)]
    ended = train(tmp_path / "run", "--nproc", str(nproc), *arguments)
    assert_same_as(unfaulted, ended)
    layers = [event.layer for _, event in ended.events(IncidentClosed)]
    assert layers == [Layer.IN_PROCESS, Layer.WORKER, Layer.IN_PROCESS, Layer.WORKER], ended.explain()
    rejected = [event for _, event in ended.events(CheckpointRejected)]
    assert [event.step for event in rejected] == [16], ended.explain()
    last = ended.events(StateRestored)[-1][1]
    assert (last.step, last.source) == (8, RestoredFrom.DURABLE), ended.explain()


def test_a_save_handed_over_survives_the_loss_of_every_rank(tmp_path: Path) -> None:
    """All ranks die right after step 8 was sealed; the writer commits it all the same."""
    ended = train(tmp_path / "run", "--nproc", "2", "--fault", "sigkill@0:9/data", "--fault", "sigkill@1:9/data")
    assert ended.exit_code == 0, ended.explain()
    assert 8 in [event.step for _, event in ended.events(SaveCommitted)], ended.explain()


def test_a_run_can_be_extended_from_its_last_checkpoint(tmp_path: Path) -> None:
    """A second launcher on the same directory goes on at the last durable step, and equals one long run."""
    first = train(tmp_path / "run", "--nproc", "2", "--steps", "16")
    assert first.exit_code == 0, first.explain()
    second = train(tmp_path / "run", "--nproc", "2", "--steps", "24")
    assert second.exit_code == 0, second.explain()
    restored = [event for record, event in second.events(StateRestored) if record.epoch == 2]
    assert [(event.step, event.source) for event in restored] == [(16, RestoredFrom.DURABLE)], second.explain()


def test_many_restarts_leak_nothing_and_meshes_are_current(tmp_path: Path) -> None:
    """12 in-process restarts of a script with DTensor reductions: same result, descriptors and threads stay flat."""
    script = str(Path(__file__).with_name("clipping_script.py"))
    common = ["launch", "--nproc-per-node", "2", "--metrics-linger", "0"]
    plain = finish(start([*common, "--run-dir", str(tmp_path / "plain"), script]), tmp_path / "plain")
    faults = [item for step in range(4, 52, 4) for item in ("--fault", f"exception@{step // 4 % 2}:{step}")]
    faulted = finish(start([*common, "--run-dir", str(tmp_path / "run"), *faults, script]), tmp_path / "run")
    assert (plain.exit_code, faulted.exit_code) == (0, 0), faulted.explain()
    assert len(faulted.events(IncidentClosed)) == 12
    results = [ended.events(RunFinished)[-1][1].result for ended in (plain, faulted)]
    assert results[0] == results[1] and results[0]["norm"] > 0
    assert faulted.summary["final_loss"] == plain.summary["final_loss"]
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    last = {int(line.split()[1]): line.split()[2:] for line in log.splitlines() if line.startswith("resources")}
    assert last[3] == last[13], f"descriptors, threads, Python threads by generation: {last}"
