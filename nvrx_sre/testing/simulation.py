"""Whole jobs drawn from seeds, judged: what `nvrx-sre simulate`, the tests and `make soak` run.

    seed ─> Scenario ─> World.run_job ─> journal and world ─> checkers ─> Outcome

A seed passes if nothing that must never happen happened, every rule holds on its journal, and the job, with all its
faults behind it, finished with the state of an uninterrupted run. An unexpected error of a machine is a problem like
any other: a swarm goes on with the next seed. Deterministic, one thread.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_sre.core.errors import ExitCode
from nvrx_sre.events import schema
from nvrx_sre.events.schema import Record
from nvrx_sre.testing.checkers import check_liveness, check_safety
from nvrx_sre.testing.checkers_blame import check_blame
from nvrx_sre.testing.checkers_nodes import NodeRules, check_nodes
from nvrx_sre.testing.world import World
from nvrx_sre.testing.world_plan import Scenario, SwarmOptions, draw_scenario

MAX_PROBLEMS = 10
"""Problems of one seed that are kept: the first says most."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a seed. `journal_sha256` is the same for the same seed, options and release."""

    scenario: Scenario
    exit_code: int
    problems: tuple[str, ...]
    reached: frozenset[str]
    """Rare states that it went through."""
    num_records: int
    num_faults: int
    num_launchers: int
    simulated_s: float
    journal_sha256: str


def simulate(scenario: Scenario) -> tuple[Outcome, World]:
    """Run a scenario to its end and judge it."""
    world = World(scenario.seed, scenario.config, scenario.faults)
    problems: list[str] = []
    exit_code = -1
    try:
        exit_code = world.run_job()
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        problems.append(f"{type(error).__name__} in a machine: {error}")
    problems += world.violations + judge(world)
    if exit_code != ExitCode.FINISHED:
        problems.append(f"the job did not finish: exit {exit_code} after {len(world.launchers)} launchers")
    outcome = Outcome(
        scenario=scenario,
        exit_code=exit_code,
        problems=tuple(problems[:MAX_PROBLEMS]),
        reached=frozenset(world.reached | states_in(world.records) | states_of_hosts(world.records)),
        num_records=len(world.records),
        num_faults=sum(isinstance(record.event, schema.FaultDetected) for record in world.records),
        num_launchers=len(world.launchers),
        simulated_s=world.now_ns / 1e9,
        journal_sha256=hashlib.sha256(world.journal()).hexdigest(),
    )
    return outcome, world


def simulate_seed(seed: int, options: SwarmOptions) -> Outcome:
    """Draw the seed's scenario, run and judge it."""
    return simulate(draw_scenario(seed, options))[0]


def judge(world: World) -> list[str]:
    """What all checkers find in the journal of a world."""
    records = world.records
    nodes = world.config.limits.nodes
    rules = NodeRules(world_multiple=world.config.world_multiple, grace_s=nodes.grace_s, join_s=nodes.join_s)
    found = check_safety(records, world.config.limits.caps) + check_liveness(records) + check_nodes(records, rules)
    return found + check_blame(records, world.strikes, world.kills_ns)


def states_in(records: Sequence[Record]) -> set[str]:
    """Rare states that a journal shows."""
    found: set[str] = set()
    previous: Record | None = None
    formed, restart = 0, False
    for record in records:
        event = record.event
        found.update(_states_of(event))
        if isinstance(event, schema.GenerationFormed):
            formed, restart = record.generation, False
        elif isinstance(event, schema.FaultDetected):
            if restart:
                found.add("a second fault struck before the first was recovered from")
            if restart and record.generation > formed:
                found.add("a fault struck while ranks were gathered")
        elif isinstance(event, schema.RestartDecided):
            restart = event.action is schema.Action.RESTART
        elif isinstance(event, schema.PreemptionReceived | schema.HaltRequested) and restart:
            found.add("preempted or halted during a recovery")
        elif isinstance(event, schema.IncidentClosed) and previous is not None and event.attempts > 1:
            found.add("an incident took several attempts")
        previous = record
    if any(later.epoch > earlier.epoch for earlier, later in itertools.pairwise(records)):
        found.add("a run went on under another launcher")
    return found


def states_of_hosts(records: Sequence[Record]) -> set[str]:
    """Rare states of a journal that has several hosts in it."""
    found: set[str] = set()
    num_nodes, num_formed = 1, 0
    for record in records:
        event = record.event
        if isinstance(event, schema.LauncherStarted):
            num_formed = 0
        elif isinstance(event, schema.RunStarted):
            num_nodes = event.num_nodes
        elif isinstance(event, schema.GenerationFormed):
            num_hosts = len({device.rpartition("/")[0] for device in event.devices})
            if num_hosts < num_nodes:
                found.add("a world did without a host")
            if num_hosts > num_formed > 0:
                found.add("a host was taken back into the world")
            num_formed = num_hosts
        elif isinstance(event, schema.RunFinished) and "did not come within" in event.reason:
            found.add("a launcher gave up waiting for a host")
    return found


def _states_of(event: schema.Event) -> set[str]:
    """Rare states that one event shows by itself."""
    if isinstance(event, schema.RankReplaced):
        return {"a rank was replaced " + ("by a standby" if event.warm else "by a fresh process")}
    if isinstance(event, schema.TeardownFinished):
        return {"every process was kept"} if not event.killed else {"a process was replaced in a teardown"}
    if isinstance(event, schema.StateRestored):
        return {f"restored from {event.source.value}"}
    if isinstance(event, schema.CapReached):
        return {f"cap {event.cap.value} was reached"}
    if isinstance(event, schema.RestartDecided) and event.backoff_s > 0:
        return {"a restart waited"}
    if isinstance(event, schema.StepsCommitted) and event.proven_by_restore:
        return {"a step was proven by its restore"}
    if isinstance(event, schema.SaveSkipped):
        return {f"a save was skipped: {event.reason.value}"}
    if isinstance(event, schema.SaveFailed):
        return {f"a save failed: {event.reason.value}"}
    if isinstance(event, schema.SaveUnverified):
        return {f"a commit was not read back: {event.reason.value}"}
    if isinstance(event, schema.IncidentClosed):
        return {f"an incident closed {event.verdict.value}"}
    return {_NAMED[type(event)]} if type(event) in _NAMED else set()


_NAMED: dict[type[schema.Event], str] = {
    schema.RankExcluded: "a device was excluded",
    schema.RolledBack: "the run went back",
    schema.LeaderLost: "a launcher followed one that was killed",
    schema.BudgetReset: "an operator refilled the budgets",
    schema.HotIntervalChosen: "the hot interval was chosen",
    schema.DeadlineChosen: "a deadline was tightened",
    schema.PreemptionReceived: "the run was preempted",
    schema.HaltRequested: "the run was halted",
}

RARE_STATES: tuple[str, ...] = (
    *_NAMED.values(),
    "a rank was replaced by a standby",
    "a rank was replaced by a fresh process",
    "every process was kept",
    "a child was ended before it was started",
    "a killed process kept its launcher waiting",
    "a process was replaced in a teardown",
    "restored from hot",
    "restored from durable",
    "restored from fresh",
    "cap nonfinite was reached",
    "a restart waited",
    "a save was skipped: writer_busy",
    "a save was skipped: no_free_slot",
    "a save was skipped: incomplete",
    "a save failed: storage",
    "a save failed: writer_died",
    "a save failed: interrupted",
    "a save failed: abandoned_line",
    "a commit was not read back: writer_died",
    "a commit was not read back: interrupted",
    "an incident closed recovered",
    "an incident closed exhausted",
    "an incident took several attempts",
    "a second fault struck before the first was recovered from",
    "a fault struck while ranks were gathered",
    "a run went on under another launcher",
    "a step was proven by its restore",
    "a launcher died while a save was in flight",
    "records were lost with their launcher",
    "a launcher took over from one that stood still",
    "a superseded launcher ended",
    "a launcher that was stopped gave all ranks their time again",
    "a whole host stood still",
    "every rank was just in time",
    "a writer refused to commit an abandoned line",
    "a save was overdue",
    "no slot was free",
    "a verified checkpoint was damaged",
    "retention deleted a checkpoint",
)
"""States that some hundred seeds of one host must go through together: else their passing proves little."""

RAREST_STATES: tuple[str, ...] = (
    "a damaged checkpoint was walked past",
    "a message of an older generation arrived",
    "a writer found a slot that held another step",
    "an incident closed flapping",
    "cap same_fingerprint was reached",
    "preempted or halted during a recovery",
)
"""The same, for thousands of seeds."""

RARE_STATES_OF_HOSTS: tuple[str, ...] = (
    "a host was lost with its hot slots",
    "a host was silent for a lease",
    "a host gave its silent leader up",
    "a host came back",
    "a host came back before it was missed",
    "a world did without a host",
    "a host was taken back into the world",
    "the writers of several hosts committed a save",
    "a save ended for want of another host's share",
)
"""The same for several hosts."""

RAREST_STATES_OF_HOSTS: tuple[str, ...] = ("a launcher gave up waiting for a host",)
"""The same for thousands of seeds of several hosts."""
