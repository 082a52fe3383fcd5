"""What the checkpoint commands print: lines for people, dicts for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvrx_sre.checkpoint import discover as discovery
from nvrx_sre.checkpoint.discover import Discovery, Found, Rejected
from nvrx_sre.checkpoint.prune import PruneReason, Removal
from nvrx_sre.cli.narrate import bytes_text
from nvrx_sre.cli.ownership import HotState
from nvrx_sre.core.clock import seconds

if TYPE_CHECKING:
    from nvrx_sre.checkpoint.export import Exported  # loads torch

WHY_REMOVED = {
    PruneReason.SURPLUS: "older than the verified checkpoints to keep",
    PruneReason.ABANDONED: "abandoned, the run went back before it",
    PruneReason.INTERRUPTED: "a save that never committed",
    PruneReason.RETIRED: "a deletion that was cut short",
}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Everything that `list` shows. `is_live`: a launcher of this host owns the run."""

    found: Discovery
    aside: Sequence[str]
    hot: HotState | None
    is_live: bool
    now_ns: int

    def lines(self) -> Iterator[str]:
        """For people: what can be restored, newest first, then the rest with its reason."""
        if self.found.restorable or self.hot is not None:
            yield (
                f"{'step':>10}  {'generation':>10}  {'tier':7}  {'size':>9}  {'age':>8}  {'verified':8}  directory"
            ).rstrip()
        else:
            yield "nothing is restorable"
        if self.hot is not None:
            yield (
                f"{self.hot.step:>10}  {self.hot.generation:>10}  {'hot':7}  {'':>9}  {'':>8}  {'-':8}  "
                f"only while the launcher (process {self.hot.launcher_pid}) lives"
            )
        for item in self.found.restorable:
            yield (
                f"{item.step:>10}  {item.generation:>10}  {'durable':7}  {bytes_text(item.size_bytes):>9}  "
                f"{_age(self.now_ns - item.captured_ns):>8}  {'yes' if item.verified else 'no':8}  {item.directory}"
            )
        yield from self._not_restorable()

    def _not_restorable(self) -> Iterator[str]:
        for item in self.found.abandoned:
            yield f"abandoned    {item.directory}: a later generation rolled back below step {item.step}"
        for rejected in self.found.rejected:
            yield f"unusable     {rejected.directory}: {rejected.reason}: {rejected.message}"
        for name in self.found.interrupted:
            if self.is_live:
                yield f"in progress  {name}: a save that is being written, or has just failed"
            else:
                yield f"interrupted  {name}: a save that never committed"
        for name in self.aside:
            yield f"moved aside  {discovery.REJECTED}/{name}"

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "restorable": [self._found(item) for item in self.found.restorable],
            "abandoned": [self._found(item) for item in self.found.abandoned],
            "rejected": [asdict(item) for item in self.found.rejected],
            "interrupted": self.found.interrupted,
            "moved_aside": list(self.aside),
            "hot": None if self.hot is None else asdict(self.hot),
            "live": self.is_live,
        }

    def _found(self, item: Found) -> dict[str, Any]:
        return {
            "directory": item.directory,
            "step": item.step,
            "generation": item.generation,
            "epoch": item.epoch,
            "world_size": item.world_size,
            "size_bytes": item.size_bytes,
            "captured_ns": item.captured_ns,
            "age_s": round(seconds(self.now_ns - item.captured_ns), 3),
            "verified": item.verified,
        }


def verdict(result: Found | Rejected, *, is_gone: bool = False) -> str:
    """One line of `verify`. `is_gone`: it was deleted before all of it was read."""
    if is_gone:
        return f"deleted   {result.directory}  by retention, while it was read"
    if isinstance(result, Rejected):
        return f"damaged   {result.directory}: {result.reason}: {result.message}"
    files = len(result.manifest.files)
    return f"good      {result.directory}  step {result.step}, {bytes_text(result.size_bytes)}, {files} files"


def removals(planned: Sequence[Removal]) -> Iterator[str]:
    """What `prune` would delete."""
    for item in planned:
        yield f"{bytes_text(item.size_bytes):>9}  {item.directory}: {WHY_REMOVED[item.reason]}"


def exported(result: Exported) -> Iterator[str]:
    """What `export` wrote."""
    yield f"step {result.step}: {result.num_tensors} tensors, {bytes_text(result.size_bytes)} in {result.path}"
    if result.num_own:
        yield f"left out: {result.num_own} copies that ranks keep of their own beside the common value"


def _age(age_ns: int) -> str:
    age_s = max(0, round(seconds(age_ns)))
    if age_s < 120:
        return f"{age_s} s"
    if age_s < 7200:
        return f"{age_s // 60} min"
    return f"{age_s // 3600} h" if age_s < 172_800 else f"{age_s // 86_400} d"
