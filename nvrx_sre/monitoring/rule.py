"""What a rule is: recorded series and alerts, and how they are written into a rules file.

Model: an alert's text is built from its name, so that runbook and dashboard links cannot point elsewhere. Whose run it
is (`team`, `priority`) are labels of its alerts, asked for by the rule itself, so every Alertmanager can route by it;
a critical alert of a run whose priority is `dev` drops to warning. What a run said of itself last is remembered over
its pod: labels are an alert's identity, and must not change while it fires.

Invariants: a rule keeps the labels of the key. Immutable, hence thread-safe. Must not: know any alert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nvrx_sre.monitoring.promql import duration
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import RUN_LABEL, Metric

RUN_DASHBOARD_UID = "nvrx-run"
DASHBOARD_PATH = f"/d/{RUN_DASHBOARD_UID}/run"
UNKNOWN_LABEL = "none"
"""Value of a label of the key that the scrape does not set: two runs never match because both lack it."""
ENDED = "run:alerts:ended"
"""Recorded (`endings`): pages that fired at the evaluation before and whose cause is cured now, with the value 0."""
FOR_LONG = "{{ if $value }} for {{ $value | humanizeDuration }}{{ end }}"
"""In a summary: how long, but where the alert fires with 0 to say how it ended."""
AHEAD = f"{RUN_LABEL}:{catalog.CLOCK_SKEW.name}:ahead"
"""Recorded: by how much the run's clock is ahead of Prometheus'; nothing in a gap between scrapes."""
OWNER = f"{RUN_LABEL}:{catalog.RUN_INFO.name}:seen"
"""Recorded: when a run was last seen with these `team`, `priority` and `node`."""
IDLE = f"{RUN_LABEL}:{catalog.WORLD_SIZE_CONFIGURED.name}:idle"
"""Recorded: ranks of a run that holds its devices and trains nothing."""
SEEN_DEVICES = f"{RUN_LABEL}:{catalog.DEVICES.name}:max_seen"
"""Recorded: GPUs that a node of the run sees; 0 where it has none."""


@dataclass(frozen=True, kw_only=True)
class RecordingRule:
    """A series that the rules file computes."""

    name: str
    expr: str
    metric: Metric | None = None
    """What it is recorded of; None where it is of the alerts."""
    meaning: str = ""
    """What it is, where the metric's own description does not say that."""
    labels: tuple[str, ...] = ()
    """Labels beside the key."""
    after_alerts: bool = False
    """True if it stands behind the alerts, which therefore read what it was at the evaluation before."""
    cumulative: bool = False
    """True if it only grows (but for a new run of the same name), so that a rate of it means something."""

    @property
    def subject(self) -> str:
        """What it is of, for the reference."""
        return self.meaning if self.meaning or self.metric is None else self.metric.help

    def to_rule(self) -> dict[str, Any]:
        """The rule as data of the rules file."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """An alert: what pages, and what the page says."""

    name: str
    severity: str
    """critical (pages), warning (a ticket) or info."""
    expr: str
    meaning: str
    """One sentence for the reference."""
    clears: str
    """When it resolves, for the reference."""
    summary: str
    description: str
    verdict: str = ""
    """What the run is, in a few words; empty where the alert is not about a run that exports its facts."""
    blames: bool = False
    """Its culprit is the root of the newest incident also when that is closed; else only of one that is open."""
    for_s: float = 0.0
    """How long the condition must hold (seconds)."""
    keep_firing_s: float = 0.0
    """How long it goes on firing after the condition went away (seconds): a gap is no end."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels beside the severity, where several rules share a name."""
    cured: str = ""
    """Condition, by the key, under which it ended as it should. It fires once more then, with the value 0."""
    resolved: str = ""
    """How it ended, for the message that it resolved; rendered when it is cured."""

    def to_rule(self, values: Values) -> dict[str, Any]:
        """The rule as data of the rules file."""
        on = f"on ({', '.join(values.group_labels)})"
        ended = f'\nor {on}\n{ENDED}{{alertname="{self.name}"}}' if self.cured else ""
        rule: dict[str, Any] = {"alert": self.name, "expr": f"{self.expr}{ended}"}
        if self.for_s:
            rule["for"] = duration(self.for_s)
        if self.keep_firing_s:
            rule["keep_firing_for"] = duration(self.keep_firing_s)
        whose = {name: _told_owner(name, default, values) for name, default in catalog.DEFAULT_OWNER.items()}
        rule["labels"] = {"severity": _severity(self.severity, values), **whose, **dict(self.labels)}
        rule["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            **(_facts(self.verdict, values, blames=self.blames) if self.verdict else {}),
            **({"resolved": f"{{{{ if not $value }}}}{self.resolved}{{{{ end }}}}"} if self.resolved else {}),
            "runbook_url": f"{values.runbook_base_url.rstrip('/')}/{self.name}.md",
            "dashboard_url": f"{values.dashboard_base_url.rstrip('/')}{DASHBOARD_PATH}?{_variables(values)}",
        }
        return rule


def _facts(verdict: str, values: Values, *, blames: bool) -> dict[str, str]:
    """What a person wants to know of any run that alerts, asked when the alert is evaluated; empty where unknown."""
    on = f"on ({', '.join(values.group_labels)})"
    # the time until now, not until the newest scrape, less what the two clocks differ by
    until_now = f" * -1 + time() + {on} last_over_time({AHEAD}[{duration(values.sample_memory_s)}])"
    age = lookup(f"{RUN_LABEL}:{catalog.LAST_NEW_STEP.name}:max", values, condition=until_now)
    is_open = "" if blames else f" and {on} {RUN_LABEL}:{catalog.INCIDENT_OPENED.name}:max > 0"
    rank = lookup(f"{RUN_LABEL}:{catalog.INCIDENT_ROOT_RANK.name}:max", values, condition=f" >= 0{is_open}")
    where = f'{catalog.RANK_INFO.name}{{run=%q,rank=\\"%.0f\\"}}'
    host = f'query (printf "{where}" $labels.run (. | first | value))'
    return {
        "verdict": verdict,
        "progress": f"{{{{ with {age} }}}}last new step "
        "{{ . | first | value | humanizeDuration }} ago{{ end }}",
        "culprit": f"{{{{ with {rank} }}}}rank {{{{ . | first | value }}}}{{{{ with {host} }}}} on "
        '{{ . | first | label "node" }}{{ end }}{{ end }}',
        "idle": _idle(values),
    }


def _idle(values: Values) -> str:
    """What stands idle, in what there is of it."""
    idle = lookup(IDLE, values)
    have_devices = lookup(SEEN_DEVICES, values, memory_s=values.sample_memory_s, condition=" > 0")
    what = f"{{{{ if {have_devices} }}}}GPU{{{{ else }}}}rank{{{{ end }}}}{{{{ if ne $held 1.0 }}}}s{{{{ end }}}}"
    return f"{{{{ with {idle} }}}}{{{{ $held := . | first | value }}}}{{{{ $held }}}} {what} held{{{{ end }}}}"


def owner(values: Values) -> str:
    """Template text that queries what the run said of itself last, long after its pod is gone."""
    return lookup(OWNER, values, memory_s=values.halted_memory_s, newest=True)


def _told_owner(label: str, default: str, values: Values) -> str:
    # never empty: Prometheus drops an empty label from the alert, and puts the template itself into `ALERTS`
    told = f'{{{{ . | first | label "{label}" }}}}'
    return f"{{{{ with {owner(values)} }}}}{told}{{{{ else }}}}{default}{{{{ end }}}}"


def lookup(
    series: str,
    values: Values,
    *,
    memory_s: float = 0.0,
    condition: str = "",
    matchers: str = "",
    newest: bool = False,
) -> str:
    """Template text that queries `series` of the alert's run; the key's labels are filled in from the alert.

    `newest`: of several series that hold times, the one with the newest.
    """
    wanted = ",".join([*([matchers] if matchers else []), *(f"{label}=%q" for label in values.group_labels)])
    selector = f"{series}{{{wanted}}}"
    if memory_s:
        selector = f"last_over_time({selector}[{duration(memory_s)}])"
    text = f"topk(1, {selector}{condition})" if newest else f"{selector}{condition}"
    text = text.replace('"', '\\"')
    return f'query (printf "{text}" {" ".join(f"$labels.{label}" for label in values.group_labels)})'


def _severity(severity: str, values: Values) -> str:
    if severity != "critical":
        return severity
    priority = '{{ if eq (. | first | label "priority") "dev" }}warning{{ else }}critical{{ end }}'
    return f"{{{{ with {owner(values)} }}}}{priority}{{{{ else }}}}critical{{{{ end }}}}"


def _variables(values: Values) -> str:
    """Variables of the dashboard; one that the scrape does not set is left to the dashboard's default."""
    parts = [f"var-{RUN_LABEL}={{{{ $labels.{RUN_LABEL} }}}}"]
    for label in values.group_labels:
        if label != RUN_LABEL:
            shown = f"&var-{label}={{{{ $labels.{label} }}}}"
            parts.append(f'{{{{ if ne $labels.{label} "{UNKNOWN_LABEL}" }}}}{shown}{{{{ end }}}}')
    return "".join(parts)
