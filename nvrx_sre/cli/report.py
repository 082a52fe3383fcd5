"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere.

Model: a sink of records. `TerminalReporter(record)` only puts the record on a bounded queue; a thread of its own
renders. A terminal that does not read (Ctrl-S, a stalled pipe) therefore never holds up the launcher: records
beyond the queue are dropped and counted.

Thread safety: `__call__` may be used from any thread; rendering happens in the reporter's thread alone.
Must not: change the run in any way, raise into the launcher, or print a progress line more often than every
`PROGRESS_EVERY_S` where there is no terminal.
"""

from __future__ import annotations

import queue
import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from nvrx_sre.cli.narrate import BAD, WARN, Line, counted, narrate
from nvrx_sre.core.clock import seconds
from nvrx_sre.events.schema import HotIntervalChosen, Record, ReplayDiverged, StepKind, StepsCommitted
from nvrx_sre.goodput.ledger import Ledger
from nvrx_sre.goodput.ratios import GoodputKind

PROGRESS_EVERY_S = 5.0
"""Least record time between two progress lines where output is not a terminal (seconds)."""
QUEUE_RECORDS = 4096
"""Records waiting to be shown; a run emits a few a second."""
WHOLE_WIDTH = 10_000
"""Columns that a table with a row a line may take."""
PLAIN_WIDTH = 120
"""Columns of a table where output is not a terminal."""
CLOSE_TIMEOUT_S = 2.0
"""Longest wait for the thread at the end (seconds): a terminal that does not read must not hold up the exit."""


class QuietConsole(Console):
    """A console that falls silent when its reader leaves, instead of ending the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console() -> QuietConsole:
    """Console for the program's own output; no markup or highlighting, long lines are left to the terminal."""
    width = None if sys.stdout.isatty() else PLAIN_WIDTH
    return QuietConsole(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def print_rows(console: Console, table: Table) -> None:
    """Print `table` in a terminal's columns; elsewhere, where a program may read it, a row a line."""
    if console.is_terminal:
        console.print(table)
    else:
        print_whole(console, table)


def print_whole(console: Console, table: Table) -> None:
    """Print `table` with a row a line: where the terminal is narrower, its lines wrap rather than its words."""
    table.width = console.measure(table, options=console.options.update_width(WHOLE_WIDTH)).maximum
    console.print(table, crop=False)


def _is_said_by_rank_0(record: Record) -> bool:
    """State that no slot can hold is told in rank 0's output, which a terminal shows as well."""
    return isinstance(record.event, HotIntervalChosen) and not record.event.every_steps


@dataclass
class ProgressTally:
    """Running totals behind the progress display. A pure fold over records."""

    step: int = 0
    loss: float | None = None
    tokens_s: float = 0.0
    goodput: float | None = None
    _ledger: Ledger = field(default_factory=Ledger)

    def add(self, record: Record) -> None:
        """Take one record into account."""
        self._ledger.apply(record)
        event = record.event
        if not isinstance(event, StepsCommitted):
            return
        self.step = event.last_step
        self.loss = event.loss if event.loss is not None else self.loss
        span_s = seconds(event.committed_ns - event.started_ns)
        self.tokens_s = event.tokens / span_s if span_s > 0 else 0.0
        self.goodput = self._ledger.goodput(record.time_ns).get(GoodputKind.TRAINING)

    def text(self, num_steps: int | None) -> str:
        """`step 120/300  loss 2.134  45,210 tokens/s  goodput 83 %`."""
        parts = [f"step {self.step}" + (f"/{num_steps}" if num_steps else "")]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        parts.append(f"{self.tokens_s:,.0f} tokens/s")
        if self.goodput is not None:
            parts.append(f"goodput {self.goodput:.0%}")
        return "  ".join(parts)


class DivergedSteps:
    """Steps of one generation that gave another loss when they were redone: first one told at once, the rest in a line.

    A script without a seed has one in every step it redoes. A pure fold over records.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._num_untold = 0
        self._last_step = 0

    def is_told(self, record: Record) -> bool:
        """Whether `record` is one more of its generation, which `summary` will tell of."""
        if not isinstance(record.event, ReplayDiverged):
            return False
        is_first = self._generation != record.generation
        self._generation, self._last_step = record.generation, record.event.step
        self._num_untold += not is_first
        return not is_first

    def ends_with(self, record: Record) -> bool:
        """Whether nothing more of them is redone: a new step was committed, or another generation has begun."""
        event = record.event
        is_new = isinstance(event, StepsCommitted) and event.kind is StepKind.NEW
        return is_new or record.generation != self._generation

    def summary(self) -> Line | None:
        """A line about those that were not told so far, None if there are none."""
        num_untold, self._num_untold = self._num_untold, 0
        if not num_untold:
            return None
        more, was = counted(num_untold, "more step"), "it was" if num_untold == 1 else "they were"
        return Line(f"{more} up to step {self._last_step} gave a different loss when {was} redone", BAD)


class TerminalReporter:
    """Shows a run. Use as a context manager, or call `close`.

    `num_steps`: the run's planned steps, None if unknown (no bar, only the numbers).
    """

    def __init__(self, num_steps: int | None, console: Console | None = None) -> None:
        self.num_dropped = 0
        self._num_steps = num_steps
        self._console = console or make_console()
        self._tally = ProgressTally()
        self._diverged = DivergedSteps()
        self._last_progress_ns: int | None = None
        self._last_text = ""
        self._queue: queue.Queue[Record | Line | None] = queue.Queue(QUEUE_RECORDS)
        self._progress = self._make_progress() if self._console.is_terminal else None
        self._thread = threading.Thread(target=self._render_all, name="nvrx-terminal", daemon=True)
        self._thread.start()

    def __call__(self, record: Record) -> None:
        """Queue `record` for display. Never blocks, never raises."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def say(self, text: str) -> None:
        """Queue a line of what is no record. Never blocks, never raises."""
        try:
            self._queue.put_nowait(Line(text, WARN))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Show what is queued, remove the bar, stop. Blocks at most `CLOSE_TIMEOUT_S`."""
        try:
            self._queue.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> TerminalReporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_progress(self) -> Progress:
        columns = [BarColumn(bar_width=24)] if self._num_steps else []
        progress = Progress(
            *columns, TextColumn("{task.description}"), console=self._console, auto_refresh=False, transient=True
        )
        progress.add_task("starting", total=self._num_steps)
        return progress

    def _render_all(self) -> None:
        """Body of the thread. Ends at the marker that `close` queues, or when the terminal is gone."""
        try:
            if self._progress is not None:
                self._progress.start()
            while (item := self._queue.get()) is not None:
                if isinstance(item, Line):
                    self._print(item)
                else:
                    self._render(item)
            self._finish()
        except OSError:
            # The terminal is gone. The run goes on; what would have been shown is in the journal.
            self._console.quiet = True

    def _render(self, record: Record) -> None:
        self._tally.add(record)
        if self._diverged.ends_with(record):
            self._print(self._diverged.summary())
        if not _is_said_by_rank_0(record) and not self._diverged.is_told(record):
            self._print(narrate(record))
        if isinstance(record.event, StepsCommitted):
            self._show_progress(record)

    def _show_progress(self, record: Record) -> None:
        text = self._tally.text(self._num_steps)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self._tally.step, description=text)
            self._progress.refresh()
            return
        last = self._last_progress_ns
        if last is None or seconds(record.time_ns - last) >= PROGRESS_EVERY_S:
            self._last_progress_ns = record.time_ns
            self._last_text = text
            self._print(Line(text, ""))

    def _print(self, line: Line | None) -> None:
        if line is None:
            return
        self._console.print(Text(line.text, style=line.style))
        if self._progress is None:
            sys.stdout.flush()

    def _finish(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._print(self._diverged.summary())
        text = self._tally.text(self._num_steps)
        if self._tally.step and text != self._last_text:
            self._print(Line(text, ""))
