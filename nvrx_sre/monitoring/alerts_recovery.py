"""Tickets on recoveries: runs that go on, but not as they should.

Model: events that happen once (a degraded recovery, a fresh start) keep their ticket for `event_window_s`; what they
are counted from began at 0 with the run, so that the first one is seen (failure case C63) and none is a fraction
(C65). Levels (budgets, world size, standbys) must hold for a while.

Pure.
"""

from __future__ import annotations

from nvrx_sre.monitoring.alerts_progress import PROGRESS_CAPS
from nvrx_sre.monitoring.promql import number
from nvrx_sre.monitoring.recordings import Readings
from nvrx_sre.monitoring.rule import AlertRule, lookup
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import Suspect


def recovery_alerts(read: Readings) -> list[AlertRule]:
    """Tickets, most urgent first."""
    return [
        _flapping(read),
        _recovered_degraded(read),
        _retry_budget_low(read),
        _unknown_progress(read),
        _repeated_device_fault(read),
        _world_shrunk(read),
        _standby_missing(read),
        _silent_fresh_start(read),
    ]


def _flapping(read: Readings) -> AlertRule:
    gained = read.gained(catalog.INCIDENTS, read.values.flapping_window_s, verdict="flapping")
    return AlertRule(
        name="NvrxFlapping",
        verdict="flapping: recovers, too often",
        severity="warning",
        blames=True,
        expr=f"max {read.by} ({gained}) > 0\n{read.expected}",
        meaning="The run recovers each time, but so often that it costs: the verdict of its incidents is flapping.",
        clears="`flapping_window_s` after the last incident with that verdict.",
        summary="Run {{ $labels.run }} is flapping: it recovers, and fails again and again.",
        description=(
            "Incidents with progress between them never stop a run, so nobody is paged; each costs an outage and a "
            "rollback. `nvrx-sre runbook NvrxFlapping` shows what they have in common."
        ),
    )


def _recovered_degraded(read: Readings) -> AlertRule:
    gained = read.gained(catalog.INCIDENTS_DEGRADED, read.values.event_window_s)
    return AlertRule(
        name="NvrxRecoveredDegraded",
        verdict="recovered, degraded",
        severity="warning",
        blames=True,
        expr=f"{gained} > 0\n{read.expected}",
        meaning="An incident recovered, but with a smaller world, from an older checkpoint or with a large rollback.",
        clears="`event_window_s` later.",
        summary="Run {{ $labels.run }} recovered degraded ({{ $value }} in the last while).",
        description=(
            "The run goes on with fewer ranks, or lost more steps than it should. "
            "`nvrx-sre runbook NvrxRecoveredDegraded` says which."
        ),
    )


def _retry_budget_low(read: Readings) -> AlertRule:
    used = read.of(catalog.BUDGET_USED, cap=PROGRESS_CAPS)
    limit = f"({read.of(catalog.BUDGET_LIMIT, cap=PROGRESS_CAPS)} > 1)"
    return AlertRule(
        name="NvrxRetryBudgetLow",
        verdict="few retries left",
        severity="warning",
        blames=True,
        expr=f"max {read.by} ({used} / {limit}) >= {number(read.values.budget_low_ratio)}\n{read.expected}",
        for_s=read.values.budget_low_for_s,
        meaning="Attempts without progress have used most of a retry budget; few more stop the run.",
        clears="When progress refills the budget, or the run ends.",
        summary="Run {{ $labels.run }} has used {{ $value | humanizePercentage }} of a retry budget.",
        description=(
            "The next faults without progress stop the run with exit 93. `nvrx-sre runbook NvrxRetryBudgetLow` shows "
            "which budget and what used it."
        ),
    )


def _unknown_progress(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxUnknownProgress",
        verdict="progress not known",
        severity="warning",
        blames=True,
        expr=f"{read.top(catalog.BUDGET_USED, cap='unknown_progress')} > 0\n{read.expected}",
        keep_firing_s=read.values.hold_s,
        meaning="The run restarts without knowing whether the last attempt made progress, so its caps are wider.",
        clears="With the first recovery whose progress is known, after `hold_s`.",
        summary="Run {{ $labels.run }} restarted {{ $value }} times with unknown progress.",
        description=(
            "Evidence of earlier steps could not be read (journal or checkpoints). The caps that protect against a "
            "crash loop are replaced by one of ten attempts. `nvrx-sre runbook NvrxUnknownProgress` says what to check."
        ),
    )


def _repeated_device_fault(read: Readings) -> AlertRule:
    gained = read.gained(catalog.NODE_FAULTS, read.values.device_window_s, suspect=Suspect.NODE)
    limit = f"{number(read.values.device_fault_ratio)} * {read.top(catalog.BUDGET_LIMIT, cap='device')}"
    return AlertRule(
        name="NvrxRepeatedDeviceFault",
        verdict="one node causes the faults",
        severity="warning",
        blames=True,
        expr=f"max {read.by_keys('node')} ({gained})\n>= {read.on} group_left ()\n{limit}\n{read.expected}",
        meaning="Faults keep having their root on one node (label `node`), recovered or not, of classes that a bad "
        "device or node shows as. An exception of the program is none of them, wherever it is raised.",
        clears="When the faults are older than `device_window_s`.",
        summary="Run {{ $labels.run }}: {{ $value }} faults with their root on node {{ $labels.node }}.",
        description=(
            "One node causes the faults of this run. Take it out before it costs more. "
            "`nvrx-sre runbook NvrxRepeatedDeviceFault` says which device and how."
        ),
    )


def _world_shrunk(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxWorldShrunk",
        verdict="training with fewer ranks",
        severity="warning",
        blames=True,
        expr=f"({read.of(catalog.WORLD_SIZE)} > 0)\n< {read.on}\n{read.of(catalog.WORLD_SIZE_CONFIGURED)}\n"
        f"{read.expected}",
        for_s=read.values.world_shrunk_for_s,
        meaning="The run trains with fewer ranks than it was given.",
        clears="With a generation of the configured size.",
        summary="Run {{ $labels.run }} trains with {{ $value }} ranks, fewer than configured.",
        description=(
            "Ranks were excluded or could not be replaced. The global batch stays, so each step takes longer. "
            "`nvrx-sre runbook NvrxWorldShrunk` says who is missing."
        ),
    )


def _standby_missing(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxStandbyMissing",
        verdict="training without a standby",
        severity="warning",
        expr=f"{read.of(catalog.STANDBY_READY)}\n< {read.on}\n{read.of(catalog.STANDBYS_CONFIGURED)}\n{read.expected}",
        for_s=read.values.standby_missing_for_s,
        meaning="Fewer standbys are ready than were asked for: the next lost process costs a cold start.",
        clears="When the standbys are ready.",
        summary="Run {{ $labels.run }} has {{ $value }} standbys ready, fewer than configured.",
        description=(
            "A standby could not be warmed, or was used and not replaced. Training is not affected until the next "
            "loss of a process. `nvrx-sre runbook NvrxStandbyMissing` says why."
        ),
    )


def _silent_fresh_start(read: Readings) -> AlertRule:
    gained = read.gained(catalog.FRESH_STARTS, read.values.event_window_s, progress="lost")
    committed = 'tier="durable",outcome="committed"'
    saved = lookup(read.of(catalog.SAVES), read.values, condition=" > 0", matchers=committed)
    return AlertRule(
        name="NvrxSilentFreshStart",
        verdict="started from step 0",
        severity="warning",
        expr=f"max {read.by} ({gained}) > 0\n{read.expected}",
        meaning="The run began at step 0 although steps had been committed before: progress was given up.",
        clears="`event_window_s` later.",
        summary="Run {{ $labels.run }} started from step 0 although it had made progress.",
        description=(
            f"{{{{ if {saved} }}}}No checkpoint was loaded. If nobody asked for it (`--start-fresh`), stop the run "
            "before retention or a person removes the old ones. {{ else }}No checkpoint was durable yet: the steps "
            "before are done again. {{ end }}`nvrx-sre runbook NvrxSilentFreshStart` says what to check."
        ),
    )
