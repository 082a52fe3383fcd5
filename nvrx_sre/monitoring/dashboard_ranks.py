"""The Ranks and nodes dashboard: which rank is late, silent or has a slow GPU, where it runs, what its node lacks.

Model: families of ranks exist under `--rank-metrics all`, their least and greatest values under `summary` (above 64
ranks); a panel shows whichever is there. The last row reads NVIDIA's DCGM exporter, where a site has one, and joins it
to ranks by the GPU's UUID.

Pure. Must not: spell a metric name of ours.
"""

from __future__ import annotations

from nvrx_sre.monitoring.blocks import PERCENTAGE, RANGE, course, now
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

DCGM_UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
DCGM_MEMORY_USED = "DCGM_FI_DEV_FB_USED"
DCGM_TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
DCGM_XID = "DCGM_FI_DEV_XID_ERRORS"
DCGM_SERIES = (DCGM_UTILISATION, DCGM_MEMORY_USED, DCGM_TEMPERATURE, DCGM_XID)
"""Names of dcgm-exporter's default counters (etc/default-counters.csv); its label `UUID` is the GPU's."""


def rows(q: Query) -> list[Row]:
    """All rows in order."""
    return [
        Row(title="Is every rank there and on time?", panels=(*_summary(q), *_ranks(q))),
        Row(title="Where each rank runs", panels=_places(q)),
        Row(title="Nodes", panels=_nodes(q)),
        Row(title="GPUs (with NVIDIA's DCGM exporter)", panels=_gpus(q)),
    ]


def _summary(q: Query) -> tuple[Panel, ...]:
    return (
        stat("Ranks", "Ranks of the newest generation, what was asked for, and the least it may go on with.", "none", 5,
             now(q.latest(catalog.WORLD_SIZE), "now"), now(q.latest(catalog.WORLD_SIZE_CONFIGURED), "configured"),
             now(q.latest(catalog.WORLD_SIZE_MIN), "least"), decimals=0, steps=(Step(color=BLUE),)),
        stat("Standbys", "Processes that can become any rank of their node: ready, and asked for.", "none", 4,
             now(q.latest(catalog.STANDBY_READY), "ready"), now(q.latest(catalog.STANDBYS_CONFIGURED), "asked for"),
             runbooks=("NvrxStandbyMissing",), decimals=0,
             steps=(Step(color=ORANGE), Step(color=GREEN, value=1))),
        stat("Oldest heartbeat", "The rank that has been silent for longest, and the time since its last message.", "s",
             5, now(f"topk by {q.keys()} (1, {_silent_for(q)})", "rank {{rank}}"),
             decimals=1, text_mode="value_and_name",
             steps=(Step(color=GREEN), Step(color=ORANGE, value=10), Step(color=RED, value=60))),
        stat("Slowest rank", "The rank that comes last to the first collective of a step, and how late, smoothed. Step "
             "time would not tell: synchronous ranks all look equal.", "s", 5,
             now(f"topk by {q.keys()} (1, {_by_rank(q, catalog.RANK_LATENESS, 'max')})", "rank {{rank}}"),
             runbooks=("NvrxSlowRank",),
             decimals=3,
             text_mode="value_and_name", steps=(Step(color=BLUE),)),
        stat("Slowest GPU", "The rank whose GPU takes longest for its own compute, and that time, smoothed. Far above "
             "the others: this GPU is slow, or has more work.", "s", 5,
             now(f"topk by {q.keys()} (1, {_by_rank(q, catalog.RANK_GPU_SECONDS, 'max')})", "rank {{rank}}"),
             runbooks=("NvrxSlowRank",), decimals=3, no_value="not measured",
             text_mode="value_and_name", steps=(Step(color=BLUE),)),
    )  # fmt: skip


def _extreme(metric: Metric, end: str) -> Metric:
    least, most, _, _ = catalog.RANK_SUMMARIES[metric.name]
    return least if end == "min" else most


def _by_rank(q: Query, metric: Metric, end: str) -> str:
    """The family of ranks; of a summary, the least or the greatest with its rank as a label."""
    _, _, least_rank, most_rank = catalog.RANK_SUMMARIES[metric.name]
    where = least_rank if end == "min" else most_rank
    rank = f'count_values without () ("rank", {q.latest(where)} >= 0)'
    summary = f"({rank}) * on {q.keys()} group_left () {q.latest(_extreme(metric, end))}"
    return f"({q.latest(metric, 'rank')} or {summary})"


def _heartbeat_age(q: Query, heartbeat: Metric, *by: str) -> str:
    """Age of a heartbeat at the newest turn of its own launcher's loop, by that node's clock."""
    turned = q.series(catalog.LAUNCHER_LOOP)
    one_of_many = "ignoring (rank) group_right () " if by else ""
    aged = f"{turned} - {one_of_many}({q.series(heartbeat)} > 0)"
    return f"max by {q.keys(*by)} (clamp_min({aged}, 0))"


def _silent_for(q: Query) -> str:
    """Ages of the ranks' heartbeats; of a summary, the greatest with its rank as a label."""
    rank = f'count_values without () ("rank", {q.latest(catalog.RANK_SUMMARIES[catalog.RANK_HEARTBEAT.name][2])} >= 0)'
    summary = f"({rank}) * on {q.keys()} group_left () {_heartbeat_age(q, _extreme(catalog.RANK_HEARTBEAT, 'min'))}"
    return f"({_heartbeat_age(q, catalog.RANK_HEARTBEAT, 'rank')} or {summary})"


def _ranks(q: Query) -> tuple[Panel, ...]:
    both = (Override(name="greatest", color=RED), Override(name="least", color=GREY))
    return (
        timeseries(
            "Heartbeat age", "Time since each rank's last message. It comes while the interpreter turns: a rank that "
            "is stuck in a native call falls silent.", "s", 8,
            course(_heartbeat_age(q, catalog.RANK_HEARTBEAT, "rank"), "rank {{rank}}"),
            course(_heartbeat_age(q, _extreme(catalog.RANK_HEARTBEAT, "min")), "greatest"),
            minimum=0, overrides=both,
        ),
        timeseries(
            "Lateness", "How long after the first rank each rank comes to the first collective of a step, smoothed; 0 "
            'where the script has no `ctx.mark("collective")`.', "s", 8,
            course(q.latest(catalog.RANK_LATENESS, "rank"), "rank {{rank}}"),
            course(q.latest(_extreme(catalog.RANK_LATENESS, "max")), "greatest"), minimum=0, overrides=both,
        ),
        timeseries(
            "GPU time", "GPU time of the stretch of a step that is each rank's own compute, smoothed. A rank above the "
            "median has a slow GPU, or more work; one that is late and not above it, a slow host.", "s", 8,
            course(q.latest(catalog.RANK_GPU_SECONDS, "rank"), "rank {{rank}}"),
            course(f"quantile by {q.keys()} (0.5, {q.latest(catalog.RANK_GPU_SECONDS, 'rank')})", "median"),
            course(q.latest(_extreme(catalog.RANK_GPU_SECONDS, "max")), "greatest"),
            course(q.latest(_extreme(catalog.RANK_GPU_SECONDS, "min")), "least"), minimum=0, no_value="not measured",
            overrides=(*both, Override(name="median", color=GREY, dashed=True)),
        ),
        timeseries(
            "Steps", "Steps that each rank has committed.", "none", 6,
            course(q.latest(catalog.RANK_STEP, "rank"), "rank {{rank}}"),
            course(q.latest(_extreme(catalog.RANK_STEP, "max")), "greatest"),
            course(q.latest(_extreme(catalog.RANK_STEP, "min")), "least"), minimum=0, decimals=0, overrides=both,
        ),
        timeseries(
            "Memory of each rank", "Resident memory of each rank's process.", "bytes", 6,
            course(q.latest(catalog.RANK_MEMORY, "rank"), "rank {{rank}}"),
            course(q.latest(_extreme(catalog.RANK_MEMORY, "max")), "greatest"), minimum=0, overrides=both,
        ),
        timeseries(
            "World", "Ranks of the newest generation beside what was asked for.", "none", 6,
            course(q.latest(catalog.WORLD_SIZE), "ranks"),
            course(q.latest(catalog.WORLD_SIZE_CONFIGURED), "configured"),
            course(q.latest(catalog.STANDBY_READY), "standbys ready"), minimum=0, decimals=0,
            overrides=(Override(name="configured", color=GREY, dashed=True),),
        ),
        timeseries(
            "Processes started", "Child processes started in the last hour by role: a node that keeps replacing "
            "workers is a suspect.", "none", 6,
            course(q.gain(catalog.WORKER_STARTS, "role", window="1h"), "{{role}}"), minimum=0, decimals=0,
        ),
    )  # fmt: skip


def _places(q: Query) -> tuple[Panel, ...]:
    faults = f"{q.gain(catalog.NODE_FAULTS, 'node', window=RANGE)} > 0"
    return (
        table(
            "Places", "Node, GPU and pod of each rank.", 14,
            [
                Column(title="Rank", label="rank"),
                Column(title="Node", label="node"),
                Column(title="GPU", label="gpu_uuid"),
                Column(title="Pod", label="pod"),
                Column(title="Ranks", expr=q.latest(catalog.RANK_INFO, "rank", "node", "gpu_uuid", "pod"), hidden=True),
            ],
        ),
        table(
            "Faults by node", "Root faults of the chosen time range whose rank ran on the node.", 10,
            [Column(title="Node", label="node"), Column(title="Faults", expr=faults, decimals=0)],
            sort_by="Faults", no_value="no fault",
        ),
    )  # fmt: skip


def _nodes(q: Query) -> tuple[Panel, ...]:
    def by_node(metric: Metric, kind: str) -> str:
        return f"max by {q.keys('instance')} ({q.series(metric, kind=kind)})"

    used, limit = by_node(catalog.HOST_MEMORY, "used"), by_node(catalog.HOST_MEMORY, "limit")
    slots = by_node(catalog.HOST_MEMORY, "hot_slots")
    disk = f"1 - {by_node(catalog.STORAGE, 'free')} / ({by_node(catalog.STORAGE, 'size')} > 0)"
    shared = f"1 - {by_node(catalog.SHM, 'free')} / ({by_node(catalog.SHM, 'size')} > 0)"
    skew = f"max by {q.keys('instance')} ({q.series(catalog.CLOCK_SKEW)})"
    return (
        timeseries(
            "Host memory", "Memory in use and the hot slots in it, as a share of the limit: the cgroup's, or the "
            "host's where none is set.", PERCENTAGE, 8,
            course(f"{used} / ({limit} > 0)", "{{instance}} used"),
            course(f"{slots} / ({limit} > 0)", "{{instance}} hot slots"),
            runbooks=("NvrxHostMemoryPressure",),
            minimum=0, maximum=1,
        ),
        timeseries(
            "Storage and shared memory", "Used share of the run directory's file system and of /dev/shm.",
            PERCENTAGE, 8,
            course(disk, "{{instance}} run directory"), course(shared, "{{instance}} /dev/shm"),
            runbooks=("NvrxStorageNearFull",),
            minimum=0, maximum=1,
        ),
        timeseries(
            "Clock skew", "System clock minus the clock that stamps the records of a launcher: a step of the clock "
            "since the launcher's start.", "s", 8, course(skew, "{{instance}}"), runbooks=("NvrxClockSkew",),
        ),
        stat("Devices", "NVIDIA devices of the run's nodes: all that NVML sees, those that should have no rank (the "
             "next generation does without them if it is large enough then), those slowed down by heat or hardware. "
             "All 0 without NVML.", "none", 12,
             *(now(f"sum by {q.keys()} ({q.series(catalog.DEVICES, state=state)})", state.value)
               for state in catalog.DeviceCount), runbooks=("NvrxDeviceUnfit",), decimals=0,
             steps=(Step(color=BLUE),)),
        stat("Leftover processes", "Processes of a killed predecessor that a launcher had to end at its start.", "none",
             12, now(f"sum by {q.keys()} ({q.series(catalog.LEFTOVER_PROCESSES)})", "processes"), decimals=0,
             steps=(Step(color=GREEN), Step(color=ORANGE, value=1))),
    )  # fmt: skip


def _gpus(q: Query) -> tuple[Panel, ...]:
    def joined(series: str) -> str:
        """`series` of the GPUs that ranks of this run hold, labelled with rank and node."""
        gpu = f'max by (gpu_uuid) (label_replace({series}, "gpu_uuid", "$1", "UUID", "(.+)"))'
        ranks = q.latest(catalog.RANK_INFO, "rank", "node", "gpu_uuid")
        return f"{ranks} * on (gpu_uuid) group_left () {gpu}"

    gone = "no DCGM exporter"
    return (
        timeseries("GPU utilisation", "Of each rank's GPU. It looks normal in a crash loop: steps redone are work too.",
                   "percent", 12, course(joined(DCGM_UTILISATION), "rank {{rank}} {{node}}"), minimum=0, maximum=100,
                   no_value=gone),
        timeseries("GPU memory", "Frame buffer in use of each rank's GPU.", "decmbytes", 12,
                   course(joined(DCGM_MEMORY_USED), "rank {{rank}} {{node}}"), minimum=0, no_value=gone),
        timeseries("GPU temperature", "Of each rank's GPU.", "celsius", 12,
                   course(joined(DCGM_TEMPERATURE), "rank {{rank}} {{node}}"), minimum=0, no_value=gone),
        timeseries("Xid", "Number of the last Xid error of each rank's GPU; 0 is none.", "none", 12,
                   course(joined(DCGM_XID), "rank {{rank}} {{node}}"), minimum=0, decimals=0, no_value=gone),
    )  # fmt: skip
