"""Recording and alerting rules, from the catalog.

Model: recording rules take the maximum over pods first and let a sample outlive its target for a while, so that
a replaced pod neither hides what happened before nor counts it twice. Alerts read recording rules only, and are
gated on what the run itself exports: budgets and their limits, entry times of states, time of the last new step.
Nothing is `increase()` of a fresh counter, which misses the first event and is no whole number (C63, C65).

- `NvrxCrashLooping`: a retry budget that only attempts without progress use is used up, and no new step was
  committed since the run last entered `recovering`. A recovery never gets there: progress refills the budgets. A
  run that was halted and submitted again starts with a clean slate: it loops only when it has failed again.
- `NvrxRunHalted`: the newest thing known of the run is its halt. Outlives the pod; any later state clears it.

Invariants: every alert has a runbook of its name; every rule keeps the labels of the key. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvrx_sre.monitoring.promql import Query, duration, number, one_of, recorded
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Metric

PROGRESS_CAPS = ("same_fingerprint", "consecutive", "startup")
"""Caps that count attempts in a row without progress. Not among them: `window`, which remembers attempts before the
last progress; one retry of a non-finite loss, whose limit of 1 a single recovery reaches; `device`, which counts
faults of one device; `storage` and `unknown_progress`, which say that evidence is missing rather than that the
run loops. Where one of these stops the run, `NvrxRunHalted` says so."""
ACTIVE_STATES = tuple(
    value for label in catalog.RUN_STATE_ENTERED.labels for value in label.values if value != "halted"
)
RUN_DASHBOARD_UID = "nvrx-run"
DASHBOARD_PATH = f"/d/{RUN_DASHBOARD_UID}/run"


@dataclass(frozen=True, kw_only=True)
class RecordingRule:
    """A series that the rules file computes."""

    name: str
    expr: str
    metric: Metric
    labels: tuple[str, ...]
    """Labels beside the key."""

    def to_rule(self) -> dict[str, Any]:
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """An alert: what pages, and what the page says."""

    name: str
    severity: str
    expr: str
    for_s: float
    meaning: str
    """One sentence for the reference."""
    clears: str
    """When it resolves, for the reference."""
    summary: str
    description: str

    def to_rule(self, values: Values) -> dict[str, Any]:
        rule: dict[str, Any] = {"alert": self.name, "expr": self.expr}
        if self.for_s:
            rule["for"] = duration(self.for_s)
        variables = "&".join(f"var-{label}={{{{ $labels.{label} }}}}" for label in values.group_labels)
        rule["labels"] = {"severity": self.severity}
        rule["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{values.runbook_base_url.rstrip('/')}/{self.name}.md",
            "dashboard_url": f"{values.dashboard_base_url.rstrip('/')}{DASHBOARD_PATH}?{variables}",
        }
        return rule


def recording_rules(values: Values) -> list[RecordingRule]:
    """All recording rules, in file order."""
    query = Query(group_labels=values.group_labels)
    memory_s = values.sample_memory_s

    def live(metric: Metric, *by: str) -> RecordingRule:
        expr = query.live(metric, *by, memory_s=memory_s)
        return RecordingRule(name=recorded(metric), expr=expr, metric=metric, labels=by)

    def newest(metric: Metric, *by: str) -> RecordingRule:
        expr = query.latest(metric, *by, memory_s=memory_s)
        return RecordingRule(name=recorded(metric), expr=expr, metric=metric, labels=by)

    entered = catalog.RUN_STATE_ENTERED
    return [
        live(catalog.BUDGET_USED, "cap"),
        live(catalog.BUDGET_LIMIT, "cap"),
        newest(catalog.LAST_NEW_STEP),
        newest(entered, "state"),
        RecordingRule(
            name=recorded(entered, "max_active"),
            expr=query.latest(entered, memory_s=memory_s, state=ACTIVE_STATES),
            metric=entered,
            labels=(),
        ),
        RecordingRule(  # sparse on purpose: only runs that were halted have it, which makes a week's memory cheap
            name=recorded(entered, "max_halted"),
            expr=f"{query.latest(entered, memory_s=memory_s, state='halted')} > 0",
            metric=entered,
            labels=(),
        ),
    ]


def alert_rules(values: Values) -> list[AlertRule]:
    """All alerts, in file order."""
    return [_crash_looping(values), _run_halted(values)]


def _crash_looping(values: Values) -> AlertRule:
    query = Query(group_labels=values.group_labels)
    caps = f"{{cap{one_of(PROGRESS_CAPS)}}}"
    used = f"{recorded(catalog.BUDGET_USED)}{caps}"
    limit = f"({recorded(catalog.BUDGET_LIMIT)}{caps} > 0)"
    threshold = limit
    if values.crash_loop_budget_ratio != 1:
        threshold = f"{number(values.crash_loop_budget_ratio)} * {limit}"
    recovering = f'{recorded(catalog.RUN_STATE_ENTERED)}{{state="recovering"}}'
    stuck = f"{recorded(catalog.LAST_NEW_STEP)} < on {query.keys()} {recovering}"
    halted = f"({recorded(catalog.RUN_STATE_ENTERED, 'max_halted')} > on {query.keys()} {recovering})"
    resubmitted = f"{recorded(catalog.RUN_STATE_ENTERED, 'max_active')} > on {query.keys()} {halted}"
    return AlertRule(
        name="NvrxCrashLooping",
        severity="critical",
        expr=f"max by {query.keys()} ({used} >= {threshold})\nand on {query.keys()}\n({stuck})\n"
        f"unless on {query.keys()}\n({resubmitted})",
        for_s=values.crash_loop_for_s,
        meaning="The run restarts again and again without committing a step that it had not committed before.",
        clears="With the first new step, when a halted run is submitted again, or when the series of the run are gone.",
        summary="Run {{ $labels.run }} is crash looping: {{ $value }} attempts without progress.",
        description=(
            "Attempts without progress have used up a retry budget and no new step was committed since the last "
            "fault. The job looks busy but redoes the same steps. `nvrx-sre runbook NvrxCrashLooping` says what to do."
        ),
    )


def _run_halted(values: Values) -> AlertRule:
    query = Query(group_labels=values.group_labels)
    window = duration(values.halted_memory_s)
    halted = f"last_over_time({recorded(catalog.RUN_STATE_ENTERED, 'max_halted')}[{window}])"
    active = f"last_over_time({recorded(catalog.RUN_STATE_ENTERED, 'max_active')}[{window}])"
    return AlertRule(
        name="NvrxRunHalted",
        severity="critical",
        expr=f"{halted}\n> on {query.keys()}\n{active}",
        for_s=0.0,
        meaning="The run stopped with exit 93: a retry cap was reached, the fault cannot be cured by a restart, or "
        "somebody halted it. Nothing will start it again by itself.",
        clears="When the run is submitted again under the same name, or after `halted_memory_s`.",
        summary="Run {{ $labels.run }} is halted since {{ $value | humanizeTimestamp }} and will not restart.",
        description=(
            "The launcher exited with 93: a retry cap was reached, no restart can cure the fault, or the run was "
            "halted. Its devices are idle. `nvrx-sre runbook NvrxRunHalted` says what to do."
        ),
    )


def rules_document(values: Values) -> dict[str, Any]:
    """The rules file as data: one group, so that alerts see the recordings of the same evaluation."""
    rules = [rule.to_rule() for rule in recording_rules(values)] + [
        rule.to_rule(values) for rule in alert_rules(values)
    ]
    return {"groups": [{"name": "nvrx-sre", "rules": rules}]}
