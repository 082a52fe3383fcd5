"""Alerts on progress: does the run commit steps that it had not committed before, and if not, why not.

Model: every page is gated on progress or on the time at which a state or phase was entered, and on the run not having
ended. The situations exclude each other: attempts without progress (`NvrxCrashLooping`), an incident that does not
close (`NvrxRecoveryOverdue`), a group that does not form (`NvrxRendezvousStuck`), a watchdog that did not act
(`NvrxRunStalled`), a first step that does not come (`NvrxStartupOverdue`), a run that ended (`NvrxRunHalted`).

Pure.
"""

from __future__ import annotations

from nvrx_sre.monitoring.promql import duration, number, one_of, recorded
from nvrx_sre.monitoring.recordings import MAX_ACTIVE, MAX_HALTED, Readings
from nvrx_sre.monitoring.rule import FOR_LONG, IDLE, AlertRule, RecordingRule, lookup
from nvrx_sre.monitoring.situation import DRAIN_LIMIT, WITHIN_STEP
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import HaltReason, RunState

PROGRESS_CAPS = ("same_fingerprint", "consecutive", "startup")
"""Caps that count attempts in a row without progress. Not among them: `window`, which remembers attempts before the
last progress; one retry of a non-finite loss, whose limit of 1 a single recovery reaches; `device`, which counts
faults of one device; `storage` and `unknown_progress`, which say that evidence is missing rather than that the
run loops. Where one of these stops the run, `NvrxRunHalted` says so."""
LOOPED = recorded(catalog.BUDGET_USED, "looped")
"""Attempts of a run that looped, kept while it is halted; read by the alerts at the evaluation after."""
TOLD = recorded(catalog.HALTED_TIMESTAMP, "told")
"""Runs whose halt was told before their loop, or with it; read by the alert at the evaluation after."""
UNTIL_SECONDS = '{{ ($value | toTime).Format "2006-01-02 15:04:05" }} UTC'
"""A time as a person reads it."""
STARTUP_PHASES = ("init", "rendezvous", "rebuild", "load", "first_step")
RECOVERY_PHASES = ("teardown", *STARTUP_PHASES)
STEADY_PHASES = ("step", "data", "evaluate", "save", "finalize")
"""Phases between two steps, in which only a fault or the watchdog ends a wait."""
PAST_RENDEZVOUS = (RunState.RESTORING, RunState.TRAINING)


def progress_alerts(read: Readings) -> list[AlertRule]:
    """Alerts that page for a run without progress, most definite first."""
    return [
        _run_halted(read),
        _crash_looping(read),
        _recovery_overdue(read),
        _run_stalled(read),
        _rendezvous_stuck(read),
        _startup_overdue(read),
        _retry_cap_breached(read),
    ]


def _newest_fault(read: Readings) -> str:
    memory_s = read.values.halted_memory_s
    faults = read.of(catalog.FAULT_TIMESTAMP)
    return lookup(faults, read.values, memory_s=memory_s, condition=" > 0", newest=True)


def _root(read: Readings) -> str:
    """Which rank failed last, and of what; long after its pod is gone."""
    memory_s = read.values.halted_memory_s
    rank = lookup(read.of(catalog.INCIDENT_ROOT_RANK), read.values, memory_s=memory_s, condition=" >= 0")
    return (
        f"{{{{ with {rank} }}}}rank {{{{ . | first | value }}}}{{{{ else }}}}a rank not known{{{{ end }}}}"
        f'{{{{ with {_newest_fault(read)} }}}} ({{{{ . | first | label "fault" }}}}){{{{ end }}}}'
    )


def _durable(read: Readings) -> str:
    """A sentence: what a new start would go on from."""
    steps = read.of(catalog.CHECKPOINT_STEP)
    step = lookup(steps, read.values, memory_s=read.values.halted_memory_s, matchers='tier="durable"')
    known = "{{ if ge $step 0.0 }}Newest durable step: {{ $step }}. {{ else }}No step is durable. {{ end }}"
    return f"{{{{ with {step} }}}}{{{{ $step := . | first | value }}}}{known}{{{{ end }}}}"


def _is_halted(read: Readings) -> str:
    """The run was halted and not started since, also when its pod is gone."""
    window = duration(read.values.halted_memory_s)
    return f"last_over_time({MAX_HALTED}[{window}]) > {read.on} last_over_time({MAX_ACTIVE}[{window}])"


def _started_again(read: Readings) -> str:
    """The run was started again after it was halted."""
    window = duration(read.values.halted_memory_s)
    return f"last_over_time({MAX_ACTIVE}[{window}]) > {read.on} last_over_time({MAX_HALTED}[{window}])"


def _halts(read: Readings) -> str:
    """When it was halted; nothing for a run whose loop was told before, which goes on with that."""
    window = duration(read.values.halted_memory_s)
    newest = f"topk {read.by} (1, last_over_time({read.of(catalog.HALTED_TIMESTAMP)}[{window}]))"
    return f"{newest}\nand {read.on}\n({_is_halted(read)})\nunless {read.on}\n({LOOPED} unless {read.on} {TOLD})"


def _run_halted(read: Readings) -> AlertRule:
    return AlertRule(
        name="NvrxRunHalted",
        verdict="halted: nothing will start it again",
        severity="critical",
        blames=True,
        expr=_halts(read),
        meaning="The run stopped with exit 93: a retry cap was reached, the fault cannot be cured by a restart, or "
        "somebody halted it (label `reason`). Nothing will start it again by itself. Not for a run that has paged as "
        "`NvrxCrashLooping` already: that page stays until the run is started again.",
        clears="When the run is submitted again under the same name, or after `halted_memory_s`.",
        summary="Run {{ $labels.run }} is halted ({{ $labels.reason }})"
        f"{{{{ if $value }}}} since {UNTIL_SECONDS}{{{{ end }}}} and will not restart.",
        cured=_started_again(read),
        resolved="submitted again",
        description=(
            f"{_why_halted(read)}The launcher ends with exit code 93: nothing will start the run again by itself. "
            f"{_durable(read)}`nvrx-sre runbook NvrxRunHalted` says what to do."
        ),
    )


def _why_halted(read: Readings) -> str:
    """A sentence or two: the one reason, and the fault if it was one."""
    root = f"{{{{ if {_newest_fault(read)} }}}}Last root: {_root(read)}. {{{{ end }}}}"
    texts = {
        HaltReason.CAP: f"Retries are used up. {root}",
        HaltReason.INCURABLE: f"No restart can cure the fault. {root}",
        HaltReason.OPERATOR: "An operator halted it. ",
        HaltReason.BRAKE: "The brake halted it. ",
    }
    return "".join(f'{{{{ if eq $labels.reason "{reason}" }}}}{text}{{{{ end }}}}' for reason, text in texts.items())


def progress_recordings(read: Readings) -> list[RecordingRule]:
    """What stands idle, and what the alerts remember of the evaluation before."""
    # the order matters: what was told is judged by the loops of the evaluation before
    told = f"max {read.by} ({_halts(read)})"
    meaning = "Ranks of a run that has not ended and either loops or executes no step, not even an old one."
    return [
        RecordingRule(name=IDLE, expr=_idles(read), metric=catalog.WORLD_SIZE_CONFIGURED, meaning=meaning),
        RecordingRule(name=TOLD, expr=told, metric=catalog.HALTED_TIMESTAMP, after_alerts=True),
        RecordingRule(name=LOOPED, expr=_loops_or_looped(read), metric=catalog.BUDGET_USED, after_alerts=True),
    ]


def _idles(read: Readings) -> str:
    world, last = read.of(catalog.WORLD_SIZE_CONFIGURED), read.of(catalog.LAST_STEP)
    starting = f"max {read.by} ({read.of(catalog.RUN_STATE_ENTERED, state=RunState.STARTING)})"
    stepping = f"{read.age(last)} <= {read.on} {_step_limit(read)} and {read.on} {last} > {read.on} {starting}"
    return (
        f"({world}\nunless {read.on}\n({stepping})\nor {read.on}\n({world} and {read.on} ({_loops(read)})))\n"
        f"{read.expected}"
    )


def _loops_or_looped(read: Readings) -> str:
    """A loop that was halted stays one until the run is started again."""
    return f"{_loops(read)}\nor {read.on}\n({LOOPED} and {read.on} {_is_halted(read)})"


def _loops(read: Readings) -> str:
    ratio = read.values.crash_loop_budget_ratio
    used = read.of(catalog.BUDGET_USED, cap=PROGRESS_CAPS)
    limit = f"({read.of(catalog.BUDGET_LIMIT, cap=PROGRESS_CAPS)} > 0)"
    threshold = limit if ratio == 1 else f"{number(ratio)} * {limit}"
    recovering = read.of(catalog.RUN_STATE_ENTERED, state=RunState.RECOVERING)
    stuck = f"{read.of(catalog.LAST_NEW_STEP)} < {read.on} {recovering}"
    halted = f"({MAX_HALTED} > {read.on} {recovering})"
    return (
        f"max {read.by} ({used} >= {threshold})\nand {read.on}\n({stuck})\n"
        f"unless {read.on}\n({MAX_ACTIVE} > {read.on} {halted})"
    )


def _recovered(read: Readings) -> str:
    """How the newest incident recovered; for a run whose incident is closed."""
    outage = lookup(read.of(catalog.OUTAGE_LAST), read.values, condition=" > 0")
    rollback = lookup(read.of(catalog.ROLLBACK_LAST), read.values)
    steps = "{{ $steps := . | first | value }}, rollback {{ $steps }} step{{ if ne $steps 1.0 }}s{{ end }}"
    return (
        f"recovered{{{{ with {outage} }}}} in {{{{ . | first | value | humanizeDuration }}}}{{{{ end }}}}"
        f"{{{{ with {rollback} }}}}{steps}{{{{ end }}}}"
    )


def _either(query: str, text: str, otherwise: str) -> str:
    """`text` where the query returns something."""
    return f"{{{{ if {query} }}}}{text}{{{{ else }}}}{otherwise}{{{{ end }}}}"


def _is_open(read: Readings) -> str:
    return lookup(read.of(catalog.INCIDENT_OPENED), read.values, condition=" > 0")


def _crash_looping(read: Readings) -> AlertRule:
    recovering = read.of(catalog.RUN_STATE_ENTERED, state=RunState.RECOVERING)
    window_s = read.values.halted_memory_s
    started = f" > {read.on} last_over_time({MAX_ACTIVE}[{duration(window_s)}])"
    halted = lookup(MAX_HALTED, read.values, memory_s=window_s, condition=started)
    has_gained = f" >= {read.on} {recovering}"
    gained = lookup(read.of(catalog.LAST_NEW_STEP), read.values, condition=has_gained)
    return AlertRule(
        name="NvrxCrashLooping",
        verdict="crash loop: no progress",
        severity="critical",
        blames=True,
        expr=_loops_or_looped(read),
        cured=f"{read.of(catalog.LAST_NEW_STEP)}{has_gained}\nor {read.on}\n{_started_again(read)}",
        resolved=_either(gained, _recovered(read), "submitted again"),
        for_s=read.values.crash_loop_for_s,
        meaning="The run restarts again and again without committing a step that it had not committed before.",
        clears="With the first new step, or when a halted run is submitted again.",
        summary="Run {{ $labels.run }} is crash looping{{ if $value }}: {{ $value }} attempts without progress"
        "{{ end }}.",
        description=(
            f"Last root: {_root(read)}. Attempts without progress have used up a retry budget and no new step "
            "was committed since the last fault. "
            f"{{{{ if {halted} }}}}It has been halted since: nothing will start it again by itself. "
            f"{{{{ else }}}}The job looks busy but redoes the same steps. {{{{ end }}}}{_durable(read)}"
            "`nvrx-sre runbook NvrxCrashLooping` says what to do."
        ),
    )


def _recovery_overdue(read: Readings) -> AlertRule:
    limit = f"{number(read.values.recovery_overdue_ratio)} * {read.deadlines(*RECOVERY_PHASES)}"
    stepping = f"{read.age(read.of(catalog.LAST_STEP))} <= {read.on} {_step_limit(read)}"
    return AlertRule(
        name="NvrxRecoveryOverdue",
        verdict="recovering for too long",
        severity="critical",
        blames=True,
        expr=f"{read.age(f'({read.of(catalog.INCIDENT_OPENED)} > 0)')}\n> {read.on}\n{limit}\n"
        f"unless {read.on}\n({stepping})\n{read.expected}",
        keep_firing_s=read.values.hold_s,
        meaning="An incident is open for longer than any recovery that works, and no step is being executed.",
        clears="When the incident closes or steps are executed again, after `hold_s`.",
        summary=f"Run {{{{ $labels.run }}}} has not recovered{FOR_LONG}.",
        cured=f"({read.of(catalog.INCIDENT_OPENED)} == 0 or {read.on} {stepping})\n{read.expected}",
        resolved=_either(_is_open(read), "steps are executed again, the incident is still open", _recovered(read)),
        description=(
            f"Root: {_root(read)}. The incident is still open, and no step was committed for as long as a "
            "step or its data may take. `nvrx-sre runbook NvrxRecoveryOverdue` says what to do."
        ),
    )


def _run_stalled(read: Readings) -> AlertRule:
    ratio = number(read.values.stalled_ratio)
    entered = read.of(catalog.PHASE_ENTERED, phase=STEADY_PHASES)
    phase, on_phase = read.of(catalog.PHASE_DEADLINE, phase=STEADY_PHASES), read.on_keys("phase")
    current = f"{entered} == {read.on} group_left () max {read.by} ({read.of(catalog.PHASE_ENTERED)})"
    stepping = f"{read.age(read.of(catalog.LAST_STEP))} <= {read.on} {ratio} * {_step_limit(read)}"
    return AlertRule(
        name="NvrxRunStalled",
        verdict="stalled: no step and no fault",
        severity="critical",
        expr=f"{read.ages(current)}\n> {on_phase}\n{ratio} * {phase}\n"
        f"unless {read.on}\n({stepping})\nunless {read.on}\n({_drains(read)})\n{read.expected}",
        keep_firing_s=read.values.hold_s,
        meaning="No step for a multiple of the deadline of the phase that the run is in (of the longer of `step` and "
        "`data`, or of the time of a step where that is longer), and no fault was detected: the watchdog itself has "
        "failed.",
        clears="With the next step, or when the run leaves the phase, after `hold_s`.",
        summary=f"Run {{{{ $labels.run }}}} is stalled in {{{{ $labels.phase }}}}{FOR_LONG}.",
        cured=f"({stepping} or {read.on} {read.of(catalog.INCIDENT_OPENED)} > 0)\n{read.expected}",
        resolved=_either(_is_open(read), "a fault was detected after all", "steps are executed again"),
        description=(
            "The launcher should have ended this at the phase's deadline and has not. Nothing will cure it by itself. "
            "`nvrx-sre runbook NvrxRunStalled` says what to do."
        ),
    )


def _drains(read: Readings) -> str:
    """A save is in flight, or was a moment ago: a run that has done its steps waits for the last one, within limits."""
    limit = read.top(catalog.LIMIT, limit=DRAIN_LIMIT)
    window = duration(read.values.last_save_window_s)
    saving = f"(max_over_time({read.of(catalog.SAVE_STARTED)}[{window}]) > 0)"
    return f"{saving} and {read.on} {read.age(read.of(catalog.LAST_STEP))} <= {read.on} {limit}"


def _step_limit(read: Readings) -> str:
    """How long a run that works may be without a step.

    A step that tells of its progress (`ctx.tick`) may take longer than `step` and `data`: then as long as the newest
    ones did.
    """
    deadlines = read.of(catalog.PHASE_DEADLINE, phase=WITHIN_STEP)
    return f"max {read.by} ({deadlines} or {read.of(catalog.STEP_SECONDS)})"


def _rendezvous_stuck(read: Readings) -> AlertRule:
    entered = read.top(catalog.RUN_STATE_ENTERED, state=RunState.RENDEZVOUS)
    past = read.top(catalog.RUN_STATE_ENTERED, state=PAST_RENDEZVOUS)
    opened = f"({read.of(catalog.INCIDENT_OPENED)} > 0)"
    since = f"({read.age(opened)} or {read.on} {read.age(entered)})"
    limit = f"{number(read.values.rendezvous_ratio)} * {read.top(catalog.PHASE_DEADLINE, phase='rendezvous')}"
    world = lookup(read.of(catalog.WORLD_SIZE), read.values, condition=" > 0")
    nodes = lookup(read.of(catalog.RENDEZVOUS_NODES), read.values, matchers=f"state{one_of(['missing'])}")
    return AlertRule(
        name="NvrxRendezvousStuck",
        verdict="stuck in the rendezvous",
        severity="critical",
        expr=f"{since}\n> {read.on}\n{limit}\nand {read.on}\n({entered} > {read.on} {past})\n{read.expected}",
        for_s=read.values.rendezvous_for_s,
        meaning="The run does not get past the rendezvous: ranks or nodes are missing, or cannot reach each other.",
        clears="When the group has formed and restoring begins.",
        summary=f"Run {{{{ $labels.run }}}} is stuck in the rendezvous{FOR_LONG}.",
        cured=f"({entered} <= {read.on} {past})\n{read.expected}",
        resolved=f"the group has formed{{{{ with {world} }}}}: {{{{ . | first | value }}}} ranks{{{{ end }}}}",
        description=(
            f"Nodes missing: {{{{ with {nodes} }}}}{{{{ . | first | value }}}}{{{{ else }}}}not known{{{{ end }}}}. "
            "The group has not formed for a multiple of its deadline. `nvrx-sre runbook NvrxRendezvousStuck` says who "
            "is missing and what to do."
        ),
    )


def _startup_overdue(read: Readings) -> AlertRule:
    starting = f"max {read.by} ({read.of(catalog.RUN_STATE_ENTERED, state=RunState.STARTING)})"
    stepped, opened = f"{read.of(catalog.LAST_STEP)} > {read.on} {starting}", read.of(catalog.INCIDENT_OPENED)
    return AlertRule(
        name="NvrxStartupOverdue",
        verdict="start-up takes too long",
        severity="critical",
        expr=f"{read.age(starting)}\n> {read.on}\n"
        f"{number(read.values.startup_ratio)} * {read.deadlines(*STARTUP_PHASES)}\n"
        f"and {read.on}\n({read.of(catalog.LAST_STEP)} <= {read.on} {starting})\n"
        f"unless {read.on}\n({opened} > 0)\n{read.expected}",
        keep_firing_s=read.values.hold_s,
        meaning="The launcher has started and no step has followed within all the deadlines of a start, and no fault "
        "was detected.",
        clears="With the first step, or with a fault, after `hold_s`.",
        summary="Run {{ $labels.run }} has not executed a step"
        "{{ if $value }} {{ $value | humanizeDuration }}{{ end }} after its start.",
        cured=f"({stepped} or {read.on} {opened} > 0)\n{read.expected}",
        resolved=_either(_is_open(read), "a fault was detected", "the first step was executed"),
        description=(
            "Start-up takes longer than the sum of its deadlines. `nvrx-sre runbook NvrxStartupOverdue` says how to "
            "see which phase it is in and why."
        ),
    )


def _retry_cap_breached(read: Readings) -> AlertRule:
    values = read.values
    window = duration(values.retry_cap_window_s)
    ratio = number(values.retry_cap_ratio)

    def formed(metric: catalog.Metric, cap: str) -> str:
        series = read.of(metric)
        limit = read.top(catalog.BUDGET_LIMIT, cap=cap)
        return f"({series} - min_over_time({series}[{window}])) > {read.on} {ratio} * {limit}"

    return AlertRule(
        name="NvrxRetryCapBreached",
        verdict="restarts past its caps",
        severity="critical",
        blames=True,
        expr=f"({formed(catalog.GENERATIONS, 'window')}\nor {read.on}\n{formed(catalog.LAUNCHER_STARTS, 'startup')})\n"
        f"and {read.on}\n({read.age(read.of(catalog.LAST_NEW_STEP))} > {number(values.retry_cap_window_s)})\n"
        f"{read.expected}",
        keep_firing_s=values.hold_s,
        meaning="More groups were formed, or more launchers started, without one new step than the retry caps allow: "
        "the caps do not hold. Counted without the budgets that should have stopped it.",
        clears="With the first new step, or when the run ends, after `hold_s`.",
        summary="Run {{ $labels.run }} restarts past its caps{{ if $value }}: {{ $value }} starts without a new step"
        "{{ end }}.",
        cured=f"({read.age(read.of(catalog.LAST_NEW_STEP))} <= {number(values.retry_cap_window_s)})\n{read.expected}",
        resolved="new steps are committed again",
        description=(
            f"Within {window} without a new step the run was started more often than its caps allow. Either budgets "
            "are refilled from outside, or the run directory is not kept between starts. "
            "`nvrx-sre runbook NvrxRetryCapBreached` says what to do."
        ),
    )
