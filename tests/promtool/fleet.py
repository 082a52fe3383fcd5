"""Runs told in series: what a run would export, from a short history, with levels that a story may bend.

`Run` turns (time, what) into the series that the rules read. Many runs lie side by side in one promtool case, so every
story is also a test that runs do not disturb each other. `fires` says when which alert fires; at any other time, and
for every other alert, the run must be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nvrx_sre.monitoring.promtool import Case, Expectation, Series
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog

KEY = ("cluster", "namespace", "run")
END = float("inf")
Level = float | Callable[[float], float | None]
Span = tuple[float, float]
"""From the first moment at which the alert must fire to the last; a little later it must be silent again."""

LIMITS = {"same_fingerprint": 3, "consecutive": 3, "window": 5, "nonfinite": 1, "device": 3, "startup": 3}
DEADLINES = {
    "teardown": 10,
    "init": 300,
    "rendezvous": 60,
    "rebuild": 300,
    "load": 600,
    "first_step": 300,
    "step": 60,
    "data": 120,
    "evaluate": 1800,
    "save": 600,
    "finalize": 300,
}
STATE_OF = {"start": "starting", "fault": "recovering"} | dict.fromkeys(
    ("train", "redo", "progress", "advance", "stop", "flap"), "training"
)
PHASE_OF = {
    "start": "init",
    "rendezvous": "rendezvous",
    "restoring": "load",
    "fault": "teardown",
    "recovering": "teardown",
} | dict.fromkeys(("train", "redo", "progress", "advance", "stop", "flap"), "step")
STEPPING = ("train", "redo", "progress", "advance", "flap")
NEW = ("train", "progress", "advance", "flap")
FINAL = ("halted", "finished", "failed", "preempted")
INTERVAL_S = 300.0
SCRAPE_S = 15
HORIZON_S = 7_200
"""A silence that lasts until then has no end."""
SILENT = "NvrxScrapesMissing"


@dataclass
class Run:
    """One run. `events`: (time, what), in order.

    What: `start` (a launcher), `train`, `fault` (an attempt without progress), `redo`, `advance` (new steps, not safe
    yet), `progress` (which refills the budgets but the window), `stop` (steps cease, nothing is detected), `reset`,
    or a run state. `flap` is progress that closes an incident as flapping. `pods`: (name, from, to).
    """

    name: str
    events: Sequence[tuple[float, str]]
    fires: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    pods: Sequence[tuple[str, float, float]] = (("pod-0", 0, END),)
    caps: tuple[str, ...] = ("same_fingerprint", "consecutive", "window")
    levels: Mapping[tuple[str, ...], Level] = field(default_factory=dict)
    """(metric, label values..) -> what it exports instead."""
    lost: tuple[float, float, int] = (0, 0, 1)
    """Between two times only every n-th scrape of 15 s succeeds; 0: of three scrapes two."""
    priority: str = "prod"
    team: str = "none"
    namespace: str = "ml"
    cluster: str | None = "c1"
    ahead_s: float = 0.0
    """By how much the clock of the run's hosts is ahead of Prometheus'."""
    followers: Sequence[tuple[str, float, float]] = ()
    """Pods of other nodes: they export their node alone, and their loops turn."""

    def __post_init__(self) -> None:
        silences = list(self._silences(Values().scrapes_missing_s))
        if silences:
            self.fires = {**self.fires, SILENT: silences}

    def _silences(self, limit_s: float) -> Iterable[Span]:
        """When it is said that scrapes are missing: it was not answered for so long, and not known to have ended."""
        seen = [at for at in range(0, HORIZON_S, SCRAPE_S) if self._answers(at)]
        after_all = END if seen and seen[-1] < HORIZON_S - 2 * limit_s else HORIZON_S
        for last, back in pairwise([*seen, after_all]):
            past = self._past(last)
            is_over = not past or past[-1][1] in (*FINAL, "draining")
            if back - last > limit_s + SCRAPE_S and not is_over:
                yield last + SCRAPE_S + limit_s, back

    def _answers(self, now: float) -> bool:
        return any(begin <= now < end for _, begin, end in self.pods) and not self._is_lost(now)

    def _is_lost(self, now: float) -> bool:
        lost_from, lost_to, nth = self.lost
        index = int(now // SCRAPE_S)
        return bool(lost_from <= now < lost_to and (index % nth if nth else index % 3 == 2))

    def labels(self) -> dict[str, str]:
        """Labels of the key as the alert shows them."""
        return {"cluster": self.cluster or "none", "namespace": self.namespace, "run": self.name}

    def _past(self, now: float) -> list[tuple[float, str]]:
        return [event for event in self.events if event[0] <= now]

    def _count(self, now: float, *kinds: str) -> float:
        return sum(what in kinds for _, what in self._past(now))

    def _flow(self, now: float, kinds: Iterable[str]) -> tuple[float, float]:
        """(seconds spent in `kinds` so far, when the last of them ended)."""
        total, last, begun = 0.0, None, None
        first = self.events[0][0] if self.events else 0.0
        for at, what in [*self._past(now), (now, "")]:
            if begun is not None:
                total += at - begun
                last = at
            begun = at if what in kinds else None
        return total, first if last is None else last

    def used(self, cap: str, now: float) -> float:
        """Attempts counted against a cap."""
        count = 0
        for _, what in self._past(now):
            refills = what == "reset" or (what in ("progress", "flap") and cap != "window")
            count = 0 if refills else count + (what == "fault" and cap in self.caps)
        return count

    def entered(self, names: Mapping[str, str], wanted: str, now: float) -> float:
        """When the run last entered a state or a phase."""
        return max((at for at, what in self._past(now) if names.get(what, what) == wanted), default=0.0)

    def opened(self, now: float) -> float:
        """When the open incident began."""
        since = 0.0
        for at, what in self._past(now):
            if what == "fault":
                since = since or at
            elif what in ("progress", "flap", *FINAL):
                since = 0.0
        return since

    def _captured(self, now: float) -> float:
        newest = self._flow(now, NEW)[1]
        return max(newest // INTERVAL_S * INTERVAL_S, self.events[0][0])

    def _values(self) -> dict[tuple[str, ...], Level]:
        """(metric, label values..) -> level, before the story bends it."""
        name = {metric: metric.name for metric in catalog.CATALOG.values()}
        values: dict[tuple[str, ...], Level] = {}
        for cap, limit in LIMITS.items():
            values[name[catalog.BUDGET_USED], cap] = lambda now, cap=cap: self.used(cap, now)
            values[name[catalog.BUDGET_LIMIT], cap] = limit
        values[name[catalog.BUDGET_USED], "unknown_progress"] = 0
        for state in catalog.RunState:
            values[name[catalog.RUN_STATE_ENTERED], state] = lambda now, state=state: self.entered(STATE_OF, state, now)
        for phase, limit in DEADLINES.items():
            values[name[catalog.PHASE_ENTERED], phase] = lambda now, phase=phase: self.entered(PHASE_OF, phase, now)
            values[name[catalog.PHASE_DEADLINE], phase] = limit
        for reason in ("cap", "operator"):
            cause = "halted" if reason == "cap" else ""
            values[name[catalog.HALTED_TIMESTAMP], reason] = lambda now, cause=cause: (
                self.entered(STATE_OF, cause, now) if self._past(now) and self._past(now)[-1][1] == "halted" else 0.0
            )
        for node in ("node-1", "node-2"):
            for suspect in catalog.Suspect:
                values[name[catalog.NODE_FAULTS], node, suspect] = 0
        for rank in "0123":
            values[name[catalog.RANK_LATENESS], rank] = 0.01
        for component in ("journal", "otlp"):
            values[name[catalog.TELEMETRY_DROPPED], component] = 0
            values[name[catalog.TELEMETRY_ERRORS], component] = 0
        for kind, size in (("limit", 100e9), ("used", 60e9), ("hot_slots", 40e9)):
            values[name[catalog.HOST_MEMORY], kind] = size
        for kind, size in (("size", 1e12), ("free", 5e11)):
            values[name[catalog.STORAGE], kind] = size
        for state, number in (("seen", 4), ("unfit", 0), ("throttled", 0)):
            values[name[catalog.DEVICES], state] = number
        for state in ("new", "evaluate", "suspended", "halted"):
            values[name[catalog.TIME_SECONDS], state] = 0
        values |= {
            (name[catalog.TIME_SECONDS], "new"): lambda now: self._flow(now, NEW)[0],
            (name[catalog.RUN_START_TIMESTAMP],): self.events[0][0],
            (name[catalog.WALL_SECONDS],): lambda now: max(0.0, now - self.events[0][0]),
            (name[catalog.LAST_NEW_STEP],): lambda now: self._flow(now, NEW)[1],
            (name[catalog.LAST_STEP],): lambda now: self._flow(now, STEPPING)[1],
            (name[catalog.STEP_HIGH_WATER],): lambda now: self._flow(now, NEW)[0],
            (name[catalog.LAUNCHER_LOOP],): lambda now: now,
            (name[catalog.GENERATIONS],): lambda now: self._count(now, "train", "redo"),
            (name[catalog.LAUNCHER_STARTS],): lambda now: self._count(now, "start"),
            (name[catalog.INCIDENT_OPENED],): self.opened,
            (name[catalog.INCIDENT_ROOT_RANK],): 3,
            (name[catalog.INCIDENTS], "flapping"): lambda now: self._count(now, "flap"),
            (name[catalog.INCIDENTS_DEGRADED],): 0,
            (name[catalog.FRESH_STARTS], "lost"): 0,
            (name[catalog.FRESH_STARTS], "none"): 1,
            (name[catalog.SAVES], "durable", "failed"): 0,
            (name[catalog.SAVES], "hot", "failed"): 7,
            (name[catalog.CHECKPOINT_REJECTED], "checksum"): 0,
            (name[catalog.CHECKPOINT_CAPTURED], "durable"): self._captured,
            (name[catalog.CHECKPOINT_INTERVAL],): INTERVAL_S,
            (name[catalog.CHECKPOINT_WRITE_SECONDS],): 10,
            (name[catalog.CHECKPOINT_SATURATION],): 0.03,
            (name[catalog.CHECKPOINT_SIZE],): 1e9,
            (name[catalog.LIMIT], "telemetry.loop_unhealthy_s"): 5,
            (name[catalog.LIMIT], "deadlines.final_drain_s"): 300,
            (name[catalog.SAVE_STARTED],): 0,
            (name[catalog.RENDEZVOUS_NODES], "missing"): 0,
            (name[catalog.WORLD_SIZE],): 4,
            (name[catalog.WORLD_SIZE_CONFIGURED],): 4,
            (name[catalog.STANDBY_READY],): 1,
            (name[catalog.STANDBYS_CONFIGURED],): 1,
            (name[catalog.STEP_SECONDS],): 1,
            (name[catalog.STEP_REFERENCE],): 1,
            (name[catalog.CLOCK_SKEW],): 0,
            (name[catalog.BUILD_INFO], catalog.VERSION): 1,
            (name[catalog.RUN_INFO], self.team, self.priority, "host-7"): 1,
        }
        return {**values, **self.levels}

    def series(self) -> list[Series]:
        """Everything that the run exports, from each of its pods."""
        found = []
        for (metric, *values), level in self._values().items():
            of_node = catalog.CATALOG[metric].scope is catalog.Scope.NODE
            told = [*((pod, level) for pod in self.pods)]
            if of_node:
                told += [(pod, _turning if metric == catalog.LAUNCHER_LOOP.name else level) for pod in self.followers]
            for (pod, begin, end), exported in told:
                found.append(self._series(metric, values, pod, self._scraped(metric, exported, begin, end)))
        return found

    def _series(self, metric: str, values: Sequence[str], pod: str, level: Level) -> Series:
        given = {"cluster": self.cluster} if self.cluster else {}
        base = {"__name__": metric, **given, "namespace": self.namespace, "run": self.name, "pod": pod}
        return Series(labels={**base, **dict(zip(LABELS.get(metric, ()), values, strict=True))}, value=level)

    def _scraped(self, metric: str, level: Level, begin: float, end: float) -> Level:
        ahead_s = self.ahead_s if catalog.CATALOG[metric].unit is catalog.Unit.TIMESTAMP else 0.0
        if not callable(level) and (begin, end) == (0, END) and self.lost[1] == 0 and not ahead_s:
            return level

        def sample(now: float) -> float | None:
            if not begin <= now < end or self._is_lost(now):
                return None
            value = level(now) if callable(level) else level
            return value + ahead_s if value else value  # 0 is 'never'

        return sample


def _turning(now: float) -> float:
    return now


LABELS = {
    metric.name: metric.label_names
    for metric in catalog.CATALOG.values()
    if metric.name not in (catalog.BUILD_INFO.name, catalog.RUN_INFO.name)
} | {catalog.BUILD_INFO.name: ("catalog",), catalog.RUN_INFO.name: ("team", "priority", "node")}


def jump(at_s: float, before: float, after: float, back_s: float = END) -> Level:
    """`before` until `at_s`, then `after`, `before` again from `back_s` on."""
    return lambda now: after if at_s <= now < back_s else before


def expectations(
    runs: Sequence[Run], alerts: Mapping[str, str], times: Sequence[float], slack_s: float
) -> tuple[Expectation, ...]:
    """For each alert (name in the rules -> name in the stories) at each time: exactly these runs fire.

    Within `slack_s` after an edge of its span a run is not looked at.
    """
    found = []
    for name, told in alerts.items():
        spans = [(run, span) for run in runs for span in run.fires.get(told, ())]
        for at in times:
            unsettled = {run.name for run, span in spans if any(edge <= at <= edge + slack_s for edge in span)}
            firing = [run for run, (begin, end) in spans if begin <= at <= end and run.name not in unsettled]
            found.append(
                Expectation(
                    at_s=at,
                    alert=name,
                    firing=tuple(run.labels() for run in firing),
                    unsettled=tuple(sorted(unsettled)),
                )
            )
    return tuple(found)


def case_of(name: str, runs: Sequence[Run], told: tuple[Expectation, ...], until_s: float) -> Case:
    """All runs side by side."""
    return Case(
        name=name, series=tuple(item for run in runs for item in run.series()), expectations=told, until_s=until_s
    )
