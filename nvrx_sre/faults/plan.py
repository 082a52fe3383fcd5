"""Planned faults: what, on which rank, at which step, where inside it, how often.

    KIND@RANK:STEP[=PARAMETER][/PHASE][xN|x*]        exception@1:40   sigkill@1:200/save   slow@1:40=2.0x   hang@0:9x3

Model: a fault names one step and fires when that step is executed on that rank. How often it has fired in the
run (its *passes*, keyed by the fault's canonical text) is counted outside and handed in, so that a fault which
fires once does so for the whole run, whatever was restarted since. Without a phase it fires at the first mark or
commit of the step. Phases that not every step has (`RARE_PHASES`: forming a generation, saving, evaluating)
fire at the first occasion at or after the step.

Faults of a device (`DEVICE_KINDS`) are real ones, and need one.

`hang` in phase `collective` names the way it hangs rather than a place: a native collective that no peer answers.

Faults of storage (`STORAGE_KINDS`) strike no rank but the writer, at a stage of the first durable save at or after
their step: `writer_kill@0:16/rename`, `no_space@0:16/manifest`. The rank says whose node's writer.

Invariants: `FaultSpec.parse(str(spec)) == spec`; a plan object serves one generation of one rank, in which no
step is executed twice, and so returns each fault at most once.
Thread safety: `FaultSpec` is immutable, `FaultPlan` belongs to one thread. Must not: load torch, execute anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nvrx_sre.core.errors import UserError


class FaultKind(StrEnum):
    """What happens."""

    EXCEPTION = "exception"
    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    HANG = "hang"
    HANG_NATIVE = "hang_native"
    HANG_GIL = "hang_gil"
    OOM_KILL = "oom_kill"
    CUDA_ERROR = "cuda_error"
    CUDA_OOM = "cuda_oom"
    CUDA_ILLEGAL_ACCESS = "cuda_illegal_access"
    CUDA_ASSERT = "cuda_assert"
    NONFINITE = "nonfinite"
    CORRUPT_CHECKPOINT = "corrupt_checkpoint"
    SLOW = "slow"
    SLOW_STORAGE = "slow_storage"
    SIGTERM = "sigterm"
    NODE_KILL = "node_kill"
    WRITER_KILL = "writer_kill"
    LAUNCHER_KILL = "launcher_kill"
    NO_SPACE = "no_space"
    IO_ERROR = "io_error"


STEP_PHASES = ("data", "forward", "backward", "optimizer", "collective", "commit")
"""Phases inside a step: `commit` in every script, `data` by `ctx.phase`, the others by a `ctx.mark` of that name."""
RARE_PHASES = ("init", "rendezvous", "rebuild", "restore", "save", "evaluate", "teardown", "exit")
"""Phases that a rank passes now and then."""
SAVE_STAGES = ("plan", "write", "fsync", "manifest", "rename", "verify", "retention")
"""Stages of a durable save, in the writer."""
PHASES = STEP_PHASES + RARE_PHASES + SAVE_STAGES
EVERY_PASS = 0
"""`FaultSpec.passes` of a fault that fires each time its step is executed."""
DEFAULT_PARAMETERS: Mapping[FaultKind, float] = {FaultKind.SLOW: 2.0, FaultKind.SLOW_STORAGE: 1.0}
"""Kinds that take a parameter: factor of the usual step time (`2.0x`), seconds a file (`0.5s`)."""

STORAGE_KINDS = frozenset(
    {
        FaultKind.SLOW_STORAGE,
        FaultKind.WRITER_KILL,
        FaultKind.LAUNCHER_KILL,
        FaultKind.NO_SPACE,
        FaultKind.IO_ERROR,
    }
)
"""Kinds that strike the writer. `slow_storage` without a stage slows every file of every save from its step on."""

DEVICE_KINDS = frozenset({FaultKind.CUDA_OOM, FaultKind.CUDA_ILLEGAL_ACCESS, FaultKind.CUDA_ASSERT})
"""Kinds that need an NVIDIA device on the rank's node."""

_NOT_A_STEP_POINT = frozenset({"data", *RARE_PHASES})
_UNITS = {FaultKind.SLOW: "x", FaultKind.SLOW_STORAGE: "s"}
_SHAPE = "KIND@RANK:STEP[=PARAMETER][/PHASE][xN|x*]"
_SPEC = re.compile(
    r"(?P<kind>[A-Za-z_]+)@(?P<rank>-?\d+):(?P<step>-?\d+)"
    r"(?:=(?P<parameter>[0-9.]+)(?P<unit>[xs]?))?"
    r"(?:/(?P<phase>[A-Za-z_]+?))?"
    r"(?:x(?P<passes>\d+|\*))?"
)
_MAX_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One planned fault. Valid by construction: raises `UserError` otherwise."""

    kind: FaultKind
    rank: int
    step: int
    parameter: float | None = None
    """Only for kinds in `DEFAULT_PARAMETERS`; None there means the default."""
    phase: str | None = None
    """One of `PHASES`, or None for the first mark or commit of the step."""
    passes: int = 1
    """Executions of the step on which it fires; `EVERY_PASS` for all."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise UserError(f"fault {self}: rank is {self.rank}, use 0 or more")
        if self.step < 1:
            raise UserError(f"fault {self}: step is {self.step}, steps count from 1")
        if self.phase is not None and self.phase not in PHASES:
            raise UserError(f"fault {self}: unknown phase {self.phase!r}, {_nearest(self.phase, PHASES)}")
        if self.passes < 0:
            raise UserError(f"fault {self}: it fires {self.passes} times, use x1 or more, or x*")
        self._check_stage()
        self._check_parameter()

    def _check_stage(self) -> None:
        if self.phase is None:
            return
        is_stage = self.phase in SAVE_STAGES
        if is_stage and self.kind not in STORAGE_KINDS:
            kinds = ", ".join(sorted(STORAGE_KINDS))
            raise UserError(f"fault {self}: {self.phase} is a stage of the writer, for {kinds} only")
        if self.kind in STORAGE_KINDS and not is_stage:
            raise UserError(f"fault {self}: {self.kind} strikes the writer, at {', '.join(SAVE_STAGES)}")

    def _check_parameter(self) -> None:
        if self.parameter is None:
            return
        if self.kind not in DEFAULT_PARAMETERS:
            raise UserError(f"fault {self}: {self.kind} takes no parameter")
        smallest = 1.0 if self.kind is FaultKind.SLOW else 0.0
        if not (math.isfinite(self.parameter) and self.parameter > smallest):
            raise UserError(f"fault {self}: parameter is {self.parameter:g}, use more than {smallest:g}")

    @property
    def value(self) -> float:
        """Parameter in force; 0 for kinds without one."""
        return DEFAULT_PARAMETERS.get(self.kind, 0.0) if self.parameter is None else self.parameter

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Inverse of `str`. Raises `UserError` that says what is wrong and what is known."""
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise UserError(f"fault {text!r} cannot be read: write {_SHAPE}, for example exception@1:40")
        kind = _kind(text, match["kind"])
        if match["unit"] and match["unit"] != _UNITS.get(kind, match["unit"]):
            raise UserError(f"fault {text!r}: parameter of {kind} is in {_UNITS[kind]!r}, not {match['unit']!r}")
        if match["passes"] == "0":
            raise UserError(f"fault {text!r} would never fire: use x1 or more, or x*")
        return cls(
            kind=kind,
            rank=int(match["rank"]),
            step=int(match["step"]),
            parameter=None if match["parameter"] is None else _number(text, match["parameter"]),
            phase=match["phase"],
            passes=EVERY_PASS if match["passes"] == "*" else int(match["passes"] or 1),
        )

    def __str__(self) -> str:
        text = f"{self.kind}@{self.rank}:{self.step}"
        if self.parameter is not None:
            text += f"={_decimal(self.parameter)}{_UNITS.get(self.kind, '')}"
        if self.phase is not None:
            text += f"/{self.phase}"
        if self.passes == EVERY_PASS:
            return text + "x*"
        return text if self.passes == 1 else f"{text}x{self.passes}"

    def matches(self, rank: int, step: int, point: str) -> bool:
        """True if the fault belongs to `point` of `step` on `rank`, whether or not it has fired before."""
        if rank != self.rank or self.kind in STORAGE_KINDS:
            return False
        if self.phase in RARE_PHASES:
            return point == self.phase and step >= self.step
        if step != self.step:
            return False
        if self.phase is None or (self.phase == "collective" and self.kind is FaultKind.HANG):
            return point not in _NOT_A_STEP_POINT
        return point == self.phase

    def is_spent(self, passes: Mapping[str, int]) -> bool:
        """True if it has fired as often as it may."""
        return self.passes != EVERY_PASS and passes.get(str(self), 0) >= self.passes


class FaultPlan:
    """The faults of a run, in the order in which they were given."""

    def __init__(self, specs: Iterable[FaultSpec] = ()) -> None:
        """Raises `UserError` for a fault that stands twice: their passes could not be told apart."""
        self.specs = tuple(specs)
        self._fired: set[FaultSpec] = set()
        seen: set[FaultSpec] = set()
        for spec in self.specs:
            once = dataclasses.replace(spec, passes=1)
            if once in seen:
                raise UserError(f"fault {spec} stands twice in the plan: write {once}x2 to let it fire twice")
            seen.add(once)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> FaultPlan:
        """Plan of fault texts. Raises `UserError` at the first that does not fit."""
        return cls(FaultSpec.parse(text) for text in texts)

    def check(self, world_size: int, steps: int | None = None, *, has_device: bool = True) -> None:
        """Raise `UserError` for a fault that can never fire in `world_size` ranks and `steps` steps.

        `has_device`: the ranks have an NVIDIA device each.
        """
        for spec in self.specs:
            if spec.kind in DEVICE_KINDS and not has_device:
                raise UserError(
                    f"fault {spec}: this machine has no NVIDIA device that it could strike; "
                    f"{FaultKind.CUDA_ERROR} raises what a failed device raises, on any machine"
                )
            if spec.rank >= world_size:
                raise UserError(f"fault {spec}: there is no rank {spec.rank}, the ranks are 0 to {world_size - 1}")
            if steps is not None and spec.step > steps:
                raise UserError(f"fault {spec}: there is no step {spec.step}, the run has {steps}")

    def due(self, rank: int, step: int, point: str, passes: Mapping[str, int]) -> list[FaultSpec]:
        """Faults that fire now, in the plan's order; each is returned once by this object.

        `point` is a phase or a mark of the user's; `step` is the one being executed, for a rare phase the one
        that is next. `passes`: canonical text -> times fired in the run, this generation not included or included.
        """
        found = [
            spec
            for spec in self.specs
            if spec not in self._fired and spec.matches(rank, step, point) and not spec.is_spent(passes)
        ]
        self._fired.update(found)
        return found


def load_plan(path: Path) -> tuple[FaultSpec, ...]:
    """Faults of a file: JSON or YAML list of texts (or under the key `faults`), or one text a line, `#` a comment.

    Raises `UserError` if the file is missing, unreadable, broken, or holds something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_PLAN_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read fault plan {path}: {reason}") from error
    if len(text) > _MAX_PLAN_BYTES:
        raise UserError(f"fault plan {path} is larger than {_MAX_PLAN_BYTES} bytes")
    try:
        return FaultPlan.parse(_texts(text, path)).specs
    except UserError as error:
        raise UserError(f"fault plan {path}: {error}") from error


def _texts(text: str, path: Path) -> list[str]:
    value = _decode(text, path)
    if isinstance(value, Mapping):
        unknown = sorted(str(key) for key in value if key != "faults")
        if unknown:
            raise UserError(f"unknown key {unknown[0]!r}: known is faults")
        value = value.get("faults")
    if value is None:
        return []
    if isinstance(value, str):  # bare lines are one multi-line text to YAML
        return value.split()
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise UserError("write a list of fault texts, for example [exception@1:40, sigkill@0:90]")
    return list(value)


def _decode(text: str, path: Path) -> Any:
    import yaml

    try:
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise UserError(f"line {error.lineno} is not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "the file"
        raise UserError(f"{where} is not YAML: {getattr(error, 'problem', None) or 'unreadable'}") from error


def _kind(text: str, name: str) -> FaultKind:
    try:
        return FaultKind(name)
    except ValueError:
        kinds = [kind.value for kind in FaultKind]
        raise UserError(f"fault {text!r}: unknown kind {name!r}, {_nearest(name, kinds)}") from None


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(known)}"


def _number(text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise UserError(f"fault {text!r}: {number!r} is not a number") from None


def _decimal(number: float) -> str:
    """Shortest decimal without an exponent, always with a fraction so that a pass count cannot follow it unseen."""
    text = f"{number:.12f}".rstrip("0")
    return text + "0" if text.endswith(".") else text
