"""Real ranks, real faults, and an unfaulted run as the oracle: after any recovery all three digests are the same."""

from __future__ import annotations

import json
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from nvrx_sre.cli.events import line_of, replayed
from nvrx_sre.events.schema import (
    CheckpointRejected,
    FaultDetected,
    FaultInjected,
    GenerationFormed,
    IncidentClosed,
    Layer,
    RankReplaced,
    Record,
    ReplayDiverged,
    RestartDecided,
    RestoredFrom,
    RunFinished,
    SaveCommitted,
    SaveStarted,
    SaveVerified,
    StandbyReady,
    StateRestored,
    StepKind,
    StepsCommitted,
    WorkerExited,
)
from nvrx_sre.launcher.node import GROUP_TIMEOUT_S
from tests.integration.launched import FINDS_HANGS, PATIENT, Ended, finish, start, train, train_arguments, wait_for

DIGESTS = ("loss_digest", "samples_digest", "state_digest")
HELD_MIB = 64
"""What a generation of `clipping_script` holds."""


@pytest.fixture(scope="session", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Ended]:
    """(ranks, the run without faults)."""
    nproc = int(request.param)
    ended = train(tmp_path_factory.mktemp("oracle") / "run", "--nproc", str(nproc), "--standbys", "0")
    assert ended.exit_code == 0, ended.explain()
    return nproc, ended


def assert_same_as(oracle: Ended, ended: Ended) -> None:
    """The faulted run finished with the oracle's losses, samples and state."""
    assert ended.exit_code == 0, ended.explain()
    for name in DIGESTS:
        assert ended.summary[name] == oracle.summary[name], f"{name} differs\n{ended.explain()}"
    assert ended.summary["loss_mismatches"] == 0
    assert ended.summary["steps"] == oracle.summary["steps"]


def recovered(ended: Ended, count: int) -> list[IncidentClosed]:
    """The incidents of the run, as many as expected and all recovered."""
    closed = [event for _, event in ended.events(IncidentClosed)]
    assert [event.verdict for event in closed] == ["recovered"] * count, ended.explain()
    return closed


def fault_arguments(*specs: str) -> list[str]:
    """Command line of planned faults."""
    return [item for spec in specs for item in ("--fault", spec)]


def test_in_process_recovery_keeps_every_process(oracle: tuple[int, Ended], tmp_path: Path) -> None:
    """Exceptions, a Python hang and a hang in a native collective cost no process, on rank 0 as on another."""
    nproc, unfaulted = oracle
    specs = ("exception@1:5", "exception@0:9/backward", "hang@1:13", "hang@0:17/collective")
    arguments = ("--nproc", str(nproc), "--standbys", "0", *FINDS_HANGS, *fault_arguments(*specs))
    ended = train(tmp_path / "run", *arguments)
    assert_same_as(unfaulted, ended)
    incidents = recovered(ended, 4)
    assert {event.layer for event in incidents} == {Layer.IN_PROCESS}, ended.explain()
    assert not ended.events(RankReplaced), ended.explain()
    # A capture that found no free slot, where a launcher on a busy machine is behind its ranks, costs a step more.
    more = sum(max(0, event.rollback_steps - 1) for event in incidents)
    assert more <= ended.summary["saves"]["hot"]["skipped"], ended.explain()
    assert len({tuple(event.pids) for _, event in ended.events(GenerationFormed)}) == 1, "every pid is unchanged"
    assert len(ended.rank_pids()) == nproc
    hangs = [(record.rank, event) for record, event in ended.events(FaultDetected) if event.fault == "hang"]
    assert [(rank, event.detector) for rank, event in hangs] == [(1, "deadline"), (0, "deadline")], ended.explain()


def test_c47_c48_a_killed_rank_costs_one_new_process(oracle: tuple[int, Ended], tmp_path: Path) -> None:
    """SIGKILL of any rank, rank 0 included: one replacement each, a warm one where one is ready; survivors stay.

    Each is one fault that names the culprit; the errors of its victims are none.
    """
    nproc, unfaulted = oracle
    other = nproc // 2
    ended = train(
        tmp_path / "run",
        "--nproc",
        str(nproc),
        "--standbys",
        "2",
        *fault_arguments("sigkill@0:10", f"sigkill@{other}:16"),
    )
    assert_same_as(unfaulted, ended)
    assert [event.layer for event in recovered(ended, 2)] == [Layer.WORKER, Layer.WORKER]
    replaced = ended.events(RankReplaced)
    assert [record.rank for record, _ in replaced] == [0, other], ended.explain()
    faults = [(record.rank, event.fault, event.signal) for record, event in ended.events(FaultDetected)]
    assert faults == [(0, "killed", 9), (other, "killed", 9)], ended.explain()
    ready = [record.seq for record, _ in ended.events(StandbyReady)]
    decided = [record.seq for record, _ in ended.events(RestartDecided)]
    num_used = 0
    for seq, (record, event) in zip(decided, replaced, strict=True):
        # One that gets ready while a cold process is being started is told before the process is.
        was_ready, may_be_ready = (sum(one < by for one in ready) > num_used for by in (seq, record.seq))
        assert was_ready <= event.warm <= may_be_ready, ended.explain()
        num_used += event.warm
    formed = [event.pids for _, event in ended.events(GenerationFormed)]
    changed = [[rank for rank in range(nproc) if old[rank] != new[rank]] for old, new in pairwise(formed)]
    assert changed == [[0], [other]], "exactly one new pid each"
    committed = [event for _, event in ended.events(StepsCommitted)]
    # All that the killed rank had told is known; what the other one tells of the same step may come after the kill.
    proven = [(event.first_step, event.last_step) for event in committed if event.proven_by_restore]
    assert set(proven) <= {(9, 9), (15, 15)}, ended.explain()
    new = [event for event in committed if event.kind is StepKind.NEW]
    steps = [step for event in new for step in range(event.first_step, event.last_step + 1)]
    assert steps == list(range(1, ended.summary["steps"] + 1)), ended.explain()


def test_c27_stacks_are_written_before_a_hang_is_ended(oracle: tuple[int, Ended], tmp_path: Path) -> None:
    """Ranks that speak and do not step are hung, and not crashed; where each stood is in the incident.

    The rank that hangs names the user's function, its peer the collective in which it waits; so do the traces.
    """
    nproc, unfaulted = oracle
    ended = train(tmp_path / "run", "--nproc", str(nproc), "--standbys", "0", *FINDS_HANGS, "--fault", "hang@1:6")
    assert_same_as(unfaulted, ended)
    faults = [(record.rank, event.fault, event.detector) for record, event in ended.events(FaultDetected)]
    assert faults == [(1, "hang", "deadline")], ended.explain()
    incident = tmp_path / "run" / "incidents" / "00001"
    for rank in range(nproc):
        said = (incident / f"g00001-rank-{rank:05d}.stacks.txt").read_text()
        assert ("in _hang\n" in said) == (rank == 1), said
        assert ("torch/distributed/distributed_c10d.py" in said) == (rank != 1), said
        assert "in run_step\n" in said
    traces = [json.loads((incident / f"g00001-rank-{rank:05d}.trace.json").read_text()) for rank in range(nproc)]
    pending = [not trace["entries"][-1]["retired"] for trace in traces]
    assert pending == [rank != 1 for rank in range(nproc)], "the one that is behind waits for no collective"
    line = next(line for line in shown(ended) if "IncidentClosed" in line)
    assert line.endswith(", stacks in incidents/00001")


def test_c30_a_frozen_rank_is_replaced_within_its_deadline(tmp_path: Path) -> None:
    """Ranks that cannot be interrupted are killed past their grace; survivors do not wait for the group's timeout.

    SIGSTOP, a native call that never returns, and one that holds the interpreter's lock.
    """
    specs = ("sigstop@1:5", "hang_native@1:10", "hang_gil@0:15")
    ended = train(tmp_path / "run", "--nproc", "2", *FINDS_HANGS, *fault_arguments(*specs))
    assert ended.exit_code == 0, ended.explain()
    incidents = recovered(ended, 3)
    assert {(event.fault, event.layer) for event in incidents} == {("hang", Layer.WORKER)}, ended.explain()
    assert [record.rank for record, _ in ended.events(RankReplaced)] == [1, 1, 0], ended.explain()
    assert all(event.outage_s is not None and event.outage_s < GROUP_TIMEOUT_S / 4 for event in incidents)
    stopped, native, holding = (
        "".join(path.read_text() for path in (tmp_path / "run" / "incidents" / f"{number:05d}").glob("*.stacks.txt"))
        for number in (1, 2, 3)
    )
    assert "The process is stopped" in stopped and "torch/distributed" in stopped, "the peer's stack is there"
    assert "in _hang_native\n" in native and "in _hang_gil\n" in holding, "stacks of what was killed"


def test_the_demos_faults_one_after_another(oracle: tuple[int, Ended], tmp_path: Path) -> None:
    """Exception, SIGKILL of rank 0, hang, then a truncated newest checkpoint and the loss of the node."""
    nproc, unfaulted = oracle
    faults = ["exception@1:5", "sigkill@0:10", "hang@1:18", "corrupt_checkpoint@1:20", "node_kill@0:22"]
    # Waited for, the writer is never too busy for what is due, however slow the machine.
    arguments = ("--nproc", str(nproc), "--on-busy", "wait", *FINDS_HANGS, *fault_arguments(*faults))
    ended = train(tmp_path / "run", *arguments)
    assert_same_as(unfaulted, ended)
    layers = [event.layer for _, event in ended.events(IncidentClosed)]
    assert layers == [Layer.IN_PROCESS, Layer.WORKER, Layer.IN_PROCESS, Layer.WORKER], ended.explain()
    before = takewhile(lambda record: not isinstance(record.event, CheckpointRejected), ended.records)
    *older, newest = [record.event.step for record in before if isinstance(record.event, SaveVerified)]
    assert newest >= 16, "a step later where the ranks had no slot in common for the one that was due"
    assert [event.step for _, event in ended.events(CheckpointRejected)] == [newest], ended.explain()
    last = ended.events(StateRestored)[-1][1]
    assert (last.step, last.source) == (older[-1], RestoredFrom.DURABLE), ended.explain()
    assert_replay_is_the_same(ended)


def shown(ended: Ended) -> list[str]:
    """Lines of `nvrx-sre events`."""
    return [line_of(record, ended.run_dir) for record in ended.records]


def assert_replay_is_the_same(ended: Ended) -> None:
    """Folding the journal again gives the ledger, incidents and spans that the launcher had at its end."""
    again, summary = replayed(ended.run_dir / "journal", ended.summary["run"]), ended.summary
    assert (again["ledger"], again["incidents"]) == (summary["ledger"], summary["incidents"])
    assert again["events"] == summary["telemetry"]["events"] == len(ended.records)
    assert sorted(span["span_id"] for span in again["spans"]) == sorted(span["span_id"] for span in ended.spans)


def is_of_the_save(record: Record) -> bool:
    """The save of step 8 is started or committed, or a rank is killed."""
    event = record.event
    return (isinstance(event, SaveStarted | SaveCommitted) and event.step == 8) or (
        isinstance(event, WorkerExited) and event.signal == 9
    )


def test_a_replay_that_differs_ends_the_run(tmp_path: Path) -> None:
    """The data changes under a run, which then goes back to a checkpoint: exit 70, one line, counted."""
    data = tmp_path / "text"
    data.write_bytes(bytes(range(256)) * 400)
    run_dir = tmp_path / "run"
    faults = fault_arguments("hang@1:12", "nonfinite@1:14")  # the hang gives time to change the data
    arguments = train_arguments(run_dir, "--standbys", "0", "--data", str(data), *faults, "--step-deadline", "8")
    popen = start(arguments)
    wait_for(run_dir, popen, lambda record: isinstance(record.event, FaultInjected))
    with data.open("r+b") as file:  # in place: the ranks have the file mapped
        file.write(bytes(reversed(range(256))) * 400)
    ended = finish(popen, run_dir)
    assert ended.exit_code == 70, ended.explain()
    last = [line for line in ended.output.splitlines() if line.startswith("nvrx-sre:")][-1]
    assert last.startswith("nvrx-sre: exit 70: step 9 gave another loss when it was executed again"), ended.output
    assert (ended.summary["exit_code"], ended.summary["loss_mismatches"]) == (70, 1)
    [(_, diverged)] = ended.events(ReplayDiverged)
    assert diverged.step == 9 and diverged.expected != diverged.actual


def test_a_save_handed_over_survives_the_loss_of_every_rank(tmp_path: Path) -> None:
    """All ranks die in the step after the one that was handed over: the writer commits it when they are dead.

    They wait at the boundary until it is handed over: the writer may still be starting up.
    """
    faults = fault_arguments("slow_storage@0:7=5s/rename", "sigkill@0:9/data", "sigkill@1:9/data")
    ended = train(tmp_path / "run", "--nproc", "2", "--on-busy", "wait", *faults)
    assert ended.exit_code == 0, ended.explain()
    story = [type(record.event).__name__ for record in ended.records if is_of_the_save(record)]
    assert story[:4] == ["SaveStarted", "WorkerExited", "WorkerExited", "SaveCommitted"], ended.explain()


def printed(run_dir: Path, word: str) -> dict[int, list[int]]:
    """Generation -> numbers of the last line that rank 0 printed in it behind `word`."""
    lines = (line.split() for line in (run_dir / "logs" / "rank-00000.log").read_text().splitlines())
    return {int(line[1]): [int(value) for value in line[2:]] for line in lines if line[:1] == [word]}


def test_c33_many_restarts_leak_nothing_and_meshes_are_current(tmp_path: Path) -> None:
    """30 in-process restarts of a script with DTensor reductions: same result; memory, descriptors and threads stay.

    An exception costs no step, although captures are copied under the next one. Only a capture that found no free
    slot, where a launcher on a loaded machine is two steps behind its ranks, costs one, and is counted as skipped.
    """
    script = str(Path(__file__).with_name("clipping_script.py"))
    common = ["launch", "--nproc-per-node", "2", "--standbys", "0", "--metrics-linger", "0", "--save-every", "1000"]
    common += PATIENT
    plain = finish(start([*common, "--run-dir", str(tmp_path / "plain"), script]), tmp_path / "plain")
    faults = fault_arguments(*(f"exception@{step // 2 % 2}:{step}" for step in range(2, 62, 2)))
    faulted = finish(start([*common, "--run-dir", str(tmp_path / "run"), *faults, script]), tmp_path / "run")
    assert (plain.exit_code, faulted.exit_code) == (0, 0), faulted.explain()
    rollbacks = [event.rollback_steps for _, event in faulted.events(IncidentClosed)]
    assert len(rollbacks) == 30, faulted.explain()
    assert sum(rollbacks) <= faulted.summary["saves"]["hot"]["skipped"], faulted.explain()
    assert {event.source for _, event in faulted.events(StateRestored)[1:]} == {RestoredFrom.HOT}
    results = [ended.events(RunFinished)[-1][1].result for ended in (plain, faulted)]
    assert results[0] == results[1] and results[0]["norm"] > 0
    assert faulted.summary["final_loss"] == plain.summary["final_loss"]
    resources, resident = printed(tmp_path / "run", "resources"), printed(tmp_path / "run", "resident")
    # The groups of the generation before may be on their way out; one that is kept is more in each of 28 generations.
    grown = [late - early for early, late in zip(resources[3], resources[31], strict=True)]
    assert max(grown) < 28 / 2, f"descriptors, threads, Python threads by generation: {resources}"
    # A single generation that is kept would be more than this.
    assert resident[31][0] - resident[3][0] < HELD_MIB / 2, f"resident MiB by generation: {resident}"
