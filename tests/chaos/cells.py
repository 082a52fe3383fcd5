"""The cells of the chaos matrix: what strikes, where, whom, and which of them make no sense.

Two tables: kind x phase x victim, and the second fault during the recovery of a first, at each of its stages.

Model: a row is one launched run; each of its cells strikes the run once, a few steps behind the one before, so that
there is progress in between and each has its own incident. Phases that belong to a recovery (rendezvous, restore,
teardown, the first step of a generation) need a fault before them: the *opener*, an exception on the rank in the
middle, which is never the victim. The same list of rows is run, printed and checked against the committed table.

Pure: no process, no file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from nvrx_sre.events.schema import FaultClass
from nvrx_sre.faults.plan import FaultKind

NPROC = 3
STEPS = 66
EVERY = 6
"""Steps between saves, and between evaluations."""
GAP = 6
"""Steps between two cells."""


class Victim(StrEnum):
    """Whom it strikes."""

    FIRST = "rank 0"
    LAST = "last rank"
    TWO = "two ranks at once"
    LAUNCHER = "launcher"


RANKS = {Victim.FIRST: (0,), Victim.LAST: (NPROC - 1,), Victim.TWO: (0, NPROC - 1)}
"""Ranks that a victim stands for; the one in the middle survives."""
OPENER_RANK = 1
HELD_RANK = 0
"""Stands in the phase in which the launcher is struck."""
HELD = "=25.0x"
"""So many times its usual step: longer than it takes to see it in the journal, shorter than any deadline."""
SLOWED = "=10.0x"
"""How slow a slow rank is: a second or so, which must not be taken for a hang."""

EXPECTED: dict[FaultKind, FaultClass | None] = {
    FaultKind.EXCEPTION: FaultClass.EXCEPTION,
    FaultKind.SIGKILL: FaultClass.KILLED,
    FaultKind.SIGSTOP: FaultClass.HANG,
    FaultKind.HANG: FaultClass.HANG,
    FaultKind.HANG_NATIVE: FaultClass.HANG,
    FaultKind.HANG_GIL: FaultClass.HANG,
    FaultKind.OOM_KILL: FaultClass.OOM_KILL,
    FaultKind.NONFINITE: FaultClass.NONFINITE,
    FaultKind.SLOW: None,
}
"""Kinds of the matrix, and the class that each is found to be; None: it is no fault, and nothing may happen."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where in the run a phase is struck. `mark`: phase of the fault spec, "" for the first mark of the step."""

    step: int
    mark: str
    is_in_recovery: bool = False
    """It needs an opener, at `step`."""


POINTS: dict[str, Point] = {
    "init": Point(step=1, mark="init"),
    "rendezvous": Point(step=43, mark="rendezvous", is_in_recovery=True),
    "first step": Point(step=37, mark="backward", is_in_recovery=True),
    "step": Point(step=7, mark=""),
    "backward": Point(step=13, mark="backward"),
    "data": Point(step=19, mark="data"),
    "save": Point(step=24, mark="save"),
    "evaluate": Point(step=30, mark="evaluate"),
    "restore": Point(step=49, mark="restore", is_in_recovery=True),
    "teardown": Point(step=55, mark="teardown", is_in_recovery=True),
    "collective": Point(step=61, mark="collective"),
    "exit": Point(step=STEPS, mark="exit"),
}
"""Columns of the matrix."""
RECOVERY_MARKS = ("teardown", "rendezvous", "rebuild", "restore")
"""Marks that fire at the first recovery at or after their step."""

LEGEND = {
    "a": "there is no loss in this phase that could be not-a-number",
    "b": "the launcher runs no training: what can happen to it is an error of its own, its death, and standing still",
    "c": "an exception or a death is detected at once; two ranks at the same time are *two ranks at once* above",
    "d": "a dead process tears nothing down",
    "e": "a rank that hangs raises nothing, and hangs no further",
}
"""Why a cell is not applicable."""
LOSSLESS = ("init", "rendezvous", "save", "restore", "teardown", "exit")
LAUNCHER_KINDS = (FaultKind.EXCEPTION, FaultKind.SIGKILL, FaultKind.SIGSTOP, FaultKind.OOM_KILL)


def not_applicable(kind: FaultKind, phase: str, victim: Victim) -> str:
    """Letter of the legend if the cell of the matrix makes no sense, else ""."""
    if victim is Victim.LAUNCHER:
        return "" if kind in LAUNCHER_KINDS else "b"
    return "a" if kind is FaultKind.NONFINITE and phase in LOSSLESS else ""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One cell as it is run: the faults it consists of, and what has to come of them."""

    column: str
    step: int
    """Strikes of a run come in this order."""
    openers: tuple[str, ...]
    """Faults that lead to the phase; they strike first."""
    specs: tuple[str, ...]
    ranks: tuple[int, ...]
    expected: FaultClass | None
    kills_from_outside: bool = False
    """The victim cannot do it itself: the test kills it once the last opener has struck."""

    @property
    def last_spec(self) -> str:
        """The fault after which the run stands where it is to be struck from outside."""
        return (*self.openers, *self.specs)[-1]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One launched run."""

    table: str
    name: str
    strikes: tuple[Strike, ...]
    blanks: dict[str, str]
    """Column -> letter of the legend."""

    @property
    def specs(self) -> list[str]:
        """Faults of the run."""
        return [spec for strike in self.strikes for spec in (*strike.openers, *strike.specs)]

    @property
    def stem(self) -> str:
        """Name of its file of results."""
        return f"{self.table}-{self.name}".replace(" ", "-").replace(",", "")


MATRIX = "matrix"
"""Kind x phase x victim."""
SECOND = "second"
"""The second fault during the recovery of the first."""
COLUMNS = {MATRIX: tuple(POINTS), SECOND: ("detect", "teardown", "rendezvous", "rebuild", "restore", "first step")}
"""Of each table."""


def rank_rows() -> Iterator[Row]:
    """Rows of the matrix in which ranks are struck."""
    for kind in EXPECTED:
        for victim in RANKS:
            yield _matrix_row(kind, victim)


def launcher_rows() -> Iterator[Row]:
    """Rows of the matrix in which the launcher is struck while rank 0 is held in the phase."""
    for kind in EXPECTED:
        yield _matrix_row(kind, Victim.LAUNCHER)


def matrix_rows() -> list[Row]:
    """Every row of the matrix, by kind."""
    order = list(EXPECTED)
    return sorted([*rank_rows(), *launcher_rows()], key=lambda row: order.index(FaultKind(row.name.split(",")[0])))


RECOVERED = (FaultKind.EXCEPTION, FaultKind.SIGKILL, FaultKind.HANG)
"""Kinds of the first fault, and of the second."""


def second_rank_rows() -> Iterator[Row]:
    """Rows of first x second fault, on the same and on another rank."""
    for first in RECOVERED:
        for second in RECOVERED:
            for rank in (FIRST_RANK, OTHER_RANK):
                yield _second_row(first, second, rank)


def second_launcher_rows() -> Iterator[Row]:
    """Rows in which the launcher is killed during the recovery, while rank 0 is held in the stage."""
    for first in RECOVERED:
        blanks = {"detect": "c"} if first is not FaultKind.HANG else {}
        yield Row(
            table=SECOND,
            name=f"{first}, then {FaultKind.SIGKILL} of the launcher",
            strikes=tuple(_second_launcher(first, stage) for stage in COLUMNS[SECOND] if stage not in blanks),
            blanks=blanks,
        )


def second_rows() -> list[Row]:
    """Every row of the second table."""
    return [*second_rank_rows(), *second_launcher_rows()]


def struck_launchers() -> Iterator[tuple[FaultKind, Row]]:
    """What happens to the launcher, and the row, of both tables."""
    for kind in LAUNCHER_KINDS:
        yield kind, _matrix_row(kind, Victim.LAUNCHER)
    for row in second_launcher_rows():
        yield FaultKind.SIGKILL, row


def _matrix_row(kind: FaultKind, victim: Victim) -> Row:
    blanks = {phase: not_applicable(kind, phase, victim) for phase in POINTS}
    return Row(
        table=MATRIX,
        name=f"{kind}, {victim}",
        strikes=tuple(_strike(kind, phase, victim) for phase in POINTS if not blanks[phase]),
        blanks={phase: letter for phase, letter in blanks.items() if letter},
    )


def _strike(kind: FaultKind, phase: str, victim: Victim) -> Strike:
    point = POINTS[phase]
    opener = f"{FaultKind.EXCEPTION}@{OPENER_RANK}:{point.step}/forward"
    if victim is Victim.LAUNCHER:
        specs: tuple[str, ...] = (spec_of(FaultKind.SLOW, HELD_RANK, point.step, point.mark, HELD),)
    else:
        parameter = SLOWED if kind is FaultKind.SLOW else ""
        specs = tuple(spec_of(kind, rank, point.step, point.mark, parameter) for rank in RANKS[victim])
    return Strike(
        column=phase,
        step=point.step,
        openers=(opener,) if point.is_in_recovery else (),
        specs=specs,
        ranks=RANKS.get(victim, ()),
        expected=None if victim is Victim.LAUNCHER else EXPECTED[kind],
    )


FIRST_RANK, OTHER_RANK = 0, NPROC - 1


def _second_row(first: FaultKind, second: FaultKind, rank: int) -> Row:
    same = rank == FIRST_RANK
    blanks = {stage: _no_second(first, second, stage, same) for stage in COLUMNS[SECOND]}
    return Row(
        table=SECOND,
        name=f"{first}, then {second} of {'the same' if same else 'another'} rank",
        strikes=tuple(_second(first, second, stage, rank) for stage in COLUMNS[SECOND] if not blanks[stage]),
        blanks={stage: letter for stage, letter in blanks.items() if letter},
    )


def _no_second(first: FaultKind, second: FaultKind, stage: str, same: bool) -> str:
    if stage == "detect":
        if first is not FaultKind.HANG:
            return "c"
        if second is FaultKind.SIGKILL:
            return ""
        return "e" if same else "c" if second is FaultKind.HANG else ""
    return "d" if stage == "teardown" and same and first is FaultKind.SIGKILL else ""


def _second(first: FaultKind, second: FaultKind, stage: str, rank: int) -> Strike:
    step = _second_step(stage)
    openers: tuple[str, ...] = (spec_of(first, FIRST_RANK, step, "forward"),)
    specs: tuple[str, ...] = (spec_of(second, rank, step, "backward" if stage == "first step" else stage),)
    outside = stage == "detect" and rank == FIRST_RANK
    if stage == "detect":
        # The other rank waits until the first surely hangs, in a phase that it can be in without its peer.
        openers = (spec_of(first, FIRST_RANK, step, "data"),)
        specs = (
            () if outside else (spec_of(FaultKind.SLOW, rank, step, "data", HELD), spec_of(second, rank, step, "data"))
        )
    return Strike(
        column=stage,
        step=step,
        openers=openers,
        specs=specs,
        ranks=(rank,),
        expected=EXPECTED[second],
        kills_from_outside=outside,
    )


def _second_step(stage: str) -> int:
    return GAP * (COLUMNS[SECOND].index(stage) + 1) + 1


def _second_launcher(first: FaultKind, stage: str) -> Strike:
    step = _second_step(stage)
    is_unseen = stage == "detect"
    mark = "backward" if stage == "first step" else stage
    return Strike(
        column=stage,
        step=step,
        openers=(spec_of(first, OPENER_RANK, step, "data" if is_unseen else "forward"),),
        specs=() if is_unseen else (spec_of(FaultKind.SLOW, HELD_RANK, step, mark, HELD),),
        ranks=(),
        expected=None,
    )


def spec_of(kind: FaultKind, rank: int, step: int, mark: str, parameter: str = "") -> str:
    """Text of a fault. One that waits for a recovery is due a little before it, which may go back a step or two."""
    due = step - GAP // 2 if mark in RECOVERY_MARKS else step
    return f"{kind}@{rank}:{due}{parameter}" + (f"/{mark}" if mark else "")
