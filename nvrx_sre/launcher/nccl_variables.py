"""Variables of torch and NCCL under which only the launcher ends a process (docs/adr/0029).

By default torch's NCCL watchdog and its monitor end a process themselves when a collective fails, takes too long or the
watchdog stands still, and dump to files of their own before. Under a launcher that sees the same fault, keeps survivors
and takes the flight recorder, that is a second opinion with a kill switch. What is here switches it off in every child.

The user's word stands: a variable that is set stays as it is, under whichever of its names. If its value brings the
second opinion back, one line at the start says what that means.

Names and meanings are those of torch 2.11 to 2.13 (ProcessGroupNCCL.hpp, FlightRecorder.hpp). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TRUE, _FALSE = ("1", "y", "yes", "t", "true"), ("0", "n", "no", "f", "false")
"""Words that torch takes for a truth value, in any case (c10d::getCvarBool)."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One variable, what its children get, and what it means if the user has chosen otherwise."""

    name: str
    value: str
    """"" leaves it unset."""
    consequence: str
    contrary: tuple[str, ...] = ()
    """Values that go against it; none named: any other than `value`."""
    older_names: tuple[str, ...] = ()

    def is_contrary(self, chosen: str) -> bool:
        """True if `chosen` goes against it."""
        meant = _meaning(chosen)
        return meant in self.contrary if self.contrary else meant != self.value


VARIABLES = (
    Variable(
        name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        value="0",
        older_names=("NCCL_ASYNC_ERROR_HANDLING",),
        consequence="torch ends a rank whose collective failed (1 and 3), or lets it go on with wrong data (2)",
    ),
    Variable(
        name="TORCH_NCCL_RETHROW_CUDA_ERRORS",
        value="0",
        consequence="torch ends a rank at an error of its device before the rank can say what it was",
    ),
    Variable(
        name="TORCH_NCCL_ENABLE_MONITORING",
        value="0",
        consequence="torch ends a rank whose NCCL watchdog stands still, a survivor with an aborted group among them",
    ),
    Variable(
        name="TORCH_NCCL_DUMP_ON_TIMEOUT",
        value="0",
        consequence="after a failed collective torch dumps to files of its own, beside what the incident keeps",
    ),
    Variable(
        name="TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        value="0",
        consequence="the group of a failed collective lives on for four times that, and a fault then costs the process",
    ),
    Variable(
        name="TORCH_NCCL_DESYNC_DEBUG",
        value="",
        contrary=("1",),
        older_names=("NCCL_DESYNC_DEBUG",),
        consequence="torch switches its error handling back to 3 and ends a rank whose collective failed",
    ),
    Variable(
        name="TORCH_DISTRIBUTED_DEBUG",
        value="",
        contrary=("detail",),
        consequence="torch switches its error handling back to 3 and ends a rank whose collective failed",
    ),
    Variable(
        name="NCCL_NVLS_ENABLE",
        value="0",
        consequence="the abort of a group that uses NVLink multicast may hang, and then costs the process",
    ),
    Variable(
        # Where nobody has chosen: reading torch's own 2,000 takes 21 ms out of the recovery from a hang, 128 take 1 ms.
        name="TORCH_FR_BUFFER_SIZE",
        value="128",
        contrary=("0",),
        older_names=("TORCH_NCCL_TRACE_BUFFER_SIZE",),
        consequence="no collective is recorded: the incident does not show who waited for whom",
    ),
)


def unset_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What children get beside `environment`: each variable that it has under none of its names."""
    return {
        item.name: item.value
        for item in VARIABLES
        if item.value and not environment.keys() & {item.name, *item.older_names}
    }


def contrary_values(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable of `environment` whose value goes against what the launcher needs."""
    lines = []
    for item in VARIABLES:
        # Torch reads the newest of the names that are set.
        chosen = next((name for name in (item.name, *item.older_names) if name in environment), None)
        if chosen is not None and item.is_contrary(environment[chosen]):
            wanted = f"{item.name}={item.value}" if item.value else f"{item.name} unset"
            lines.append(f"{chosen}={environment[chosen]} is kept (wanted: {wanted}): {item.consequence}")
    return lines


def _meaning(text: str) -> str:
    """The value as torch reads it: words for truth values are 1 and 0, numbers have one form."""
    word = text.strip().lower()
    if word in _TRUE:
        return "1"
    if word in _FALSE:
        return "0"
    return str(int(word)) if word.isdecimal() else word
