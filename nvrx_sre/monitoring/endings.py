"""How a page ended: one evaluation more, in which the text of its resolution is made.

Model: a resolved message carries what the annotations said when the alert last fired, and while it fires nobody knows
how it will end. So a page whose cause is cured fires once more, with the value 0, and its text is rendered from the
samples of that moment. Two recordings make it one evaluation and not more: what fires and is not cured (after the
alerts), and what fired so at the evaluation before and is cured now (before them).

Invariants: only what was firing is ever in it, so that a pending alert does not ripen by its cure; labels of the alert
are kept, so that it is the same alert. Pure. Must not: keep an alert firing for longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable

from nvrx_sre.monitoring.recordings import Readings
from nvrx_sre.monitoring.rule import ENDED, AlertRule, RecordingRule

FIRED = "run:alerts:firing"
"""Recorded: pages that fire and whose cause is not cured."""
ALERT_LABELS = ("alertname", "phase", "reason")
"""Labels of pages beside the key and the severity."""


def ending_recordings(read: Readings, alerts: Iterable[AlertRule]) -> list[RecordingRule]:
    """Both recordings over all alerts that say when they are cured."""
    told = [rule for rule in alerts if rule.cured]
    ended = "\nor\n".join(f'0 * {FIRED}{{alertname="{rule.name}"}}\nand {read.on}\n({rule.cured})' for rule in told)
    firing = "\nor\n".join(
        f"max {read.by_keys(*ALERT_LABELS)} ({_fires(rule)})\nunless {read.on}\n({rule.cured})" for rule in told
    )
    return [
        RecordingRule(
            name=ENDED, expr=ended, labels=ALERT_LABELS, meaning="Pages that fired until now and are cured, as 0."
        ),
        RecordingRule(
            name=FIRED,
            expr=firing,
            labels=ALERT_LABELS,
            meaning="Pages that fire and are not cured.",
            after_alerts=True,
        ),
    ]


def _fires(rule: AlertRule) -> str:
    return f'ALERTS{{alertname="{rule.name}",alertstate="firing"}}'
