"""The brake's own metrics: its requests, what became of the alerts in them, and when it last halted a run.

They are no part of the runs' catalog, because no run exports them; they are written in its types. All label values
are exported from the start. Thread-safe (prometheus_client's own locks).
"""

from __future__ import annotations

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge

from nvrx_sre.monitoring.brake import Outcome
from nvrx_sre.telemetry.metric import Label, Metric, MetricType, Scope, Unit


class RequestOutcome(StrEnum):
    """What became of one request. Closed set."""

    UNDERSTOOD = "understood"
    NOT_POST = "not_post"
    NOT_JSON = "not_json"
    NO_LENGTH = "no_length"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    BUSY = "busy"
    UNAUTHORIZED = "unauthorized"
    TOKEN_UNAVAILABLE = "token_unavailable"
    MALFORMED = "malformed"
    ERROR = "error"


REQUESTS = Metric(
    name="nvrx_brake_requests_total",
    type=MetricType.COUNTER,
    unit=Unit.COUNT,
    scope=Scope.SITE,
    help="Requests to the brake by what became of them.",
    labels=(Label(name="outcome", values=tuple(RequestOutcome)),),
)
ALERTS = Metric(
    name="nvrx_brake_alerts_total",
    type=MetricType.COUNTER,
    unit=Unit.COUNT,
    scope=Scope.SITE,
    help="Alerts of understood requests by what became of them.",
    labels=(Label(name="outcome", values=tuple(Outcome)),),
)
LAST_HALT = Metric(
    name="nvrx_brake_last_halt_timestamp_seconds",
    type=MetricType.GAUGE,
    unit=Unit.TIMESTAMP,
    scope=Scope.SITE,
    help="When the brake last halted a run; 0 if never since it was started.",
)
BRAKE_METRICS = (REQUESTS, ALERTS, LAST_HALT)


class BrakeMetrics:
    """Registry of one brake."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(REQUESTS.name, REQUESTS.help, REQUESTS.label_names, registry=self.registry)
        self._alerts = Counter(ALERTS.name, ALERTS.help, ALERTS.label_names, registry=self.registry)
        self._last_halt = Gauge(LAST_HALT.name, LAST_HALT.help, registry=self.registry)
        for request in RequestOutcome:
            self._requests.labels(request)
        for alert in Outcome:
            self._alerts.labels(alert)

    def count_request(self, outcome: RequestOutcome) -> None:
        """One request ended so."""
        self._requests.labels(outcome).inc()

    def count_alert(self, outcome: Outcome) -> None:
        """One alert ended so."""
        self._alerts.labels(outcome).inc()

    def note_halt(self, now_s: float) -> None:
        """A run was halted at `now_s` (seconds since the Unix epoch)."""
        self._last_halt.set(now_s)
