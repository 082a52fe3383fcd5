"""What a launcher is told. Frozen, validated in relation; built by the CLI, never read from the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nvrx_sre.core.errors import UserError
from nvrx_sre.core.ids import check_run_name
from nvrx_sre.core.limits import Limits
from nvrx_sre.telemetry.endpoint import EndpointSecurity
from nvrx_sre.telemetry.labels import RankMetrics

ON_BUSY = ("skip", "wait")
"""What a due save does that finds the writer busy."""


DEFAULT_LEADER_PORT = 29_400
"""torchrun's (`--rdzv-endpoint` without a port)."""


@dataclass(frozen=True, kw_only=True)
class NodesConfig:
    """A run over several nodes, as one of its launchers sees it. Node 0 leads."""

    num_nodes: int
    min_nodes: int
    """Fewest nodes that the run may go on with, where the smallest world is not given."""
    node_rank: int
    leader_host: str
    """Name or address by which the others reach node 0."""
    leader_port: int
    token_file: Path
    """Secret that the launchers share; node 0 makes it if it is not there."""

    def __post_init__(self) -> None:
        if self.num_nodes < 2:
            raise UserError(f"--nnodes is {self.num_nodes}: use 2 or more for several nodes")
        if not 0 <= self.node_rank < self.num_nodes:
            raise UserError(f"--node-rank is {self.node_rank}: use 0 to {self.num_nodes - 1}")
        if not 1 <= self.leader_port <= 65_535:
            raise UserError(f"the leader's port is {self.leader_port}: use 1 to 65535")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Configuration of one run, as it is on one node."""

    run: str
    """Run name (`core.ids`)."""
    run_dir: Path
    """Run directory; created private if it is missing."""
    command: tuple[str, ...]
    """What a worker runs after the interpreter: ('script.py', args...) or ('-m', module, args...)."""
    nproc: int
    """Ranks on this node."""
    min_world_size: int
    """Smallest world the run may go on with."""
    world_multiple: int = 1
    """Ranks that can only take part together: the world stays a multiple of it."""
    tunes_deadlines: bool = False
    """Tighten progress deadlines to what phases were observed to take (`--deadlines auto`)."""
    num_standbys: int = 1
    """Warm spare processes."""
    save_every: int = 50
    """Steps between durable saves."""
    hot_every: int | None = 1
    """Steps between hot captures; 0 switches the hot tier off, None has it chosen by measurement."""
    hot_slots: int = 3
    """Hot slots of each rank, 2 or 3."""
    keep: int = 3
    """Verified durable checkpoints to retain, at least 2."""
    on_busy: str = "skip"
    """A due save that finds the writer busy: `skip` it, and save the newest step when the writer is free; or `wait`."""
    write_bandwidth_bytes_s: float | None = None
    """Throttle of the durable writer (bytes a second)."""
    fault_specs: tuple[str, ...] = ()
    """Planned faults (`faults.plan`)."""
    config_items: dict[str, str] = field(default_factory=dict)
    """What identifies the run's configuration; a run directory of another configuration is refused."""
    reported_items: dict[str, str] = field(default_factory=dict)
    """What else is in the digest that is reported, and may be another at each start: a script's arguments."""
    limits: Limits = field(default_factory=Limits)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    """Explicit port, or None for a free one. The real port is in metrics.json."""
    metrics_security: EndpointSecurity = field(default_factory=EndpointSecurity)
    """TLS and basic authentication of the metrics endpoint."""
    otlp_endpoint: str | None = None
    """OTLP/HTTP traces endpoint, best effort."""
    exact_replay: bool = False
    """The same steps give the same bits: a loss that differs when its step is executed again ends the run (exit 70)."""
    summary: Path | None = None
    """Extra place for summary.json."""
    start_fresh: bool = False
    """Begin at step 0 although commits are on record (they are kept, fenced)."""
    interrupt_signal: int = 39
    """Signal that carries the interrupt to a rank's main thread: SIGRTMIN + 5 on Linux."""
    linger: bool = False
    """Keep the metrics endpoint after a terminal exit, or a preemption, until it was scraped."""
    rank_metrics: RankMetrics | None = None
    """How ranks are exported; None: each one up to 64 ranks, their extremes above."""
    labels: dict[str, str] = field(default_factory=dict)
    """Who owns the run and how much it matters: `team`, `priority` (prod or dev)."""
    allow_brake: bool = False
    """The site's brake may halt this run (`nvrx-sre brake`)."""
    nodes: NodesConfig | None = None
    """None: all ranks are on this node."""

    @property
    def num_nodes(self) -> int:
        """Nodes that share the ranks evenly."""
        return 1 if self.nodes is None else self.nodes.num_nodes

    @property
    def world_size(self) -> int:
        """Ranks on all nodes."""
        return self.nproc * self.num_nodes

    def shared_settings(self) -> dict[str, str]:
        """What must be the same on all nodes, by the name that a person knows it by."""
        settings: dict[str, object] = {
            "--nnodes": self.num_nodes,
            "--nproc-per-node": self.nproc,
            "--min-world-size": self.min_world_size,
            "--world-multiple": self.world_multiple,
            "--standbys": self.num_standbys,
            "--save-every": self.save_every,
            "--hot-every": "auto" if self.hot_every is None else self.hot_every,
            "--hot-slots": self.hot_slots,
            "--keep": self.keep,
            "--on-busy": self.on_busy,
            "--fault": " ".join(self.fault_specs),
            "the interrupt's signal": self.interrupt_signal,
            **self.config_items,
            **self.reported_items,
            **self.limits.flattened(),
        }
        return {name: str(value) for name, value in settings.items()}

    def __post_init__(self) -> None:
        check_run_name(self.run)
        if self.nproc < 1:
            raise UserError(f"number of ranks is {self.nproc}: use at least 1")
        num_ranks = self.world_size
        if not 1 <= self.min_world_size <= num_ranks:
            raise UserError(f"minimum world size is {self.min_world_size}: use 1 to {num_ranks}")
        if self.world_multiple < 1 or num_ranks % self.world_multiple or self.min_world_size % self.world_multiple:
            raise UserError(
                f"--world-multiple is {self.world_multiple}: the number of ranks, {num_ranks}, and the least of them, "
                f"{self.min_world_size}, must be multiples of it"
            )
        if self.save_every < 1:
            raise UserError(f"--save-every is {self.save_every}: use at least 1")
        if self.hot_slots not in (2, 3):
            raise UserError(f"--hot-slots is {self.hot_slots}: use 2 or 3")
        if self.hot_every is not None and self.hot_every < 0:
            raise UserError(f"--hot-every is {self.hot_every}: use 0 (off) or more")
        if self.on_busy not in ON_BUSY:
            raise UserError(f"--on-busy is {self.on_busy!r}: use {' or '.join(ON_BUSY)}")
        if self.num_standbys < 0:
            raise UserError(f"number of standbys is {self.num_standbys}: use 0 or more")
        if self.keep < 2:
            raise UserError(f"checkpoints to keep is {self.keep}: use at least 2")
        if self.metrics_port is not None and not 1 <= self.metrics_port <= 65_535:
            raise UserError(f"--metrics-port is {self.metrics_port}: use 1 to 65535")
