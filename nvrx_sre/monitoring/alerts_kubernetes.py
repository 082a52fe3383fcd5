"""Optional alerts on kube-state-metrics: a launcher that dies before it serves a metric of its own.

Model: pods carry the label `nvrx-sre/run`, which kube-state-metrics exports with
`--metric-labels-allowlist=pods=[nvrx-sre/run]`. Only pods whose container waits in a state that it does not leave by
itself count; a restart of a pod is no alarm here.

Pure. Must not: be loaded where kube-state-metrics is not: its series would be missing, and the alert mute.
"""

from __future__ import annotations

from nvrx_sre.monitoring.promql import Query, duration, one_of
from nvrx_sre.monitoring.recordings import filled
from nvrx_sre.monitoring.rule import AlertRule
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry.metric import RUN_LABEL

POD_LABELS_SERIES = "kube_pod_labels"
WAITING_SERIES = "kube_pod_container_status_waiting_reason"
RUN_POD_LABEL = "label_nvrx_sre_run"
KUBERNETES_SERIES = {POD_LABELS_SERIES: ("pod", RUN_POD_LABEL), WAITING_SERIES: ("pod", "reason")}
"""Series of kube-state-metrics that are read, and their labels beside the key."""
STUCK_REASONS = (
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
)
"""Waiting reasons of kube-state-metrics that need a person; ContainerCreating and PodInitializing pass."""


def kubernetes_alerts(values: Values) -> list[AlertRule]:
    """Alerts of alerts/nvrx-sre.kubernetes.rules.yaml."""
    keys = Query(group_labels=values.group_labels).keys("reason")
    window = duration(values.sample_memory_s)
    waiting = f"max_over_time({WAITING_SERIES}{{reason{one_of(STUCK_REASONS)}}}[{window}])"
    owner = f'max by (cluster, namespace, pod, {RUN_POD_LABEL}) ({POD_LABELS_SERIES}{{{RUN_POD_LABEL}!=""}})'
    joined = f"{waiting}\n* on (cluster, namespace, pod) group_left ({RUN_POD_LABEL})\n{owner}"
    named = f'label_replace({joined}, "{RUN_LABEL}", "$1", "{RUN_POD_LABEL}", "(.+)")'
    return [
        AlertRule(
            name="NvrxLauncherPodFailing",
            severity="critical",
            expr=filled(f"max by {keys} ({named})", values) + " > 0",
            for_s=values.target_missing_s,
            meaning="A pod of the run cannot start its container (label `reason`), so that no launcher serves metrics.",
            clears="When no container has waited for `sample_memory_s`.",
            summary="A pod of run {{ $labels.run }} does not start: {{ $labels.reason }}.",
            description=(
                "The launcher is not there to say what is wrong. `nvrx-sre runbook NvrxLauncherPodFailing` says where "
                "to look."
            ),
        )
    ]
