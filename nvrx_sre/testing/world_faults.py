"""How each kind of simulated fault strikes when a rank reaches the point it is planned for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx_sre.core.clock import to_ns
from nvrx_sre.events import messages as wire
from nvrx_sre.events.schema import Role
from nvrx_sre.launcher import commands as c
from nvrx_sre.testing.world_plan import SimKind

if TYPE_CHECKING:
    from nvrx_sre.testing.world_ranks import SimWorker

SIGKILL, SIGTERM = 9, 15
_ABSENCES_S = ((1.0, 6.0), (10.0, 40.0), (70.0, 150.0))
"""How long a host is away: back before the others go on without it, after it, or after a run that needs it gave up."""
_UNDYING_S = (3.0, 40.0)
"""How long a process stays in the kernel: shorter and longer than its launcher waits for a death."""
_FOR_GOOD_S = (600.0, 1200.0)
"""A host that the run does not need may be away for longer than the run takes."""

_JUST_IN_TIME_S = (0.15, 1.0)
"""What is left of a deadline: enough for what a step takes anyway, too little for a sign of life in between."""

_RAISED = {
    SimKind.EXCEPTION: ("exception", "ValueError"),
    SimKind.NONFINITE: ("nonfinite", "NonFiniteLoss"),
    SimKind.USER_ERROR: ("user_error", "UserError"),
}


def inject(worker: SimWorker, kind: SimKind) -> bool:
    """Let the fault happen; True if the worker does not go on."""
    if kind in _RAISED:
        name, exception_type = _RAISED[kind]
        worker.fail(communication=False, kind=name, exception_type=exception_type)
    elif kind is SimKind.SIGKILL:
        worker.launcher.die(worker, exit_code=None, signal=SIGKILL)
    elif kind is SimKind.HANG_NATIVE:
        worker.is_stuck = True
    elif kind is SimKind.SIGSTOP:
        worker.is_stopped = worker.is_stuck = True
    elif kind is SimKind.UNDYING:
        worker.is_stopped = worker.is_stuck = True
        worker.dies_from_ns = worker.now_ns + to_ns(worker.world.rng.uniform(*_UNDYING_S))
    elif kind is SimKind.NODE_KILL:
        worker.launcher.num_losses += 1
        worker.send(wire.NodeKill(generation=worker.generation, mono_ns=worker.now_ns))
    elif kind is not SimKind.HANG:
        # Later: never in the middle of what the machine or a process is doing.
        worker.world.schedule(0.0, lambda: _OUTSIDE[kind](worker))
        return False
    return True


def _slow(worker: SimWorker) -> None:
    """One rank, or all of them: then each is just in time with each half of the step after this one."""
    config, rng = worker.world.config, worker.world.rng
    limit_s = config.limits.deadlines.step_s
    if rng.random() < 0.5:
        worker.delay_s = limit_s / 2
        return
    half_s = (config.limits.tuning.floor_s if config.tunes_deadlines else limit_s) - rng.uniform(*_JUST_IN_TIME_S)
    for child in worker.launcher.members_of(worker.generation):
        child.slow_steps[worker.generation, worker.step + 2] = half_s


def _unfit(worker: SimWorker) -> None:
    worker.is_unfit = True


def _bad_start(worker: SimWorker) -> None:
    worker.world.num_bad_starts += 1


def _kill_all(worker: SimWorker) -> None:
    for child in worker.launcher.members_of(worker.generation):
        worker.launcher.die(child, exit_code=None, signal=SIGKILL)


def _flap(worker: SimWorker) -> None:
    for child in worker.launcher.members_of(worker.generation):
        worker.launcher.break_off(child)


def _kill_writer(worker: SimWorker) -> None:
    for child in list(worker.launcher.children.values()):
        if child.role is Role.WRITER:
            worker.launcher.die(child, exit_code=None, signal=SIGKILL)


def _corrupt(worker: SimWorker) -> None:
    if worker.world.disk.damage_newest():
        worker.world.reach("a verified checkpoint was damaged")


def _terminate(worker: SimWorker) -> None:
    worker.launcher.feed(c.SignalReceived(signal=SIGTERM, by_person=False))


def _halt(worker: SimWorker) -> None:
    worker.launcher.feed(c.HaltSeen(reason="simulated"))


def _kill_launcher(worker: SimWorker) -> None:
    worker.launcher.crash()


def _stall_launcher(worker: SimWorker) -> None:
    rng = worker.world.rng
    worker.launcher.stall(rng.uniform(0.5, 20.0), is_host=rng.random() < 0.5)


def _supersede_launcher(worker: SimWorker) -> None:
    world = worker.world
    wakes_after_s = world.rng.uniform(6.0, 40.0)
    world.take_over_after(worker.launcher, 5.0)
    worker.launcher.stall(wakes_after_s)


def _kill_host(worker: SimWorker) -> None:
    """With the leader's host goes the leader. Another one ends its connections, or is silent (power, kernel)."""
    world, launcher = worker.world, worker.launcher
    if worker.host == 0:
        launcher.crash()
        return
    num_others = world.config.num_ranks - world.config.num_ranks // world.config.num_hosts
    is_needed = num_others < (world.config.min_world_size or world.config.num_ranks)
    absence_s = world.rng.uniform(*world.rng.choice(_ABSENCES_S if is_needed else (*_ABSENCES_S, _FOR_GOOD_S)))
    host = world.hosts[worker.host]
    host.boots_until_ns = max(host.boots_until_ns, world.now_ns + to_ns(absence_s))
    if world.rng.random() < 0.5:
        launcher.links.silence(worker.host)
    else:
        launcher.links.lose(worker.host, "it has ended its link")


def _cut_host(worker: SimWorker) -> None:
    """The host's link is down for a while: shorter or longer than a lease, and than a host waits for its leader."""
    world, launcher, host = worker.world, worker.launcher, worker.world.hosts[worker.host]
    cut_s = world.rng.uniform(1.0, 45.0)
    host.cut_until_ns = max(host.cut_until_ns, world.now_ns + to_ns(cut_s))
    for child in launcher.members_of(worker.generation):
        if child.host != worker.host:
            # The collectives between the hosts break off on both sides, one after the other.
            world.schedule(world.rng.uniform(0.0, 2.0), lambda child=child: launcher.break_off(child))  # type: ignore[misc]  # mypy cannot infer a lambda with a default


def _slow_link(worker: SimWorker) -> None:
    world, host = worker.world, worker.world.hosts[worker.host]
    host.delay_s = world.rng.uniform(0.05, 0.5)
    host.slow_until_ns = world.now_ns + to_ns(world.rng.uniform(1.0, 30.0))


_OUTSIDE: dict[SimKind, Callable[[SimWorker], None]] = {
    SimKind.SLOW: _slow,
    SimKind.UNFIT: _unfit,
    SimKind.BAD_START: _bad_start,
    SimKind.SIGKILL_ALL: _kill_all,
    SimKind.LINK_FLAP: _flap,
    SimKind.WRITER_KILL: _kill_writer,
    SimKind.CORRUPT: _corrupt,
    SimKind.SIGTERM: _terminate,
    SimKind.HALT: _halt,
    SimKind.LAUNCHER_KILL: _kill_launcher,
    SimKind.LAUNCHER_STALL: _stall_launcher,
    SimKind.LAUNCHER_SUPERSEDED: _supersede_launcher,
    SimKind.HOST_KILL: _kill_host,
    SimKind.HOST_CUT: _cut_host,
    SimKind.SLOW_LINK: _slow_link,
}
