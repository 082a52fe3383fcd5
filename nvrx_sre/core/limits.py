"""Every limit in one place: deadlines, budgets, sizes. Frozen dataclasses, validated in relation.

Each budget and window is exported as a metric series and recorded in `RunStarted`. Pure: nothing
here reads a clock or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nvrx_sre.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class CapLimits:
    """Retry budgets. They count only attempts without progress."""

    same_fingerprint_attempts: int = 3
    """Attempts in all at one fingerprint (class, exception type, user frame, step)."""
    consecutive_attempts: int = 3
    """Attempts in a row without progress, any fault."""
    window_attempts: int = 5
    """Attempts without progress within `window_s`."""
    window_s: float = 1800.0
    """Length of the sliding window (seconds)."""
    transient_grace_s: float = 300.0
    """Transient and node classes trip a cap only this long after the first attempt without progress."""
    backoff_s: tuple[float, ...] = (0.0, 5.0, 30.0, 120.0)
    """Wait before the n-th attempt without progress; the last value repeats."""
    device_faults: int = 3
    """Root faults of one device within `window_s` before it is excluded."""
    startup_attempts: int = 3
    """Start-up failures before the first step ever, then exit 75."""
    nonfinite_attempts: int = 1
    """Retries of a non-finite loss, from an older checkpoint."""
    unknown_progress_attempts: int = 10
    """Attempts when progress cannot be known."""
    storage_attempts: int = 3
    """Storage faults in a row, or restarts that went on without a durable decision record."""
    preemption_attempts: int = 20
    """Preemptions in a row without a newer verified checkpoint: a budget of their own, larger than that of faults."""
    lifetime_faults: int = 0
    """Faults in the whole life of the run, with progress or without; 0: no such cap."""
    flapping_faults: int = 5
    """Faults with progress within `flapping_window_s` that make the run 'flapping'."""
    flapping_window_s: float = 1800.0
    """Window of `flapping_faults` (seconds)."""
    crash_loop_attempts: int = 3
    """Attempts without progress from which the verdict is `crash_loop`."""

    def updated(self, limits: Mapping[str, float]) -> CapLimits:
        """These caps with those that `limits` (as in `Limits.flattened`) names; the back-off stays."""
        changes: dict[str, Any] = {
            item.name: type(getattr(self, item.name))(limits[f"caps.{item.name}"])
            for item in fields(self)
            if f"caps.{item.name}" in limits and item.name != "backoff_s"
        }
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Progress deadlines per phase, and graces of the teardown. Seconds."""

    init_s: float = 300.0
    """Process start until the decorated call; in each generation the call until it forms its group."""
    rendezvous_s: float = 60.0
    """Go until the process group is formed."""
    rebuild_s: float = 300.0
    """Model construction."""
    load_s: float = 600.0
    """Restore of a checkpoint."""
    first_step_s: float = 300.0
    """First step of a generation (lazy initialisation, compilation)."""
    step_s: float = 60.0
    """Any later step, data and evaluation excluded."""
    data_s: float = 120.0
    """One wait for data."""
    evaluate_s: float = 1800.0
    """One evaluation."""
    save_s: float = 600.0
    """One blocking save."""
    finalize_s: float = 300.0
    """After the last step until the training function returned."""
    teardown_s: float = 10.0
    """Acknowledged interrupt until ready for the next generation."""
    interrupt_grace_s: float = 2.0
    """Interrupt raised until acknowledged; past it the rank is killed. NCCL's abort takes 0.5 s on H200."""
    suspicion_s: float = 0.1
    """A communication error waits this long for a death or another error before it is blamed."""
    final_drain_s: float = 300.0
    """End of training until the last durable save is verified."""
    preemption_drain_s: float = 25.0
    """Termination signal (or halt) until the newest step is saved, or its save is given up. What is left then is
    dead within twice `interrupt_grace_s`: 30 s, the default grace of Kubernetes (pod lifecycle), are enough for all."""
    loop_stall_s: float = 1.0
    """If the launcher itself did not turn for this long, all deadlines are armed anew."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not value > 0:
                raise UserError(f"deadline {item.name} is {value}: it must be greater than 0 seconds")
        if self.interrupt_grace_s >= self.teardown_s:
            raise UserError(
                f"deadline interrupt_grace_s ({self.interrupt_grace_s}) must be below teardown_s ({self.teardown_s})"
            )

    def for_phase(self, phase: str) -> float:
        """Limit of `phase` (a value of `events.schema.Phase`) in seconds."""
        value: float = getattr(self, f"{phase}_s")
        return value


@dataclass(frozen=True, kw_only=True)
class DeadlineTuning:
    """How `--deadlines auto` tightens progress deadlines, from the configured ones, which are also the ceiling."""

    multiple: float = 10.0
    """A tightened deadline is this multiple of the phase's 99th percentile."""
    floor_s: float = 5.0
    """No deadline is tightened below this: 20 times the interval at which ranks report (seconds)."""
    num_samples: int = 100
    """Observations (each the slowest of one round over all ranks) before a phase is tightened, and kept of it."""

    def __post_init__(self) -> None:
        if self.multiple < 2 or self.floor_s < 1 or self.num_samples < 10:
            raise UserError(
                f"deadlines of {self.multiple:g} x p99, at least {self.floor_s:g} s, after {self.num_samples} samples "
                "would end healthy ranks: use a multiple of 2, a floor of 1 s and 10 samples at least"
            )


@dataclass(frozen=True, kw_only=True)
class NodeLimits:
    """Several nodes: how long launchers wait for each other. Seconds."""

    lease_s: float = 10.0
    """A launcher that was not heard of for this long is lost to the other; they speak every second."""
    join_s: float = 600.0
    """How long a leader with too few nodes waits for more, and a follower looks for its leader at the start."""
    grace_s: float = 30.0
    """With enough nodes there: how long the others are waited for, at the start and after a loss."""
    leader_lost_s: float = 30.0
    """How long a follower that has lost its leader looks for it, since it was last heard of."""

    def __post_init__(self) -> None:
        if self.lease_s < 2:
            raise UserError(f"nodes lease_s is {self.lease_s:g}: use 2 seconds or more, launchers speak every second")
        for item in fields(self):
            if getattr(self, item.name) < 0:
                raise UserError(f"nodes {item.name} is {getattr(self, item.name):g}: use 0 or more")


@dataclass(frozen=True, kw_only=True)
class TelemetryLimits:
    """Bounds on telemetry's own memory and time."""

    journal_queue_records: int = 65_536
    """Records waiting for the journal's thread; beyond it records are dropped and counted."""
    journal_segment_bytes: int = 4 * 1024 * 1024
    """A segment of the journal beyond this is closed; the next one begins with a snapshot. Replay reads one segment."""
    journal_segments: int = 1024
    """Segments kept; the oldest are deleted. 4 GiB, about half a year of a run that records once a second."""
    step_aggregate_s: float = 1.0
    """Longest span of steps that one `StepsCommitted` covers (seconds)."""
    metrics_linger_s: float = 65.0
    """Longest stay of the endpoint for its last scrapes (seconds); after a signal never beyond the drain."""
    exporter_timeout_s: float = 1.0
    """Longest wait for the OTLP collector, a flush at exit included (seconds)."""
    loop_unhealthy_s: float = 5.0
    """`/healthz` answers 503 when the launcher's loop has not turned for this long (seconds)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """All limits in force for a run."""

    caps: CapLimits = field(default_factory=CapLimits)
    deadlines: Deadlines = field(default_factory=Deadlines)
    tuning: DeadlineTuning = field(default_factory=DeadlineTuning)
    nodes: NodeLimits = field(default_factory=NodeLimits)
    telemetry: TelemetryLimits = field(default_factory=TelemetryLimits)

    def flattened(self) -> dict[str, float]:
        """Every limit as `group.name` -> number (unit in the name); a tuple contributes its largest value."""
        return {
            f"{group.name}.{item.name}": float(max(value) if isinstance(value, tuple) else value)
            for group in fields(self)
            for item in fields(getattr(self, group.name))
            for value in (getattr(getattr(self, group.name), item.name),)
        }
