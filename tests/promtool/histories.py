"""Stories for every alert: quiet, a single recovery, fires, resolves; pods replaced, scrapes missed, runs side by side.

Each function returns runs for a set of `Values`; spans are computed from them, so that the same stories hold for the
shipped values and for quicker ones. Times are seconds; nothing alerts before a run has begun.
"""

from __future__ import annotations

from dataclasses import replace

from nvrx_sre.events.schema import FaultClass, Phase, RestoredFrom
from nvrx_sre.monitoring.values import Values
from nvrx_sre.telemetry import catalog
from tests.promtool.fleet import DEADLINES, END, Level, Run, jump
from tests.promtool.folded import phases_of
from tests.stories import Story

BEGIN = [(60, "start"), (120, "train")]
LOOP = [*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo"), (720.5, "fault")]
"""The third attempt and a halt at 721 are within one scrape, whatever its interval."""
SKEWED = "NvrxClockSkew"
HALT, CRASH, OVERDUE, STALLED = "NvrxRunHalted", "NvrxCrashLooping", "NvrxRecoveryOverdue", "NvrxRunStalled"
RENDEZVOUS, STARTUP, BREACHED = "NvrxRendezvousStuck", "NvrxStartupOverdue", "NvrxRetryCapBreached"
MISSING, STUCK, STALE, LOW = "NvrxTargetMissing", "NvrxLauncherStuck", "NvrxCheckpointStale", "NvrxRetryBudgetLow"
RECOVERY_S = sum(DEADLINES[phase] for phase in ("teardown", "init", "rendezvous", "rebuild", "load", "first_step"))
STARTUP_S = RECOVERY_S - DEADLINES["teardown"]
STEP_S = max(DEADLINES["step"], DEADLINES["data"])
"""A wait for data is exported as part of the step."""
UNHEALTHY_S = 5


def stuck_after_s(v: Values) -> float:
    """How long a loop stands still before it pages."""
    return v.launcher_stuck_ratio * UNHEALTHY_S + v.launcher_stuck_for_s


HELD = frozenset(
    {
        STALLED,
        OVERDUE,
        STARTUP,
        BREACHED,
        "NvrxUnknownProgress",
        "NvrxSlowRank",
        "NvrxStepTimeRegressed",
        SKEWED,
    }
)
"""Alerts that fire for `hold_s` after their condition went away."""
ENDING = (
    *("stale", "saves-fail", "rejected", "saturated", "slow-rank", "steps-regressed", "degraded", "unknown-progress"),
    *("standby-missing", "fresh-start-lost-progress", "memory-pressure", "storage-full", "one-node-fails"),
    "device-unfit",
    *("telemetry-drops", "clock-ahead", "catalog-differs", "launcher-stuck"),
)
"""Stories of which a second version ends while its alert fires."""


def with_ends(runs: list[Run], v: Values) -> list[Run]:
    """For stories in `ENDING` another version that finishes, beside a healthy run of the same name elsewhere."""
    found = list(runs)
    for run in runs:
        if run.name in ENDING:
            ((alert, ((begin, _),)),) = run.fires.items()
            at = begin + 190
            fires = {alert: [(begin, at + (v.hold_s if alert in HELD else 0))]}
            found.append(replace(run, name=f"{run.name}-finished", events=[*run.events, (at, "finished")], fires=fires))
            found.append(Run(f"{run.name}-finished", BEGIN, namespace="research"))
    return found


def stories(v: Values) -> list[Run]:
    """All runs."""
    return [run for theme in THEMES for run in with_ends(theme(v), v)]


def healthy(v: Values) -> list[Run]:
    """Nothing to say: training, recovering once or often with progress, finished, preempted, missed scrapes."""
    many = [event for n in range(8) for event in ((600 + 90 * n, "fault"), (602 + 90 * n, "progress"))]
    half = [
        event
        for n in range(4)
        for event in ((600 + 90 * n, "fault"), (602 + 90 * n, "redo"), (610 + 90 * n, "progress"))
    ]
    return [
        Run("quiet", BEGIN),
        Run("quiet-namesake", BEGIN, namespace="research"),
        Run("quiet-without-cluster", BEGIN, cluster=None),
        Run("one-recovery", [*BEGIN, (600, "fault"), (601, "redo"), (605, "progress")]),
        Run("one-recovery-scrapes-lost", [*BEGIN, (600, "fault"), (601, "redo"), (605, "progress")], lost=(0, END, 0)),
        Run(
            "one-recovery-by-a-new-pod",
            [*BEGIN, (600, "fault"), (620, "start"), (660, "redo"), (680, "progress")],
            pods=(("old", 0, 605), ("new", 621, END)),
        ),
        Run("two-recoveries", [*BEGIN, (600, "fault"), (602, "progress"), (632, "fault"), (634, "progress")]),
        Run("eight-recoveries", [*BEGIN, *many]),
        Run("four-recoveries-with-redo", [*BEGIN, *half]),
        Run("one-retry-of-nonfinite", [*BEGIN, (600, "fault"), (601, "redo"), (900, "progress")], caps=("nonfinite",)),
        Run(
            "a-device-is-excluded",
            [*BEGIN, *[(600 + 30 * n, what) for n in range(4) for what in ("fault", "redo")], (730, "progress")],
            caps=("device",),
        ),
        Run("finished", [*BEGIN, (900, "finished")], pods=(("pod-0", 0, 970),)),
        Run("failed", [(60, "start"), (100, "failed")], pods=(("pod-0", 0, 230),)),
        Run(
            "preempted",
            [*BEGIN, (900, "draining"), (910, "preempted"), (1500, "start"), (1530, "train")],
            pods=(("old", 0, 915), ("new", 1501, END)),
        ),
        Run("overlapping-pods", BEGIN, pods=(("old", 0, 1200), ("new", 900, END))),
    ]


def crash_loops(v: Values) -> list[Run]:
    """Attempts without progress."""
    low, overdue = (660 + v.budget_low_for_s, END), (600 + v.recovery_overdue_ratio * RECOVERY_S, END)
    whole = {CRASH: [(720, END)], LOW: [low], OVERDUE: [overdue]}

    def until(end: float, **more: object) -> dict[str, list[tuple[float, float]]]:
        return {CRASH: [(720, end)], LOW: [(low[0], end)], **more}  # type: ignore[dict-item]  # spans of more alerts

    two = [*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo")]
    slow = [*BEGIN, (600, "fault"), (602, "redo"), (1140, "fault"), (1142, "redo"), (1680, "fault")]
    startup = [(60, "start"), (300, "fault"), (600, "fault"), (900, "fault")]
    again = [*LOOP, (721, "halted"), (1000, "start"), (1060, "redo")]
    reset = [*LOOP, (721, "halted"), (960, "reset"), (961, "start"), (980, "redo"), (1020, "fault"), (1022, "progress")]
    later, gone = [*LOOP, (840, "halted")], (("old", 0, 910),)
    return [
        Run("loop", LOOP, whole),
        Run("loop-without-cluster", LOOP, whole, cluster=None),
        Run("loop-of-a-dev-run", LOOP, whole, priority="dev"),
        Run("loop-scrapes-lost", LOOP, whole, lost=(780, END, 0)),
        Run("loop-most-scrapes-lost", LOOP, whole, lost=(780, 1500, 4)),
        Run("loop-pod-replaced", LOOP, whole, pods=(("old", 0, 900), ("new", 1080, END))),
        Run(
            "loop-series-gone",
            LOOP,
            {
                CRASH: [(720, 900 + v.sample_memory_s)],
                LOW: [(low[0], 900 + v.sample_memory_s)],
                MISSING: [(900 + v.target_missing_s, END)],
            },
            pods=(("old", 0, 901),),
        ),
        Run("two-attempts", two, {LOW: [low]}),
        Run("two-attempts-overlapping-pods", two, {LOW: [low]}, pods=(("old", 0, 970), ("new", 930, END))),
        Run(
            "attempts-far-apart",
            slow,
            {CRASH: [(1680, END)], LOW: [(1140 + v.budget_low_for_s, END)], OVERDUE: [(1682 + STEP_S, END)]},
        ),
        Run(
            "loop-before-the-first-step",
            startup,
            {CRASH: [(900, END)], LOW: [(600 + v.budget_low_for_s, END)], OVERDUE: [(300 + overdue[0] - 600, END)]},
            caps=("same_fingerprint",),
        ),
        Run("loop-cured", [*LOOP, (1200, "progress")], until(1200)),
        Run(
            "loop-pod-replaced-then-cured",
            [*LOOP, (1210, "advance"), (1230, "progress")],
            {CRASH: [(720, 1210)], LOW: [(low[0], 1230)]},
            pods=(("old", 0, 900), ("new", 1080, END)),
        ),
        Run(
            "loop-new-steps-not-safe-yet",
            [*LOOP, (1200, "advance"), (1500, "progress")],
            {CRASH: [(720, 1200)], LOW: [(low[0], 1500)]},
        ),
        Run(
            "loop-overlapping-pods-cured",
            [*LOOP, (960, "progress")],
            until(960),
            pods=(("old", 0, 955), ("new", 940, END)),
        ),
        Run(
            "loop-halted-resubmitted-with-budgets",
            [*again, (1300, "progress")],
            {CRASH: [(720, 1000)], HALT: [(721, 1000)], LOW: [(1000 + v.budget_low_for_s, 1300)]},
            pods=(("old", 0, 850), ("new", 1000, END)),
        ),
        Run(
            "loop-halted-resumed-then-one-fault",
            reset,
            {CRASH: [(720, 961)], HALT: [(721, 961)]},
            pods=(("old", 0, 850), ("new", 961, END)),
        ),
        Run("loop-halted-later", later, {CRASH: [(720, END)], LOW: [(low[0], 840)]}, pods=gone),
        Run(
            "loop-halted-later-resubmitted",
            [*later, (1500, "start"), (1520, "progress")],
            {CRASH: [(720, 1500)], LOW: [(low[0], 840)]},
            pods=(*gone, ("new", 1500, END)),
        ),
        Run(
            "loop-cured-then-halted",
            [*LOOP, (780, "progress"), (840, "halted")],
            {CRASH: [(720, 780)], HALT: [(840, END)]},
            pods=gone,
        ),
    ]


def halts(v: Values) -> list[Run]:
    """A run that stopped for good keeps saying so."""
    halted = [*BEGIN, (600, "fault"), (601, "halted")]
    end = 601 + 250
    pods = (("old", 0, end), ("new", 1000, 2000))
    return [
        Run("halted", halted, {HALT: [(601, END)]}, pods=(("old", 0, end),)),
        Run("halted-namesake", halted, {HALT: [(601, END)]}, pods=(("old", 0, end),)),
        Run("halted-namesake", halted, {HALT: [(601, END)]}, pods=(("old", 0, end),), namespace="research"),
        Run("halted-seen-once", halted, {HALT: [(601, END)]}, pods=(("old", 0, 665),)),
        Run("halted-scrapes-lost", halted, {HALT: [(601, END)]}, pods=(("old", 0, end),), lost=(0, END, 0)),
        Run(
            "halted-resubmitted",
            [*halted, (1000, "start"), (1060, "train")],
            {HALT: [(601, 1000)]},
            pods=(("old", 0, end), ("new", 1000, END)),
        ),
        Run(
            "halted-resubmitted-finished",
            [*halted, (1000, "start"), (1060, "train"), (1900, "finished")],
            {HALT: [(601, 1000)]},
            pods=pods,
        ),
        Run(
            "halted-twice",
            [*halted, (1000, "start"), (1060, "train"), (1800, "fault"), (1801, "halted")],
            {HALT: [(601, 1000), (1801, END)]},
            pods=pods,
        ),
    ]


def recoveries(v: Values) -> list[Run]:
    """An incident that stays open; not one that redoes steps, nor one that is a little shorter."""
    limit, hold = v.recovery_overdue_ratio * RECOVERY_S, v.hold_s
    fault = [*BEGIN, (600, "fault")]
    return [
        Run("overdue", fault, {OVERDUE: [(600 + limit, END)]}),
        Run("overdue-scrapes-lost", fault, {OVERDUE: [(600 + limit, END)]}, lost=(700, END, 0)),
        Run("overdue-pod-replaced", fault, {OVERDUE: [(600 + limit, END)]}, pods=(("old", 0, 900), ("new", 1080, END))),
        Run("overdue-cured", [*fault, (1900, "progress")], {OVERDUE: [(600 + limit, 1900 + hold)]}),
        Run("not-overdue-yet", [*fault, (600 + limit - 10, "progress")]),
        Run("not-overdue-redoing", [*fault, (700, "redo"), (2300, "progress")]),
        Run("overdue-halted", [*fault, (1900, "halted")], {OVERDUE: [(600 + limit, 1900 + hold)], HALT: [(1900, END)]}),
        Run(
            "overdue-at-a-step-deadline-away",
            [*fault, (605, "redo"), (1800, "fault")],
            {OVERDUE: [(1800 + STEP_S, END)]},
            caps=(),
        ),
        Run("overdue-preempted", [*fault, (1900, "draining")], {OVERDUE: [(600 + limit, 1900 + hold)]}),
        Run("not-overdue-redoing-slow-steps", [*fault, (605, "redo"), (2300, "progress")], levels=TEN_MINUTES),
        Run("overdue-finished-anyway", [*fault, (1900, "finished")], {OVERDUE: [(600 + limit, 1900 + hold)]}),
    ]


TEN_MINUTES: dict[tuple[str, ...], Level] = {
    (catalog.STEP_SECONDS.name,): 600,
    (catalog.STEP_REFERENCE.name,): 600,
    (catalog.LAST_STEP.name,): lambda now: max(120, now // 600 * 600 + 5),
}
"""A step each ten minutes, which feeds its deadline within."""


LATE = [*BEGIN, (600, "fault"), (905, "progress")]


def _phases_with_a_late_rank() -> dict[tuple[str, ...], Level]:
    """Restored at 606, rank 0 commits at 640 and waits for rank 1, whose first step may take five minutes."""
    story = Story(live=False)
    story.start(60)
    story.steps(story.form(100, 0, RestoredFrom.FRESH), 120, 1, 100)
    story.fault(600, 600, FaultClass.KILLED, 1)
    story.torn_down(605)
    began_s = story.form(606, 100, RestoredFrom.HOT)
    story.phase(640, Phase.STEP, ranks=(0,))
    story.steps(began_s, 905, 101, 101)
    return phases_of(story.records)


def stalls(v: Values) -> list[Run]:
    """No step and no fault; not in a phase that may last, nor with steps that flow."""
    ratio = v.stalled_ratio
    step, evaluate = ratio * STEP_S, ratio * DEADLINES["evaluate"]
    entered = catalog.PHASE_ENTERED.name
    stop = [*BEGIN, (600, "stop")]
    saving = (catalog.SAVE_STARTED.name,)
    return [
        Run("stalled", stop, {STALLED: [(600 + step, END)]}),
        Run("stalled-scrapes-lost", stop, {STALLED: [(600 + step, END)]}, lost=(600, END, 0)),
        Run("stalled-pod-replaced", stop, {STALLED: [(600 + step, END)]}, pods=(("old", 0, 900), ("new", 1020, END))),
        Run("stalled-goes-on", [*stop, (1500, "train")], {STALLED: [(600 + step, 1500 + v.hold_s)]}),
        Run(
            "stalled-detected-after-all",
            [*stop, (1500, "fault"), (1510, "progress")],
            {STALLED: [(600 + step, 1500 + v.hold_s)]},
        ),
        Run("last-save-of-a-run", [*BEGIN, (570, "stop"), (865, "finished")], levels={saving: jump(570, 0, 570)}),
        Run("stalled-while-saving", stop, {STALLED: [(900, END)]}, levels={saving: jump(600, 0, 600)}),
        Run(
            "stalled-but-gone",
            stop,
            {MISSING: [(600 + v.target_missing_s, END)]},
            pods=(("old", 0, 600),),
        ),
        Run("stalled-hardly-answers", stop, {STALLED: [(960, END)]}, lost=(400, END, 16)),
        Run("hardly-answers", BEGIN, lost=(400, END, 16)),
        Run(
            "stalled-in-slow-data",
            stop,
            {STALLED: [(601 + ratio * 300, END)]},
            levels={(entered, "data"): jump(601, 0, 601), (catalog.PHASE_DEADLINE.name, "data"): 300},
        ),
        Run("not-stalled-yet", [*stop, (600 + step - 5, "train")]),
        Run("steps-between-scrapes", BEGIN, lost=(300, END, 0), levels={(catalog.PHASE_DEADLINE.name, "step"): 5}),
        Run(
            "stalled-in-data",
            stop,
            {STALLED: [(601 + ratio * DEADLINES["data"], END)]},
            levels={(entered, "data"): jump(601, 0, 601)},
        ),
        Run(
            "stalled-in-a-save",
            stop,
            {STALLED: [(601 + ratio * DEADLINES["save"], END)]},
            levels={(entered, "save"): jump(601, 0, 601)},
        ),
        Run(
            "evaluating",
            [*BEGIN, (600, "stop"), (600 + evaluate - 30, "train")],
            levels={(entered, "evaluate"): jump(601, 0, 601)},
        ),
        Run("recovers-while-one-rank-executes-its-first-step", LATE, levels=_phases_with_a_late_rank()),
        Run(
            "recovers-with-a-slow-step-and-short-deadlines",
            [*BEGIN, (600, "fault"), (605, "redo"), (606, "stop"), (780, "progress")],
            levels={(catalog.PHASE_DEADLINE.name, "step"): 4},
        ),
        Run("steps-of-ten-minutes-that-tell-of-their-progress", BEGIN, levels=TEN_MINUTES),
        Run("stalled-and-finished", [*stop, (1500, "finished")], {STALLED: [(600 + step, 1500 + v.hold_s)]}),
    ]


def rendezvous(v: Values) -> list[Run]:
    """The group does not form: at once, or attempt after attempt."""
    limit, wait = v.rendezvous_ratio * DEADLINES["rendezvous"], v.rendezvous_for_s
    forming = [*BEGIN, (600, "fault"), (610, "rendezvous")]
    fails = [(610 + 60 * n, what) for n in range(30) for what in ("recovering", "rendezvous")]
    overdue = (600 + v.recovery_overdue_ratio * RECOVERY_S, END)
    return [
        Run("rendezvous-stuck", forming, {RENDEZVOUS: [(600 + limit + wait, END)], OVERDUE: [overdue]}),
        Run(
            "rendezvous-stuck-scrapes-lost",
            forming,
            {RENDEZVOUS: [(600 + limit + wait, END)], OVERDUE: [overdue]},
            lost=(600, END, 0),
        ),
        Run(
            "rendezvous-fails-again-and-again",
            [*BEGIN, (600, "fault"), *fails],
            {RENDEZVOUS: [(600 + limit + wait, END)], OVERDUE: [overdue]},
        ),
        Run("rendezvous-passed-stuck-in-load", [*forming, (650, "restoring")], {OVERDUE: [overdue]}),
        Run(
            "rendezvous-may-take-long",
            forming,
            {
                RENDEZVOUS: [(600 + v.rendezvous_ratio * 300 + wait, END)],
                OVERDUE: [(overdue[0] + v.recovery_overdue_ratio * 240, END)],
            },
            levels={(catalog.PHASE_DEADLINE.name, "rendezvous"): 300},
        ),
        Run(
            "rendezvous-forms-at-last",
            [*forming, (1300, "restoring"), (1310, "progress")],
            {RENDEZVOUS: [(600 + limit + wait, 1300)]},
        ),
        Run("rendezvous-in-time", [*forming, (600 + limit + wait - 10, "restoring"), (800, "progress")]),
        Run(
            "rendezvous-after-a-long-start",
            [*BEGIN, (600, "fault"), (900, "rendezvous"), (915, "restoring"), (920, "progress")],
        ),
        Run(
            "rendezvous-at-start-without-nodes",
            [(60, "start"), (300, "rendezvous")],
            {RENDEZVOUS: [(300 + limit + wait, END)], STARTUP: [(60 + v.startup_ratio * STARTUP_S, END)]},
            levels={(catalog.RENDEZVOUS_NODES.name, "missing"): 1},
        ),
        Run(
            "rendezvous-stuck-halted",
            [*forming, (1200, "halted")],
            {RENDEZVOUS: [(600 + limit + wait, 1200)], HALT: [(1200, END)]},
        ),
    ]


def startups(v: Values) -> list[Run]:
    """No first step; not while a fault is known, nor a little earlier."""
    limit, hold = v.startup_ratio * STARTUP_S, v.hold_s
    return [
        Run("startup-overdue", [(60, "start")], {STARTUP: [(60 + limit, END)]}),
        Run("startup-overdue-scrapes-lost", [(60, "start")], {STARTUP: [(60 + limit, END)]}, lost=(60, END, 0)),
        Run("startup-overdue-cured", [(60, "start"), (1800, "train")], {STARTUP: [(60 + limit, 1800 + hold)]}),
        Run("startup-in-time", [(60, "start"), (60 + limit - 5, "train")]),
        Run(
            "startup-after-a-resubmission", [*BEGIN, (400, "retrying"), (500, "start")], {STARTUP: [(500 + limit, END)]}
        ),
        Run("startup-with-a-fault", [(60, "start"), (1500, "fault"), (2200, "progress")]),
        Run("startup-overdue-finished", [(60, "start"), (1800, "finished")], {STARTUP: [(60 + limit, 1800 + hold)]}),
    ]


def breaches(v: Values) -> list[Run]:
    """More formations or launchers without a step than the caps allow, with budgets that say nothing."""
    window = v.retry_cap_window_s
    most = int(v.retry_cap_ratio * LIMITS_WINDOW)
    starts = int(v.retry_cap_ratio * LIMITS_STARTUP)

    def forming(count: int, at: float, gap: float = 20) -> list[tuple[float, str]]:
        return [*BEGIN, (600, "recovering"), *((at + gap * n, "redo") for n in range(count))]

    quiet = {"caps": ()}
    at = 600 + window - 250
    return [
        Run("cap-breached", forming(most + 1, at), {BREACHED: [(600 + window, at + window + v.hold_s)]}, **quiet),
        Run("cap-just-kept", forming(most, at), **quiet),
        Run(
            "cap-breached-scrapes-lost",
            forming(most + 1, at),
            {BREACHED: [(600 + window, at + window + v.hold_s)]},
            lost=(600, END, 0),
            **quiet,
        ),
        Run(
            "cap-breached-pod-replaced",
            forming(most + 1, at),
            {BREACHED: [(600 + window, at + window + v.hold_s)]},
            pods=(("old", 0, at + 90), ("new", at + 70, END)),
            **quiet,
        ),
        Run(
            "often-formed-with-progress",
            [*BEGIN, *((600 + 20 * n, what) for n in range(40) for what in ("redo", "train"))],
            **quiet,
        ),
        Run(
            "launchers-past-the-cap",
            [*BEGIN, (600, "recovering"), *((at + 20 * n, "start") for n in range(starts + 1))],
            {BREACHED: [(600 + window, at + window + v.hold_s)], STARTUP: [(at + 20 * starts + STARTUP_S, END)]},
            **quiet,
        ),
        Run(
            "launchers-just-kept",
            [*BEGIN, (600, "recovering"), *((at + 20 * n, "start") for n in range(starts))],
            {STARTUP: [(at + 20 * (starts - 1) + STARTUP_S, END)]},
            **quiet,
        ),
        Run(
            "cap-breached-then-new-steps",
            [*forming(most + 1, at), (600 + window + 150, "train")],
            {BREACHED: [(600 + window, 600 + window + 150 + v.hold_s)]},
            **quiet,
        ),
        Run(
            "cap-breached-then-halted",
            [*forming(most + 1, at), (600 + window + 150, "halted")],
            {BREACHED: [(600 + window, 600 + window + 150 + v.hold_s)], HALT: [(600 + window + 150, END)]},
            **quiet,
        ),
    ]


LIMITS_WINDOW, LIMITS_STARTUP = 5, 3


def missing(v: Values) -> list[Run]:
    """A run that vanished, against one that ended and one whose scrapes come and go."""
    gone, stuck = 900 + v.target_missing_s, 900 + stuck_after_s(v)
    return [
        Run("vanished", BEGIN, {MISSING: [(gone, END)]}, pods=(("old", 0, 900),)),
        Run("vanished-came-back", BEGIN, {MISSING: [(gone, 1500)]}, pods=(("old", 0, 900), ("new", 1500, END))),
        Run("vanished-shortly", BEGIN, pods=(("old", 0, 900), ("new", gone - 90, END))),
        Run(
            "exit-75-and-nobody-starts-it",
            [*BEGIN, (890, "retrying")],
            {MISSING: [(gone, END)]},
            pods=(("old", 0, 900),),
        ),
        Run("vanished", BEGIN, namespace="research"),
        Run("ended-and-gone", [*BEGIN, (800, "finished")], pods=(("old", 0, 900),)),
        Run(
            "stuck-and-answering",
            BEGIN,
            {STUCK: [(stuck, END)]},
            levels={(catalog.LAUNCHER_LOOP.name,): lambda now: min(now, 900.0)},
        ),
        Run("two-of-three-scrapes", BEGIN, lost=(300, END, 0)),
        Run(
            "vanished-while-training", [*BEGIN], {MISSING: [(gone, END)]}, pods=(("old", 0, 900),), namespace="research"
        ),
    ]


def stuck_launchers(v: Values) -> list[Run]:
    """The loop stands still while scrapes are answered."""
    loop, step = (catalog.LAUNCHER_LOOP.name,), (catalog.LAST_STEP.name,)
    stuck = 900 + stuck_after_s(v)
    frozen = {loop: lambda now: min(now, 900.0)}
    back = {loop: lambda now: now if now >= 1500 else min(now, 900.0)}
    let_go = {loop: lambda now: now if now >= 1_080 else min(now, 900.0)}
    beside = (("pod-1", 0, END), ("pod-2", 0, END))
    slow = {loop: lambda now: (now - 60) // 120 * 120 + 60}  # it turned when the run began
    return [
        Run("launcher-stuck", BEGIN, {STUCK: [(stuck, END)]}, levels=frozen),
        Run("launcher-stuck-steps-too", BEGIN, {STUCK: [(stuck, END)]}, levels={**frozen, step: frozen[loop]}),
        Run("launcher-stuck-scrapes-lost", BEGIN, {STUCK: [(stuck, END)]}, levels=frozen, lost=(700, END, 0)),
        Run("launcher-gone", BEGIN, {MISSING: [(900 + v.target_missing_s, END)]}, pods=(("old", 0, 900),)),
        Run(
            "launcher-stuck-hardly-answers",
            BEGIN,
            {STUCK: [(1_200 + v.launcher_stuck_for_s, END)]},
            levels=frozen,
            lost=(690, END, 16),
        ),
        Run("launcher-turns-again", BEGIN, {STUCK: [(stuck, 1500)]}, levels=back),
        Run("launcher-let-go-on-in-time", BEGIN, levels=let_go),
        Run("launcher-stuck-beside-others", BEGIN, {STUCK: [(stuck, END)]}, levels=frozen, followers=beside),
        Run(
            "launcher-gone-beside-others",
            BEGIN,
            {MISSING: [(900 + v.target_missing_s, END)]},
            pods=(("pod-0", 0, 900),),
            followers=beside,
        ),
        Run("other-node-gone", BEGIN, followers=(("pod-1", 0, 900),)),
        Run("launcher-slow", BEGIN, levels=slow),
        Run("launcher-lingers-finished", [*BEGIN, (905, "finished")], levels=frozen),
    ]


def checkpoints(v: Values) -> list[Run]:
    """What is at risk, what fails, what does not fit."""
    captured = (catalog.CHECKPOINT_CAPTURED.name, "durable")
    failed = (catalog.SAVES.name, "durable", "failed")
    rejected = (catalog.CHECKPOINT_REJECTED.name, "checksum")
    rho = (catalog.CHECKPOINT_SATURATION.name,)
    limit = v.checkpoint_stale_ratio * (300 + 10)
    stale = 600 + limit + v.checkpoint_stale_for_s
    short = 600 + v.save_failing_window_s
    event = 600 + v.event_window_s
    hold = {captured: lambda now: min(600.0, max(60.0, now // 300 * 300))}
    back = {captured: lambda now: now // 300 * 300 + 200 if now >= 1710 else min(600.0, max(60.0, now // 300 * 300))}
    return [
        Run("stale", BEGIN, {STALE: [(stale, END)]}, levels=hold),
        Run("stale-scrapes-lost", BEGIN, {STALE: [(stale, END)]}, levels=hold, lost=(600, END, 0)),
        Run(
            "stale-pod-replaced",
            BEGIN,
            {STALE: [(stale, END)]},
            levels=hold,
            pods=(("old", 0, 900), ("new", 1080, END)),
        ),
        Run("stale-saved-at-last", BEGIN, {STALE: [(stale, 1710)]}, levels=back),
        Run(
            "stale-falls-back",
            BEGIN,
            {STALE: [(1500 + v.checkpoint_stale_for_s, END)]},
            levels={captured: lambda now: 60.0 if now >= 1500 else max(60.0, now // 300 * 300)},
        ),
        Run(
            "not-stale-a-save-is-late",
            BEGIN,
            levels={captured: lambda now: 600.0 + (now >= 600 + limit) * (now - 1500) if now >= 600 else 60.0},
        ),
        Run("not-stale-standing-still", [*BEGIN, (700, "fault"), (705, "redo")], levels=hold, caps=()),
        Run("not-stale-without-saves", BEGIN, levels={**hold, (catalog.CHECKPOINT_INTERVAL.name,): 0}),
        Run("not-stale-slow-storage", BEGIN, levels={**hold, (catalog.CHECKPOINT_WRITE_SECONDS.name,): 6_000}),
        Run(
            "saves-fail",
            BEGIN,
            {"NvrxCheckpointSaveFailing": [(600, short - 100)]},
            levels={failed: lambda now: 0 if now < 500 else 1 if now < 600 else 2},
        ),
        Run(
            "saves-fail-from-the-first-scrape",
            [(600, "start"), (601, "train")],
            {"NvrxCheckpointSaveFailing": [(615, 600 + v.save_failing_window_s)]},
            levels={failed: 2},
            pods=(("new", 601, END),),
        ),
        Run("one-save-failed", BEGIN, levels={failed: jump(600, 0, 1)}),
        Run(
            "saves-failed-long-ago",
            BEGIN,
            levels={failed: 7},
            fires={"NvrxCheckpointSaveFailing": [(60, v.save_failing_window_s)]},
        ),
        Run("rejected", BEGIN, {"NvrxCheckpointRejected": [(600, event)]}, levels={rejected: jump(600, 0, 1)}),
        Run(
            "rejected-scrapes-lost",
            BEGIN,
            {"NvrxCheckpointRejected": [(600, event)]},
            levels={rejected: jump(600, 0, 1)},
            lost=(580, END, 0),
        ),
        Run(
            "rejected-pod-replaced",
            BEGIN,
            {"NvrxCheckpointRejected": [(640, event)]},
            levels={rejected: jump(600, 0, 1)},
            pods=(("old", 0, 590), ("new", 640, END)),
        ),
        Run(
            "saturated",
            BEGIN,
            {"NvrxCheckpointSaturated": [(600 + v.saturation_for_s, 1800)]},
            levels={rho: jump(600, 0.9, 1.1, 1800)},
        ),
        Run(
            "saturated-scrapes-lost",
            BEGIN,
            {"NvrxCheckpointSaturated": [(600 + v.saturation_for_s, 1800)]},
            levels={rho: jump(600, 0.9, 1.1, 1800)},
            lost=(600, END, 0),
        ),
        Run("nearly-saturated", BEGIN, levels={rho: 0.99}),
        Run("saturated-once", BEGIN, levels={rho: jump(600, 0.9, 1.1, 600 + v.saturation_for_s - 60)}),
    ]


def steps(v: Values) -> list[Run]:
    """Slow ranks and slow steps."""
    late, step = (catalog.RANK_LATENESS.name, "2"), (catalog.STEP_SECONDS.name,)
    summary = (catalog.RANK_SUMMARIES[catalog.RANK_LATENESS.name][1].name,)
    slow, regressed = 600 + v.slow_rank_for_s, 600 + v.step_time_for_s
    hidden = {(catalog.RANK_LATENESS.name, rank): lambda now: None for rank in "0123"}
    return [
        Run(
            "slow-rank", BEGIN, {"NvrxSlowRank": [(slow, 1500 + v.hold_s)]}, levels={late: jump(600, 0.01, 0.25, 1500)}
        ),
        Run(
            "slow-rank-scrapes-lost",
            BEGIN,
            {"NvrxSlowRank": [(slow, END)]},
            levels={late: jump(600, 0.01, 0.25)},
            lost=(600, END, 0),
        ),
        Run(
            "slow-rank-summary",
            BEGIN,
            {"NvrxSlowRank": [(slow, END)]},
            levels={**hidden, summary: jump(600, 0.01, 0.25)},
        ),
        Run("rank-a-little-late", BEGIN, levels={late: 0.19}),
        Run("rank-late-for-a-moment", BEGIN, levels={late: jump(600, 0.01, 0.5, slow - 60)}),
        Run("all-steps-slow-together", BEGIN, levels={step: 100, late: 0.5, (catalog.STEP_REFERENCE.name,): 0}),
        Run(
            "steps-regressed",
            BEGIN,
            {"NvrxStepTimeRegressed": [(regressed, regressed + 660 + v.hold_s)]},
            levels={step: jump(600, 1, 1.35, regressed + 660)},
        ),
        Run("steps-vary", BEGIN, levels={step: 1.25}),
        Run("steps-regressed-for-a-moment", BEGIN, levels={step: jump(600, 1, 1.35, regressed - 60)}),
        Run(
            "steps-slow-in-a-smaller-world",
            BEGIN,
            {"NvrxWorldShrunk": [(600 + v.world_shrunk_for_s, END)]},
            levels={step: jump(600, 1, 1.35), (catalog.WORLD_SIZE.name,): jump(600, 4, 3)},
        ),
    ]


def tickets(v: Values) -> list[Run]:
    """Recoveries that are not as they should be."""
    used = (catalog.BUDGET_USED.name, "unknown_progress")
    degraded, fresh = (catalog.INCIDENTS_DEGRADED.name,), (catalog.FRESH_STARTS.name, "lost")
    world, standby = (catalog.WORLD_SIZE.name,), (catalog.STANDBY_READY.name,)
    flaps = [event for n in range(3) for event in ((600 + 60 * n, "fault"), (602 + 60 * n, "flap"))]
    event = 600 + v.event_window_s
    flapping = {"NvrxFlapping": [(602, 722 + v.flapping_window_s)]}
    shrunk, unready = 600 + v.world_shrunk_for_s, 600 + v.standby_missing_for_s
    return [
        Run("flapping", [*BEGIN, *flaps], flapping),
        Run("flapping-scrapes-lost", [*BEGIN, *flaps], flapping, lost=(600, END, 0)),
        Run(
            "flapping-pod-replaced",
            [*BEGIN, *flaps],
            {"NvrxFlapping": [(640, 722 + v.flapping_window_s)]},
            pods=(("old", 0, 595), ("new", 640, END)),
        ),
        Run("flapping-finished", [*BEGIN, *flaps, (900, "finished")], {"NvrxFlapping": [(602, 900)]}),
        Run("degraded", BEGIN, {"NvrxRecoveredDegraded": [(600, event)]}, levels={degraded: jump(600, 0, 1)}),
        Run("degraded-again", BEGIN, {"NvrxRecoveredDegraded": [(60, v.event_window_s)]}, levels={degraded: 3}),
        Run(
            "budget-refilled-in-time",
            [
                *BEGIN,
                (600, "fault"),
                (602, "redo"),
                (660, "fault"),
                (662, "redo"),
                (660 + v.budget_low_for_s - 30, "progress"),
            ],
        ),
        Run(
            "budget-low-then-refilled",
            [*BEGIN, (600, "fault"), (602, "redo"), (660, "fault"), (662, "redo"), (1200, "progress")],
            {LOW: [(660 + v.budget_low_for_s, 1200)]},
        ),
        Run(
            "unknown-progress",
            BEGIN,
            {"NvrxUnknownProgress": [(600, 1200 + v.hold_s)]},
            levels={used: jump(600, 0, 1, 1200)},
        ),
        Run("world-shrunk", BEGIN, {"NvrxWorldShrunk": [(shrunk, 1500)]}, levels={world: jump(600, 4, 3, 1500)}),
        Run(
            "world-shrunk-scrapes-lost",
            BEGIN,
            {"NvrxWorldShrunk": [(shrunk, END)]},
            levels={world: jump(600, 4, 3)},
            lost=(600, END, 0),
        ),
        Run("world-shrunk-shortly", BEGIN, levels={world: jump(600, 4, 3, shrunk - 60)}),
        Run("world-of-one", BEGIN, {"NvrxWorldShrunk": [(shrunk, END)]}, levels={world: jump(600, 4, 1)}),
        Run(
            "budget-of-one",
            BEGIN,
            levels={(catalog.BUDGET_LIMIT.name, "startup"): 1, (catalog.BUDGET_USED.name, "startup"): 1},
        ),
        Run(
            "budget-of-two",
            BEGIN,
            {LOW: [(600 + v.budget_low_for_s, END)]},
            levels={(catalog.BUDGET_LIMIT.name, "startup"): 2, (catalog.BUDGET_USED.name, "startup"): jump(600, 0, 2)},
        ),
        Run("world-not-formed-yet", BEGIN, levels={world: 0}),
        Run(
            "world-shrunk-finished",
            [*BEGIN, (1500, "finished")],
            {"NvrxWorldShrunk": [(shrunk, 1500)]},
            levels={world: jump(600, 4, 3)},
        ),
        Run(
            "standby-missing", BEGIN, {"NvrxStandbyMissing": [(unready, 1500)]}, levels={standby: jump(600, 1, 0, 1500)}
        ),
        Run("standby-replaced", BEGIN, levels={standby: jump(600, 1, 0, unready - 60)}),
        Run("no-standby-wanted", BEGIN, levels={standby: 0, (catalog.STANDBYS_CONFIGURED.name,): 0}),
        Run(
            "fresh-start-lost-progress",
            BEGIN,
            {"NvrxSilentFreshStart": [(600, event)]},
            levels={fresh: jump(600, 0, 1)},
        ),
        Run("fresh-start-of-a-new-run", BEGIN, levels={(catalog.FRESH_STARTS.name, "none"): jump(600, 1, 2)}),
    ]


def nodes(v: Values) -> list[Run]:
    """Memory, storage, devices."""
    used, free = (catalog.HOST_MEMORY.name, "used"), (catalog.STORAGE.name, "free")
    faults, elsewhere = (catalog.NODE_FAULTS.name, "node-2", "node"), (catalog.NODE_FAULTS.name, "node-1", "node")
    program = (catalog.NODE_FAULTS.name, "node-2", "other")
    unfit = (catalog.DEVICES.name, "unfit")
    pressed, full = 600 + v.memory_for_s, 600 + v.storage_for_s
    tight = (v.memory_ratio + 0.01) * 60e9 + 40e9
    device = {"NvrxRepeatedDeviceFault": [(900, END)]}
    count = {faults: lambda now: sum(now >= at for at in (600, 750, 900))}
    return [
        Run(
            "memory-pressure",
            BEGIN,
            {"NvrxHostMemoryPressure": [(pressed, 1500)]},
            levels={used: jump(600, 60e9, tight, 1500)},
        ),
        Run(
            "memory-pressure-scrapes-lost",
            BEGIN,
            {"NvrxHostMemoryPressure": [(pressed, END)]},
            levels={used: jump(600, 60e9, tight)},
            lost=(600, END, 0),
        ),
        Run("device-unfit", BEGIN, {"NvrxDeviceUnfit": [(600, 1500)]}, levels={unfit: jump(600, 0, 1, 1500)}),
        Run("devices-throttled", BEGIN, levels={(catalog.DEVICES.name, "throttled"): jump(600, 0, 4)}),
        Run("memory-mostly-slots", BEGIN, levels={used: (v.memory_ratio - 0.02) * 60e9 + 40e9}),
        Run("memory-peak", BEGIN, levels={used: jump(600, 60e9, tight, pressed - 60)}),
        Run(
            "storage-full",
            BEGIN,
            {"NvrxStorageNearFull": [(full, 1500)]},
            levels={free: jump(600, 5e11, 0.95e11, 1500)},
        ),
        Run(
            "storage-small",
            BEGIN,
            {"NvrxStorageNearFull": [(full, END)]},
            levels={free: jump(600, 5e11, 4e11), (catalog.CHECKPOINT_SIZE.name,): 1.5e11},
        ),
        Run("storage-enough", BEGIN, levels={free: 1.05e11, (catalog.CHECKPOINT_SIZE.name,): 0.33e11}),
        Run("storage-not-read", BEGIN, levels={(catalog.STORAGE.name, "size"): 0, free: 0}),
        Run("one-node-fails", BEGIN, device, levels=count),
        Run("one-node-fails-pod-replaced", BEGIN, device, levels=count, pods=(("old", 0, 760), ("new", 700, END))),
        Run("one-line-of-the-program-fails", BEGIN, levels={program: count[faults], faults: jump(600, 0, 2)}),
        Run(
            "faults-on-two-nodes",
            BEGIN,
            levels={faults: jump(600, 0, 2), elsewhere: jump(600, 0, 1)},
        ),
    ]


def monitoring(v: Values) -> list[Run]:
    """Telemetry, clocks, versions."""
    dropped, errors = ((metric.name, "journal") for metric in (catalog.TELEMETRY_DROPPED, catalog.TELEMETRY_ERRORS))
    skew = (catalog.CLOCK_SKEW.name,)
    build = catalog.BUILD_INFO.name
    lasting = 600 + v.telemetry_window_s
    other = {(build, catalog.VERSION): lambda now: None, (build, "0" * 8): 1}
    return [
        Run("telemetry-drops", BEGIN, {"NvrxTelemetryDropping": [(600, lasting)]}, levels={dropped: jump(600, 0, 5)}),
        Run("telemetry-errs", BEGIN, {"NvrxTelemetryDropping": [(600, lasting)]}, levels={errors: jump(600, 0, 1)}),
        Run("telemetry-count-starts-anew", BEGIN, levels={dropped: lambda now: None if now < 60 else 0}),
        Run("clock-set-back", BEGIN, {SKEWED: [(600, 1200 + v.hold_s)]}, levels={skew: jump(600, 0, -31, 1200)}),
        Run("clock-ahead", BEGIN, {SKEWED: [(60, END)]}, ahead_s=40),
        Run("clock-nearly-right", BEGIN, levels={skew: 29}, ahead_s=29),
        Run("catalog-differs", BEGIN, {"NvrxCatalogMismatch": [(v.sample_memory_s, END)]}, levels=other),
        Run(
            "catalog-upgraded",
            BEGIN,
            levels={
                (build, "0" * 8): lambda now: 1 if now < 300 else None,
                (build, catalog.VERSION): lambda now: None if now < 300 else 1,
            },
        ),
    ]


def clocks(v: Values) -> list[Run]:
    """Hosts whose clocks are minutes off, and gaps between scrapes: a run that is well pages nobody, one that is not
    pages when it should."""
    late = [(700, "start"), (760, "train")]
    skewed, later = {SKEWED: [(60, END)]}, {SKEWED: [(700, END)]}
    stop, fault = [*BEGIN, (600, "stop")], [*BEGIN, (600, "fault")]
    step, limit = v.stalled_ratio * STEP_S, v.recovery_overdue_ratio * RECOVERY_S
    forming = v.rendezvous_ratio * DEADLINES["rendezvous"] + v.rendezvous_for_s
    ahead, behind = {"ahead_s": 300.0}, {"ahead_s": -300.0, "pods": (("pod-0", 690, END),)}
    loop = (catalog.LAUNCHER_LOOP.name,)
    gap = {"lost": (900, 1_080, 10**6)}
    recovery = [(600, "fault"), (601, "redo"), (605, "progress")]
    rendezvous = [(1_200, "fault"), (1_210, "rendezvous")]
    return [
        Run("five-minutes-ahead", [*BEGIN, *recovery], skewed, **ahead),
        Run("five-minutes-behind", [*late, *((at + 600, what) for at, what in recovery)], later, **behind),
        Run("ahead-with-a-gap", BEGIN, skewed, ahead_s=300, **gap),
        Run("gap-of-three-minutes", BEGIN, **gap),
        Run("gap-in-a-recovery", [*BEGIN, (890, "fault"), (892, "redo"), (1_075, "progress")], **gap),
        Run("gap-of-a-run-without-steps-for-long", [*stop, (690, "train")], **gap),
        Run("shown-by-an-exporter", fault, {OVERDUE: [(600 + limit, END)]}, levels={loop: lambda now: None}),
        Run("stalled-ahead", stop, {**skewed, STALLED: [(600 + step, END)]}, **ahead),
        Run("stalled-behind", [*late, (1_200, "stop")], {**later, STALLED: [(1_200 + step, END)]}, **behind),
        Run("overdue-ahead", fault, {**skewed, OVERDUE: [(600 + limit, END)]}, **ahead),
        Run("overdue-behind", [*late, (1_200, "fault")], {**later, OVERDUE: [(1_200 + limit, END)]}, **behind),
        Run("startup-ahead", [(60, "start")], {**skewed, STARTUP: [(60 + v.startup_ratio * STARTUP_S, END)]}, **ahead),
        Run(
            "rendezvous-behind",
            [*late, *rendezvous, (2_000, "restoring")],
            {**later, RENDEZVOUS: [(1_200 + forming, 2_000)], OVERDUE: [(1_200 + limit, END)]},
            **behind,
        ),
        Run(
            "gone-ahead",
            BEGIN,
            {SKEWED: [(60, 900 + v.sample_memory_s + v.hold_s)], MISSING: [(900 + v.target_missing_s, END)]},
            ahead_s=300,
            pods=(("pod-0", 0, 900),),
        ),
        Run(
            "launcher-stuck-ahead",
            BEGIN,
            {**skewed, STUCK: [(900 + stuck_after_s(v), END)]},
            levels={loop: lambda now: min(now, 900.0)},
            **ahead,
        ),
    ]


THEMES = (
    *(healthy, crash_loops, halts, recoveries, stalls, rendezvous, startups, breaches, missing, stuck_launchers),
    *(checkpoints, steps, tickets, nodes, monitoring, clocks),
)
