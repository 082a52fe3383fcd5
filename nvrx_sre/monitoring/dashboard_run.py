"""The Run dashboard: is this run making progress, and if not, why.

Model: the top row answers without scrolling, in words and in numbers beside their limits; below it the ledger,
training, retry budgets, recovery and checkpoints of the same run. The top row remembers what a dead launcher said
last, the rest shows what is live.

Pure. Must not: spell a metric name.
"""

from __future__ import annotations

from nvrx_sre.monitoring.blocks import PERCENTAGE, RANGE, RATE_WINDOW, course, now, percentiles
from nvrx_sre.monitoring.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Column,
    Override,
    Panel,
    Row,
    Step,
    bars,
    stat,
    table,
    timeline,
    timeseries,
)
from nvrx_sre.monitoring.promql import Query
from nvrx_sre.monitoring.situation import MEMORY_S, WORDS, Signals, memory, situation
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Metric

LEDGER_WINDOW = "10m"
"""A state is booked when it ends: the window is longer than most of them last."""
TOP_WIDTH = 3
TOP_HEIGHT = 5
IDENTITY_STEP = "15s"
"""Resolution at which the first sight of a configuration or version is looked for."""
NOTHING_CHANGED: tuple[tuple[float, str, str], ...] = (
    (0, "nothing", GREEN),
    (1, "configuration", ORANGE),
    (2, "version", ORANGE),
    (3, "configuration and version", ORANGE),
)


def rows(q: Query) -> list[Row]:
    """All rows in order."""
    signals = Signals(q=q)
    return [
        Row(title="Is it making progress?", panels=(*_verdict(q, signals), *_incident(q, signals), *_risk(q, signals))),
        Row(title="Where the time goes", panels=_time(q)),
        Row(title="Training", panels=_training(q)),
        Row(title="Retry budgets and incidents", panels=_budgets(q)),
        Row(title="Recovery and world", panels=_recovery(q)),
        Row(title="Checkpoints", panels=_checkpoints(q)),
    ]


def _verdict(q: Query, signals: Signals) -> tuple[Panel, ...]:
    return (
        stat(
            "Verdict", "The run's situation in a word. Crash loop: attempts without progress have reached the run's "
            "own limit. Flapping: recoveries with progress, too often. Stuck in rendezvous: half its deadline is gone. "
            "Stalled: no step for longer than the phase's deadline allows, and nothing acted.", "none", TOP_WIDTH,
            now(situation(q), "verdict"),
            runbooks=("NvrxCrashLooping", "NvrxFlapping", "NvrxRendezvousStuck", "NvrxRunStalled", "NvrxRunHalted"),
            height=TOP_HEIGHT, mappings=WORDS, color_background=True,
        ),
        stat(
            "State", "What the run is doing: the state that it entered last, and for how long it has been in it.", "s",
            TOP_WIDTH, now(q.shown_age(signals.current), "{{state}}"), height=TOP_HEIGHT,
            text_mode="value_and_name", steps=(Step(color=BLUE),), decimals=0,
        ),
        stat(
            "New steps now?", "Time since a step was committed that had never been committed before (redone steps do "
            "not count), beside the progress deadline of the phase in force.", "s", TOP_WIDTH,
            now(q.shown_age(signals.last_new_step), "since the last"), now(signals.deadline, "limit"),
            runbooks=("NvrxRunStalled", "NvrxStartupOverdue"), height=TOP_HEIGHT, steps=(Step(color=BLUE),), decimals=0,
            overrides=(Override(name="limit", color=GREY),),
        ),
    )  # fmt: skip


def _incident(q: Query, signals: Signals) -> tuple[Panel, ...]:
    return (
        stat(
            "Open incident", "Fault class, root rank and host of the open incident, and its age; a root that is not "
            "known (a hang of all ranks) is rank -1.", "s", TOP_WIDTH,
            now(_open_incident(q, signals), "{{fault}}, rank {{rank}} {{node}}"),
            runbooks=("NvrxRecoveryOverdue",),
            height=TOP_HEIGHT,
            text_mode="value_and_name", steps=(Step(color=ORANGE),), no_value="none", decimals=0,
        ),
        stat(
            "Budget left", "The retry budget with the least left, as a share of its limit. Attempts without progress "
            "use it up; at 0 the run stops.", PERCENTAGE, TOP_WIDTH, now(_budget_left(q), "{{cap}}"),
            runbooks=("NvrxRetryBudgetLow", "NvrxRetryCapBreached"),
            height=TOP_HEIGHT,
            text_mode="value_and_name", steps=(Step(color=RED), Step(color=ORANGE, value=0.01),
                                               Step(color=GREEN, value=0.5)), decimals=0,
        ),
    )  # fmt: skip


def _risk(q: Query, signals: Signals) -> tuple[Panel, ...]:
    durable = q.latest(catalog.CHECKPOINT_CAPTURED, memory_s=MEMORY_S, tier="durable")
    good = f"({q.live(catalog.CHECKPOINT_STEP, memory_s=MEMORY_S, tier='durable')} >= 0)"
    at_risk = f"{q.latest(catalog.STEP_HIGH_WATER, memory_s=MEMORY_S)} - {good}"
    return (
        stat(
            "Last good checkpoint", "Age of the newest durable state, counted from its capture (before the first save: "
            "from the run's start), and the steps that would be trained again if the node were lost now.", "s",
            TOP_WIDTH, now(q.shown_age(durable), "age"), now(at_risk, "steps at risk"),
            runbooks=("NvrxCheckpointStale",),
            height=TOP_HEIGHT,
            steps=(Step(color=BLUE),), no_value="none yet", decimals=0,
            overrides=(Override(name="steps at risk", unit="none"),),
        ),
        stat(
            "Idle GPUs", "Ranks that train nothing new: all of them while the run is in trouble, else those that the "
            "world lacks; and what that has cost since the newest new step, in GPU-hours.", "none", TOP_WIDTH,
            now(_idle(q, signals), "GPUs idle"), now(_idle_hours(q, signals), "GPU-hours"), height=TOP_HEIGHT,
            steps=(Step(color=GREEN), Step(color=ORANGE, value=0.001)),
            overrides=(Override(name="GPU-hours", decimals=2),),
        ),
        stat(
            "What changed", "What is different from when the newest new step was committed, within a day: "
            "the configuration (its digest), or a version (of nvrx-sre, Python, torch).", "none", TOP_WIDTH,
            now(_changed(q, signals), "changed"), height=TOP_HEIGHT, mappings=NOTHING_CHANGED,
        ),
    )  # fmt: skip


def _open_incident(q: Query, signals: Signals) -> str:
    """Age of the open incident, labelled with fault, root rank and, where it is known, the rank's node.

    `count_values by` with more than one label loses labels in a range query (Prometheus 2.42); `without ()` does not.
    """
    keys = q.keys()
    opened = q.latest(catalog.INCIDENT_OUTCOMES, "fault", memory_s=MEMORY_S, outcome="opened")
    closed = q.latest(catalog.INCIDENT_OUTCOMES, "fault", memory_s=MEMORY_S, outcome="recovered")
    failed = q.latest(catalog.INCIDENT_OUTCOMES, "fault", memory_s=MEMORY_S, outcome="exhausted")
    faults = f"topk by {keys} (1, ({opened} - {closed} - {failed}) > 0)"
    rank = f'count_values without () ("rank", {q.latest(catalog.INCIDENT_ROOT_RANK, memory_s=MEMORY_S)})'
    places = q.latest(catalog.RANK_INFO, "rank", "node", memory_s=MEMORY_S)
    placed = f"{rank} * on {q.keys('rank')} group_left (node) {places}"
    root = f"({placed} or {rank} unless on {keys} {placed})"
    aged = f"{faults} * 0 + on {keys} group_left () {q.shown_age(signals.opened)}"
    return f"({aged}) * on {keys} group_left (rank, node) {root}"


def _budget_left(q: Query) -> str:
    """The least share of a cap that is left, labelled with the cap; one series for 'all full'."""
    limit = f"({q.latest(catalog.BUDGET_LIMIT, 'cap', memory_s=MEMORY_S)} > 0)"
    used = f"({q.live(catalog.BUDGET_USED, 'cap', memory_s=MEMORY_S)})"
    left = f"1 - {used} / {limit}"
    least = f"bottomk by {q.keys()} (1, ({left}) < 1)"
    full = f'label_replace(min by {q.keys()} ({left}), "cap", "of every cap", "", "")'
    return f"{least} or on {q.keys()} {full}"


def _trouble(q: Query, signals: Signals) -> str:
    """1 while the run trains nothing new: an incident is open, it is halted, or its deadline has passed; else 0."""
    overdue = f"({q.shown_age(signals.last_new_step)} > {signals.deadline})"
    ended = signals.within("finished", "preempted")
    return f"(({signals.opened} or {signals.halted} or {overdue}) * 0 + 1 unless {ended})"


def _idle(q: Query, signals: Signals) -> str:
    configured = q.latest(catalog.WORLD_SIZE_CONFIGURED, memory_s=MEMORY_S)
    missing = f"{configured} - ({q.live(catalog.WORLD_SIZE, memory_s=MEMORY_S)})"
    return f"{configured} * {_trouble(q, signals)} or {missing} and {signals.within('training')} or {configured} * 0"


def _idle_hours(q: Query, signals: Signals) -> str:
    configured = q.latest(catalog.WORLD_SIZE_CONFIGURED, memory_s=MEMORY_S)
    lost = f"{configured} * {_trouble(q, signals)} * {q.shown_age(signals.last_new_step)} / 3600"
    return f"{lost} or {configured} * 0"


def _changed(q: Query, signals: Signals) -> str:
    """Bit 0: configuration, bit 1: version. Changed is what has company within a day and came after the last new
    step."""
    configuration = _is_new(q, signals, catalog.RUN_INFO, "config")
    version = _is_new(q, signals, catalog.BUILD_INFO, "version", "python", "torch")
    return f"{configuration} + 2 * {version}"


def _is_new(q: Query, signals: Signals, info: Metric, *labels: str) -> str:
    one, keys = q.keys(*labels), q.keys()
    seen = f"timestamp({q.series(info)})[{memory()}:{IDENTITY_STEP}]"
    first = f"min by {one} (min_over_time({seen}))"
    last = f"max by {one} (max_over_time({seen}))"
    current = f"max by {keys} ({first} and on {one} ({last} == on {keys} group_left () max by {keys} ({last})))"
    return f"(count by {keys} ({first}) > bool 1) * ({current} > bool {q.seen(signals.last_new_step)})"


def _time(q: Query) -> tuple[Panel, ...]:
    wall = f"on {q.keys()} group_left () ({q.gain(catalog.WALL_SECONDS, window=LEDGER_WINDOW)} > 0)"
    newest = f"on {q.keys()} group_left () {q.latest(catalog.RUN_STATE_ENTERED)}"
    return (
        timeseries(
            "Ledger", "Share of the last ten minutes of wall time by state. The job is in exactly one state at any "
            "instant; a gap below 100 % is time that is not booked yet.", PERCENTAGE, 14,
            course(f"{q.gain(catalog.TIME_SECONDS, 'state', window=LEDGER_WINDOW)} / {wall}", "{{state}}"),
            runbooks=("NvrxGoodputBurn",), stacked=True, minimum=0, maximum=1,
        ),
        timeline(
            "State over time", "The state that the run entered last, one strip a state.", 10,
            course(f"({q.latest(catalog.RUN_STATE_ENTERED, 'state')} == {newest}) * 0 + 1", "{{state}}"),
            steps=(Step(color=BLUE),),
        ),
        timeseries(
            "Goodput so far", "Ratios of the whole run: training, durable (may fall), infrastructure, effective (sees "
            "a shrunk world and slow steps), checkpoint efficiency.", PERCENTAGE, 14,
            course(q.latest(catalog.GOODPUT_RATIO, "kind"), "{{kind}}"), minimum=0, maximum=1,
        ),
        bars(
            "Wall time so far", "Seconds of the whole run by state.", "s", 10,
            now(f"{q.latest(catalog.TIME_SECONDS, 'state')} > 0", "{{state}}"),
        ),
    )  # fmt: skip


def _training(q: Query) -> tuple[Panel, ...]:
    return (
        timeseries(
            "Steps", "Steps a second: new ones above the highest step ever committed, redone ones at or below it.",
            "ops", 8, course(q.rate(catalog.STEPS, "kind", window=RATE_WINDOW), "{{kind}}"), stacked=True, minimum=0,
        ),
        timeseries(
            "Loss", "Loss of the newest committed step, mean over all ranks (nats a token).", "none", 8,
            course(q.latest(catalog.LOSS), "loss"),
        ),
        timeseries(
            "Throughput", "Tokens a second of new and of redone steps.", "short", 8,
            course(q.rate(catalog.TOKENS, "kind", window=RATE_WINDOW), "{{kind}} tokens/s"), minimum=0,
        ),
        timeseries(
            "Step time", "Mean time of a new step beside the run's own reference: the median of its first 200 steps "
            "after warm-up at the configured world.", "s", 8,
            course(q.latest(catalog.STEP_SECONDS), "step"),
            course(f"{q.latest(catalog.STEP_REFERENCE)} > 0", "reference"),
            runbooks=("NvrxStepTimeRegressed",),
            minimum=0,
            overrides=(Override(name="reference", color=GREY, dashed=True),),
        ),
        timeseries(
            "Steps so far", "Committed steps of the whole run by kind, and the highest step ever committed.", "none", 8,
            course(q.latest(catalog.STEPS, "kind"), "{{kind}}"),
            course(q.latest(catalog.STEP_HIGH_WATER), "high water"), minimum=0, decimals=0,
        ),
        timeseries(
            "Re-executed steps that differ", "Steps trained again whose loss was not the first one's: recovery has "
            "changed the training.", "none", 8,
            course(q.latest(catalog.REPLAY_DIVERGENCES), "divergences"), minimum=0, decimals=0,
        ),
    )  # fmt: skip


def _budgets(q: Query) -> tuple[Panel, ...]:
    used, limit = q.latest(catalog.BUDGET_USED, "cap"), q.latest(catalog.BUDGET_LIMIT, "cap")
    return (
        timeseries(
            "Retry budgets used", "Attempts counted against each cap, as a share of its limit; at 100 % a cap stops "
            "the run.", PERCENTAGE, 10, course(f"{used} / ({limit} > 0)", "{{cap}}"), minimum=0, maximum=1,
        ),
        table(
            "Budgets", "Every retry cap: attempts counted, and the limit in force for this run.", 6,
            [
                Column(title="Cap", label="cap"),
                Column(title="Used", expr=used, decimals=0),
                Column(title="Limit", expr=limit, decimals=0),
            ],
            sort_by="Used",
        ),
        timeseries(
            "Faults", "Root faults by class within the last hour.", "none", 8,
            course(f"{q.gain(catalog.FAULTS, 'fault', window='1h')} > 0", "{{fault}}"), minimum=0, decimals=0,
            no_value="no fault",
        ),
        table(
            "Incidents", "Incidents of the whole run by the fault class that opened them.", 12,
            [
                Column(title="Fault", label="fault"),
                Column(title="Opened", expr=f"{_outcomes(q, 'opened')} > 0", decimals=0),
                Column(title="Recovered", expr=_had_incidents(q, "recovered"), decimals=0),
                Column(title="Exhausted", expr=_had_incidents(q, "exhausted"), decimals=0),
            ],
            sort_by="Opened", no_value="no incident",
        ),
        timeseries(
            "Restarts without progress", "Restarts decided since the run last made progress, beside the limit of "
            "attempts in a row. Progress sets it back to 0.", "none", 12,
            course(q.latest(catalog.RESTARTS_SINCE_PROGRESS), "restarts"),
            course(q.latest(catalog.BUDGET_LIMIT, cap="consecutive"), "limit"), minimum=0, decimals=0,
            overrides=(Override(name="limit", color=RED, dashed=True),),
        ),
    )  # fmt: skip


def _outcomes(q: Query, outcome: str) -> str:
    return q.latest(catalog.INCIDENT_OUTCOMES, "fault", outcome=outcome)


def _had_incidents(q: Query, outcome: str) -> str:
    return f"{_outcomes(q, outcome)} and {_outcomes(q, 'opened')} > 0"


def _recovery(q: Query) -> tuple[Panel, ...]:
    return (
        percentiles(
            q, "Outages", "Last step committed before the fault until the first step above it on the slowest rank, by "
            "the layer that recovered.", catalog.OUTAGE_SECONDS, catalog.OUTAGE_MAX, "layer",
        ),
        percentiles(
            q, "Detection", "Evidence of a fault until it was detected, by detector.",
            catalog.DETECTION_SECONDS, catalog.DETECTION_MAX, "detector",
        ),
        table(
            "Restarts", "Restart decisions of the chosen time range by layer, and how they ended.", 8,
            [
                Column(title="Layer", label="layer"),
                Column(title="Outcome", label="outcome"),
                Column(title="Restarts", decimals=0,
                       expr=f"{q.gain(catalog.RESTARTS, 'layer', 'outcome', window=RANGE)} > 0"),
            ],
            sort_by="Restarts", no_value="no restart",
        ),
        timeseries(
            "World", "Ranks of the newest generation beside what was asked for and the least it may go on with, and "
            "standbys that are ready.", "none", 8,
            course(q.latest(catalog.WORLD_SIZE), "ranks"),
            course(q.latest(catalog.WORLD_SIZE_CONFIGURED), "configured"),
            course(q.latest(catalog.WORLD_SIZE_MIN), "least"),
            course(q.latest(catalog.STANDBY_READY), "standbys ready"),
            runbooks=("NvrxWorldShrunk",),
            minimum=0, decimals=0,
        ),
        timeseries(
            "Rendezvous", "Nodes that the formation expects, that have joined, that are missing.", "none", 8,
            course(q.latest(catalog.RENDEZVOUS_NODES, "state"), "{{state}}"), minimum=0, decimals=0,
        ),
    )  # fmt: skip


def _checkpoints(q: Query) -> tuple[Panel, ...]:
    return (
        timeseries(
            "Checkpoint age", "Age of the newest restorable state of each tier, beside the interval that is expected "
            "of the durable one.", "s", 8,
            course(q.age(q.latest(catalog.CHECKPOINT_CAPTURED, "tier")), "{{tier}} age"),
            course(f"{q.latest(catalog.CHECKPOINT_INTERVAL)} > 0", "expected interval"), minimum=0,
            overrides=(Override(name="expected interval", color=GREY, dashed=True),),
        ),
        timeseries(
            "Saturation", "Write time of a durable save over the expected interval: above 1 saves are skipped.",
            PERCENTAGE, 8, course(q.latest(catalog.CHECKPOINT_SATURATION), "saturation"), minimum=0,
        ),
        table(
            "Saves", "Due saves of the chosen time range by tier and outcome.", 8,
            [
                Column(title="Tier", label="tier"),
                Column(title="Outcome", label="outcome"),
                Column(title="Saves", expr=q.gain(catalog.SAVES, "tier", "outcome", window=RANGE), decimals=0),
            ],
            sort_by="Saves",
        ),
    )  # fmt: skip
