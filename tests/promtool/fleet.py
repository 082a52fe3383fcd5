"""Runs told in series: what a run would export, from a short history, with levels that a story may bend.

`Run` turns (time, what) into the series that the rules read. Many runs lie side by side in one promtool case, so every
story is also a test that runs do not disturb each other. `fires` says when which alert fires; at any other time, and
for every other alert, the run must be silent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nvrx_sre.monitoring.promtool import Case, Expectation, Series
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
    namespace: str = "ml"
    cluster: str | None = "c1"

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
            values[name[catalog.NODE_FAULTS], node] = 0
        for rank in "0123":
            values[name[catalog.RANK_LATENESS], rank] = 0.01
        for component in ("journal", "otlp"):
            values[name[catalog.TELEMETRY_DROPPED], component] = 0
            values[name[catalog.TELEMETRY_ERRORS], component] = 0
        for kind, size in (("limit", 100e9), ("used", 60e9), ("hot_slots", 40e9)):
            values[name[catalog.HOST_MEMORY], kind] = size
        for kind, size in (("size", 1e12), ("free", 5e11)):
            values[name[catalog.STORAGE], kind] = size
        for state in ("new", "evaluate", "suspended"):
            values[name[catalog.TIME_SECONDS], state] = 0
        values |= {
            (name[catalog.TIME_SECONDS], "new"): lambda now: self._flow(now, NEW)[0],
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
            (name[catalog.RUN_INFO], self.priority): 1,
        }
        return {**values, **self.levels}

    def series(self) -> list[Series]:
        """Everything that the run exports, from each of its pods."""
        found = []
        for (metric, *values), level in self._values().items():
            labels = dict(zip(LABELS.get(metric, ()), values, strict=True))
            for pod, begin, end in self.pods:
                given = {"cluster": self.cluster} if self.cluster else {}
                base = {"__name__": metric, **given, "namespace": self.namespace, "run": self.name, "pod": pod}
                found.append(Series(labels={**base, **labels}, value=self._scraped(level, begin, end)))
        return found

    def _scraped(self, level: Level, begin: float, end: float) -> Level:
        if not callable(level) and (begin, end) == (0, END) and self.lost[1] == 0:
            return level
        lost_from, lost_to, nth = self.lost

        def sample(now: float) -> float | None:
            index = int(now // 15)
            is_lost = lost_from <= now < lost_to and (index % nth if nth else index % 3 == 2)
            if not begin <= now < end or is_lost:
                return None
            return level(now) if callable(level) else level

        return sample


LABELS = {
    metric.name: metric.label_names
    for metric in catalog.CATALOG.values()
    if metric.name not in (catalog.BUILD_INFO.name, catalog.RUN_INFO.name)
} | {catalog.BUILD_INFO.name: ("catalog",), catalog.RUN_INFO.name: ("priority",)}


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
