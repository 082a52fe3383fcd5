"""Which alert silences which, so that one event pages once.

Model: a ladder of causes. While an alert fires for a run, those below it say the same thing in other words and send
nothing. A target that is missing or a launcher that is stuck makes the same signs look bad, because nothing new is
known of the run; they never hide that a run has halted.

Invariants: nothing crosses runs: the labels of the key must be equal, and none of them empty. Pure; thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SIGNS = (
    "NvrxRunStalled",
    "NvrxCheckpointStale",
    "NvrxGoodputBurn",
    "NvrxStandbyMissing",
    "NvrxWorldShrunk",
    "NvrxSlowRank",
)
"""What a run that is being recovered, loops, or has stopped shows as well."""
STUCK = "NvrxRendezvousStuck"
"""Why a recovery is overdue, where it is; within a crash loop one attempt among others."""
BLIND = ("NvrxTargetMissing", "NvrxLauncherStuck")
"""Nothing new is known of the run: its signs are old."""

INHIBITIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("NvrxRunHalted", ("NvrxCrashLooping", "NvrxRecoveryOverdue", *SIGNS)),
    ("NvrxCrashLooping", ("NvrxRecoveryOverdue", STUCK, *SIGNS)),
    (STUCK, ("NvrxRecoveryOverdue",)),
    ("NvrxRecoveryOverdue", SIGNS),
    *((source, SIGNS) for source in BLIND),
)
"""(source, targets): while the source fires for a run, its targets send nothing for that run. No later source has an
earlier one as its target."""


def told_before(alert: str) -> int:
    """Sort key for rules: targets come before what inhibits them.

    Alerts are sent one by one. What ends at one evaluation must end for the target first, or a notification in between
    tells of a target that nothing inhibits any more.
    """
    sources = [source for source, _ in INHIBITIONS]
    return -sources.index(alert) if alert in sources else -len(sources)


def sources_of(alert: str) -> list[str]:
    """What silences `alert`, most definite first."""
    return [source for source, targets in INHIBITIONS if alert in targets]


def inhibit_rules(keys: Sequence[str]) -> list[dict[str, Any]]:
    """`inhibit_rules` of Alertmanager's configuration for the labels of the key.

    A source must carry every label of the key: Alertmanager takes two missing labels for equal ones.
    """
    return [
        {
            "source_matchers": [f'alertname="{source}"', *(f'{key}=~".+"' for key in keys)],
            "target_matchers": [f'alertname=~"{"|".join(targets)}"'],
            "equal": list(keys),
        }
        for source, targets in INHIBITIONS
    ]
