"""All rules in one place: what is recorded, what is alerted on, and the documents that are written.

Model: recording rules take the maximum over pods first (`recordings`), alerts read recordings only. Alerts are split
by theme: progress (`alerts_progress`), recoveries (`alerts_recovery`), checkpoints and steps (`alerts_checkpoints`),
what the run stands on (`alerts_platform`), the goodput objective (`slo`). A page that is cured says how (`endings`).
Nothing is `increase()` of a fresh counter,
which misses the first event and is no whole number (C63, C65).

Invariants: every alert has a runbook of its name; every rule keeps the labels of the key. Pure.
"""

from __future__ import annotations

from typing import Any

from nvrx_sre.monitoring.alerts_checkpoints import checkpoint_alerts
from nvrx_sre.monitoring.alerts_kubernetes import kubernetes_alerts
from nvrx_sre.monitoring.alerts_platform import platform_alerts
from nvrx_sre.monitoring.alerts_progress import PROGRESS_CAPS as PROGRESS_CAPS
from nvrx_sre.monitoring.alerts_progress import progress_alerts, progress_recordings
from nvrx_sre.monitoring.alerts_recovery import recovery_alerts
from nvrx_sre.monitoring.endings import ending_recordings
from nvrx_sre.monitoring.inhibition import told_before
from nvrx_sre.monitoring.recordings import MAX_EXPECTED, Readings
from nvrx_sre.monitoring.recordings import recording_rules as metric_recordings
from nvrx_sre.monitoring.rule import RUN_DASHBOARD_UID as RUN_DASHBOARD_UID
from nvrx_sre.monitoring.rule import AlertRule as AlertRule
from nvrx_sre.monitoring.rule import RecordingRule as RecordingRule
from nvrx_sre.monitoring.slo import goodput_alerts, slo_recordings
from nvrx_sre.monitoring.values import Values

GROUP = "nvrx-sre"
KUBERNETES_GROUP = "nvrx-sre-kubernetes"


def recording_rules(values: Values) -> list[RecordingRule]:
    """All recording rules, in file order."""
    read = Readings(values)
    endings = ending_recordings(read, alert_rules(values))
    return [*metric_recordings(values), *slo_recordings(values), *progress_recordings(read), *endings]


def alert_rules(values: Values) -> list[AlertRule]:
    """All alerts of the rules file, most definite first. Several rules may share a name; their labels differ."""
    read = Readings(values)
    themes = (progress_alerts, platform_alerts, checkpoint_alerts, recovery_alerts, goodput_alerts)
    return [rule for theme in themes for rule in theme(read)]


def all_alert_rules(values: Values) -> list[AlertRule]:
    """The alerts of both files: each name has a runbook."""
    return [*alert_rules(values), *kubernetes_alerts(values)]


def over_with_run(values: Values) -> frozenset[str]:
    """Names of the alerts that say nothing of a run that has ended: each of their rules asks whether it has."""
    outlive = {rule.name for rule in alert_rules(values) if MAX_EXPECTED not in rule.expr}
    return frozenset(rule.name for rule in alert_rules(values)) - outlive


def rules_document(values: Values) -> dict[str, Any]:
    """The rules file as data: one group, so that alerts see the recordings of the same evaluation."""
    recordings = recording_rules(values)
    rules = [
        *(rule.to_rule() for rule in recordings if not rule.after_alerts),
        *(rule.to_rule(values) for rule in sorted(alert_rules(values), key=lambda rule: told_before(rule.name))),
        *(rule.to_rule() for rule in recordings if rule.after_alerts),
    ]
    return {"groups": [{"name": GROUP, "rules": rules}]}


def kubernetes_document(values: Values) -> dict[str, Any]:
    """The optional rules on kube-state-metrics as data."""
    rules = [rule.to_rule(values) for rule in kubernetes_alerts(values)]
    return {"groups": [{"name": KUBERNETES_GROUP, "rules": rules}]}
