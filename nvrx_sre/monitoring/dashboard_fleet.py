"""The Fleet dashboard: all runs, worst first; what was lost, to what, at what price, and on which nodes.

Pure. Must not: spell a metric name.
"""

from __future__ import annotations

from nvrx_sre.monitoring.blocks import PERCENTAGE, RANGE, course, now
from nvrx_sre.monitoring.panels import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    Column,
    Link,
    Panel,
    Row,
    Step,
    bars,
    stat,
    table,
    timeseries,
)
from nvrx_sre.monitoring.promql import Query
from nvrx_sre.monitoring.situation import MEMORY_S, WORDS, Signals, Situation, situation
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import RUN_LABEL

CULPRIT_WINDOW = "30d"
PRICE = "$price"
"""Variable: price of one GPU-hour."""
SECONDS_AN_HOUR = 3600
MAX_ROWS = 20


def rows(q: Query, run_url: str) -> list[Row]:
    """All rows in order; `run_url` is the Run dashboard's address."""
    return [
        Row(title="Which run needs somebody?", panels=(*_summary(q), _runs(q, run_url))),
        Row(title="What was lost, to what", panels=_lost(q)),
        Row(title="Which nodes are at fault", panels=_culprits(q)),
    ]


def _summary(q: Query) -> tuple[Panel, ...]:
    signals = Signals(q=q)
    number = f"({situation(q)})"
    bad = f"({number} >= {Situation.SILENT:d})"
    configured = q.latest(catalog.WORLD_SIZE_CONFIGURED, memory_s=MEMORY_S)
    idle = f"sum({configured} and on {q.keys()} ({bad} or {signals.opened}))"
    lost = f"sum({q.gain(catalog.GPU_SECONDS, 'state', window=RANGE, state=_lost_states())}) / {SECONDS_AN_HOUR}"
    return (
        stat("Training", "Runs that train.", "none", 4,
             now(f"count({number} == {Situation.TRAINING:d}) or vector(0)", "training")),
        stat("In trouble", "Runs that are silent, stalled, stuck in rendezvous, in a crash loop, failed or halted.",
             "none", 5, now(f"count({bad}) or vector(0)", "in trouble"),
             runbooks=("NvrxTargetMissing", "NvrxLauncherStuck"), color_background=True,
             steps=(Step(color=GREEN), Step(color=RED, value=1))),
        stat("Recovering", "Runs that recover from a fault now, or have recovered too often of late.", "none", 5,
             now(f"count({number} >= {Situation.RECOVERING:d} < {Situation.SILENT:d}) or vector(0)", "recovering"),
             steps=(Step(color=GREEN), Step(color=ORANGE, value=1))),
        stat("GPUs idle", "Ranks of runs that are in trouble or recover now.", "none", 5,
             now(f"{idle} or vector(0)", "GPUs"), steps=(Step(color=GREEN), Step(color=ORANGE, value=1))),
        stat("GPU-hours lost", "GPU-hours of the chosen time range that trained nothing new (suspension left out).",
             "none", 5, now(lost, "GPU-hours"), decimals=1, steps=(Step(color=BLUE),)),
    )  # fmt: skip


def _runs(q: Query, run_url: str) -> Panel:
    signals = Signals(q=q)
    used = f"({q.live(catalog.BUDGET_USED, 'cap', memory_s=MEMORY_S)})"
    limit = f"({q.latest(catalog.BUDGET_LIMIT, 'cap', memory_s=MEMORY_S)} > 0)"
    age = q.shown_age(q.latest(catalog.CHECKPOINT_CAPTURED, memory_s=MEMORY_S, tier="durable"))
    goodput = q.latest(catalog.GOODPUT_RATIO, memory_s=MEMORY_S, kind="training")
    variables = "&".join(f"var-{label}=${{__data.fields.{label.capitalize()}}}" for label in q.group_labels)
    keys = [
        Column(title=label.capitalize(), label=label, link=_link(run_url, variables) if label == RUN_LABEL else None)
        for label in sorted(q.group_labels, key=lambda label: label != RUN_LABEL)
    ]
    return table(
        "Runs, worst first", "One line a run; a click on its name opens it. The verdict is the one of the Run "
        "dashboard; what a run that is gone said last is remembered for a day.", 24,
        [
            *keys,
            Column(title="Verdict", expr=situation(q), mappings=WORDS),
            Column(title="Since new step", expr=q.shown_age(signals.last_new_step), unit="s", decimals=0),
            Column(title="Budget left", expr=f"min by {q.keys()} (1 - {used} / {limit})", unit=PERCENTAGE, decimals=0,
                   steps=(Step(color=RED), Step(color=ORANGE, value=0.01), Step(color=GREEN, value=0.5))),
            Column(title="Checkpoint age", expr=age, unit="s", decimals=0),
            Column(title="Goodput", expr=goodput, unit=PERCENTAGE, decimals=1),
            Column(title="Ranks", expr=q.latest(catalog.WORLD_SIZE, memory_s=MEMORY_S), decimals=0),
            Column(title="Team", label="team"),
            Column(title="Priority", label="priority"),
            Column(title="Owner", expr=q.latest(catalog.RUN_INFO, "team", "priority", memory_s=MEMORY_S), hidden=True),
        ],
        height=10, sort_by="Verdict",
    )  # fmt: skip


def _link(url: str, variables: str) -> Link:
    return Link(title="Open the run", url=f"{url}?{variables}&${{__url_time_range}}")


def _lost_states() -> tuple[str, ...]:
    """Ledger states that are neither training nor suspension."""
    states = next(label.values for label in catalog.GPU_SECONDS.labels if label.name == "state")
    return tuple(state for state in states if state not in ("new", "suspended"))


def _lost(q: Query) -> tuple[Panel, ...]:
    gained = q.gain(catalog.GPU_SECONDS, "state", window=RANGE, state=_lost_states())
    hours = f"sum by (state) ({gained}) / {SECONDS_AN_HOUR}"
    by_run = f"sum by {q.keys()} ({gained}) / {SECONDS_AN_HOUR}"
    ratio = q.latest(catalog.GOODPUT_RATIO, kind="training")
    return (
        bars("GPU-hours lost by cause", "GPU-hours of the chosen time range that trained nothing new, by the ledger's "
             "state.", "none", 8, now(f"sort_desc({hours} > 0)", "{{state}}"), decimals=2, no_value="nothing lost"),
        bars("Cost by cause", "The same at the price of a GPU-hour that stands above, in its currency.", "none", 8,
             now(f"sort_desc({hours} * {PRICE} > 0)", "{{state}}"), decimals=2, no_value="nothing lost"),
        table(
            "GPU-hours lost by run", "The runs that lost the most in the chosen time range.", 8,
            [
                Column(title="Run", label=RUN_LABEL),
                Column(title="GPU-hours", expr=f"topk({MAX_ROWS}, {by_run})", decimals=2),
                Column(title="Cost", expr=f"topk({MAX_ROWS}, {by_run}) * {PRICE}", decimals=2),
            ],
            sort_by="GPU-hours",
        ),
        timeseries("Goodput", "Training goodput of each run so far.", PERCENTAGE, 12,
                   course(ratio, "{{run}}"), minimum=0, maximum=1),
        bars("Faults by class", "Root faults of all runs in the chosen time range.", "none", 12,
             now(f"sort_desc(sum by (fault) ({q.gain(catalog.FAULTS, 'fault', window=RANGE)}) > 0)", "{{fault}}"),
             decimals=0, no_value="no fault"),
    )  # fmt: skip


def _culprits(q: Query) -> tuple[Panel, ...]:
    faults = q.gain(catalog.NODE_FAULTS, "node", window=CULPRIT_WINDOW, suspect="node")
    return (
        table(
            "Culprit nodes", "Nodes by root faults that speak against a node (it was lost, a rank was killed or hung, "
            "a device failed; no exception of a program), of all runs within 30 days, and how many runs they struck: "
            "one run is a suspect job, several are a suspect node.", 12,
            [
                Column(title="Node", label="node"),
                Column(title="Faults", expr=f"topk({MAX_ROWS}, sum by (node) ({faults}) > 0)", decimals=0),
                Column(title="Runs", expr=f"count by (node) ({faults} > 0)", decimals=0),
            ],
            sort_by="Faults", no_value="no fault with a known node",
        ),
        bars(
            "Caps reached", "Retry caps that stopped a run in the chosen time range.", "none", 12,
            now(f"sum by (cap) ({q.gain(catalog.CAPS_REACHED, 'cap', window=RANGE)}) > 0", "{{cap}}"),
            runbooks=("NvrxRunHalted",), decimals=0, no_value="none",
        ),
    )  # fmt: skip
