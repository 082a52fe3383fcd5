"""Telemetry of a launcher that does not lead: the series of its own node and ranks, and nothing of the job.

The leader records and exports what concerns the job; a second copy elsewhere would count it twice. So there is no
journal, no span and no log here: an endpoint, a board that is filled live, and a boundary that swallows failures.

Thread safety: as `telemetry.hub.Telemetry`. Must not: raise after construction, decide anything.
"""

from __future__ import annotations

from nvrx_sre.core.clock import Clock, to_ns
from nvrx_sre.core.limits import Limits
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.endpoint import EndpointSecurity, MetricsServer
from nvrx_sre.telemetry.folded import FoldedRun
from nvrx_sre.telemetry.labels import RankMetrics
from nvrx_sre.telemetry.metric import Metric, Scope
from nvrx_sre.telemetry.metrics import MetricSources
from nvrx_sre.telemetry.node_board import NodeBoard
from nvrx_sre.telemetry.values import Values


class FollowerTelemetry:
    """Endpoint of one node. Raises `UserError` if an explicit port cannot be bound."""

    def __init__(
        self,
        run: str,
        limits: Limits,
        clock: Clock,
        where: tuple[str, int | None],
        security: EndpointSecurity,
        mode: RankMetrics,
    ) -> None:
        """`where`: address to listen on, and port (None: a free one)."""
        self._clock = clock
        self._unhealthy_ns = to_ns(limits.telemetry.loop_unhealthy_s)
        self._turned_ns = clock.monotonic_ns()
        self.boundary = Boundary(clock)
        self.board = NodeBoard(mode)
        self._channel = self._channel_before = (0, 0)
        sources = MetricSources(
            dropped=self._num_dropped,
            errors=self._num_errors,
            fill=self._fill,
            exports=self._exports,
        )
        self._metrics = FoldedRun(run, clock=clock, limits=limits, sources=sources).metrics
        self.server = MetricsServer(self._metrics.registry, *where, self._is_healthy, lambda: True, security)
        self.server.start(lambda message: self.boundary.failed(Component.METRICS, message))

    @property
    def metrics_url(self) -> str:
        """Where Prometheus scrapes."""
        return self.server.url

    def loop_turned(self) -> None:
        """The launcher's loop turned: feeds the heartbeat series and `/healthz`."""
        self._turned_ns = self._clock.monotonic_ns()
        self.boundary.call(Component.METRICS, self._metrics.loop_turned, self._clock.wall_ns())

    def note_channel(self, num_unsent: int, num_bad: int) -> None:
        """Messages to children that found no room, and what they sent that was none. With each membership of the run
        both begin at 0 again, and what was counted before stays.
        """
        losses = num_unsent, num_bad
        if any(now < last for now, last in zip(losses, self._channel, strict=True)):
            self._channel_before = self._channel_losses()
        self._channel = losses

    def _channel_losses(self) -> tuple[int, int]:
        (unsent, bad), (unsent_before, bad_before) = self._channel, self._channel_before
        return unsent + unsent_before, bad + bad_before

    def _num_dropped(self) -> dict[Component, int]:
        counts = self.boundary.num_dropped()
        counts[Component.CHANNEL] += self._channel_losses()[0]
        return counts

    def _num_errors(self) -> dict[Component, int]:
        counts = self.boundary.num_errors()
        counts[Component.CHANNEL] += self._channel_losses()[1]
        return counts

    def close(self) -> None:
        """Stop the endpoint. Never raises."""
        self.boundary.call(Component.METRICS, self.server.close)

    def _fill(self, values: Values) -> None:
        values.set(catalog.TELEMETRY_SCRAPES, self.server.num_scrapes)
        self.board.fill(values)

    def _exports(self, metric: Metric) -> bool:
        return metric.scope is Scope.NODE and self.board.exports(metric)

    def _is_healthy(self) -> bool:
        return self._clock.monotonic_ns() - self._turned_ns < self._unhealthy_ns
