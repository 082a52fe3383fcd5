"""Runs that are told: hand-written events behind the real folds and a real endpoint."""

from __future__ import annotations

from nvrx_sre.core.clock import NS_PER_S, SystemClock
from nvrx_sre.core.limits import CapLimits
from nvrx_sre.events.schema import Action, FaultClass, FaultDetected, Layer, RestoredFrom
from nvrx_sre.goodput.incidents import IncidentTracker
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.policy.history import History
from nvrx_sre.policy.ladder import PolicyFault, decide
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.endpoint import EndpointSecurity, MetricsServer
from nvrx_sre.telemetry.metrics import MetricsFold, MetricSources
from nvrx_sre.telemetry.values import Values
from tests import stories

CLOCK = SystemClock()
STORY_S = 60.0
"""Room before now for what the stories tell."""


class PolicyStory(stories.Story):
    """A story whose restart decisions are the policy's own."""

    def decide(self, at_s: float, layer: Layer, action: Action = Action.RESTART, **changes: object) -> None:
        history = History()
        *past, last = self.records
        for record in past:
            history.apply(record)
        event = last.event
        assert isinstance(event, FaultDetected)
        fault = PolicyFault(fault=event.fault, fingerprint=event.fingerprint, high_water=event.high_water)
        decision = decide(history, fault, last.time_ns, CapLimits())
        super().decide(
            at_s,
            decision.layer,
            decision.action,
            restarts_since_progress=decision.restarts_since_progress,
            budget_used=decision.budget_used,
            budget_limit=decision.budget_limit,
            exit_code=decision.exit_code,
        )


class LiveRun:
    """One run: a story told in stages to a metric fold that a real endpoint serves."""

    def __init__(
        self,
        run: str,
        port: int | None = None,
        story: PolicyStory | None = None,
        security: EndpointSecurity | None = None,
    ) -> None:
        self.run = run
        self.story = story or PolicyStory()
        self.ledger, self.tracker = Ledger(), IncidentTracker(run)
        self.fold = MetricsFold(run, self.ledger, self.tracker, CLOCK, sources=MetricSources(fill=self._fill))
        self.server = MetricsServer(self.fold.registry, "127.0.0.1", port, lambda: True, lambda: True, security)
        self.server.start()
        self.num_told = 0
        self.at_s = 0.0
        """When the story goes on, in its seconds."""
        self.is_turning = True
        """Whether the launcher's loop turns; else it stands since `fold.loop_turned`."""

    def _fill(self, values: Values) -> None:
        if self.is_turning:
            values.set(catalog.LAUNCHER_LOOP, CLOCK.wall_ns() / NS_PER_S)

    def tell(self) -> None:
        """Fold what the story has gained since."""
        for record in self.story.records[self.num_told :]:
            self.ledger.apply(record)
            self.tracker.apply(record)
            self.fold.apply(record)
        self.num_told = len(self.story.records)

    def train(self) -> float:
        """Start and ten steps; when the last one was committed."""
        self.story.start(0.0)
        self.story.steps(self.story.form(2.0, 0, RestoredFrom.FRESH), 12.4, 1, 10)
        return 12.4

    def fail(self, at_s: float, fault: FaultClass) -> float:
        """A fault at step 11 and the recovery up to the step loop; when that is entered again."""
        self.story.fault(at_s + 0.2, at_s + 0.3, fault, 1)
        self.story.torn_down(at_s + 0.4)
        return self.story.form(at_s + 0.4, 10, RestoredFrom.HOT)
