"""The Checkpoints dashboard: what could be restored now, what saving costs, what went wrong with it.

Pure. Must not: spell a metric name.
"""

from __future__ import annotations

from nvrx_sre.monitoring.blocks import PERCENTAGE, RANGE, RATE_WINDOW, course, distribution, now, percentiles
from nvrx_sre.monitoring.panels import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Column,
    Override,
    Panel,
    Row,
    Step,
    stat,
    table,
    timeseries,
)
from nvrx_sre.monitoring.promql import Query
from nvrx_sre.telemetry import catalog
from nvrx_sre.telemetry.metric import Metric


def rows(q: Query) -> list[Row]:
    """All rows in order."""
    return [
        Row(title="What could be restored now?", panels=_summary(q)),
        Row(title="Freshness and load", panels=_load(q)),
        Row(title="Saves", panels=_saves(q)),
        Row(title="Restores and retention", panels=_restores(q)),
    ]


def _summary(q: Query) -> tuple[Panel, ...]:
    age = q.age(q.latest(catalog.CHECKPOINT_CAPTURED, "tier"))
    step = f"{q.latest(catalog.CHECKPOINT_STEP, 'tier')} >= 0"
    at_risk = f"{q.latest(catalog.STEP_HIGH_WATER)} - ({q.latest(catalog.CHECKPOINT_STEP, tier='durable')} >= 0)"
    return (
        stat("Age", "Age of the newest restorable state of each tier, from its capture; before the first save: from "
             "the run's start.", "s", 6, now(age, "{{tier}}"),
             runbooks=("NvrxCheckpointStale",),
             decimals=0, steps=(Step(color=BLUE),)),
        stat("Step", "The newest restorable step of each tier.", "none", 5, now(step, "{{tier}}"), decimals=0,
             steps=(Step(color=BLUE),), no_value="none yet"),
        stat("Steps at risk", "Steps that would be trained again if the node and its hot slots were lost now.", "none",
             4, now(at_risk, "steps"), decimals=0, steps=(Step(color=BLUE),), no_value="no save yet"),
        stat("Saturation now", "Write time of a durable save over the expected interval: above 1 saves are skipped.",
             PERCENTAGE, 4, now(q.latest(catalog.CHECKPOINT_SATURATION), "rho"),
             runbooks=("NvrxCheckpointSaturated",),
             decimals=1,
             steps=(Step(color=GREEN), Step(color=ORANGE, value=0.7), Step(color=RED, value=1.0))),
        stat("Size", "Size of the newest durable commit, and memory of all hot slots.", "bytes", 5,
             now(q.latest(catalog.CHECKPOINT_SIZE), "durable"), now(q.latest(catalog.HOT_SLOTS_BYTES), "hot slots"),
             decimals=1, steps=(Step(color=BLUE),)),
    )  # fmt: skip


def _load(q: Query) -> tuple[Panel, ...]:
    wall = q.rate(catalog.WALL_SECONDS, window=RATE_WINDOW)
    blocked = f"{q.rate(catalog.TIME_SECONDS, window=RATE_WINDOW, state='checkpoint_block')} / {wall}"
    return (
        timeseries(
            "Age of the newest state", "Age of the newest restorable state of each tier, beside the interval that is "
            "expected of the durable one.", "s", 8,
            course(q.age(q.latest(catalog.CHECKPOINT_CAPTURED, "tier")), "{{tier}}"),
            course(f"{q.latest(catalog.CHECKPOINT_INTERVAL)} > 0", "expected interval"), minimum=0,
            overrides=(Override(name="expected interval", color=GREY, dashed=True),),
        ),
        timeseries(
            "Time that training waited", "Share of wall time in which the step loop was blocked by checkpointing, and "
            "cost of the hot captures as the launcher measured it.", PERCENTAGE, 8,
            course(blocked, "blocked"),
            course(q.latest(catalog.HOT_CAPTURE_COST), "cost of hot captures"), minimum=0,
        ),
        timeseries(
            "Saturation", "Write time of a durable save over the expected interval: above 1 saves are skipped.",
            PERCENTAGE, 8, course(q.latest(catalog.CHECKPOINT_SATURATION), "rho"), minimum=0,
        ),
        timeseries(
            "Hot tier", "Steps between hot captures in force (0: off), slots a rank, and ranks of the leader's node "
            "that have room for a snapshot on their device.", "none", 8,
            course(q.latest(catalog.HOT_INTERVAL), "steps between captures"),
            course(q.latest(catalog.HOT_SLOTS), "slots"),
            course(q.latest(catalog.HOT_SNAPSHOTS), "ranks with snapshots"), minimum=0, decimals=0,
        ),
        timeseries(
            "Write time", "Time that the newest durable save took, commit included, and how long the save in flight "
            "has been running.", "s", 8,
            course(q.latest(catalog.CHECKPOINT_WRITE_SECONDS), "newest save"),
            course(q.age(f"{q.latest(catalog.SAVE_STARTED)} > 0"), "in flight"), minimum=0,
        ),
        timeseries(
            "Goodput at stake", "Training goodput beside its part that a verified durable commit holds: the gap is "
            "what a lost node costs.", PERCENTAGE, 8,
            course(q.latest(catalog.GOODPUT_RATIO, "kind", kind=("training", "durable")), "{{kind}}"),
            minimum=0, maximum=1,
        ),
    )  # fmt: skip


def _counts(
    q: Query, title: str, description: str, metric: Metric, *labels: str, width: int = 8, runbooks: tuple[str, ...] = ()
) -> Panel:
    """A table of what a counter gained in the time range by its labels, empty where nothing did."""
    columns = [Column(title=label.capitalize(), label=label) for label in labels]
    columns.append(Column(title="Number", expr=f"{q.gain(metric, *labels, window=RANGE)} > 0", decimals=0))
    description += " In the chosen time range."
    return table(title, description, width, columns, sort_by="Number", no_value="none", runbooks=runbooks)


def _saves(q: Query) -> tuple[Panel, ...]:
    return (
        _counts(q, "Saves", "Due saves by tier and outcome.", catalog.SAVES, "tier", "outcome", width=6),
        _counts(q, "Skipped", "Due saves that did not happen, by tier and reason.", catalog.SAVES_SKIPPED, "tier",
                "reason", width=6),
        _counts(q, "Failed", "Durable saves that had started and did not commit, or were no good when they were read "
                "back, by reason.", catalog.SAVE_FAILURES, "reason", width=6, runbooks=("NvrxCheckpointSaveFailing",)),
        _counts(q, "Not read back", "Committed saves whose reader was lost, by reason: a restore checks them.",
                catalog.SAVES_UNVERIFIED, "reason", width=6, runbooks=("NvrxCheckpointStale",)),
        percentiles(
            q, "Parts of a save", "Sealed on all ranks until taken over, written, renamed into place, read back.",
            catalog.SAVE_SECONDS, catalog.SAVE_MAX, "stage",
        ),
        distribution(
            q, "Time to write", "Durable saves of the chosen time range by the time to write them (upper bound of the "
            "bucket, seconds).", 12, catalog.SAVE_SECONDS, stage="write",
        ),
    )  # fmt: skip


def _restores(q: Query) -> tuple[Panel, ...]:
    return (
        _counts(q, "Restores", "Generations by where their state came from.", catalog.RESTORES, "tier"),
        _counts(q, "Rejected", "Checkpoints found unusable, by reason. They are moved aside, never deleted.",
                catalog.CHECKPOINT_REJECTED, "reason", runbooks=("NvrxCheckpointRejected",)),
        _counts(q, "Fresh starts", "Generations that began at step 0; lost: steps had been committed before.",
                catalog.FRESH_STARTS, "progress", runbooks=("NvrxSilentFreshStart",)),
        timeseries(
            "Restored step", "Step of the newest restore beside the highest step ever committed.", "none", 12,
            course(q.latest(catalog.STEP_HIGH_WATER), "high water"),
            course(f"{q.latest(catalog.RESTORED_STEP)} >= 0", "restored"), decimals=0, minimum=0,
        ),
        percentiles(
            q, "Deletions by retention", "Time to delete a checkpoint that is no longer kept.",
            catalog.CHECKPOINT_DELETION_SECONDS, catalog.CHECKPOINT_DELETION_MAX,
        ),
    )  # fmt: skip
