"""How long does a fault cost? Our launcher and its peers, the same model and the same fault, in the same run.

Model: a benchmark is a list of parts (one contestant, one case, one number of ranks); each gives rows or fails by
itself, and what is there is handed over after each. Cases and targets: `recovery_cases`. Terms and formulas:
`recovery_reading`. Contestants: `recovery_ours`, `recovery_peers`. A row with a target says whether it was met; a
part that failed and a case that a peer cannot do are rows without samples.

Blocking: about half an hour on two cores; starts processes and waits for them. Must not: run anything else beside a
measurement.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx_sre.bench import recovery_ours as ours
from nvrx_sre.bench.recovery_cases import (
    AT_EVERY_SIZE,
    BENCH,
    COLLECTIVE,
    DETECTED_MAX_S,
    HANG,
    HEARTBEAT_S,
    LEAK,
    OVERHEAD_MAX_S,
    RANKS,
    STEP_DEADLINE_S,
    TIMEOUTS_MAX_RATIO,
    BenchConfig,
)
from nvrx_sre.bench.recovery_leak import count_restarts, leak_rows
from nvrx_sre.bench.recovery_peers import PEERS, TIMES_FASTER, Peer, PeerRun, run_peer
from nvrx_sre.bench.recovery_ranks import measured_rows, simulated_rows
from nvrx_sre.bench.recovery_reading import DETECTED, MARKS, Measured, Pace
from nvrx_sre.bench.rows import Keep, Row, Say, empty, summarize, target
from nvrx_sre.core.clock import SystemClock, seconds
from nvrx_sre.core.errors import NvrxError

OURS = "nvrx-sre"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One contestant in one case."""

    contestant: str
    case: str
    ranks: int
    run: Callable[[], list[Row]]

    def __str__(self) -> str:
        return f"{self.case}, {self.ranks} ranks, {self.contestant}"


class Benchmark:
    """One measurement. `rows` and `failed` (one line each) grow as it goes on. Makes and removes a scratch folder."""

    def __init__(self, config: BenchConfig, say: Say, keep: Keep) -> None:
        """`keep` is given all rows so far after every part."""
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._config = config
        self._say = say
        self._keep = keep
        self._paces: dict[int, Pace] = {}
        self._scratch = Path()

    def run(self) -> None:
        """Run all parts. Blocks; a part that fails leaves its reason in `failed`, and the others go on."""
        clock = SystemClock()
        with tempfile.TemporaryDirectory(prefix="nvrx-sre-bench-") as scratch:
            for number, part in enumerate(self._parts()):
                self._scratch = Path(scratch) / f"part-{number}"
                self._scratch.mkdir()
                started_ns = clock.monotonic_ns()
                found = self._rows_of(part)
                self.rows += found
                self._keep(self.rows)
                spent_s = seconds(clock.monotonic_ns() - started_ns)
                self._say(f"{part}: {_shown(found)} [{spent_s:.0f} s]")

    def _rows_of(self, part: Part) -> list[Row]:
        try:
            return part.run()
        except NvrxError as error:
            self.failed.append(f"{part}: {error}")
            return [_empty(part.contestant, part.case, part.ranks, f"failed: {error}")]

    # --- which parts --------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[Part]:
        config = self._config
        for case in config.cases:
            for ranks in config.ranks if case in AT_EVERY_SIZE else config.ranks[:1]:
                yield from self._ours(case, ranks)
                if config.counts.peers:
                    yield from self._theirs(case, ranks)

    def _ours(self, case: str, ranks: int) -> Iterator[Part]:
        config = self._config
        if case == COLLECTIVE:
            for timeout_s in config.collective_timeouts_s:
                yield Part(contestant=OURS, case=_at(timeout_s), ranks=ranks, run=self._collective(ranks, timeout_s))
        elif case == LEAK:
            yield Part(contestant=OURS, case=case, ranks=ranks, run=lambda: self._leak(ranks))
        elif case == RANKS:
            yield from self._against_ranks()
        else:
            yield Part(contestant=OURS, case=case, ranks=ranks, run=lambda: self._our_case(case, ranks))

    def _against_ranks(self) -> Iterator[Part]:
        config = self._config
        largest, simulated = max(config.sizes), config.max_simulated
        yield Part(contestant=OURS, case=RANKS, ranks=largest, run=lambda: measured_rows(OURS, self._scratch, config))
        yield Part(
            contestant=OURS, case=f"{RANKS} simulated", ranks=simulated, run=lambda: simulated_rows(OURS, simulated)
        )

    def _theirs(self, case: str, ranks: int) -> Iterator[Part]:
        for peer in PEERS:
            if case in peer.cannot or (case in peer.cases and peer.missing()):
                reason = peer.missing() or f"{peer.version()} {peer.cannot[case]}"
                yield Part(contestant=peer.name, case=case, ranks=ranks, run=_cannot(peer, case, ranks, reason))
            elif case == COLLECTIVE and case in peer.cases:
                for timeout_s in self._config.collective_timeouts_s:
                    run = self._their_collective(peer, ranks, timeout_s)
                    yield Part(contestant=peer.name, case=_at(timeout_s), ranks=ranks, run=run)
            elif case in peer.cases:
                yield Part(contestant=peer.name, case=case, ranks=ranks, run=self._their_case(peer, case, ranks))

    # --- ours ---------------------------------------------------------------------------------------------------

    def _pace(self, ranks: int) -> Pace:
        if ranks not in self._paces:
            self._paces[ranks] = ours.calibrate(self._scratch / "calibration", ranks)
        return self._paces[ranks]

    def _our_case(self, case: str, ranks: int) -> list[Row]:
        pace = self._pace(ranks)
        measured = ours.run_case(self._scratch / "run", case, ranks, self._config.counts.of(case), pace)
        if case == HANG:
            return hang_rows(ranks, measured)
        return case_rows(OURS, case, ranks, measured, [_note(measured), marks_note(measured)])

    def _collective(self, ranks: int, timeout_s: float) -> Callable[[], list[Row]]:
        def run() -> list[Row]:
            count = self._config.counts.collective
            pace = self._pace(ranks)
            measured = ours.run_collective(self._scratch / "run", ranks, count, pace, timeout_s)
            notes = [_note(measured), *self._against_shorter(timeout_s, measured)]
            return case_rows(OURS, _at(timeout_s), ranks, measured, notes)

        return run

    def _against_shorter(self, timeout_s: float, measured: Measured) -> list[str]:
        """How the median compares with that at the shortest timeout; nothing at that one, or where it failed."""
        shortest_s = min(self._config.collective_timeouts_s)
        base = self._found(OURS, f"{_at(shortest_s)} total")
        if timeout_s == shortest_s or base is None:
            return []
        ratio = statistics.median(measured.totals_s()) / base.median
        is_met = 1 / TIMEOUTS_MAX_RATIO <= ratio <= TIMEOUTS_MAX_RATIO
        return [f"total {ratio:.2f} x that at {shortest_s:g} s", target("within 20 %", is_met)]

    def _leak(self, ranks: int) -> list[Row]:
        measured, counted = count_restarts(self._scratch / "run", ranks, self._config.counts.leak, self._pace(ranks))
        return leak_rows(OURS, ranks, measured, counted)

    # --- theirs -------------------------------------------------------------------------------------------------

    def _their_case(self, peer: Peer, case: str, ranks: int) -> Callable[[], list[Row]]:
        def run() -> list[Row]:
            count = self._config.counts.peers
            measured = run_peer(peer, PeerRun(out=self._scratch / "peer", case=case, ranks=ranks, num_faults=count))
            return self._their_rows(peer, case, ranks, measured)

        return run

    def _their_collective(self, peer: Peer, ranks: int, timeout_s: float) -> Callable[[], list[Row]]:
        def run() -> list[Row]:
            counts = self._config.counts
            is_long = timeout_s == max(self._config.collective_timeouts_s)
            count = counts.peers_long_wait if is_long else counts.peers
            out = self._scratch / "peer"
            peer_run = PeerRun(out=out, case=COLLECTIVE, ranks=ranks, num_faults=count, group_timeout_s=timeout_s)
            return self._their_rows(peer, _at(timeout_s), ranks, run_peer(peer, peer_run))

        return run

    def _their_rows(self, peer: Peer, case: str, ranks: int, measured: Measured) -> list[Row]:
        notes = [peer.version(), _note(measured)]
        if case == HANG:
            notes.append(f"detection included, heartbeat limit {HEARTBEAT_S:g} s")
        mine = self._found(OURS, f"{case} total", ranks)
        if mine is not None:
            times = statistics.median(measured.totals_s()) / mine.median
            notes.append(f"total {times:.1f} x ours")
            wanted = TIMES_FASTER.get((peer.name, case))
            if wanted is not None:
                notes.append(target(f"at least {wanted:g} x", times >= wanted))
        return case_rows(peer.name, case, ranks, measured, notes)

    def _found(self, contestant: str, case: str, ranks: int | None = None) -> Row | None:
        """The row of a case that was measured."""
        for row in self.rows:
            if (row.contestant, row.case) == (contestant, case) and row.n and ranks in (None, row.ranks):
                return row
        return None


# --- rows (pure) ----------------------------------------------------------------------------------------------


def case_rows(contestant: str, case: str, ranks: int, measured: Measured, notes: Sequence[str]) -> list[Row]:
    """Overhead and total of a case. Ours says whether the overhead's target was met."""
    overheads_s = measured.overheads_s()
    wanted_s = OVERHEAD_MAX_S.get((case, ranks)) if contestant == OURS else None
    verdict = [] if wanted_s is None else [_at_most(wanted_s, statistics.median(overheads_s))]
    return [
        _row(contestant, case, ranks, overheads_s, [*verdict, *notes]),
        _row(contestant, f"{case} total", ranks, measured.totals_s(), notes),
    ]


def hang_rows(ranks: int, measured: Measured) -> list[Row]:
    """Of our hangs: detection past the deadline, overhead after it, and all together."""
    late_s = [found_s - STEP_DEADLINE_S for found_s in measured.marks_s(DETECTED)]
    notes = [f"deadline {STEP_DEADLINE_S:g} s", _note(measured)]
    detection = target(f"every one at most {DETECTED_MAX_S} s", max(late_s) <= DETECTED_MAX_S)
    after_s = measured.overheads_s(after=DETECTED)
    wanted_s = OVERHEAD_MAX_S.get(("exception", ranks))
    verdict = [] if wanted_s is None else [_at_most(wanted_s, statistics.median(after_s))]
    return [
        _row(OURS, f"{HANG} detection past the deadline", ranks, late_s, [detection, notes[0]]),
        _row(OURS, f"{HANG} after detection", ranks, after_s, [*verdict, *notes]),
        _row(OURS, f"{HANG} total", ranks, measured.totals_s(), notes),
    ]


def marks_note(measured: Measured) -> str:
    """Where the time went: medians, in ms after the fault."""
    marks = [(name, measured.marks_s(name)) for name in MARKS]
    parts = [f"{name} {statistics.median(values) * 1000:.0f}" for name, values in marks if values]
    done_ms = statistics.median(measured.totals_s()) * 1000
    return f"ms after the fault: {', '.join(parts)}, first step {done_ms:.0f}"


def _note(measured: Measured) -> str:
    redone = statistics.median(item.redone_steps for item in measured.recoveries)
    return f"step {measured.step_s * 1000:.1f} ms, median {redone:g} steps redone, {measured.note}"


def _at_most(wanted_s: float, median_s: float) -> str:
    return target(f"median at most {wanted_s:g} s", median_s <= wanted_s)


def _at(group_timeout_s: float) -> str:
    return f"{COLLECTIVE}, group timeout {group_timeout_s:g} s"


def _row(contestant: str, case: str, ranks: int, samples: Sequence[float], notes: Sequence[str]) -> Row:
    note = "; ".join(notes)
    return summarize(samples, bench=BENCH, contestant=contestant, case=case, ranks=ranks, unit="s", note=note)


def _empty(contestant: str, case: str, ranks: int, reason: str) -> Row:
    return empty(reason, bench=BENCH, contestant=contestant, case=case, ranks=ranks)


def _cannot(peer: Peer, case: str, ranks: int, reason: str) -> Callable[[], list[Row]]:
    return lambda: [_empty(peer.name, case, ranks, reason)]


def _shown(rows: Sequence[Row]) -> str:
    """A part's first row, in a line."""
    row = rows[0]
    return f"median {row.median:.4g} {row.unit} of {row.n}" if row.n else row.note
