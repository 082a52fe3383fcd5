"""One durable save from sealed slots to a commit, of one writer or of several that share it.

    read -> scan -> plan (exchange) -> write -> [part in] -> leader: gather -> describe -> commit

Model: every writer works in the same attempt directory. A follower is done when its part is in; the leader commits
when all are. Whoever cannot go on ends the attempt for all: an attempt commits as a whole or not
at all. Blocking throughout: runs in the writer process. Must not: run a collective, verify or retain.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx_sre.checkpoint import parts, write
from nvrx_sre.checkpoint.commit import SaveRequest, attempt_path, check_current, commit
from nvrx_sre.checkpoint.parts import Exchange, Share
from nvrx_sre.checkpoint.slots import SlotFile
from nvrx_sre.checkpoint.storage import WriteOptions
from nvrx_sre.checkpoint.write import PlanCache, Plans, RankPlan, RankState, Written
from nvrx_sre.core.errors import StorageError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Sealed slots of this writer's ranks: `slots[i]` of `slot_files[i]`, the first of rank `share.first_rank`."""

    slot_files: Sequence[SlotFile]
    slots: Sequence[int]
    share: Share = field(default_factory=Share)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What became of this writer's share. `directory` is None on a follower: the leader commits."""

    directory: Path | None
    size_bytes: int


class Saver:
    """Takes the saves of one writer process; keeps the plans from one to the next. Not thread-safe."""

    def __init__(self, run_dir: Path, options: WriteOptions) -> None:
        self.plans = PlanCache()
        self._run_dir = run_dir
        self._options = options

    def save(self, request: SaveRequest, source: Source, on_written: Callable[[int], None] = lambda _: None) -> Saved:
        """Write and, as the leader, commit. `on_written(size_bytes)`: this writer's files are on the disk.

        Raises `SaveRefused` or `StorageError`; then nothing of the attempt is left.
        """
        directory = attempt_path(self._run_dir, request, source.share.attempt)
        exchange = Exchange(
            directory,
            source.share,
            lambda: check_current(self._run_dir, request.epoch, request.generation, request.step),
        )
        is_whole = False
        try:
            ranks = write.read_slots(source.slot_files, source.slots, request, source.share.first_rank)
            write.check_finite(ranks)
            saved = self._attempt(directory, request, source.share, exchange, ranks, on_written)
            is_whole = True
            return saved
        except OSError as error:
            raise StorageError(f"cannot save step {request.step}: {error.strerror or error}") from error
        finally:
            if not is_whole:
                _give_up(directory, source.share, exchange)

    def _attempt(
        self,
        directory: Path,
        request: SaveRequest,
        share: Share,
        exchange: Exchange,
        ranks: Sequence[RankState],
        on_written: Callable[[int], None],
    ) -> Saved:
        self._options.at_stage("plan")
        described = self._exchange_plans(exchange, share, directory, ranks)
        plans = self.plans.plans_for(described)
        written = write.write_files(directory, ranks, plans, self._options)
        size_bytes = sum(entry.size_bytes for entry in written.files.values())
        on_written(size_bytes)
        if share.num_parts > 1:
            write.check_untouched(ranks)
            exchange.put(parts.PART, written.to_json())
            if not share.is_leader:
                return Saved(directory=None, size_bytes=size_bytes)
            written = Written.merged(exchange.gather(parts.PART))
            exchange.clear()
        return self._publish(directory, request, ranks, described, plans, written)

    def _exchange_plans(
        self, exchange: Exchange, share: Share, directory: Path, ranks: Sequence[RankState]
    ) -> list[RankPlan]:
        own = [write.plan_of(rank) for rank in ranks]
        if share.num_parts == 1:
            return own
        write.make_attempt(directory)
        exchange.put(parts.PLAN, {"ranks": [plan.to_json() for plan in own]})
        found = [RankPlan.from_json(item) for body in exchange.gather(parts.PLAN) for item in body["ranks"]]
        return sorted(found, key=lambda plan: plan.rank)

    def _publish(
        self,
        directory: Path,
        request: SaveRequest,
        ranks: Sequence[RankState],
        described: Sequence[RankPlan],
        plans: Plans,
        written: Written,
    ) -> Saved:
        manifest = write.describe(directory, request, [plan.layout.hash for plan in described], plans, written)
        final = commit(
            self._run_dir,
            directory,
            manifest,
            is_untouched=lambda: write.check_untouched(ranks),
            at_stage=self._options.at_stage,
        )
        return Saved(directory=final, size_bytes=manifest.size_bytes)


def _give_up(directory: Path, share: Share, exchange: Exchange) -> None:
    """Nothing of the attempt stays: the leader removes it, another writer tells the leader."""
    if share.is_leader:
        shutil.rmtree(directory, ignore_errors=True)
        return
    with contextlib.suppress(OSError, StorageError):  # the leader's deadline ends it as well
        exchange.give_up()
