"""Alertmanager's configuration: routes by severity, grouping and inhibition by the aggregation key.

Model: one group a run, so that everything about a run is one notification thread and one pager incident.
`INHIBITIONS` lists which alert silences which; the labels of the key must be equal, so nothing crosses runs.
The same function renders the shipped example and the configuration of `MonitoringStack`.

Thread safety: pure.
"""

from __future__ import annotations

from typing import Any

from nvrx_sre.monitoring.promql import duration
from nvrx_sre.monitoring.values import Values

INHIBITIONS: tuple[tuple[str, tuple[str, ...]], ...] = (("NvrxRunHalted", ("NvrxCrashLooping",)),)
"""(source, targets): while the source fires for a run, its targets send nothing for that run."""

EXAMPLE_WEBHOOK_URL = "https://pager.example/nvrx-sre/"
GROUP_WAIT_S = 10.0
"""Long enough for two alerts of one evaluation to meet, short beside a person's way to the desk."""
GROUP_INTERVAL_S = 300.0
"""Alertmanager's own default."""
REPEAT_INTERVAL_S = 14_400.0
"""Alertmanager's own default: four hours."""


def alertmanager_config(
    *,
    webhook_url: str = EXAMPLE_WEBHOOK_URL,
    group_wait_s: float = GROUP_WAIT_S,
    group_interval_s: float = GROUP_INTERVAL_S,
    values: Values | None = None,
) -> dict[str, Any]:
    """alertmanager.yml as data: receivers `page` and `ticket` post to `webhook_url` + their name."""
    keys = list((values or Values()).group_labels)
    return {
        "route": {
            "receiver": "ticket",
            "group_by": keys,
            "group_wait": duration(group_wait_s),
            "group_interval": duration(group_interval_s),
            "repeat_interval": duration(REPEAT_INTERVAL_S),
            "routes": [
                {"receiver": "page", "matchers": ['severity="critical"']},
                {"receiver": "none", "matchers": ['severity="info"']},
            ],
        },
        "inhibit_rules": [
            {
                "source_matchers": [f'alertname="{source}"'],
                "target_matchers": [f'alertname=~"{"|".join(targets)}"'],
                "equal": keys,
            }
            for source, targets in INHIBITIONS
        ],
        "receivers": [
            {"name": name, "webhook_configs": [{"url": f"{webhook_url}{name}", "send_resolved": True}]}
            for name in ("page", "ticket")
        ]
        + [{"name": "none"}],
    }
