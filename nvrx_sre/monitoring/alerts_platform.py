"""Alerts on what the run stands on: its launcher, its node, its storage, and the monitoring itself.

Model: a run that vanished is told from one that ended by its newest known state, and from a missed scrape by the time
since its newest one; nothing asks `up`, whose labels know no run, or `absent`, which loses them (failure cases C67,
C71). A launcher that answers but does not turn is told by its own heartbeat, against its own clock.

Pure.
"""

from __future__ import annotations

from nvrx_sre.monitoring.promql import number
from nvrx_sre.monitoring.recordings import (
    LOOP_AGE,
    LOST_ERRORS,
    LOST_ITEMS,
    MAX_EXPECTED,
    MAX_SETTLED,
    MAX_SKEW,
    MEMORY_PRESSURE,
    MIN_FREE,
    MIN_FREE_RATIO,
    UNFIT_DEVICES,
    Readings,
)
from nvrx_sre.monitoring.rule import AHEAD, FOR_LONG, UNKNOWN_LABEL, AlertRule, lookup, owner
from nvrx_sre.telemetry import catalog


def platform_alerts(read: Readings) -> list[AlertRule]:
    """Pages first, then tickets, the dead man's switch last."""
    return [
        _target_missing(read),
        _launcher_stuck(read),
        _scrapes_missing(read),
        _host_memory_pressure(read),
        _device_unfit(read),
        _storage_near_full(read),
        _telemetry_dropping(read),
        _clock_skew(read),
        _catalog_mismatch(read),
        _watchdog(read),
    ]


def _target_missing(read: Readings) -> AlertRule:
    limit = number(read.values.target_missing_s)
    expected, settled = _known_states(read)
    is_over = f" >= {read.on} {expected}"
    where = (
        f'{{{{ with {owner(read.values)} }}}}{{{{ with . | first | label "node" }}}}'
        "Its launcher was on {{ . }}. {{ end }}{{ end }}"
    )
    ended = lookup(MAX_SETTLED, read.values, memory_s=read.values.missing_memory_s, condition=is_over)
    return AlertRule(
        name="NvrxTargetMissing",
        verdict="not known: it does not answer",
        severity="critical",
        expr=_unanswered(read, read.values.target_missing_s),
        meaning="A run whose end no scrape saw does not answer: its launcher, pod, node or network is gone.",
        clears="When the run answers again, when its end is known, or after `missing_memory_s`.",
        summary=f"Run {{{{ $labels.run }}}} has not answered{FOR_LONG}.",
        cured=f"{read.silence} <= {limit}\nor {read.on}\n{expected} <= {read.on} {settled}",
        resolved=f"{{{{ if {ended} }}}}its end is known{{{{ else }}}}it answers again{{{{ end }}}}",
        description=(
            f"{where}The launcher's metrics cannot be scraped, and it did not say that it ended. Whether it trains is "
            "not known. `nvrx-sre runbook NvrxTargetMissing` says how to find out."
        ),
    )


def _unanswered(read: Readings, limit_s: float) -> str:
    """No scrape of a run for so long, whose end is not known."""
    expected, settled = _known_states(read)
    return f"{read.silence} > {number(limit_s)}\nand {read.on}\n({expected} > {read.on} {settled})"


def _known_states(read: Readings) -> tuple[str, str]:
    """When a run that may not answer any more was last expected to, and last at its end."""
    memory_s = read.values.missing_memory_s
    return read.lately(MAX_EXPECTED, memory_s), read.lately(MAX_SETTLED, memory_s)


def _scrapes_missing(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxScrapesMissing",
        verdict="not scraped: what is said of it is old",
        severity="info",
        expr=_unanswered(read, read.values.scrapes_missing_s),
        meaning="Scrapes of a run that has not ended fail: what rules and dashboards say of it is as old as the newest "
        "one. Ages are judged by the run's own clock, so nothing else fires because of it.",
        clears="With the next scrape, when the end of the run is known, or after `missing_memory_s`.",
        summary="Run {{ $labels.run }} was last scraped {{ $value | humanizeDuration }} ago.",
        description=(
            "For the moment it is not known how the run does; after `target_missing_s` that pages. "
            "`nvrx-sre runbook NvrxScrapesMissing` says how to tell a slow scrape from a launcher that is gone."
        ),
    )


def _launcher_stuck(read: Readings) -> AlertRule:
    unhealthy = read.top(catalog.LIMIT, limit="telemetry.loop_unhealthy_s")
    limit = f"{number(read.values.launcher_stuck_ratio)} * {unhealthy}"
    standing = read.lately(LOOP_AGE, read.values.target_missing_s)
    return AlertRule(
        name="NvrxLauncherStuck",
        verdict="training is not watched",
        severity="critical",
        expr=f"{standing}\n> {read.on}\n{limit}\n{read.expected}",
        for_s=read.values.launcher_stuck_for_s,
        meaning="The launcher answers scrapes, but its main loop does not turn: no fault would be detected. Judged by "
        "the launcher's own clock, whatever that of Prometheus says.",
        clears="With the next turn of the loop.",
        summary=f"The launcher of run {{{{ $labels.run }}}} is stuck{FOR_LONG}.",
        cured=f"({standing} <= {read.on} {limit})\n{read.expected}",
        resolved="its loop turns again",
        description=(
            "Ranks may go on training, but no death, hang or preemption is handled. "
            "`nvrx-sre runbook NvrxLauncherStuck` says what to save before it is restarted."
        ),
    )


def _host_memory_pressure(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxHostMemoryPressure",
        verdict="memory nearly used up",
        severity="warning",
        expr=f"{read.lately(MEMORY_PRESSURE)} > {number(read.values.memory_ratio)}\n{read.expected}",
        for_s=read.values.memory_for_s,
        meaning="A node of the run uses most of its memory limit, hot slots not counted: the kernel is about to kill.",
        clears="When less is used.",
        summary="Run {{ $labels.run }} uses {{ $value | humanizePercentage }} of a node's memory limit.",
        description=(
            "Without the hot slots, which are reserved, memory is nearly used up. The next allocation may kill a rank "
            "or the launcher. `nvrx-sre runbook NvrxHostMemoryPressure` says who uses it."
        ),
    )


def _device_unfit(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxDeviceUnfit",
        verdict="a GPU is unfit",
        severity="warning",
        expr=f"{read.lately(UNFIT_DEVICES)} > 0\n{read.expected}",
        meaning="NVML says of a GPU of the run what no restart cures: its driver asks for a reset, or it is lost.",
        clears="With a launcher that finds all its GPUs fit.",
        summary="Run {{ $labels.run }}: {{ $value }} of a node's GPUs should have no rank.",
        description=(
            "The generation goes on. The next one does without them, if the run may be that small; else it stays on "
            "them. `nvrx-sre runbook NvrxDeviceUnfit` says which, and why."
        ),
    )


def _storage_near_full(read: Readings) -> AlertRule:
    needed = f"{number(read.values.storage_checkpoints)} * ({read.of(catalog.CHECKPOINT_SIZE)} > 0)"
    return AlertRule(
        name="NvrxStorageNearFull",
        verdict="storage nearly full",
        severity="warning",
        expr=f"({read.lately(MIN_FREE_RATIO)} < {number(read.values.storage_free_ratio)}\nor {read.on}\n"
        f"{read.lately(MIN_FREE)} / {read.on} ({needed}) < 1)\n{read.expected}",
        for_s=read.values.storage_for_s,
        meaning="The file system of the run directory is nearly full, or the next checkpoints do not fit.",
        clears="When there is room again.",
        summary="Run {{ $labels.run }}: its storage is nearly full ({{ $value | humanizePercentage }} left of what "
        "it needs).",
        description=(
            "Durable saves will fail, then restarts: their decisions are recorded there too. "
            "`nvrx-sre runbook NvrxStorageNearFull` says what may be deleted."
        ),
    )


def _telemetry_dropping(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxTelemetryDropping",
        verdict="telemetry incomplete",
        severity="warning",
        expr=f"({LOST_ITEMS} > 0 or {LOST_ERRORS} > 0)\n{read.expected}",
        meaning="Telemetry loses items or swallows errors (label `component`). Training is not affected.",
        clears="`telemetry_window_s` after the last one.",
        summary="Run {{ $labels.run }}: telemetry's {{ $labels.component }} lost {{ $value }} items.",
        description=(
            "What dashboards and alerts say about this run may be incomplete. "
            "`nvrx-sre runbook NvrxTelemetryDropping` says which part and why."
        ),
    )


def _clock_skew(read: Readings) -> AlertRule:
    limit = number(read.values.clock_skew_s)
    apart = f"abs({read.lately(AHEAD)}) > {limit}"
    return AlertRule(
        name="NvrxClockSkew",
        verdict="a clock is wrong",
        severity="warning",
        expr=f"({read.lately(MAX_SKEW)} > {limit}\nor {read.on}\n{apart})\n{read.expected}",
        keep_firing_s=read.values.hold_s,
        meaning="A node's clock was set while the run was on it, or differs from the monitoring's.",
        clears="When the clocks agree, after `hold_s`.",
        summary="Run {{ $labels.run }}: a clock is off by {{ $value | humanizeDuration }}.",
        description=(
            "Spans and logs of its nodes do not line up with others; ages and deadlines are taken from the run's own "
            "clock and hold. "
            "`nvrx-sre runbook NvrxClockSkew` says which node."
        ),
    )


def _catalog_mismatch(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxCatalogMismatch",
        verdict="rules and run differ in version",
        severity="warning",
        expr=f'{read.of(catalog.BUILD_INFO)}{{catalog!="{catalog.VERSION}"}}\n{read.expected}',
        for_s=read.values.sample_memory_s,
        meaning="The run exports another metric catalog (label `catalog`) than these rules were generated for.",
        clears="When rules and run are of one version.",
        summary="Run {{ $labels.run }} exports catalog {{ $labels.catalog }}, the rules are for another.",
        description=(
            "Some alerts may not see what they look for. Generate dashboards and rules with the version that the run "
            "uses. `nvrx-sre runbook NvrxCatalogMismatch` says how."
        ),
    )


def _watchdog(read: Readings) -> AlertRule:
    expr = "vector(1)"
    for label in read.values.group_labels:
        expr = f'label_replace({expr}, "{label}", "{UNKNOWN_LABEL}", "", "")'
    return AlertRule(
        name="NvrxWatchdog",
        severity="info",
        expr=expr,
        meaning="Always fires. A receiver that stops hearing it knows that alerting is broken.",
        clears="Never; its absence is the alarm.",
        summary="Alerting works (this alert always fires; run {{ $labels.run }}).",
        description="Route it to a dead man's switch. `nvrx-sre runbook NvrxWatchdog`: when it is missed.",
    )
