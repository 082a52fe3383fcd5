"""Alertmanager's configuration: routes by severity, grouping by the aggregation key, receivers.

Model: one group a run, so that everything about a run is one notification thread and one pager incident. Critical
goes to `page`, warnings to `ticket`, info nowhere; what carries `priority="dev"` never pages. The watchdog that
always fires goes to `deadman`, a service that calls when it no longer hears it. The same function renders the
shipped example (PagerDuty, Slack, the texts of `notices`) and the configuration of `MonitoringStack`, where every
receiver posts to one webhook.

Secrets are files that the example names; none is in the configuration. Pure; thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_sre.monitoring.inhibition import inhibit_rules
from nvrx_sre.monitoring.notices import FACTS, template
from nvrx_sre.monitoring.promql import duration
from nvrx_sre.monitoring.values import Values

PAGE, TICKET, DEADMAN, NONE = "page", "ticket", "deadman", "none"
RECEIVERS = (PAGE, TICKET, DEADMAN)
"""Receivers that send something."""
WATCHDOG = "NvrxWatchdog"
TEMPLATES_GLOB = "/etc/alertmanager/nvrx-sre.tmpl"
"""Where the example expects alerts/nvrx-sre.tmpl."""
SECRETS = "/etc/alertmanager/secrets"
"""Where the example expects its secret files."""
GROUP_WAIT_S = 10.0
"""Long enough for two alerts of one evaluation to meet, short beside a person's way to the desk."""
GROUP_INTERVAL_S = 300.0
"""Alertmanager's own default."""
REPEAT_INTERVAL_S = 14_400.0
"""Alertmanager's own default: four hours."""
DEADMAN_INTERVAL_S = 60.0
"""How often the watchdog is passed on: the service may call after `DEADMAN_TIMEOUT_S` of silence."""
DEADMAN_GROUP_INTERVAL_S = 10.0
"""How often Alertmanager asks whether a beat is due. At the beat's own interval, an answer of 'not yet' by a moment
would make the next one come after two."""
DEADMAN_TIMEOUT_S = 180.0
"""After how much silence the service should call: more than two beats, so that one lost on the road wakes nobody."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long Alertmanager collects and waits. Seconds."""

    group_wait_s: float = GROUP_WAIT_S
    """Before the first notification of a group."""
    group_interval_s: float = GROUP_INTERVAL_S
    """Between notifications of a group that changed."""


def alertmanager_config(
    *, webhook_url: str | None = None, timing: Timing | None = None, values: Values | None = None
) -> dict[str, Any]:
    """alertmanager.yml as data.

    With `webhook_url` every receiver posts to it plus its own name, which needs neither templates nor secrets;
    without it, the example for a site.
    """
    values = values or Values()
    keys = list(values.group_labels)
    receivers = _example_receivers(values) if webhook_url is None else _webhook_receivers(webhook_url)
    head = {"templates": [TEMPLATES_GLOB]} if webhook_url is None else {}
    return {
        **head,
        "route": _route(keys, timing or Timing()),
        "inhibit_rules": inhibit_rules(keys),
        "receivers": [*receivers, {"name": NONE}],
    }


def _route(keys: Sequence[str], timing: Timing) -> dict[str, Any]:
    deadman = {
        "receiver": DEADMAN,
        "matchers": [f'alertname="{WATCHDOG}"'],
        "group_wait": "0s",
        "group_interval": duration(DEADMAN_GROUP_INTERVAL_S),
        "repeat_interval": duration(DEADMAN_INTERVAL_S),
    }
    return {
        "receiver": TICKET,
        "group_by": list(keys),
        "group_wait": duration(timing.group_wait_s),
        "group_interval": duration(timing.group_interval_s),
        "repeat_interval": duration(REPEAT_INTERVAL_S),
        "routes": [
            deadman,
            {"receiver": NONE, "matchers": ['severity="info"']},
            {"receiver": TICKET, "matchers": ['priority="dev"']},
            {"receiver": PAGE, "matchers": ['severity="critical"']},
        ],
    }


def _webhook_receivers(url: str) -> list[dict[str, Any]]:
    return [{"name": name, "webhook_configs": [{"url": f"{url}{name}", "send_resolved": True}]} for name in RECEIVERS]


def _example_receivers(values: Values) -> list[dict[str, Any]]:
    pagerduty = {
        "routing_key_file": f"{SECRETS}/pagerduty-routing-key",
        "send_resolved": True,
        "severity": template("nvrx.pagerduty.severity"),
        "description": template("nvrx.title"),
        "client": "nvrx-sre",
        "client_url": template("nvrx.dashboard"),
        "details": {
            **{annotation: template(f"nvrx.{annotation}") for _, annotation in FACTS},
            "resolved": template("nvrx.resolved"),
            "text": template("nvrx.text"),
        },
        "links": [
            {"href": template("nvrx.runbook"), "text": "Runbook"},
            {"href": template("nvrx.dashboard"), "text": "Dashboard"},
            {"href": template("nvrx.silence"), "text": "Silence"},
        ],
    }
    slack = {
        "api_url_file": f"{SECRETS}/slack-webhook-url",
        "channel": values.slack_channel,
        "send_resolved": True,
        "color": template("nvrx.slack.color"),
        "title": template("nvrx.title"),
        "title_link": template("nvrx.dashboard"),
        "text": template("nvrx.slack.text"),
    }
    deadman = {"url": values.deadman_url, "send_resolved": False}
    return [
        {"name": PAGE, "pagerduty_configs": [pagerduty]},
        {"name": TICKET, "slack_configs": [slack]},
        {"name": DEADMAN, "webhook_configs": [deadman]},
    ]
