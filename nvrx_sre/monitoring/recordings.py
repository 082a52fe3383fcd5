"""Recording rules: each series that an alert reads, pods aggregated away, with a memory of a missed scrape.

Model: `run:<metric>:max` is the maximum over pods of one run, so that a replaced pod's label neither hides what the
old pod said nor counts it twice (failure case C69). Three kinds:

- `newest`: the greatest value within `sample_memory_s`. For what only grows: counters, entry times.
- `live`: the value of this scrape; a remembered one only where there is none. For what may fall.
- particular ones: the clock, ratios that are taken within one pod before pods are compared, and what telemetry lost:
  each launcher counts its own from 0, so what each gained is added up. A maximum would be that of the launcher which
  lost most, long ago, and hide what another loses now.

Time limits are judged by the run's own clock at its newest scrape (`CLOCK`), on which everything that it exports is
stamped. `time()` would add the age of that scrape and what the two clocks differ by: a gap of three minutes would
page for a run that trains. Without scrapes the clock stands still, and what is said is that scrapes are missing
(`SCRAPED`, in Prometheus' time). Over several nodes only the leader counts: followers export their node alone, so
they neither lend it a heartbeat nor answer in its place.

A label of the key that the scrape does not set becomes `none`, so that it is never empty and no inhibition matches
two runs because both lack it.

Pure. Must not: use `increase`, which extrapolates (C65) and misses a first event (C63).
"""

from __future__ import annotations

from nvrx_sre.monitoring.promql import Query, duration, one_of, recorded
from nvrx_sre.monitoring.rule import AHEAD, OWNER, SEEN_DEVICES, UNKNOWN_LABEL, RecordingRule
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.catalog import DeviceCount, MemoryKind, RunState, SpaceKind
from nvrx_sre.telemetry.metric import RUN_LABEL, Metric

SETTLED_STATES = (RunState.DRAINING, RunState.FINISHED, RunState.FAILED, RunState.PREEMPTED, RunState.HALTED)
"""States in which nobody expects the run to answer. Draining is the last that is seen of a preempted run: its
launcher does not wait for a scrape (DESIGN 5)."""
EXPECTED_STATES = tuple(state for state in RunState if state not in SETTLED_STATES)
"""States in which the run works, or should be started again by its orchestrator."""
ACTIVE_STATES = tuple(state for state in RunState if state is not RunState.HALTED)

MAX_ACTIVE = recorded(catalog.RUN_STATE_ENTERED, "max_active")
MAX_HALTED = recorded(catalog.RUN_STATE_ENTERED, "max_halted")
MAX_EXPECTED = recorded(catalog.RUN_STATE_ENTERED, "max_expected")
MAX_SETTLED = recorded(catalog.RUN_STATE_ENTERED, "max_settled")
CLOCK = recorded(catalog.LAUNCHER_LOOP, "clock")
"""The run's own time: the newest turn of its leader's loop, so that a loop that stands still makes nothing else late;
of a run that only an exporter shows, the exporter's."""
LOOP_AGE = recorded(catalog.LAUNCHER_LOOP, "age")
"""How long the leader's loop had not turned at the scrape, by its own clock; of two leaders, the one that turns."""
SCRAPED = recorded(catalog.LAUNCHER_LOOP, "scraped")
"""When a scrape of the leader last succeeded, in Prometheus' time."""
MAX_SKEW = recorded(catalog.CLOCK_SKEW, "max_abs")
MEMORY_PRESSURE = recorded(catalog.HOST_MEMORY, "max_pressure")
UNFIT_DEVICES = recorded(catalog.DEVICES, "max_unfit")
LOST_ITEMS = recorded(catalog.TELEMETRY_DROPPED, "sum_gained")
LOST_ERRORS = recorded(catalog.TELEMETRY_ERRORS, "sum_gained")
MIN_FREE = recorded(catalog.STORAGE, "min_free")
MIN_FREE_RATIO = recorded(catalog.STORAGE, "min_free_ratio")

_NEWEST: tuple[tuple[Metric, tuple[str, ...]], ...] = (
    (catalog.RUN_STATE_ENTERED, ("state",)),
    (catalog.PHASE_ENTERED, ("phase",)),
    (catalog.LAST_NEW_STEP, ()),
    (catalog.LAST_STEP, ()),
    (catalog.STEP_HIGH_WATER, ()),
    (catalog.GENERATIONS, ()),
    (catalog.LAUNCHER_STARTS, ()),
    (catalog.INCIDENTS, ("verdict",)),
    (catalog.INCIDENTS_DEGRADED, ()),
    (catalog.FAULT_TIMESTAMP, ("fault",)),
    (catalog.NODE_FAULTS, ("node", "suspect")),
    (catalog.FRESH_STARTS, ("progress",)),
    (catalog.SAVES, ("tier", "outcome")),
    (catalog.CHECKPOINT_REJECTED, ("reason",)),
    (catalog.WALL_SECONDS, ()),
    (catalog.TIME_SECONDS, ("state",)),
)
_LIVE: tuple[tuple[Metric, tuple[str, ...]], ...] = (
    (catalog.BUDGET_USED, ("cap",)),
    (catalog.BUDGET_LIMIT, ("cap",)),
    (catalog.INCIDENT_OPENED, ()),
    (catalog.INCIDENT_ROOT_RANK, ()),
    (catalog.OUTAGE_LAST, ()),
    (catalog.ROLLBACK_LAST, ()),
    (catalog.PHASE_DEADLINE, ("phase",)),
    (catalog.LIMIT, ("limit",)),
    (catalog.RENDEZVOUS_NODES, ("state",)),
    (catalog.WORLD_SIZE, ()),
    (catalog.WORLD_SIZE_CONFIGURED, ()),
    (catalog.STANDBY_READY, ()),
    (catalog.STANDBYS_CONFIGURED, ()),
    (catalog.CHECKPOINT_CAPTURED, ("tier",)),
    (catalog.CHECKPOINT_STEP, ("tier",)),
    (catalog.CHECKPOINT_INTERVAL, ()),
    (catalog.CHECKPOINT_WRITE_SECONDS, ()),
    (catalog.CHECKPOINT_SATURATION, ()),
    (catalog.SAVE_STARTED, ()),
    (catalog.CHECKPOINT_SIZE, ()),
    (catalog.STEP_SECONDS, ()),
    (catalog.STEP_REFERENCE, ()),
    (catalog.RANK_LATENESS, ("rank",)),
    (catalog.RANK_SUMMARIES[catalog.RANK_LATENESS.name][1], ()),
)
_GROWS = frozenset(metric.name for metric, _ in _NEWEST if metric.name.endswith("_total"))


def filled(expr: str, values: Values) -> str:
    """`expr` with `none` for every label of the key that is empty; `run` is on every series of ours."""
    for label in values.group_labels:
        if label != RUN_LABEL:
            expr = f'label_replace({expr}, "{label}", "{UNKNOWN_LABEL}", "{label}", "")'
    return expr


def recording_rules(values: Values) -> list[RecordingRule]:
    """All recording rules, in file order: a rule reads only what stands before it."""
    query = Query(group_labels=values.group_labels)
    memory_s = values.sample_memory_s
    rules = [
        _rule(metric, "max", query.latest(metric, *by, memory_s=memory_s), values, by=by) for metric, by in _NEWEST
    ]
    rules += [_rule(metric, "max", query.live(metric, *by, memory_s=memory_s), values, by=by) for metric, by in _LIVE]
    rules += [*_clocks(query, values), *_states(query, values), *_pods(query, values)]
    return [*rules, *_losses(query, values), *_nodes(query, values)]


def _rule(metric: Metric, operation: str, expr: str, values: Values, *, by: tuple[str, ...] = ()) -> RecordingRule:
    grows = operation == "max" and metric.name in _GROWS
    return RecordingRule(
        name=recorded(metric, operation), expr=filled(expr, values), metric=metric, labels=by, cumulative=grows
    )


def _clocks(query: Query, values: Values) -> list[RecordingRule]:
    """Times of a run and of its scrapes. Only a leader has both a loop and the families of the job."""
    loop, job, keys = query.series(catalog.LAUNCHER_LOOP), query.series(catalog.WALL_SECONDS), query.keys()
    memory = duration(values.sample_memory_s)
    remembered = f"last_over_time({loop}[{memory}]) and last_over_time({job}[{memory}])"
    clock = "\nor\n".join(f"max by {keys} ({each})" for each in (f"{loop} and {job}", remembered, query.clock()))
    ahead = f"max by {keys} ({query.ahead()} and {loop})\nor\nmax by {keys} ({query.ahead()})"
    age, scraped = f"min by {keys} ({query.clock()} - {loop})", f"max by {keys} (timestamp({loop}) and {job})"
    recordings = (
        (CLOCK, clock, catalog.LAUNCHER_LOOP, "The run's own time: the newest turn of its leader's loop."),
        (LOOP_AGE, age, catalog.LAUNCHER_LOOP, "How long the leader's loop had not turned at the scrape (seconds)."),
        (SCRAPED, scraped, catalog.LAUNCHER_LOOP, "When a scrape of the leader last succeeded, in Prometheus' time."),
        (AHEAD, ahead, catalog.CLOCK_SKEW, "By how much the run's clock is ahead of Prometheus' (seconds)."),
    )
    return [
        RecordingRule(name=name, expr=filled(expr, values), metric=metric, meaning=meaning)
        for name, expr, metric, meaning in recordings
    ]


def _states(query: Query, values: Values) -> list[RecordingRule]:
    entered, memory_s = catalog.RUN_STATE_ENTERED, values.sample_memory_s
    groups = (("max_active", ACTIVE_STATES), ("max_expected", EXPECTED_STATES), ("max_settled", SETTLED_STATES))
    rules = [
        _rule(entered, operation, query.latest(entered, memory_s=memory_s, state=states), values)
        for operation, states in groups
    ]
    # sparse on purpose: only runs that were halted have them, which makes a week's memory cheap
    halted = query.latest(entered, memory_s=memory_s, state=RunState.HALTED)
    reasons = query.latest(catalog.HALTED_TIMESTAMP, "reason", memory_s=memory_s)
    return [
        *rules,
        _rule(entered, "max_halted", f"{halted} > 0", values),
        _rule(catalog.HALTED_TIMESTAMP, "max", f"{reasons} > 0", values, by=("reason",)),
    ]


def _pods(query: Query, values: Values) -> list[RecordingRule]:
    """With which catalog a run runs, and whose it is."""
    info, build = catalog.RUN_INFO, catalog.BUILD_INFO
    told = (*catalog.DEFAULT_OWNER, "node")
    # a time, so that of two launchers the newer one's word is taken, and not forgotten with its pod
    owner = f"max by {query.keys(*told)} (timestamp({query.series(info)}))"
    meaning = "When the run was last seen with these owner, priority and leader's node."
    # what a live pod says ends the memory of any other catalog, as after an upgrade
    remembered = query.latest(build, "catalog", memory_s=values.sample_memory_s)
    builds = f"{query.latest(build, 'catalog')}\nor on {query.keys()}\n{remembered}"
    return [
        RecordingRule(name=OWNER, expr=filled(owner, values), metric=info, labels=told, meaning=meaning),
        _rule(build, "max", builds, values, by=("catalog",)),
    ]


def _losses(query: Query, values: Values) -> list[RecordingRule]:
    """What telemetry lost within `telemetry_window_s`, over all launchers of a run."""
    memory, window = duration(values.sample_memory_s), duration(values.telemetry_window_s)
    rules = []
    for name, metric, what in (
        (LOST_ITEMS, catalog.TELEMETRY_DROPPED, "Items dropped"),
        (LOST_ERRORS, catalog.TELEMETRY_ERRORS, "Errors swallowed"),
    ):
        series = query.series(metric)
        now = f"last_over_time({series}[{memory}])"
        # a count that was higher is that of the launcher before, under the same address: this one began at 0
        before = f"(last_over_time({series}[{memory}] offset {window}) <= {now}\nor\n0 * {now})"
        expr = filled(f"sum by {query.keys('component')} ({now} - {before})", values)
        meaning = f"{what} within `telemetry_window_s`: what each launcher gained, added up."
        rules.append(RecordingRule(name=name, expr=expr, metric=metric, meaning=meaning, labels=("component",)))
    return rules


def _nodes(query: Query, values: Values) -> list[RecordingRule]:
    """Ratios within one pod, the worst pod of the run."""
    keys = query.keys()

    def memory(kind: MemoryKind) -> str:
        return query.series(catalog.HOST_MEMORY, "", kind=kind)

    def space(kind: SpaceKind) -> str:
        return query.series(catalog.STORAGE, "", kind=kind)

    slots = f"ignoring (kind) {memory(MemoryKind.HOT_SLOTS)}"
    pressure = f"({memory(MemoryKind.USED)} - {slots})\n/ ignoring (kind)\n(({memory(MemoryKind.LIMIT)} - {slots}) > 0)"
    free_ratio = f"{space(SpaceKind.FREE)} / ignoring (kind) ({space(SpaceKind.SIZE)} > 0)"
    seen = f"max by {keys} ({query.series(catalog.DEVICES, state=DeviceCount.SEEN)})"
    sized = f"({space(SpaceKind.FREE)} and ignoring (kind) {space(SpaceKind.SIZE)} > 0)"
    return [
        _rule(catalog.CLOCK_SKEW, "max_abs", f"max by {keys} (abs({query.series(catalog.CLOCK_SKEW)}))", values),
        _rule(catalog.HOST_MEMORY, "max_pressure", f"max by {keys} ({pressure})", values),
        _rule(catalog.DEVICES, "max_unfit", f"max by {keys} ({query.series(catalog.DEVICES, state='unfit')})", values),
        RecordingRule(name=SEEN_DEVICES, expr=filled(seen, values), metric=catalog.DEVICES),
        _rule(catalog.STORAGE, "min_free_ratio", f"min by {keys} ({free_ratio})", values),
        _rule(catalog.STORAGE, "min_free", f"min by {keys} ({sized})", values),
    ]


class Readings:
    """How alerts read recordings: every text that an alert needs more than once."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self._query = Query(group_labels=values.group_labels)
        self.on = f"on {self._query.keys()}"
        self.by = f"by {self._query.keys()}"

    def on_keys(self, *more: str) -> str:
        """Match by the key and `more`."""
        return f"on {self._query.keys(*more)}"

    def by_keys(self, *more: str) -> str:
        """Group by the key and `more`."""
        return f"by {self._query.keys(*more)}"

    def of(self, metric: Metric, **labels: str | tuple[str, ...]) -> str:
        """The recorded maximum of `metric`, selected by closed label values, with the labels it was recorded with."""
        self._query.series(metric, "", **labels)  # refuses a label or a value that the catalog does not have
        chosen = {name: (value,) if isinstance(value, str) else value for name, value in labels.items()}
        matchers = ",".join(f"{name}{one_of([str(item) for item in value])}" for name, value in chosen.items())
        return f"{recorded(metric)}{{{matchers}}}" if matchers else recorded(metric)

    def top(self, metric: Metric, **labels: str | tuple[str, ...]) -> str:
        """The same with no label but the key's."""
        return f"max {self.by} ({self.of(metric, **labels)})"

    def gained(self, metric: Metric, window_s: float, **labels: str | tuple[str, ...]) -> str:
        """What a counter gained within `window_s`: whole numbers, and a run not known before began at 0."""
        series = self.of(metric, **labels)
        memory = duration(self.values.missing_memory_s)
        return f"({series} - (last_over_time({series}[{memory}] offset {duration(window_s)}) or 0 * {series}))"

    def deadlines(self, *phases: str) -> str:
        """Sum of the deadlines of `phases`."""
        return f"sum {self.by} ({self.of(catalog.PHASE_DEADLINE, phase=phases)})"

    def lately(self, series: str, memory_s: float = 0.0) -> str:
        """A recording without a memory of its own, with one."""
        return f"last_over_time({series}[{duration(memory_s or self.values.sample_memory_s)}])"

    def age(self, stamp: str) -> str:
        """Seconds from a stamp of the run, by the key, to its own time as of the newest scrape."""
        return f"({CLOCK} - {self.on} {stamp})"

    def ages(self, stamps: str) -> str:
        """The same of stamps with more labels than the key."""
        return f"({CLOCK} - {self.on} group_right () ({stamps}))"

    @property
    def silence(self) -> str:
        """Seconds since a scrape of the run last succeeded, by Prometheus' clock alone."""
        return f"(time() - {self.lately(SCRAPED, self.values.missing_memory_s)})"

    @property
    def expected(self) -> str:
        """Clause: the run has not ended."""
        return f"and {self.on}\n({MAX_EXPECTED} > {self.on} {MAX_SETTLED})"
