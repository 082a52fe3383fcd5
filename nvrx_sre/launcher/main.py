"""One launcher from start to exit: take the epoch, learn from the journal, run the machine, leave in order.

    prepare directory -> take epoch -> end leftovers -> replay journal -> serve metrics -> run -> summary -> exit

A run that was stopped for good (exit 93) or halted is refused until `nvrx-sre resume`, so that no restart of a pod
refills a retry budget. `--start-fresh` starts one that was stopped: at step 0, with the budgets as they are. One that
somebody, or the brake, has halted waits for `resume` whatever it is started with.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from nvrx_sre import __version__
from nvrx_sre.checkpoint import discover
from nvrx_sre.core.atomic import json_text, write_json_atomically
from nvrx_sre.core.clock import Clock, SystemClock, seconds
from nvrx_sre.core.errors import ExitCode, StorageError, Superseded, UserError
from nvrx_sre.core.signals import SignalPipe
from nvrx_sre.events.schema import (
    JournalRepaired,
    LauncherStarted,
    LauncherStopped,
    LeaderLost,
    Record,
    RestoredFrom,
    RolledBack,
    RunStarted,
)
from nvrx_sre.faults.plan import FaultSpec
from nvrx_sre.launcher.braking import BrakeConsent, write_consent
from nvrx_sre.launcher.commands import Stop
from nvrx_sre.launcher.config import NodesConfig, RunConfig
from nvrx_sre.launcher.device_watch import DeviceWatch
from nvrx_sre.launcher.host import HostSampler, node_name, pod_name
from nvrx_sre.launcher.leader_link import LinkConfig, listen
from nvrx_sre.launcher.machine import Machine, MachineConfig, MachineStart
from nvrx_sre.launcher.machine_interval import PROBE_EVERY
from nvrx_sre.launcher.node import parent_environment
from nvrx_sre.launcher.past import Past, read_past
from nvrx_sre.launcher.refusal import turn_away
from nvrx_sre.launcher.rundir import Epoch, RunDirectory, config_digest
from nvrx_sre.launcher.shell import Recorder, Shell
from nvrx_sre.launcher.token import make_token
from nvrx_sre.policy.membership import members
from nvrx_sre.telemetry.boundary import Boundary
from nvrx_sre.telemetry.catalog import Component
from nvrx_sre.telemetry.hub import Telemetry, TelemetryConfig
from nvrx_sre.telemetry.node_board import rank_metrics_in_force

Sink = Callable[[Record], None]
SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter from the loop, which gives it up at every packet (seconds)."""
SCRAPES_AFTER_END: dict[int, int] = {
    ExitCode.FINISHED: 2,
    ExitCode.CONFIG: 2,
    ExitCode.DO_NOT_RESTART: 2,
    ExitCode.PREEMPTED: 1,
}
"""Exit code -> scrapes that are to see the end of a run before its endpoint goes. Who preempts waits for the machine:
one tells that the run is no target to be missed (docs/adr/0038). Nothing is waited for after the others."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a caller shows at the end. `summary` has the keys of the summary file."""

    exit_code: int
    reason: str
    summary: dict[str, Any]
    directory: RunDirectory
    metrics_url: str


def run(config: RunConfig, sinks: Sequence[Sink] = (), say: Callable[[str], None] = lambda _: None) -> RunReport:
    """Run until the end; blocks, main thread only. Children, sockets and shared memory are gone when it returns.

    `say` takes a line for whoever watches, of what is no record; it is called from the loop and must not block.
    Raises `UserError` or `RunDirectoryBusy` for what is wrong before anything was started.
    """
    # A start that these files refuse leaves no directory, and takes no epoch.
    config.metrics_security.context(config.metrics_host)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    directory = RunDirectory(config.run_dir)
    directory.prepare(config.run, config.config_items)
    epoch = directory.take_epoch()
    with contextlib.ExitStack() as stack:
        links = None
        if config.nodes is not None:
            links = link_config(config, config.nodes, epoch.number)
            stack.callback(links.listener.close)
        devices = DeviceWatch(parent_environment(), Boundary(SystemClock()))
        stack.callback(devices.close)
        past = read_past(directory, config.run, directory.end_leftovers())
        start = _Start(directory=directory, epoch=epoch, past=past, links=links, devices=devices, say=say)
        refused = _refusal(start, config)
        if not refused:
            with contextlib.closing(SignalPipe()) as signals:
                return _run_epoch(config, start, sinks, signals)
        if links is not None:
            turn_away(links, SystemClock(), Stop(exit_code=ExitCode.DO_NOT_RESTART, reason=refused, result={}))
        return RunReport(
            exit_code=ExitCode.DO_NOT_RESTART, reason=refused, summary={}, directory=directory, metrics_url=""
        )


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What one epoch of a run begins with."""

    directory: RunDirectory
    epoch: Epoch
    past: Past
    links: LinkConfig | None
    devices: DeviceWatch
    say: Callable[[str], None]


def _refusal(start: _Start, config: RunConfig) -> str:
    directory, past = start.directory, start.past
    stopped = past.folds.past.stop_reason
    goes_on = f"`nvrx-sre resume {directory.path} --reason TEXT` lets it go on"
    if directory.halt.exists():
        return f"run {config.run} was stopped: {stopped or 'a halt was requested'}; {goes_on}, nothing else does"
    if stopped and not config.start_fresh:
        return f"run {config.run} was stopped: {stopped}; {goes_on}, --start-fresh begins at step 0"
    devices = _machine_config(config, start.devices).devices
    world = members(devices, past.folds.history.excluded, config.world_multiple)
    if len(world) < config.min_world_size:
        excluded = ", ".join(past.folds.history.excluded)
        return (
            f"run {config.run} can have {len(world)} ranks without the excluded devices ({excluded}), it needs "
            f"{config.min_world_size}; `nvrx-sre resume {directory.path} --reason TEXT` takes them in again"
        )
    return ""


def _run_epoch(config: RunConfig, start: _Start, sinks: Sequence[Sink], signals: SignalPipe) -> RunReport:
    directory, epoch, past = start.directory, start.epoch, start.past
    clock = SystemClock()
    is_first_start = not past.folds.past.has_records
    telemetry = start_telemetry(config, epoch.number, sinks, clock, is_first_start=is_first_start)
    try:
        telemetry.replay(past.records, past.snapshot)
        telemetry.board.set_leftovers(past.num_leftovers)
        recorder = Recorder(config, epoch.number, clock, past.folds, telemetry)
        _announce(config, directory, epoch, past, recorder, telemetry)
        start.devices.boundary = telemetry.boundary
        machine_config = _machine_config(config, start.devices)
        machine = Machine(machine_config, past.folds.history, _machine_start(config, past, clock))
        shell = Shell(config, directory, clock, machine, recorder, signals)
        shell.loop_turned = telemetry.loop_turned
        shell.unfit_devices = start.devices.unfit
        shell.say = start.say
        if start.links is not None:
            shell.listen(start.links)
        with contextlib.closing(HostSampler(telemetry, directory.path, clock, start.devices)) as sampler:
            shell.tell_ranks = sampler.tell_ranks
            stop = shell.run()
        recorder.emit(LauncherStopped(exit_code=stop.exit_code, reason=stop.reason), machine.generation)
        telemetry.settle()
        summary = telemetry.summary(clock.wall_ns())
        unwritten = write_summary(directory.summary, config.summary, summary)
        num_scrapes = SCRAPES_AFTER_END.get(stop.exit_code, 0)
        timeout_s = longest_linger_s(config, machine.leave_by_ns, clock.monotonic_ns())
        if num_scrapes and timeout_s > 0:
            # A signal ends the wait and no more: the run has ended, with an exit code of its own.
            telemetry.linger(num_scrapes, timeout_s, start.say, signals)
        return RunReport(
            exit_code=stop.exit_code,
            reason=f"{stop.reason}{unwritten}",
            summary=summary,
            directory=directory,
            metrics_url=telemetry.metrics_url,
        )
    except Superseded:
        telemetry.resign()
        raise
    finally:
        telemetry.close()


def longest_linger_s(config: RunConfig, leave_by_ns: int | None, now_ns: int) -> float:
    """How long the endpoint may stay after the end (seconds): after a termination signal, no longer than its grace."""
    if not config.linger:
        return 0.0
    linger_s = config.limits.telemetry.metrics_linger_s
    if leave_by_ns is None:
        return linger_s
    return round(min(linger_s, max(0.0, seconds(leave_by_ns - now_ns))), 1)


def link_config(config: RunConfig, nodes: NodesConfig, epoch: int) -> LinkConfig:
    """What the leader asks of the launchers of the other nodes; they can connect from now on, and find their token.

    Raises `UserError` for a port that is taken, or a token that cannot be made.
    """
    return LinkConfig(
        listener=listen("", nodes.leader_port),
        num_nodes=nodes.num_nodes,
        token=make_token(nodes.token_file),
        run=config.run,
        version=__version__,
        settings=config.shared_settings(),
        epoch=epoch,
        limits=config.limits.nodes,
    )


def start_telemetry(
    config: RunConfig, epoch: int, sinks: Sequence[Sink], clock: Clock, *, is_first_start: bool
) -> Telemetry:
    """Telemetry on the configured port. Raises `UserError` if that is busy at the run's first start.

    Later a run that could go on is worth more than its port: it takes a free one, which metrics.json names.
    """
    telemetry = TelemetryConfig(
        run=config.run,
        run_dir=config.run_dir,
        epoch=epoch,
        limits=config.limits,
        otlp_endpoint=config.otlp_endpoint,
        metrics_host=config.metrics_host,
        metrics_port=config.metrics_port,
        metrics_security=config.metrics_security,
        environment=parent_environment(),
        sinks=tuple(sinks),
        rank_metrics=rank_metrics_in_force(config.rank_metrics, config.nproc),
    )
    try:
        return Telemetry(telemetry, clock)
    except UserError as error:
        if is_first_start or config.metrics_port is None:
            raise
        moved = Telemetry(replace(telemetry, metrics_port=None), clock)
        moved.boundary.failed(Component.METRICS, f"{error}; this start uses port {moved.metrics_port}")
        return moved


def _announce(
    config: RunConfig, directory: RunDirectory, epoch: Epoch, past: Past, recorder: Recorder, telemetry: Telemetry
) -> None:
    generation = past.folds.past.last_generation
    is_resumed = past.folds.past.has_records
    lost = past.folds.past.unfinished_epoch()
    interrupted = past.folds.saves.interrupted()
    if past.repaired_bytes:
        recorder.emit(JournalRepaired(dropped_bytes=past.repaired_bytes), generation)
    if lost is not None:
        recorder.emit(LeaderLost(lost_epoch=lost[0], last_seen_ns=lost[1]), generation)
    for failed, of_generation in interrupted:
        recorder.emit(failed, of_generation)
    started = LauncherStarted(
        node=epoch.node,
        pid=epoch.pid,
        start_ticks=epoch.start_ticks,
        metrics_port=telemetry.metrics_port,
        pod=pod_name(parent_environment()),
    )
    recorder.emit(started, generation)
    recorder.emit(
        RunStarted(
            nproc=config.world_size,
            num_nodes=config.num_nodes,
            min_world_size=config.min_world_size,
            num_standbys=config.num_standbys,
            save_every_steps=config.save_every,
            hot_every_steps=PROBE_EVERY if config.hot_every is None else config.hot_every,
            config_digest=config_digest({**config.config_items, **config.reported_items}),
            versions=versions(),
            limits=config.limits.flattened(),
            resumed=is_resumed,
            fresh=config.start_fresh,
            allow_brake=config.allow_brake,
            labels=config.labels,
            faults=[str(FaultSpec.parse(text)) for text in config.fault_specs],
        ),
        generation,
    )
    write_consent(directory, BrakeConsent(is_allowed=config.allow_brake, since_ns=telemetry.clock.wall_ns()))
    has_password = config.metrics_security.users is not None
    where = {"url": telemetry.metrics_url, "pid": epoch.pid, "run": config.run, "password": has_password}
    write_json_atomically(directory.metrics, where, durable=False)
    if config.start_fresh:
        discover.add_fence(directory.path, generation + 1, 0)
        recorder.emit(RolledBack(step=0, high_water=0, source=RestoredFrom.FRESH), generation + 1)


def _machine_config(config: RunConfig, devices: DeviceWatch) -> MachineConfig:
    return MachineConfig(
        world_size=config.world_size,
        num_nodes=config.num_nodes,
        num_standbys=config.num_standbys,
        limits=config.limits,
        exact_replay=config.exact_replay,
        hot_every=config.hot_every,
        waits_for_writer=config.on_busy == "wait",
        min_world_size=config.min_world_size,
        world_multiple=config.world_multiple,
        tunes_deadlines=config.tunes_deadlines,
        node=node_name(),
        gpu_uuids=devices.first(),
        unfit=devices.unfit(),
    )


def _machine_start(config: RunConfig, past: Past, clock: SystemClock) -> MachineStart:
    return MachineStart(
        generation=past.folds.past.last_generation,
        high_water=past.folds.history.high_water,
        wall_offset_ns=clock.to_wall_ns(0),
        commits_on_record=past.folds.past.commits_ever,
    )


def write_summary(path: Path, wanted: Path | None, summary: dict[str, Any]) -> str:
    """Write summary.json at `path`, and the same where `--summary` asks for it, each whatever becomes of the other.

    A failure changes no exit code, since the run has ended as it has: it is told by what is returned, to be put behind
    the reason of the end.
    """
    unwritten = ""
    try:
        write_json_atomically(path, summary)
    except StorageError as error:
        unwritten += f"; {error}"
    if wanted is not None:
        try:
            wanted.parent.mkdir(parents=True, exist_ok=True)
            wanted.write_text(json_text(summary))
        except OSError as error:
            unwritten += f"; cannot write the summary to {wanted}: {error.strerror}"
    return unwritten


def versions() -> dict[str, str]:
    """Versions that a person comparing two runs asks for; torch is not imported for it."""
    found = {"nvrx_sre": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found
