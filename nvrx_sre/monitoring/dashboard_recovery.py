"""The Recovery dashboard: how well faults are survived, by layer, detector and fault class.

Pure. Must not: spell a metric name.
"""

from __future__ import annotations

from nvrx_sre.monitoring.blocks import PERCENTAGE, RANGE, course, distribution, now, percentiles
from nvrx_sre.monitoring.panels import BLUE, GREEN, ORANGE, RED, Column, Panel, Row, Step, stat, table, timeseries
from nvrx_sre.monitoring.promql import Query
from nvrx_sre.telemetry import catalog

WHOLE = 0
RECOVERY_STATES = ("lost_step", "detect", "teardown", "rendezvous", "rebuild", "load", "backoff", "redo")
"""Ledger states that a recovery passes through."""


def rows(q: Query) -> list[Row]:
    """All rows in order."""
    return [
        Row(title="Are faults survived?", panels=(*_summary(q), *_classes(q))),
        Row(title="How long it takes", panels=_times(q)),
        Row(title="What it costs", panels=_costs(q)),
        Row(title="How it is done", panels=_ways(q)),
    ]


def _outcome(q: Query, outcome: str) -> str:
    return q.gain(catalog.INCIDENT_OUTCOMES, "fault", window=RANGE, outcome=outcome)


def _summary(q: Query) -> tuple[Panel, ...]:
    opened = f"sum({q.gain(catalog.INCIDENT_OUTCOMES, window=RANGE, outcome='opened')})"
    recovered = f"sum({_outcome(q, 'recovered')})"
    exhausted = f"sum({_outcome(q, 'exhausted')})"
    return (
        stat("Incidents", "Incidents that opened in the chosen time range.", "none", 6,
             now(f"sum({_outcome(q, 'opened')})", "opened"), decimals=WHOLE, steps=(Step(color=BLUE),)),
        stat("Open", "Incidents that have not ended: they count as open, not as recovered.", "none", 6,
             now(f"count({q.latest(catalog.INCIDENT_OPENED)} > 0) or vector(0)", "open"), decimals=WHOLE,
             steps=(Step(color=GREEN), Step(color=ORANGE, value=1))),
        stat("Success rate", "Recovered incidents of all that ended in the chosen time range.", PERCENTAGE, 6,
             now(f"{recovered} / (({recovered} + {exhausted}) > 0)", "recovered"), decimals=1,
             steps=(Step(color=RED), Step(color=ORANGE, value=0.9), Step(color=GREEN, value=0.99)),
             no_value="none ended"),
        stat("Attempts an incident", "Root faults a chosen time range, over the incidents that opened in it: 1 is a "
             "cure at the first attempt.", "none", 6,
             now(f"sum({q.gain(catalog.FAULTS, 'fault', window=RANGE)}) / ({opened} > 0)", "attempts"), decimals=2,
             steps=(Step(color=GREEN), Step(color=ORANGE, value=1.5)), no_value="no incident"),
    )  # fmt: skip


def _classes(q: Query) -> tuple[Panel, ...]:
    opened, recovered, exhausted = (f"sum by (fault) ({_outcome(q, name)})" for name in
                                    ("opened", "recovered", "exhausted"))  # fmt: skip
    total = {
        name: f"sum by (fault) ({q.latest(catalog.INCIDENT_OUTCOMES, 'fault', outcome=name)})"
        for name in ("opened", "recovered", "exhausted")
    }
    still_open = f"{total['opened']} - {total['recovered']} - {total['exhausted']}"
    seen = f"and {opened} > 0"
    ago = f"min by (fault) ({q.age(q.latest(catalog.FAULT_TIMESTAMP, 'fault') + ' > 0')})"
    return (
        table(
            "By fault class", "Incidents of the chosen time range by the class of the fault that opened them; open "
            "ones are those open now. Newest: how long ago a fault of the class was last detected.", 14,
            [
                Column(title="Fault", label="fault"),
                Column(title="Opened", expr=f"{opened} > 0", decimals=WHOLE),
                Column(title="Recovered", expr=f"{recovered} {seen}", decimals=WHOLE),
                Column(title="Exhausted", expr=f"{exhausted} {seen}", decimals=WHOLE),
                Column(title="Open", expr=f"{still_open} {seen}", decimals=WHOLE),
                Column(title="Success rate", expr=f"{recovered} / (({recovered} + {exhausted}) > 0)", unit=PERCENTAGE,
                       decimals=1),
                Column(title="Newest", expr=f"{ago} {seen}", unit="s", decimals=WHOLE),
            ],
            sort_by="Opened", no_value="no incident",
        ),
        table(
            "Restarts", "Restart decisions of the chosen time range by layer, and how they ended.", 10,
            [
                Column(title="Layer", label="layer"),
                Column(title="Outcome", label="outcome"),
                Column(title="Restarts", decimals=WHOLE,
                       expr=f"sum by (layer, outcome) ({q.gain(catalog.RESTARTS, 'layer', 'outcome', window=RANGE)}) "
                       "> 0"),
            ],
            sort_by="Restarts", no_value="no restart",
        ),
    )  # fmt: skip


def _times(q: Query) -> tuple[Panel, ...]:
    layers = next(label.values for label in catalog.OUTAGE_SECONDS.labels if label.name == "layer")
    words = {"in_process": "in process", "worker": "of a worker", "job": "of the job"}
    return (
        *(
            distribution(
                q, f"Outages {words[layer]}", "Outages of the chosen time range by their length (upper bound of the "
                "bucket, seconds), where this layer recovered.", 8, catalog.OUTAGE_SECONDS, layer=layer,
            )
            for layer in layers
        ),
        percentiles(
            q, "Outages", "Last step committed before the fault until the first step above it on the slowest rank, by "
            "layer and run.", catalog.OUTAGE_SECONDS, catalog.OUTAGE_MAX, "layer",
        ),
        percentiles(
            q, "Detection", "Evidence of a fault until it was detected, by detector and run.",
            catalog.DETECTION_SECONDS, catalog.DETECTION_MAX, "detector",
        ),
        distribution(
            q, "Detection times", "Faults of the chosen time range by the time until they were detected (upper bound "
            "of the bucket, seconds).", 12, catalog.DETECTION_SECONDS,
        ),
        timeseries(
            "Longest outage so far", "Largest outage of each run by layer; open incidents are not in it.", "s", 12,
            course(f"{q.latest(catalog.OUTAGE_MAX, 'layer')} > 0", "{{run}} {{layer}}"), minimum=0,
            no_value="no outage",
        ),
        timeseries(
            "Last outage", "Outage of the newest incident that recovered, 0 before the first.", "s", 12,
            course(q.latest(catalog.OUTAGE_LAST), "{{run}}"), minimum=0,
        ),
        timeseries(
            "Last rollback", "Steps that the newest recovered incident threw back, 0 before the first.", "none", 12,
            course(q.latest(catalog.ROLLBACK_LAST), "{{run}}"), minimum=0, decimals=WHOLE,
        ),
    )  # fmt: skip


def _costs(q: Query) -> tuple[Panel, ...]:
    spent = q.gain(catalog.TIME_SECONDS, "state", window=RANGE, state=RECOVERY_STATES)
    return (
        distribution(
            q, "Rollback", "Incidents of the chosen time range by the steps that they threw back.", 8,
            catalog.ROLLBACK_STEPS,
        ),
        percentiles(
            q, "Rollback in steps", "High water mark at the first fault minus the deepest step restored.",
            catalog.ROLLBACK_STEPS, catalog.ROLLBACK_MAX,
        ),
        table(
            "Where recovery time goes", "Wall time of the chosen time range in the states of a recovery, redone steps "
            "included.", 4,
            [
                Column(title="State", label="state"),
                Column(title="Time", expr=f"sum by (state) ({spent}) > 0", unit="s", decimals=1),
            ],
            sort_by="Time", no_value="none",
        ),
    )  # fmt: skip


def _ways(q: Query) -> tuple[Panel, ...]:
    verdicts = f"sum by (verdict) ({q.gain(catalog.INCIDENTS, 'verdict', window=RANGE)})"
    return (
        table(
            "Verdicts", "Incidents of the chosen time range that reached each verdict.", 8,
            [
                Column(title="Verdict", label="verdict"),
                Column(title="Incidents", expr=verdicts, decimals=WHOLE),
            ],
            sort_by="Incidents",
        ),
        table(
            "Restored from", "Where generations of the chosen time range took their state from.", 8,
            [
                Column(title="Tier", label="tier"),
                Column(title="Restores", expr=f"sum by (tier) ({q.gain(catalog.RESTORES, 'tier', window=RANGE)})",
                       decimals=WHOLE),
            ],
            sort_by="Restores",
        ),
        table(
            "Ranks that left a generation", "Kept their process, or had it killed, in the chosen time range.", 8,
            [
                Column(title="Outcome", label="outcome"),
                Column(title="Ranks", expr=f"sum by (outcome) ({q.gain(catalog.TEARDOWNS, 'outcome', window=RANGE)})",
                       decimals=WHOLE),
            ],
            sort_by="Ranks",
        ),
        timeseries(
            "Formations, replacements, exclusions", "Formations of the group, ranks moved to another process, devices "
            "excluded: totals of the runs chosen.", "none", 12,
            course(f"sum({q.latest(catalog.GENERATIONS)})", "generations"),
            course(f"sum({q.latest(catalog.RANK_REPLACEMENTS)})", "replacements"),
            course(f"sum({q.latest(catalog.RANKS_EXCLUDED)})", "exclusions"),
            course(f"sum({q.latest(catalog.PROGRESS_RESUMED)})", "progress resumed"),
            course(f"sum({q.latest(catalog.INCIDENTS_DEGRADED)})", "recovered degraded"),
            runbooks=("NvrxRecoveredDegraded", "NvrxRepeatedDeviceFault"),
            minimum=0, decimals=WHOLE,
        ),
        timeseries(
            "Starts, requests, nodes", "Starts by a launcher, what operators and orchestrators asked for, nodes that "
            "came and went, restarts whose decision was not on disk in time: totals of the runs chosen.", "none", 12,
            course(f"sum by (kind) ({q.latest(catalog.RUN_STARTS, 'kind')})", "starts: {{kind}}"),
            course(f"sum({q.latest(catalog.BUDGET_RESETS)})", "budgets refilled"),
            course(f"sum({q.latest(catalog.HALT_REQUESTS)})", "halts asked for"),
            course(f"sum({q.latest(catalog.PREEMPTIONS)})", "preemptions"),
            course(f"sum({q.latest(catalog.NODES_JOINED)})", "nodes joined"),
            course(f"sum({q.latest(catalog.NODES_LOST)})", "nodes lost"),
            course(f"sum({q.latest(catalog.DECISIONS_UNRECORDED)})", "decisions not recorded"),
            minimum=0, decimals=WHOLE,
        ),
    )  # fmt: skip
