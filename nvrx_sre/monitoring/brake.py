"""The brake's decisions: whether one alert of a notification may halt one run.

Model: `Brake.handle` takes the alerts of a request one after the other. An alert that is firing, carries
`action="halt"`, stands on the allow-list and has the site's labels names a run. The run must be known exactly once,
have opted in, not be halted already, and have started (or been resumed) before the alert began: an alert of the time
before says nothing about the run as it is now. The one is stamped by Prometheus and the other by the run's host, so the
alert must be later by what their clocks may differ by unnoticed. Then the halt request is written, at most once in
`MIN_INTERVAL_S` for the whole site, so that one wrong rule cannot stop a fleet.

Invariants: the stamp of a halt is on the disk before its request is, so a restart of the brake refills nothing;
whatever cannot be read is a refusal. Every answer is one of the closed set `Outcome`.
Thread safety: `handle` is serialised by a lock. Blocking: the run store's file I/O. Must not: resume a run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.core.errors import StorageError
from nvrx_sre.monitoring.values import Values

ACTION_LABEL = "action"
HALT = "halt"
MIN_INTERVAL_S = 600.0
"""Between two halts of a site: ten minutes, time for a person to see the first and switch the brake off."""

CLOCKS_APART_S = Values().clock_skew_s
"""By how much the clocks of Prometheus and of the run's host may differ before `NvrxClockSkew` says so (30 s)."""


class Outcome(StrEnum):
    """What became of one alert. Closed set; label of the brake's metric."""

    HALTED = "halted"
    NOT_FIRING = "not_firing"
    NO_ACTION = "no_action"
    NOT_ALLOWED = "not_allowed"
    OTHER_SITE = "other_site"
    NO_RUN = "no_run"
    UNKNOWN_RUN = "unknown_run"
    AMBIGUOUS_RUN = "ambiguous_run"
    NOT_OPTED_IN = "not_opted_in"
    STALE = "stale"
    ALREADY_HALTED = "already_halted"
    TOO_SOON = "too_soon"
    STORAGE = "storage"


NOT_NOW = frozenset({Outcome.TOO_SOON, Outcome.STORAGE})
"""Outcomes that another try may change: Alertmanager is asked to send again."""

REASONS: dict[Outcome, str] = {
    Outcome.HALTED: "the run was asked to halt",
    Outcome.NOT_FIRING: "the alert is resolved",
    Outcome.NO_ACTION: 'the alert has no label action="halt"',
    Outcome.NOT_ALLOWED: "the alert is not on the brake's allow-list",
    Outcome.OTHER_SITE: "the alert's labels are those of another site",
    Outcome.NO_RUN: "the alert has no label run",
    Outcome.UNKNOWN_RUN: "no run directory of this name lies under the brake's root",
    Outcome.AMBIGUOUS_RUN: "several run directories have this name",
    Outcome.NOT_OPTED_IN: "the run was not started with --allow-brake",
    Outcome.STALE: f"the alert began before {CLOCKS_APART_S:.0f} s after the run last started or was resumed",
    Outcome.ALREADY_HALTED: "a halt of the run is already requested",
    Outcome.TOO_SOON: "the brake halted a run less than ten minutes ago",
    Outcome.STORAGE: "the halt request could not be written",
}
"""One sentence an outcome, for the answer and the log."""


@dataclass(frozen=True, kw_only=True)
class BrakePolicy:
    """Which alerts may halt a run here."""

    alerts: frozenset[str]
    """Allow-list of alert names."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that an alert of this site carries, e.g. its cluster."""


@dataclass(frozen=True, kw_only=True)
class BrakedRun:
    """What the run directory says about its run."""

    run: str
    directory: str
    is_allowed: bool
    """The run opted in."""
    since_ns: int
    """When it last started or was resumed (Unix epoch)."""
    is_halt_requested: bool


class RunStore(Protocol):
    """Run directories of the site, and the brake's own stamp. Methods block on the disk."""

    def find(self, run: str) -> Sequence[BrakedRun]:
        """All run directories whose run has this name."""

    def last_halt_ns(self) -> int | None:
        """When the brake last halted a run. Raises `StorageError` if that cannot be read."""

    def note_halt(self, now_ns: int) -> None:
        """Remember a halt durably. Raises `StorageError`."""

    def request_halt(self, run: BrakedRun, reason: str) -> None:
        """Write the halt request. Raises `StorageError`."""


@dataclass(frozen=True, kw_only=True)
class Handled:
    """An alert and what became of it."""

    alert: str
    run: str
    outcome: Outcome

    @property
    def reason(self) -> str:
        """One sentence for a person."""
        return REASONS[self.outcome]


def alert_refusal(alert: Mapping[str, Any], policy: BrakePolicy) -> Outcome | None:
    """Why the alert itself cannot halt anything; None if it may."""
    labels = alert["labels"]
    if alert["status"] != "firing":
        return Outcome.NOT_FIRING
    if labels.get(ACTION_LABEL) != HALT:
        return Outcome.NO_ACTION
    if labels["alertname"] not in policy.alerts:
        return Outcome.NOT_ALLOWED
    if any(labels.get(name) != value for name, value in policy.labels.items()):
        return Outcome.OTHER_SITE
    return None if labels.get("run") else Outcome.NO_RUN


def run_refusal(runs: Sequence[BrakedRun], began_ns: int) -> Outcome | None:
    """Why none of `runs` can be halted by an alert that began at `began_ns`; None if the only one may."""
    if len(runs) != 1:
        return Outcome.AMBIGUOUS_RUN if runs else Outcome.UNKNOWN_RUN
    (run,) = runs
    if not run.is_allowed:
        return Outcome.NOT_OPTED_IN
    if run.is_halt_requested:
        return Outcome.ALREADY_HALTED
    return None if began_ns > run.since_ns + to_ns(CLOCKS_APART_S) else Outcome.STALE


def is_too_soon(last_ns: int | None, now_ns: int) -> bool:
    """Whether the last halt is less than the interval away, in either direction: a clock may have been set back."""
    return last_ns is not None and abs(now_ns - last_ns) < to_ns(MIN_INTERVAL_S)


def began_ns(alert: Mapping[str, Any]) -> int:
    """When the alert began to fire (Unix epoch). Raises `ValueError` if it does not say so."""
    text = alert.get("startsAt")
    if not isinstance(text, str):
        raise ValueError("an alert without startsAt")
    stamp = datetime.fromisoformat(text)
    if stamp.tzinfo is None:
        raise ValueError(f"startsAt {text!r} has no time zone")
    return to_ns(stamp.timestamp())


class Brake:
    """Decides on alerts and writes halt requests through its store."""

    def __init__(self, policy: BrakePolicy, store: RunStore, clock: Clock) -> None:
        self._policy = policy
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()

    def handle(self, alerts: Sequence[Mapping[str, Any]]) -> list[Handled]:
        """What became of each alert, in order. Raises `ValueError` for an alert that cannot be understood.

        All alerts are read before any is acted on.
        """
        stamps = [began_ns(alert) for alert in alerts]
        with self._lock:
            return [self._handle(alert, stamp) for alert, stamp in zip(alerts, stamps, strict=True)]

    def _handle(self, alert: Mapping[str, Any], stamp_ns: int) -> Handled:
        labels = alert["labels"]
        outcome = alert_refusal(alert, self._policy) or self._act(alert, stamp_ns)
        return Handled(alert=labels["alertname"], run=str(labels.get("run", "")), outcome=outcome)

    def _act(self, alert: Mapping[str, Any], stamp_ns: int) -> Outcome:
        labels = alert["labels"]
        runs = self._store.find(labels["run"])
        refused = run_refusal(runs, stamp_ns)
        if refused is not None:
            return refused
        now_ns = self._clock.wall_ns()
        try:
            if is_too_soon(self._store.last_halt_ns(), now_ns):
                return Outcome.TOO_SOON
            self._store.note_halt(now_ns)
            self._store.request_halt(runs[0], f"brake: {labels['alertname']}, firing since {alert['startsAt']}")
        except StorageError:
            return Outcome.STORAGE
        return Outcome.HALTED
