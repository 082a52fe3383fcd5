"""What goes wrong in a simulated world: planned faults, and plans drawn from a seed. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nvrx_sre.core.rng import Generator
from nvrx_sre.events.schema import Phase


class SimKind(StrEnum):
    """Kinds of simulated faults."""

    EXCEPTION = "exception"
    SIGKILL = "sigkill"
    SIGKILL_ALL = "sigkill_all"
    HANG = "hang"
    HANG_NATIVE = "hang_native"
    SIGSTOP = "sigstop"
    NONFINITE = "nonfinite"
    USER_ERROR = "user_error"
    NODE_KILL = "node_kill"
    WRITER_KILL = "writer_kill"
    STORAGE = "storage"
    UNFIT = "unfit"
    LINK_FLAP = "link_flap"
    BAD_START = "bad_start"
    SIGTERM = "sigterm"
    HALT = "halt"
    LAUNCHER_KILL = "launcher_kill"


@dataclass(frozen=True, kw_only=True)
class SimFault:
    """A fault that fires when `rank` executes `step` (or, with `phase`, enters that phase from a step on).

    It fires `times` times (0: on every pass), each time its condition is met. `unfit` makes the rank report
    itself unfit after the next teardown; `storage` fails the next save; `link_flap` gives every rank a
    communication error without a death; after `bad_start` the next process started dies while importing.
    """

    kind: SimKind
    rank: int
    step: int
    phase: Phase = Phase.STEP
    times: int = 1


_LIGHT = (
    SimKind.EXCEPTION,
    SimKind.SIGKILL,
    SimKind.SIGKILL_ALL,
    SimKind.HANG,
    SimKind.HANG_NATIVE,
    SimKind.SIGSTOP,
    SimKind.WRITER_KILL,
    SimKind.STORAGE,
    SimKind.UNFIT,
    SimKind.NODE_KILL,
    SimKind.LINK_FLAP,
    SimKind.BAD_START,
)
_ENDING = (SimKind.SIGTERM, SimKind.HALT, SimKind.LAUNCHER_KILL)
_PHASES = (Phase.RENDEZVOUS, Phase.REBUILD, Phase.LOAD, Phase.FIRST_STEP)


def draw_plan(rng: Generator, *, num_ranks: int, num_steps: int) -> list[SimFault]:
    """Up to five faults; some hit a recovery (a phase before the first step), some end the launcher."""
    plan = []
    for _ in range(rng.randint(0, 5)):
        kind = rng.choice(_ENDING) if rng.random() < 0.15 else rng.choice(_LIGHT)
        is_early = rng.random() < 0.3
        plan.append(
            SimFault(
                kind=kind,
                rank=rng.randrange(num_ranks),
                step=rng.randint(1, num_steps),
                phase=rng.choice(_PHASES) if is_early else Phase.STEP,
                times=rng.choice((1, 1, 1, 2, 3)),
            )
        )
    return plan
