"""Records as a run makes them, for what is measured on views: a quiet stretch, or many faults one after the other.

Pure: the same arguments give the same records.
"""

from __future__ import annotations

from nvrx_sre.core.clock import NS_PER_S
from nvrx_sre.core.ids import device_id
from nvrx_sre.events.schema import (
    Action,
    Detector,
    Event,
    FaultClass,
    FaultDetected,
    GenerationFormed,
    Layer,
    Phase,
    PhaseEntered,
    Record,
    RestartDecided,
    RestoredFrom,
    SaveVerified,
    StateRestored,
    StepKind,
    StepsCommitted,
    TeardownFinished,
)

RUN = "bench"
_FAULTS = (FaultClass.EXCEPTION, FaultClass.KILLED, FaultClass.HANG, FaultClass.CUDA_ERROR)


def quiet_record(number: int, now_ns: int) -> Record:
    """A mix of what a quiet run records: mostly steps, now and then a phase or a save."""
    event: Event
    if number % 10 == 1:
        event = PhaseEntered(phase=Phase.EVALUATE, entered_ns=now_ns)
    elif number % 10 == 2:
        event = SaveVerified(step=number, directory="step", seconds=0.1, captured_ns=now_ns)
    else:
        event = _steps(number, now_ns)
    return _record(number, 1, 0, now_ns, event)


def fault_records(num_faults: int, world_size: int, now_ns: int) -> list[Record]:
    """As many incidents, each recovered within a second by a new generation; every one names what no other did."""
    records: list[Record] = []
    for number in range(1, num_faults + 1):
        base_ns = now_ns + number * 10 * NS_PER_S
        for event, after_s in _incident(number, world_size, base_ns):
            time_ns = base_ns + round(after_s * NS_PER_S)
            records.append(_record(len(records) + 1, number, number % world_size, time_ns, event))
    return records


def _incident(number: int, world_size: int, base_ns: int) -> list[tuple[Event, float]]:
    """(event, seconds after `base_ns`)."""
    fault = FaultDetected(
        fault=_FAULTS[number % len(_FAULTS)],
        detector=Detector.EXCEPTION,
        phase=Phase.STEP,
        step=number,
        high_water=number - 1,
        evidence_ns=base_ns,
        exception_type=f"Error{number}",
        frame=f"train.py:{number} step",
        message=f"at {number:#x}",
        fingerprint=f"{number:016x}",
        exit_code=None,
        signal=None,
        pid=number,
        device=device_id("node", number % world_size),
    )
    decision = RestartDecided(
        action=Action.RESTART,
        layer=Layer.IN_PROCESS,
        reason="first attempt",
        backoff_s=0.0,
        exit_code=None,
        restarts_since_progress=1,
        checkpoints_back=0,
        budget_used={},
        budget_limit={},
    )
    devices = [device_id("node", rank) for rank in range(world_size)]
    formed = GenerationFormed(world_size=world_size, go_ns=base_ns, pids=list(range(world_size)), devices=devices)
    restored = StateRestored(step=number - 1, source=RestoredFrom.HOT, restored_ns=base_ns, seconds=0.1)
    return [
        (fault, 0.1),
        (decision, 0.1),
        (TeardownFinished(kept=list(range(world_size)), killed=[]), 0.2),
        (formed, 0.3),
        (restored, 0.4),
        (_steps(number, base_ns + NS_PER_S), 1.0),
    ]


def _steps(step: int, committed_ns: int) -> StepsCommitted:
    return StepsCommitted(
        kind=StepKind.NEW,
        first_step=step,
        last_step=step,
        started_ns=committed_ns - NS_PER_S // 2,
        committed_ns=committed_ns,
        step_s=0.4,
        data_s=0.1,
        checkpoint_block_s=0.0,
        evaluate_s=0.0,
        tokens=1024,
        loss=1.0,
        hot_sealed_step=step,
        hot_captured=1,
        hot_skipped=0,
    )


def _record(seq: int, generation: int, rank: int, time_ns: int, event: Event) -> Record:
    return Record(run=RUN, epoch=1, generation=generation, rank=rank, seq=seq, time_ns=time_ns, event=event)
