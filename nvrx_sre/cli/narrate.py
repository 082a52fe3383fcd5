"""One readable line for each record that a person at a terminal wants to see. Pure.

`narrate` covers faults, decisions, recoveries, saves and the unusual; steps are progress, not lines (`report`).
Times are those of the record; a line never holds a secret, because event texts were redacted before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvrx_sre.core.clock import seconds
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record

GOOD = "green"
BAD = "red"
WARN = "yellow"
PLAIN = ""
FAINT = "dim"
MAX_MESSAGE_CHARS = 160
"""What a line shows of an error's message; the journal has more, the rank's log all of it."""


@dataclass(frozen=True)
class Line:
    """A line of text and the style a terminal shows it in."""

    text: str
    style: str


def narrate(record: Record) -> Line | None:
    """The line for `record`, or None if it is not worth one."""
    teller = _TELLERS.get(type(record.event))
    return None if teller is None else teller(record, record.event)


def rank_text(rank: int | None) -> str:
    """`rank 1`, or `unknown rank` where the culprit is not known."""
    return "unknown rank" if rank is None else f"rank {rank}"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration_text(value_s: float | None) -> str:
    """A duration for people: `3 ms`, `0.214 s`, `12.3 s`; `-` for none."""
    if value_s is None:
        return "-"
    if value_s < 0.01:
        return f"{value_s * 1000:.1f} ms"
    return f"{value_s:.3f} s" if value_s < 10 else f"{value_s:.1f} s"


def bytes_text(num_bytes: int) -> str:
    """A size for people, in decimal units."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _run_started(record: Record, event: schema.RunStarted) -> Line:
    how = "resumed" if event.resumed else "fresh" if event.fresh else "new"
    hot = f"hot every {event.hot_every_steps}" if event.hot_every_steps else "hot tier off"
    saves = f"{hot}, durable every {event.save_every_steps}"
    drain_s = event.limits.get("deadlines.preemption_drain_s")
    grace = "" if drain_s is None else f", {drain_s:g} s to save at a termination signal"
    return Line(f"run {record.run} ({how}): {counted(event.nproc, 'rank')}, {saves}{grace}", PLAIN)


def _launcher_started(record: Record, event: schema.LauncherStarted) -> Line:
    return Line(f"launcher {event.pid} holds epoch {record.epoch}, metrics on port {event.metrics_port}", FAINT)


def _generation_formed(record: Record, event: schema.GenerationFormed) -> Line:
    took = duration_text(seconds(record.time_ns - event.go_ns))
    return Line(f"generation {record.generation}: {counted(event.world_size, 'rank')} formed in {took}", FAINT)


def _fault_injected(record: Record, event: schema.FaultInjected) -> Line:
    who = "the writer" if record.rank is None else rank_text(record.rank)
    return Line(f"injecting {event.spec} into {who} at step {event.step}", WARN)


def _fault_detected(record: Record, event: schema.FaultDetected) -> Line:
    after = duration_text(max(seconds(record.time_ns - event.evidence_ns), 0.0))
    what = what_was_seen(event)
    detail = f" ({what})" if what else ""
    return Line(
        f"fault: {event.fault}{detail} on {rank_text(record.rank)} at step {event.step}, "
        f"phase {event.phase}, detected by {event.detector} after {after}",
        BAD,
    )


def what_was_seen(event: schema.FaultDetected) -> str:
    """The exception with its message and place, or how the process ended and what it said last."""
    if event.exception_type:
        place = f", {event.frame}" if event.frame else ""
        return f"{event.exception_type}{_shortened(event.message)}{place}"
    if event.signal:
        return f"signal {event.signal}"
    if event.exit_code is None:
        return ""
    if event.exit_code == 0 and event.fault is schema.FaultClass.USER_ERROR:
        return "the script ended without a call of a function that is decorated with @nvrx_sre.resilient"
    return f"exit code {event.exit_code}{_shortened(event.message)}"


def _shortened(message: str) -> str:
    if not message:
        return ""
    return f": {message}" if len(message) <= MAX_MESSAGE_CHARS else f": {message[: MAX_MESSAGE_CHARS - 3]}..."


def _restart_decided(record: Record, event: schema.RestartDecided) -> Line:
    if event.action is schema.Action.STOP:
        return Line(f"decision: stop with exit code {event.exit_code}: {event.reason}", BAD)
    wait = f", back-off {duration_text(event.backoff_s)}" if event.backoff_s else ""
    return Line(f"decision: restart in layer {event.layer}{wait}: {event.reason}", PLAIN)


def _rank_replaced(record: Record, event: schema.RankReplaced) -> Line:
    how = "warm standby" if event.warm else "cold start"
    return Line(f"{rank_text(record.rank)} moved from process {event.old_pid} to {event.new_pid} ({how})", PLAIN)


def _rank_excluded(record: Record, event: schema.RankExcluded) -> Line:
    return Line(f"device {event.device} excluded, on with {event.world_size} ranks: {event.reason}", BAD)


def _node_joined(record: Record, event: schema.NodeJoined) -> Line:
    missing = f", {event.missing} still missing" if event.missing else ""
    return Line(f"node {event.node} joined as node {event.node_rank}{missing}", PLAIN)


def _node_lost(record: Record, event: schema.NodeLost) -> Line:
    return Line(f"node {event.node} lost with {event.ranks} ranks: {event.reason}", BAD)


def _deadline_chosen(record: Record, event: schema.DeadlineChosen) -> Line:
    limit = f"deadline of {event.phase} is {duration_text(event.limit_s)} now"
    return Line(f"{limit} (p99 {duration_text(event.p99_s)}): {event.reason}", FAINT)


def _decision_unrecorded(record: Record, event: schema.DecisionUnrecorded) -> Line:
    waited = duration_text(event.waited_s)
    return Line(f"the decision was not on disk after {waited}: the restart goes on without that", WARN)


def _state_restored(record: Record, event: schema.StateRestored) -> Line:
    if event.source is schema.RestoredFrom.FRESH:
        return Line("starting from step 0", PLAIN)
    return Line(f"restored step {event.step} from {event.source} in {duration_text(event.seconds)}", PLAIN)


def _incident_closed(record: Record, event: schema.IncidentClosed) -> Line:
    good = event.verdict is schema.Verdict.RECOVERED
    degraded = ", degraded" if event.degraded and good else ""
    return Line(
        f"{event.verdict}{degraded}: {event.fault} on {rank_text(record.rank)} at step {event.step}, "
        f"layer {event.layer}, {counted(event.attempts, 'attempt')}, outage {duration_text(event.outage_s)} "
        f"(detection {duration_text(event.detection_s)}), rolled back {counted(event.rollback_steps, 'step')}",
        GOOD if good else BAD,
    )


def _checkpoint_rejected(record: Record, event: schema.CheckpointRejected) -> Line:
    place = f"; moved to {event.moved_to}" if event.moved_to else ""
    return Line(f"{event.tier} checkpoint of step {event.step} rejected: {event.reason}: {event.message}{place}", WARN)


def _save_verified(record: Record, event: schema.SaveVerified) -> Line:
    age = duration_text(seconds(record.time_ns - event.captured_ns))
    return Line(f"checkpoint of step {event.step} is durable and verified, {age} after its capture", FAINT)


def _save_skipped(record: Record, event: schema.SaveSkipped) -> Line | None:
    if event.tier is schema.Tier.HOT:
        return None
    return Line(f"save of step {event.step} skipped: {event.reason}", WARN)


def _save_unverified(record: Record, event: schema.SaveUnverified) -> Line:
    why = f"{event.reason}: {event.message}" if event.message else str(event.reason)
    return Line(f"checkpoint of step {event.step} is durable and was not verified: {why}", WARN)


def _save_failed(record: Record, event: schema.SaveFailed) -> Line:
    return Line(f"save of step {event.step} failed: {event.reason}: {event.message}", WARN)


def _hot_slots_allocated(record: Record, event: schema.HotSlotsAllocated) -> Line:
    slot = f"{event.num_slots} slots a rank, up to {bytes_text(event.slot_bytes)} each"
    return Line(f"hot checkpoints: {slot}, {bytes_text(event.total_bytes)} on this node", FAINT)


def _hot_interval_chosen(record: Record, event: schema.HotIntervalChosen) -> Line:
    if not event.every_steps:
        return Line(event.reason, FAINT)
    cost = f"a capture costs {event.cost_s * 1e3:.2f} ms, a step takes {event.step_s * 1e3:.0f} ms"
    return Line(f"hot capture every {event.every_steps} steps: {cost}; {event.reason}", FAINT)


def _replay_diverged(record: Record, event: schema.ReplayDiverged) -> Line:
    return Line(f"step {event.step} gave a different loss when it was redone", BAD)


def _preemption_received(record: Record, event: schema.PreemptionReceived) -> Line:
    who = "interrupted" if event.by_person else f"preempted by signal {event.signal}"
    return Line(f"{who}: saving the newest state and leaving", WARN)


def _cap_reached(record: Record, event: schema.CapReached) -> Line:
    return Line(f"cap reached: {event.cap}, {event.used} of {event.limit} attempts used", BAD)


def _halt_requested(record: Record, event: schema.HaltRequested) -> Line:
    return Line(f"halt requested: {event.reason}", WARN)


def _budget_reset(record: Record, event: schema.BudgetReset) -> Line:
    return Line(f"budgets refilled: {event.reason}", PLAIN)


def _leader_lost(record: Record, event: schema.LeaderLost) -> Line:
    age = duration_text(max(0.0, seconds(record.time_ns - event.last_seen_ns)))
    return Line(f"the launcher of epoch {event.lost_epoch} ended without saying so, its last record is {age} old", WARN)


def _journal_repaired(record: Record, event: schema.JournalRepaired) -> Line:
    return Line(f"journal repaired: {event.dropped_bytes} bytes of a torn last line cut off", WARN)


def _telemetry_degraded(record: Record, event: schema.TelemetryDegraded) -> Line:
    why = f"; the newest: {event.error}" if event.error else ""
    return Line(f"telemetry: {event.component} dropped {event.dropped}, errors {event.errors}{why}", WARN)


_TELLERS: dict[type[schema.Event], Callable[[Record, Any], Line | None]] = {
    schema.RunStarted: _run_started,
    schema.LauncherStarted: _launcher_started,
    schema.GenerationFormed: _generation_formed,
    schema.FaultInjected: _fault_injected,
    schema.FaultDetected: _fault_detected,
    schema.RestartDecided: _restart_decided,
    schema.RankReplaced: _rank_replaced,
    schema.RankExcluded: _rank_excluded,
    schema.NodeJoined: _node_joined,
    schema.NodeLost: _node_lost,
    schema.DeadlineChosen: _deadline_chosen,
    schema.DecisionUnrecorded: _decision_unrecorded,
    schema.StateRestored: _state_restored,
    schema.IncidentClosed: _incident_closed,
    schema.CheckpointRejected: _checkpoint_rejected,
    schema.SaveVerified: _save_verified,
    schema.SaveUnverified: _save_unverified,
    schema.SaveSkipped: _save_skipped,
    schema.SaveFailed: _save_failed,
    schema.HotSlotsAllocated: _hot_slots_allocated,
    schema.HotIntervalChosen: _hot_interval_chosen,
    schema.ReplayDiverged: _replay_diverged,
    schema.PreemptionReceived: _preemption_received,
    schema.CapReached: _cap_reached,
    schema.HaltRequested: _halt_requested,
    schema.BudgetReset: _budget_reset,
    schema.LeaderLost: _leader_lost,
    schema.JournalRepaired: _journal_repaired,
    schema.TelemetryDegraded: _telemetry_degraded,
}
