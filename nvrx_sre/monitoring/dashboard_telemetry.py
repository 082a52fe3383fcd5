"""The Telemetry health dashboard: can what the other dashboards show be trusted?

Pure. Must not: spell a metric name of ours.
"""

from __future__ import annotations

from nvrx_sre.monitoring.blocks import RANGE, RATE_WINDOW, course, now
from nvrx_sre.monitoring.panels import BLUE, GREEN, ORANGE, RED, Column, Panel, Row, Step, stat, table, timeseries
from nvrx_sre.monitoring.promql import Query
from nvrx_sre.telemetry import catalog

SCRAPE_DURATION = "scrape_duration_seconds"
SCRAPE_SAMPLES = "scrape_samples_scraped"
SCRAPE_SERIES = (SCRAPE_DURATION, SCRAPE_SAMPLES)
"""Series that Prometheus adds for each target."""
ANCHOR = catalog.LAUNCHER_LOOP
"""A family that every launcher exports: its targets are ours."""


def rows(q: Query) -> list[Row]:
    """All rows in order."""
    return [
        Row(title="Is anything missing?", panels=_summary(q)),
        Row(title="Losses and errors", panels=_losses(q)),
        Row(title="Scrapes", panels=_scrapes(q)),
        Row(title="Launchers and versions", panels=_launchers(q)),
    ]


def _summary(q: Query) -> tuple[Panel, ...]:
    dropped = f"sum({q.gain(catalog.TELEMETRY_DROPPED, 'component', window=RANGE)})"
    errors = f"sum({q.gain(catalog.TELEMETRY_ERRORS, 'component', window=RANGE)})"
    clean = (Step(color=GREEN), Step(color=ORANGE, value=1))
    return (
        stat("Launchers", "Launchers that answer scrapes now.", "none", 5,
             now(f"count({q.series(ANCHOR)})", "launchers"), decimals=0, steps=(Step(color=BLUE),)),
        stat("Dropped", "Items that telemetry dropped in the chosen time range: records, spans, messages.", "none", 5,
             now(dropped, "dropped"), runbooks=("NvrxTelemetryDropping",), decimals=0, steps=clean),
        stat("Errors", "Errors of telemetry in the chosen time range; none of them touched training.", "none", 5,
             now(errors, "errors"), decimals=0, steps=clean),
        stat("Oldest loop", "Time since the slowest leader's loop turned, by its own clock; above 5 s it is stuck.",
             "s", 5, now(f"max({q.clock()} - {q.series(ANCHOR)})", "ago"), runbooks=("NvrxLauncherStuck",), decimals=1,
             steps=(Step(color=GREEN), Step(color=ORANGE, value=20), Step(color=RED, value=60))),
        stat("Journal repairs", "Torn last lines that a launcher cut off a journal at its start.", "none", 4,
             now(f"sum({q.latest(catalog.JOURNAL_REPAIRS)})", "repairs"), decimals=0, steps=clean),
    )  # fmt: skip


def _losses(q: Query) -> tuple[Panel, ...]:
    return (
        timeseries(
            "Dropped by component", "Items dropped by each part of telemetry within the last hour.", "none", 8,
            course(f"sum by (component) ({q.gain(catalog.TELEMETRY_DROPPED, 'component', window='1h')})",
                   "{{component}}"), minimum=0, decimals=0,
        ),
        timeseries(
            "Errors by component", "Errors swallowed by each part of telemetry within the last hour.", "none", 8,
            course(f"sum by (component) ({q.gain(catalog.TELEMETRY_ERRORS, 'component', window='1h')})",
                   "{{component}}"), minimum=0, decimals=0,
        ),
        timeseries(
            "Degradations on record", "Losses and failures that made it into a journal, within the last hour.", "none",
            8, course(f"sum by (component) ({q.gain(catalog.TELEMETRY_DEGRADATIONS, 'component', window='1h')})",
                   "{{component}}"), minimum=0, decimals=0,
        ),
        timeseries(
            "Records", "Records a second that each run folds.", "ops", 8,
            course(q.rate(catalog.TELEMETRY_EVENTS, window=RATE_WINDOW), "{{run}}"), minimum=0,
        ),
        timeseries(
            "Spans", "Spans a second that each run finishes.", "ops", 8,
            course(q.rate(catalog.TELEMETRY_SPANS, window=RATE_WINDOW), "{{run}}"), minimum=0,
        ),
        timeseries(
            "Journal segments", "Files of each run's journal.", "none", 8,
            course(q.latest(catalog.JOURNAL_SEGMENTS), "{{run}}"), minimum=0, decimals=0,
        ),
    )  # fmt: skip


def _scrapes(q: Query) -> tuple[Panel, ...]:
    ours = f"on (job, instance) group_left (run) max by (job, instance, run) ({q.series(ANCHOR)} * 0 + 1)"
    return (
        timeseries(
            "Scrape duration", "How long a scrape of each launcher takes.", "s", 8,
            course(f"max by (job, instance) ({SCRAPE_DURATION}) * {ours}", "{{run}} {{instance}}"), minimum=0,
        ),
        timeseries(
            "Samples a scrape", "Samples that each launcher exposes: a leader at most 1,500, another 40 and 6 a rank.",
            "none", 8,
            course(f"max by (job, instance) ({SCRAPE_SAMPLES}) * {ours}", "{{run}} {{instance}}"), minimum=0,
            decimals=0,
        ),
        timeseries(
            "Scrapes answered", "Scrapes a second that each run's launchers answer: more than one Prometheus asks, or "
            "none does.", "ops", 8,
            course(q.rate(catalog.TELEMETRY_SCRAPES, window=RATE_WINDOW), "{{run}}"), minimum=0,
        ),
    )  # fmt: skip


def _launchers(q: Query) -> tuple[Panel, ...]:
    builds = q.latest(catalog.BUILD_INFO, "version", "catalog", "python", "torch")
    return (
        table(
            "Versions", "Version and metric catalog of each run. A catalog that differs from that of the rules in use "
            "is an alert.", 12,
            [
                Column(title="Run", label="run"),
                Column(title="Version", label="version"),
                Column(title="Catalog", label="catalog"),
                Column(title="Python", label="python"),
                Column(title="Torch", label="torch"),
                Column(title="Builds", expr=builds, hidden=True),
            ],
            runbooks=("NvrxCatalogMismatch",),
        ),
        timeseries(
            "Launchers started, stopped, lost", "Totals of each run: launchers that took an epoch, that stopped in "
            "order, and epochs that ended without.", "none", 12,
            course(q.latest(catalog.LAUNCHER_STARTS), "{{run}} started"),
            course(q.latest(catalog.LAUNCHER_STOPS), "{{run}} stopped"),
            course(q.latest(catalog.LEADERS_LOST), "{{run}} lost"), minimum=0, decimals=0,
        ),
        timeseries(
            "Age of the launcher's loop", "Time since each leader's loop turned, by its own clock at the scrape.", "s",
            12, course(f"{q.clock()} - {q.series(ANCHOR)}", "{{run}} {{instance}}"), minimum=0,
        ),
        timeseries(
            "Time not booked yet", "Wall time that no state holds yet: it grows while nothing is reported.", "s", 12,
            course(q.latest(catalog.OPEN_INTERVAL), "{{run}}"), minimum=0,
        ),
    )  # fmt: skip
