"""What goes wrong in a simulated world: planned faults, and whole scenarios drawn from a seed. Pure.

Model: a swarm. Each seed enables a random subset of the fault kinds and draws its faults from those alone, besides the
size and pace of the job: so some seeds hammer one kind and others mix many, which finds more than every seed mixing
everything (Groce et al., Swarm Testing, ISSTA 2012).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from nvrx_sre.core.limits import Deadlines, DeadlineTuning, Limits, NodeLimits
from nvrx_sre.core.rng import Generator, seeded
from nvrx_sre.events.schema import FaultClass, Phase, RunStarted
from nvrx_sre.launcher.machine import MachineConfig


class SimKind(StrEnum):
    """Kinds of simulated faults."""

    EXCEPTION = "exception"
    SIGKILL = "sigkill"
    SIGKILL_ALL = "sigkill_all"
    HANG = "hang"
    HANG_NATIVE = "hang_native"
    SIGSTOP = "sigstop"
    UNDYING = "undying"
    SLOW = "slow"
    NONFINITE = "nonfinite"
    USER_ERROR = "user_error"
    NODE_KILL = "node_kill"
    WRITER_KILL = "writer_kill"
    STORAGE = "storage"
    SLOW_DISK = "slow_disk"
    CORRUPT = "corrupt"
    UNFIT = "unfit"
    LINK_FLAP = "link_flap"
    BAD_START = "bad_start"
    SIGTERM = "sigterm"
    HALT = "halt"
    LAUNCHER_KILL = "launcher_kill"
    LAUNCHER_STALL = "launcher_stall"
    LAUNCHER_SUPERSEDED = "launcher_superseded"
    HOST_KILL = "host_kill"
    HOST_CUT = "host_cut"
    SLOW_LINK = "slow_link"


@dataclass(frozen=True, kw_only=True)
class SimFault:
    """A fault that fires when `rank` executes `step` (or, with `phase`, enters that phase from a step on).

    It fires `times` times (0: on every pass), each time its condition is met. In a phase before the step loop it waits
    until the run has come to the step before `step`, so that it strikes a recovery. What a kind's name does not tell:
    `undying` hangs in the kernel, so that it does not even die of SIGKILL for a while;
    `slow` takes a healthy rank half a deadline for one step, or all ranks nearly two; `unfit` makes the rank report
    itself unfit after the next teardown; `storage` fails the next save, `slow_disk` lets it take longer than its
    deadline, `corrupt` damages the newest commit; `link_flap` gives every rank a communication error without a death;
    after `bad_start` the next process started dies while importing; `launcher_stall` stops the launcher for a while,
    alone or with its whole host, `launcher_superseded` for so long that another one takes over; the last three hit the
    host of the rank or its link.
    """

    kind: SimKind
    rank: int
    step: int
    phase: Phase = Phase.STEP
    times: int = 1


SIMULATED_LIMITS = Limits(
    deadlines=Deadlines(
        init_s=20.0, rendezvous_s=8.0, rebuild_s=8.0, load_s=8.0, first_step_s=8.0, step_s=6.0, data_s=6.0, save_s=20.0
    ),
    tuning=DeadlineTuning(num_samples=20, floor_s=4.0),
    nodes=NodeLimits(lease_s=10.0, join_s=60.0, grace_s=8.0, leader_lost_s=30.0),
)
"""Deadlines that fit the simulated pace; the caps are the real ones."""


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Size and pace of a simulated run."""

    num_ranks: int = 2
    num_hosts: int = 1
    """Hosts that share the ranks evenly; the leader's launcher lives on the first."""
    num_steps: int = 40
    min_world_size: int | None = None
    """Fewest ranks that the run goes on with; None: all."""
    world_multiple: int = 1
    tunes_deadlines: bool = False
    num_standbys: int = 1
    save_every: int = 5
    hot_every: int | None = 1
    """None: chosen by measurement."""
    capture_cost_s: float = 0.0
    """What a step that is captured takes longer than its 50 ms."""
    drop_rate: float = 0.01
    """Share of step reports that are lost on the way (a full socket)."""
    late_report_rate: float = 0.0
    """Share of steps that a rank reports only once their capture is sealed: it may die, or be interrupted, before."""
    limits: Limits = SIMULATED_LIMITS


def name_of(host: int) -> str:
    """What the machines call a host."""
    return f"host{host}"


def machine_config(config: WorldConfig) -> MachineConfig:
    """What a machine is told of the job."""
    return MachineConfig(
        world_size=config.num_ranks,
        num_standbys=config.num_standbys,
        num_nodes=config.num_hosts,
        node=name_of(0),
        limits=config.limits,
        hot_every=config.hot_every,
        min_world_size=config.min_world_size,
        world_multiple=config.world_multiple,
        tunes_deadlines=config.tunes_deadlines,
    )


def run_started(config: WorldConfig, *, is_resumed: bool) -> RunStarted:
    """The record with which a launcher begins."""
    return RunStarted(
        nproc=config.num_ranks,
        min_world_size=config.num_ranks if config.min_world_size is None else config.min_world_size,
        num_standbys=config.num_standbys,
        save_every_steps=config.save_every,
        hot_every_steps=config.hot_every or 0,
        config_digest="",
        versions={},
        limits=config.limits.flattened(),
        resumed=is_resumed,
        fresh=False,
        num_nodes=config.num_hosts,
    )


@dataclass(frozen=True, kw_only=True)
class SwarmOptions:
    """What a swarm of seeds has in common."""

    num_ranks: int = 8
    """Most ranks; the seeds draw smaller worlds as well."""
    num_hosts: int = 1
    """Most hosts."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job and what happens to it."""

    seed: int
    config: WorldConfig
    kinds: tuple[SimKind, ...]
    """Kinds that this seed enabled."""
    faults: tuple[SimFault, ...] = field(default=())


_LIGHT = (
    SimKind.EXCEPTION,
    SimKind.SIGKILL,
    SimKind.SIGKILL_ALL,
    SimKind.HANG,
    SimKind.HANG_NATIVE,
    SimKind.SIGSTOP,
    SimKind.UNDYING,
    SimKind.SLOW,
    SimKind.NONFINITE,
    SimKind.WRITER_KILL,
    SimKind.STORAGE,
    SimKind.SLOW_DISK,
    SimKind.CORRUPT,
    SimKind.UNFIT,
    SimKind.NODE_KILL,
    SimKind.LINK_FLAP,
    SimKind.BAD_START,
    SimKind.LAUNCHER_STALL,
)
_ENDING = (SimKind.SIGTERM, SimKind.HALT, SimKind.LAUNCHER_KILL, SimKind.LAUNCHER_SUPERSEDED)
_OF_HOSTS = (SimKind.HOST_KILL, SimKind.HOST_CUT, SimKind.SLOW_LINK)
HARMLESS = frozenset(
    {SimKind.SLOW, SimKind.WRITER_KILL, SimKind.STORAGE, SimKind.SLOW_DISK, SimKind.CORRUPT, SimKind.LAUNCHER_STALL}
)
"""Kinds that must not end a rank: by themselves they are no fault."""
BLAMED: dict[SimKind, FaultClass] = {
    SimKind.EXCEPTION: FaultClass.EXCEPTION,
    SimKind.NONFINITE: FaultClass.NONFINITE,
    SimKind.SIGKILL: FaultClass.KILLED,
    SimKind.HANG: FaultClass.HANG,
    SimKind.HANG_NATIVE: FaultClass.HANG,
    SimKind.SIGSTOP: FaultClass.HANG,
    SimKind.UNDYING: FaultClass.HANG,
}
"""Kinds that strike one rank at one moment, and what each must be told as."""
_PHASES = (Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD, Phase.FIRST_STEP)
_MAX_FAULTS = 6
_MANY_FAULTS = 20
_MANY_SHARE = 0.15
_ENDING_SHARE = 0.2
_EARLY_SHARE = 0.3
_OF_HOSTS_SHARE = 0.25
_HARMLESS_SHARE = 0.1
_BLAMED_SHARE = 0.2
"""Seeds on which it can be judged who is to blame, and that nobody is without a reason."""


def draw_scenario(seed: int, options: SwarmOptions) -> Scenario:
    """Job and faults of a seed: the same for the same seed and options."""
    rng = seeded(seed)
    num_ranks = rng.choice([size for size in (1, 2, 2, 3, 4) if size < options.num_ranks] + [options.num_ranks] * 2)
    num_hosts = rng.choice([number for number in range(1, options.num_hosts + 1) if num_ranks % number == 0])
    world_multiple = rng.choice((1, 1, 2)) if num_ranks > 2 else 1
    config = WorldConfig(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        min_world_size=rng.choice((None, max(1, num_ranks // 2))),
        world_multiple=world_multiple if num_ranks % world_multiple == 0 else 1,
        tunes_deadlines=rng.random() < 0.3,
        num_standbys=rng.choice((0, 1, 2)),
        num_steps=rng.choice((40, 40, 40, 120)),
        save_every=rng.choice((5, 5, 12)),
        hot_every=rng.choice((1, 1, 1, 3, None)),
        capture_cost_s=rng.choice((0.0, 0.001, 0.02)),
        late_report_rate=rng.choice((0.0, 0.0, 0.5)),
    )
    kinds = _enabled(rng, [*_LIGHT, *_ENDING, *(_OF_HOSTS if num_hosts > 1 else ())])
    narrow = rng.random()
    if narrow < _HARMLESS_SHARE:
        kinds = tuple(kind for kind in kinds if kind in HARMLESS)
    elif narrow < _HARMLESS_SHARE + _BLAMED_SHARE:
        kinds = tuple(kind for kind in kinds if kind in HARMLESS or kind in BLAMED)
    return Scenario(seed=seed, config=config, kinds=kinds, faults=_draw_faults(rng, kinds, config))


def _enabled(rng: Generator, kinds: list[SimKind]) -> tuple[SimKind, ...]:
    """A random subset: each kind by the toss of a coin, none of them in a few seeds."""
    return tuple(kind for kind in kinds if rng.random() < 0.5)


def _draw_faults(rng: Generator, kinds: tuple[SimKind, ...], config: WorldConfig) -> tuple[SimFault, ...]:
    """Some hit a recovery (a phase before the first step); those that end a launcher are rarer than the others."""
    light = [kind for kind in kinds if kind not in _ENDING]
    ending = [kind for kind in kinds if kind in _ENDING]
    of_hosts = [kind for kind in kinds if kind in _OF_HOSTS]
    faults = []
    for _ in range(rng.randint(0, _MANY_FAULTS if rng.random() < _MANY_SHARE else _MAX_FAULTS)):
        pool = ending if ending and (not light or rng.random() < _ENDING_SHARE) else light
        if of_hosts and rng.random() < _OF_HOSTS_SHARE:
            pool = of_hosts
        if not pool:
            break
        kind = rng.choice(pool)
        # Damage between an offer and its load is out of scope: what was offered is read once.
        is_early = rng.random() < _EARLY_SHARE and kind is not SimKind.CORRUPT
        faults.append(
            SimFault(
                kind=kind,
                rank=rng.randrange(config.num_ranks),
                step=rng.randint(1, config.num_steps),
                phase=rng.choice(_PHASES) if is_early else Phase.STEP,
                times=rng.choice((1, 1, 1, 2, 3)),
            )
        )
    return tuple(faults)
