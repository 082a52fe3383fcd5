"""The goodput objective: burn rates over several windows, with factors that are computed.

Model: an objective of `slo_goodput` over `slo_period_s` leaves a budget of (1 - objective) x period of lost time. A
window that may burn a share of the budget has the factor share x period / window; its alert fires when the loss
ratio is above factor x (1 - objective), in the window and in a twelfth of it, so that it ends soon after the cause
(Google SRE workbook, chapter 5). A factor that makes the threshold 1 or more can never fire, one below 1 would fire
within the objective: both are refused.

Loss ratio = 1 - time in new steps / (wall time - suspended - halted - evaluation). The denominator is the wall counter,
which grows during a hang; a sum of booked intervals would be 0/0. Rates are taken of recorded counters of the whole
run, so that the time between two pods is in them. A halt was paged, or asked for, when it came. Start-up is excluded by
asking for a step throughout the window, and by asking that most of the window was watched: the first minutes that a new
Prometheus sees of a resumed run are start-up too.

Pure. Raises `UserError` for values whose rule could not fire.
"""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_sre.core.errors import UserError
from nvrx_sre.monitoring.promql import duration, number
from nvrx_sre.monitoring.recordings import Readings, filled
from nvrx_sre.monitoring.rule import AlertRule, RecordingRule
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog

SHORT_WINDOWS = 12
"""Google SRE workbook, chapter 5: the short window is a twelfth of the long one."""
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Burn:
    """One pair of windows."""

    name: str
    window_s: float
    factor: float
    threshold: float
    """Loss ratio above which it burns too fast."""

    @property
    def short_s(self) -> float:
        """Length of the short window (seconds)."""
        return self.window_s / SHORT_WINDOWS


def burns(values: Values) -> tuple[Burn, Burn]:
    """The fast and the slow burn. Raises `UserError` if one cannot fire, or fires within the objective."""
    fast = _burn("fast", values.burn_fast_window_s, values.burn_fast_budget_ratio, values)
    return fast, _burn("slow", values.burn_slow_window_s, values.burn_slow_budget_ratio, values)


def _burn(name: str, window_s: float, share: float, values: Values) -> Burn:
    factor = share * values.slo_period_s / window_s
    threshold = round(factor * (1 - values.slo_goodput), DIGITS)
    what = f"burn_{name}_budget_ratio {share:g} over {window_s:g} s with slo_goodput {values.slo_goodput:g}"
    if threshold >= 1:
        raise UserError(f"{what}: the threshold would be {threshold:g}, a loss that cannot be; the rule never fires")
    if factor < 1:
        raise UserError(f"{what}: the factor would be {factor:g}; the rule fires while the objective is kept")
    if threshold <= 0:
        raise UserError(f"{what}: there is no budget to burn; use an objective below 1")
    return Burn(name=name, window_s=window_s, factor=factor, threshold=threshold)


def loss_series(window_s: float) -> str:
    """Name of the recorded loss ratio over a window."""
    return f"run:nvrx_goodput_loss:ratio_rate{duration(window_s)}"


def slo_recordings(values: Values) -> list[RecordingRule]:
    """The loss ratio over each window of both burns."""
    read = Readings(values)
    windows = sorted({window for burn in burns(values) for window in (burn.short_s, burn.window_s)})
    return [_loss(read, window) for window in windows]


def _loss(read: Readings, window_s: float) -> RecordingRule:
    window = duration(window_s)
    new = f"rate({read.of(catalog.TIME_SECONDS, state='new')}[{window}])"
    excluded = f"rate({read.of(catalog.TIME_SECONDS, state=('suspended', 'halted', 'evaluate'))}[{window}])"
    wall = f"rate({read.of(catalog.WALL_SECONDS)}[{window}])"
    expr = f"1 - max {read.by} ({new})\n/ {read.on}\n(({wall} - {read.on} sum {read.by} ({excluded})) > 0)"
    return RecordingRule(name=loss_series(window_s), expr=filled(expr, read.values), metric=catalog.TIME_SECONDS)


def goodput_alerts(read: Readings) -> list[AlertRule]:
    """A ticket for each burn, and a page if it wastes more GPU-hours an hour than the limit."""
    fast, slow = burns(read.values)
    world = read.of(catalog.WORLD_SIZE_CONFIGURED)
    wasted = f"({loss_series(fast.window_s)} * {read.on} {world}) > {number(read.values.burn_page_gpu_hours)}"
    costly = f"and {read.on}\n({wasted})"
    return [
        _alert(read, fast, "warning", ""),
        _alert(read, slow, "warning", ""),
        _alert(read, fast, "critical", costly),
    ]


def _alert(read: Readings, burn: Burn, severity: str, condition: str) -> AlertRule:
    long, short = loss_series(burn.window_s), loss_series(burn.short_s)
    limit, window = number(burn.threshold), duration(burn.window_s)
    started = f"min_over_time({read.of(catalog.STEP_HIGH_WATER)}[{window}]) > 0"
    wall, least = read.of(catalog.WALL_SECONDS), number(read.values.burn_observed_ratio * burn.window_s)
    watched = f"({wall} - min_over_time({wall}[{window}])) >= {least}"
    clauses = [f"{long} > {limit}", *(f"and {read.on}\n({item})" for item in (f"{short} > {limit}", started, watched))]
    expr = "\n".join([*clauses, *([condition] if condition else []), read.expected])
    page = "costly" if condition else burn.name
    return AlertRule(
        name="NvrxGoodputBurn",
        verdict="loses too much time",
        severity=severity,
        expr=expr,
        keep_firing_s=read.values.hold_s,
        labels=(("burn", page),),
        meaning=f"Over {window}, which was watched, the run lost more than {limit} of its time "
        f"(factor {burn.factor:.3g} of the budget)"
        + (", and wastes more than `burn_page_gpu_hours`." if condition else "."),
        clears="When the loss over the short window is below the threshold, after `hold_s`.",
        summary=f"Run {{{{ $labels.run }}}} loses {{{{ $value | humanizePercentage }}}} of its time ({window}).",
        description=(
            "Time outside new steps (without evaluation, suspension and halts) is above what the objective allows. "
            "`nvrx-sre runbook NvrxGoodputBurn` says where it goes."
        ),
    )
