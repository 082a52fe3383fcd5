"""Multipliers and windows of the rules: one frozen set of values, each with the source of its number.

Model: time limits and budgets come from series that the run exports; what stands here only multiplies them or
says for how long a sample is remembered. A YAML file may override single values (`load_values`); unknown keys
are errors. `values_file` renders those in force with the sources of the defaults as that file.

Thread safety: immutable.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nvrx_sre.core.errors import UserError

COMMENT_WIDTH = 110
_LABEL_NAME = re.compile(r"[a-z][a-z0-9_]*")


_SHARES = (
    "crash_loop_budget_ratio",
    "budget_low_ratio",
    "memory_ratio",
    "storage_free_ratio",
    "slo_goodput",
    "burn_fast_budget_ratio",
    "burn_slow_budget_ratio",
    "burn_observed_ratio",
)
"""Never above 1: a rule on a larger share could not fire."""
_LONGER_THAN = (
    ("halted_memory_s", "sample_memory_s"),
    ("missing_memory_s", "sample_memory_s"),
    ("sample_memory_s", "target_missing_s"),
    ("target_missing_s", "scrapes_missing_s"),
    ("sample_memory_s", "last_save_window_s"),
    ("crash_loop_budget_ratio", "budget_low_ratio"),
    ("burn_slow_window_s", "burn_fast_window_s"),
    ("slo_period_s", "burn_slow_window_s"),
)
"""(name, other): where the first is not above the second a rule would never fire, or never before the other one."""


def _value(default: Any, source: str) -> Any:
    return field(default=default, metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class Values:
    """What a site may tune. Seconds, ratios and addresses."""

    group_labels: tuple[str, ...] = _value(
        ("cluster", "namespace", "run"),
        "What one alert is about. `run` comes from the series, the others from the scrape's labels.",
    )
    crash_loop_budget_ratio: float = _value(
        1.0,
        "Share of a retry budget that attempts without progress must have used before a page. At 1 the page comes "
        "with the attempt that the policy counts as the last (core.limits.CapLimits: 3 in a row, 5 in 30 min).",
    )
    crash_loop_for_s: float = _value(
        0.0,
        "A crash loop of a deterministic fault is over in less than a scrape: any wait would miss it.",
    )
    retry_cap_ratio: float = _value(
        2.0,
        "Formations and launcher starts without progress, over the caps `window` and `startup`, that say that the "
        "caps do not hold. At 2 an operator's `resume`, which refills a budget, does not page.",
    )
    retry_cap_window_s: float = _value(
        1_800.0,
        "Window in which these are counted and in which no new step may fall: core.limits.CapLimits.window_s.",
    )
    recovery_overdue_ratio: float = _value(
        0.5,
        "Share of the summed deadlines of a recovery's phases after which an open incident pages. A deadline is set "
        "several times above what its phase takes, so half of their sum is far beyond any recovery that works.",
    )
    stalled_ratio: float = _value(
        2.0,
        "Multiple of a phase's own deadline without a step. The launcher acts at 1; at 2 it has failed to.",
    )
    rendezvous_ratio: float = _value(
        2.0,
        "Multiple of the rendezvous deadline: a second attempt to form the group is over as well.",
    )
    rendezvous_for_s: float = _value(
        60.0,
        "How long the run must not get past the rendezvous. One that works takes less than a second (benchmark "
        "`recovery`), so it is never seen in two scrapes a minute apart.",
    )
    startup_ratio: float = _value(
        1.0,
        "Multiple of the summed deadlines of the phases before the first step.",
    )
    target_missing_s: float = _value(
        300.0,
        "How long no scrape of a run may succeed that has not ended: five scrapes of a minute, and longer than a pod "
        "on the same node takes to be replaced.",
    )
    missing_memory_s: float = _value(
        86_400.0,
        "How long a run that vanished keeps its alert: a day, so that nobody believes it cured because the series "
        "went stale.",
    )
    launcher_stuck_ratio: float = _value(
        12.0,
        "Multiple of `telemetry.loop_unhealthy_s` (5 s) for which the launcher's loop may stand still: a minute, "
        "beyond a stop of the machine for a snapshot or a slow disk.",
    )
    launcher_stuck_for_s: float = _value(
        120.0,
        "How long scrapes must agree on that: three of a minute. One that meets a launcher as it is let go on after a "
        "stop sees an old turn of its loop.",
    )
    scrapes_missing_s: float = _value(
        120.0,
        "How long no scrape of a run may succeed before that is said (severity info): two scrapes of a minute.",
    )
    last_save_window_s: float = _value(
        180.0,
        "How long after its last save a run that has done its steps may take to end: three scrapes of a minute.",
    )
    checkpoint_stale_ratio: float = _value(
        3.0,
        "Multiple of the expected interval and write time between the newest verified checkpoint and the newest "
        "step: one save may fail and the next be late.",
    )
    checkpoint_stale_for_s: float = _value(60.0, "Two scrapes of half a minute must agree.")
    save_failures: float = _value(2.0, "Failed saves in the window: one alone is made up for by the next.")
    save_failing_window_s: float = _value(1_800.0, "Window of `save_failures`: several intervals of ten minutes.")
    saturation_ratio: float = _value(
        1.0, "Write time over interval: above 1 the next save is due before this one ends."
    )
    saturation_for_s: float = _value(600.0, "Longer than one slow write.")
    flapping_window_s: float = _value(1_800.0, "core.limits.CapLimits.flapping_window_s: the same half hour.")
    event_window_s: float = _value(
        3_600.0,
        "How long a ticket stands for something that happened once (degraded recovery, rejected checkpoint, fresh "
        "start): long enough to be seen in a queue that is looked at hourly.",
    )
    budget_low_ratio: float = _value(0.6, "Share of a retry budget that warns: two of three attempts.")
    budget_low_for_s: float = _value(120.0, "A recovery that works refills the budget sooner (benchmark `recovery`).")
    device_fault_ratio: float = _value(
        1.0,
        "Multiple of the cap `device` in faults on one node within `device_window_s`. The cap itself counts faults "
        "without progress; this counts those that the run recovered from as well.",
    )
    device_window_s: float = _value(
        86_400.0,
        "Llama 3 (arXiv:2407.21783, table 5): 419 interruptions in 54 days over 2,000 nodes, one in 258 days a "
        "node; three a day on one node are no chance.",
    )
    world_shrunk_for_s: float = _value(300.0, "Longer than the replacement of a rank on the same node.")
    standby_missing_for_s: float = _value(600.0, "Longer than a standby needs to import and to build its model.")
    slow_rank_ratio: float = _value(
        0.2,
        "Share of a step's time by which one rank comes late to the first collective: all others wait that long.",
    )
    slow_rank_for_s: float = _value(600.0, "Longer than an evaluation or a loader's epoch boundary on one rank.")
    step_time_ratio: float = _value(
        1.3, "Multiple of the reference step time: variation between runs of one configuration is below a tenth."
    )
    step_time_for_s: float = _value(900.0, "Longer than a neighbour's burst on shared storage or network.")
    memory_ratio: float = _value(
        0.9, "Share of the memory limit without hot slots: the launcher refuses more than 0.8 for them (DESIGN 6)."
    )
    memory_for_s: float = _value(300.0, "Longer than the peak of a checkpoint's write.")
    storage_free_ratio: float = _value(0.1, "Free share of the run directory's file system.")
    storage_checkpoints: float = _value(
        3.0, "Checkpoints that must still fit: the one being written and the two that retention keeps."
    )
    storage_for_s: float = _value(60.0, "Two scrapes of half a minute must agree.")
    telemetry_window_s: float = _value(900.0, "How long a drop or an error of telemetry keeps its ticket.")
    clock_skew_s: float = _value(
        30.0, "A clock this far off makes ages on dashboards wrong by more than two scrapes of 15 s."
    )
    hold_s: float = _value(
        300.0, "How long a ticket on a level stays after it fell: one noisy value does not open it twice."
    )
    slo_goodput: float = _value(
        0.9,
        "Objective of training goodput (time in new steps over wall time; suspension and evaluation excluded). "
        "Llama 3 reports more than 0.9 of effective training time (arXiv:2407.21783).",
    )
    slo_period_s: float = _value(
        604_800.0, "Period of the objective: a week, the length of a sprint or of a short run."
    )
    burn_fast_window_s: float = _value(3_600.0, "Google SRE workbook, chapter 5: 2 % of the budget in an hour.")
    burn_fast_budget_ratio: float = _value(0.02, "Share of the period's budget that the fast window may burn.")
    burn_slow_window_s: float = _value(21_600.0, "Google SRE workbook, chapter 5: 5 % of the budget in six hours.")
    burn_slow_budget_ratio: float = _value(0.05, "Share of the period's budget that the slow window may burn.")
    burn_observed_ratio: float = _value(
        0.9,
        "Share of a burn's window in which the run was watched: what a Prometheus that was just started, or a run that "
        "was just resumed, shows of the first minutes is start-up. Not all of it, for the window's oldest sample may "
        "be younger than it by an evaluation.",
    )
    burn_page_gpu_hours: float = _value(
        64.0,
        "GPU-hours wasted an hour above which a burn pages instead of opening a ticket: eight nodes of eight idle, "
        "about 200 dollars an hour at 3 dollars a GPU-hour (your own price counts).",
    )
    sample_memory_s: float = _value(
        600.0,
        "How long the last sample of a run stands in for a missing one: longer than a pod's replacement "
        "(five minutes until the old series is stale, plus image pull and start).",
    )
    halted_memory_s: float = _value(
        604_800.0,
        "How long a halted run whose endpoint is gone keeps its alert: one week, a long weekend included; "
        "below Prometheus' default retention of 15 days.",
    )
    runbook_base_url: str = _value(
        "https://nvrx-sre.example/runbooks",
        "Where the site serves runbooks/ (`nvrx-sre runbook NAME` prints the same pages).",
    )
    dashboard_base_url: str = _value(
        "https://grafana.example",
        "The site's Grafana.",
    )
    deadman_url: str = _value(
        "https://deadman.example/nvrx-sre",
        "Dead man's switch that a beat of NvrxWatchdog is posted to, Alertmanager's JSON.",
    )
    slack_channel: str = _value(
        "#training",
        "Where tickets are told.",
    )

    def __post_init__(self) -> None:
        _check_labels(self.group_labels)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float):
                _check_number(item.name, value)
        self._check_relations()
        for name in ("runbook_base_url", "dashboard_base_url", "deadman_url"):
            if not getattr(self, name).startswith(("http://", "https://")):
                raise UserError(f"{name} is {getattr(self, name)!r}: use an http or https address")
        if not self.slack_channel.strip():
            raise UserError("slack_channel is empty: name the channel of the tickets")

    def _check_relations(self) -> None:
        for longer, shorter in _LONGER_THAN:
            if getattr(self, longer) <= getattr(self, shorter):
                raise UserError(
                    f"{longer} ({getattr(self, longer)}) must be above {shorter} ({getattr(self, shorter)})"
                )


def _check_number(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise UserError(f"{name} is {value}: use a finite number")
    if name.endswith("_for_s") or name == "hold_s":
        if value < 0:
            raise UserError(f"{name} is {value}: use 0 or more")
    elif not value > 0:
        raise UserError(f"{name} is {value}: use more than 0")
    elif name in _SHARES and value > 1:
        raise UserError(f"{name} is {value}: use at most 1")
    elif name.endswith("_s") and value < 1:
        raise UserError(f"{name} is {value}: use at least 1")


def _check_labels(labels: tuple[str, ...]) -> None:
    if "run" not in labels:
        raise UserError("group_labels must contain 'run': without it one run's alert would hide another's")
    for label in labels:
        if not _LABEL_NAME.fullmatch(label):
            raise UserError(f"group_labels has {label!r}, which is not a label name")


def load_values(path: Path) -> Values:
    """Defaults with the overrides of a YAML file. Raises `UserError` for what does not fit."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read values {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"values {path} cannot be parsed: {error}") from error
    if document is None:
        return Values()
    if not isinstance(document, Mapping):
        raise UserError(f"values {path} must be a mapping of names to values")
    known = {item.name: item for item in dataclasses.fields(Values)}
    changes: dict[str, Any] = {}
    for key, value in document.items():
        if key not in known:
            raise UserError(f"{path}: unknown value {key!r}; known are {', '.join(known)}")
        changes[key] = _convert(f"{path}: {key}", known[key].default, value)
    return Values(**changes)


def _convert(what: str, default: Any, value: Any) -> Any:
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{what} must be a list of label names")
        return tuple(value)
    if isinstance(default, float):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UserError(f"{what} must be a number")
        return float(value)
    if not isinstance(value, str):
        raise UserError(f"{what} must be text")
    return value


def values_file(values: Values) -> str:
    """`values` as a YAML file that `load_values` reads, each with the source of its default."""
    blocks = []
    for item in dataclasses.fields(Values):
        value = getattr(values, item.name)
        source = textwrap.fill(
            item.metadata["source"], width=COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        changed = "" if value == item.default else f"# Changed: the default is {shown(item.default)}.\n"
        blocks.append(f"{source}\n{changed}{item.name}: {shown(value)}\n")
    return "\n".join(blocks)


def shown(value: Any) -> str:
    """One value as the file holds it."""
    return json.dumps(value)
