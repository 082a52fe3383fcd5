"""Alerts on checkpoints and on steps that take too long: what a fault would cost now, and what slows the run.

Model: what is at risk is the training between the capture of the newest verified checkpoint and the newest step, so
a run that stands still is not at more risk with each minute. Ratios are of what the run itself measures: interval,
write time, step time, reference.

Pure.
"""

from __future__ import annotations

from nvrx_sre.monitoring.promql import number
from nvrx_sre.monitoring.recordings import CLOCK, Readings
from nvrx_sre.monitoring.rule import AlertRule, lookup
from nvrx_sre.telemetry import catalog


def checkpoint_alerts(read: Readings) -> list[AlertRule]:
    """The page first, then tickets."""
    return [
        _stale(read),
        _save_failing(read),
        _rejected(read),
        _saturated(read),
        _slow_rank(read),
        _step_time_regressed(read),
    ]


def _stale(read: Readings) -> AlertRule:
    captured = read.top(catalog.CHECKPOINT_CAPTURED, tier="durable")
    interval = f"({read.of(catalog.CHECKPOINT_INTERVAL)} > 0)"
    write = read.of(catalog.CHECKPOINT_WRITE_SECONDS)
    limit = f"{number(read.values.checkpoint_stale_ratio)} * ({interval} + {read.on} {write})"
    at_risk = f"({read.of(catalog.LAST_NEW_STEP)} - {read.on} {captured})"
    ago = f" * -1 + {read.on} {CLOCK}"
    age = lookup(read.of(catalog.CHECKPOINT_CAPTURED), read.values, condition=ago, matchers='tier="durable"')
    return AlertRule(
        name="NvrxCheckpointStale",
        verdict="training, but not saved",
        severity="critical",
        expr=f"{at_risk}\n> {read.on}\n{limit}\n{read.expected}",
        for_s=read.values.checkpoint_stale_for_s,
        meaning="The training since the newest verified checkpoint is a multiple of the checkpoint interval.",
        clears="With the next verified checkpoint.",
        summary="Run {{ $labels.run }} would lose {{ if $value }}{{ $value | humanizeDuration }} of {{ end }}training "
        "with its node.",
        cured=f"({at_risk} <= {read.on} {limit})\n{read.expected}",
        resolved=f"{{{{ with {age} }}}}a checkpoint of {{{{ . | first | value | humanizeDuration }}}} ago is verified"
        "{{ end }}",
        description=(
            "Training goes on, but durable saves do not complete. A lost node rolls back to the newest verified "
            "checkpoint. `nvrx-sre runbook NvrxCheckpointStale` says what to do."
        ),
    )


def _save_failing(read: Readings) -> AlertRule:
    gained = read.gained(catalog.SAVES, read.values.save_failing_window_s, tier="durable", outcome="failed")
    return AlertRule(
        name="NvrxCheckpointSaveFailing",
        verdict="saves fail",
        severity="warning",
        expr=f"max {read.by} ({gained}) >= {number(read.values.save_failures)}\n{read.expected}",
        meaning="Durable saves fail again and again.",
        clears="`save_failing_window_s` after the failures.",
        summary="Run {{ $labels.run }}: {{ $value }} durable saves failed.",
        description=(
            "Training goes on; with each failed save a lost node costs more. "
            "`nvrx-sre runbook NvrxCheckpointSaveFailing` says why they fail."
        ),
    )


def _rejected(read: Readings) -> AlertRule:
    gained = read.gained(catalog.CHECKPOINT_REJECTED, read.values.event_window_s)
    return AlertRule(
        name="NvrxCheckpointRejected",
        verdict="a checkpoint was rejected",
        severity="warning",
        expr=f"{gained} > 0\n{read.expected}",
        meaning="A checkpoint was found unusable (label `reason`) and moved aside.",
        clears="`event_window_s` later.",
        summary="Run {{ $labels.run }} rejected {{ $value }} checkpoints: {{ $labels.reason }}.",
        description=(
            "It was good when it was published, so something damaged it since: storage, or a person. "
            "`nvrx-sre runbook NvrxCheckpointRejected` says what is left."
        ),
    )


def _saturated(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxCheckpointSaturated",
        verdict="saves take longer than their interval",
        severity="warning",
        expr=f"{read.of(catalog.CHECKPOINT_SATURATION)} > {number(read.values.saturation_ratio)}\n{read.expected}",
        for_s=read.values.saturation_for_s,
        meaning="A durable save takes longer than the interval at which saves are due, so that some are skipped.",
        clears="When a save takes less than the interval again.",
        summary="Run {{ $labels.run }}: a save takes {{ $value | humanizePercentage }} of the checkpoint interval.",
        description=(
            "Checkpoints are rarer than configured. Training is not blocked. "
            "`nvrx-sre runbook NvrxCheckpointSaturated` says which interval would hold."
        ),
    )


def _slow_rank(read: Readings) -> AlertRule:
    latest = catalog.RANK_SUMMARIES[catalog.RANK_LATENESS.name][1]
    late = f"({read.of(catalog.RANK_LATENESS)} or {read.on} {read.of(latest)})"
    step = f"({read.of(catalog.STEP_SECONDS)} > 0)"
    return AlertRule(
        name="NvrxSlowRank",
        verdict="one rank slows all",
        severity="warning",
        expr=f"{late}\n> {read.on} group_left ()\n{number(read.values.slow_rank_ratio)} * {step}\n{read.expected}",
        for_s=read.values.slow_rank_for_s,
        keep_firing_s=read.values.hold_s,
        meaning="One rank comes late to the first collective of each step (label `rank` unless ranks are exported as "
        "a summary); all others wait for it. Step times cannot show it: synchronous ranks are all as slow.",
        clears="When the rank is on time again, after `hold_s`.",
        summary="Run {{ $labels.run }}: {{ if $labels.rank }}rank {{ $labels.rank }}{{ else }}a rank{{ end }} is "
        "{{ $value | humanizeDuration }} late in each step.",
        description=(
            "The whole run steps at the speed of its slowest rank. `nvrx-sre runbook NvrxSlowRank` says how to tell a "
            "slow device from slow data."
        ),
    )


def _step_time_regressed(read: Readings) -> AlertRule:
    reference = f"({read.of(catalog.STEP_REFERENCE)} > 0)"
    full = f"{read.of(catalog.WORLD_SIZE)} == {read.on} {read.of(catalog.WORLD_SIZE_CONFIGURED)}"
    return AlertRule(
        name="NvrxStepTimeRegressed",
        verdict="steps are slower than they were",
        severity="warning",
        expr=f"{read.of(catalog.STEP_SECONDS)}\n> {read.on}\n{number(read.values.step_time_ratio)} * {reference}\n"
        f"and {read.on}\n({full})\n{read.expected}",
        for_s=read.values.step_time_for_s,
        keep_firing_s=read.values.hold_s,
        meaning="Steps take longer than at the beginning of the run, with the configured number of ranks.",
        clears="When steps are as fast as before, after `hold_s`.",
        summary="Run {{ $labels.run }}: a step takes {{ $value | humanizeDuration }}, far above its reference.",
        description=(
            "The run makes progress, but slower than it did with the same ranks. "
            "`nvrx-sre runbook NvrxStepTimeRegressed` says where to look."
        ),
    )
